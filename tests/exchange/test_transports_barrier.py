from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from thread_workers import run_threads, thread_workers

from lockstep.errors import PeerLostError
from lockstep.exchange import transports
from lockstep.exchange.transports import SpinBarrier
from lockstep.workers.rank import Worker


def test_nobody_leaves_a_round_before_all_have_come() -> None:
    num_workers, num_rounds = 3, 50
    block = torch.zeros(SpinBarrier.num_bytes(num_workers), dtype=torch.uint8)
    arrived = [0] * num_workers
    early: list[list[int]] = []

    def work(worker: Worker) -> None:
        barrier = SpinBarrier(block, worker)
        for number in range(1, num_rounds + 1):
            arrived[worker.rank] = number
            if number % num_workers == worker.rank:
                time.sleep(0.0002)
            barrier.wait()
            if min(arrived) < number:
                early.append(list(arrived))
        barrier.close()

    run_threads(work, num_workers)
    assert early == []


def test_each_worker_counts_in_a_cache_line_of_its_own() -> None:
    block = torch.zeros(SpinBarrier.num_bytes(2), dtype=torch.uint8)
    run_threads(lambda worker: SpinBarrier(block, worker).wait(), 2)
    assert block.view(torch.int64).nonzero().flatten().tolist() == [0, 8]


def waiting_for(*peers: object, check_peers: Callable[[], None] = lambda: None) -> tuple[SpinBarrier, torch.Tensor]:
    """The barrier of worker 0, and its block; the others say that they are these processes."""
    pids = [os.getpid(), *peers]
    names = [f"worker {rank}" for rank in range(len(pids))]
    group = SimpleNamespace(gather=lambda _: pids, check_peers=check_peers, names=names, membership=None)
    worker = thread_workers(len(pids), group=group)[0]
    block = torch.zeros(SpinBarrier.num_bytes(len(pids)), dtype=torch.uint8)
    return SpinBarrier(block, worker), block


@pytest.fixture
def dead() -> Iterator[int]:
    """A process that has ended, and is not reaped: its number is still its own."""
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


@pytest.mark.process
def test_a_dead_worker_that_has_not_come_is_named(dead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "_CHECK_EVERY", 1)
    barrier, _ = waiting_for(os.getpid(), dead)
    with pytest.raises(PeerLostError, match="worker 0 waits in the exchange for a worker that is gone") as raised:
        barrier.wait()
    assert raised.value.given == "worker 2"


@pytest.mark.process
def test_what_the_watcher_of_the_host_knows_of_a_dead_worker_is_told(
    dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "_CHECK_EVERY", 1)
    barrier, _ = waiting_for(os.getpid(), dead)

    def lost(said: str) -> PeerLostError:
        assert said == "worker 2 has ended"
        return PeerLostError("worker 0 lost worker 2.", given="killed by SIGKILL", expected="", hint="")

    barrier._group.membership = SimpleNamespace(connection_lost=lost)  # type: ignore[assignment]
    with pytest.raises(PeerLostError, match="worker 0 lost worker 2"):
        barrier.wait()


@pytest.mark.process
def test_a_worker_that_came_and_died_since_is_not_missed(dead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "_CHECK_EVERY", 1)
    barrier, block = waiting_for(os.getpid(), dead)
    counts = block.view(torch.int64)
    counts[16] = 1
    threading.Timer(0.01, counts.__setitem__, (8, 1)).start()
    barrier.wait()


def test_what_is_known_of_the_others_in_other_ways_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stopped, for example, has a process."""
    monkeypatch.setattr(transports, "_CHECK_EVERY", 1)

    def check_peers() -> None:
        raise PeerLostError("worker 0 lost worker 1.", given="no sign of life", expected="", hint="")

    with pytest.raises(PeerLostError, match="worker 0 lost worker 1"):
        waiting_for(os.getpid(), check_peers=check_peers)[0].wait()


@pytest.mark.parametrize("pid", [None, "7", 1 << 40, -1, True])
def test_what_is_no_process_is_refused(pid: object) -> None:
    with pytest.raises(PeerLostError, match="worker 1 is no process on this host"):
        waiting_for(pid)


def num_process_descriptors() -> int:
    """Descriptors of processes alone: what else this process holds, other tests' threads may close meanwhile."""
    num = 0
    for entry in os.scandir("/proc/self/fdinfo"):
        with contextlib.suppress(FileNotFoundError):
            num += f"\nPid:\t{os.getpid()}\n" in Path(entry.path).read_text()
    return num


def test_closing_gives_the_descriptors_back() -> None:
    gc.collect()  # barriers that other tests have left are not closed in between
    before = num_process_descriptors()
    barrier, _ = waiting_for(os.getpid(), os.getpid())
    assert num_process_descriptors() == before + 2
    barrier.close()
    barrier.close()
    assert num_process_descriptors() == before
