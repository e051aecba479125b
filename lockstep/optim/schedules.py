"""Learning rates as pure functions of the step: nothing to advance, nothing to save.

The update that makes step k uses `schedule(k - 1)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

from lockstep.checks import check_range
from lockstep.errors import InputError
from lockstep.progress import Epochs


class Schedule(Protocol):
    """A learning rate as a function of completed updates."""

    def __call__(self, step: int) -> float:
        """The rate after `step` completed updates."""
        ...


@dataclass(frozen=True)
class Constant:
    """The same rate at every step."""

    value: float

    def __post_init__(self) -> None:
        check_range("value", self.value, 0.0, math.inf)

    def __call__(self, step: int) -> float:
        """The rate after `step` completed updates."""
        return self.value


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from `initial` down to `final` over `steps`, then constant (Loshchilov, Hutter: SGDR, 2017).

    With `warmup_steps`, the rate first rises linearly from 0 to `initial`, within `steps`.
    """

    initial: float
    steps: int | Epochs
    """The length; `Epochs` are resolved to whole batches when the run is built."""
    warmup_steps: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        check_range("initial", self.initial, 0.0, math.inf)
        check_range("final", self.final, 0.0, math.inf)
        length = self.steps
        if isinstance(length, int) and not 0 <= self.warmup_steps < length:
            raise InputError(
                "A cosine schedule needs steps left after its warm-up.",
                given=f"steps={length}, warmup_steps={self.warmup_steps}",
                expected="0 <= warmup_steps < steps",
                mend="raise steps or lower warmup_steps",
            )

    def resolve(self, epoch_size: int, batch_size: int) -> Cosine:
        """The same schedule with its length in steps."""
        if isinstance(self.steps, int):
            return self
        return replace(self, steps=self.steps.steps(epoch_size, batch_size))

    def __call__(self, step: int) -> float:
        """The rate after `step` completed updates.

        Raises:
            InputError: the length is in epochs, which have no steps without a data set.
        """
        length = self.steps
        if not isinstance(length, int):
            raise InputError(
                "This schedule counts in epochs, and was asked for the rate at a step.",
                given=f"steps={length}",
                expected="a number of steps",
                mend="call resolve(epoch_size, batch_size) first, or give steps as a number",
            )
        if step < self.warmup_steps:
            return self.initial * step / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / (length - self.warmup_steps))
        return self.final + (self.initial - self.final) * 0.5 * (1.0 + math.cos(math.pi * done))
