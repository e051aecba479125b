"""Where the time of a batch goes: seconds by stage, on the thread that spends them.

Whoever does the work of a stage names it; whoever wants to know measures around all of it. A stage within another
takes its time from that one, so that the seconds add up. Where nobody measures, a stage costs a function call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Literal, NamedTuple

Stage = Literal["read", "decode", "augment", "collate"]
Seconds = dict[str, float]

STAGES: tuple[Stage, ...] = ("read", "decode", "augment", "collate")
"""From files to a batch, in this order; what follows is the copy to the device, and the wait of who trains."""


class _Running(NamedTuple):
    """The stage that a thread is in, and since when."""

    stage: Stage | None
    since: float


class _Thread(threading.local):
    seconds: Seconds | None = None
    running = _Running(None, 0.0)


_thread = _Thread()


class stage:  # noqa: N801 - used like a function; a generator would cost twice as much
    """`with stage("decode"):` counts the time of the block, less that of stages within it."""

    __slots__ = ("_name", "_outer")

    def __init__(self, name: Stage) -> None:
        self._name = name
        self._outer: Stage | None = None

    def __enter__(self) -> None:
        if _thread.seconds is not None:
            self._outer = _thread.running.stage
            _change_to(self._name)

    def __exit__(self, *_: object) -> None:
        if _thread.seconds is not None:
            _change_to(self._outer)


class measured:  # noqa: N801
    """`with measured() as seconds:` has the seconds of each stage that has run on this thread within the block."""

    __slots__ = ("_before",)

    def __enter__(self) -> Seconds:
        self._before = _thread.seconds, _thread.running
        _thread.seconds, _thread.running = {}, _Running(None, 0.0)
        return _thread.seconds

    def __exit__(self, *_: object) -> None:
        _thread.seconds, _thread.running = self._before


def added(first: Mapping[str, float], second: Mapping[str, float]) -> Seconds:
    """The sum of two, by stage."""
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in {**first, **second}}


def _change_to(new: Stage | None) -> None:
    now = time.perf_counter()
    name, since = _thread.running
    if name is not None and _thread.seconds is not None:
        _thread.seconds[name] = _thread.seconds.get(name, 0.0) + now - since
    _thread.running = _Running(new, now)
