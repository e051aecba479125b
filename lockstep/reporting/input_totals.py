"""What the way from files to batches costs: waiting, work by stage, the fill of the queue, bad examples."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.tracing import StageSeconds, sum_seconds
from lockstep.types import StepReport


@dataclass(slots=True)
class InputTotals:
    """Sums over attempts, of this worker."""

    num_attempts: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    stage_seconds: StageSeconds = field(default_factory=dict)
    """Of whoever reads, mostly while steps are made: they may be more than `seconds`."""
    num_bad: int = 0
    """Examples of all workers that could not be read."""
    queue_fill: float | None = None
    """Of each attempt the share of what may be read ahead that was there; None where nothing is read ahead."""

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
