"""Seconds by input stage (read, decode, augment, collate), on the thread that spends them.

The code of a stage runs within `timed`; `measured` around it collects the seconds. A stage within another takes its
time from that one, so that the seconds add up. Where nothing is measured, a stage costs a function call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Literal

InputStage = Literal["read", "decode", "augment", "collate"]
Seconds = dict[str, float]

INPUT_STAGES: tuple[InputStage, ...] = ("read", "decode", "augment", "collate")
"""From files to a batch, in this order; the copy to the device is counted apart."""


class _Thread(threading.local):
    seconds: Seconds | None = None
    stage: InputStage | None = None
    """The innermost one that is running."""
    since = 0.0
    """When it began, or went on after one within it."""


_thread = _Thread()


class timed:  # noqa: N801 - used like a function; a generator would cost twice as much
    """`with timed("decode"):` counts the time of the block, less that of stages within it."""

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


class measured:  # noqa: N801
    """`with measured() as seconds:` collects the seconds of each stage that runs on this thread within the block."""

    __slots__ = ("_before",)

    def __enter__(self) -> Seconds:
        self._before = _thread.seconds, _thread.stage, _thread.since
        _thread.seconds, _thread.stage = {}, None
        return _thread.seconds

    def __exit__(self, *_: object) -> None:
        _thread.seconds, _thread.stage, _thread.since = self._before


def added(first: Mapping[str, float], second: Mapping[str, float]) -> Seconds:
    """The sums by stage."""
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in {**first, **second}}


def _change_to(new: InputStage | None) -> None:
    now, here = time.perf_counter(), _thread
    if here.stage is not None and here.seconds is not None:
        here.seconds[here.stage] = here.seconds.get(here.stage, 0.0) + now - here.since
    here.stage, here.since = new, now
