"""Follow the regularised leader: sparse linear models, and whatever L1 is to set to exactly 0."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.checks import check_range, check_type
from lockstep.errors import InputError
from lockstep.optim.optimizers import LearningRate, WeightDecay
from lockstep.optim.rules import Chunk, Rule
from lockstep.optim.widening import in_float32, slot


@dataclass(frozen=True)
class FTRL(Rule):
    """FTRL-proximal (McMahan et al.: Ad Click Prediction, 2013), the rule of tf.train.FtrlOptimizer.

    With s = accumulator ** -learning_rate_power before the update and s' = the same after accumulator += gradient ** 2:
    linear += gradient + 2 * l2_shrinkage * parameter - (s' - s) / lr * parameter, and then
    parameter = (sign(linear) * l1 - linear) / (s' / lr + 2 * l2) where |linear| > l1, else 0. The first update sets
    each parameter anew, with little regard to its value: FTRL is for models that start at 0.
    """

    lr: LearningRate
    """Above 0 at every step."""
    learning_rate_power: float = -0.5
    """At most 0; with 0 the rate does not fall with the gradients."""
    initial_accumulator_value: float = 0.1
    """What the sums of the squared gradients start at, above 0."""
    l1: float = 0.0
    l2: float = 0.0
    l2_shrinkage: float = 0.0
    """L2 on the size of the parameters as they are; `l2` stabilises, and acts on the solution."""
    weight_decay: WeightDecay = 0.0
    """Added to the gradient as weight_decay * parameter, after the gradient transforms; one number, or by pattern."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("initial_accumulator_value", "l1", "l2", "l2_shrinkage"):
            check_range(name, getattr(self, name), 0.0)
        power = self.learning_rate_power
        check_type("learning_rate_power", power, (int, float), expected="a number", hint="leave it at -0.5")
        if not -math.inf < power <= 0:
            raise InputError(
                "learning_rate_power is out of range.",
                given=f"learning_rate_power={power}",
                expected="0 or less",
                hint="leave it at -0.5, or set 0 for a rate that does not fall",
            )
        for name in ("lr", "initial_accumulator_value"):
            if getattr(self, name) == 0:
                raise _divides_by_zero(name, "")

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """The sums of squared gradients, and the linear terms at 0."""
        sums = slot(parameter, self.initial_accumulator_value)
        return {"accumulator": sums, "linear": slot(parameter)}

    def check_rate(self, lr: float, step: int) -> None:
        """Refuse a rate of 0."""
        if not lr > 0:
            raise _divides_by_zero("lr", f" in the update that makes step {step}")

    def apply(self, chunk: Chunk, lr: float, step: int) -> None:
        """Update parameters and slots in place."""
        with in_float32(chunk) as wide:
            root = self._move_slots(wide, lr)
            torch._foreach_div_(root, lr)
            torch._foreach_add_(root, 2.0 * self.l2)
            linear = wide.slots["linear"]
            # linear cut to [-l1, l1], minus linear: 0 where l1 holds the parameter at 0.
            solution = torch._foreach_clamp_max(linear, self.l1)
            torch._foreach_clamp_min_(solution, -self.l1)
            torch._foreach_sub_(solution, linear)
            torch._foreach_div_(solution, root)
            torch._foreach_copy_(wide.parameters, solution)

    def _move_slots(self, chunk: Chunk, lr: float) -> tuple[Tensor, ...]:
        """Add this update's gradients to both slots; returns the accumulators' new root."""
        gradients, sums, linear = chunk.decayed(), chunk.slots["accumulator"], chunk.slots["linear"]
        fallen = self._root(sums)
        torch._foreach_addcmul_(sums, gradients, gradients)
        root = self._root(sums)
        torch._foreach_sub_(fallen, root)
        torch._foreach_add_(linear, gradients)
        torch._foreach_addcmul_(linear, fallen, chunk.parameters, value=1.0 / lr)
        if self.l2_shrinkage:
            torch._foreach_add_(linear, chunk.parameters, alpha=2.0 * self.l2_shrinkage)
        return root

    def _root(self, sums: list[Tensor]) -> tuple[Tensor, ...]:
        if self.learning_rate_power == -0.5:
            return torch._foreach_sqrt(sums)
        return torch._foreach_pow(sums, -self.learning_rate_power)


def _divides_by_zero(name: str, when: str) -> InputError:
    return InputError(
        f"FTRL divides by {name}, which is 0{when}.",
        given=f"{name}=0",
        expected="a number above 0",
        hint="start a warm-up, and end a decay, above 0" if name == "lr" else f"set {name}=0.1",
    )
