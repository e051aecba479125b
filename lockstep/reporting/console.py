"""Progress of training and of other work on the screen: a live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from lockstep.reporting.throughput import Throughput, last_step, moment_before, seconds_left
from lockstep.screen import is_quiet, log, one_line
from lockstep.terminal import is_terminal, num_columns, width_of, wrapped
from lockstep.types import End, Interval, Progress, ProgressFunction, StepReport

_SECONDS_BETWEEN_DRAWINGS = 0.2
_SHORTEST_BAR = 5
_BETWEEN = " | "
_CLEAR_BELOW = "\r\x1b[J"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Bar:
    """A bar below the cursor, which rests on an empty line above it.

    Lines that other processes write meanwhile, the launcher or another worker, thus appear above the bar, and the next
    drawing follows below. A killed run leaves the cursor visible.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn: list[str] = []
        self._next_drawing = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time to draw again: at most five times a second."""
        return time.monotonic() >= self._next_drawing

    def draw(self, place: str, fraction: float | None, left: str, measures: Sequence[str]) -> None:
        """Show a moment of the work; a fraction (0 to 1) of None is work without an end, and has no bar.

        Where the terminal is too narrow, the measures take several lines and the bar itself is left out: numbers stay.
        """
        width = width_of(self._stream) or 80
        lines = [*self._head(one_line(place), fraction, left, width), *flowed(map(one_line, measures), width)]
        self._drawn = [line if "\x1b" in line else _cut(line, width) for line in lines]
        self._write(_CLEAR_BELOW + "\n" + "\n".join(self._drawn) + f"\r\x1b[{len(self._drawn)}A")
        self._next_drawing = time.monotonic() + _SECONDS_BETWEEN_DRAWINGS

    def close(self) -> None:
        """Leave the last moment on the screen, the cursor on the line below."""
        self._write("\n".join([_CLEAR_BELOW + self._drawn[0], *self._drawn[1:], ""]))

    def remove(self) -> None:
        """Leave nothing on the screen."""
        self._write(_CLEAR_BELOW)

    def _head(self, place: str, fraction: float | None, left: str, width: int) -> list[str]:
        if fraction is None:
            return flowed([place, left] if left else [place], width)
        share = f"{100 * fraction:.0f} %"
        end = f"{share} {left}".rstrip()
        room = width - num_columns(place) - num_columns(end) - 2
        if room < _SHORTEST_BAR:
            return flowed([place, share, left] if left else [place, share], width)
        return [f"{place} {self._bar(fraction, room)} {end}"]

    def _bar(self, fraction: float, width: int) -> str:
        # Only a terminal needs rich, 50 ms to import. It knows the colours and signs that the terminal has.
        from rich.console import Console
        from rich.progress_bar import ProgressBar

        console = Console(file=self._stream)
        with console.capture() as captured:
            console.print(ProgressBar(total=1.0, completed=fraction, width=width), end="")
        drawn = captured.get().rstrip("\n")
        return drawn + " " * (width - len(_COLOUR.sub("", drawn)))  # without colours rich draws what is done alone

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def flowed(parts: Sequence[str] | map[str], width: int) -> list[str]:
    """Join parts to as few lines of at most `width` columns as they need, in their order."""
    lines: list[str] = []
    for part in parts:
        if lines and num_columns(lines[-1] + _BETWEEN + part) <= width:
            lines[-1] += _BETWEEN + part
        else:
            lines += wrapped(part, width)
    return lines


def _cut(line: str, width: int) -> str:
    """Cut a line that is one long word: it must not take two lines of the terminal."""
    if num_columns(line) <= width:
        return line
    while num_columns(line) >= width:
        line = line[:-1]
    return f"{line}…"


_FADE = 0.95
"""How much of a rate is kept at every drawing of the bar: it looks back about four seconds."""


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
        self._bar = Bar(stream) if is_terminal(stream) and not is_quiet() else None
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
        self._pace = Throughput()
        self._is_unseen = False

    def _draw(self, bar: Bar, report: StepReport) -> None:
        fraction = None if self._end is None else self._end.fraction(report.progress)
        bar.draw(self._place(report), fraction, self._time(report), step_measures(report, self._pace))
        self._pace.fade(_FADE)

    def _place(self, report: StepReport) -> str:
        return format_step(report.step, last_step(self._end, report.progress, self._batch_size))

    def _time(self, report: StepReport) -> str:
        """Say how long it still takes; at the end, how long it took, without what follows, such as scoring."""
        if self._end is not None and self._end.reached(report.progress, self._batch_size):
            return f"took {format_duration(report.progress.elapsed_seconds)}"
        left = seconds_left(self._end, self._first or report.progress, report.progress)
        return "" if left is None else f"{format_duration(left)} left"


def format_number(value: float) -> str:
    """Format with four significant digits: `0.3124`, `2.303`, `1.2e-05`, `nan`."""
    return f"{value:.4g}"


def format_rate(value: float) -> str:
    """Format with three significant digits, and never less than the whole number: `0.25`, `41.7`, `3412`."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """Format in the two largest units: `52 s`, `3 min 20 s`, `2 h 10 min`, `4 d 3 h`; `?` if it is not finite."""
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
    """Say where the run is: `step 120 of 1718`, or `step 120` where the last step is not known."""
    return f"step {step}" if last_step is None else f"step {step} of {last_step}"


def format_losses(report: StepReport) -> str:
    """Format the losses of a step, the total where there are several, and its smoothed value where it is known."""
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
    """Format the learning rate; where optimizers have different rates, the least and the most."""
    rates = report.learning_rates.values() or [report.learning_rate]
    return " to ".join(dict.fromkeys(map(format_number, (min(rates), max(rates)))))


def step_measures(report: StepReport, pace: Throughput) -> list[str]:
    """Format what a step measured, and the pace since the last time it was shown."""
    refused = f"{pace.num_skipped} {'attempt' if pace.num_skipped == 1 else 'attempts'} refused"
    return [
        format_losses(report),
        f"lr {_rates(report)}",
        f"{format_rate(pace.examples_per_second)} examples/s",
        f"data wait {100 * pace.wait_share:.0f} %",
        *([refused] if pace.num_skipped else []),
    ]


_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def show_progress(title: str) -> Iterator[ProgressFunction]:
    """Yield a function that shows, after a title, how many items of how many are done, at which rate."""
    display = _Display(title, sys.stderr)
    try:
        yield display.show
    finally:
        display.close()


@contextmanager
def show_elapsed(title: str) -> Iterator[None]:
    """Show, after a title, how long the block has taken so far: for work whose length nobody knows."""
    display, over = _Display(title, sys.stderr), threading.Event()

    def show_until_over() -> None:
        while not over.wait(display.seconds_between):
            display.show_elapsed()

    thread = threading.Thread(target=show_until_over, name="elapsed", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        display.close()


class _Display:
    """A bar for work under way; when the work is over, its bar is removed, and the caller prints the result."""

    def __init__(self, title: str, stream: TextIO) -> None:
        self._title = title
        self._bar = Bar(stream) if is_terminal(stream) and not is_quiet() else None
        self._began = time.monotonic()
        self._first: tuple[int, float] | None = None
        self._next_line = self._began + _SECONDS_BETWEEN_LINES

    @property
    def seconds_between(self) -> float:
        """Seconds between two lines where nothing is counted."""
        return 1.0 if self._bar else _SECONDS_BETWEEN_LINES

    def show(self, done: int, total: int) -> None:
        """Show how many are done, if it is time to."""
        now = time.monotonic()
        # The pace is that of this start alone.
        self._first = self._first or (done, now)
        if not (self._bar.is_due if self._bar else now >= self._next_line):
            return
        num_since, seconds = done - self._first[0], now - self._first[1]
        pace = num_since / seconds if seconds else 0.0
        place, rate = f"{self._title}: {done} of {total}", f"{format_rate(pace)}/s"
        left = f"{format_duration((total - done) / pace)} left" if pace else ""
        if self._bar:
            self._bar.draw(place, done / total if total else 1.0, left, [rate] if pace else [])
        else:
            log.info("%s", " | ".join(part for part in (place, rate, left) if part))
            self._next_line = now + _SECONDS_BETWEEN_LINES

    def show_elapsed(self) -> None:
        place = f"{self._title}: {format_duration(time.monotonic() - self._began)}"
        if self._bar:
            self._bar.draw(place, None, "", [])
        else:
            log.info("%s", place)

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar:
            self._bar.remove()
