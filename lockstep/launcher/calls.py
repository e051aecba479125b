"""A function of Python's on several workers: what a notebook, or a script, calls in place of `lockstep run`.

The workers are forked from a fresh process, never from this one: a kernel has threads, and perhaps a GPU, with which
none can be forked. So nothing of this process travels to them but the name of the function, which they import.
"""

from __future__ import annotations

import codecs
import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from lockstep.checks import NonNegativeFloat, NonNegativeInt, PositiveInt, check_value
from lockstep.durable import atomic_write
from lockstep.errors import InputError, LockstepError, WorkerError
from lockstep.launcher.entry import load_function, reference
from lockstep.launcher.forkserver import ForkServer
from lockstep.launcher.hosts import Conclusion
from lockstep.launcher.launch import ABORTED, FAILED, WRONG_INPUT, conduct, is_worker, several_need_linux
from lockstep.owner import scratch_folder
from lockstep.workers import pulse as pulses

_CALL, _RETURNED = "call.json", "returned-{}.json"
_PRELOAD = ("torch", "lockstep.training.loop")
_SPARES = ("lockstep.recipes.shipped", "lockstep.runs.run")
_END_OF_OUTPUT_SECONDS = 5.0


def launch(function: Callable[..., Any], workers: int, *, restarts: int = 0, hang_seconds: float | None = None) -> Any:
    """Call a function on several workers, which are started for it: `ls.launch(main, workers=2)` in a notebook.

    It blocks until all have returned. What they write is shown here, in the cell. Ctrl-C, or the kernel's interrupt,
    stops the loops of Lockstep in the function after their step, saved where they save, and the function goes on behind
    them; the second one ends the workers at once. No worker outlives this call, nor this process.

    Call it in the main thread. On other systems than Linux one worker runs in this very process.

    Args:
        function: one of a module, which the workers import anew, as its file is now; or `functools.partial` of one with
            arguments that JSON has: numbers, text, lists, mappings. `ls.join()` in it gives the worker.
        workers: how many; an accelerator for each, where there are some.
        restarts: how often all workers start again when some are lost; the function resumes by itself.
        hang_seconds: end workers that stay longer at one place of a step; 600 by default, 0 never.

    Returns:
        What the function has returned on worker 0: None, or what JSON has; a tuple comes as a list.

    Raises:
        InputError: the function is not one of a module, an argument cannot be sent, this is a worker or no main thread,
            or the function raises an InputError.
        WorkerError: a worker has failed, or has returned what cannot be sent; what it said is shown before.
        KeyboardInterrupt: stopped before the first step, or at once by a second Ctrl-C.
    """
    check_value("hang_seconds", hang_seconds, NonNegativeFloat | None)
    check_value("restarts", restarts, NonNegativeInt)
    return call_on_workers(function, workers, {"restarts": restarts, "hang_seconds": hang_seconds})


def call_on_workers(
    function: Callable[..., Any], workers: int, watch: Mapping[str, Any], shown_as: str | None = None
) -> Any:
    """Call a function as `launch` does, for a caller whose name errors show.

    `watch` are fields of a plan of `launch_command`, such as restarts and hang_seconds.
    """
    check_value("workers", workers, PositiveInt)
    _check_place(workers)
    name, arguments, named = _as_call(function)
    if sys.platform != "linux":
        if workers > 1:
            raise several_need_linux(f"{workers} workers")
        return function()
    with scratch_folder("lockstep-launch-") as folder:
        (folder / _CALL).write_text(json.dumps([name, arguments, named]))
        with _output_shown_here() as screen:
            server = ForkServer(_PRELOAD, screen)
            conclusion = conduct(server, [str(folder)], {**watch, "workers": workers}, _call, spares=_SPARES)
        conclusion.show()
        # Where others have gone on without worker 0, the first of them.
        returned = (folder / _RETURNED.format(rank) for rank in range(workers))
        path = next(filter(Path.exists, returned), None)
        if path is None or conclusion.code in (FAILED, WRONG_INPUT, ABORTED):
            raise _failure(conclusion, shown_as or name)
        return json.loads(path.read_bytes())


def _call(argv: list[str]) -> None:
    name, arguments, named = json.loads((Path(argv[0]) / _CALL).read_bytes())
    pulses.of_this_process().at(0, "script")
    returned = load_function(name)(*arguments, **named)
    try:
        text = json.dumps(returned)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"What {name} returns cannot be sent to the process that has called it.",
            given=f"a {type(returned).__name__}: {error}",
            expected="None, numbers, text, lists or mappings, as JSON has them",
            hint="save it in a file, and return the file's path",
        ) from None
    with atomic_write(Path(argv[0]) / _RETURNED.format(os.environ["RANK"])) as file:
        file.write(text.encode())


def _check_place(workers: int) -> None:
    if is_worker():
        raise InputError(
            "This process is a worker, and starts none.",
            given=f"workers={workers} in a script that a launcher has started",
            expected="no number of workers there",
            hint="leave workers out: who has started this one has said how many there are",
        )
    if threading.current_thread() is not threading.main_thread():
        raise InputError(
            "Workers are started by the main thread alone, which gets Ctrl-C.",
            given=f"a call in the thread {threading.current_thread().name}",
            expected="a call in the main thread",
            hint="call it in a cell, or at the top level of a script",
        )


def _as_call(function: Callable[..., Any]) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the name and the arguments of what is to be called, as they are sent."""
    inner, arguments, named = function, [], {}
    if isinstance(function, functools.partial):
        inner, arguments, named = function.func, list(function.args), dict(function.keywords)
    try:
        name = reference(inner)
    except (AttributeError, KeyError, ValueError):
        raise not_in_module(getattr(inner, "__qualname__", repr(inner)), "ls.launch") from None
    try:
        json.dumps([arguments, named])
    except (TypeError, ValueError) as error:
        raise InputError(
            f"An argument of {name} cannot be sent to the workers.",
            given=str(error),
            expected="numbers, text, lists or mappings, as JSON has them",
            hint="have the function make it, or read it from a file whose path it gets",
        ) from None
    return name, arguments, named


def not_in_module(name: str, call: str) -> InputError:
    """Return the error for code of a cell, a script or another function, or an object: no name leads to it."""
    if name.endswith("(...)"):
        return InputError(
            f"{name} is an object, and not sent: workers are new processes, which import what they call.",
            given=f"{call} with an object of this process",
            expected="a function or class at the top level of a file of Python",
            hint=f"give the class or function itself, or functools.partial({name.removesuffix('(...)')}, ...) with "
            "numbers and text by name",
        )
    return InputError(
        f"{name} is not in a module: workers are new processes, which import what they call.",
        given=f"{call} with what a cell, a script or another function defines",
        expected="a function or class at the top level of a file of Python",
        hint=f"begin the cell that defines it with %%writefile my_code.py, then: from my_code import "
        f"{name if name.isidentifier() else 'train'}; "
        "a whole script is started with: lockstep run SCRIPT.py --workers 2",
    )


def _failure(conclusion: Conclusion, name: str) -> LockstepError | KeyboardInterrupt:
    stopped_by = {130: "Ctrl-C", 129: "SIGHUP", 143: "SIGTERM", 75: "SIGUSR1", ABORTED: "a second Ctrl-C"}
    if conclusion.code in (ABORTED, 130):
        return KeyboardInterrupt(conclusion.text)
    said = next(iter(conclusion.text.splitlines()), "no word of theirs").rstrip(":")
    kind = InputError if conclusion.code == WRONG_INPUT else WorkerError
    return kind(
        f"The workers have not returned from {name}.",
        given=stopped_by.get(conclusion.code, said),
        expected="all of them to return",
        hint="what went wrong is said above",
    )


@contextmanager
def _output_shown_here() -> Iterator[tuple[int, int] | None]:
    """Yield descriptors whose text goes on to `sys.stdout` and `sys.stderr`; None where these are the process's own.

    What is written to the descriptors of a kernel may reach its log instead of the cell.
    """
    if _is_own(sys.stdout, 1) and _is_own(sys.stderr, 2):
        yield None
        return
    with ExitStack() as stack:
        yield stack.enter_context(_piped_to(sys.stdout)), stack.enter_context(_piped_to(sys.stderr))


def _is_own(stream: TextIO, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except (AttributeError, OSError, ValueError):  # it is none of a file
        return False


@contextmanager
def _piped_to(stream: TextIO) -> Iterator[int]:
    """Yield a descriptor; a thread writes to the stream what is written to it, until nobody has it any more."""
    readable, writable = os.pipe()

    def copy() -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while piece := os.read(readable, 1 << 16):
            with suppress(OSError, ValueError):  # the stream is closed, and the workers are not to wait for it
                stream.write(decoder.decode(piece))
                stream.flush()

    thread = threading.Thread(target=copy, name="lockstep-output", daemon=True)
    thread.start()
    try:
        yield writable
    finally:
        os.close(writable)
        thread.join(_END_OF_OUTPUT_SECONDS)  # a process that has left its workers on purpose may keep it
        if not thread.is_alive():
            os.close(readable)
