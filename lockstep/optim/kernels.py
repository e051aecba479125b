"""Torch's fused update kernels.

The entry points are private names of torch, stable over many releases; only this module knows them. Each makes one
update in place of dense parameters of one device; `divisor` divides the gradients on the way, which are used up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

_WIDE = {torch.float32, torch.float64}
# On a CPU the vectorised part of torch's kernel leaves 16-bit parameters as they are (seen in 2.13).
_FUSED_DTYPES = {"cpu": _WIDE, "cuda": _WIDE | {torch.bfloat16, torch.float16}}


def can_fuse(parameters: Sequence[Tensor], kernel: str = "sgd") -> bool:
    """Whether torch has a fused kernel that is right for these parameters: by device, dtype and memory."""
    return hasattr(torch, f"_fused_{kernel}_") and all(
        not is_lazy(p) and p.dtype in _FUSED_DTYPES.get(p.device.type, ()) and _is_dense(p) for p in parameters
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory: the kernels walk memory, not indices."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def fused_sgd(
    parameters: list[Tensor],
    gradients: list[Tensor],
    momentum_buffers: list[Tensor],
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    divisor: float,
) -> None:
    """Torch's SGD; the list of momentum buffers is empty where momentum is 0."""
    torch._fused_sgd_(
        parameters,
        gradients,
        momentum_buffers,
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,
        grad_scale=_scale(divisor, parameters[0]),
    )


def _scale(divisor: float, like: Tensor) -> Tensor | None:
    return None if divisor == 1.0 else torch.tensor(divisor, dtype=torch.float32, device=like.device)
