"""Where the time of a batch goes: seconds by stage, on the thread that spends them.

Whoever does the work of a stage names it; whoever wants to know measures around all of it. A stage within another
takes its time from that one, so that the seconds add up. Where nobody measures, a stage costs a function call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Literal

Stage = Literal["read", "decode", "augment", "collate"]
Seconds = dict[str, float]

STAGES: tuple[Stage, ...] = ("read", "decode", "augment", "collate")
"""From files to a batch, in this order; what follows is the copy to the device, and the wait of who trains."""


class _Thread(threading.local):
    seconds: Seconds | None = None
    stage: Stage | None = None
    """The one that it is in."""
    since = 0.0
    """When it came there."""


_thread = _Thread()


class stage:  # noqa: N801 - used like a function; a generator would cost twice as much
    """`with stage("decode"):` counts the time of the block, less that of stages within it."""

    __slots__ = ("_name", "_outer")

    def __init__(self, name: Stage) -> None:
        self._name = name
        self._outer: Stage | None = None

    def __enter__(self) -> None:
        if _thread.seconds is not None:
            self._outer = _thread.stage
            _change_to(self._name)

    def __exit__(self, *_: object) -> None:
        if _thread.seconds is not None:
            _change_to(self._outer)


class measured:  # noqa: N801
    """`with measured() as seconds:` has the seconds of each stage that has run on this thread within the block."""

    __slots__ = ("_before",)

    def __enter__(self) -> Seconds:
        self._before = _thread.seconds, _thread.stage, _thread.since
        _thread.seconds, _thread.stage = {}, None
        return _thread.seconds

    def __exit__(self, *_: object) -> None:
        _thread.seconds, _thread.stage, _thread.since = self._before


def added(first: Mapping[str, float], second: Mapping[str, float]) -> Seconds:
    """The sum of two, by stage."""
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in {**first, **second}}


def _change_to(new: Stage | None) -> None:
    now, here = time.perf_counter(), _thread
    if here.stage is not None and here.seconds is not None:
        here.seconds[here.stage] = here.seconds.get(here.stage, 0.0) + now - here.since
    here.stage, here.since = new, now
