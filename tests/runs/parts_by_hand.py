"""The parts of a run whose model, losses and data are a test's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import lockstep as ls
from lockstep.metrics.metric import NO_METRICS, Metric
from lockstep.runs.build import Parts


def parts_by_hand(
    state: ls.TrainState,
    loader: ls.data.Loader,
    towers: ls.Towers,
    losses: Callable[..., Any],
    score: Callable[..., Any] | None = None,
    held_out: ls.data.Loader | None = None,
    metrics: Mapping[str, Metric] = NO_METRICS,
) -> Parts:
    examples: Any = SimpleNamespace(
        held_out=lambda split, most=None: held_out,
        reader=lambda split: None,
        has=lambda split: held_out is not None,
        trained_classes=(),
    )
    task: Any = SimpleNamespace(losses=losses, score=score, metrics=metrics, counts=lambda model: None)
    return Parts(state, loader, towers, task, examples)
