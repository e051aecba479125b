"""RMSProp as TensorFlow makes it, which is not torch's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.checks import check_range, check_switch
from lockstep.optim.optimizers import LearningRate, WeightDecay
from lockstep.optim.rules import Chunk, Rule
from lockstep.optim.widening import in_float32, slot


@dataclass(frozen=True)
class RMSProp(Rule):
    """Each gradient is divided by the root of a running mean of its squares (Tieleman, Hinton: lecture 6.5, 2012).

    The rule of tf.train.RMSPropOptimizer: square_avg = alpha * square_avg + (1 - alpha) * gradient ** 2, then
    buffer = momentum * buffer + lr * gradient / sqrt(square_avg + eps), then parameter -= buffer. Torch's differs in
    three places: there the mean starts at 0, eps is added to the root, and the buffer holds no learning rate.

    The Inception trainer, and TensorFlow Object Detection by default, train with alpha=0.9, momentum=0.9, eps=1.0.
    """

    lr: LearningRate
    alpha: float = 0.9
    """The decay of the mean, which TensorFlow calls `decay`."""
    eps: float = 1e-10
    """Inside the root, so its size is that of a squared gradient."""
    weight_decay: WeightDecay = 0.0
    """Added to the gradient as weight_decay * parameter, after the gradient transforms; one number, or by pattern."""
    momentum: float = 0.0
    centered: bool = False
    """Divide by the root of the variance: the running mean of the gradients, squared, is taken off `square_avg`."""
    initial_accumulator_value: float = 1.0
    """What `square_avg` starts at: with 1 the first updates are small, with 0 they are large."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("alpha", self.alpha, 0.0, 1.0)
        check_range("eps", self.eps, 0.0)
        check_range("momentum", self.momentum, 0.0, 1.0)
        check_switch("centered", self.centered)
        check_range("initial_accumulator_value", self.initial_accumulator_value, 0.0)

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """The mean of the squares, and where they are used the momentum buffer and the mean of the gradients."""
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
        """What the gradients are divided by, from the means that these gradients move."""
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
