"""The launcher with real processes: each test runs a script that launches small workers, most without torch."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from worker_processes import HANG_SECONDS

from lockstep.errors import InputError
from lockstep.launcher import launch as launching
from lockstep.launcher.forkserver import Event
from lockstep.launcher.hosts import Conclusion
from lockstep.launcher.launch import exit_code_of_stop, is_worker
from lockstep.launcher.supervisor import STOPPED_EARLY, RunOutcome
from lockstep.launcher.survival import Restarts
from lockstep.launcher.watchdog import Failure, root_cause
from lockstep.workers.channel import Channel
from lockstep.workers.environment import SHORT_WAITS, WAITS_ALONE

pytestmark = pytest.mark.process

WORKERS = """
import atexit
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from lockstep.errors import DataError, InputError, PeerLostError
from lockstep.workers.pulse import of_this_process

RANK = os.environ.get("RANK")
DIED = Path(__file__).parent / "died"
keep = []


def plan(argv):
    if argv[0] == "refuse":
        raise InputError("No such recipe.", given="mnits", expected="a recipe", hint="say mnist")
    if argv[0] == "linger":
        say("planning", os.getpid())
        wait()
    return {"workers": 1 if argv[0] in ("alone", "here") else 2, "restarts": int(argv[0].startswith("again"))}


def say(*words):
    # One write a line: the workers share the pipe.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())


def wait():
    threading.Event().wait()


def main(argv):
    say("worker", RANK, os.getpid())
    of_this_process().at(57, "compute")
    return globals()[argv[0]](RANK == "1") or 0


def done(second):
    say(RANK, os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"], sys.argv[1:])


def alone(second):
    say("MASTER_ADDR" in os.environ, os.environ["MALLOC_TRIM_THRESHOLD_"], os.environ["OMP_NUM_THREADS"])


def here(second):
    say("in the launcher itself")


def fail(second):
    if second:
        raise ValueError("this is the real cause")
    wait()


def fail_late(second):
    if second:
        threading.Event().wait(0.05)
        raise ValueError("this is the real cause")
    try:
        raise RuntimeError("[../gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:2213")
    finally:
        raise RuntimeError("while cleaning up")


def wrong(second):
    if second:
        raise DataError("Record 7 is damaged.", given="a", expected="b", hint="c")
    wait()


def leave(second):
    if second:
        sys.exit("leaving with words")
    wait()


def orphan(second):
    if second:
        wait()
    child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    say("grandchild", child.pid)
    raise ValueError("its child must go too")


def die(second):
    if second:
        os.kill(os.getpid(), signal.SIGKILL)
    wait()


def again(second):
    say("earlier", of_this_process().earlier_seconds > 1.0)
    if second:
        if not DIED.exists():
            DIED.mkdir()
            os.kill(os.getpid(), signal.SIGKILL)
    elif not DIED.exists():
        wait()


def again_and_again(second):
    if second:
        os.kill(os.getpid(), signal.SIGKILL)
    wait()


def again_not_for_errors(second):
    fail(second)


def freeze(second):
    if second:
        of_this_process().at(58, "exchange")
        threading.Event().wait(0.3)
        os.kill(os.getpid(), signal.SIGSTOP)
    wait()


def hold_the_interpreter(second):
    if second:
        threading.Event().wait(0.3)
        re.match("(a+)+$", "a" * 100 + "b")
    exchange()


def stuck(second):
    wait()


def sleep(second):
    if second:
        time.sleep(1000)
    exchange()


def spin(second):
    while second:
        pass
    exchange()


def exchange():
    of_this_process().at(57, "exchange")
    wait()


def start(second):
    of_this_process().phase = "start"
    say("starts")
    wait()


class NeverEnds:
    # Its destructor would run when the interpreter is taken down.
    def __del__(self):
        wait()


def end_with_a_destructor(second):
    keep.append(NeverEnds())


def upload():
    while not Path(__file__).with_name("go").exists():
        threading.Event().wait(0.01)
    say("uploaded")


def end_with_a_thread(second):
    of_this_process().ended = True
    threading.Thread(target=upload).start()
    atexit.register(say, "exit function")


def end_with_a_thread_that_hangs(second):
    threading.Thread(target=wait).start()


def fork(second):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        threading.Event().wait(0.5)
        say(RANK, "goes on")
    elif second:
        raise ValueError("in the child")


def vanish(second):
    if second:
        os._exit(0)
    exchange_in_vain()


def exchange_in_vain():
    threading.Event().wait(0.1)
    raise PeerLostError("worker 0 waits for a worker that is gone.", given="worker 1", expected="b", hint="c")


def stop(second):
    pulse = of_this_process()
    while not pulse.stop_requested:
        threading.Event().wait(0.01)
    say(RANK, "saved after", pulse.stop_requested)


def end_then_stop(second):
    pulse = of_this_process()
    pulse.ended = True
    say(RANK, "scores", os.getpid())
    stop(second)


def stop_slowly(second):
    pulse = of_this_process()
    while not pulse.stop_requested:
        threading.Event().wait(0.01)
    say(RANK, "saves")
    threading.Event().wait(0.3)
    say(RANK, "saved")


def fail_to_stop(second):
    stop(second)
    if second:
        raise OSError("disk is full")
"""

SCRIPT = """
import sys

import toy
from lockstep.launcher import forkserver
from lockstep.launcher.launch import launch_command
from lockstep.launcher.watchdog import Limits

if __name__ == "__main__":
    forkserver._CLOSE_SECONDS = 3600  # longer than any test waits
    code = launch_command(sys.argv[1:], plan=toy.plan, main=toy.main, preload=[{preload}], limits=Limits({limits}))
    assert [{preload}] or "torch" not in sys.modules
    sys.exit(code)
"""

Launch = Callable[..., "Launched"]


class Launched:
    """A launcher under way, in a session of its own as a terminal's shell would give it."""

    def __init__(self, script: Path, argv: Sequence[str]) -> None:
        root = Path(__file__).parents[2]
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self.process = subprocess.Popen(
            [sys.executable, str(script), *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**environment, "PYTHONPATH": str(root)},
        )
        self.lines: list[str] = []

    def read(self, count: int) -> list[str]:
        """Wait for that many lines."""
        assert self.process.stdout is not None
        self.lines += [self.process.stdout.readline().rstrip("\n") for _ in range(count)]
        return self.lines

    def pids(self, count: int = 2) -> dict[str, int]:
        """Wait for that many lines "name pid", by name."""
        return {name: int(pid) for name, _, pid in (line.rpartition(" ") for line in self.read(count))}

    def end(self) -> tuple[int, list[str], list[str]]:
        """Exit code, lines of the workers, and of the launcher without their level; nothing is left of the session."""
        pids = session(self.process.pid)
        stdout, stderr = self.process.communicate(timeout=HANG_SECONDS)
        assert [pid for pid in pids if alive(pid)] == []
        assert session(self.process.pid) == []
        told = [re.sub("^(warning|error): ", "", line) for line in stderr.splitlines()]
        return self.process.returncode, self.lines + stdout.splitlines(), told


def stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0", "0", "0"]


def alive(pid: int) -> bool:
    return stat(pid)[0] not in "XZ"


def session(leader: int) -> list[int]:
    """All living processes that descend from a session's leader, orphans too."""
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()]
    return [pid for pid in pids if stat(pid)[3] == str(leader) and alive(pid)]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started: list[Launched] = []

    def start(
        *argv: str,
        workers: str = WORKERS,
        preload: str = "",
        limits: str = "grace_seconds=0.2",
    ) -> Launched:
        (tmp_path / "toy.py").write_text(workers)
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(preload=preload, limits=limits))
        started.append(Launched(script, argv))
        return started[-1]

    yield start
    for each in started:
        for pid in session(each.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        each.process.communicate()


def test_each_worker_runs_the_same_command_with_its_rank(launch: Launch) -> None:
    code, said, told = launch("done", "--flag").end()
    assert code == 0
    assert sorted(said)[:2] == [f"{rank} {rank} 2 2 ['done', '--flag']" for rank in range(2)]
    assert told == []


def test_one_worker_needs_no_address_and_its_memory_is_kept(launch: Launch) -> None:
    code, said, _ = launch("alone").end()
    assert code == 0
    assert said[1:] == ["False 2147483647 1"]


def test_a_worker_that_raises_ends_the_run_with_its_traceback_last(launch: Launch) -> None:
    code, _, told = launch("fail").end()
    assert code == 1
    assert told[0] == "worker 1 failed at step 57 (phase compute):"
    assert told[1] == "Traceback (most recent call last):"
    assert "in main" in told[2]
    assert told[-1] == "ValueError: this is the real cause"


def test_what_survivors_say_of_a_lost_peer_is_never_the_cause(launch: Launch) -> None:
    code, _, told = launch("fail_late").end()
    assert code == 1
    assert told[0] == "worker 1 failed at step 57 (phase compute):"
    assert told[-1] == "ValueError: this is the real cause"


def test_wrong_input_is_told_without_a_traceback_and_is_no_failure_of_a_worker(launch: Launch) -> None:
    code, _, told = launch("wrong").end()
    assert code == 2
    assert told[0] == "Record 7 is damaged."
    assert [line[:10] for line in told[1:]] == ["  given:  ", "  expected", "  hint:   ", "  at:     "]


def test_a_worker_that_leaves_with_words_has_failed(launch: Launch) -> None:
    running = launch("leave")
    pid = running.pids()["worker 1"]
    code, _, told = running.end()
    assert code == 1
    assert told[0] == "leaving with words"
    assert told[1:] == [f"worker 1 (pid {pid}) ended with exit code 1 at step 57 (phase compute)"]


def test_a_killed_worker_is_named_with_the_signal(launch: Launch) -> None:
    running = launch("die")
    pid = running.pids()["worker 1"]
    code, _, told = running.end()
    assert code == 1
    assert len(told) == 1
    assert told[0].startswith(f"worker 1 (pid {pid}) was killed by SIGKILL at step ")


def test_workers_start_again_when_one_is_killed(launch: Launch) -> None:
    code, said, told = launch("again").end()
    assert code == 0
    assert [line.rpartition(" ")[0] for line in said].count("worker 1") == 2
    assert sorted(line for line in said if line.startswith("earlier")) == ["earlier False"] * 2 + ["earlier True"] * 2
    assert len(told) == 2
    assert "was killed by SIGKILL" in told[0]
    assert told[1] == AGAIN + ": in 1 s (restart 1 of 1 without progress)"


def test_workers_that_are_killed_again_and_again_end_the_run(launch: Launch) -> None:
    code, said, told = launch("again_and_again").end()
    assert code == 1
    assert [line.rpartition(" ")[0] for line in said].count("worker 1") == 2
    assert "was killed by SIGKILL" in told[-1]


def test_an_error_of_a_worker_is_not_tried_again(launch: Launch) -> None:
    code, said, told = launch("again_not_for_errors").end()
    assert code == 1
    assert [line.rpartition(" ")[0] for line in said].count("worker 1") == 1
    assert told[-1] == "ValueError: this is the real cause"


def test_a_stop_between_two_starts_ends_at_once(launch: Launch) -> None:
    running = launch("again")
    assert running.process.stderr is not None
    assert "was killed" in running.process.stderr.readline()
    running.process.send_signal(signal.SIGTERM)
    code, _, told = running.end()
    assert code == 143
    assert told[-1] == "stopped before the workers had started again; what was saved before stands"


def test_a_stopped_worker_is_killed_and_named(launch: Launch) -> None:
    running = launch("freeze", limits="stopped_seconds=0.3, grace_seconds=0.1")
    pid = running.pids()["worker 1"]
    code, _, told = running.end()
    assert code == 1
    assert told[-1].startswith(f"worker 1 (pid {pid}) was stopped (SIGSTOP) for 0.")
    assert told[-1].endswith(" s at step 58 (phase exchange), and was killed")


def test_a_worker_that_runs_in_silence_shows_its_stack_and_is_killed(launch: Launch) -> None:
    running = launch(
        "hold_the_interpreter", limits="show_seconds=0.4, silent_seconds=0.9, grace_seconds=0.1, stopped_seconds=0.2"
    )
    pid = running.pids()["worker 1"]
    code, _, told = running.end()
    assert code == 1
    assert told[0] == f"worker 1 (pid {pid}) gives no sign of life for 0 s at step 57 (phase compute); its stack:"
    assert any("in hold_the_interpreter" in line for line in told)
    assert told[-1].startswith(f"worker 1 (pid {pid}) gave no sign of life for ")


@pytest.mark.parametrize("how", ["sleep", "spin"])
def test_a_worker_that_hangs_in_python_shows_its_stack_and_is_killed(launch: Launch, how: str) -> None:
    running = launch(how, limits="show_seconds=0.3, hang_seconds=0.6, grace_seconds=0.2")
    pid = running.pids()["worker 1"]
    code, _, told = running.end()
    assert code == 1
    assert told[0] == f"worker 1 (pid {pid}) has been at step 57 (phase compute) for 0 s; its stack follows"
    assert told[1] == f"worker 1 (pid {pid}) is at:"
    assert any(f"in {how}" in line for line in told)
    assert told[-1].startswith(f"worker 1 (pid {pid}) has been at step 57 (phase compute) for 1 s, and was killed;")


def test_a_worker_that_leaves_the_others_without_an_error_is_the_cause(launch: Launch) -> None:
    running = launch("vanish")
    pid = running.pids()["worker 1"]
    code, _, told = running.end()
    assert code == 1
    assert len(told) == 1
    assert told[0].startswith(f"worker 1 (pid {pid}) ended with exit code 0 at step ")
    assert "which needs it: their loops do not end at the same step" in told[0]


def test_when_all_is_done_a_destructor_that_hangs_keeps_nobody_waiting(launch: Launch) -> None:
    assert launch("end_with_a_destructor").end()[::2] == (0, [])


def test_threads_and_exit_functions_of_a_worker_are_part_of_its_work(launch: Launch, tmp_path: Path) -> None:
    running = launch("end_with_a_thread")
    running.pids()
    os.killpg(running.process.pid, signal.SIGTERM)
    assert running.process.stderr is not None
    running.process.stderr.readline()
    (tmp_path / "go").touch()
    code, said, _ = running.end()
    assert (code, sorted(said[2:])) == (0, ["exit function"] * 2 + ["uploaded"] * 2)


def test_a_thread_that_never_ends_is_shown_and_ended(launch: Launch) -> None:
    running = launch("end_with_a_thread_that_hangs", limits="show_seconds=0.05, hang_seconds=0.1, grace_seconds=0.2")
    code, _, told = running.end()
    assert code == 1
    assert any("in wait" in line for line in told)
    assert "has been at step 57 (phase end) for" in told[-1]


def test_a_child_that_a_worker_has_forked_does_not_speak_for_it(launch: Launch) -> None:
    code, said, told = launch("fork").end()
    assert (code, sorted(said[-2:])) == (0, ["0 goes on", "1 goes on"])
    assert told[-1] == "ValueError: in the child"  # its own traceback, and nothing of the launcher
    assert not any(line.startswith("worker") for line in told)


def test_children_of_workers_go_too(launch: Launch) -> None:
    running = launch("orphan")
    child = running.pids(3)["grandchild"]
    assert running.end()[0] == 1
    assert not alive(child)


def test_a_plan_that_refuses_starts_no_worker(launch: Launch) -> None:
    code, said, told = launch("refuse").end()
    assert (code, said) == (2, [])
    assert told[0] == "No such recipe."
    assert told[-1] == "  hint:     say mnist"


def test_a_signal_during_the_plan_ends_it_at_once(launch: Launch) -> None:
    running = launch("linger")
    assert running.read(1)[0].startswith("planning ")
    os.killpg(running.process.pid, signal.SIGTERM)
    code, _, told = running.end()
    assert (code, told) == (143, ["stopped before the first step"])


def test_a_signal_while_torch_is_imported_ends_it_at_once(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "long_import.py").write_text(
        "import os, threading\nos.write(1, b'importing\\n')\nthreading.Event().wait()\n"
    )
    running = launch("done", preload='"long_import"')
    assert running.read(1) == ["importing"]
    os.killpg(running.process.pid, signal.SIGINT)
    code, _, told = running.end()
    assert (code, told) == (130, ["stopped before the first step"])


def test_a_signal_while_the_workers_start_ends_them_at_once(launch: Launch) -> None:
    running = launch("start")
    running.read(4)
    os.killpg(running.process.pid, signal.SIGTERM)
    code, _, told = running.end()
    assert (code, told) == (143, ["stopped before the first step"])


def test_a_plan_that_is_killed_is_named(launch: Launch) -> None:
    running = launch("linger")
    os.kill(int(running.read(1)[0].split()[-1]), signal.SIGKILL)
    code, _, told = running.end()
    assert (code, told) == (1, ["the process that plans the run was killed by SIGKILL"])


def test_a_module_that_cannot_be_preloaded_is_told(launch: Launch) -> None:
    code, _, told = launch("done", preload='"no_such_module"').end()
    assert code == 1
    assert told[-5] == "ModuleNotFoundError: No module named 'no_such_module'"
    assert told[-4] == "The process that starts the workers is gone, and the workers with it."


STOPPING = "stopping after this step; Ctrl-C aborts"
STOPPING_BY_CTRL_C = "stopping after this step; Ctrl-C again aborts"
AGAIN = "all workers start again, from the last checkpoint or, where there is none, from the beginning"


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_the_first_signal_lets_the_workers_save(launch: Launch, number: signal.Signals, expected: int) -> None:
    running = launch("stop")
    running.pids()
    # As a terminal does, or a scheduler: the launcher, its server and the workers all get it.
    os.killpg(running.process.pid, number)
    code, said, told = running.end()
    assert code == expected
    assert sorted(said)[:2] == [f"{rank} saved after {number.name}" for rank in range(2)]
    assert told == [STOPPING_BY_CTRL_C if number == signal.SIGINT else STOPPING]


def test_a_notice_to_one_worker_stops_them_all(launch: Launch) -> None:
    running = launch("stop")
    os.kill(running.pids()["worker 1"], signal.SIGTERM)
    code, said, told = running.end()
    assert code == 143
    assert sorted(said)[:2] == [f"{rank} saved after SIGTERM" for rank in range(2)]
    assert told == [STOPPING]


def test_a_hangup_that_whoever_started_us_has_ignored_stops_nothing(launch: Launch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        running = launch("stop")
    finally:
        signal.signal(signal.SIGHUP, before)
    running.pids()
    os.killpg(running.process.pid, signal.SIGHUP)
    os.killpg(running.process.pid, signal.SIGTERM)
    code, said, _ = running.end()
    assert code == 143
    assert sorted(said)[:2] == [f"{rank} saved after SIGTERM" for rank in range(2)]


def test_a_notice_that_comes_again_costs_nothing(launch: Launch) -> None:
    running = launch("stop_slowly")
    running.pids()
    os.killpg(running.process.pid, signal.SIGUSR1)
    assert sorted(running.read(2)[2:]) == ["0 saves", "1 saves"]
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        os.killpg(running.process.pid, number)
    code, said, told = running.end()
    assert (code, told) == (75, [STOPPING])
    assert sorted(said)[:4] == ["0 saved", "0 saves", "1 saved", "1 saves"]


def test_who_does_not_save_in_time_is_ended(launch: Launch) -> None:
    running = launch("stuck", limits="stop_seconds=0.3")
    running.pids()
    running.process.send_signal(signal.SIGUSR1)
    code, _, told = running.end()
    assert code == 75
    assert told == [
        STOPPING,
        "the workers took longer to stop than the time of grace, and were killed; what was saved before stands",
    ]


def test_a_signal_to_a_run_that_has_ended_interrupts_its_scoring_alone(launch: Launch) -> None:
    running = launch("end_then_stop")
    running.read(4)
    running.process.send_signal(signal.SIGTERM)
    code, said, told = running.end()
    assert code == 0
    assert sorted(line for line in said if "saved" in line) == [f"{rank} saved after SIGTERM" for rank in range(2)]
    # The launcher may not have heard of the end yet when it passes the signal on.
    assert told in (["the run has ended, and its scoring is left off; Ctrl-C aborts"], [STOPPING])


def test_a_second_ctrl_c_aborts(launch: Launch) -> None:
    running = launch("stuck")
    running.pids()
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.process.stderr is not None
    assert running.process.stderr.readline() == f"warning: {STOPPING_BY_CTRL_C}\n"
    os.killpg(running.process.pid, signal.SIGINT)
    code, _, told = running.end()
    assert (code, told) == (137, ["aborted, without a checkpoint"])


def test_a_failure_while_stopping_is_a_failure(launch: Launch) -> None:
    running = launch("fail_to_stop")
    running.pids()
    os.killpg(running.process.pid, signal.SIGINT)
    code, _, told = running.end()
    assert code == 1
    assert told[-1] == "OSError: disk is full"


def test_nothing_outlives_a_launcher_that_is_killed(launch: Launch) -> None:
    running = launch("stuck")
    running.pids()
    descriptors = [os.pidfd_open(pid) for pid in session(running.process.pid)]
    assert len(descriptors) == 4, "launcher, server and two workers"
    running.process.kill()
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 10.0)[0] == [descriptor]
        os.close(descriptor)
    assert session(running.process.pid) == []


def test_nothing_outlives_a_launcher_that_is_killed_while_torch_is_imported(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "long_import.py").write_text(
        "import os, threading\nos.write(1, b'importing\\n')\nthreading.Event().wait()\n"
    )
    running = launch("done", preload='"long_import"')
    assert running.read(1) == ["importing"]
    descriptors = [os.pidfd_open(pid) for pid in session(running.process.pid)]
    assert len(descriptors) == 2
    running.process.kill()
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 20)[0]
        os.close(descriptor)


def test_when_the_server_is_killed_its_workers_go_and_the_launcher_says_so(launch: Launch) -> None:
    running = launch("stuck")
    os.kill(int(stat(running.pids()["worker 1"])[1]), signal.SIGKILL)
    code, _, told = running.end()
    assert code == 1
    assert told[0] == "The process that starts the workers is gone, and the workers with it."
    assert told[1] == "  given:    exit status -9"


JOINING = """
import torch
import lockstep


def plan(argv):
    return {"workers": 2}


def main(argv):
    here = lockstep.join("cpu")
    has_share = torch.get_num_threads() == here.pulse.shared_threads
    gathered = here.group.gather([here.rank, here.num_local_workers, has_share, here.pulse.launched])
    if here.is_chief:
        print(gathered, here.group.store.num_keys() > 0)
    here.group.agree("the seed", here.rank)
"""


def test_launched_workers_join_through_the_store(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_DISPLAY_ENV", "verbose")
    code, said, told = launch(workers=JOINING, preload='"torch"').end()
    assert said == ["[[0, 2, True, True], [1, 2, True, True]] True"]
    assert code == 2
    assert "The workers do not agree on the seed: worker 1 differs." in told
    # OpenMP itself says what it has read: by default in this launcher, whose script imports torch, then in the server.
    read = [line.split()[-1] for line in told if "GOMP_SPINCOUNT" in line or "KMP_BLOCKTIME" in line]
    assert read[1:] in [[f"'{waits['GOMP_SPINCOUNT']}'"] for waits in (SHORT_WAITS, WAITS_ALONE)]


def test_importing_the_launcher_loads_no_torch() -> None:
    code = "import sys, lockstep.launcher.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


ELSEWHERE = """
import sys
sys.platform = "darwin"
from lockstep.launcher.launch import launch_command
import toy
sys.exit(launch_command(sys.argv[1:], plan=toy.plan, main=toy.main))
"""


def test_elsewhere_one_worker_runs_in_the_launcher_itself(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(WORKERS)
    script = tmp_path / "script.py"
    script.write_text(ELSEWHERE)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

    def run(mode: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, script, mode], env=environment, capture_output=True, text=True, check=False
        )

    assert run("here").stdout.splitlines()[1:] == ["in the launcher itself"]
    skipped = run("done")
    assert skipped.returncode == 2
    assert skipped.stderr.splitlines()[:2] == ["error: Several workers need Linux.", "  given:    2 workers on darwin"]


STEP = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "a,b", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, True),
        ({**STEP, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1"}, True),
        ({**STEP, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}, False),
    ],
    ids=["nobody", "torch", "several tasks a node", "one task a node"],
)
def test_a_worker_knows_that_it_is_one(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: bool
) -> None:
    monkeypatch.setattr("os.environ", environment)
    assert is_worker() is expected


def test_half_of_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"RANK": "1"})
    with pytest.raises(InputError, match="The launcher has not set WORLD_SIZE"):
        is_worker()


# Decisions, without processes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signal_name", "requeue", "code"),
    [
        ("SIGINT", False, 130),
        ("SIGTERM", False, 143),
        ("SIGHUP", False, 129),
        ("SIGUSR1", False, 75),
        ("SIGTERM", True, 75),
        ("SIGINT", True, 130),
        ("SIGUSR1", True, 75),
    ],
)
def test_where_sigterm_is_a_preemption_its_code_says_so(signal_name: str, requeue: bool, code: int) -> None:
    assert exit_code_of_stop(signal_name, requeue=requeue) == code


BAD, INPUT, LOST = Failure("it is bad"), Failure("wrong input", "input"), Failure("lost worker 1", "peer")


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (RunOutcome([], None), 0, ""),
        (RunOutcome([], "SIGTERM"), 75, ""),
        (RunOutcome([BAD], None), 1, "it is bad"),
        (RunOutcome([LOST, INPUT, BAD], "SIGTERM"), 2, "wrong input"),
        (RunOutcome([LOST], None), 1, "lost worker 1"),
        (RunOutcome([BAD], "SIGINT", aborted=True), 137, "aborted, without a checkpoint"),
        (
            RunOutcome([], "SIGINT", late=True),
            130,
            "the workers took longer to stop than the time of grace, and were killed; what was saved before stands",
        ),
    ],
)
def test_the_end_of_a_run_has_a_code_and_a_word(outcome: RunOutcome, code: int, said: str) -> None:
    server: Any = None
    failure = root_cause(outcome.failures) if outcome.failures else None
    conclusion = launching._Launcher(server, [], [], requeue=True)._conclude(outcome, failure)
    assert (conclusion.code, conclusion.text) == (code, said)


class FakeServer:
    """A fork server whose only process says something and ends; with no status it goes on."""

    def __init__(self, message: dict[str, Any] | None, status: int | None, requests: list[str]) -> None:
        self._message, self._status, self._requests = message, status, requests

    def fork(self, name: str, task: object, connections: list[socket.socket]) -> None:
        channel = Channel(connections[0])
        if self._message is not None:
            channel.send(self._message)
        channel.close()

    def events(self, timeout_seconds: float) -> list[Event]:
        if self._status is None:
            self._requests.append("SIGTERM")
        return [Event("plan", 1, None), Event("plan", 1, self._status)]


@pytest.mark.parametrize(
    ("message", "status", "expected"),
    [
        ({"plan": {"workers": 2}}, 0, {"workers": 2}),
        ({"failed": "No such recipe.\n"}, 2, Conclusion(2, logging.ERROR, "No such recipe.")),
        (None, 64, Conclusion(64, logging.ERROR)),
        (None, 0, Conclusion(0, logging.ERROR)),
        (None, -9, Conclusion(1, logging.ERROR, "the process that plans the run was killed by SIGKILL")),
        (None, None, Conclusion(75, logging.WARNING, STOPPED_EARLY)),
    ],
)
def test_a_plan_or_the_end_of_a_run_without_one(
    message: dict[str, Any] | None, status: int | None, expected: Any
) -> None:
    requests: list[str] = []
    server: Any = FakeServer(message, status, requests)
    launcher = launching._Launcher(server, [], requests, requeue=True)
    assert launcher.make(never_called) == expected


def never_called(argv: list[str]) -> dict[str, Any]:
    raise AssertionError("the fake server plans nothing")


def test_a_row_of_restarts_ends_and_progress_begins_a_new_one() -> None:
    restarts = Restarts(3)
    assert [restarts.may_start(step) for step in (0, 0, 0, 0)] == [True, True, True, False]
    restarts = Restarts(2)
    assert [restarts.may_start(step) for step in (5, 5, 6, 2, 6)] == [True, True, True, True, False]
    restarts, pauses = Restarts(9), []
    while restarts.may_start(0):
        pauses.append(restarts.pause_seconds)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert not Restarts(0).may_start(7)
