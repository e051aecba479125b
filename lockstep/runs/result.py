"""The result of a run: `result.json` in its workdir, once it has reached its end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lockstep.checkpoints.manifest import Manifest
from lockstep.checkpoints.store import Store
from lockstep.evaluation.evaluate import Evaluation
from lockstep.reporting.jsonl import without_nonfinite
from lockstep.version import __version__

Reason = Literal["end", "patience", "stopped"]


@dataclass(frozen=True)
class Best:
    """The best checkpoint by the score of the recipe."""

    step: int
    scores: dict[str, float]

    @classmethod
    def of(cls, store: Store) -> Best | None:
        """Read the best checkpoint of a store; None if none is known to be the best."""
        step = store.best()
        return None if step is None else cls(step, dict(Manifest.read(store.path(step)).scores))


@dataclass(frozen=True)
class Result:
    """Why and where a start of a run has ended, and its scores; all but the times are the same on all workers."""

    recipe: str
    """Name of the recipe."""
    step: int
    """Completed updates."""
    epochs: float
    reason: Reason
    """Its end is reached; or `evaluate.patience` evaluations have brought no better checkpoint; or a signal has stopped
    it, and the next start goes on."""
    split: str | None
    """The examples that are scored after the end; None where the recipe names neither test nor validation examples."""
    evaluation: Evaluation | None
    """Scores of the final weights; None if there are no examples for it, or the run or the scoring was stopped."""
    best: Best | None
    seconds: float
    """Duration of this start."""
    examples_per_second: float
    """Throughput of this start without evaluations and saving; 0 if it made no attempt."""

    @property
    def is_complete(self) -> bool:
        """Whether the run has reached its end, and its weights are scored if there are examples for it."""
        return self.reason != "stopped" and (self.evaluation is not None or self.split is None)

    def as_json(self) -> str:
        """Make the text of the file; numbers that JSON lacks are text, as in `metrics.jsonl`."""
        return json.dumps(without_nonfinite(self._facts()), indent=1, allow_nan=False) + "\n"

    def _facts(self) -> dict[str, Any]:
        scored = self.evaluation
        return {
            "recipe": self.recipe,
            "lockstep": __version__,
            "torch": torch.__version__,
            "step": self.step,
            "epochs": self.epochs,
            "reason": self.reason,
            "evaluations": {self.split: scored.facts} if scored else {},
            "best": self.best and {"step": self.best.step, "scores": self.best.scores},
            "times": {"seconds": self.seconds, "examples_per_second": self.examples_per_second},
        }
