"""Files of traces: the part that each worker writes, and what they are merged to, in the format of Chrome's traces.

A part is written whole or not at all, so a worker that is killed leaves none that could spoil the others'. What is
merged has the times of all parts on the clock of the chief, and is for Perfetto or chrome://tracing to open.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.durable import atomic_write
from lockstep.errors import WorkdirError
from lockstep.screen import log
from lockstep.spans import Lane, Span
from lockstep.version import __version__

STEPS: Lane = ("steps", 0)
TRACES = "traces"
"""The folder of traces and profiles, in that of the run."""
PHASES: Lane = ("phases", 0)
_FIRST_LANES = ("steps", "phases", "main thread")
_PART = re.compile(r"(steps-\d{1,18}-\d{1,18})\.worker-(\d{1,9})\.part")
_MOST_BYTES = 1 << 28
_LANES_OF_A_WORKER = 10_000


class ClockOffset(NamedTuple):
    """What is added to the clock of a worker to get that of the chief."""

    seconds: float
    bound_seconds: float
    """It is at most so wrong."""


def clock_offset(own: Iterable[Sequence[float]], chief: Iterable[Sequence[float]]) -> ClockOffset:
    """Compare two clocks by barriers: none ends on one worker before it has begun on the other.

    Each is when a barrier began and ended, in seconds on the worker's own clock, and on the chief's.
    """
    pairs = [*zip(own, chief, strict=True)]
    least = max(began - ended for (_, ended), (began, _) in pairs)
    most = min(ended - began for (began, _), (_, ended) in pairs)
    return ClockOffset((least + most) / 2, abs(most - least) / 2)


@dataclass(frozen=True)
class TracePart:
    """What one worker has recorded."""

    worker: int
    name: str
    """Its name, and its process."""
    num_workers: int
    spans: Sequence[Span]
    """On its own clock."""
    num_dropped: int = 0
    """Spans that were too many."""
    clock: ClockOffset | None = None
    """None where it has not met the chief at the end."""
    boot: str = ""
    """What tells hosts apart: all processes that run since one start of a host have the same clock."""
    epoch_seconds: float = 0.0
    """What is added to its clock to get the time of day, as its host has it."""

    def write(self, path: Path) -> None:
        """Write it, whole or not at all.

        Raises:
            WorkdirError: the system refuses.
        """
        lanes = list(dict.fromkeys(span.lane for span in self.spans))
        places = {lane: place for place, lane in enumerate(lanes)}
        spans = [[places[s.lane], s.name, s.began, s.ended, dict(s.arguments)] for s in self.spans]
        with atomic_write(path, parents=True, failure=WorkdirError) as file:
            file.write(json.dumps({**vars(self), "lanes": lanes, "spans": spans}).encode())

    @classmethod
    def read(cls, path: Path) -> TracePart:
        """Read one; raises ValueError where it is none."""
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes")
        try:
            facts = json.loads(path.read_bytes())
            lanes = [(str(name), int(number)) for name, number in facts["lanes"]]
            clock = facts["clock"] and ClockOffset(*map(_finite, facts["clock"]))
            return cls(
                worker=int(facts["worker"]),
                name=str(facts["name"]),
                num_workers=int(facts["num_workers"]),
                spans=[_span(lanes, *each) for each in facts["spans"]],
                num_dropped=int(facts["num_dropped"]),
                clock=clock,
                boot=str(facts["boot"]),
                epoch_seconds=_finite(facts["epoch_seconds"]),
            )
        except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from error


def _span(lanes: Sequence[Lane], place: int, name: str, began: float, ended: float, arguments: Any) -> Span:
    known = {str(key): value for key, value in arguments.items() if isinstance(value, str | int)}
    if not 0 <= place < len(lanes) or not _finite(began) <= _finite(ended):
        raise ValueError(f"a span {name!r} from {began} to {ended} on lane {place}")
    return Span(lanes[place], str(name), began, ended, known)


def _finite(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number of seconds")
    return value


def boot_of_host() -> str:
    """Return what tells this host, since it was started, from others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def part_path(folder: Path, name: str, worker: int) -> Path:
    """Return where a worker writes its part of a trace of this name."""
    return folder / f"{name}.worker-{worker}.part"


class MergedTrace(NamedTuple):
    """A trace of all workers."""

    path: Path
    missing: Sequence[str]
    """The workers without a part."""
    bound_seconds: float | None
    """The clocks differ by at most so much; None where they were not compared, but the times of day of their hosts."""
    num_dropped: int

    def describe(self) -> str:
        """Say what is in it, in one sentence for each thing that a reader must know."""
        words = f"the trace is in {self.path}: open it at ui.perfetto.dev"
        if self.bound_seconds:
            words += f"; the clocks of its hosts differ by at most {1e6 * self.bound_seconds:.0f} us"
        if self.bound_seconds is None:
            words += "; its hosts are compared by their time of day"
        if self.num_dropped:
            words += f"; it is not complete: {self.num_dropped} spans at its end were too many"
        return words + (f"; {', '.join(self.missing)} left no part of it" if self.missing else "")


def merge_parts(folder: Path) -> list[MergedTrace]:
    """Merge the parts in a folder, those of one trace each, and remove them; one that cannot be read is told.

    Raises:
        WorkdirError: the system refuses.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := _PART.fullmatch(path.name):
            found.setdefault(match[1], []).append(path)
    merged = []
    for name, paths in found.items():
        if one := _merge(folder / f"{name}.json", paths):
            merged.append(one)
        for path in paths:
            path.unlink(missing_ok=True)
    return merged


def _merge(path: Path, paths: Sequence[Path]) -> MergedTrace | None:
    """Write the events of all parts, of which one at a time is in memory; None where none can be read."""
    parts = _readable(paths)
    if (first := next(parts, None)) is None:
        return None
    seen, num_workers, num_dropped, bounds = set[int](), 0, 0, list[float | None]()
    with atomic_write(path, failure=WorkdirError) as file:
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        for part in chain([first], parts):
            shift, bound = _shift(part, first)
            file.write(b",\n" if seen else b"")
            file.write(",\n".join(map(json.dumps, events_of(part, shift))).encode())
            seen.add(part.worker)
            bounds.append(bound)
            num_workers, num_dropped = max(num_workers, part.num_workers), num_dropped + part.num_dropped
        missing = [f"worker {rank}" for rank in range(min(num_workers, 1 << 16)) if rank not in seen]
        bound = None if None in bounds else max(filter(None, bounds), default=0.0)
        facts = {
            "lockstep": __version__,
            "workers": num_workers,
            "missing": missing,
            "dropped": num_dropped,
            "clock_bound_us": bound if bound is None else 1e6 * bound,
        }
        file.write(b'\n], "otherData": ' + json.dumps(facts).encode() + b"}\n")
    return MergedTrace(path, missing, bound, num_dropped)


def _readable(paths: Iterable[Path]) -> Iterator[TracePart]:
    for path in paths:
        try:
            part = TracePart.read(path)
            if path.name != part_path(path.parent, path.name.partition(".")[0], part.worker).name:
                raise ValueError(f"it is of worker {part.worker}")
            yield part
        except (OSError, ValueError) as error:
            log.warning("%s is left out of the trace: it cannot be read (%s)", path, error)


def _shift(part: TracePart, first: TracePart) -> tuple[float, float | None]:
    """Return what is added to the times of a part, and how wrong that may be."""
    if part.clock is not None:
        return part.clock
    if part.boot == first.boot:
        return 0.0, 0.0
    return part.epoch_seconds - first.epoch_seconds, None


def events_of(part: TracePart, shift_seconds: float = 0.0) -> Iterator[Mapping[str, object]]:
    """Yield the events of one worker in the format of Chrome's traces: names of its lanes, then its spans.

    Times are microseconds, whole nanoseconds: so spans that lie within each other still do.
    """
    process = part.worker + 1  # number 0 is the system's
    lanes = sorted({span.lane: None for span in part.spans}, key=_place)
    threads = {lane: process * _LANES_OF_A_WORKER + place for place, lane in enumerate(lanes, 1)}
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": part.name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for lane, thread in threads.items():
        where = {"ph": "M", "pid": process, "tid": thread}
        yield {**where, "name": "thread_name", "args": {"name": lane[0]}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": thread}}
    for span in sorted(part.spans, key=lambda span: (span.began, -span.ended)):
        began, ended = (round(1e9 * (seconds + shift_seconds)) for seconds in (span.began, span.ended))
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.lane[0],
            "pid": process,
            "tid": threads[span.lane],
            "ts": began / 1000,
            "dur": (ended - began) / 1000,
            "args": dict(span.arguments),
        }


def _place(lane: Lane) -> tuple[int, str, int]:
    name, number = lane
    return (_FIRST_LANES.index(name) if name in _FIRST_LANES else len(_FIRST_LANES)), name, number


def epoch_seconds() -> float:
    """Return what is added to this process's clock to get the time of day."""
    return time.time() - time.perf_counter()
