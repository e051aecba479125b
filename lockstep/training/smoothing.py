"""Moving averages of the losses, as the tower trainers reported them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DECAY = 0.9


class SmoothedLosses:
    """average = 0.9 * average + 0.1 * loss after each update, for each loss and their total, without the bias of
    the zero it starts from (divided by 1 - 0.9 ** updates, as in Kingma, Ba: Adam, 2015).
    """  # noqa: D205

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self._averages: dict[str, float] = dict(saved["averages"]) if saved else {}
        self._weight: float = saved["weight"] if saved else 0.0

    def update(self, losses: Mapping[str, float]) -> None:
        """Take in the losses of one update."""
        averages = self._averages
        for name, loss in losses.items():
            averages[name] = DECAY * averages.get(name, 0.0) + (1 - DECAY) * loss
        averages["total"] = DECAY * averages.get("total", 0.0) + (1 - DECAY) * sum(losses.values())
        self._weight = DECAY * self._weight + (1 - DECAY)

    def corrected(self) -> dict[str, float]:
        """The averages by name, and that of `total`."""
        return {name: average / self._weight for name, average in self._averages.items()}

    def values(self) -> dict[str, Any]:
        """What has to be saved, as JSON."""
        return {"averages": dict(self._averages), "weight": self._weight}
