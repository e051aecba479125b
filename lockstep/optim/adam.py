"""Adam and AdamW."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch

from lockstep.checks import Fraction, Hint, NonNegativeFloat
from lockstep.optim.optimizers import WeightDecay
from lockstep.optim.rules import Chunk, Rule, fused_adam, in_float32, slot
from lockstep.optim.schedules import LearningRate

if TYPE_CHECKING:
    from torch import Tensor

Betas = Annotated[tuple[Fraction, Fraction], Hint("write betas=(0.9, 0.999)")]
"""The decays of the means of the gradients and of their squares."""


@dataclass(frozen=True)
class Adam(Rule):
    """Running means of the gradients over the root of those of their squares (Kingma, Ba: Adam, 2015).

    exp_avg = beta1 * exp_avg + (1 - beta1) * gradient, exp_avg_sq likewise with gradient ** 2 and beta2; then
    parameter -= lr * m / (sqrt(v) + eps), where m and v are the means divided by 1 - beta ** step: both start at 0,
    and this corrects them. The steps counted are those of the run, as TensorFlow counts them: torch counts for each
    parameter the updates that it had a gradient in.
    """

    kernel: ClassVar[str | None] = "adam"
    decoupled: ClassVar[bool] = False

    lr: LearningRate
    betas: Betas = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-8
    weight_decay: WeightDecay = 0.0
    epsilon_hat: bool = False
    """Add eps to the root of exp_avg_sq as it is, not corrected: TensorFlow's form, in section 2 of the paper."""

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Make both means, at 0."""
        return {"exp_avg": slot(parameter), "exp_avg_sq": slot(parameter)}

    def apply(self, chunk: Chunk, lr: float, step: int) -> None:
        """Update parameters and slots in place."""
        correction1, correction2 = corrections(self.betas, step)
        if chunk.fused:
            eps = self.eps / math.sqrt(correction2) if self.epsilon_hat else self.eps
            fused_adam(chunk, lr, step, betas=self.betas, eps=eps, decoupled=self.decoupled)
            return
        # With both corrections in the rate, eps is the uncorrected root's: one pass over the parameters less.
        eps = self.eps if self.epsilon_hat else self.eps * math.sqrt(correction2)
        with in_float32(chunk) as wide:
            gradients = wide.gradients if self.decoupled else wide.decayed()
            if self.decoupled and wide.weight_decay:
                torch._foreach_mul_(wide.parameters, 1.0 - lr * wide.weight_decay)
            update_means(wide, gradients, self.betas)
            root = torch._foreach_sqrt(wide.slots["exp_avg_sq"])
            torch._foreach_add_(root, eps)
            rate = lr * math.sqrt(correction2) / correction1
            torch._foreach_addcdiv_(wide.parameters, wide.slots["exp_avg"], root, value=-rate)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with weight decay apart from the gradient (Loshchilov, Hutter: Decoupled Weight Decay, 2019).

    First parameter *= 1 - lr * weight_decay, then Adam's update.
    """

    kernel: ClassVar[str | None] = "adamw"
    decoupled: ClassVar[bool] = True

    weight_decay: WeightDecay = 0.01
    """Times the learning rate, the share of a parameter that each update takes off; one number, or by pattern."""


def corrections(betas: tuple[float, float], step: int) -> tuple[float, float]:
    """Compute the divisors that correct both means for their start at 0, after `step` updates."""
    return 1.0 - betas[0] ** step, 1.0 - betas[1] ** step


def update_means(chunk: Chunk, gradients: list[Tensor], betas: tuple[float, float]) -> None:
    """Move exp_avg towards the gradients and exp_avg_sq towards their squares, in place."""
    means, squares = chunk.slots["exp_avg"], chunk.slots["exp_avg_sq"]
    torch._foreach_lerp_(means, gradients, 1.0 - betas[0])
    torch._foreach_mul_(squares, betas[1])
    torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - betas[1])
