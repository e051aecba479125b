"""Stochastic gradient descent, with momentum, and with Nesterov's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from lockstep.checks import Fraction
from lockstep.errors import InputError
from lockstep.optim.optimizers import WeightDecay
from lockstep.optim.rules import Chunk, Rule, fused_sgd, in_float32, slot
from lockstep.optim.schedules import LearningRate

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SGD(Rule):
    """buffer = momentum * buffer + gradient; parameter -= lr * buffer (Sutskever et al., 2013).

    The arithmetic and the argument names are torch's, and TensorFlow's MomentumOptimizer is the same rule. With
    `nesterov`, the step is lr * (gradient + momentum * buffer). Without momentum it takes sparse gradients.
    """

    kernel: ClassVar[str | None] = "sgd"
    takes_complex: ClassVar[bool] = True

    lr: LearningRate
    momentum: Fraction = 0.0
    nesterov: bool = False
    weight_decay: WeightDecay = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum > 0:
            raise InputError(
                "Nesterov's update looks ahead along the momentum, and there is none.",
                given=f"nesterov=True, momentum={self.momentum}",
                expected="momentum above 0",
                hint="set momentum (0.9 is usual), or nesterov=False",
            )

    @property
    def takes_rows(self) -> bool:
        """Without momentum, rows without a gradient stay."""
        return not self.momentum

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Make a momentum buffer of zeros, if there is a momentum."""
        return {"momentum_buffer": slot(parameter)} if self.momentum else {}

    def apply(self, chunk: Chunk, lr: float, step: int) -> None:
        """Update parameters and buffers in place."""
        if chunk.fused:
            fused_sgd(chunk, lr, self.momentum, self.nesterov)
            return
        with in_float32(chunk) as wide:
            update = wide.decayed()
            if self.momentum:
                buffers = wide.slots["momentum_buffer"]
                torch._foreach_mul_(buffers, self.momentum)
                torch._foreach_add_(buffers, update)
                update = list(torch._foreach_add(update, buffers, alpha=self.momentum)) if self.nesterov else buffers
            torch._foreach_add_(wide.parameters, update, alpha=-lr)
