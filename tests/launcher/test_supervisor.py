"""The supervisor with workers that are channels alone, and a clock that the test moves: no process is started."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest
from worker_processes import HANG_SECONDS

from lockstep.launcher import hosts, supervisor
from lockstep.launcher.forkserver import Event, ForkServer
from lockstep.launcher.hosts import LocalHost
from lockstep.launcher.supervisor import STOPPED_EARLY, RunOutcome, Supervisor
from lockstep.launcher.survival import Survival
from lockstep.launcher.watchdog import Limits
from lockstep.workers.channel import Channel, Message

FIRST_PID = 9_000_001  # no process has such a number
STOPPING = "stopping after this step; Ctrl-C aborts"
STOPPING_BY_CTRL_C = "stopping after this step; Ctrl-C again aborts"


@dataclass
class FakeWorker:
    """The worker's end of its channel, and what the test has it do."""

    name: str
    channel: Channel
    environment: dict[str, str]
    alive: bool = True
    signals: list[str] = field(default_factory=list)
    """Those that it was sent."""
    stop: str | None = None
    told: list[Message] = field(default_factory=list)
    """What it was told of the others."""
    generation: list[int] = field(default_factory=list)
    """The members of the newest one that it was told of."""

    def beat(self, step: int = 1, phase: str = "compute", count: int = 1, **more: Any) -> None:
        usual = {"waits": False, "stop": self.stop, "ended": False, "seconds": {}}
        self.channel.send({"step": step, "phase": phase, "count": count, **usual, **more})

    def fail(self, text: str = "Error: bad", kind: str = "error") -> None:
        self.channel.send({"failed": text, "kind": kind, "step": 3, "phase": "compute"})


class FakeServer:
    """A fork server without processes: each wait for it is a tenth of a second, and plays one turn of the test."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.now = 100.0
        self.turns: Iterator[None] = iter(())
        self.pending: list[Event] = []
        self.forms = True
        """Workers find each other as soon as they are told of a generation."""
        self.answer: Callable[[FakeWorker, Message], None] = lambda worker, order: None
        """What a worker does that is to try connections."""

    def fork(self, name: str, task: Mapping[str, Any], connections: Sequence[socket.socket | Connection]) -> None:
        channel = Channel(cast(socket.socket, connections[0]))
        self.workers.append(FakeWorker(name, channel, task["environment"]))
        self.pending.append(Event(name, FIRST_PID + len(self.workers) - 1, None))
        connections[1].close()

    def kill(self, name: str, number: signal.Signals) -> None:
        worker = [worker for worker in self.workers if worker.name == name][-1]
        worker.signals.append(number.name)
        if number is signal.SIGKILL:
            self.end(worker, -9)

    def end(self, worker: FakeWorker, status: int = 0, *, says: int | None = None) -> None:
        """End a worker's process, which may first say its exit code."""
        if worker.alive:
            if says is not None:
                worker.channel.send({"exit_code": says})
            worker.alive = False
            self.pending.append(Event(worker.name, FIRST_PID + self.workers.index(worker), status))

    def play(self, seconds: float) -> None:
        self.now += seconds
        next(self.turns, None)
        for worker in self.workers:
            messages = worker.channel.receive()
            worker.stop = next((said["stop"] for said in messages if "stop" in said), worker.stop)
            worker.told += [said for said in messages if "lost" in said and "generation" not in said]
            worker.generation = next((said["members"] for said in messages if "members" in said), worker.generation)
            for said in messages:
                if "trial" in said:
                    self.answer(worker, said)
                if self.forms and "generation" in said:
                    worker.channel.send({"joined": said["generation"]})

    def events(self, timeout_seconds: float) -> list[Event]:
        events, self.pending = self.pending, []
        return events

    def fileno(self) -> int:
        return -1


Script = Callable[[FakeServer, list[str]], Iterator[None]]


def supervise(
    script: Script, num_workers: int = 2, survival: Survival | None = None, **limits: Any
) -> tuple[RunOutcome, FakeServer]:
    """Supervise workers that follow a script, of one turn each tenth of a second; it ends when none is left."""
    server, requests = FakeServer(), list[str]()
    host = LocalHost(cast(ForkServer, server), {}, lambda: Pipe()[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "wait", lambda hosts, timeout_seconds: server.play(timeout_seconds))
        run = Supervisor([host], [range(num_workers)], Limits(**limits), requests, lambda: server.now, survival)
        server.turns = script(server, requests)
        outcome = run.finish()
    host.close()
    for worker in server.workers:
        worker.channel.close()
    return outcome, server


def texts(outcome: RunOutcome) -> list[str]:
    return [failure.text for failure in outcome.failures]


def beat_for(server: FakeServer, seconds: float, **fields: Any) -> Iterator[None]:
    """All living workers say ten times a second where they are."""
    for _ in range(round(seconds * 10)):
        for worker in server.workers:
            if worker.alive:
                worker.beat(**fields)
        yield


def test_each_worker_learns_its_rank() -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        yield
        for worker in server.workers:
            server.end(worker, says=0)

    outcome, server = supervise(script, 3)
    assert (texts(outcome), outcome.stopped_by, outcome.aborted, outcome.late) == ([], None, False, False)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert [[worker.environment[name] for name in names] for worker in server.workers] == [
        [str(rank), str(rank), "3", "3"] for rank in range(3)
    ]


def test_a_failure_ends_the_others_after_the_time_of_grace() -> None:
    times = {}

    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        first, second = server.workers
        yield
        second.fail("Traceback\nValueError: bad\n")
        times["failed"] = server.now
        server.end(second, 1, says=1)
        while first.alive:
            first.beat()
            yield
        times["killed"] = server.now

    outcome, server = supervise(script, grace_seconds=1.0)
    assert texts(outcome) == ["worker 1 failed at step 3 (phase compute):\nTraceback\nValueError: bad"]
    assert server.workers[0].signals[0] == "SIGKILL"
    assert times["killed"] - times["failed"] == pytest.approx(1.2, abs=0.15)


def test_the_chief_may_save_after_a_failure_and_nobody_else() -> None:
    times: dict[int, float] = {}

    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        yield
        *saving, last = server.workers
        last.fail("Traceback\nValueError: bad\n")
        began = server.now
        server.end(last, 1, says=1)
        while any(worker.alive for worker in saving):
            for number, worker in enumerate(saving):
                if worker.alive:
                    worker.beat(phase="save")
                    times[number] = server.now - began
            yield

    supervise(script, 3, grace_seconds=1.0, save_seconds=8.0)
    assert times == {0: pytest.approx(8.2, abs=0.3), 1: pytest.approx(1.2, abs=0.3)}


def test_the_others_are_told_of_a_failure_and_not_of_what_survivors_say() -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        first, second, third = server.workers
        yield
        first.fail("worker 0 lost another worker.", "peer")
        yield
        second.fail("ValueError: bad")
        yield from beat_for(server, 2)
        for worker in (first, second, third):
            server.end(worker, 1)

    _, server = supervise(script, 3, grace_seconds=5.0)
    why = "worker 1 failed at step 3 (phase compute):\nValueError: bad"
    assert [worker.told for worker in server.workers] == [[], [], [{"lost": "worker 1", "why": why}]]


@pytest.mark.parametrize(("given", "killed_after"), [({}, 20), ({"hang_seconds": 25.0}, 25)])
def test_a_worker_says_how_long_one_may_stand_still_unless_the_user_does(
    given: dict[str, float], killed_after: int
) -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        yield from beat_for(server, 30, hang_seconds=20.0)
        for worker in server.workers:
            server.end(worker)

    outcome, _ = supervise(script, 1, **given)
    assert f"has been at step 1 (phase compute) for {killed_after} s, and was killed" in texts(outcome)[0]


@pytest.mark.parametrize(
    ("status", "says", "text"),
    [
        (-9, None, "worker 1 (pid 9000002) was killed by SIGKILL at step 1 (phase compute)"),
        (3, 3, "worker 1 (pid 9000002) ended with exit code 3 at step 1 (phase compute)"),
    ],
)
def test_a_death_without_a_word_is_a_failure(status: int, says: int | None, text: str) -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        server.workers[1].beat()
        yield
        server.end(server.workers[1], status, says=says)
        yield from beat_for(server, 2)

    assert texts(supervise(script)[0]) == [text]


def test_how_a_process_ends_that_has_returned_0_does_not_matter() -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        yield
        for worker in server.workers:
            worker.channel.send({"exit_code": 0})
        yield
        for worker in server.workers:
            server.end(worker, -11)

    assert texts(supervise(script)[0]) == []


def test_survivors_that_miss_a_peer_are_not_the_cause_of_its_silent_end() -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        first, second = server.workers
        second.beat(step=7)
        yield
        server.end(second, says=0)
        yield
        first.fail("lost worker 1", "peer")
        server.end(first, 1, says=1)

    left, lost = texts(supervise(script)[0])
    assert left.startswith("worker 1 (pid 9000002) ended with exit code 0 at step 7")
    assert lost.startswith("worker 0 failed")


def test_a_worker_that_waits_for_one_that_has_ended_is_ended() -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        yield
        server.end(server.workers[1], says=0)
        yield from beat_for(server, 10, waits=True)

    outcome, server = supervise(script)
    assert texts(outcome) == [
        "worker 1 (pid 9000002) ended with exit code 0 at step 0 (phase start), before worker 0 at step 1 (phase "
        "compute), which needs it: their loops do not end at the same step (until, or where a loop is left)"
    ]
    assert server.now - 100 == pytest.approx(3.5, abs=0.6), "two seconds of waiting, one of grace"


def test_a_worker_that_goes_on_when_most_have_ended_is_the_cause() -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        yield from beat_for(server, 0.3, step=10)
        for worker in server.workers[:2]:
            server.end(worker, says=0)
        yield from beat_for(server, 10, step=10, waits=True)

    assert texts(supervise(script, 3)[0]) == [
        "worker 2 (pid 9000003) goes on at step 10 (phase compute), where worker 0 and worker 1 have ended with exit "
        "code 0: its loop does not end at the same step (until, or where a loop is left)"
    ]


def test_a_stuck_worker_shows_its_stack_and_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        first, second = server.workers
        for count in range(30):
            first.beat(count=count)
            second.beat(step=4)
            if count == 15:
                second.channel.send({"stacks": "main:\n  in wait\n"})
            yield

    outcome, _ = supervise(script, show_seconds=1.0, hang_seconds=2.0, grace_seconds=0.2)
    assert caplog.messages == [
        "worker 1 (pid 9000002) has been at step 4 (phase compute) for 1 s; its stack follows",
        "worker 1 (pid 9000002) is at:\nmain:\n  in wait",
    ]
    assert texts(outcome)[0].startswith(
        "worker 1 (pid 9000002) has been at step 4 (phase compute) for 2 s, and was kill"
    )
    assert len(texts(outcome)) == 1, "what is ended from here is not to blame"


def test_a_worker_that_has_failed_and_takes_its_time_to_end_is_not_called_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        yield from beat_for(server, 0.2)
        for worker in server.workers:
            worker.fail()
        yield from beat_for(server, 5)

    outcome, _ = supervise(script, show_seconds=1.0, silent_seconds=2.0, grace_seconds=4.0)
    assert not caplog.messages
    assert texts(outcome)[0].startswith("worker 0 failed")


def test_a_silent_worker_is_asked_for_its_stack_by_the_system(caplog: pytest.LogCaptureFixture) -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        server.workers[0].beat()
        while True:
            yield

    outcome, server = supervise(script, 1, show_seconds=1.0, silent_seconds=2.0)
    assert server.workers[0].signals[:2] == ["SIGUSR2", "SIGKILL"]
    assert caplog.messages == [
        "worker 0 (pid 9000001) gives no sign of life for 1 s at step 1 (phase compute); its stack:"
    ]
    assert texts(outcome)[0].startswith("worker 0 (pid 9000001) gave no sign of life for 2.")


def test_a_stopped_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "process_fields", lambda pid: ["T" if pid == FIRST_PID + 1 else "S", "1"])

    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        for _ in range(40):
            server.workers[0].beat()
            yield

    outcome, server = supervise(script, stopped_seconds=0.5)
    assert texts(outcome)[0].startswith("worker 1 (pid 9000002) was stopped (SIGSTOP) for 0.")
    assert server.workers[1].signals[0] == "SIGKILL"


# Stopping -------------------------------------------------------------------------------------------------------------


def stopped(
    phases: Sequence[str],
    then: Sequence[str] | None = None,
    *,
    request: str = "SIGTERM",
    step: int = 5,
    ended: Sequence[bool] = (False, False),
    **limits: Any,
) -> RunOutcome:
    """A run whose workers are in these phases when a signal comes, then in others, and end once they may."""

    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        for worker, phase, has_ended in zip(server.workers, phases, ended, strict=True):
            worker.beat(step, phase, ended=has_ended)
        yield
        requests.append(request)
        yield
        for worker, phase, has_ended in zip(server.workers, then or phases, ended, strict=True):
            worker.beat(step, phase, 2, ended=has_ended)
        yield
        assert [worker.stop for worker in server.workers] == [request] * 2
        for worker in server.workers:
            server.end(worker, says=0)

    return supervise(script, **limits)[0]


@pytest.mark.parametrize(
    ("phases", "then", "message"),
    [
        (["compute", "exchange"], None, STOPPING),
        (["compute", "evaluate"], None, STOPPING),
        (["evaluate", "evaluate"], None, "stopping: the scoring is left off; Ctrl-C aborts"),
        (["evaluate", "evaluate"], ["end", "evaluate"], "stopping: the scoring is left off; Ctrl-C aborts"),
        (["compute", "evaluate"], ["end", "end"], STOPPING),
        (["start", "start"], ["compute", "compute"], STOPPING),
        (["save", "start"], None, STOPPING),
    ],
)
def test_a_signal_stops_all_workers_and_says_what_it_interrupts(
    phases: list[str], then: list[str] | None, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = stopped(phases, then)
    assert caplog.messages == [message]
    assert (outcome.stopped_by, texts(outcome), outcome.aborted) == ("SIGTERM", [], False)


@pytest.mark.parametrize("phases", [["start", "start"], ["script", "script"], ["save", "start"]])
def test_before_the_first_step_a_signal_ends_the_workers_at_once(
    phases: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    outcome = stopped(phases, step=0, stop_seconds=0.05)
    assert caplog.messages == [STOPPED_EARLY]
    assert (outcome.stopped_by, outcome.late, texts(outcome)) == ("SIGTERM", False, [])


@pytest.mark.parametrize(("saves", "words"), [(True, "step, with a checkpoint"), (False, "step")])
def test_a_checkpoint_is_promised_where_the_run_says_that_it_saves(
    saves: bool, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        yield from beat_for(server, 0.3, saves_at_stop=saves)
        requests.append("SIGTERM")
        yield
        yield from beat_for(server, 0.3, step=2, phase="end", saves_at_stop=False)
        for worker in server.workers:
            server.end(worker, says=0)

    supervise(script)
    assert caplog.messages == [f"stopping after this {words}; Ctrl-C aborts"]


def test_between_the_loops_of_a_script_a_signal_interrupts_a_run(caplog: pytest.LogCaptureFixture) -> None:
    stopped(["script", "script"], step=5)
    assert caplog.messages == [STOPPING]


def test_a_run_that_has_ended_for_all_is_not_stopped(caplog: pytest.LogCaptureFixture) -> None:
    assert stopped(["evaluate"] * 2, ended=[True, True]).stopped_by is None
    assert caplog.messages == ["the run has ended, and its scoring is left off; Ctrl-C aborts"]
    assert stopped(["evaluate"] * 2, ended=[True, False]).stopped_by == "SIGTERM"


def test_the_word_comes_as_soon_as_all_have_answered(caplog: pytest.LogCaptureFixture) -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        requests.append("SIGINT")
        yield from beat_for(server, 0.1)
        assert caplog.messages == []
        yield from beat_for(server, 0.1)
        assert caplog.messages == [STOPPING_BY_CTRL_C]
        for worker in server.workers:
            server.end(worker, says=0)

    supervise(script)


def test_a_worker_that_does_not_answer_delays_the_word_by_half_a_second(caplog: pytest.LogCaptureFixture) -> None:
    said: list[float] = []

    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        first, second = server.workers
        first.beat()
        second.beat()
        requests.append("SIGINT")
        yield
        while not caplog.messages:
            first.beat()
            yield
        said.append(server.now)
        for worker in server.workers:
            server.end(worker, says=0)

    supervise(script)
    assert said == [pytest.approx(100.7, abs=0.15)]
    assert caplog.messages == [STOPPING_BY_CTRL_C]


def test_a_signal_that_reached_one_worker_stops_them_all() -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        first, second = server.workers
        yield
        first.beat()
        second.beat(stop="SIGUSR1")
        yield
        yield
        assert first.stop == "SIGUSR1"
        for worker in server.workers:
            worker.beat(2, "end", 2)
            server.end(worker, says=0)

    assert supervise(script)[0].stopped_by == "SIGUSR1"


@pytest.mark.parametrize(("second", "aborts"), [("SIGINT", True), ("SIGTERM", False)])
def test_only_a_second_ctrl_c_aborts(second: str, aborts: bool) -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        yield from beat_for(server, 0.1)
        requests.append("SIGINT")
        yield from beat_for(server, 0.2)
        requests.append(second)
        yield from beat_for(server, 0.2)
        assert server.workers[0].alive is not aborts
        for worker in server.workers:
            server.end(worker, says=0)

    outcome, _ = supervise(script)
    assert (outcome.aborted, outcome.stopped_by, texts(outcome)) == (aborts, "SIGINT", [])


def test_a_stop_is_told_to_no_worker_that_was_not_started_on_a_host_that_has_come_back() -> None:
    servers, requests = [FakeServer() for _ in range(3)], list[str]()
    hosts = [
        LocalHost(cast(ForkServer, each), {}, lambda: Pipe()[0], name=f"host{n}") for n, each in enumerate(servers)
    ]
    back: list[tuple[Any, Any]] = []

    def script() -> Iterator[None]:
        servers[0].workers[0].beat()
        yield
        servers[1].end(servers[1].workers[0], -9)
        yield
        back.append((hosts[1], hosts[2]))
        requests.append("SIGINT")
        while servers[0].workers[0].stop is None:
            yield
        servers[0].end(servers[0].workers[0], says=0)

    def play(_: object, timeout_seconds: float) -> None:
        for server in servers:
            server.play(timeout_seconds)

    def take_hosts() -> list[tuple[Any, Any]]:
        taken = [*back]
        back.clear()
        return taken

    servers[0].turns = script()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "wait", play)
        run = Supervisor(hosts[:2], [[0], [1]], Limits(), requests, lambda: servers[0].now, take_hosts=take_hosts)
        outcome = run.finish()
    assert servers[2].workers == []
    assert outcome.stopped_by == "SIGINT"
    for host in hosts:
        host.close()
    for worker in servers[0].workers + servers[1].workers:
        worker.channel.close()


def test_workers_that_take_too_long_to_stop_are_killed() -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        yield from beat_for(server, 0.1)
        requests.append("SIGTERM")
        yield from beat_for(server, 10.0, phase="save")

    outcome, server = supervise(script, stop_seconds=3.0)
    assert (outcome.late, outcome.stopped_by, texts(outcome)) == (True, "SIGTERM", [])
    assert server.now - 100 == pytest.approx(3.5, abs=0.3)


def test_nothing_stays_open() -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        yield
        for worker in server.workers:
            server.end(worker, says=0)

    before = open_files()
    supervise(script)
    deadline = time.monotonic() + HANG_SECONDS
    while open_files() > before:  # the store's threads close their ends when they see that the worker has gone
        assert time.monotonic() < deadline
        time.sleep(0.001)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_worker_that_the_others_wait_for_is_named_after_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        for turn in range(1, 602):
            for rank, worker in enumerate(server.workers):
                busy = 0.09 if rank == 1 else 0.05
                seconds = {"compute": turn * busy, "exchange": turn * (0.1 - busy)}
                worker.beat(step=turn, count=turn, seconds=seconds)
            yield
        for worker in server.workers:
            server.end(worker, says=0)

    with caplog.at_level("INFO"):
        supervise(script, 3)
    assert caplog.messages == [
        "worker 1 (pid 9000002) is the slowest: compute takes it 0.090 s a step, and the others 0.050 s; they wait for "
        "it 40% of the time"
    ]


# Survival -------------------------------------------------------------------------------------------------------------


def end_all(server: FakeServer) -> None:
    for worker in server.workers:
        server.end(worker, says=0)


def test_the_others_go_on_without_a_lost_worker_and_take_a_newcomer_in(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="lockstep")

    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        first, second, third = server.workers
        yield from beat_for(server, 0.3)
        server.end(first, -9)
        yield from beat_for(server, 0.3)
        assert (second.generation, third.generation) == ([1, 2], [1, 2])
        newcomer = server.workers[3]
        assert newcomer.environment == {**first.environment, "LOCKSTEP_GENERATION": "newcomer"}
        assert newcomer.generation == [], "it is not ready"
        newcomer.channel.send({"ready": True})
        yield from beat_for(server, 0.3)
        assert [each.generation for each in (second, third, newcomer)] == [[1, 2, 0]] * 3
        yield from beat_for(server, 0.3)
        end_all(server)

    outcome, server = supervise(script, 3, Survival(1, 3, 3))
    assert texts(outcome) == []
    assert [worker.environment["LOCKSTEP_GENERATION"] for worker in server.workers[:3]] == ["0"] * 3
    assert caplog.messages == [
        "worker 0 (pid 9000001) was killed by SIGKILL at step 1 (phase compute)\n"
        "2 of 3 workers are left; worker 0 is started anew",
        "2 of 3 workers go on",
        "worker 0 (pid 9000004) takes part from now on",
    ]


def test_a_stopped_worker_is_dead_before_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "process_fields", lambda pid: ["T" if pid == FIRST_PID + 1 else "S", "1"])
    monkeypatch.setattr(FakeServer, "kill", lambda server, name, number: server.workers[1].signals.append(number.name))

    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        first, second = server.workers
        for _ in range(20):
            first.beat()
            yield
        assert (second.signals, first.generation) == (["SIGKILL"], []), "it could still write"
        server.end(second, -9)
        yield from beat_for(server, 0.3)
        assert first.generation == [0]
        end_all(server)

    outcome, server = supervise(script, 2, Survival(1, 0, 2), stopped_seconds=0.5)
    assert texts(outcome) == []
    assert len(server.workers) == 2, "it may not be started anew"


def test_an_error_of_a_worker_ends_all() -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        yield
        server.workers[1].fail("ValueError: bad")
        server.end(server.workers[1], 1, says=1)
        yield from beat_for(server, 2)

    outcome, server = supervise(script, 2, Survival(1, 3, 2))
    assert texts(outcome) == ["worker 1 failed at step 3 (phase compute):\nValueError: bad"]
    assert server.workers[0].generation == []


def test_where_the_others_cannot_go_on_the_loss_is_the_cause() -> None:
    """They were in the middle of their start, say, and know nothing that they could go on from."""

    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        server.forms = False
        yield
        server.end(server.workers[1], -9)
        yield
        server.workers[0].fail("worker 0 lost worker 1.", "peer")
        server.end(server.workers[0], 1, says=1)
        yield

    outcome, server = supervise(script, 2, Survival(1, 3, 2))
    assert texts(outcome)[0] == "worker 1 (pid 9000002) was killed by SIGKILL at step 0 (phase start)"
    assert [failure.kind for failure in outcome.failures] == ["lost", "peer"]
    assert not server.workers[2].alive, "the newcomer is ended with them"


def test_with_too_few_workers_all_end() -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        yield
        server.end(server.workers[1], -9)
        yield from beat_for(server, 2)

    outcome, server = supervise(script, 2, Survival(2, 3, 2))
    assert texts(outcome) == [
        "worker 1 (pid 9000002) was killed by SIGKILL at step 0 (phase start)\n"
        "1 of 2 workers are left, fewer than 2 (watch.min_workers)"
    ]
    assert [told["lost"] for told in server.workers[0].told] == ["worker 1"]
    assert len(server.workers) == 2


def test_a_newcomer_that_fails_is_started_anew_after_a_pause_and_ends_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    started: list[int] = []

    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        yield
        server.end(server.workers[1], -9)
        for seconds in (0.3, 1.8, 0.4, 3.8, 0.4):
            yield from beat_for(server, seconds)
            started.append(len(server.workers) - 2)
            if seconds < 1:
                server.workers[-1].fail("OSError: no such file")
                server.end(server.workers[-1], 1, says=1)
        yield from beat_for(server, 9)
        end_all(server)

    outcome, server = supervise(script, 2, Survival(1, 3, 2))
    assert texts(outcome) == []
    assert started == [1, 1, 2, 2, 3]
    assert len(server.workers) == 5, "no more tries are made"
    assert [message.split("\n1 of 2 ")[1].splitlines() for message in caplog.messages if " are left" in message] == [
        ["workers are left; worker 1 is started anew"],
        ["workers are left; worker 1 is started anew in 2 s"],
        ["workers are left; worker 1 is started anew in 4 s"],
        [
            "workers are left",
            "nobody takes the place of worker 1: watch.restarts (--restarts) allows 3 starts in a row without progress;"
            " mend what has ended it, then stop the run, and start it again: it goes on with all workers",
        ],
    ]


@pytest.mark.parametrize("how", ["a stop", "the end"])
def test_who_is_to_be_started_after_a_pause_is_not_when_the_run_ends(how: str) -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        yield
        server.end(server.workers[1], -9)
        yield from beat_for(server, 0.3, step=5)
        server.workers[2].fail("OSError: no such file")
        server.end(server.workers[2], 1, says=1)
        yield from beat_for(server, 0.3, step=5)
        if how == "a stop":
            requests.append("SIGTERM")
        yield from beat_for(server, 5.0, step=5, ended=how == "the end")
        end_all(server)

    outcome, server = supervise(script, 2, Survival(1, 3, 2))
    assert texts(outcome) == []
    assert len(server.workers) == 3


def test_that_the_others_go_on_is_said_once_they_do(caplog: pytest.LogCaptureFixture) -> None:
    """A script with a loop of its own does not: its workers fail, and all may start again."""

    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        server.forms = False
        yield from beat_for(server, 0.3)
        server.end(server.workers[1], -9)
        yield from beat_for(server, 0.3)
        server.workers[0].fail("worker 0 lost worker 1", "peer")
        yield from beat_for(server, 0.3)
        for worker in server.workers:
            server.end(worker, 1)

    outcome, _ = supervise(script, 2, Survival(1, 0, 2))
    assert outcome.failures[0].text.startswith("worker 1 (pid 9000002) was killed by SIGKILL")
    assert [message.splitlines()[1] for message in caplog.messages] == ["1 of 2 workers are left"]


@pytest.mark.parametrize("is_ready", [False, True])
def test_newcomers_are_ended_when_the_run_is(is_ready: bool) -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        yield
        server.end(server.workers[1], -9)
        yield from beat_for(server, 0.3)
        server.forms = False  # the first one never comes to another step
        if is_ready:
            server.workers[2].channel.send({"ready": True})
            yield from beat_for(server, 0.3)
        server.end(server.workers[0], says=0)
        yield from beat_for(server, 0.5)
        assert server.workers[2].signals == ["SIGKILL"]

    outcome, _ = supervise(script, 2, Survival(1, 3, 2))
    assert texts(outcome) == []


def test_in_the_second_run_of_a_script_nobody_is_started_anew() -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        yield from beat_for(server, 0.3, step=5, ended=True)
        yield from beat_for(server, 0.3, step=1)
        server.end(server.workers[1], -9)
        yield from beat_for(server, 0.3, step=1)
        assert server.workers[0].generation == [0]
        end_all(server)

    outcome, server = supervise(script, 2, Survival(1, 3, 2))
    assert texts(outcome) == []
    assert len(server.workers) == 2, "a newcomer would be in the first run"


def test_after_a_stop_nobody_is_started_anew() -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        yield from beat_for(server, 0.3, step=5)
        requests.append("SIGTERM")
        yield from beat_for(server, 0.3, step=5)
        server.end(server.workers[1], -9)
        yield from beat_for(server, 0.3, step=5)
        assert server.workers[0].generation == [0]
        end_all(server)

    outcome, server = supervise(script, 2, Survival(1, 3, 2))
    assert (texts(outcome), outcome.stopped_by) == ([], "SIGTERM")
    assert len(server.workers) == 2


def test_where_a_connection_has_broken_the_same_workers_go_on(caplog: pytest.LogCaptureFixture) -> None:
    def script(server: FakeServer, requests: list[str]) -> Iterator[None]:
        yield
        server.workers[1].channel.send({"broken": 0})
        yield from beat_for(server, 3.0)
        assert [worker.generation for worker in server.workers] == [[0, 1]] * 2
        end_all(server)

    assert texts(supervise(script, 2, Survival(1, 3, 2))[0]) == []
    assert caplog.messages == [
        "a connection between workers has broken, though all of them live",
        "2 of 2 workers go on",
    ]
