"""What happens to a run that is disturbed: each fault is a function of the command and a source of chance."""

from __future__ import annotations

import random
import resource
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lockstep.chaos.command import TrainCommand, send
from lockstep.run_files import CHECKPOINTS

Inject = Callable[[TrainCommand, random.Random], str]
"""Does it, and says in a few words what was done."""

_SLOW_SECONDS, _STOPPED_SECONDS, _RUNNING_SECONDS = 4.0, 0.18, 0.02
_APART_SECONDS = 0.3


@dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    help: str
    inject: Inject
    ends_command: bool
    """The command ends, and is to be given again; else the run recovers by itself, where its recipe lets it."""
    ends_workers: bool = True
    """Some worker is lost, and so the run begins again, in this command or the next one."""
    is_possible: Callable[[TrainCommand], bool] = lambda command: command.chief() is not None
    """Whether it can come now; a fault that cannot yet is waited for."""


def _kill(command: TrainCommand, rng: random.Random) -> str:
    workers = command.workers()
    return _killed("a worker", rng.choice(workers[1:] or workers))


def _kill_chief(command: TrainCommand, rng: random.Random) -> str:
    return _killed("the chief", command.workers()[0])


def _killed(who: str, pid: int) -> str:
    send(pid, signal.SIGKILL)
    return f"SIGKILL to {who}, pid {pid}"


def _kill_two(command: TrainCommand, rng: random.Random) -> str:
    """The second one most likely while the others go on without the first."""
    workers = command.workers()
    victims = rng.sample(workers, min(2, len(workers)))
    for pid in victims:
        send(pid, signal.SIGKILL)
        time.sleep(rng.random() * _APART_SECONDS)
    return f"SIGKILL to {len(victims)} workers one after another, pids {', '.join(map(str, victims))}"


def _signal_launcher(number: signal.Signals, command: TrainCommand, rng: random.Random) -> str:
    command.signal(number)
    return f"{number.name} to the launcher, pid {command.pid}"


def _kill_all(command: TrainCommand, rng: random.Random) -> str:
    command.kill_all()
    return "SIGKILL to all processes at once"


def _stop(command: TrainCommand, rng: random.Random) -> str:
    pid = rng.choice(command.workers())
    send(pid, signal.SIGSTOP)
    return f"SIGSTOP to a worker, pid {pid}"


def _slow(command: TrainCommand, rng: random.Random) -> str:
    workers = command.workers()
    pid, ends, before = rng.choice(workers[1:] or workers), time.monotonic() + _SLOW_SECONDS, command.step()
    while time.monotonic() < ends and command.poll() is None:
        send(pid, signal.SIGSTOP)
        time.sleep(_STOPPED_SECONDS)
        send(pid, signal.SIGCONT)
        time.sleep(_RUNNING_SECONDS)
    made = command.step() - before
    return f"a worker, pid {pid}, had a tenth of its time for {_SLOW_SECONDS:g} s, in which {made} steps were made"


def _fill_disk(command: TrainCommand, rng: random.Random) -> str:
    """Let nothing more be written by the chief: a limit on its files needs no rights, and leaves the disk alone."""
    pid = command.workers()[0]
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    return f"no file of the chief, pid {pid}, can grow any more"


def _damage_checkpoint(command: TrainCommand, rng: random.Random) -> str:
    command.kill_all()
    newest = _checkpoints(command)[-1]
    path = rng.choice(sorted(path for path in newest.iterdir() if path.stat().st_size))
    at = rng.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    return f"SIGKILL to all processes at once, and a bit of {newest.name}/{path.name} turned over"


def _damage_data(command: TrainCommand, rng: random.Random) -> str:
    command.kill_all()
    assert command.data is not None, "it is possible"
    return f"SIGKILL to all processes at once, and {command.data.damage(rng)}"


def _checkpoints(command: TrainCommand) -> list[Path]:
    return sorted((command.workdir / CHECKPOINTS).glob("step-*"))


FAULTS: Mapping[str, Fault] = {
    "kill": Fault("SIGKILL to a worker that is not the chief", _kill, ends_command=False),
    "chief": Fault("SIGKILL to the chief, which writes the files", _kill_chief, ends_command=False),
    "two": Fault("SIGKILL to two workers, up to 0.3 s apart", _kill_two, ends_command=False),
    "stop": Fault("SIGSTOP to a worker, which never goes on", _stop, ends_command=False),
    "slow": Fault("a worker gets a tenth of its time, for some seconds", _slow, ends_command=False, ends_workers=False),
    "preempt": Fault(
        "SIGTERM to the launcher: the run saves and ends", partial(_signal_launcher, signal.SIGTERM), ends_command=True
    ),
    "launcher": Fault("SIGKILL to the launcher alone", partial(_signal_launcher, signal.SIGKILL), ends_command=True),
    "all": Fault("SIGKILL to all processes at once", _kill_all, ends_command=True),
    "disk": Fault("nothing more can be written, as on a full disk", _fill_disk, ends_command=True),
    "checkpoint": Fault(
        "all are killed, and a bit of the newest checkpoint is turned over",
        _damage_checkpoint,
        ends_command=True,
        is_possible=lambda command: command.chief() is not None and len(_checkpoints(command)) > 1,
    ),
    "records": Fault(
        "all are killed, and files of the training data are cut short, until the command says so",
        _damage_data,
        ends_command=True,
        is_possible=lambda command: command.chief() is not None and command.data is not None,
    ),
}
"""Faults by the names that `--faults` takes."""
