"""Progress on the screen: a live bar on a terminal, a plain line an interval anywhere else."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, TextIO

from lockstep.progress import End, Interval, Progress
from lockstep.reporting.log import is_terminal
from lockstep.reporting.throughput import Throughput, last_step, moment_before, seconds_left
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
        self._pace = Throughput()
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
        parts = (self._place(report), format_measures(report, self._pace), self._time_left(report))
        log.info("%s", " | ".join(part for part in parts if part))
        self._pace.clear()
        self._unseen = None

    def _draw(self, report: StepReport) -> None:
        if self._bar is None:
            from lockstep.reporting.bar import Bar  # only a terminal needs rich, 50 ms to import

            self._bar = Bar(self._stream)
        fraction = None if self._end is None else self._end.fraction(report.progress)
        measures = format_measures(report, self._pace)
        self._bar.draw(self._place(report), fraction, self._time_left(report), measures)
        self._pace.fade(_FADE)
        self._unseen = None
        self._next_drawing = time.monotonic() + _SECONDS_BETWEEN_DRAWINGS

    def _place(self, report: StepReport) -> str:
        return format_step(report.step, last_step(self._end, report.progress, self._batch_size))

    def _time_left(self, report: StepReport) -> str:
        left = seconds_left(self._end, self._first or report.progress, report.progress)
        return "" if left is None else f"{format_duration(left)} left"


def format_number(value: float) -> str:
    """Four significant digits: `0.3124`, `2.303`, `1.2e-05`, `nan`."""
    return f"{value:.4g}"


def format_rate(value: float) -> str:
    """Three significant digits, and never less than the whole number: `0.25`, `41.7`, `3412`."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """The two largest units: `52 s`, `3 min 20 s`, `2 h 10 min`, `4 d 3 h`; `?` where it is not a finite number."""
    if not math.isfinite(seconds):
        return "?"
    minutes, whole_seconds = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole_seconds} s" if minutes else f"{whole_seconds} s"


def format_step(step: int, last_step: int | None) -> str:
    """Where the run is: `step 120 of 1718`, or `step 120` where the last step is not known."""
    return f"step {step}" if last_step is None else f"step {step} of {last_step}"


def format_losses(report: StepReport) -> str:
    """The losses of a step, the total where there are several, and its smoothed value where it is known."""
    total = format_number(report.total)
    if len(report.losses) == 1:
        text = f"loss {total}"
    else:
        text = ", ".join(
            [f"{name} {format_number(value)}" for name, value in report.losses.items()] + [f"total {total}"]
        )
    smoothed = report.smoothed.get("total")
    return text if smoothed is None else f"{text} (smoothed {format_number(smoothed)})"


def format_measures(report: StepReport, pace: Throughput) -> str:
    """What a step measured, and the pace since the last time it was shown."""
    parts = [
        format_losses(report),
        f"lr {format_number(report.learning_rate)}",
        f"{format_rate(pace.examples_per_second)} examples/s",
        f"data wait {100 * pace.wait_share:.0f} %",
    ]
    if pace.num_skipped:
        parts.append(f"{pace.num_skipped} {'attempt' if pace.num_skipped == 1 else 'attempts'} refused")
    return " | ".join(parts)
