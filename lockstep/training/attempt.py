"""One attempt at an update: what it is made of, what came of it, and what is kept of its losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch

from lockstep.checks import Checked, Decay, Hint
from lockstep.readback import Readback
from lockstep.tensor_lists import are_finite

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.optim.gradients import Gradients
    from lockstep.parallel.hosting import StepInputs
    from lockstep.parallel.tree import TreeSum
    from lockstep.types import Batch

Nonfinite = Literal["stop", "skip", "rollback", "off"]
"""What becomes of an attempt that is not finite."""
_MAX_NAMES_SHOWN = 8
_LARGEST_SCALE, _LEAST_SCALE = 2.0**24, 1.0
_GROWTH_INTERVAL_STEPS = 2000


@dataclass(slots=True)
class Attempt:
    """Inputs of an update: sums over all towers of their shares of the mean.

    Numbers are plain, or on a device that the host would wait for tensors without dimensions (float64).
    """

    gradients: Sequence[Tensor | None]
    """In the order of the parameters; None where no tower had one."""
    statistics: list[Tensor]
    """New values of the model's buffers, in their order; empty where they stay as they are."""
    losses: Mapping[str, float] | Mapping[str, Tensor]
    rows: Mapping[int, Tensor] = field(default_factory=dict)
    """By index of each parameter with a sparse gradient: the rows that its gradient has."""
    loss_scale: float | None = None
    """What the gradients are still to be divided by; None where losses are not scaled."""
    owned: bool = False
    """Nobody else holds the gradients: they may be used up."""
    statistics_check: float | Tensor = 0.0
    """NaN where the towers' changes of the buffers are not finite, else 0."""
    others: Sequence[float] | Tensor = ()
    """What else is to be read with the losses."""
    withheld: Tensor | None = None
    """Where it is not 0, an update is not made before the host has read the attempt."""
    unexpected: Tensor | None = None
    """Parameters of which it is wrong that no tower had a gradient, or that some had; None: it is right of all."""

    def is_finite(self) -> bool:
        """Whether gradients and losses are, before any regularization; checked tensor by tensor."""
        gradients = all(are_finite([g for g in self.gradients if g is not None]))
        return gradients and all(math.isfinite(float(loss)) for loss in self.losses.values())


class Found(NamedTuple):
    """What the host knows of an attempt once it has read it."""

    losses: Mapping[str, float]
    """Those of the attempt, and the regularization."""
    norm: float
    """Of the averaged gradients, regularization included, before any transform."""
    has_finite_statistics: bool
    """The towers' changes of the buffers are finite."""
    others: Sequence[float]
    num_unexpected: float = 0.0
    """`Attempt.unexpected`: if it is not 0, the attempt has to be made again."""
    norms: Sequence[float] = ()
    """Of each gradient that is not None, where they have been read with the rest."""

    @property
    def has_finite_losses(self) -> bool:
        """Whether the losses are finite, each of them."""
        return all(map(math.isfinite, self.losses.values()))

    @property
    def is_finite(self) -> bool:
        """Whether losses, gradients and changes of the buffers are."""
        return self.has_finite_statistics and math.isfinite(self.norm) and self.has_finite_losses


class Unread(NamedTuple):
    """What is found of an attempt, on its way from the device to the host."""

    losses: tuple[str, ...]
    num_others: int
    copy: Readback
    may_be_unexpected: bool = False
    """The number of what was not expected is read, too."""

    def read(self, poll: Callable[[], None] | None = None) -> Found:
        """Wait until it has come; see `Readback.read`."""
        values = self.copy.read(poll)
        check, norm, *rest = values[len(self.losses) :]
        num_unexpected = rest.pop(0) if self.may_be_unexpected else 0.0
        losses = dict(zip(self.losses, values, strict=False))
        others, norms = rest[: self.num_others], rest[self.num_others :]
        return Found(losses, norm, math.isfinite(check), others, num_unexpected, norms)


class Proposal:
    """An update that is computed and not made: its gradients, and the numbers that decide whether it is made.

    Args:
        attempt: what the towers have come to.
        losses: those of the attempt, and the regularization.
        gradients: regularization included.
    """

    unread: Unread | None = None
    """The numbers, where the host would wait for them; meanwhile `found_inf` decides on the device."""

    def __init__(self, attempt: Attempt, losses: Mapping[str, float | Tensor], gradients: Gradients) -> None:
        self.attempt, self.gradients = attempt, gradients
        self._losses = losses
        if isinstance(attempt.others, torch.Tensor):
            others = attempt.others
            no_norms = others.new_zeros(()), others.new_zeros(0)  # where no parameter has a gradient
            norm, norms = gradients.unread_norms() if gradients.reading_waits else no_norms
            is_checked = [] if attempt.unexpected is None else [attempt.unexpected]
            numbers = [*losses.values(), attempt.statistics_check, norm, *is_checked]
            self._checked = torch.stack([n if isinstance(n, torch.Tensor) else norm.new_full((), n) for n in numbers])
            copy = Readback(torch.cat([self._checked, others, norms]))
            self.unread = Unread(tuple(losses), len(others), copy, bool(is_checked))

    def found_inf(self, refused: Literal["nonfinite", "overflow", "nothing"]) -> Tensor:
        """1 where the update must not be made, else 0: float32, on the device, without dimensions.

        Args:
            refused: all that is not finite; only gradients that overflow while the losses are finite; or neither.
        """
        zeros = self._checked * 0.0  # NaN for all that is not finite
        is_bad = zeros.sum().isnan()
        if refused == "overflow":
            is_bad = is_bad & ~zeros[: len(self._losses)].sum().isnan()
        if self.attempt.withheld is not None:
            is_withheld = self.attempt.withheld != 0  # or NaN, where the sum was cut short
            is_bad = is_withheld if refused == "nothing" else is_bad | is_withheld
        return is_bad.float()

    def read(self, poll: Callable[[], None] | None = None) -> Found:
        """Read the numbers; the host waits where it has to."""
        if self.unread is not None:
            found = self.unread.read(poll)
            self.gradients.tell_norms(found.norms)
            return found
        attempt: Any = self.attempt
        losses: Any = self._losses
        return Found(losses, self.gradients.norm, math.isfinite(attempt.statistics_check), attempt.others)


class Begun(NamedTuple):
    """An attempt that is computed, on a device perhaps still under way; nothing has changed yet."""

    batch: Batch
    inputs: StepInputs
    sums: TreeSum
    proposal: Proposal
    versions: list[int]
    """Of the tensors that it was computed with."""
    changes_of_others: int
    """Of other states, which the loss function may use."""
    began: float
    """By `time.perf_counter`."""


class Enqueued(NamedTuple):
    """An update under way on a device; what has become of it, the host has yet to read."""

    batch: Batch
    inputs: StepInputs
    unread: Unread


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


def describe_nonfinite(found: Found, gradients: Gradients) -> list[str]:
    """The losses and gradients that are not finite, and the statistics if they are not; at most eight gradients."""
    from lockstep.parallel.diagnosis import nonfinite_losses

    present = {n: g for n, g in zip(gradients.names, gradients.tensors, strict=True) if g is not None}
    finite = are_finite([*present.values()])
    names = [f"gradient of {name!r}" for name, is_finite in zip(present, finite, strict=True) if not is_finite]
    more = len(names) - _MAX_NAMES_SHOWN
    words = nonfinite_losses(found.losses) + names[:_MAX_NAMES_SHOWN]
    words += [f"{more} gradients more"] if more > 0 else []
    if not found.has_finite_statistics:
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
