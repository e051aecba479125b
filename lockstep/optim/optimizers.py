"""Optimizers as values: what to do, bound once to the parameters it is done to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, cast

from torch import Tensor

from lockstep.checks import check_range, check_type, wrong_type
from lockstep.optim.gradients import Gradients
from lockstep.optim.schedules import Schedule


class BoundOptimizer(Protocol):
    """An optimizer with its parameters and its slots: the tensors that it keeps for them."""

    @property
    def kernels(self) -> str:
        """What computes the update, in a word: another kernel rounds otherwise."""
        ...

    def resolve(self, epoch_size: int, batch_size: int) -> list[str]:
        """Turn lengths in epochs into steps, once the stream is known; says how, a line for each."""
        ...

    def learning_rates(self, step: int) -> dict[str, float]:
        """The rates of the update that follows `step` completed ones: by pattern, or that of all under ""."""
        ...

    def update(self, gradients: Gradients, step: int) -> None:
        """Make the update that follows `step` completed ones, in place.

        Parameters whose gradient is None stay untouched, slots included. The gradients are used up.
        """
        ...

    def slots(self) -> dict[str, Tensor]:
        """The tensors to save, by `slot/parameter`: the optimizer's own, not copies."""
        ...

    def values(self) -> dict[str, Any]:
        """The rest of what has to be saved, as JSON."""
        ...

    def expects(self, saved: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What slots that were saved must be like, in name, shape and dtype, for `load` to take them."""
        ...

    def load(self, saved: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take over slots that are as expected, and the values saved with them."""
        ...


class Optimizer(Protocol):
    """What `TrainState` wants of an optimizer."""

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundOptimizer:
        """The same optimizer, ready to update these parameters in place."""
        ...


WeightDecay = float | Mapping[str, float]
"""One number for all parameters, or one a pattern: those that no pattern matches have none."""


def check_rates(lr: object, weight_decay: object) -> None:
    """Refuse what is no learning rate or no weight decay.

    Raises:
        InputError: one of them is of the wrong type or out of range.
    """
    if isinstance(lr, int | float):
        check_range("lr", lr, 0.0, math.inf)
    elif not callable(lr) or isinstance(lr, type):
        raise wrong_type("lr", lr, expected="a number or a schedule", mend="write lr=0.1, or lr=ls.optim.Cosine(...)")
    decays = weight_decay if isinstance(weight_decay, Mapping) else {"": weight_decay}
    for pattern, decay in decays.items():
        name = f"weight_decay of {pattern!r}" if pattern else "weight_decay"
        mend = 'give a number, or numbers by pattern: {r"weight$": 1e-4}'
        check_type(name, decay, (int, float), expected="a number", mend=mend)
        check_range(name, cast("float", decay), 0.0, math.inf)


LearningRate = float | Schedule
