"""How fast a run goes, averaged over several attempts, and how long it still takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lockstep.tracing import StageSeconds, sum_seconds
from lockstep.types import End, Epochs, Hours, Progress, StepReport, Steps


@dataclass(slots=True)
class Throughput:
    """Sums over some attempts, and the rates they give; a rate over no time is 0."""

    num_steps: float = 0.0
    num_skipped: int = 0
    num_examples: float = 0.0
    seconds: float = 0.0
    wait_seconds: float = 0.0

    def add(self, report: StepReport) -> None:
        """Count one attempt."""
        if report.skipped:
            self.num_skipped += 1
        else:
            self.num_steps += 1
        self.num_examples += report.num_examples
        self.seconds += report.step_seconds
        self.wait_seconds += report.wait_seconds

    def fade(self, factor: float) -> None:
        """Let what was counted so far weigh less than what follows; refused attempts stay counted."""
        self.num_steps *= factor
        self.num_examples *= factor
        self.seconds *= factor
        self.wait_seconds *= factor

    @property
    def steps_per_second(self) -> float:
        """Updates a second; refused attempts take time and make none."""
        return self._share(self.num_steps)

    @property
    def examples_per_second(self) -> float:
        """Examples a second over all towers, those of refused attempts included."""
        return self._share(self.num_examples)

    @property
    def wait_share(self) -> float:
        """Share of the time spent waiting for data, 0 to 1."""
        return self._share(self.wait_seconds)

    def _share(self, amount: float) -> float:
        return amount / self.seconds if self.seconds else 0.0


def moment_before(report: StepReport) -> Progress:
    """Return the moment before an attempt, as far as its report can tell."""
    now = report.progress
    return Progress(
        step=now.step if report.skipped else now.step - 1,
        position=now.position - report.num_examples,
        epoch_size=now.epoch_size,
        elapsed_seconds=now.elapsed_seconds - report.step_seconds,
    )


def last_step(end: End | None, progress: Progress, batch_size: int) -> int | None:
    """Return the step a run ends with, if nothing more is refused; None where only the clock, or nothing, ends it."""
    if isinstance(end, Steps):
        return end.count
    if isinstance(end, Epochs):
        rest = end.count * progress.epoch_size - progress.position
        num_left = math.ceil(rest / batch_size) if end.keep_last else int(rest) // batch_size
        return progress.step + max(0, num_left)
    return None


def seconds_left(end: End | None, first: Progress, now: Progress) -> float | None:
    """Return the time until the end, at the rate between two moments of this start; None where that says nothing.

    The rate counts everything that takes time, checkpoints and evaluations too. `first` is best taken after the first
    attempt, which is slow for reasons that do not come again.
    """
    if end is None:
        return None
    if isinstance(end, Hours):
        return max(0.0, end.count * 3600 - now.elapsed_seconds)
    done, done_since = end.fraction(now), end.fraction(now) - end.fraction(first)
    if done_since <= 0:
        return None
    return (1 - done) * (now.elapsed_seconds - first.elapsed_seconds) / done_since


@dataclass(slots=True)
class InputTotals:
    """Sums over the attempts of this worker."""

    num_attempts: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    stage_seconds: StageSeconds = field(default_factory=dict)
    """Seconds of reading in all loader processes and threads: they may be more than `seconds`."""
    num_bad: int = 0
    """Examples of all workers that could not be read."""
    queue_fill: float | None = None
    """For each attempt the share of what may be read ahead that was there; None where nothing is read ahead."""

    def add(self, report: StepReport) -> None:
        """Count an attempt."""
        self.num_attempts += 1
        self.seconds += report.step_seconds
        self.wait_seconds += report.wait_seconds
        self.stage_seconds = sum_seconds(self.stage_seconds, report.stage_seconds)
        self.num_bad += len(report.bad)
        if report.queue_fill is not None:
            self.queue_fill = (self.queue_fill or 0.0) + report.queue_fill

    def scalars(self) -> dict[str, float]:
        """Means over the attempts, by tag, for summaries."""
        fill = {} if self.queue_fill is None else {"input/queue_fill": self.queue_fill / self.num_attempts}
        stages = {f"input/{stage}_seconds": total / self.num_attempts for stage, total in self.stage_seconds.items()}
        return {**fill, **stages, "input/bad_examples": float(self.num_bad)}

    def __str__(self) -> str:
        share = 100 * self.wait_seconds / self.seconds if self.seconds else 0.0
        total = sum(self.stage_seconds.values())
        longest_first = sorted(self.stage_seconds.items(), key=lambda item: -item[1])
        parts = ", ".join(
            f"{stage} {100 * each / total:.0f} %" for stage, each in longest_first if each / total > 0.005
        )
        reading = f"; reading took {total:.1f} s ({parts})" if total else ""
        bad = f"; bad examples replaced: {self.num_bad}" if self.num_bad else ""
        return f"waited for data {share:.0f} % of {self.seconds:.0f} s{reading}{bad}"
