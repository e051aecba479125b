"""Optimizers that divide gradients by a root of their squares so far: Adagrad, Adadelta, RMSProp, FTRL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch

from lockstep.checks import Fraction, Hint, NonNegativeFloat, PositiveFloat, Range
from lockstep.errors import InputError
from lockstep.optim.optimizers import WeightDecay
from lockstep.optim.rules import Chunk, Rule, fused_adagrad, in_float32, slot
from lockstep.optim.schedules import LearningRate

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Adagrad(Rule):
    """Divide each gradient by the root of the sum of its squares so far (Duchi et al., 2011).

    sum += gradient ** 2; parameter -= lr * gradient / (sqrt(sum) + eps). The defaults are torch's;
    tf.train.AdagradOptimizer is initial_accumulator_value=0.1, eps=0. It takes sparse gradients.
    """

    kernel: ClassVar[str | None] = "adagrad"

    lr: LearningRate
    weight_decay: WeightDecay = 0.0
    initial_accumulator_value: NonNegativeFloat = 0.0
    """What the sums start at."""
    eps: NonNegativeFloat = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.eps or self.initial_accumulator_value):
            raise InputError(
                "Adagrad would divide by 0 where a gradient is 0.",
                given="initial_accumulator_value=0, eps=0",
                expected="one of them above 0",
                hint="set initial_accumulator_value=0.1 (TensorFlow's), or eps=1e-10 (torch's)",
            )

    @property
    def takes_rows(self) -> bool:
        """Rows without a gradient stay, and so do their sums."""
        return True

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Make the sum of squares."""
        return {"sum": slot(parameter, self.initial_accumulator_value)}

    def apply(self, chunk: Chunk, lr: float, step: int) -> None:
        """Update parameters and sums in place."""
        if chunk.fused:
            fused_adagrad(chunk, lr, self.eps)
            return
        with in_float32(chunk) as wide:
            gradients, sums = wide.decayed(), wide.slots["sum"]
            torch._foreach_addcmul_(sums, gradients, gradients)
            root = torch._foreach_sqrt(sums)
            torch._foreach_add_(root, self.eps)
            torch._foreach_addcdiv_(wide.parameters, gradients, root, value=-lr)


@dataclass(frozen=True)
class Adadelta(Rule):
    """Divide each gradient by the root of its mean square, and multiply it by that of the updates (Zeiler, 2012).

    square_avg = rho * square_avg + (1 - rho) * gradient ** 2;
    delta = sqrt(acc_delta + eps) / sqrt(square_avg + eps) * gradient; acc_delta = rho * acc_delta +
    (1 - rho) * delta ** 2; parameter -= lr * delta. The rule and the defaults are torch's, and the rule is that of
    tf.train.AdadeltaOptimizer; TF-Slim's classifier has rho=0.95 and eps=1.0.
    """

    lr: LearningRate
    rho: Fraction = 0.9
    """The decay of both means."""
    eps: Annotated[PositiveFloat, Hint("set eps=1e-6: the first update is as large as the root of eps")] = 1e-6
    weight_decay: WeightDecay = 0.0

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Make the mean squares of gradients and updates, at 0."""
        return {"square_avg": slot(parameter), "acc_delta": slot(parameter)}

    def apply(self, chunk: Chunk, lr: float, step: int) -> None:
        """Update parameters and slots in place."""
        with in_float32(chunk) as wide:
            gradients, squares, deltas = wide.decayed(), wide.slots["square_avg"], wide.slots["acc_delta"]
            torch._foreach_mul_(squares, self.rho)
            torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - self.rho)
            root = torch._foreach_add(squares, self.eps)
            torch._foreach_sqrt_(root)
            update = torch._foreach_add(deltas, self.eps)
            torch._foreach_sqrt_(update)
            torch._foreach_div_(update, root)
            torch._foreach_mul_(update, gradients)
            torch._foreach_mul_(deltas, self.rho)
            torch._foreach_addcmul_(deltas, update, update, value=1.0 - self.rho)
            torch._foreach_add_(wide.parameters, update, alpha=-lr)


@dataclass(frozen=True)
class RMSProp(Rule):
    """Divide each gradient by the root of a running mean of its squares (Tieleman, Hinton: lecture 6.5, 2012).

    The rule of tf.train.RMSPropOptimizer: square_avg = alpha * square_avg + (1 - alpha) * gradient ** 2, then
    buffer = momentum * buffer + lr * gradient / sqrt(square_avg + eps), then parameter -= buffer. Torch's differs in
    three places: there the mean starts at 0, eps is added to the root, and the buffer holds no learning rate.

    The Inception trainer, and TensorFlow Object Detection by default, train with alpha=0.9, momentum=0.9, eps=1.0.
    """

    lr: LearningRate
    alpha: Fraction = 0.9
    """The decay of the mean, which TensorFlow calls `decay`."""
    eps: NonNegativeFloat = 1e-10
    """Inside the root, so its size is that of a squared gradient."""
    weight_decay: WeightDecay = 0.0
    momentum: Fraction = 0.0
    centered: bool = False
    """Divide by the root of the variance: the running mean of the gradients, squared, is taken off `square_avg`."""
    initial_accumulator_value: NonNegativeFloat = 1.0
    """What `square_avg` starts at: with 1 the first updates are small, with 0 they are large."""

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Make the mean of the squares, and where they are used the momentum buffer and the mean of the gradients."""
        slots = {"square_avg": slot(parameter, self.initial_accumulator_value)}
        if self.momentum:
            slots["momentum_buffer"] = slot(parameter)
        if self.centered:
            slots["grad_avg"] = slot(parameter)
        return slots

    def apply(self, chunk: Chunk, lr: float, step: int) -> None:
        """Update parameters and slots in place."""
        with in_float32(chunk) as wide:
            gradients = wide.decayed()
            root = self._root(wide, gradients)
            if not self.momentum:
                torch._foreach_addcdiv_(wide.parameters, gradients, root, value=-lr)
                return
            buffers = wide.slots["momentum_buffer"]
            torch._foreach_mul_(buffers, self.momentum)
            torch._foreach_addcdiv_(buffers, gradients, root, value=lr)
            torch._foreach_sub_(wide.parameters, buffers)

    def _root(self, chunk: Chunk, gradients: list[Tensor]) -> tuple[Tensor, ...]:
        """Move the means by these gradients, and return the roots to divide the gradients by."""
        squares = chunk.slots["square_avg"]
        torch._foreach_mul_(squares, self.alpha)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - self.alpha)
        if not self.centered:
            root = torch._foreach_add(squares, self.eps)
        else:
            means = chunk.slots["grad_avg"]
            torch._foreach_lerp_(means, gradients, 1.0 - self.alpha)
            root = torch._foreach_addcmul(squares, means, means, value=-1.0)
            # A variance of 0 may come out below it by rounding.
            torch._foreach_clamp_min_(root, 0.0)
            torch._foreach_add_(root, self.eps)
        torch._foreach_sqrt_(root)
        return root


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
    learning_rate_power: Annotated[float, Range(le=0), Hint("leave it at -0.5, or set 0 for a steady rate")] = -0.5
    """With 0 the rate does not fall with the gradients."""
    initial_accumulator_value: Annotated[PositiveFloat, Hint("set initial_accumulator_value=0.1")] = 0.1
    """What the sums of the squared gradients start at."""
    l1: NonNegativeFloat = 0.0
    l2: NonNegativeFloat = 0.0
    l2_shrinkage: NonNegativeFloat = 0.0
    """L2 on the size of the parameters as they are; `l2` stabilises, and acts on the solution."""
    weight_decay: WeightDecay = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr == 0:
            raise _rate_of_zero("")

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Make the sums of squared gradients, and the linear terms at 0."""
        sums = slot(parameter, self.initial_accumulator_value)
        return {"accumulator": sums, "linear": slot(parameter)}

    def check_rate(self, lr: float, step: int) -> None:
        """Refuse a rate of 0."""
        if not lr > 0:
            raise _rate_of_zero(f" in the update that makes step {step}")

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


def _rate_of_zero(when: str) -> InputError:
    return InputError(
        f"FTRL divides by lr, which is 0{when}.",
        given="lr=0",
        expected="a number above 0",
        hint="start a warm-up, and end a decay, above 0",
    )
