"""Optimizers as values: the protocol of an optimizer, and of one that is bound to its parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from lockstep.checks import NonNegativeFloat, check_value
from lockstep.errors import CheckpointError
from lockstep.optim.gradients import Gradients
from lockstep.optim.resolution import describe_schedule, resolve_schedule
from lockstep.optim.schedules import Constant, LearningRate, Schedule, rate_at

if TYPE_CHECKING:
    from torch import Tensor


def _check_weight_decay(name: str, decay: object) -> None:
    for pattern, each in decay.items() if isinstance(decay, Mapping) else [("", decay)]:
        check_value(f"{name} of {pattern!r}" if pattern else name, each, NonNegativeFloat)


WeightDecay = Annotated[float | Mapping[str, float], _check_weight_decay]
"""One number for all parameters, or one a pattern: those that no pattern matches have none.

Unless an optimizer says otherwise, weight_decay * parameter is added to the gradient, after the gradient transforms."""


class BoundOptimizer(Protocol):
    """An optimizer with its parameters and its slots: the tensors that it keeps for them."""

    @property
    def kernels(self) -> str:
        """Name the implementation of the update, for the run's choices: another one rounds otherwise."""
        ...

    @property
    def takes_found_inf(self) -> bool:
        """True if `update` changes nothing, on the device, where the `found_inf` of the gradients is not 0."""
        ...

    def resolve(self, epoch_size: int, batch_size: int) -> list[str]:
        """Turn lengths in epochs into steps, once the stream is known; return a line about each.

        A stream of other sizes may be next: lengths are resolved anew, from what the optimizer was given.
        """
        ...

    def matched(self) -> Iterator[tuple[str, list[str]]]:
        """Describe each pattern, with the names of the parameters that it matches."""
        ...

    def check_rows(self, names: Collection[str]) -> None:
        """Refuse sparse gradients of those of these parameters that it cannot update by rows."""
        ...

    def learning_rates(self, step: int) -> dict[str, float]:
        """Return the rates of the update that follows `step` completed ones: by pattern, or that of all under ""."""
        ...

    def update(self, gradients: Gradients, step: int) -> None:
        """Make the update that follows `step` completed ones, in place.

        Parameters whose gradient is None stay untouched, slots included. The gradients are used up.
        It refuses what `learning_rates` and `check_rows` refuse.
        """
        ...

    def slots(self) -> dict[str, Tensor]:
        """Return the tensors to save, by `slot/parameter`: the optimizer's own, not copies."""
        ...

    def values(self) -> dict[str, Any]:
        """Return what else has to be saved, as JSON."""
        ...

    def expects(self, saved: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return tensors of the names, shapes and dtypes that saved slots must have for `load`."""
        ...

    def check_values(self, values: Mapping[str, Any]) -> None:
        """Refuse values that another optimizer has saved, or this one for other parameters."""
        ...

    def load(self, saved: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore slots that are as expected, and values; `check_values` is called before anything changes."""
        ...


class Optimizer(Protocol):
    """An optimizer as `TrainState` takes it."""

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundOptimizer:
        """Bind the optimizer to these parameters, which it updates in place."""
        ...


class Scheduled:
    """Base of bound optimizers that follow one schedule.

    Args:
        lr: a rate, or a schedule of it.
        check_rate: refuses a rate that the update that makes a step cannot use: called with both.
    """

    def __init__(self, lr: LearningRate, check_rate: Callable[[float, int], None] = lambda lr, step: None) -> None:
        self._given: Schedule = Constant(lr) if isinstance(lr, int | float) else lr
        self._schedule = self._given
        self._is_constant = isinstance(self._given, Constant)
        self._check_rate = check_rate
        self._latest: tuple[int, float] | None = None
        """The last step that was asked for, and its rate: both the report and the update ask for it."""

    def resolve(self, epoch_size: int, batch_size: int) -> list[str]:
        """Turn lengths in epochs into steps; return a line about each."""
        lines = describe_schedule(self._given, epoch_size, batch_size)
        self._schedule = resolve_schedule(self._given, epoch_size, batch_size)
        self._latest = None
        return lines

    def rate(self, step: int) -> float:
        """Return the rate of the update that follows `step` completed ones."""
        if self._latest is None or (self._latest[0] != step and not self._is_constant):
            rate = rate_at(self._schedule, step)
            self._check_rate(rate, step + 1)
            self._latest = (step, rate)
        return self._latest[1]

    def learning_rates(self, step: int) -> dict[str, float]:
        """Return the rate of the update that follows `step` completed ones, under ""."""
        return {"": self.rate(step)}


def of_another(given: str, expected: str) -> CheckpointError:
    """Make the error for values that another optimizer has saved."""
    return CheckpointError(
        "The checkpoint holds values of another optimizer.",
        given=given,
        expected=expected,
        hint="resume with the optimizer of the run, or train in another workdir",
    )
