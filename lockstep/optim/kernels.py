"""Torch's fused update kernels.

The entry points are private names of torch, stable over many releases; only this module knows them. Each makes one
update in place of a chunk's dense parameters, of one device; gradients are divided on the way, and used up. Where
`found_inf` is not 0, nothing changes: so the host need not know whether an update is to be made when it enqueues it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.optim.rules import Chunk

_DEVICES = {"sgd": {"cpu", "cuda"}, "adam": {"cpu", "cuda"}, "adamw": {"cpu", "cuda"}, "adagrad": {"cpu"}}
"""Of torch 2.11, the oldest supported."""


def can_fuse(parameters: Sequence[Tensor], kernel: str = "sgd") -> bool:
    """Check that torch has a fused kernel that is right for these parameters: by device, dtype and memory."""
    if not hasattr(torch, f"_fused_{kernel}_") or len({(p.device, p.dtype) for p in parameters}) != 1:
        return False
    device, dtype = parameters[0].device.type, parameters[0].dtype
    # The kernels want slots of the parameters' dtype, for which 16 bits are too few.
    if dtype not in (torch.float32, torch.float64) or device not in _DEVICES[kernel]:
        return False
    return all(map(_is_dense, parameters))


def _is_dense(tensor: Tensor) -> bool:
    """Check that the elements fill a stretch of memory: the kernels walk memory, not indices."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def fused_sgd(chunk: Chunk, lr: float, momentum: float, nesterov: bool) -> None:
    """Update as torch's SGD does; there are momentum buffers unless momentum is 0."""
    torch._fused_sgd_(
        chunk.parameters,
        chunk.gradients,
        chunk.slots.get("momentum_buffer", []),
        weight_decay=chunk.weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,
        grad_scale=_scale(chunk),
        found_inf=chunk.found_inf,
    )


def fused_adam(chunk: Chunk, lr: float, step: int, *, betas: tuple[float, float], eps: float, decoupled: bool) -> None:
    """Update as torch's Adam does, or AdamW where the weight decay is decoupled; `step` counts this update too."""
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    update(
        chunk.parameters,
        chunk.gradients,
        chunk.slots["exp_avg"],
        chunk.slots["exp_avg_sq"],
        [],
        _steps(step, chunk),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=chunk.weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=_scale(chunk),
        found_inf=chunk.found_inf,
    )


def fused_adagrad(chunk: Chunk, lr: float, eps: float) -> None:
    """Update as torch's Adagrad does, without a decay of the learning rate."""
    torch._fused_adagrad_(
        chunk.parameters,
        chunk.gradients,
        chunk.slots["sum"],
        _steps(1, chunk),
        lr=lr,
        lr_decay=0.0,
        weight_decay=chunk.weight_decay,
        eps=eps,
        maximize=False,
        grad_scale=_scale(chunk),
        found_inf=chunk.found_inf,
    )


def _steps(step: int, chunk: Chunk) -> list[Tensor]:
    """Make one tensor of the step for all parameters: the kernels only read it."""
    return [torch.full((), step, dtype=torch.float32, device=chunk.parameters[0].device)] * len(chunk.parameters)


def _scale(chunk: Chunk) -> Tensor | None:
    if not isinstance(chunk.divisor, float | int):
        return chunk.divisor.float()
    # Filled on the device: a copy from the host would wait for all that the device still has to do.
    if chunk.divisor == 1.0:
        return None
    return torch.full((), chunk.divisor, dtype=torch.float32, device=chunk.parameters[0].device)
