"""Converts pixels to the floats that networks expect, over a whole batch on its device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import torch

from lockstep.checks import Hint, PositiveFloat, check_value
from lockstep.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Means of red, green and blue in [0, 1], over ImageNet's training images."""

IMAGENET_STD = (0.229, 0.224, 0.225)


_Means = Annotated[tuple[float, ...], Hint("give mean=(...) with one number for each channel")]
_Deviations = Annotated[tuple[PositiveFloat, ...], Hint("give std=(...), the standard deviation of each channel")]


def normalize(images: Tensor, mean: tuple[float, ...] = IMAGENET_MEAN, std: tuple[float, ...] = IMAGENET_STD) -> Tensor:
    """Compute (value - mean) / std of each channel; float32 of the same shape.

    Args:
        images: uint8 of shape (batch, channels, height, width), taken as [0, 1], or floats.
        mean: of each channel.
        std: of each channel, above 0.
    """
    check_value("mean", mean, _Means)
    check_value("std", std, _Deviations)
    if not images.ndim == 4 or not images.shape[1] == len(mean) == len(std):
        raise InputError(
            "These images cannot be normalised by these numbers.",
            given=f"images of shape {tuple(images.shape)}, {len(mean)} means, {len(std)} deviations",
            expected="images of shape (batch, channels, height, width), a mean and a deviation for each channel",
            hint="give mean=(...) and std=(...) with one number for each channel",
        )
    # Numbers, not a tensor of them: nothing has to be copied to the device.
    channels = as_floats(images).unbind(1)
    return torch.stack([(channel - m) / s for channel, m, s in zip(channels, mean, std, strict=True)], dim=1)


def standardize(images: Tensor) -> Tensor:
    """Compute (value - mean) / deviation of each image, over all its values: TensorFlow's `per_image_standardization`.

    Args:
        images: uint8 or floats of shape (batch, ...), of any range. The deviation counts as 1 / sqrt(values) at least:
            an image of one colour becomes 0.

    Returns:
        float32 of the same shape.
    """
    if images.ndim < 2 or not (images.dtype == torch.uint8 or images.is_floating_point()):
        raise InputError(
            "These images cannot be standardised.",
            given=f"{images.dtype} of shape {tuple(images.shape)}",
            expected="uint8 or floats of shape (batch, ...)",
            hint="convert whole numbers to floats; give a single image as a batch of one",
        )
    # Row by row: the same for an image alone, in a batch, and for any number of threads.
    values = images.float().reshape(len(images), math.prod(images.shape[1:-1]), images.shape[-1])
    centered = values - mean_in_steps(values)
    deviation = mean_in_steps(centered.square()).sqrt_()
    return (centered / deviation.clamp_(min=1 / math.sqrt(values[0].numel()))).view_as(images)


def as_floats(images: Tensor) -> Tensor:
    """Convert to float32 in [0, 1], from uint8 or from floats in that range."""
    return images.float().mul_(1 / 255) if images.dtype == torch.uint8 else images.float()


def scale_image(images: Tensor) -> Tensor:
    """Scale pixels 0 to 255 to float32 from -0.5 to 0.5, as the MNIST trainer does."""
    return images.to(torch.float32) * (1 / 255) - 0.5


def mean_in_steps(values: Tensor) -> Tensor:
    """Take the mean over the last two dimensions, which stay with length 1; the same for any number of threads.

    A mean to a single number is split among threads, and rounded by their number; means of rows are not.
    """
    return values.mean(-1, keepdim=True).mean(-2, keepdim=True)


def centred(values: Tensor) -> Tensor:
    """Map [0, 1] to [-1, 1], as the Inception networks expect."""
    return (values - 0.5) * 2
