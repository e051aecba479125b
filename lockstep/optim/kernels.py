"""Torch's fused update kernels.

The entry points are private names of torch, stable over many releases; only this module knows them. Each makes one
update in place of dense parameters of one device; `divisor` divides the gradients on the way, which are used up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# The kernels want slots of the parameters' dtype, for which 16 bits are too few.
_DTYPES = {torch.float32, torch.float64}
_DEVICES = {"sgd": {"cpu", "cuda"}, "adam": {"cpu", "cuda"}, "adamw": {"cpu", "cuda"}, "adagrad": {"cpu"}}
"""Of torch 2.11, the oldest supported."""


def can_fuse(parameters: Sequence[Tensor], kernel: str = "sgd") -> bool:
    """Whether torch has a fused kernel that is right for these parameters: by device, dtype and memory."""
    if not hasattr(torch, f"_fused_{kernel}_") or len({(p.device, p.dtype) for p in parameters}) != 1:
        return False
    device, dtype = parameters[0].device.type, parameters[0].dtype
    if dtype not in _DTYPES or device not in _DEVICES[kernel]:
        return False
    return all(map(_is_dense, parameters))


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


def fused_adam(
    parameters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    divisor: float,
) -> None:
    """Torch's Adam, or AdamW where the weight decay is decoupled; `step` counts this update too."""
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    update(
        parameters,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        _steps(step, parameters),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=_scale(divisor, parameters[0]),
    )


def fused_adagrad(
    parameters: list[Tensor],
    gradients: list[Tensor],
    sums: list[Tensor],
    *,
    lr: float,
    eps: float,
    weight_decay: float,
    divisor: float,
) -> None:
    """Torch's Adagrad, without a decay of the learning rate."""
    torch._fused_adagrad_(
        parameters,
        gradients,
        sums,
        _steps(1, parameters),
        lr=lr,
        lr_decay=0.0,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
        grad_scale=_scale(divisor, parameters[0]),
    )


def _steps(step: int, parameters: Sequence[Tensor]) -> list[Tensor]:
    """One tensor for all: the kernels read it and leave it as it is."""
    return [torch.full((), step, dtype=torch.float32, device=parameters[0].device)] * len(parameters)


def _scale(divisor: float, like: Tensor) -> Tensor | None:
    # Filled on the device: a copy from the host would wait for all that the device still has to do.
    return None if divisor == 1.0 else torch.full((), divisor, dtype=torch.float32, device=like.device)
