"""LARS and LAMB: the step of each parameter tensor is in proportion to its size, so that large batches train."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lockstep.checks import Fraction, NonNegativeFloat
from lockstep.optim.adam import Betas, corrections, update_means
from lockstep.optim.optimizers import WeightDecay
from lockstep.optim.rules import Chunk, Rule, in_float32, slot
from lockstep.optim.schedules import LearningRate

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LARS(Rule):
    """SGD with a rate of its own for each tensor (You et al.: Large Batch Training of Convolutional Networks, 2017).

    trust = trust_coefficient * |parameter| / (|gradient| + weight_decay * |parameter|) by the 2-norms of whole tensors,
    1 where one of them is 0; buffer = momentum * buffer + lr * trust * (gradient + weight_decay * parameter);
    parameter -= buffer.
    """

    lr: LearningRate
    momentum: Fraction = 0.9
    weight_decay: WeightDecay = 0.0
    """One number, or by pattern; the paper has 0.0005. Biases are decayed too, unless no pattern finds them."""
    trust_coefficient: NonNegativeFloat = 0.001
    skip_vectors: bool = True
    """Parameters of one dimension or none (biases, the scales of batch norm) have the trust 1."""

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Make a momentum buffer of zeros, if there is a momentum."""
        return {"momentum_buffer": slot(parameter)} if self.momentum else {}

    def apply(self, chunk: Chunk, lr: float, step: int) -> None:
        """Update parameters and buffers in place."""
        with in_float32(chunk) as wide:
            update = _trusted(
                wide.decayed(),
                wide.gradients,
                wide.parameters,
                skip_vectors=self.skip_vectors,
                coefficient=self.trust_coefficient,
                weight_decay=wide.weight_decay,
            )
            if not self.momentum:
                torch._foreach_add_(wide.parameters, update, alpha=-lr)
                return
            buffers = wide.slots["momentum_buffer"]
            torch._foreach_mul_(buffers, self.momentum)
            torch._foreach_add_(buffers, update, alpha=lr)
            torch._foreach_sub_(wide.parameters, buffers)


@dataclass(frozen=True)
class LAMB(Rule):
    """Adam with a rate of its own for each tensor (You et al.: Large Batch Optimization for Deep Learning, 2020).

    update = m / (sqrt(v) + eps) + weight_decay * parameter, with Adam's corrected means m and v;
    parameter -= lr * trust * update, where trust = |parameter| / |update| by the 2-norms of whole tensors, 1 where one
    of them is 0.
    """

    lr: LearningRate
    betas: Betas = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-6
    weight_decay: WeightDecay = 0.0
    """One number, or by pattern; the paper has 0.01. Biases are decayed too, unless no pattern finds them."""
    skip_vectors: bool = True
    """Parameters of one dimension or none (biases, the scales of batch norm) have the trust 1."""

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Make both means, at 0."""
        return {"exp_avg": slot(parameter), "exp_avg_sq": slot(parameter)}

    def apply(self, chunk: Chunk, lr: float, step: int) -> None:
        """Update parameters and slots in place."""
        correction1, correction2 = corrections(self.betas, step)
        with in_float32(chunk) as wide:
            update_means(wide, wide.gradients, self.betas)
            root = torch._foreach_sqrt(wide.slots["exp_avg_sq"])
            torch._foreach_div_(root, math.sqrt(correction2))
            torch._foreach_add_(root, self.eps)
            torch._foreach_mul_(root, correction1)
            update = list(torch._foreach_div(wide.slots["exp_avg"], root))
            if wide.weight_decay:
                torch._foreach_add_(update, wide.parameters, alpha=wide.weight_decay)
            update = _trusted(update, update, wide.parameters, skip_vectors=self.skip_vectors)
            torch._foreach_add_(wide.parameters, update, alpha=-lr)


def _trusted(
    updates: list[Tensor],
    measured: list[Tensor],
    parameters: list[Tensor],
    *,
    skip_vectors: bool,
    coefficient: float = 1.0,
    weight_decay: float = 0.0,
) -> list[Tensor]:
    """Multiply updates by their trust: coefficient * |parameter| / (|measured| + weight_decay * |parameter|)."""
    chosen = [index for index, p in enumerate(parameters) if p.ndim > 1 or not skip_vectors]
    if not chosen:
        return updates
    sizes = torch.stack(torch._foreach_norm([parameters[i] for i in chosen]))
    norms = torch.stack(torch._foreach_norm([measured[i] for i in chosen]))
    trusts = coefficient * sizes / (norms + weight_decay * sizes)
    trusts = torch.where((sizes > 0) & (norms > 0), trusts, 1.0)
    products = torch._foreach_mul([updates[i] for i in chosen], list(trusts.unbind()))
    product_of = dict(zip(chosen, products, strict=True))
    return [product_of.get(index, update) for index, update in enumerate(updates)]
