"""The launcher of another host and the supervisor's picture of it, joined by a socket: no process is started."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest

from lockstep.errors import WorkerError
from lockstep.launcher import hosts
from lockstep.launcher.forkserver import Event, ForkServer
from lockstep.launcher.hosts import Agent, Conclusion, LocalHost, RemoteHost
from lockstep.workers.channel import Channel


class FakeServer:
    """A fork server without processes."""

    def __init__(self) -> None:
        self.workers: dict[str, Channel] = {}
        self.tasks: dict[str, Any] = {}
        self.killed: list[tuple[str, int]] = []
        self.pending: list[Event] = []
        self.preloaded: list[str] = []

    def preload(self, modules: Sequence[str]) -> None:
        self.preloaded += modules

    def fork(self, name: str, task: object, connections: list[socket.socket | Connection]) -> None:
        self.workers[name] = Channel(cast(socket.socket, connections[0]))
        self.tasks[name] = task
        self.pending.append(Event(name, 9_000_001, None))

    def kill(self, name: str, number: signal.Signals) -> None:
        self.killed.append((name, number))

    def events(self, timeout_seconds: float) -> list[Event]:
        events, self.pending = self.pending, []
        return events


class Hosts:
    """Both ends, and a clock that stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.server = FakeServer()
        ours, theirs = (Channel(each) for each in socket.socketpair())
        self.local = LocalHost(cast(ForkServer, self.server), {"kind": "worker"}, None)
        self.requests: list[str] = []
        self.agent = Agent(theirs, self.local, self.requests, lambda: self.now)
        self.remote = RemoteHost(ours, "node1", 2, lambda: self.now)
        self.ends = [ours, theirs]

    def exchange(self) -> hosts.Reports:
        """The agent does what it was told and reports; returns what has come of it."""
        for order in self.ends[1].receive():
            self.agent._obey(order)
        self.agent._report()
        return self.remote.receive()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setattr(hosts, "wait", lambda descriptors, seconds: None)
    monkeypatch.setattr(LocalHost, "fileno", lambda self: -1)
    made = Hosts()
    yield made
    for channel in [*made.ends, *made.server.workers.values()]:
        channel.close()
    made.local.close()


def test_a_worker_is_started_heard_told_and_killed(pair: Hosts) -> None:
    pair.remote.start(4, {"RANK": "4"})
    assert pair.exchange() == [(4, {"pid": 9_000_001, "status": None})]
    environment = pair.server.tasks["worker 4"]["environment"]
    assert environment["RANK"] == "4"
    worker = pair.server.workers["worker 4"]
    worker.send({"step": 7, "phase": "compute", "count": 3, "waits": False, "stop": None})
    assert pair.exchange() == [(4, {"step": 7, "phase": "compute", "count": 3, "waits": False, "stop": None})]
    pair.remote.send(4, {"stop": "SIGTERM"})
    pair.remote.kill(4, signal.SIGKILL)
    pair.exchange()
    assert worker.receive() == [{"stop": "SIGTERM"}]
    assert pair.server.killed == [("worker 4", signal.SIGKILL)]


def test_spares_are_imported_once_and_after_the_first_step() -> None:
    server = FakeServer()
    host = LocalHost(cast(ForkServer, server), {}, None, spares=("wave",))
    host.start(0, {})
    with contextlib.closing(host), contextlib.closing(server.workers["worker 0"]) as worker:
        for step, preloaded in ((0, []), (1, ["wave"]), (2, ["wave"])):
            worker.send({"step": step, "phase": "compute"})
            host.receive()
            assert server.preloaded == preloaded


def test_what_a_worker_says_before_its_end_comes_before_it(pair: Hosts) -> None:
    pair.remote.start(0, {})
    pair.exchange()
    pair.server.workers["worker 0"].send({"exit_code": 0})
    pair.server.pending.append(Event("worker 0", 9_000_001, 0))
    assert [message for _, message in pair.exchange()] == [{"exit_code": 0}, {"pid": 9_000_001, "status": 0}]


def test_signals_of_the_agent_reach_the_supervisor_once(pair: Hosts) -> None:
    pair.requests += ["SIGTERM", "SIGINT"]
    pair.exchange()
    assert pair.remote.take_requests() == ["SIGTERM", "SIGINT"]
    pair.exchange()
    assert pair.remote.take_requests() == []


def test_the_supervisor_hears_which_processes_are_stopped(pair: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.remote.start(2, {})
    pair.exchange()
    assert not pair.remote.is_stopped(2)
    monkeypatch.setattr(hosts, "process_fields", lambda pid: ["T", "1"])
    pair.exchange()
    assert pair.remote.is_stopped(2)


def test_the_last_lines_come_with_the_exit_code(pair: Hosts) -> None:
    pair.remote.end(75, logging.WARNING, "stopped")
    assert pair.agent.serve() == Conclusion(75, logging.WARNING, "stopped")


def test_warnings_are_shown_on_every_screen(pair: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    pair.remote.log(logging.WARNING, "worker 4 gives no sign of life\nits stack")
    pair.exchange()
    assert caplog.messages[-1].splitlines() == ["worker 4 gives no sign of life", "its stack"]


def test_a_silent_host_is_lost_after_two_seconds(pair: Hosts) -> None:
    pair.exchange()
    for _ in range(19):
        pair.now += 0.1
        assert pair.remote.fault() is None
    pair.exchange()  # it was only late
    for _ in range(19):
        pair.now += 0.1
        assert pair.remote.fault() is None
    for _ in range(3):
        pair.now += 0.1
        fault = pair.remote.fault()
    assert fault is not None
    assert "no sign of life for 2." in fault


def test_a_pause_of_this_launcher_is_no_silence_of_the_other(pair: Hosts) -> None:
    pair.exchange()
    pair.now += 3600.0
    assert pair.remote.fault() is None


def test_an_agent_that_is_gone_is_a_fault_at_once(pair: Hosts) -> None:
    pair.ends[1].close()
    pair.remote.receive()
    fault = pair.remote.fault()
    assert fault is not None
    assert "its launcher has ended" in fault


@pytest.mark.parametrize(
    "line", [b"[1]\n", b'{"reports": 3}\n', b"\xff\n", b'{"reports": [[0, 5]]}\n', b'{"requests": 1}\n']
)
def test_what_cannot_be_read_is_a_fault(pair: Hosts, line: bytes) -> None:
    pair.remote.start(0, {})
    pair.ends[1]._connection.sendall(line)
    pair.remote.receive()
    assert pair.remote.fault() == "sends what cannot be read"


def test_a_host_speaks_for_its_own_workers_alone(pair: Hosts) -> None:
    pair.remote.start(4, {})
    pair.ends[1].send({"reports": [[0, {"step": 1}], [-1, {"step": 1}], [4, {"step": 2}]]})
    assert pair.remote.receive() == [(4, {"step": 2})]


def test_without_its_supervisor_an_agent_ends_and_says_where_its_workers_were(pair: Hosts) -> None:
    pair.remote.start(4, {})
    pair.exchange()
    pair.server.workers["worker 4"].send({"step": 7, "phase": "exchange"})
    pair.exchange()
    pair.ends[0].close()
    with pytest.raises(WorkerError, match="Host 0") as error:
        pair.agent.serve()
    assert error.value.given == "its launcher has ended, or was killed"
    assert "worker 4 at step 7 (phase exchange)" in error.value.hint


def test_an_agent_that_hears_nothing_ends(pair: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(descriptors: object, seconds: float) -> None:
        pair.now += seconds

    monkeypatch.setattr(hosts, "wait", wait)
    with pytest.raises(WorkerError, match="Host 0") as error:
        pair.agent.serve()
    assert "no sign of life for 2." in error.value.given
    assert pair.now - 100.0 < 3.0


def test_the_network_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    server = FakeServer()
    host = LocalHost(cast(ForkServer, server), {}, None, {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"})
    host.start(0, {})
    assert server.tasks["worker 0"]["environment"] == {"NCCL_SOCKET_IFNAME": "eth0"}
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    with contextlib.closing(host), contextlib.closing(server.workers["worker 0"]):
        pass
