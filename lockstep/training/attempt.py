"""One attempt at an update: what it is made of, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch

from lockstep.checks import Checked, Decay, Hint
from lockstep.spans import span
from lockstep.tensors import Readback, are_finite

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.exchange.tree import TreeSum
    from lockstep.optim.gradients import Gradients
    from lockstep.towers.hosting import StepInputs
    from lockstep.types import Batch, CountFunction, LossFunction

Nonfinite = Literal["stop", "skip", "rollback", "off"]
"""What becomes of an attempt that is not finite."""
_MAX_NAMES_SHOWN = 8


@dataclass(slots=True)
class Attempt:
    """Inputs of an update: sums over all towers of their shares of the mean.

    Numbers are plain, or on a device that the host would wait for tensors without dimensions (float64).
    """

    gradients: Sequence[Tensor | None]
    """Sums by parameter, in the parameters' order; None where no tower had one."""
    statistics: list[Tensor]
    """New values of the model's buffers, in their order; empty where they stay as they are."""
    losses: Mapping[str, float] | Mapping[str, Tensor]
    rows: Mapping[int, Tensor] = field(default_factory=dict)
    """The rows of each sparse gradient, by the index of its parameter."""
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
    """How many parameters have a gradient where none was expected, or none where one was; None: not counted."""

    def is_finite(self) -> bool:
        """Whether gradients and losses are, before any regularization; checked tensor by tensor."""
        gradients = all(are_finite([g for g in self.gradients if g is not None]))
        return gradients and all(math.isfinite(float(loss)) for loss in self.losses.values())


class Readings(NamedTuple):
    """What the host knows of an attempt once it has read it."""

    losses: Mapping[str, float]
    """The losses of the attempt, and the regularization."""
    norm: float
    """The norm of the averaged gradients, regularization included, before any transform."""
    has_finite_statistics: bool
    """The towers' changes of the buffers are finite."""
    others: Sequence[float]
    num_unexpected: float = 0.0
    """`Attempt.unexpected`; if it is not 0, the attempt has to be made again."""
    norms: Sequence[float] = ()
    """The norm of each gradient that is not None, where they have been read with the rest."""

    @property
    def has_finite_losses(self) -> bool:
        """Whether the losses are finite, each of them."""
        return all(map(math.isfinite, self.losses.values()))

    @property
    def is_finite(self) -> bool:
        """Whether losses, gradients and changes of the buffers are."""
        return self.has_finite_statistics and math.isfinite(self.norm) and self.has_finite_losses


class PendingReadings(NamedTuple):
    """What is found of an attempt, on its way from the device to the host."""

    losses: tuple[str, ...]
    num_others: int
    copy: Readback
    may_be_unexpected: bool = False
    """`Attempt.unexpected` is read, too."""

    def read(self, poll: Callable[[], None] | None = None) -> Readings:
        """Wait until it has come; see `Readback.read`."""
        with span("read back"):
            values = self.copy.read(poll)
        check, norm, *rest = values[len(self.losses) :]
        num_unexpected = rest.pop(0) if self.may_be_unexpected else 0.0
        losses = dict(zip(self.losses, values, strict=False))
        others, norms = rest[: self.num_others], rest[self.num_others :]
        return Readings(losses, norm, math.isfinite(check), others, num_unexpected, norms)


class Proposal:
    """An update that is computed and not made: its gradients, and the numbers that decide whether it is made.

    Losses and gradients include the regularization.
    """

    pending: PendingReadings | None = None
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
            self.pending = PendingReadings(tuple(losses), len(others), copy, bool(is_checked))

    def found_inf(self, refused: Literal["nonfinite", "overflow", "nothing"]) -> Tensor:
        """1 where the update must not be made, else 0: float32, on the device, without dimensions.

        It refuses all that is not finite; only gradients that overflow while the losses are finite; or neither.
        """
        zeros = self._checked * 0.0  # NaN for all that is not finite
        is_bad = zeros.sum().isnan()
        if refused == "overflow":
            is_bad = is_bad & ~zeros[: len(self._losses)].sum().isnan()
        if self.attempt.withheld is not None:
            is_withheld = self.attempt.withheld != 0  # or NaN, where the sum was cut short
            is_bad = is_withheld if refused == "nothing" else is_bad | is_withheld
        return is_bad.float()

    def read(self, poll: Callable[[], None] | None = None) -> Readings:
        """Read the numbers; the host waits where it has to."""
        if self.pending is not None:
            readings = self.pending.read(poll)
            self.gradients.tell_norms(readings.norms)
            return readings
        attempt: Any = self.attempt
        losses: Any = self._losses
        return Readings(losses, self.gradients.norm, math.isfinite(attempt.statistics_check), attempt.others)


class Given(NamedTuple):
    """What an attempt is made of."""

    losses: LossFunction
    counts: CountFunction | None
    batch: Batch
    fields: Mapping[str, Any]
    """What the batch held when the attempt began."""
    inputs: StepInputs
    versions: list[int]
    """`versions_of` the fields then."""

    def has_changed(self) -> bool:
        """Whether a field was changed in place since the attempt began."""
        return versions_of(self.fields) != self.versions

    def batch_again(self) -> Batch:
        """This worker's batch, as it was when the attempt began."""
        return replace(self.batch, fields=self.fields)


def versions_of(fields: Mapping[str, Any]) -> list[int]:
    """Numbers that grow with each change in place of a field."""
    return [value._version for value in fields.values() if isinstance(value, torch.Tensor) and not value.is_inference()]


class PendingAttempt(NamedTuple):
    """An attempt that is computed, on a device perhaps still under way; nothing has changed yet."""

    batch: Batch
    given: Given
    sums: TreeSum
    proposal: Proposal
    versions: list[int]
    """The versions of the tensors that it was computed with."""
    changes_of_others: int
    """How often other states had changed, which the loss function may use."""
    began: float
    """When it began, by `time.perf_counter`."""


class PendingUpdate(NamedTuple):
    """An update under way on a device; what has become of it, the host has yet to read."""

    batch: Batch
    given: Given
    readings: PendingReadings


class Outcome(NamedTuple):
    """What `apply` did with an attempt."""

    learning_rates: Mapping[str, float]
    """Rates by pattern, where there are several optimizers; else one under ""."""
    gradient_norm: float
    """The norm of the averaged gradients, regularization included, before any transform."""
    losses: Mapping[str, float]
    """The losses of the attempt, and the regularization."""
    nonfinite: tuple[str, ...] = ()
    """What is not finite, in words: then the attempt was skipped, and nothing has changed."""
    overflowed: bool = False
    """The gradients overflowed at the present loss scale: the attempt was skipped for that alone."""

    @property
    def skipped(self) -> bool:
        """Whether nothing has changed."""
        return bool(self.nonfinite)


@dataclass(frozen=True)
class LossAverage(Checked):
    """average = decay * average + (1 - decay) * loss after each update, for each loss and their total, from 0."""

    decay: Annotated[Decay, Hint("give a decay such as 0.9 or 0.99")] = 0.9
    """Share of the average that an update keeps."""
    bias_correction: bool = True
    """Divide by 1 - decay ** updates, which takes out the zero that it starts from (Kingma, Ba: Adam, 2015); the
    Inception trainer did not, so that its first averages read a tenth of the loss."""


def describe_nonfinite(readings: Readings, gradients: Gradients) -> list[str]:
    """The losses and gradients that are not finite, and the statistics if they are not; at most eight gradients."""
    from lockstep.towers.diagnosis import nonfinite_losses

    present = {n: g for n, g in zip(gradients.names, gradients.tensors, strict=True) if g is not None}
    finite = are_finite([*present.values()])
    names = [f"gradient of {name!r}" for name, is_finite in zip(present, finite, strict=True) if not is_finite]
    more = len(names) - _MAX_NAMES_SHOWN
    words = nonfinite_losses(readings.losses) + names[:_MAX_NAMES_SHOWN]
    words += [f"{more} gradients more"] if more > 0 else []
    if not readings.has_finite_statistics:
        words.append("the batch-norm statistics")
    return words or ["the gradients are finite, and their global norm is not"]
