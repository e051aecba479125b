"""The watcher of a host, with workers that are small processes of the test."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
from worker_processes import HANG_SECONDS

from lockstep.launcher import watcher as module
from lockstep.launcher.hosts import Reports
from lockstep.launcher.watcher import JoinedHost
from lockstep.workers.channel import Channel
from lockstep.workers.connections import connect

pytestmark = pytest.mark.process

# A worker: says who it is and where, then does what the test wants.
WORKER = """
import json, os, signal, socket, sys, time
name, rank, deed = sys.argv[1:]
connection = socket.socket(socket.AF_UNIX)
connection.connect("\\0" + name)
def say(**message):
    connection.sendall(json.dumps(message).encode() + b"\\n")
say(rank=int(rank), can_show=False)
say(step=3, phase="compute", count=1, waits=False, stop="SIGTERM", ended=False)
exec(deed)
"""


class Watching:
    """A host that is watched, and the processes that have joined."""

    def __init__(self, stack: ExitStack, num_workers: int) -> None:
        self.name = f"lockstep-test/{os.getpid()}/{time.monotonic_ns()}"
        self._stack = stack
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(f"\0{self.name}")
        listener.listen()
        self.host = stack.enter_context(closing(JoinedHost(listener, "", range(num_workers))))
        self.said: Reports = []

    def start(self, deed: str, rank: int = 0) -> subprocess.Popen[bytes]:
        """Start a worker, which the watcher sees join."""
        command = [sys.executable, "-S", "-E", "-c", WORKER, self.name, str(rank), deed]
        process = self._stack.enter_context(subprocess.Popen(command))
        self._stack.callback(process.kill)
        return process

    def wait_for(self, key: str, seconds: float = HANG_SECONDS) -> tuple[int, dict[str, Any]]:
        """The next message of a worker or its process with this key."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.said += self.host.receive()
            for index, (rank, message) in enumerate(self.said):
                if key in message:
                    del self.said[: index + 1]
                    return rank, message
            select.select([self.host.fileno()], [], [], 0.05)
        raise TimeoutError(f"no {key} in {self.said}")


@pytest.fixture
def watching() -> Iterator[Callable[[int], Watching]]:
    with ExitStack() as stack:
        yield lambda num_workers: Watching(stack, num_workers)


def zombie_of(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process has ended, and leave its exit status where it is, as a launcher that looks now and then."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_a_worker_that_joins_says_where_it_is_and_a_stop_that_it_alone_was_asked_for_stays_there(
    watching: Callable[[int], Watching],
) -> None:
    here = watching(1)
    process = here.start("time.sleep(600)")
    assert here.wait_for("pid") == (0, {"pid": process.pid, "status": None})
    rank, beat = here.wait_for("phase")
    assert (rank, beat["step"], beat["phase"], beat["stop"]) == (0, 3, "compute", None)


@pytest.mark.parametrize(
    ("deed", "status"),
    [
        ("os.kill(os.getpid(), 9)", -9),
        ("os._exit(4)", 4),
        ("os._exit(0)", 0),
        ("say(leaves='now')", 0),
        ("say(leaves='now'); sys.exit(3)", 3),
        ("say(leaves='now'); os.kill(os.getpid(), 11)", 0),
    ],
)
def test_the_end_of_a_process_is_told_with_its_exit_status(
    watching: Callable[[int], Watching], deed: str, status: int
) -> None:
    here = watching(1)
    process = here.start(deed)
    here.wait_for("pid")
    zombie_of(process)
    assert here.wait_for("pid") == (0, {"pid": process.pid, "status": status})


def test_the_end_of_a_process_is_noticed_at_once(watching: Callable[[int], Watching]) -> None:
    here = watching(1)
    process = here.start("time.sleep(600)")
    here.wait_for("phase")
    process.kill()
    zombie_of(process)
    ready, _, _ = select.select([here.host.fileno()], [], [], 0.05)
    assert ready
    assert here.wait_for("pid")[1]["status"] == -9
    assert select.select([here.host.fileno()], [], [], 0)[0] == []  # it is told once


def test_on_an_old_kernel_the_end_of_a_process_is_noticed_by_looking(
    watching: Callable[[int], Watching], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", no_descriptor)
    here = watching(1)
    process = here.start("time.sleep(600)")
    here.wait_for("phase")
    assert here.host.receive() == []
    here.host.kill(0, signal.SIGKILL)
    zombie_of(process)
    assert here.wait_for("pid")[1]["status"] == -9


def test_of_a_process_whose_exit_status_its_launcher_has_taken_the_place_is_told(
    watching: Callable[[int], Watching],
) -> None:
    here = watching(1)
    process = here.start("time.sleep(600)")
    here.wait_for("phase")
    process.kill()
    process.wait()
    _, said = here.wait_for("failed")
    assert said == {"failed": "its process has ended without a word", "kind": "error", "step": 3, "phase": "compute"}
    assert here.wait_for("pid")[1]["status"] == 1


def test_a_worker_that_has_ended_before_its_watcher_came_is_told_with_its_last_words(
    watching: Callable[[int], Watching],
) -> None:
    here = watching(1)
    here.start("say(failed='boom', kind='error', step=3, phase='compute')").wait()
    assert here.wait_for("failed")[1]["failed"] == "boom"
    assert here.wait_for("pid")[1]["status"] == 0  # why is known


def test_the_last_to_leave_counts_as_ended_at_once(watching: Callable[[int], Watching]) -> None:
    here = watching(1)
    process = here.start("say(leaves='last'); time.sleep(600)")
    here.wait_for("phase")
    assert here.wait_for("pid") == (0, {"pid": process.pid, "status": 0})


def test_a_stopped_worker_is_seen_and_signals_reach_it(watching: Callable[[int], Watching]) -> None:
    here = watching(1)
    process = here.start("os.kill(os.getpid(), signal.SIGSTOP)")
    here.wait_for("phase")
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert here.host.is_stopped(0)
    here.host.kill(0, signal.SIGUSR2)  # it would end the process, which has no use for it
    here.host.kill(0, signal.SIGKILL)
    zombie_of(process)
    assert here.wait_for("pid")[1]["status"] == -9
    here.host.kill(0, signal.SIGKILL)  # it is gone: nothing happens


@pytest.mark.parametrize("is_early", [True, False])
def test_a_worker_is_told_that_it_is_watched_whoever_comes_first(
    watching: Callable[[int], Watching], is_early: bool
) -> None:
    here = watching(1)
    if is_early:
        here.host.start(0, {})
    here.start("say(heard=json.loads(connection.recv(1000)))")
    here.wait_for("phase")
    if not is_early:
        here.host.start(0, {})
    assert here.wait_for("heard")[1]["heard"] == {"watched": True}


def test_messages_reach_a_worker(watching: Callable[[int], Watching]) -> None:
    here = watching(1)
    here.start("say(heard=json.loads(connection.recv(1000)))")
    here.wait_for("phase")
    here.host.send(0, {"lost": "worker 1", "why": "killed"})
    assert here.wait_for("heard")[1]["heard"] == {"lost": "worker 1", "why": "killed"}


def test_a_worker_that_never_comes_is_told_of(
    watching: Callable[[int], Watching], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REACH_SECONDS", 1.5)
    here = watching(2)
    here.start("time.sleep(600)")
    assert here.wait_for("failed")[0] == 1


@pytest.mark.parametrize("rank", [-1, 1])
def test_who_is_none_of_the_workers_is_not_taken_in(watching: Callable[[int], Watching], rank: int) -> None:
    here = watching(1)
    process = here.start("sys.exit(len(connection.recv(1)))", rank)
    deadline = time.monotonic() + HANG_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        assert here.host.receive() == []
    assert process.returncode is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_another_user_is_not_taken_in(watching: Callable[[int], Watching]) -> None:
    here = watching(1)
    child = os.fork()
    if not child:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{here.name}")
            connection.sendall(b'{"rank": 0}\n')
            with suppress(ConnectionResetError):
                connection.recv(1)
        os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        assert here.host.receive() == []


def test_what_the_watcher_of_another_host_says_at_once_is_heard() -> None:
    task: dict[str, Any] = {"address": "127.0.0.1", "key": "k" * 32, "names": ["node0", "node1"], "ranks": [[0], [1]]}
    worker, asked_by = map(Channel, socket.socketpair())
    with closing(worker), closing(asked_by), ThreadPoolExecutor(1) as pool:
        others = pool.submit(module._others, task, asked_by)
        [answer] = worker.receive(5)
        with connect("127.0.0.1", answer["port"], task["key"].encode()) as connection:
            connection.sendall(b'{"host": 1}\n{"reports": [[1, {"step": 7}]]}\n')
            [host] = others.result(HANG_SECONDS)
            host.start(1, {})
            assert (host.name, host.receive()) == ("node1", [(1, {"step": 7})])
            host.close()


def test_a_watcher_loads_no_torch() -> None:
    code = "import sys, lockstep.launcher.watcher; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_watcher_whose_worker_never_comes_ends_in_silence() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0lockstep-test/{os.getpid()}/{time.monotonic_ns()}")
        listener.listen()
        code = "import sys; from lockstep.launcher import watcher; watcher.REACH_SECONDS = 0.1; watcher.watch()"
        command = [sys.executable, "-c", code, str(listener.fileno())]
        ended = subprocess.run(command, pass_fds=[listener.fileno()], capture_output=True, timeout=HANG_SECONDS)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
