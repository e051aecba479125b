"""The code that a forked process runs: the plan or a worker. Importing this module loads no torch."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from io import TextIOWrapper
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from lockstep.errors import LockstepError, PeerLostError
from lockstep.launcher.watchdog import FailureKind
from lockstep.terminal import outlive_terminal
from lockstep.tracebacks import place_in_script, short_traceback
from lockstep.workers import pulse as pulses
from lockstep.workers.channel import Channel
from lockstep.workers.membership import GENERATION, NEWCOMER, Generations
from lockstep.workers.peers import says_peer_is_lost
from lockstep.workers.pulse import Pulse
from lockstep.workers.signals import pass_on_notices
from lockstep.workers.store_server import StoreAddress, inherit


def reference(function: Callable[..., object]) -> str:
    """Return the name under which a forked process finds a function of a module."""
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or getattr(sys.modules[module], name, None) is not function:
        raise ValueError(f"{module}.{name} is not at the top level of a module that can be imported")
    return f"{module}:{name}"


def run_task(task: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Do what this process was forked for, and exit."""
    channel = Channel(socket.socket(fileno=descriptors[0]))
    for descriptor in descriptors[1:]:
        inherit(Connection(descriptor))
    if "store" in task:
        inherit(StoreAddress(*task["store"]))
    sys.argv = task["sys_argv"]
    for stream in (sys.stdout, sys.stderr):
        # With PYTHONUNBUFFERED, print writes a line and its end apart, and other workers write in between.
        if isinstance(stream, TextIOWrapper) and stream.write_through:
            stream.reconfigure(line_buffering=True, write_through=False)
    if "numpy.random" in sys.modules:  # else all workers would draw alike; Python's own does so by itself
        sys.modules["numpy.random"].seed()
    if task["kind"] == "plan":
        _exit_now(_plan(task, channel))
    _worker(task, channel)


def _exit_now(code: int) -> NoReturn:
    # Finalizing an interpreter with torch in it takes 0.2 s or more, and may crash or hang when all is done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def load_function(name: str) -> Callable[..., Any]:
    """Import a function by the name that `reference` has given it."""
    module, _, function = name.partition(":")
    resolved: Callable[..., Any] = getattr(import_module(module), function)
    return resolved


def _plan(task: Mapping[str, Any], channel: Channel) -> int:
    try:
        channel.send({"plan": load_function(task["function"])(task["argv"])})
    except SystemExit as leaving:
        return _exit_code(leaving)
    except Exception as error:
        channel.send({"failed": str(error) if isinstance(error, LockstepError) else short_traceback(error)})
        return 2 if isinstance(error, LockstepError) else 1
    return 0


def _worker(task: Mapping[str, Any], channel: Channel) -> NoReturn:
    os.environ.update(task["environment"])
    owner = os.getpid()
    outlive_terminal()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)
    pulse = Pulse(
        launched=True,
        generations=_generations(task["environment"], channel),
        earlier_seconds=task["earlier_seconds"],
        shared_threads=task["shared_threads"],
    )
    pulses.start_beating(channel, pulse)
    pass_on_notices(pulse)
    code, failure = 1, None
    try:
        if pulse.shared_threads and "torch" in sys.modules:
            import torch

            torch.set_num_threads(pulse.shared_threads)
        code = load_function(task["function"])(task["argv"]) or 0
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except BaseException as error:
        sys.last_value = error  # as where the interpreter shows it: who leaves the run looks there
        text = _text(error, whole=task.get("whole_traceback", False))
        failure = {"failed": text, "kind": _kind(error), "step": pulse.step, "phase": pulse.phase}
        if os.getpid() != owner:
            sys.stderr.write(text)
    if os.getpid() != owner:  # forked by the worker's own code: not the worker, and nobody to speak for it
        _exit_now(code)
    if failure:
        channel.send(failure)
    if not code:
        pulse.at(pulse.step, "end")
    _end_threads()
    # The last beat of the thread may be a tenth of a second old.
    pulses.beat(pulse, channel)
    channel.send({"exit_code": code})
    _exit_now(code)


def _generations(environment: Mapping[str, str], channel: Channel) -> Generations | None:
    """What tells this worker who takes part; None where it ends with those that are lost."""
    generation = environment.get(GENERATION)
    if generation is None:
        return None
    return Generations(int(environment["RANK"]), channel.send, is_newcomer=generation == NEWCOMER)


def _end_threads() -> None:
    """Wait for threads and call exit functions, as an interpreter does at its end, while the launcher still watches."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()
    atexit._run_exitfuncs()


def _exit_code(leaving: SystemExit) -> int:
    """Return the code that the interpreter makes of the argument of sys.exit, and write its text as it does."""
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def _text(error: BaseException, *, whole: bool = False) -> str:
    """The text to show of an exception: its own, and its place, where Lockstep has raised it; else the traceback."""
    if whole:
        return "".join(traceback.format_exception(error))
    if not isinstance(error, LockstepError):
        return short_traceback(error)
    place = place_in_script(error)
    return "\n".join([str(error), *([f"  at:       {place}"] if place else []), *getattr(error, "__notes__", ())])


def _kind(error: BaseException) -> FailureKind:
    if _is_lost_peer(error):
        return "peer"
    return "input" if isinstance(error, LockstepError) and error.exit_code == 2 else "error"


def _is_lost_peer(error: BaseException | None) -> bool:
    """Whether an error, or one that was being handled when it was raised, says only that another worker is gone."""
    if error is None or isinstance(error, PeerLostError):
        return error is not None
    said_by_transport = isinstance(error, RuntimeError) and says_peer_is_lost(str(error))
    return said_by_transport or _is_lost_peer(error.__cause__ or error.__context__)
