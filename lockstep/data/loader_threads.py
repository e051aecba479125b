"""Loader threads, which prefetch batches within the trainer's own process.

Batches need no copy between processes, and threads work where a process cannot be forked. Decoders and torch's kernels
release the interpreter's lock; the rest is Python that keeps the lock from the trainer, about 0.14 ms an image. So
processes are the default.

A thread that hangs cannot be killed: it is left behind, and does not keep the interpreter from exiting.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Generic

import torch

from lockstep.data.prefetch import LoaderStatus, StallTimeout
from lockstep.listing import shorten
from lockstep.screen import log
from lockstep.tracing import Job, Result, TimedResult, listen, run_timed


def read_in_threads(
    read: Callable[[Job], Result],
    jobs: Iterator[Job],
    num_threads: int,
    prefetch: int,
    names_of: Callable[[Job], Sequence[str]],
    stall_timeout: StallTimeout,
) -> Generator[TimedResult[Result], None, None]:
    """Yield the result of `read` for each job, in order; each thread is up to `prefetch` jobs ahead.

    The threads end when the generator is closed, each after its current job; one that hangs is left behind. Errors of
    `read` are raised here. `names_of` names the examples of a job, for messages.
    """
    most, threads_of_caller = num_threads * prefetch, torch.get_num_threads()
    pool = _LoaderThreads(read, num_threads, names_of, stall_timeout)
    try:
        asked = deque(map(pool.ask, islice(jobs, most)))

        def next_is_ready() -> bool:
            return bool(asked) and asked[0].has_result()

        while asked:
            queue_fill = sum(task.answer.done() for task in asked) / most
            answer = pool.answer(asked.popleft())
            asked.extend(map(pool.ask, islice(jobs, 1)))
            # torch applies the number that a loader thread sets for itself to threads that begin later, too.
            torch.set_num_threads(threads_of_caller)
            yield answer._replace(queue_fill=queue_fill, next_is_ready=next_is_ready)
    finally:
        pool.end()
        torch.set_num_threads(threads_of_caller)


class _LoaderThreads(Generic[Job, Result]):
    """Pool of loader threads with a common queue of tasks."""

    def __init__(
        self,
        read: Callable[[Job], Result],
        num_threads: int,
        names_of: Callable[[Job], Sequence[str]],
        stall_timeout: StallTimeout,
    ) -> None:
        self._names_of, self._stall_timeout = names_of, stall_timeout
        self._tasks: SimpleQueue[_Task[Job, Result] | None] = SimpleQueue()
        self._threads = [_LoaderThread(number, read, self._tasks) for number in range(num_threads)]
        for thread in self._threads:
            thread.start()
        # Compiled code does not always survive an interpreter that exits while threads compute.
        atexit.register(self.end)

    def ask(self, job: Job) -> _Task[Job, Result]:
        task = _Task[Job, Result](job)
        self._tasks.put(task)
        return task

    def answer(self, task: _Task[Job, Result]) -> TimedResult[Result]:
        if not task.answer.done():
            self._stall_timeout.wait(lambda seconds: wait([task.answer], seconds).done, partial(self._status, task))
        return task.answer.result()

    def end(self) -> None:
        """End each thread after its current job; leave behind those that take too long."""
        atexit.unregister(self.end)
        with suppress(Empty):
            while True:
                self._tasks.get_nowait()
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + self._stall_timeout.end_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.warning("%s does not end, and is left behind", thread.name)

    def _status(self, task: _Task[Job, Result]) -> LoaderStatus:
        thread = task.thread or self._threads[0]
        frame = sys._current_frames().get(thread.ident or 0)
        trace = "".join(traceback.format_stack(frame)).rstrip()
        return LoaderStatus(
            thread.name,
            str(task.job),
            thread.reading or f"one of {shorten(self._names_of(task.job))}",
            f"Stack (most recent call last):\n{trace}",
        )


class _Task(Generic[Job, Result]):
    """A job, the thread that does it, and its result."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.thread: _LoaderThread[Job, Result] | None = None
        self.answer: Future[TimedResult[Result]] = Future()

    def has_result(self) -> bool:
        return self.answer.done() and self.answer.exception() is None


class _LoaderThread(threading.Thread, Generic[Job, Result]):
    """One of the threads; a daemon, so that one that hangs does not keep the interpreter from exiting."""

    def __init__(
        self, number: int, read: Callable[[Job], Result], tasks: SimpleQueue[_Task[Job, Result] | None]
    ) -> None:
        super().__init__(name=f"loader thread {number}", daemon=True)
        self._read, self._tasks = read, tasks
        self.reading = ""
        """The example that it reads, if the reader has named it."""

    def run(self) -> None:
        """Do the tasks of the queue, until None comes."""
        # Each thread that computes would have a team of its own, and the loader threads already share the cores.
        torch.set_num_threads(1)
        listen(partial(setattr, self, "reading"))
        while (task := self._tasks.get()) is not None:
            task.thread, self.reading = self, ""
            try:
                task.answer.set_result(run_timed(self._read, task.job))
            except BaseException as error:
                task.answer.set_exception(error)
            del task  # Else the batch would live until the next task.
