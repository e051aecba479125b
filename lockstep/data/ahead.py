"""Reading ahead: what comes back from whoever reads, whether the trainer itself, its threads or its processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from lockstep.tracing import StageSeconds, measure_stages

Job = TypeVar("Job")
Result = TypeVar("Result")


class Timed(NamedTuple, Generic[Result]):
    """A result, and how it came about."""

    result: Result
    seconds: StageSeconds
    """By stage, of whoever read it."""
    queue_fill: float | None = None
    """The share of what may be read ahead that was there when this was asked for; None where nothing is."""


def timed(read: Callable[[Job], Result], job: Job) -> Timed[Result]:
    """Read it here and now."""
    with measure_stages() as seconds:
        result = read(job)
    return Timed(result, seconds)


def read_here(read: Callable[[Job], Result], jobs: Iterator[Job]) -> Iterator[Timed[Result]]:
    """Read each job when it is asked for; nothing is read ahead."""
    return map(partial(timed, read), jobs)
