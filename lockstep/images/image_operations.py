"""Operations of augmentation policies on the colours of one image, by the formulas of torchvision on uint8.

An image is uint8 of shape (3, height, width), and so is the result, which may be the image itself. Results that are not
whole are cut off, not rounded: so does torchvision, and its policies were tuned with it. Where a result is whole but
for the last bit of a float, the two may differ by 1.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lockstep.images.grey import grey


def brightened(image: Tensor, factor: float) -> Tensor:
    """Times a factor of 0 or more; 1 changes nothing."""
    return image.mul(factor).clamp_(0, 255).to(torch.uint8)


def saturated(image: Tensor, factor: float) -> Tensor:
    """Away from grey by a factor of 0 or more: 0 is grey, 1 changes nothing."""
    return _blended(image, grey(image).floor_(), factor)


def contrasted(image: Tensor, factor: float) -> Tensor:
    """Away from the mean grey by a factor of 0 or more; 1 changes nothing."""
    # A sum of whole numbers is exact: the same for any number of threads.
    mean = grey(image).floor_().sum(dtype=torch.float64) / image[0].numel()
    return _blended(image, mean.float(), factor)


def sharpened(image: Tensor, factor: float) -> Tensor:
    """Away from a blurred image by a factor of 0 or more: 0 is blurred, 1 changes nothing. The border stays."""
    if min(image.shape[1:]) < 3:
        return image
    values = image.float()
    inner = values[:, 1:-1, 1:-1]
    rows = values[:, :-2] + values[:, 1:-1] + values[:, 2:]
    # The middle pixel counts five times, all 13 of them whole numbers. A convolution takes ten times as long.
    blurred = rows[:, :, :-2].add(rows[:, :, 1:-1]).add_(rows[:, :, 2:]).add_(inner, alpha=4).mul_(1 / 13).round_()
    inner.add_(blurred.sub_(inner), alpha=1 - factor)
    return values.clamp_(0, 255).to(torch.uint8)


def posterized(image: Tensor, bits: float) -> Tensor:
    """The upper bits of each value alone; a whole number from 0 to 8."""
    return image & (0xFF & 0xFF << (8 - int(bits)))


def solarized(image: Tensor, threshold: float) -> Tensor:
    """255 less each value that is not below a threshold from 0 to 255, which is taken in 32 bits."""
    # By numpy, which compares bytes many times as fast: 255 is added to, or taken from, by an exclusive or.
    chosen = image.numpy() >= math.ceil(np.float32(threshold))
    return image ^ torch.from_numpy(chosen.view(np.uint8) * np.uint8(255))


def autocontrasted(image: Tensor) -> Tensor:
    """Each channel stretched to all of 0 to 255; one that has a single value stays."""
    low, high = image.amin((1, 2), keepdim=True).float(), image.amax((1, 2), keepdim=True).float()
    flat = low == high
    scale = torch.where(flat, 1, (high - low) * (1 / 255))
    return image.sub(torch.where(flat, 0, low)).div_(scale).clamp_(0, 255).to(torch.uint8)


def equalized(image: Tensor) -> Tensor:
    """Each channel with a histogram that is as flat as can be, by the rule of Pillow's `ImageOps.equalize`."""
    return torch.stack([_equalized_channel(channel) for channel in image])


def _equalized_channel(channel: Tensor) -> Tensor:
    counts = torch.bincount(channel.flatten(), minlength=256)
    step = (channel.numel() - int(counts[int(channel.max())])) // 255
    if step == 0:
        return channel
    below = counts.cumsum(0) - counts
    table = ((below + step // 2) // step).clamp_(max=255).to(torch.uint8)
    return torch.from_numpy(table.numpy().take(channel.numpy()))


def _blended(image: Tensor, other: Tensor, ratio: float) -> Tensor:
    return image.mul(ratio).add_(other, alpha=1 - ratio).clamp_(0, 255).to(torch.uint8)
