"""Progress on the screen: a live bar on a terminal, a plain line an interval anywhere else."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

from lockstep.progress import End, Interval, Progress
from lockstep.reporting import wording
from lockstep.reporting.log import is_terminal
from lockstep.reporting.pace import Pace, last_step, moment_before, seconds_left
from lockstep.screen import log
from lockstep.types import StepReport

if TYPE_CHECKING:
    from lockstep.reporting.bar import Bar

_SECONDS_BETWEEN_DRAWINGS = 0.2
_FADE = 0.95
"""Of the bar's rates at every drawing: they look back about four seconds."""


class Console:
    """A hook that shows how the run goes.

    On a terminal that is a bar, drawn anew at most five times a second; elsewhere a line of the logger `lockstep`
    whenever `interval` has passed, with the rates over that interval. An interval of 0 shows nothing. `end` is None
    for a run that goes on until it is stopped. `stream` (`sys.stderr` if not given) tells whether there is a terminal,
    and holds the bar.
    """

    def __init__(
        self, interval: Interval, *, batch_size: int, end: End | None = None, stream: TextIO | None = None
    ) -> None:
        self._interval, self._batch_size, self._end = interval, batch_size, end
        self._stream = stream or sys.stderr
        self._on_terminal = is_terminal(self._stream)
        self._bar: Bar | None = None
        self._next_drawing = 0.0
        self._pace = Pace()
        self._first: Progress | None = None
        self._latest: Progress | None = None
        self._unseen: StepReport | None = None

    def __call__(self, report: StepReport) -> None:
        """Count an attempt, and show it when its time has come."""
        if not self._interval.amount:
            return
        before = self._latest or moment_before(report)
        self._first = self._first or report.progress
        self._latest, self._unseen = report.progress, report
        self._pace.add(report)
        if self._on_terminal:
            if time.monotonic() >= self._next_drawing:
                self._draw(report)
        elif self._interval.passed(before, report.progress):
            self._write_line(report)

    def close(self) -> None:
        """Show the last attempt, if its time had not come, and give the terminal back."""
        if self._unseen is not None:
            (self._draw if self._on_terminal else self._write_line)(self._unseen)
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _write_line(self, report: StepReport) -> None:
        parts = (self._place(report), wording.measures(report, self._pace), self._time_left(report))
        log.info("%s", " | ".join(part for part in parts if part))
        self._pace.clear()
        self._unseen = None

    def _draw(self, report: StepReport) -> None:
        if self._bar is None:
            from lockstep.reporting.bar import Bar  # only a terminal needs rich, 50 ms to import

            self._bar = Bar(self._stream)
        fraction = None if self._end is None else self._end.fraction(report.progress)
        measures = wording.measures(report, self._pace)
        self._bar.draw(self._place(report), fraction, self._time_left(report), measures)
        self._pace.fade(_FADE)
        self._unseen = None
        self._next_drawing = time.monotonic() + _SECONDS_BETWEEN_DRAWINGS

    def _place(self, report: StepReport) -> str:
        return wording.place(report.step, last_step(self._end, report.progress, self._batch_size))

    def _time_left(self, report: StepReport) -> str:
        left = seconds_left(self._end, self._first or report.progress, report.progress)
        return "" if left is None else f"{wording.duration(left)} left"
