"""A barrier in shared memory that watches its peers: no worker waits for a dead one."""

from __future__ import annotations

import os
import select
import threading
import time
import weakref

import torch
from torch import Tensor

from lockstep.errors import PeerLostError
from lockstep.workers.rank import Worker

_LINE_BYTES = 64
_SPINS = 200
_PAUSE_SECONDS = 20e-6
_LOOK_EVERY, _CHECK_EVERY = 100, 2_000


class SpinBarrier:
    """Each worker counts its arrivals in a cache line of its own, and waits until the counts of all are there.

    Args:
        block: `num_bytes` shared bytes, zeros at first.
        worker: this one; all of them make the barrier together.
    """

    @staticmethod
    def num_bytes(num_workers: int) -> int:
        """Shared bytes that a barrier needs."""
        return num_workers * _LINE_BYTES

    def __init__(self, block: Tensor, worker: Worker) -> None:
        counts = block.view(torch.int64)[:: _LINE_BYTES // 8].numpy()
        self._counts, self._mine = counts, counts[worker.rank : worker.rank + 1]
        self._arrivals = 0
        self._lock = threading.Lock()
        self._name, self._group = worker.name, worker.group
        pids = worker.group.gather(os.getpid())
        self._peers = {_open_process(pid, rank): rank for rank, pid in enumerate(pids) if rank != worker.rank}
        self._close = weakref.finalize(self, _close_all, list(self._peers))
        self._poll = select.poll()
        for descriptor in self._peers:
            self._poll.register(descriptor, select.POLLIN)

    def wait(self) -> None:
        """Return once every worker has arrived as often as this one; what they wrote before is then visible here."""
        self._arrivals += 1
        self._fence()
        self._mine[0] = self._arrivals
        waits = 0
        while self._counts.min() < self._arrivals:
            waits += 1
            if waits > _SPINS:
                time.sleep(_PAUSE_SECONDS)
            if waits % _LOOK_EVERY == 0:
                self._group.check_peers()
            if waits % _CHECK_EVERY == 0:
                self._check_peers()
        self._fence()

    def _fence(self) -> None:
        # x86 keeps stores in order by itself. Elsewhere the atomics of a lock do it, and it takes two rounds: nothing
        # moves up past the second acquire, which itself cannot pass the first release.
        for _ in range(2):
            self._lock.acquire()
            self._lock.release()

    def _check_peers(self) -> None:
        """Raise PeerLostError for a worker whose process has ended, or that is known to be gone in another way."""
        gone = sorted(self._peers[descriptor] for descriptor, _ in self._poll.poll(0))
        missing = [rank for rank in gone if self._counts[rank] < self._arrivals]
        if missing:
            names = ", ".join(self._group.names[rank] for rank in missing)
            if self._group.peers is not None:  # the watcher of this host, or the launcher, is about to know why
                raise self._group.peers.lost(f"{names} has ended")
            raise PeerLostError(
                f"{self._name} waits in the exchange for a worker that is gone.",
                given=names,
                expected="all workers to come to the barrier",
                hint="read what that worker said last; its launcher reports the cause",
            )

    def close(self) -> None:
        """Close the descriptors of the peers; the end of the barrier's life does so too."""
        self._close()


def _open_process(pid: object, rank: int) -> int:
    """A descriptor of another worker's process, by the pid that it has sent."""
    try:
        return os.pidfd_open(pid if type(pid) is int else -1)
    except (OSError, OverflowError) as error:
        raise PeerLostError(
            f"worker {rank} is no process on this host.",
            given=f"process {pid!r} ({error})",
            expected="the workers of an exchange through shared memory on one host, in one container",
            hint="read what that worker said last; or use AllReduce('gloo')",
        ) from None


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
