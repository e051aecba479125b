"""Colour: numbers drawn where images are read, and applied to whole batches where they are used, on any device.

The operations and their orders are those of the reference systems (TensorFlow's `tf.image.adjust_*`): brightness is
added, contrast is about the mean of each channel, saturation and hue are those of HSV. Nothing is clipped in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.checks import check_range
from lockstep.images.arguments import pair_of
from lockstep.images.colour_orders import Operations, Order, check_colours, in_chosen_orders
from lockstep.randomness import Draws

INCEPTION_ORDERS: tuple[Order, ...] = (
    ("brightness", "saturation", "hue", "contrast"),
    ("brightness", "contrast", "saturation", "hue"),
)
"""Of the Inception system, whose reading threads took them in turn."""

SLIM_ORDERS: tuple[Order, ...] = (
    ("brightness", "saturation", "hue", "contrast"),
    ("saturation", "brightness", "contrast", "hue"),
    ("contrast", "hue", "brightness", "saturation"),
    ("hue", "saturation", "contrast", "brightness"),
)
"""Of slim's Inception preprocessing when it is not fast."""

FAST_ORDERS: tuple[Order, ...] = (("brightness", "saturation"),)
"""Of slim's Inception preprocessing in its fast mode, the default there."""


@dataclass(frozen=True)
class ColourDraws:
    """Add the numbers that `distort` needs to a batch: float32 (batch, 5) in the field `into`.

    Its columns: the brightness to add (of a range of 1), the factors of contrast and saturation, the turn of the hue
    (1 is all around), and where among the orders to choose one: 0 is the first, just below 1 the last.

    Raises:
        InputError: a parameter is out of range.
    """

    brightness: float = 32 / 255
    """The most that is added or taken away."""
    contrast: tuple[float, float] = (0.5, 1.5)
    saturation: tuple[float, float] = (0.5, 1.5)
    hue: float = 0.2
    """The most that the hue is turned either way, up to 0.5."""
    field: str = "image"
    """The images that are coloured; it is not read."""

    def __post_init__(self) -> None:
        check_range("brightness", self.brightness, 0)
        check_range("hue", self.hue, 0, math.nextafter(0.5, 1))
        for name in ("contrast", "saturation"):
            low, high = pair_of(name, getattr(self, name))
            check_range(f"the least {name}", low, 0)
            check_range(f"the most {name}", high, low)

    @property
    def into(self) -> str:
        """The field that the numbers are in: "image.colour" for "image"."""
        return f"{self.field}.colour"

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its numbers; the images stay as they are."""
        bounds = {
            "brightness": (-self.brightness, self.brightness),
            "contrast": self.contrast,
            "saturation": self.saturation,
            "hue": (-self.hue, self.hue),
            "order": (0.0, 1.0),
        }
        columns = [low + draws.uniform(f"{self.into} {name}") * (high - low) for name, (low, high) in bounds.items()]
        return {**batch, self.into: torch.from_numpy(np.stack(columns, axis=1)).float()}


def distort(images: Tensor, numbers: Tensor, orders: tuple[Order, ...] = INCEPTION_ORDERS) -> Tensor:
    """Colour each image by its own numbers; float32 in [0, 1] of the same shape.

    Args:
        images: uint8 of shape (batch, 3, height, width), or floats in [0, 1].
        numbers: as `ColourDraws` draws them, on the same device.
        orders: the operations of each order; all of the same length. See `colour_orders`.

    Raises:
        InputError: the shapes do not fit, an order names no operation, or is shorter than another.
    """
    check_colours(images, numbers, orders, OPERATIONS, "ColourDraws")
    return in_chosen_orders(as_floats(images), numbers, orders, OPERATIONS).clamp_(0, 1)


def as_floats(images: Tensor) -> Tensor:
    """float32 in [0, 1], from uint8 or from floats in that range."""
    return scaled(images) if images.dtype == torch.uint8 else images.float()


def scaled(images: Tensor) -> Tensor:
    """From uint8 to float32 in [0, 1]."""
    return images.float().mul_(1 / 255)


def mean_in_steps(values: Tensor) -> Tensor:
    """The mean over the last two dimensions, which stay with length 1: of floats of shape (..., rows, columns).

    A mean to a single number is split among threads, and rounded by their number; means of rows are not.
    """
    return values.mean(-1, keepdim=True).mean(-2, keepdim=True)


def centred(values: Tensor) -> Tensor:
    """From [0, 1] to [-1, 1], as the Inception networks expect."""
    return (values - 0.5) * 2


def _brightened(values: Tensor, delta: Tensor) -> Tensor:
    return values + delta


def _contrasted(values: Tensor, factor: Tensor) -> Tensor:
    mean = values.mean(dim=(2, 3), keepdim=True)
    return torch.lerp(mean, values, factor)


def _saturated(values: Tensor, factor: Tensor) -> Tensor:
    """Scale the saturation of HSV, up to 1: the channels move away from the largest, which stays."""
    low, high = _bounds(*values.chunk(3, dim=1))
    # At 1 / saturation the smallest channel is 0. Where all are equal it is infinite, and the factor is taken.
    ratio = torch.minimum(high / (high - low), factor)
    # Of a colour that is nowhere above 0 TensorFlow takes the saturation for 0: it becomes grey.
    return high - (high - values) * torch.where(high > 0, ratio, 0)


def turned_hue(values: Tensor, turn: Tensor) -> Tensor:
    """Turn the hue of HSV; the largest and the smallest channel keep their values."""
    red, green, blue = values.chunk(3, dim=1)
    low, high = _bounds(red, green, blue)
    spread = high - low
    sector = torch.where(high == green, 2 + (blue - red) / spread, 4 + (red - green) / spread)
    sector = torch.where(high == red, (green - blue) / spread, sector)
    hue = torch.where(spread > 0, sector, 0).add_(turn * 6).remainder_(6)
    shares = [(hue - 3).abs_() - 1, 2 - (hue - 2).abs_(), 2 - (hue - 4).abs_()]
    return torch.cat(shares, dim=1).clamp_(0, 1).mul_(spread).add_(low)


def _bounds(red: Tensor, green: Tensor, blue: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest channel; several times as fast as a reduction over them."""
    low = torch.minimum(torch.minimum(red, green), blue)
    return low, torch.maximum(torch.maximum(red, green), blue)


OPERATIONS: Operations = {
    "brightness": _brightened,
    "contrast": _contrasted,
    "saturation": _saturated,
    "hue": turned_hue,
}
"""As `ColourDraws` orders its numbers."""
