"""Loader threads: they read ahead within the trainer's own process.

They need no copy between processes, and work where a process cannot be forked. Decoders and torch's kernels release the
interpreter's lock; what is left of Python keeps it from the trainer, about 0.14 ms an image: processes are the default.

A thread that hangs cannot be killed: it is left behind, and does not keep the interpreter from its end.
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

from lockstep.data.prefetch import Job, LoaderStatus, Result, StallTimeout, TimedResult, run_timed
from lockstep.listing import shorten
from lockstep.screen import log
from lockstep.tracing import listen


def read_in_threads(
    read: Callable[[Job], Result],
    jobs: Iterator[Job],
    num_threads: int,
    prefetch: int,
    names_of: Callable[[Job], Sequence[str]],
    stall_timeout: StallTimeout,
) -> Generator[TimedResult[Result], None, None]:
    """Yield what `read` makes of each job, in order; each thread is up to `prefetch` jobs ahead.

    They end when the generator is closed, after the jobs they are at; one that hangs is left behind. What `read` raises
    is raised here. `names_of` gives the examples of a job.

    Raises:
        WorkerError: a job takes longer than `patience` has.
    """
    most, threads_of_caller = num_threads * prefetch, torch.get_num_threads()
    pool = _LoaderThreads(read, num_threads, names_of, stall_timeout)
    try:
        asked = deque(map(pool.ask, islice(jobs, most)))
        while asked:
            queue_fill = sum(task.answer.done() for task in asked) / most
            answer = pool.answer(asked.popleft())
            asked.extend(map(pool.ask, islice(jobs, 1)))
            # What a loader thread asks for itself, torch takes for the wish of threads that begin later, too.
            torch.set_num_threads(threads_of_caller)
            yield answer._replace(queue_fill=queue_fill)
    finally:
        pool.end()
        torch.set_num_threads(threads_of_caller)


class _LoaderThreads(Generic[Job, Result]):
    """The threads, and what they are asked for."""

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
        # The interpreter would end while they compute, which compiled code does not always survive.
        atexit.register(self.end)

    def ask(self, job: Job) -> _Task[Job, Result]:
        task = _Task[Job, Result](job)
        self._tasks.put(task)
        return task

    def answer(self, task: _Task[Job, Result]) -> TimedResult[Result]:
        """Wait for what it has become."""
        if not task.answer.done():
            self._stall_timeout.wait(lambda seconds: wait([task.answer], seconds).done, partial(self._status, task))
        return task.answer.result()

    def end(self) -> None:
        """Have them end after the jobs they are at; who takes too long is left behind."""
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
    """A job, who does it, and what has become of it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.thread: _LoaderThread[Job, Result] | None = None
        self.answer: Future[TimedResult[Result]] = Future()


class _LoaderThread(threading.Thread, Generic[Job, Result]):
    """One of the threads. It is a daemon: one that hangs does not keep the interpreter from ending."""

    def __init__(
        self, number: int, read: Callable[[Job], Result], tasks: SimpleQueue[_Task[Job, Result] | None]
    ) -> None:
        super().__init__(name=f"loader thread {number}", daemon=True)
        self._read, self._tasks = read, tasks
        self.reading = ""
        """The example it is at, if that has been named."""

    def run(self) -> None:
        """Do the tasks that come, until there is none."""
        # Each thread that computes has its own team, and the cores are shared out already.
        torch.set_num_threads(1)
        listen(partial(setattr, self, "reading"))
        while (task := self._tasks.get()) is not None:
            task.thread, self.reading = self, ""
            try:
                task.answer.set_result(run_timed(self._read, task.job))
            except BaseException as error:
                task.answer.set_exception(error)
            del task  # A batch is to be freed with its last name outside.
