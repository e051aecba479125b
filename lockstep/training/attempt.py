"""One attempt at an update: what it is made of, what came of it, and what is kept of its losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from lockstep.checks import Checked, Decay, Hint

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.optim.gradients import Gradients

Nonfinite = Literal["stop", "skip", "rollback", "off"]
"""What becomes of an attempt that is not finite."""
_MAX_NAMES_SHOWN = 8
_LARGEST_SCALE, _LEAST_SCALE = 2.0**24, 1.0
_GROWTH_INTERVAL_STEPS = 2000


@dataclass(slots=True)
class Attempt:
    """Inputs of an update: sums over all towers of their shares of the mean."""

    gradients: Sequence[Tensor | None]
    """In the order of the parameters; None where no tower had one."""
    statistics: list[Tensor]
    """New values of the model's buffers, in their order; empty where they stay as they are."""
    losses: Mapping[str, float]
    rows: Mapping[int, Tensor] = field(default_factory=dict)
    """By index of each parameter with a sparse gradient: the rows that its gradient has."""
    loss_scale: float | None = None
    """What the gradients are still to be divided by; None where losses are not scaled."""
    owned: bool = False
    """Nobody else holds the gradients: they may be used up."""
    has_finite_statistics: bool = True
    """The towers' changes of the buffers are finite."""

    def is_finite(self) -> bool:
        """Whether all of it is finite, checked tensor by tensor."""
        gradients = all(bool(g.isfinite().all()) for g in self.gradients if g is not None)
        return gradients and self.has_finite_statistics and all(map(math.isfinite, self.losses.values()))

    def overflowed(self, losses: Mapping[str, float]) -> bool:
        """Whether the loss scale may be the reason that something is not finite: never where a loss is not."""
        return self.loss_scale is not None and all(map(math.isfinite, losses.values()))


class Outcome(NamedTuple):
    """What `apply` did with an attempt."""

    learning_rates: Mapping[str, float]
    """By pattern, where there are several optimizers; else one under ""."""
    gradient_norm: float
    """Of the averaged gradients, regularization included, before any transform."""
    losses: Mapping[str, float]
    """Those of the attempt, and the regularization."""
    nonfinite: tuple[str, ...] = ()
    """What is not finite, in words: then the attempt was skipped, and nothing has changed."""
    overflowed: bool = False
    """The gradients overflowed at the present loss scale: the attempt was skipped for that alone."""

    @property
    def skipped(self) -> bool:
        """Whether nothing has changed."""
        return bool(self.nonfinite)


def describe_nonfinite(losses: Mapping[str, float], gradients: Gradients, *, has_finite_statistics: bool) -> list[str]:
    """The losses and gradients that are not finite, and the statistics if they are not; at most eight gradients."""
    from lockstep.parallel.diagnosis import nonfinite_losses

    names = [
        f"gradient of {name!r}"
        for name, gradient in zip(gradients.names, gradients.tensors, strict=True)
        if gradient is not None and not gradient.isfinite().all()
    ]
    more = len(names) - _MAX_NAMES_SHOWN
    words = nonfinite_losses(losses) + names[:_MAX_NAMES_SHOWN] + ([f"{more} gradients more"] if more > 0 else [])
    if not has_finite_statistics:
        words.append("the batch-norm statistics")
    return words or ["the gradients are finite, and their global norm is not"]


class LossScale:
    """The factor of fp16 losses: halved when gradients overflow, doubled after 2,000 good updates.

    It keeps small gradients from becoming 0 (Micikevicius et al.: Mixed Precision Training, 2018). It is a power of
    two, which changes no bits but the exponent.
    """

    def __init__(self, value: float = 2.0**16, good_steps: int = 0) -> None:
        self.value = value
        self._good_steps = good_steps

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller scale is possible."""
        return self.value > _LEAST_SCALE

    def shrink(self) -> None:
        """The gradients overflowed."""
        self.value, self._good_steps = max(_LEAST_SCALE, self.value / 2), 0

    def grow(self) -> None:
        """An update was made at this scale."""
        self._good_steps += 1
        if self._good_steps >= _GROWTH_INTERVAL_STEPS:
            self.value, self._good_steps = min(_LARGEST_SCALE, self.value * 2), 0

    def values(self) -> dict[str, Any]:
        """What has to be saved, as JSON."""
        return {"value": self.value, "good_steps": self._good_steps}


@dataclass(frozen=True)
class LossAverage(Checked):
    """average = decay * average + (1 - decay) * loss after each update, for each loss and their total, from 0."""

    decay: Annotated[Decay, Hint("give a decay such as 0.9 or 0.99")] = 0.9
    bias_correction: bool = True
    """Divide by 1 - decay ** updates, which takes out the zero that it starts from (Kingma, Ba: Adam, 2015); the
    Inception trainer did not, so that its first averages read a tenth of the loss."""


class SmoothedLosses:
    """The moving averages of the losses of one run."""

    def __init__(self, value: LossAverage) -> None:
        self._value = value
        self._averages: dict[str, float] = {}
        self._weight = 0.0

    def update(self, losses: Mapping[str, float]) -> None:
        """Add the losses of one update."""
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
