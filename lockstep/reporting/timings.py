"""`timings.jsonl`: how fast a run goes and how long it still takes, a line about every ten seconds.

`metrics.jsonl` holds no times, and what is trained again is cut off it. This file is only added to: it tells what was
done when, also what was done twice, and its last line says until when the run was alive.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NamedTuple

from lockstep.reporting.append import AppendOnly
from lockstep.reporting.throughput import Throughput, last_step, seconds_left
from lockstep.types import End, Progress, StepReport

SECONDS_BETWEEN = 10.0


class RunTiming(NamedTuple):
    """A line: the attempts since the line before, on the chief's clock."""

    time: str
    """When it was written, with the offset from UTC: `2026-11-25T22:30:50+0000`."""
    step: int
    position: int
    num_steps: int
    """Updates since the line before."""
    num_examples: int
    seconds: float
    """Duration of the attempts since the line before, waiting included; evaluations and saves are not."""
    wait_seconds: float
    """The part of it in which the chief waited for data."""
    last_step: int | None
    """The step that the run ends with; None where that is not known."""
    seconds_left: float | None
    """Time until the end, at the rate of this start."""

    @property
    def examples_per_second(self) -> float:
        """Examples a second over all towers; 0 over no time."""
        return self.num_examples / self.seconds if self.seconds else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the time in which the chief waited for data, 0 to 1."""
        return self.wait_seconds / self.seconds if self.seconds else 0.0


class TimingsFile:
    """A hook of the chief that writes the file: a line for the first attempt, and from then on every ten seconds.

    Raises:
        WorkdirError: the file cannot be written.
    """

    def __init__(self, path: Path, *, batch_size: int, end: End | None) -> None:
        self._file, self._batch_size, self._end = AppendOnly(path), batch_size, end
        self._file.cut_torn_line()
        self._pace, self._next_seconds = Throughput(), 0.0
        self._first: Progress | None = None
        self._latest: StepReport | None = None

    def __call__(self, report: StepReport) -> None:
        """Count an attempt, and write a line when its time has come."""
        self._first, self._latest = self._first or report.progress, report
        self._pace.add(report)
        if time.monotonic() >= self._next_seconds:
            self._write(report)

    def close(self) -> None:
        """Write what was not written yet, and close the file."""
        if self._latest and self._pace.num_examples:
            self._write(self._latest)
        self._file.close()

    def _write(self, report: StepReport) -> None:
        now, pace = report.progress, self._pace
        line = RunTiming(
            time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            step=now.step,
            position=now.position,
            num_steps=int(pace.num_steps),
            num_examples=int(pace.num_examples),
            seconds=round(pace.seconds, 6),
            wait_seconds=round(pace.wait_seconds, 6),
            last_step=last_step(self._end, now, self._batch_size),
            seconds_left=seconds_left(self._end, self._first or now, now),
        )
        self._file.write(json.dumps(line._asdict()).encode() + b"\n")
        self._pace, self._next_seconds = Throughput(), time.monotonic() + SECONDS_BETWEEN
