"""Torch's fused update kernels, and the same arithmetic in foreach operations where there is no kernel.

The fused entry points are private names of torch, stable over many releases; only this module knows them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FUSED_DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}


def can_fuse(parameters: Sequence[Tensor]) -> bool:
    """Whether torch has a fused kernel for these parameters, read from their devices and dtypes."""
    return hasattr(torch, "_fused_sgd_") and all(
        p.dtype in _FUSED_DTYPES and p.device.type in {"cpu", "cuda", "mps"} for p in parameters
    )


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
