"""Tracing of a thread that makes batches: the example it reads, and the seconds that each stage takes.

The code that does the work names what it does; whoever wants to know listens. Where nobody listens, a name costs a
function call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Generic, Literal, NamedTuple, TypeVar

from lockstep.spans import recording

InputStage = Literal["read", "decode", "augment", "collate"]
StageSeconds = dict[str, float]
Job = TypeVar("Job")
Result = TypeVar("Result")

INPUT_STAGES: tuple[InputStage, ...] = ("read", "decode", "augment", "collate")
"""Stages from files to a batch, in this order; the copy to the device, and the trainer's wait, come after them."""


class _Thread(threading.local):
    on_reading: Callable[[str], None] | None = None
    seconds: StageSeconds | None = None
    stage: InputStage | None = None
    stage_began = 0.0


_thread = _Thread()


def now_reading(name: str) -> None:
    """Report the example or file that this thread begins to read, so that a read that hangs can be named."""
    if _thread.on_reading is not None:
        _thread.on_reading(name)


def reading_listener() -> Callable[[str], None] | None:
    """Return the function to call with each name that `now_reading` would report; None where nobody listens."""
    return _thread.on_reading


def listen(on_reading: Callable[[str], None]) -> None:
    """Call `on_reading` from now on with the name of each example or file that this thread begins to read."""
    _thread.on_reading = on_reading


class timed:  # noqa: N801 - used like a function; a generator would cost twice as much
    """`with timed("decode"):` counts the time of the block, less that of stages within it: so seconds add up."""

    __slots__ = ("_name", "_outer")

    def __init__(self, name: InputStage) -> None:
        self._name = name
        self._outer: InputStage | None = None

    def __enter__(self) -> None:
        if _thread.seconds is not None:
            self._outer = _thread.stage
            _change_to(self._name)

    def __exit__(self, *_: object) -> None:
        if _thread.seconds is not None:
            _change_to(self._outer)


class measure_stages:  # noqa: N801
    """`with measure_stages() as seconds:` gives the seconds by stage that this thread spends in the block."""

    __slots__ = ("_before",)

    def __enter__(self) -> StageSeconds:
        self._before = _thread.seconds, _thread.stage, _thread.stage_began
        _thread.seconds, _thread.stage = {}, None
        return _thread.seconds

    def __exit__(self, *_: object) -> None:
        _thread.seconds, _thread.stage, _thread.stage_began = self._before


def _never() -> bool:
    return False


class TimedResult(NamedTuple, Generic[Result]):
    """The result of a job, and how it came about."""

    result: Result
    seconds: StageSeconds
    """Time by stage, in the process that did the job."""
    queue_fill: float | None = None
    """Share of the prefetched results that were ready when this one was asked for; None without prefetching."""
    next_is_ready: Callable[[], bool] = _never
    """Whether the result after this one is there, and can be taken without waiting; an error is none."""


def run_timed(read: Callable[[Job], Result], job: Job) -> TimedResult[Result]:
    """Do a job here and now, and measure its stages."""
    with measure_stages() as seconds:
        result = read(job)
    return TimedResult(result, seconds)


def sum_seconds(first: Mapping[str, float], second: Mapping[str, float]) -> StageSeconds:
    """Add two measurements, stage by stage."""
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in {**first, **second}}


def _change_to(stage: InputStage | None) -> None:
    now, here = time.perf_counter(), _thread
    if here.stage is not None and here.seconds is not None:
        here.seconds[here.stage] = here.seconds.get(here.stage, 0.0) + now - here.stage_began
        if (recorder := recording()) is not None:
            recorder.add_here(here.stage, here.stage_began, now)
    here.stage, here.stage_began = stage, now
