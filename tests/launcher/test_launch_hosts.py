"""One run over several hosts with real launchers and workers, which are all on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from worker_processes import HANG_SECONDS, free_port

pytestmark = pytest.mark.process

# A worker without torch, which meets the others in the store of the run.
WORKERS = """
import os
import sys
import time
from pathlib import Path

from lockstep.errors import InputError
from lockstep.launcher.launch import launch_command
from lockstep.launcher.rendezvous import Seat
from lockstep.workers.pulse import of_this_process
from lockstep.workers.store_server import StoreAddress, inherited

HOST = int(sys.argv[2])


def plan(argv):
    if argv[0] == f"refuse on host {HOST}":
        raise InputError("There is no folder photos.", given="photos", expected="a folder", hint="make it")
    return {"workers": 1 + (HOST == 0), "restarts": int(argv[0] == "again")}


def main(argv):
    way = inherited()
    pulse = of_this_process()
    if argv[0] == "wait":
        pulse.at(57, "exchange")
        time.sleep(0.3)  # a beat says so
    os.write(1, f"worker {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, {os.environ['LOCAL_RANK']} of "
        f"{os.environ['LOCAL_WORLD_SIZE']} here, {type(way).__name__}, {'LOCKSTEP_KEY' in os.environ}, "
        f"{os.environ['GLOO_SOCKET_IFNAME']}, {os.getpid()}\\n".encode())
    (Path(__file__).parent / f"said-{os.environ['RANK']}").mkdir(exist_ok=True)
    if argv[0] == "fail" and os.environ["RANK"] == "2":
        pulse.at(57, "compute")
        raise ValueError("this is the real cause")
    first = Path(__file__).parent / f"first-{os.environ['RANK']}"
    while argv[0] in ("wait", "fail") or (argv[0] == "again" and not first.exists()):
        pulse.at(57, "exchange")
        time.sleep(0.02)
        if argv[0] == "again" and all((first.parent / f"said-{rank}").exists() for rank in range(3)):
            first.mkdir()
            time.sleep(600)
        if pulse.stop_requested:
            return 0
    return 0


if __name__ == "__main__":
    seat = Seat(2, HOST, "127.0.0.1", int(sys.argv[3]))
    import toy
    sys.exit(launch_command(sys.argv[1:], plan=toy.plan, main=toy.main, preload=(), seat=seat))
"""


@dataclass
class Launcher:
    """One host: its launcher, and what its screen shows."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def read_until(self, start: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith(start):
                return line.rstrip()
        raise AssertionError(f"no line starts with {start!r}: {self.lines}")

    def end(self) -> tuple[int, list[str]]:
        """Wait for the end; returns the exit code and the last lines, without what the workers said."""
        assert self.process.stdout is not None
        self.lines += [line.rstrip() for line in self.process.stdout]
        shown = [line for line in self.lines if not line.startswith(("worker", "waiting for"))]
        return self.process.wait(HANG_SECONDS), shown


Start = Callable[..., list[Launcher]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start both hosts in a mode of the script."""
    (tmp_path / "toy.py").write_text(WORKERS)
    port = free_port()
    root = str(Path(__file__).parents[2])
    started: list[Launcher] = []

    def start(mode: str, keys: Sequence[str] = ("k" * 32, "k" * 32), hosts: Sequence[int] = (0, 1)) -> list[Launcher]:
        for host in hosts:
            key = keys[host]
            command = [sys.executable, tmp_path / "toy.py", mode, str(host), str(port)]
            environment = {**os.environ, "PYTHONPATH": root, "LOCKSTEP_KEY": key}
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)
            started.append(Launcher(process))
        return started

    yield start
    for launcher in started:
        launcher.process.kill()
        launcher.process.wait()
        assert launcher.process.stdout is not None
        launcher.process.stdout.close()


def pid_of(line: str) -> int:
    return int(line.rpartition(", ")[2])


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_two_hosts_are_one_run(start: Start) -> None:
    here, there = start("done")
    assert here.end() == (0, [])
    assert there.end() == (0, [])
    said = sorted(line.rpartition(", ")[0] for line in [*here.lines, *there.lines] if line.startswith("worker"))
    assert said == [
        "worker 0 of 3, 0 of 2 here, Connection, False, lo",
        "worker 1 of 3, 1 of 2 here, Connection, False, lo",
        "worker 2 of 3, 0 of 1 here, StoreAddress, False, lo",
    ]


def test_both_screens_show_the_error_of_a_worker_of_the_other_host(start: Start) -> None:
    here, there = start("fail")
    code, shown = here.end()
    assert code == 1
    assert shown[0] == f"error: worker 2 on {socket.gethostname()} (host 1) failed at step 57 (phase compute):"
    assert shown[-1] == "ValueError: this is the real cause"
    assert there.end() == (code, shown)


def test_a_worker_that_is_killed_ends_all_hosts(start: Start) -> None:
    here, there = start("wait")
    pid = pid_of(there.read_until("worker 2"))
    os.kill(pid, signal.SIGKILL)
    code, shown = here.end()
    assert (code, len(shown)) == (1, 1)
    assert f"worker 2 (pid {pid} on {socket.gethostname()} (host 1)) was killed by SIGKILL" in shown[0]
    assert there.end() == (code, shown)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP])
def test_a_launcher_that_is_gone_or_stopped_is_missed_by_the_other(start: Start, number: signal.Signals) -> None:
    here, there = start("wait")
    first, second = pid_of(here.read_until("worker 0")), pid_of(there.read_until("worker 2"))
    there.process.send_signal(number)
    code, shown = here.end()
    assert code == 1
    # A connection that is closed needs no patience.
    assert ("no sign of life" in shown[0]) == (number is signal.SIGSTOP)
    assert shown[0].startswith(f"error: host {socket.gethostname()} (host 1) ")
    assert shown[0].endswith("; lost with it: worker 2 at step 57 (phase exchange)")
    assert not is_alive(first)
    if number is signal.SIGSTOP:
        there.process.send_signal(signal.SIGCONT)
        assert there.end() == (code, shown)
    deadline = time.monotonic() + HANG_SECONDS
    while is_alive(second):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_without_the_chiefs_launcher_the_other_host_ends(start: Start) -> None:
    here, there = start("wait")
    pid = pid_of(there.read_until("worker 2"))
    here.process.kill()
    code, shown = there.end()
    assert code == 1
    assert shown[0] == "error: Host 0, which decides for all of them, is gone."
    assert "worker 2 at step 57 (phase exchange)" in shown[3]
    assert not is_alive(pid)


@pytest.mark.parametrize(("host", "number", "code"), [(0, signal.SIGTERM, 143), (1, signal.SIGUSR1, 75)])
def test_a_signal_to_any_launcher_stops_all_hosts(start: Start, host: int, number: signal.Signals, code: int) -> None:
    launchers = start("wait")
    launchers[0].read_until("worker 0")
    launchers[1].read_until("worker 2")
    time.sleep(0.3)
    launchers[host].process.send_signal(number)
    assert [launcher.end()[0] for launcher in launchers] == [code, code]


def test_a_host_that_cannot_take_part_says_why_on_both_screens(start: Start) -> None:
    here, there = start("refuse on host 1")
    code, shown = there.end()
    assert (code, shown[0]) == (2, "error: There is no folder photos.")
    code, shown = here.end()
    assert code == 1
    assert shown[0] == f"error: Host 1 ({socket.gethostname()}) cannot take part."
    assert shown[1] == "  given:    There is no folder photos."


@pytest.mark.slow
def test_what_the_chiefs_host_refuses_is_said_on_both_screens(start: Start) -> None:
    here, there = start("refuse on host 0")
    code, shown = there.end()
    assert (code, shown[0]) == (2, "error: There is no folder photos.")
    assert here.end() == (code, shown)


def test_a_stop_before_all_hosts_have_come_is_one_line(start: Start) -> None:
    here, _ = start("done", keys=("k" * 32, "x" * 32))
    here.read_until("waiting for host 1")
    here.process.send_signal(signal.SIGINT)
    code, shown = here.end()
    assert code == 130
    assert shown[-1] == "warning: stopped before the first step"


def test_strangers_who_crowd_the_port_keep_no_host_out(start: Start) -> None:
    """More connections than wait for a proof at a time, which send a byte now and then, and come again when ended."""
    here = start("done", hosts=[0])[0]
    here.read_until("waiting for host 1")
    port, is_over = int(str(here.process.args[4])), threading.Event()  # type: ignore[index]

    def crowd() -> None:
        strangers: dict[socket.socket, Iterator[int]] = {}
        deadline = time.monotonic() + HANG_SECONDS
        while not is_over.wait(0.1) and time.monotonic() < deadline:
            for stranger, said in [*strangers.items()]:
                try:
                    stranger.send(bytes([next(said, 0)]))
                except OSError:
                    stranger.close()
                    del strangers[stranger]
            with suppress(OSError):  # the run has ended
                while len(strangers) < 72:
                    stranger = socket.create_connection(("127.0.0.1", port), 5, ("127.0.0.2", 0))
                    strangers[stranger] = iter(b"lockstep 1\n")
        for stranger in strangers:
            stranger.close()

    crowding = threading.Thread(target=crowd)
    crowding.start()
    try:
        here.read_until(f"warning: port {port} is crowded with connections that do not prove")
        there = start("done", hosts=[1])[1]
        assert there.end() == (0, [])
    finally:
        is_over.set()
        crowding.join()
    assert here.end()[0] == 0


def test_all_start_again_when_a_worker_of_another_host_is_killed(start: Start) -> None:
    here, there = start("again")
    pid = pid_of(there.read_until("worker 2"))
    wait_until_all_stand_still(there)
    os.kill(pid, signal.SIGKILL)
    code, shown = here.end()
    assert (code, len(shown)) == (0, 2)
    assert f"worker 2 (pid {pid} on {socket.gethostname()} (host 1)) was killed by SIGKILL" in shown[0]
    assert shown[1].startswith("all workers start again, from the last checkpoint")
    assert there.end() == (0, shown)


def test_a_host_that_is_lost_may_come_again(start: Start) -> None:
    here, there = start("again")
    there.read_until("worker 2")
    wait_until_all_stand_still(there)
    there.process.kill()
    here.read_until("all workers start again")
    time.sleep(1.5)  # the others are back by then, and wait for this one
    back = start("again", hosts=[1])[2]
    assert back.end() == (0, [])
    assert here.end()[0] == 0


def wait_until_all_stand_still(launcher: Launcher) -> None:
    folder = Path(str(launcher.process.args[1])).parent  # type: ignore[index]
    deadline = time.monotonic() + HANG_SECONDS
    while len(list(folder.glob("first-*"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
