from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler
from worker_processes import HANG_SECONDS, free_port

from lockstep.errors import InputError, LockstepError, WorkerError
from lockstep.workers import rank as ranks
from lockstep.workers.group import Group
from lockstep.workers.membership import Generation, Generations
from lockstep.workers.pulse import Pulse
from lockstep.workers.rank import Worker, join, leave, regroup
from lockstep.workers.socket_store import SocketStore
from lockstep.workers.store_server import LAUNCHED, StoreServer

FULL = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
LOCAL = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def _nobody_launched_us(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*FULL, *LOCAL, LAUNCHED):
        monkeypatch.delenv(name, raising=False)
    leave()
    yield
    leave()


def test_without_a_launcher_a_worker_is_alone() -> None:
    here = join("cpu")
    assert (here.rank, here.num_workers, here.local_rank, here.num_local_workers) == (0, 1, 0, 1)
    assert here.is_chief
    assert here.name == "worker 0"
    assert here.device == torch.device("cpu")
    assert here.group.gather(1) == [1]


def test_a_process_joins_once() -> None:
    here = join("cpu")
    assert join() is here
    assert join("cpu") is here
    leave()
    assert join("cpu") is not here


def test_a_second_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "choose_device", lambda *_: torch.device("meta"))
    join()
    with pytest.raises(InputError) as caught:
        join("cpu")
    assert caught.value.what == "This process has joined its run with another device."
    assert caught.value.given == "device='cpu' after 'meta'"


def test_another_number_of_workers_per_device_is_refused() -> None:
    assert join("cpu", workers_per_device=2).workers_per_device == 2
    assert join(workers_per_device=2) is join()
    with pytest.raises(InputError) as caught:
        join(workers_per_device=3)
    assert caught.value.what == "This process has joined its run with another workers_per_device."
    assert caught.value.given == "workers_per_device=3 after 2"


@pytest.mark.parametrize("number", [0, 1.5, "2"])
def test_a_number_of_workers_per_device_that_is_none_is_refused(number: Any) -> None:
    with pytest.raises(InputError, match="workers_per_device"):
        join("cpu", workers_per_device=number)


def joined_on(
    monkeypatch: pytest.MonkeyPatch,
    uuids: list[str],
    *,
    workers_per_device: int = 1,
    are_apart: bool = False,
    chief_serves: bool = False,
) -> list[Worker]:
    """Workers that have joined from threads, each with a single visible accelerator, of these UUIDs.

    They are of one host, or each of a host of its own.
    """
    server, num_workers = StoreServer(), len(uuids)
    here = local()

    def choose(*arguments: object) -> torch.device:
        return torch.device("cuda", 0)

    def join_as(rank: int) -> Worker:
        here.rank = rank
        environment = {"RANK": str(rank), "WORLD_SIZE": str(num_workers), LAUNCHED: "1"}
        local_rank, num_local = (0, 1) if are_apart else (rank, num_workers)
        environment |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(num_local)}
        return ranks._join(None, workers_per_device, environment, chief_serves=chief_serves)

    monkeypatch.setattr(ranks, "choose_device", choose)
    monkeypatch.setattr(ranks, "identity", lambda device: uuids[here.rank])
    monkeypatch.setattr(ranks, "_store_of_launcher", lambda env: SocketStore(server.connect()))
    with ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(join_as, range(num_workers), timeout=HANG_SECONDS))


class TestWorkersWithOneVisibleDevice:
    def test_are_told_apart_by_uuid(self, monkeypatch: pytest.MonkeyPatch) -> None:
        joined = joined_on(monkeypatch, ["GPU-a", "GPU-b"])
        assert [(worker.shares_device, worker.backend) for worker in joined] == [(False, "nccl")] * 2

    def test_are_refused_on_one_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(InputError, match="Several workers have the same device"):
            joined_on(monkeypatch, ["GPU-a", "GPU-a"])

    def test_share_a_device_over_gloo_where_that_was_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Also the third worker, which has a device of its own: all of them exchange alike.
        joined = joined_on(monkeypatch, ["GPU-a", "GPU-a", "GPU-b"], workers_per_device=2)
        assert [(worker.shares_device, worker.backend) for worker in joined] == [(True, "gloo")] * 3

    def test_a_chief_that_serves_needs_none_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        joined = joined_on(monkeypatch, ["GPU-a", "GPU-a", "GPU-b"], chief_serves=True)
        assert [(worker.shares_device, worker.backend) for worker in joined] == [(True, "gloo")] * 3


def test_workers_of_several_hosts_are_named_with_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    assert [worker.name for worker in joined_on(monkeypatch, ["GPU-a", "GPU-b"])] == ["worker 0", "worker 1"]
    apart = joined_on(monkeypatch, ["GPU-a", "GPU-b"], are_apart=True)
    assert [worker.name for worker in apart] == ["worker 0 on node (host 0)", "worker 1 on node (host 1)"]
    assert apart[1].host == "node (host 1)"


def test_one_worker_of_a_launcher_needs_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert join("cpu").group.gather(1) == [1]


def test_workers_of_another_launcher_do_not_go_on_when_one_is_lost() -> None:
    join("cpu")
    with pytest.raises(InputError, match=r"cannot go on when one is lost\.\n.*workers of another launcher"):
        regroup()


@pytest.mark.parametrize(("number", "rank"), [(0, 1), (2, 2)])
def test_a_newcomer_is_not_the_chief_before_it_knows_the_others(
    monkeypatch: pytest.MonkeyPatch, number: int, rank: int
) -> None:
    seat = {"RANK": str(number), "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", LAUNCHED: "1"}
    for name, value in seat.items():
        monkeypatch.setenv(name, value)
    server, pulse = StoreServer(), Pulse(launched=True)
    monkeypatch.setattr(ranks, "inherited", server.connect)
    monkeypatch.setattr(ranks.pulses, "of_this_process", lambda: pulse)
    pulse.generations = Generations(number, is_newcomer=True)
    here = join("cpu")
    assert (here.is_newcomer, here.rank, here.num_workers, here.is_chief) == (True, rank, 4, False)
    assert (here.name, here.num_local_workers) == (f"worker {number}", 2)
    assert here.group.gather("alone") == ["alone"]


def run_generations(number: int, server: StoreServer, told: list[Generation], *, is_newcomer: bool = False) -> Worker:
    """What a worker is after it has heard of generations, the last of which it joins."""
    generations = Generations(number, is_newcomer=is_newcomer)
    generations.store = SocketStore(server.connect())
    generations.places = [] if is_newcomer else [(f"worker {each}", "here") for each in range(4)]
    pulse = Pulse(launched=True)
    pulse.generations = generations
    before = Worker(max(number, 1), 4, 0, 4, torch.device("cpu"), Group.alone(), pulse, is_newcomer=is_newcomer)
    for generation in told:
        if number in generation.members:
            generations.receive(generation.message())
    return ranks._take_part(before, generations, generations.next())


def test_ranks_are_the_places_in_a_generation_and_names_stay() -> None:
    server = StoreServer()
    told = [Generation(1, (1, 3), "worker 0", "killed"), Generation(2, (1, 3, 0))]
    with ThreadPoolExecutor(3) as pool:
        joined = [pool.submit(run_generations, number, server, told, is_newcomer=not number) for number in (1, 3, 0)]
        workers = [each.result(HANG_SECONDS) for each in joined]
    assert [worker.rank for worker in workers] == [0, 1, 2]
    assert [worker.name for worker in workers] == ["worker 1", "worker 3", "worker 0"]
    assert {(worker.num_workers, worker.num_local_workers, worker.is_newcomer) for worker in workers} == {(3, 3, False)}
    assert [worker.local_rank for worker in workers] == [0, 1, 2]
    assert [worker.host for worker in workers] == ["here"] * 3


def test_what_a_worker_starts_is_not_that_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**LOCAL, "RANK": "1", "WORLD_SIZE": "2", LAUNCHED: "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as caught:
        join("cpu")
    assert caught.value.what == "This process has the environment of a worker, but the launcher has not started it."
    assert caught.value.hint == f"unset RANK, WORLD_SIZE and {LAUNCHED} in what a worker starts: it is then alone"


def test_a_name_that_does_not_resolve_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ranks, "RESOLVE_SECONDS", 0.1)
    for name, value in {**FULL, "MASTER_ADDR": "no-such-host.invalid"}.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level("INFO"), pytest.raises(InputError) as caught:
        join("cpu")
    assert caught.value.what == "The name of the chief's host does not resolve."
    assert str(caught.value.given).startswith("'no-such-host.invalid', by RANK=2 of WORLD_SIZE=4: ")
    assert "no-such-host.invalid does not resolve here; trying again for 0 s" in caplog.text


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for name, value in {**FULL, "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(WorkerError) as caught:
            join("cpu")
    assert caught.value.what == "worker 0 cannot open the store of the run: its port is in use on this host."
    assert caught.value.given == f"port {port}, by RANK=0 of WORLD_SIZE=4"


def test_another_program_on_the_port_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(ranks, "STORE_ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for name, value in {**FULL, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(WorkerError) as caught:
            join("cpu")
    assert caught.value.what == "worker 2 cannot reach the other workers."
    assert str(caught.value.given).startswith(f"127.0.0.1:{port}: ")


def test_a_store_out_of_reach_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT_SECONDS", 0.05)
    port = free_port()
    for name, value in {**FULL, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorkerError) as caught:
        join("cpu")
    assert caught.value.what == "worker 2 cannot reach the other workers."
    assert str(caught.value.given).startswith(f"127.0.0.1:{port}: ")


def join_without_local_ranks() -> tuple[int, int, list[str]]:
    for name in LOCAL:
        del os.environ[name]
    here = join("cpu")
    return here.local_rank, here.num_local_workers, here.group.gather(here.name)


@pytest.mark.process
def test_workers_of_a_bare_launcher_find_each_other_and_count_their_host(run_workers: Callable[..., list[Any]]) -> None:
    said = run_workers(join_without_local_ranks, 2)
    assert said == [(rank, 2, ["worker 0", "worker 1"]) for rank in range(2)]


def join_with_a_wrong_wish() -> tuple[str, str, list[str]]:
    rank = int(os.environ["RANK"])
    with pytest.raises(LockstepError) as caught:
        join("gpu" if rank else "cpu")
    return caught.value.what, str(caught.value.given), getattr(caught.value, "__notes__", [])


@pytest.mark.process
def test_the_others_are_told_of_a_worker_that_cannot_join(run_workers: Callable[..., list[Any]]) -> None:
    missed, failed = run_workers(join_with_a_wrong_wish, 2)
    assert failed[0] == "'gpu' is not a device to choose."
    assert missed[:2] == ("worker 0 lost worker 1.", "worker 1 failed at step 0 (phase start)")
    assert missed[2][0].startswith(failed[0])


RESTARTED = """
import os
import sys

import lockstep

here = lockstep.join("cpu")
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
values = here.group.gather([here.rank, restart])
if restart == "0" and here.rank == 1:
    sys.exit(1)
here.group.barrier("end")
# One write a line: torchrun has its workers share an unbuffered pipe.
os.write(1, f"{here.name} {here.local_rank} {here.num_local_workers} {values}\\n".encode())
"""


def test_the_error_file_of_torchrun_comes_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    with monkeypatch.context() as patch:

        def ended_while_it_writes(handler: ErrorHandler, error: BaseException) -> None:
            Path(handler._get_error_file_path() or "").write_text("{")
            raise KeyboardInterrupt

        patch.setattr(ErrorHandler, "record_exception", ended_while_it_writes)
        with pytest.raises(KeyboardInterrupt):
            ranks._record_for_torchrun(ValueError("boom"))
    assert not path.exists()
    ranks._record_for_torchrun(ValueError("boom"))
    assert "boom" in json.loads(path.read_text())["message"]["message"]
    assert os.environ["TORCHELASTIC_ERROR_FILE"] == str(path)


@pytest.mark.slow
@pytest.mark.process
def test_workers_of_torchrun_find_each_other_and_again_after_a_restart(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RESTARTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    options = ["--monitor-interval", "0.05", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(script)]
    ended = subprocess.run(
        command + options,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    lines = sorted(ended.stdout.splitlines())
    assert lines == [f"worker {rank} {rank} 2 [[0, '1'], [1, '1']]" for rank in range(2)], ended.stderr
    assert ended.returncode == 0


@pytest.mark.parametrize(
    ("told", "hosts"),
    [
        ([("a", 0), ("a", 1), ("b", 0)], ["a", "a", "b"]),
        ([("a", 0), ("b", 0), ("a", 1)], ["a", "b", "a"]),
        ([("pod", 0), ("pod", 1), ("pod", 0)], ["pod (host 0)", "pod (host 0)", "pod (host 1)"]),
    ],
)
def test_a_worker_has_the_name_of_its_host_and_its_number_where_others_have_the_same(
    told: list[tuple[str, int]], hosts: list[str]
) -> None:
    assert ranks.host_names(told) == hosts
