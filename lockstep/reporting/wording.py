"""A step in words: pure functions from a report to the text that the screen shows."""

from __future__ import annotations

import math

from lockstep.reporting.pace import Pace
from lockstep.types import StepReport


def number(value: float) -> str:
    """Four significant digits: `0.3124`, `2.303`, `1.2e-05`, `nan`."""
    return f"{value:.4g}"


def rate(value: float) -> str:
    """Three significant digits, and never less than the whole number: `0.25`, `41.7`, `3412`."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
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


def place(step: int, last_step: int | None) -> str:
    """Where the run is: `step 120 of 1718`, or `step 120` where the last step is not known."""
    return f"step {step}" if last_step is None else f"step {step} of {last_step}"


def losses(report: StepReport) -> str:
    """The losses of a step, the total where there are several, and its smoothed value where it is known."""
    total = number(report.total)
    if len(report.losses) == 1:
        text = f"loss {total}"
    else:
        text = ", ".join([f"{name} {number(value)}" for name, value in report.losses.items()] + [f"total {total}"])
    smoothed = report.smoothed.get("total")
    return text if smoothed is None else f"{text} (smoothed {number(smoothed)})"


def measures(report: StepReport, pace: Pace) -> str:
    """What a step measured, and the pace since the last time it was shown."""
    parts = [
        losses(report),
        f"lr {number(report.learning_rate)}",
        f"{rate(pace.examples_per_second)} examples/s",
        f"data wait {100 * pace.wait_share:.0f} %",
    ]
    if pace.num_skipped:
        parts.append(f"{pace.num_skipped} {'attempt' if pace.num_skipped == 1 else 'attempts'} refused")
    return " | ".join(parts)
