"""Reports of steps as JSON: the chief of a served exchange sends them to the workers that compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.progress import Progress
from lockstep.types import Arrivals, BadExample, NonFiniteReport, StepReport


def to_message(report: StepReport) -> dict[str, Any]:
    """The report as JSON; the batch of one that is not finite stays with the worker that has it."""
    nonfinite, arrivals = report.nonfinite, report.arrivals
    return {
        **report._asdict(),
        "progress": list(report.progress),
        "losses": dict(report.losses),
        "smoothed": dict(report.smoothed),
        "metrics": dict(report.metrics),
        "learning_rates": dict(report.learning_rates),
        "stage_seconds": dict(report.stage_seconds),
        "bad": [list(example) for example in report.bad],
        "nonfinite": nonfinite and list(nonfinite[:3]),
        "arrivals": arrivals and [list(counts.items()) for counts in arrivals],
    }


def from_message(message: Mapping[str, Any]) -> StepReport:
    """The report that was sent."""
    nonfinite, arrivals = message["nonfinite"], message["arrivals"]
    return StepReport(
        **{
            **message,
            "progress": Progress(*message["progress"]),
            "bad": tuple(BadExample(*example) for example in message["bad"]),
            "nonfinite": nonfinite and NonFiniteReport(nonfinite[0], *map(tuple, nonfinite[1:])),
            "arrivals": arrivals and Arrivals(*map(dict, arrivals)),
        }
    )
