"""Processes that share the tasks of a conversion, and tell what they have done.

They are forked, so that nothing need be pickled to reach them. Each has a pipe of its own and no lock is shared:
killing one is always safe. When the process that started them is gone, their next word finds nobody, and they end as if
told to.
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

_SECONDS_TO_LEAVE = 10.0


def work_off(tasks: Sequence[Task], work: Work[Task, Event], num_processes: int) -> Generator[Event, None, None]:
    """Yield all events of all tasks, those of one task in turn; process k does every `num_processes`th task from k on.

    With one process the caller's own does the work. To close the generator ends the processes, and closes the
    generators that `work` has made in them.

    Raises:
        LockstepError: what `work` raised, as the same class.
        WorkerError: `work` raised something else, or a process died.
    """
    if min(num_processes, len(tasks)) <= 1 or not hasattr(os, "fork"):
        for task in tasks:
            yield from work(task)
        return
    crew: list[_Process[Task, Event]] = []
    try:
        for number in range(min(num_processes, len(tasks))):
            crew.append(_Process(tasks[number::num_processes], work, [each.pipe for each in crew]))
        while running := [process for process in crew if not process.finished]:
            ready = wait([process.pipe for process in running])
            for process in running:
                if process.pipe in ready:
                    yield from process.next()
    finally:
        for process in crew:
            process.ask_to_leave()
        for process in crew:
            process.end()


class _Process(Generic[Task, Event]):
    """One of the processes, as the one that started it sees it."""

    def __init__(self, tasks: Sequence[Task], work: Work[Task, Event], inherited: Sequence[Connection]) -> None:
        context = get_context("fork")
        self.finished = False
        self.pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_serve, args=(theirs, [*inherited, self.pipe], tasks, work), name="converting process", daemon=True
        )
        # Until it has handlers of its own, a signal must not find those of the process it was forked from.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # Its end is now open in the child alone, so the child's death is the end of the pipe.
        theirs.close()

    def next(self) -> Iterator[Event]:
        """Wait for its next word; no event if that says that all is done."""
        try:
            word: Event | _Failure | _End = self.pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise self._lost() from error
        if isinstance(word, _Failure):
            raise word.raised()
        if isinstance(word, _End):
            self.finished = True
        else:
            yield word

    def ask_to_leave(self) -> None:
        """Have it unwind: what it was writing disappears."""
        self._process.terminate()

    def end(self) -> None:
        """Wait until it has left, and kill it if it does not."""
        self._process.join(_SECONDS_TO_LEAVE)
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()

    def _lost(self) -> WorkerError:
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
    """What went wrong in a process."""

    error: LockstepError | None
    """None where it was no error of ours."""
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


class _End:
    """The last word of a process that has done its tasks."""


def _serve(pipe: Connection, inherited: Sequence[Connection], tasks: Sequence[Task], work: Work[Task, Event]) -> None:
    """Do the tasks, and tell what happens."""
    for connection in inherited:
        connection.close()
    # A terminal signals every process; the one that started this one decides, and asks by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    torch.set_num_threads(1)
    try:
        for task in tasks:
            with closing(work(task)) as events:
                for event in events:
                    pipe.send(event)
        pipe.send(_End())
    except BrokenPipeError:
        return
    except Exception as error:
        pipe.send(_Failure(error if isinstance(error, LockstepError) else None, traceback.format_exc()))


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
