"""Progress on the screen: a live bar on a terminal, a plain line an interval anywhere else."""

from __future__ import annotations

import math
import sys
from typing import TextIO

from lockstep.progress import End, Interval, Progress
from lockstep.reporting.bar import Bar
from lockstep.reporting.throughput import Throughput, last_step, moment_before, seconds_left
from lockstep.screen import log
from lockstep.terminal import is_terminal
from lockstep.types import StepReport

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
        stream = stream or sys.stderr
        self._bar = Bar(stream) if is_terminal(stream) else None
        self._pace = Throughput()
        self._first: Progress | None = None
        self._latest: StepReport | None = None
        self._is_unseen = False

    def __call__(self, report: StepReport) -> None:
        """Count an attempt, and show it when its time has come."""
        if not self._interval.amount:
            return
        before = self._latest.progress if self._latest else moment_before(report)
        self._first = self._first or report.progress
        self._latest, self._is_unseen = report, True
        self._pace.add(report)
        if self._bar is None:
            if self._interval.passed(before, report.progress):
                self._write_line(report)
        elif self._bar.is_due:
            self._draw(self._bar, report)

    def close(self) -> None:
        """Show the last attempt, and give the terminal back."""
        report, self._latest = self._latest, None
        if report is None:
            return
        if self._bar is not None:
            self._draw(self._bar, report)
            self._bar.close()
        elif self._is_unseen:
            self._write_line(report)
        if report.arrivals:
            log.info("%s", report.arrivals)

    def _write_line(self, report: StepReport) -> None:
        parts = (self._place(report), *step_measures(report, self._pace), self._time(report))
        log.info("%s", " | ".join(part for part in parts if part))
        self._pace.clear()
        self._is_unseen = False

    def _draw(self, bar: Bar, report: StepReport) -> None:
        fraction = None if self._end is None else self._end.fraction(report.progress)
        bar.draw(self._place(report), fraction, self._time(report), step_measures(report, self._pace))
        self._pace.fade(_FADE)

    def _place(self, report: StepReport) -> str:
        return format_step(report.step, last_step(self._end, report.progress, self._batch_size))

    def _time(self, report: StepReport) -> str:
        """How long it still takes; at the end, how long it took: what follows, such as scoring, takes its own time."""
        if self._end is not None and self._end.reached(report.progress, self._batch_size):
            return f"took {format_duration(report.progress.elapsed_seconds)}"
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


def _rates(report: StepReport) -> str:
    """The learning rate; of several optimizers with different rates the least and the most."""
    rates = report.learning_rates.values() or [report.learning_rate]
    return " to ".join(dict.fromkeys(map(format_number, (min(rates), max(rates)))))


def step_measures(report: StepReport, pace: Throughput) -> list[str]:
    """What a step measured, and the pace since the last time it was shown."""
    refused = f"{pace.num_skipped} {'attempt' if pace.num_skipped == 1 else 'attempts'} refused"
    return [
        format_losses(report),
        f"lr {_rates(report)}",
        f"{format_rate(pace.examples_per_second)} examples/s",
        f"data wait {100 * pace.wait_share:.0f} %",
        *([refused] if pace.num_skipped else []),
    ]
