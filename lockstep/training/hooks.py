"""Hooks: functions of a report, and how often they run."""

from __future__ import annotations

from lockstep.progress import Interval, Progress
from lockstep.training.loop import Hook
from lockstep.types import StepReport


def every(interval: Interval | str | int, hook: Hook, *, start: Progress | None = None) -> Hook:
    """The hook, called only where a whole multiple of the interval has passed since the report before.

    Every worker calls it at the same step, whatever the unit: the clock is the chief's.

    Args:
        interval: an `Interval`, its text ("20 steps", "600 s", "1 epochs"), or a number of steps; 0 is never.
        hook: what to call.
        start: where the run resumed, so that nothing is called twice; its beginning by default.
    """
    if not isinstance(interval, Interval):
        interval = Interval.parse(interval) if isinstance(interval, str) else Interval(interval)
    before = start or Progress(0, 0, 0)

    def call_when_due(report: StepReport) -> None:
        nonlocal before
        due = interval.passed(before, report.progress)
        before = report.progress
        if due:
            hook(report)

    return call_when_due
