"""Moving averages of the losses, as the tower trainers reported them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.checks import check_open_unit


@dataclass(frozen=True)
class LossAverage:
    """average = decay * average + (1 - decay) * loss after each update, for each loss and their total, from 0."""

    decay: float = 0.9
    bias_correction: bool = True
    """Divide by 1 - decay ** updates, which takes out the zero that it starts from (Kingma, Ba: Adam, 2015); the
    Inception trainer did not, so that its first averages read a tenth of the loss."""

    def __post_init__(self) -> None:
        check_open_unit("decay", self.decay, hint="give a decay such as 0.9 or 0.99")


class SmoothedLosses:
    """The averages of one run."""

    def __init__(self, value: LossAverage) -> None:
        self._value = value
        self._averages: dict[str, float] = {}
        self._weight = 0.0

    def update(self, losses: Mapping[str, float]) -> None:
        """Take in the losses of one update."""
        averages, decay = self._averages, self._value.decay
        for name, loss in losses.items():
            averages[name] = decay * averages.get(name, 0.0) + (1 - decay) * loss
        averages["total"] = decay * averages.get("total", 0.0) + (1 - decay) * sum(losses.values())
        self._weight = decay * self._weight + (1 - decay)

    def now(self) -> dict[str, float]:
        """The averages by name, and that of `total`."""
        if not self._value.bias_correction:
            return dict(self._averages)
        return {name: average / self._weight for name, average in self._averages.items()}

    def values(self) -> dict[str, Any]:
        """What has to be saved, as JSON."""
        return {"averages": dict(self._averages), "weight": self._weight}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from averages that were saved."""
        self._averages, self._weight = dict(saved["averages"]), saved["weight"]
