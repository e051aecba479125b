"""Spans of time: what the threads of this process do, and when, recorded while a trace is on.

The code that does the work names it: `with span("forward", tower):`. Where nobody records, a name costs three calls and
no memory. Times are those of `time.perf_counter`, on Linux a clock that all processes of a host share.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import NamedTuple, Protocol
from weakref import WeakSet

from lockstep.errors import InputError

MOST_SPANS = 100_000
"""What a worker keeps in one trace; what comes after them is counted."""
Lane = tuple[str, int]
"""A line of the timeline, by its name and a number: its spans lie within each other, or apart."""
Arguments = Mapping[str, "int | float | str"]
NO_ARGUMENTS: Arguments = MappingProxyType({})
_NOTHING = nullcontext()


class Span(NamedTuple):
    """What was done on a lane from one moment to another."""

    lane: Lane
    name: str
    began: float
    """Moment by `time.perf_counter`, in seconds."""
    ended: float
    arguments: Arguments = NO_ARGUMENTS


class SpanSource(Protocol):
    """A place where spans are recorded outside of this process: by a loader process, in shared memory."""

    def record(self, *, on: bool) -> None:
        """Begin to record, or end it."""
        ...

    def recorded(self) -> Iterable[Span]:
        """Return the spans that are kept there, of this trace or an earlier one."""
        ...


class Recorder:
    """The spans of this process, at most so many, from `start` to `stop`; any thread adds to them.

    `mark` marks the present place in the work of a device, for spans of what the host only enqueues there.
    """

    def __init__(self, most: int = MOST_SPANS, mark: Callable[[], object] | None = None) -> None:
        self.mark = mark
        self.spans: list[Span] = []
        self.on_device: list[tuple[str, object, object]] = []
        """Name, and the marks of its begin and end, of each span of the device."""
        self.num_dropped = 0
        self.began = 0.0
        self.open: set[_OpenSpan] = set()
        """Blocks that are under way."""
        self._most = most

    @property
    def has_room(self) -> bool:
        """Whether more spans are kept."""
        return len(self.spans) < self._most

    def add(self, lane: Lane, name: str, began: float, ended: float, arguments: Arguments = NO_ARGUMENTS) -> None:
        """Add what has ended."""
        if self.has_room:
            self.spans.append(Span(lane, name, began, ended, arguments))
        else:
            self.num_dropped += 1

    def add_here(self, name: str, began: float, ended: float) -> None:
        """Add what this thread has done."""
        self.add(_lane_of_thread(), name, began, ended)

    def start(self) -> None:
        """Begin to record.

        Raises:
            InputError: another one records.
        """
        if _recorder is not None:
            raise InputError(
                "Two traces of one process cannot be recorded at the same time.",
                given="a trace that begins before the one before has ended",
                expected="one at a time",
                hint="give them steps that do not overlap, or make one of both",
            )
        self.began = time.perf_counter()
        record_into(self)
        for source in list(_sources):
            source.record(on=True)

    def stop(self) -> None:
        """End; what is under way is cut off here."""
        record_into(None)
        now = time.perf_counter()
        for each in list(self.open):
            each.end(now)
        for source in list(_sources):
            source.record(on=False)
            self.take(source)

    def take(self, source: SpanSource) -> None:
        """Add the spans that a source has kept since the start."""
        for span in source.recorded():
            if span.ended > self.began:
                self.add(*span)


_recorder: Recorder | None = None
_sources: WeakSet[SpanSource] = WeakSet()


def recording() -> Recorder | None:
    """Return what records the spans of this process; None where nobody does."""
    return _recorder


def record_into(recorder: Recorder | None) -> None:
    """Have the spans of this process recorded there."""
    global _recorder
    _recorder = recorder


def add_source(source: SpanSource) -> None:
    """Have a source record while this process does, from now on."""
    _sources.add(source)
    if _recorder is not None:
        source.record(on=True)


def remove_source(source: SpanSource) -> None:
    """Take what a source has recorded, before it is gone."""
    if _recorder is not None and source in _sources:
        _recorder.take(source)
    _sources.discard(source)


def span(
    name: str, tower: int | None = None, *, lane: Lane | None = None, on_device: bool = False
) -> AbstractContextManager[None]:
    """Record a block under a name, where somebody records; the block is that of a `with` statement.

    It may be done for a tower, and is shown in a lane, by default that of this thread. Where the host only enqueues it,
    on a device, it is recorded when it is done there, too.
    """
    return _NOTHING if _recorder is None else _OpenSpan(_recorder, name, tower, lane, on_device=on_device)


class _OpenSpan(AbstractContextManager[None]):
    """A block that is recorded, and under way."""

    def __init__(self, recorder: Recorder, name: str, tower: int | None, lane: Lane | None, *, on_device: bool) -> None:
        self._recorder, self._lane = recorder, lane or _lane_of_thread()
        self._name = name if tower is None else f"{name}, tower {tower}"
        self._mark = recorder.mark if on_device else None
        self._marked: object = None
        self._began = 0.0

    def __enter__(self) -> None:
        if self._mark is not None:
            self._marked = self._mark()
        self._recorder.open.add(self)
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.end(time.perf_counter())
        if self._mark is not None and self._recorder.has_room:
            self._recorder.on_device.append((self._name, self._marked, self._mark()))

    def end(self, now: float) -> None:
        """Add it as it is now, unless that was done when the recorder stopped."""
        try:
            self._recorder.open.remove(self)
        except KeyError:
            return
        self._recorder.add(self._lane, self._name, self._began, now)


def _lane_of_thread() -> Lane:
    thread = threading.current_thread()
    return ("main thread" if thread is threading.main_thread() else thread.name), thread.ident or 0
