"""What the towers made of one batch, and what the update made of that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Attempt:
    """What an update is made from: sums over all towers of their shares of the mean."""

    gradients: Sequence[Tensor | None]
    """In the order of the parameters; None where no tower had one."""
    statistics: Sequence[Tensor]
    """New values of the model's buffers, in their order; empty where they stay as they are."""
    losses: Mapping[str, float]
    rows: Mapping[int, Tensor] = field(default_factory=dict)
    """For the index of each parameter with a sparse gradient: the rows that its tensor holds."""
    loss_scale: float | None = None
    """What the gradients are still to be divided by; None where losses are not scaled."""
    owned: bool = False
    """Nobody else holds the gradients: they may be used up."""
    statistics_fit: bool = True
    """What the towers change in the buffers is finite."""

    def is_finite(self) -> bool:
        """Whether all there is of it is finite, looked at tensor by tensor."""
        gradients = all(bool(g.isfinite().all()) for g in self.gradients if g is not None)
        return gradients and self.statistics_fit and all(map(math.isfinite, self.losses.values()))

    def overflowed(self, losses: Mapping[str, float]) -> bool:
        """Whether it may be the loss scale's fault that something is not finite: never where a loss is not."""
        return self.loss_scale is not None and all(map(math.isfinite, losses.values()))


class Outcome(NamedTuple):
    """What `apply` did with an attempt."""

    learning_rates: Mapping[str, float]
    """By pattern, where there are several optimizers; else one under ""."""
    gradient_norm: float
    """Of the averaged gradients, regularisation included, before any transform."""
    losses: Mapping[str, float]
    """Those of the attempt, and the regularisation."""
    unfit: tuple[str, ...] = ()
    """What is not finite, in words: then the attempt was refused, and nothing has changed."""
    overflowed: bool = False
    """The gradients overflowed at the present loss scale: it was refused for that alone."""

    @property
    def refused(self) -> bool:
        """Whether nothing has changed."""
        return bool(self.unfit)
