"""A worker pool: processes that share the tasks of a conversion and send back its events.

The processes are forked, so nothing need be pickled to reach them. Each has a pipe of its own and shares no lock, so
killing one is always safe. When the process that started them dies, their next send fails and they end too.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Generic, TypeVar

import torch

from lockstep.errors import LockstepError, WorkerError
from lockstep.screen import Lines

Task = TypeVar("Task")
Event = TypeVar("Event")
Work = Callable[[Task], Generator[Event, None, None]]

_SECONDS_TO_EXIT = 10.0


def run_tasks(tasks: Sequence[Task], work: Work[Task, Event], num_processes: int) -> Generator[Event, None, None]:
    """Run `work` on all tasks and yield its events, those of one task in order.

    Process k runs every `num_processes`th task from k on; with one process the caller runs them all. Closing the
    generator ends the processes and closes the generators that `work` has made in them.

    Raises:
        LockstepError: raised by `work`, as the same class.
        WorkerError: `work` raised something else, or a process died.
    """
    if min(num_processes, len(tasks)) <= 1 or not hasattr(os, "fork"):
        for task in tasks:
            yield from work(task)
        return
    pool: list[_Process[Task, Event]] = []
    try:
        for number in range(min(num_processes, len(tasks))):
            pool.append(_Process(tasks[number::num_processes], work, [each.pipe for each in pool]))
        while running := [process for process in pool if not process.finished]:
            ready = wait([process.pipe for process in running])
            for process in running:
                if process.pipe in ready:
                    yield from process.receive()
    finally:
        for process in pool:
            process.terminate()
        for process in pool:
            process.join()


class _Process(Generic[Task, Event]):
    """One process of the pool, seen from its parent."""

    def __init__(self, tasks: Sequence[Task], work: Work[Task, Event], inherited: Sequence[Connection]) -> None:
        context = get_context("fork")
        self.finished = False
        self.pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_serve, args=(theirs, [*inherited, self.pipe], tasks, work), name="converting process", daemon=True
        )
        # Until the child has handlers of its own, a signal must not run those of its parent.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # From now on the child alone has the sending end, so its death ends the pipe.
        theirs.close()

    def receive(self) -> Iterator[Event]:
        """Wait for the next message; yields its event, or nothing if the process says that all is done."""
        try:
            message: Event | _Failure | _Done = self.pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise self._died() from error
        if isinstance(message, _Failure):
            raise message.raised()
        if isinstance(message, _Done):
            self.finished = True
        else:
            yield message

    def terminate(self) -> None:
        """Ask the process to unwind, which deletes the file that it is writing."""
        self._process.terminate()

    def join(self) -> None:
        """Wait until the process has ended, and kill it if it takes too long."""
        self._process.join(_SECONDS_TO_EXIT)
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()

    def _died(self) -> WorkerError:
        self._process.join()
        code = self._process.exitcode or 0
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return WorkerError(
            f"A converting process (pid {self._process.pid}) {end}.",
            given="a process that ended before its shards were written",
            expected="processes that live until their work is done",
            hint="run the same command again, it goes on; with fewer processes if the system's log shows the "
            "out-of-memory killer",
        )


@dataclass(frozen=True, slots=True)
class _Failure:
    """An exception in a process, as it is sent to the parent."""

    error: LockstepError | None
    """None for any other exception: it need not survive pickling."""
    trace: str

    def raised(self) -> LockstepError:
        error = self.error or WorkerError(
            "A converting process failed.",
            given=self.trace.splitlines()[-1],
            expected="items that can be converted, or are skipped",
            hint="the traceback below shows where",
        )
        error.add_note(Lines(f"In a converting process:\n{self.trace}"))
        return error


class _Done:
    """The last message of a process that has run its tasks."""


def _serve(pipe: Connection, inherited: Sequence[Connection], tasks: Sequence[Task], work: Work[Task, Event]) -> None:
    """Run the tasks in the child and send their events."""
    for connection in inherited:
        connection.close()
    # A terminal sends Ctrl-C to every process; the parent decides, and asks the others by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    torch.set_num_threads(1)
    try:
        for task in tasks:
            with closing(work(task)) as events:
                for event in events:
                    pipe.send(event)
        pipe.send(_Done())
    except BrokenPipeError:
        return
    except Exception as error:
        pipe.send(_Failure(error if isinstance(error, LockstepError) else None, traceback.format_exc()))


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
