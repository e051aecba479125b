"""Loader threads: they read ahead within the trainer's own process.

They need no copy between processes, and work where a process cannot be forked. Decoders and torch's kernels release the
interpreter's lock; what is left of Python keeps it from the trainer, about 0.14 ms an image: processes are the default.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import torch

from lockstep.data.ahead import Job, Result, Timed, timed


def read_in_threads(
    read: Callable[[Job], Result], jobs: Iterator[Job], num_threads: int, prefetch: int
) -> Generator[Timed[Result], None, None]:
    """Yield what `read` makes of each job, in order; each thread is up to `prefetch` jobs ahead.

    They end when the generator is closed, after the jobs they are at. What `read` raises is raised here.
    """
    most, threads_of_caller = num_threads * prefetch, torch.get_num_threads()
    pool = ThreadPoolExecutor(num_threads, "loader thread", initializer=_alone)
    try:
        asked = deque[Future[Timed[Result]]](pool.submit(timed, read, job) for job in islice(jobs, most))
        while asked:
            queue_fill = sum(future.done() for future in asked) / most
            answer = asked.popleft().result()
            asked.extend(pool.submit(timed, read, job) for job in islice(jobs, 1))
            # What a loader thread asks for itself, torch takes for the wish of threads that begin later, too.
            torch.set_num_threads(threads_of_caller)
            yield answer._replace(queue_fill=queue_fill)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads_of_caller)


def _alone() -> None:
    # Each thread that computes has its own team, and the cores are shared out already.
    torch.set_num_threads(1)
