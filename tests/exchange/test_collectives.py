from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_workers import thread_workers
from torch import nn
from torch._C._distributed_c10d import ErrorType, PrefixStore
from torch.nn import functional as F
from worker_processes import HANG_SECONDS, free_port

import lockstep as ls
from lockstep.errors import InputError, PeerLostError, WorkerError
from lockstep.exchange import collectives as module
from lockstep.exchange.collectives import Collectives, Messages, collectives, useful_line
from lockstep.workers.group import Group
from lockstep.workers.rank import Worker, leave

# Calls that fail, with a group that is none ---------------------------------------------------------------------------

NCCL = """NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, {short}, NCCL version 2.27.5
{result}
Last error:
{last}
Exception raised from getNCCLComm at ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1287 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96"""
REMOTE = NCCL.format(
    short="remote process exited or there was a network error",
    result="ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    last="socketProgressOpt: Call to recv from 172.16.0.2<33759> failed : Connection reset by peer",
)
DUPLICATE = NCCL.format(
    short="invalid usage (run with NCCL_DEBUG=WARN for details)",
    result="ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    last="Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10",
)
NO_MEMORY = NCCL.format(
    short="unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    result="ncclUnhandledCudaError: Call to CUDA function failed.",
    last="Cuda failure 2 'out of memory'",
)
NO_ROUTE = (
    "Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:152] timed out connecting: "
    "SO_ERROR: Connection refused, remote=[172.17.0.1]:47523$0"
)
NO_NETWORK = NCCL.format(
    short="unhandled system error (run with NCCL_DEBUG=INFO for details)",
    result="ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
    last="Bootstrap : no socket interface found",
)


class FakeGroup:
    """A process group of torch of which a test says what it does."""

    def __init__(self) -> None:
        self.error = ErrorType.SUCCESS
        self.num_aborts = 0

    def abort(self) -> None:
        self.num_aborts += 1

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(get_error=lambda: self.error)


class StuckWork:
    """A call that never ends."""

    num_waits = 0

    def wait(self, timeout: timedelta | None = None) -> None:
        assert timeout is not None, "it would wait for ever"
        self.num_waits += 1
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


class FailedWork:
    """A call whose connection has ended."""

    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


class Lost:
    """What is known of the others: worker 3 is gone."""

    num_checks = 0

    def __init__(self) -> None:
        self.actions: list[Callable[[], None]] = []

    def on_failure(self, action: Callable[[], None]) -> None:
        self.actions.append(action)

    def check(self) -> None:
        self.num_checks += 1
        if self.num_checks == 3:
            raise self.connection_lost("the beats")

    def connection_lost(self, said: str) -> PeerLostError:
        return PeerLostError("worker 0 lost worker 3.", given=said, expected="", hint="")


@pytest.fixture
def worker() -> Worker:
    return thread_workers(1)[0]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> FakeGroup:
    made = FakeGroup()
    monkeypatch.setattr(Collectives, "_make_group", lambda _: made)
    monkeypatch.setattr(module.dist, "destroy_process_group", lambda _: None)
    return made


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(dist, "all_reduce", fail)


@pytest.mark.parametrize(
    ("backend", "error", "kind", "what", "given"),
    [
        ("nccl", torch.OutOfMemoryError("CUDA out of memory."), torch.OutOfMemoryError, "CUDA out of memory.", None),
        ("nccl", dist.DistBackendError(NO_MEMORY), torch.OutOfMemoryError, "worker 0, in the exchange over nccl", None),
        ("nccl", dist.DistBackendError(DUPLICATE), InputError, "Two workers use the same GPU.", "rank 1 and rank 0"),
        ("nccl", dist.DistBackendError(REMOTE), PeerLostError, "worker 0 lost another worker", "Connection reset"),
        ("nccl", dist.DistBackendError(NO_NETWORK), WorkerError, "has failed on worker 0", "no socket interface"),
        ("gloo", RuntimeError("[pair.cc:553] Connection closed by peer"), PeerLostError, "worker 0 lost", "[pair.cc"),
        ("gloo", RuntimeError("[buffer.cc:78] Timed out waiting 8000ms for recv"), PeerLostError, "worker 0 lost", ""),
        ("gloo", RuntimeError(NO_ROUTE), WorkerError, "over gloo has failed on worker 0", "172.17.0.1"),
        ("gloo", RuntimeError("No backend type associated with device type cuda"), RuntimeError, "device type", None),
    ],
)
def test_errors_are_what_they_are(
    backend: Any,
    error: RuntimeError,
    kind: type[Exception],
    what: str,
    given: str | None,
    worker: Worker,
    group: FakeGroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing(monkeypatch, error)
    with pytest.raises(kind, match=what) as caught:
        Collectives(worker, backend).all_reduce([torch.ones(1)])
    assert type(caught.value) is kind
    assert given is None or given in str(caught.value.given)
    assert caught.value is error or caught.value.__cause__ is error
    assert not worker.pulse.waits
    assert group.num_aborts == (backend == "nccl" and kind is PeerLostError)


def test_who_could_not_connect_is_named_by_a_worker_that_waited_for_the_connection(
    worker: Worker, group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say() -> None:
        raise Lost().connection_lost("it failed: the exchange over gloo has failed on worker 3")

    failing(monkeypatch, RuntimeError("Gloo connectFullMesh failed with [pair.h:311] Connect timeout [none]"))
    worker.group.watch(say)
    with pytest.raises(PeerLostError, match="worker 0 lost worker 3"):
        Collectives(worker, "gloo").all_reduce([torch.ones(1)])


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(
    "error",
    [
        dist.DistStoreError("wait timeout after 120000ms, keys: /exchange/0//cpu//0/1\nframes of C++"),
        dist.DistNetworkError("Broken pipe"),
        RuntimeError("[pair.cc:553] Connection closed by peer"),
    ],
)
def test_a_worker_that_is_lost_while_the_group_is_made_is_named(
    backend: Any, error: RuntimeError, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Collectives) -> None:
        raise error

    monkeypatch.setattr(Collectives, "_make_group", fail)
    monkeypatch.setattr(worker.group, "membership", Lost())
    with pytest.raises(PeerLostError, match="worker 0 lost worker 3") as caught:
        Collectives(worker, backend)
    assert caught.value.given == str(error).partition("\n")[0]


def test_an_error_keeps_no_call_alive(worker: Worker, group: FakeGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections would stay open, and by their end others notice."""
    calls = weakref.WeakSet[FailedWork]()

    def begin(*_: Any, **__: Any) -> FailedWork:
        work = FailedWork()
        calls.add(work)
        return work

    monkeypatch.setattr(dist, "all_reduce", begin)
    with pytest.raises(PeerLostError) as caught:
        Collectives(worker, "gloo").all_reduce([torch.ones(1), torch.ones(1)])
    gc.collect()
    assert caught.value.__cause__ is not None
    assert not calls


def test_a_call_that_never_ends_is_left_when_a_worker_is_lost(
    worker: Worker, group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers, work = Lost(), StuckWork()
    worker.group.membership = peers  # type: ignore[assignment]
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: work)
    with pytest.raises(PeerLostError, match="worker 0 lost worker 3"):
        Collectives(worker, "gloo").all_reduce([torch.ones(1)])
    assert work.num_waits == peers.num_checks == 3


def test_a_worker_that_fails_does_not_wait_for_a_call_that_gloo_has_forgotten(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not told of the end of its connection, and the end of the group waits for it."""
    call_ends, group_is_gone = threading.Event(), threading.Event()

    class Stuck(FakeGroup):
        def __del__(self) -> None:
            call_ends.wait(HANG_SECONDS)
            group_is_gone.set()

    monkeypatch.setattr(Collectives, "_make_group", lambda _: Stuck())
    monkeypatch.setattr(module, "_CLOSING_SECONDS", 0.01)
    monkeypatch.setattr(module.dist, "destroy_process_group", lambda _: None)
    Collectives(worker, "gloo").close(ValueError("boom"))
    assert not group_is_gone.is_set()
    call_ends.set()
    assert group_is_gone.wait(HANG_SECONDS)


def test_the_thread_that_hears_of_a_failure_aborts_the_group(worker: Worker, group: FakeGroup) -> None:
    peers = Lost()
    worker.group.membership = peers  # type: ignore[assignment]
    Collectives(worker, "nccl")
    for _ in range(2):
        peers.actions[0]()
    assert group.num_aborts == 1


def test_what_nccl_notices_later_is_raised_where_the_device_is_waited_for(worker: Worker, group: FakeGroup) -> None:
    Collectives(worker, "nccl")
    worker.group.check_peers()
    group.error = ErrorType.REMOTE_ERROR
    with pytest.raises(PeerLostError, match="worker 0 lost another worker") as caught:
        worker.group.check_peers()
    assert caught.value.given == "NCCL reports REMOTE_ERROR"
    assert group.num_aborts == 1
    worker.group.check_peers()  # NCCL reports its own abort, too


def test_a_backend_that_notices_nothing_is_not_asked(
    worker: Worker, group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_get_backend", lambda _: object())
    Collectives(worker, "nccl")
    worker.group.check_peers()


def test_messages_that_are_enqueued_and_do_not_come_are_nan(
    worker: Worker, group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL may be aborted at any time after that: the device must make no update of what was there before."""
    begun: list[Any] = []
    monkeypatch.setattr(module.dist, "P2POp", lambda call, tensor, **to: SimpleNamespace(tensor=tensor, **to))
    monkeypatch.setattr(module.dist, "batch_isend_irecv", lambda calls: begun.extend(calls) or [])
    calls, received = Collectives(worker, "nccl"), [torch.ones(2), torch.ones(3, dtype=torch.bfloat16)]
    calls.exchange(Messages([(1, torch.ones(1))], list(enumerate(received))))
    assert [tensor.isnan().all().item() for tensor in received] == [True, True]
    assert [(call.group_peer, call.tensor.tolist()) for call in begun[2:]] == [(1, [1.0])]


@pytest.mark.parametrize(("error", "num_aborts"), [(None, 0), (ValueError("boom"), 1)])
def test_a_group_is_aborted_only_by_a_worker_that_fails(
    error: Exception | None, num_aborts: int, worker: Worker, group: FakeGroup
) -> None:
    opened = collectives(worker, "nccl")
    assert collectives(worker, "nccl") is opened
    worker.group.leave(error)
    assert group.num_aborts == num_aborts
    assert not module._open


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("Broken pipe\nframe #0", "Broken pipe"),
        (REMOTE, "socketProgressOpt: Call to recv from 172.16.0.2<33759> failed : Connection reset by peer"),
        ("NCCL error in: x\nncclInternalError: Internal check failed.\nLast error:\n\nException raised", None),
        ("NCCL error in: x\nncclInternalError: Internal check failed.\nLast error:\nException raised from y", None),
    ],
)
def test_the_useful_line_of_torch_distributed_is_found(text: str, line: str | None) -> None:
    assert useful_line(text) == ("ncclInternalError: Internal check failed." if line is None else line)


# Real processes, as torchrun would start them -----------------------------------------------------------------------


def step_of_everything() -> tuple[int, list[str]]:
    """Gradients, counts of things, and batch norm over all workers, all of them over gloo."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    state = ls.TrainState(model, ls.optim.SGD(0.1))
    fields = {"x": torch.randn(16, 3), "y": torch.randint(0, 2, (16,))}
    towers, exchange = ls.Towers(2, batch_norm="sync"), ls.AllReduce("gloo")

    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")}

    loader = ls.data.Loader(ls.data.Arrays(fields), batch_size=8)
    ls.train(state, losses, loader, towers, exchange, counts=lambda batch: {"loss": len(batch["y"])}, until=ls.Steps(2))
    num_groups = len(dist.distributed_c10d._world.pg_map)
    leave()
    return num_groups, [
        name for name, is_left in [("group", dist.is_initialized()), ("calls", module._open)] if is_left
    ]


@pytest.mark.process
def test_a_worker_has_one_process_group_and_leaves_none(run_workers: Callable[..., list[Any]]) -> None:
    assert run_workers(step_of_everything, 2) == [(1, [])] * 2


def go_on_with_a_newcomer(backends: list[Any]) -> list[list[float]]:
    """Workers 0 and 1 exchange over NCCL, and 0 and 2 go on after a loss; gloo stands for NCCL, and has no abort.

    Worker 2 has made no group before, and torch numbers those of a process: they must get the same number.
    """
    here, sums = ls.join("cpu"), []
    make_first, make_next = dist.init_process_group, dist.new_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda backend, **of: make_first("gloo", **{**of, "device_id": None}))
        patch.setattr(dist, "new_group", lambda backend, **of: make_next(backend="gloo", **{**of, "device_id": None}))
        patch.setattr(dist.ProcessGroup, "abort", lambda group: None)
        for generation, members in enumerate(([0, 1], [0, 2])):
            if here.rank not in members:
                continue
            group = Group(
                PrefixStore(str(generation), here.group.store), rank := members.index(here.rank), len(members)
            )
            worker = replace(here, rank=rank, num_workers=len(members), group=group)
            numbers = torch.ones(3)
            for backend in backends:
                collectives(worker, backend).all_reduce([numbers])
            sums.append(numbers.tolist())
            group.leave(Lost().connection_lost("the beats"))
            assert not dist.is_initialized()
    return sums


@pytest.mark.process
@pytest.mark.parametrize("backends", [["nccl"], ["gloo", "nccl"]])
def test_after_a_loss_nothing_is_left_of_the_group_that_was_aborted(
    backends: list[str], run_workers: Callable[..., list[Any]]
) -> None:
    """The next one would be made over its workers, the lost one among them, and wait for it in vain."""
    summed = [2.0 ** len(backends)] * 3
    assert run_workers(go_on_with_a_newcomer, 3, backends) == [[summed] * 2, [summed], [summed]]


def begin_call(kind: str, here: Worker) -> Callable[[], None]:
    """A function that makes a call of this kind."""
    calls, tensor = collectives(here, "gloo"), torch.ones(1000)
    if kind == "all_reduce":
        return lambda: calls.all_reduce([tensor])
    others = [rank for rank in range(here.num_workers) if rank != here.rank]
    receives = [(rank, torch.empty(1000)) for rank in others]
    return lambda: calls.exchange(Messages([(rank, tensor) for rank in others], receives))


def lose_a_worker(number: int, kind: str) -> tuple[str, str]:
    """Worker 1 is killed or stopped in an exchange of four; all others, not only its neighbours, are to notice."""
    here = ls.join("cpu")
    call = begin_call(kind, here)
    here.pulse.at(3, "exchange")
    call()
    if here.rank == 1:
        time.sleep(1)  # a beat tells the others where it is
        os.kill(os.getpid(), number)
    with pytest.raises(PeerLostError) as caught:
        call()
    return caught.value.what, str(caught.value.given)


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (signal.SIGKILL, "all_reduce"),
        (signal.SIGSTOP, "messages"),
        pytest.param(signal.SIGKILL, "messages", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, "all_reduce", marks=pytest.mark.slow),
    ],
)
def test_all_workers_name_the_one_that_is_gone(
    number: signal.Signals, kind: str, run_workers: Callable[..., list[Any]]
) -> None:
    said = run_workers(lose_a_worker, 4, number, kind, lost=[1])
    for rank in (0, 2, 3):
        what, given = said[rank]
        assert what == f"worker {rank} lost worker 1."
        assert "at step 3 (phase exchange)" in given


def wait_for_a_late_worker() -> tuple[list[float], list[float]]:
    """Messages to a worker that comes later than the time in which the group had to be made."""
    module._MAKING_SECONDS = {"gloo": 0.5}
    here = ls.join("cpu")
    calls = collectives(here, "gloo")
    other, mine = 1 - here.rank, torch.full((2,), float(here.rank))
    first, second = torch.empty(2), torch.empty(2)
    time.sleep(here.rank * 1.0)
    calls.exchange(Messages([(other, mine), (other, mine + 10)], [(other, first), (other, second)]))
    return first.tolist(), second.tolist()


@pytest.mark.process
def test_a_late_worker_is_waited_for_and_messages_keep_their_order(run_workers: Callable[..., list[Any]]) -> None:
    assert run_workers(wait_for_a_late_worker, 2) == [([1.0] * 2, [11.0] * 2), ([0.0] * 2, [10.0] * 2)]


SCRIPT = """
import torch
from torch import nn

import lockstep as ls

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Linear(3, 1)
loader = ls.data.Loader(ls.data.Arrays({"x": torch.randn(8, 3)}), batch_size=4)
losses = lambda model, batch: {"loss": model(batch["x"]).square().mean()}
state = ls.TrainState(model, ls.optim.SGD(0.1))
for report in ls.train_steps(state, losses, loader, exchange=ls.AllReduce("gloo"), until=ls.Steps(5)):
    if report.progress.step == 3 and ls.join().rank == 1 and FAILS:
        raise ValueError("boom")
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("fails", [True, False])
def test_scripts_of_a_bare_launcher_end_in_peace_or_with_the_words_of_the_one_that_failed(
    fails: bool, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("FAILS", str(fails)))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    workers = [
        subprocess.Popen(
            [sys.executable, script],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [worker.communicate(timeout=HANG_SECONDS)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [int(fails)] * 2, said
    if not fails:
        assert said == [
            "2 towers on 2 workers (cpu, 1 thread each, fp32)\n",
            "",
        ]  # nothing of groups that were not destroyed, nor of a store that is gone
        return
    assert said[1].endswith("ValueError: boom\n")
    assert "worker 0 lost worker 1.\n" in said[0]
    assert "worker 1 failed at step 3 (phase loop body)\n" in said[0]
    assert said[0].endswith("ValueError: boom\n")  # its traceback is here, too
