"""Transports that add up by the fixed tree, through the memory of a host or over a network; and blocks of tensors.

Tensors of a step travel in blocks of bytes with a fixed layout, by the order of the parameters: it never changes after
the first step, so a resumed run adds up in the same order as the one that was stopped.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from lockstep.errors import PeerLostError, WorkerError
from lockstep.exchange.collectives import Backend, Messages, collectives
from lockstep.exchange.tree import PartialSum, TreeSum, reduction, rows_of_workers
from lockstep.spans import span
from lockstep.tensors import copy_all, reading_waits
from lockstep.workers.group import MEMORY_NAME
from lockstep.workers.rank import Worker

ONE_ROUND_BYTES = 1 << 16
"""Up to here every worker adds up all columns: a second round of messages would cost more than the bytes it saves."""
ALIGNMENT_BYTES = 64
_LINE_BYTES = 64
_SPINS = 200
_PAUSE_SECONDS = 20e-6
_LOOK_EVERY, _CHECK_EVERY = 100, 2_000
_SEALS = sum(getattr(fcntl, f"F_SEAL_{name}", 0) for name in ("SHRINK", "GROW", "SEAL"))  # which Linux has alone


class SharedMemoryTransport:
    """Sums over all towers through one block of shared memory, always by the fixed tree.

    The block has a row for each node of the tree that a worker owns, and one for the result. Each worker writes its
    nodes; then worker w adds up its share of the columns over all rows, in tree order, into the result. Every worker
    reads the whole result and makes the whole update on parameters of its own, so a kill can never leave parameters
    half updated for the others.

    Two barriers a step are enough: the result of one step is overwritten only behind the first barrier of the next,
    which every worker reaches after its update.
    """

    def __init__(self, worker: Worker, num_towers: int) -> None:
        self._worker = worker
        rows, self._additions = rows_of_workers(num_towers, worker.num_workers)
        self._own_rows, self._num_rows = slice(rows[worker.rank].start, rows[worker.rank].stop), rows[-1].stop
        self._rows: list[list[Tensor]] = []
        self._result: list[Tensor] = []
        self._reductions: list[Callable[[], None]] = []
        self._barrier: SpinBarrier | None = None

    def total(self, sums: TreeSum) -> PartialSum:
        """Return the sum over all towers; valid until the next call, never to be changed."""
        if self._barrier is None:
            self._barrier = self._open(FlatLayout(pack(sums.nodes[0][1])))
        for row, (_, partial) in zip(self._rows, sums.nodes, strict=True):
            torch._foreach_copy_(row, pack(partial))
        self._barrier.wait()
        for reduce in self._reductions:
            reduce()
        self._barrier.wait()
        return unpack(self._result, owned=False)

    def close(self) -> None:
        """Let go of the block; it vanishes with the last worker."""
        if self._barrier is not None:
            self._barrier.close()
        self._rows, self._result, self._reductions, self._barrier = [], [], [], None

    def _open(self, layout: FlatLayout) -> SpinBarrier:
        """Map the chief's block once all workers agree on its layout; returns the barrier at its head."""
        worker = self._worker
        worker.group.agree("the tensors to exchange", layout.describe())
        header = SpinBarrier.num_bytes(worker.num_workers)
        block = _map_together(worker, header + (self._num_rows + 1) * layout.num_bytes)
        barrier = SpinBarrier(block[:header], worker)
        *rows, result = (block[header + i * layout.num_bytes :][: layout.num_bytes] for i in range(self._num_rows + 1))
        self._rows = [layout.views(row) for row in rows[self._own_rows]]
        self._result = layout.views(result)
        share = layout.share(worker.rank, worker.num_workers)
        self._reductions = layout.reductions(share, [row[share] for row in rows], result[share], self._additions)
        return barrier


class TreeTransport:
    """Sums over all towers by messages of torch.distributed from worker to worker, always by the fixed tree.

    The bits are those of one worker, whatever carries the messages. All-reduce does not promise that: it adds up in an
    order of its own, which depends on the number of workers, on their ranks and on where an element lies.

    As in shared memory, each node of the tree that a worker owns is a row of bytes, and each worker adds up its share
    of the columns. It takes two rounds: a worker sends every other one that one's share of its rows; then, having added
    up its own, it sends the sum to all. Where the towers of each worker are one node, as 8 towers are on 2, 4 or 8
    workers, these are as many bytes as all-reduce sends; 8 towers on 3 workers are 2 + 2 + 1 rows.

    All workers make it together; the backend is "gloo" between CPU hosts, "nccl" between GPUs.
    """

    def __init__(self, worker: Worker, backend: Backend, num_towers: int) -> None:
        self._worker = worker
        self._collectives = collectives(worker, backend)
        self._rows_of, self._additions = rows_of_workers(num_towers, worker.num_workers)
        self._rows = self._sent = torch.empty(0)
        """This worker's rows, and what is sent of them: themselves, or a copy where the backend can read it. The first
        of them becomes the sum."""
        self._views: list[list[Tensor]] = []
        self._reductions: list[Callable[[], None]] = []
        self._rounds: list[Messages] = []

    def total(self, sums: TreeSum) -> PartialSum:
        """Return the sum over all towers; valid until the next call.

        Where the host does not wait for it, what has not come is NaN, since a worker was lost.
        """
        operands = [pack(partial, self._worker.device) for _, partial in sums.nodes]
        if not self._views:
            self._open(FlatLayout(operands[0]))
        for views, tensors in zip(self._views, operands, strict=True):
            copy_all(views, tensors)
        if self._sent is not self._rows:
            self._sent.copy_(self._rows)
        parts, *sums_of_shares = self._rounds
        self._collectives.exchange(parts)
        for reduce in self._reductions:
            reduce()
        for messages in sums_of_shares:
            self._collectives.exchange(messages)
        if self._sent is not self._rows:
            self._rows[0].copy_(self._sent[0])
        return unpack(self._views[0], owned=True)

    def close(self) -> None:
        """Give back the memory; the process group stays, since others use it, until the worker leaves its run."""
        self._rows = self._sent = torch.empty(0)
        self._views, self._reductions, self._rounds = [], [], []

    def _open(self, layout: FlatLayout) -> None:
        """Make this worker's rows, and plan the messages, once all workers agree on the layout."""
        worker, ranks = self._worker, range(self._worker.num_workers)
        worker.group.agree("the tensors to exchange", layout.describe())
        num_rows = [len(rows) for rows in self._rows_of]
        self._rows = torch.zeros(num_rows[worker.rank], layout.num_bytes, dtype=torch.uint8, device=worker.device)
        self._views = [layout.views(row) for row in self._rows]
        self._sent = self._rows
        if worker.device.type != "cpu" and not self._collectives.are_enqueued:  # gloo sends what the host has
            self._sent = torch.empty(self._rows.shape, dtype=torch.uint8, pin_memory=True)
        others = [rank for rank in ranks if rank != worker.rank]
        in_one_round = layout.num_bytes <= ONE_ROUND_BYTES
        shares = [layout.share(0, 1) if in_one_round else layout.share(rank, len(ranks)) for rank in ranks]
        mine = shares[worker.rank]
        columns = [self._sent.new_empty(rows, mine.stop - mine.start) for rows in num_rows]
        columns[worker.rank] = self._sent[:, mine]
        total = self._sent[0]
        self._reductions = layout.reductions(mine, [*chain(*columns)], total[mine], self._additions)
        parts = Messages(
            [(rank, row[shares[rank]]) for rank in others for row in self._sent],
            [(rank, row) for rank in others for row in columns[rank]],
        )
        sums = Messages([(rank, total[mine]) for rank in others], [(rank, total[shares[rank]]) for rank in others])
        self._rounds = [parts] if in_one_round else [parts, sums]


def _map_together(worker: Worker, num_bytes: int) -> Tensor:
    """Map one block of zeros in all workers: a file without a name, so nothing is left behind whoever is killed."""
    descriptor = worker.group.share_memory(create_memory(num_bytes) if worker.is_chief else None)
    try:
        check_memory(descriptor, num_bytes)
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def create_memory(num_bytes: int) -> int:
    """A memfd of zeros, which vanishes with the last process that has it.

    Nobody can change its size: touching a mapping that was cut off kills the process.
    """
    descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def check_memory(descriptor: int, num_bytes: int) -> None:
    """Refuse memory of another size, or of one that may change."""
    found = os.fstat(descriptor).st_size
    # Only a memfd has seals.
    if found != num_bytes or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise WorkerError(
            "The memory that the chief shares is not the one to exchange gradients in.",
            given=f"{found} bytes",
            expected=f"{num_bytes} bytes whose size is sealed",
            hint="start all workers with the same version of Lockstep, and let nobody else reach their store",
        )


@dataclass(frozen=True)
class _Segment:
    """The tensors of one dtype, one after the other, in a block of bytes."""

    dtype: torch.dtype
    offset_bytes: int
    num_elements: int

    def of(self, block: Tensor) -> Tensor:
        """The segment's elements in a block (uint8, one-dimensional)."""
        return block[self.offset_bytes : self.offset_bytes + self.num_elements * self.dtype.itemsize].view(self.dtype)


class FlatLayout:
    """Where each tensor of a list lies in one block of bytes: by dtype in order of first appearance, then by the list.

    A tensor keeps its strides: its memory lies in the block as it is.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [(t.shape, t.stride(), t.dtype) for t in tensors]
        self.segments: list[_Segment] = []
        self.num_bytes = 0
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            num_elements = sum(t.numel() for t in tensors if t.dtype == dtype)
            self.segments.append(_Segment(dtype, self.num_bytes, num_elements))
            self.num_bytes += -(-num_elements * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def describe(self) -> list[str]:
        """One line a tensor, equal on two workers exactly where their layouts are.

        Torch leaves open which stride a dimension of size 1 has: a sum may have another one than its parts.
        """
        return [
            f"{tuple(shape)} {tuple(s if size > 1 else 1 for size, s in zip(shape, strides, strict=True))} {dtype}"
            for shape, strides, dtype in self._shapes
        ]

    def views(self, block: Tensor) -> list[Tensor]:
        """The tensors in a block of `num_bytes` bytes, in the order of the list."""
        rest = {segment.dtype: segment.of(block) for segment in self.segments}
        views = []
        for shape, stride, dtype in self._shapes:
            num_elements = shape.numel()
            views.append(rest[dtype][:num_elements].as_strided(shape, stride))
            rest[dtype] = rest[dtype][num_elements:]
        return views

    def share(self, rank: int, num_workers: int) -> slice:
        """The bytes that one of several workers adds up: whole cache lines, so that no two write to the same one."""
        first, last = (self.num_bytes // ALIGNMENT_BYTES * each // num_workers for each in (rank, rank + 1))
        return slice(first * ALIGNMENT_BYTES, last * ALIGNMENT_BYTES)

    def reductions(
        self, share: slice, rows: Sequence[Tensor], result: Tensor, plan: list[tuple[int, int]]
    ) -> list[Callable[[], None]]:
        """Functions that add up a share of the bytes of some rows, into that share of a result: one a dtype."""
        found = []
        for segment in self.segments:
            start = max(share.start, segment.offset_bytes)
            stop = min(share.stop, segment.offset_bytes + segment.num_elements * segment.dtype.itemsize)
            if start < stop:
                *each, total = (
                    row[start - share.start : stop - share.start].view(segment.dtype) for row in (*rows, result)
                )
                found.append(reduction(each, total, plan))
        return found


def pack(partial: PartialSum, device: torch.device | str = "cpu") -> list[Tensor]:
    """The tensors of a partial sum, then its numbers as one more tensor (float64)."""
    numbers = partial.numbers
    if isinstance(numbers, list):
        numbers = torch.tensor(numbers, dtype=torch.float64, device=device)
    return [*partial.tensors, numbers]


def unpack(tensors: Sequence[Tensor], *, owned: bool) -> PartialSum:
    """The partial sum that was packed; `owned` if no other worker reads its tensors."""
    *rest, numbers = tensors
    waits = reading_waits(numbers.device)
    return PartialSum(rest, numbers if waits else numbers.tolist(), owned=owned)


class SpinBarrier:
    """A barrier in shared memory that watches its peers: no worker waits for a dead one.

    Each worker counts its arrivals in a cache line of its own, and waits until the counts of all are there. All of them
    make the barrier together, of `num_bytes` shared bytes that are zeros at first.
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
        with span("wait for other workers"):
            self._wait_for_all()
        self._fence()

    def _wait_for_all(self) -> None:
        waits = 0
        while self._counts.min() < self._arrivals:
            waits += 1
            if waits > _SPINS:
                time.sleep(_PAUSE_SECONDS)
            if waits % _LOOK_EVERY == 0:
                self._group.check_peers()
            if waits % _CHECK_EVERY == 0:
                self._check_peers()

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
            if self._group.membership is not None:  # the watcher of this host, or the launcher, is about to know why
                raise self._group.membership.connection_lost(f"{names} has ended")
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
