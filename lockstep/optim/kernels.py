"""Torch's fused update kernels, and the same arithmetic in foreach operations where there is no kernel.

The fused entry points are private names of torch, stable over many releases; only this module knows them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

_WIDE = {torch.float32, torch.float64}
# On a CPU the vectorised part of torch's kernel leaves 16-bit parameters as they are (seen in 2.13).
_FUSED_DTYPES = {"cpu": _WIDE, "cuda": _WIDE | {torch.bfloat16, torch.float16}}


def can_fuse(parameters: Sequence[Tensor]) -> bool:
    """Whether torch has a fused kernel that is right for these parameters: by device, dtype and memory."""
    return hasattr(torch, "_fused_sgd_") and all(
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


def sgd(
    parameters: list[Tensor],
    gradients: list[Tensor],
    momentum_buffers: list[Tensor],
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    fused: bool,
) -> None:
    """One update in place, by torch's rule (Sutskever et al., 2013): buffer = momentum * buffer + gradient.

    The buffers start at zero; the list is empty where momentum is 0.
    """
    if fused:
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
        )
        return
    if weight_decay:
        gradients = list(torch._foreach_add(gradients, parameters, alpha=weight_decay))
    if momentum:
        torch._foreach_mul_(momentum_buffers, momentum)
        torch._foreach_add_(momentum_buffers, gradients)
        gradients = (
            list(torch._foreach_add(gradients, momentum_buffers, alpha=momentum)) if nesterov else momentum_buffers
        )
    torch._foreach_add_(parameters, gradients, alpha=-lr)
