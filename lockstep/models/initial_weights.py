"""Initial weights of nets, as in the reference, and the check of the images that nets are given.

Weights are drawn on the CPU, from one generator, in the order of the layers; from torch's default one where a net is
given none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Generator, Tensor, nn

from lockstep.errors import InputError

AnyModule = TypeVar("AnyModule", bound=nn.Module)


@torch.no_grad()
def truncated_normal(tensor: Tensor, stddev: float, generator: Generator | None = None) -> None:
    """Fill a contiguous tensor from a normal distribution without what is over two standard deviations from 0.

    As `tf.truncated_normal_initializer`: what is outside is drawn anew. Only that is, unlike in torch's own function,
    which draws the whole tensor for it: a third of the time for a net of 24 million weights. `stddev` is that before it
    is cut; the values have 0.88 times that. Without a generator, torch's default one draws.
    """
    values = tensor.detach().view(-1).normal_(0.0, stddev, generator=generator)
    outside = (values.abs() > 2 * stddev).nonzero().squeeze(1)
    while outside.numel():
        drawn = values.new_empty(outside.shape).normal_(0.0, stddev, generator=generator)
        values[outside] = drawn
        outside = outside[drawn.abs() > 2 * stddev]


@torch.no_grad()
def scaled_normal(tensor: Tensor, generator: Generator | None = None) -> None:
    """Fill a tensor (outputs, inputs, kernel ...) with a variance of about 2 / (inputs * kernel), cut as above.

    As TF-Slim's `variance_scaling_initializer`, which makes up for the cut by a factor of 1.3 on the variance.
    """
    inputs = math.prod(tensor.shape[1:])
    truncated_normal(tensor, math.sqrt(1.3 * 2 / inputs), generator)


@contextmanager
def without_memory() -> Iterator[None]:
    """Keep torch from drawing first weights and moving a random stream: modules made inside have shapes alone.

    `give_memory` gives them memory, whose values are still to be written, buffers too.
    """
    with torch.device("meta"):
        yield


def give_memory(module: AnyModule) -> AnyModule:
    """Give a module that was made without memory some, on the CPU; returns the module.

    The method of torch's modules that does the same has torch import sympy, half a second of each start.
    """
    memory = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        for name, tensor in module.state_dict().items()
    }
    module.load_state_dict(memory, assign=True)
    return module


def clear_statistics(model: nn.Module) -> None:
    """Reset norms: to a mean of 0, a variance of 1, and where they have them a scale of 1 and a shift of 0."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
        if isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
            if module.weight is not None:
                nn.init.ones_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def check_images(net: str, images: Tensor, *, channels: int, smallest: int, largest: int | None = None) -> None:
    """Refuse images that a net cannot use, in words, before its first layer.

    They are to have the shape (batch, channels, height, width), with sides from `smallest` to `largest`, in pixels.
    """
    fit = images.ndim == 4 and images.shape[1] == channels
    sides = images.shape[2:] if fit else ()
    if fit and images.is_floating_point() and min(sides) >= smallest and (largest is None or max(sides) <= largest):
        return
    wanted = (
        f"(batch, {channels}, {smallest}, {smallest})" if smallest == largest else f"(batch, {channels}, height, width)"
    )
    least = "" if smallest == largest else f", each side {smallest} pixels or more"
    raise InputError(
        f"{net} cannot use these images.",
        given=f"shape {tuple(images.shape)}, {images.dtype}",
        expected=f"shape {wanted}{least}, floating point",
        hint=_hint(fit, images, smallest),
    )


def _hint(fit: bool, images: Tensor, smallest: int) -> str:
    if not fit:
        return "put the channels second, as images.permute(0, 3, 1, 2) does, and give as many as the net has"
    if not images.is_floating_point():
        return "scale the pixels as the net was trained, for instance to -1 to 1 with images / 127.5 - 1"
    return f"resize or crop the images, for instance with image_size={smallest}"
