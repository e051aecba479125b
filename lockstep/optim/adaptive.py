"""Adagrad and Adadelta."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.checks import check_range
from lockstep.errors import InputError
from lockstep.optim.kernels import fused_adagrad
from lockstep.optim.optimizers import LearningRate, WeightDecay
from lockstep.optim.rules import Chunk, Rule
from lockstep.optim.widening import in_float32, slot


@dataclass(frozen=True)
class Adagrad(Rule):
    """Each gradient is divided by the root of the sum of its squares so far (Duchi et al., 2011).

    sum += gradient ** 2; parameter -= lr * gradient / (sqrt(sum) + eps). The defaults are torch's;
    tf.train.AdagradOptimizer is initial_accumulator_value=0.1, eps=0. It takes sparse gradients.
    """

    kernel: ClassVar[str | None] = "adagrad"

    lr: LearningRate
    weight_decay: WeightDecay = 0.0
    """Added to the gradient as weight_decay * parameter, after the gradient transforms; one number, or by pattern."""
    initial_accumulator_value: float = 0.0
    """What the sums start at."""
    eps: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("initial_accumulator_value", self.initial_accumulator_value, 0.0)
        check_range("eps", self.eps, 0.0)
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
        """The sums."""
        return {"sum": slot(parameter, self.initial_accumulator_value)}

    def apply(self, chunk: Chunk, lr: float, step: int) -> None:
        """Update parameters and sums in place."""
        if chunk.fused:
            fused_adagrad(
                chunk.parameters,
                chunk.gradients,
                chunk.slots["sum"],
                lr=lr,
                eps=self.eps,
                weight_decay=chunk.weight_decay,
                divisor=chunk.divisor,
            )
            return
        with in_float32(chunk) as wide:
            gradients, sums = wide.decayed(), wide.slots["sum"]
            torch._foreach_addcmul_(sums, gradients, gradients)
            root = torch._foreach_sqrt(sums)
            torch._foreach_add_(root, self.eps)
            torch._foreach_addcdiv_(wide.parameters, gradients, root, value=-lr)


@dataclass(frozen=True)
class Adadelta(Rule):
    """Each gradient is divided by the root of its mean square, and multiplied by that of the updates (Zeiler, 2012).

    square_avg = rho * square_avg + (1 - rho) * gradient ** 2;
    delta = sqrt(acc_delta + eps) / sqrt(square_avg + eps) * gradient; acc_delta = rho * acc_delta +
    (1 - rho) * delta ** 2; parameter -= lr * delta. The rule and the defaults are torch's, and the rule is that of
    tf.train.AdadeltaOptimizer; TF-Slim's classifier has rho=0.95 and eps=1.0.
    """

    lr: LearningRate
    rho: float = 0.9
    """The decay of both means."""
    eps: float = 1e-6
    weight_decay: WeightDecay = 0.0
    """Added to the gradient as weight_decay * parameter, after the gradient transforms; one number, or by pattern."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("rho", self.rho, 0.0, 1.0)
        check_range("eps", self.eps, 0.0)
        if not self.eps:
            raise InputError(
                "Adadelta would never move: its first update is as large as the root of eps.",
                given="eps=0",
                expected="a number above 0",
                hint="set eps=1e-6",
            )

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """The mean squares of gradients and updates, at 0."""
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
