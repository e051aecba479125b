"""Colour distortion: numbers are drawn where images are read, and applied to whole batches on their device.

The operations and their orders are those of the reference systems (TensorFlow's `tf.image.adjust_*`): brightness is
added, contrast is about the mean of each channel, saturation and hue are those of HSV; nothing is clipped in between.
`jitter` has the operations of torchvision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np
import torch

from lockstep.checks import Checked, NonNegativeFloat, Range, check_all, check_one_of, ordered
from lockstep.errors import InputError
from lockstep.images.normalisation import as_floats
from lockstep.randomness import Draws

if TYPE_CHECKING:
    from torch import Tensor

Order = tuple[str, ...]
"""Names of operations."""

Operations: TypeAlias = "Mapping[str, Callable[[Tensor, Tensor], Tensor]]"
"""By name, in the order of their columns: each maps images of shape (batch, 3, height, width) and numbers of shape
(batch, 1, 1, 1) to images."""

INCEPTION_ORDERS: tuple[Order, ...] = (
    ("brightness", "saturation", "hue", "contrast"),
    ("brightness", "contrast", "saturation", "hue"),
)
"""The Inception system's, whose reading threads took them in turn."""

SLIM_ORDERS: tuple[Order, ...] = (
    ("brightness", "saturation", "hue", "contrast"),
    ("saturation", "brightness", "contrast", "hue"),
    ("contrast", "hue", "brightness", "saturation"),
    ("hue", "saturation", "contrast", "brightness"),
)
"""Those of slim's Inception preprocessing when it is not fast."""

FAST_ORDERS: tuple[Order, ...] = (("brightness", "saturation"),)
"""That of slim's Inception preprocessing in its fast mode, the default there."""


_Factors = Annotated[tuple[NonNegativeFloat, NonNegativeFloat], ordered]


@dataclass(frozen=True)
class ColourDraws(Checked):
    """Add the numbers that `distort` needs to a batch: float32 (batch, 5) in the field `into`.

    Its columns: the brightness to add (of a range of 1), the factors of contrast and saturation, the turn of the hue
    (1 is all around), and where among the orders to choose one: 0 is the first, just below 1 the last.
    """

    brightness: NonNegativeFloat = 32 / 255
    """The most that is added or taken away."""
    contrast: _Factors = (0.5, 1.5)
    saturation: _Factors = (0.5, 1.5)
    hue: Annotated[float, Range(ge=0, le=0.5)] = 0.2
    """The most that the hue is turned either way."""
    field: str = "image"
    """The images that are coloured; it is not read."""

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
        return {**batch, self.into: drawn_numbers(draws, self.into, bounds)}


def distort(images: Tensor, numbers: Tensor, orders: tuple[Order, ...] = INCEPTION_ORDERS) -> Tensor:
    """Colour each image by its own numbers; float32 in [0, 1] of the same shape.

    Args:
        images: uint8 of shape (batch, 3, height, width), or floats in [0, 1].
        numbers: as `ColourDraws` draws them, on the same device.
        orders: the operations of each order; all of the same length. See `in_chosen_orders`.
    """
    return in_chosen_orders(images, numbers, orders, OPERATIONS, drawn_by="ColourDraws").clamp_(0, 1)


def _brightened(values: Tensor, number: Tensor) -> Tensor:
    return values + number


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
    """Return the smallest and the largest channel; several times as fast as a reduction over them."""
    low = torch.minimum(torch.minimum(red, green), blue)
    return low, torch.maximum(torch.maximum(red, green), blue)


OPERATIONS: Operations = {
    "brightness": _brightened,
    "contrast": _contrasted,
    "saturation": _saturated,
    "hue": turned_hue,
}
"""As `ColourDraws` orders its numbers."""


def drawn_numbers(draws: Draws, field: str, bounds: Mapping[str, tuple[float, float]]) -> Tensor:
    """Draw a number within each pair of bounds for each example: float32 (batch, bounds)."""
    columns = [low + draws.uniform(f"{field} {name}") * (high - low) for name, (low, high) in bounds.items()]
    return torch.from_numpy(np.stack(columns, axis=1)).float()


def in_chosen_orders(
    images: Tensor, numbers: Tensor, orders: tuple[Order, ...], operations: Operations, drawn_by: str
) -> Tensor:
    """Apply the operations to each image in the order that the image has chosen; float32 of the same shape.

    An accelerator looks up no order: each step computes every operation that stands there in one of the orders, and
    nobody waits for the device.

    Args:
        images: uint8 of shape (batch, 3, height, width), or floats in [0, 1]; they stay as they are.
        numbers: shape (batch, operations + 1): for each image one number for each of the operations, and last where
            among the orders to choose one: 0 is the first, just below 1 the last.
        orders: names of operations; all of the same length.
        operations: as the columns of the numbers are ordered.
        drawn_by: the augmentation that draws such numbers, for an error.
    """
    _check(images, numbers, orders, operations, drawn_by)
    values = as_floats(images)
    # In 32 bits a number just below 1 may have become 1.
    chosen = (numbers[:, -1] * len(orders)).int().clamp_(0, len(orders) - 1)
    if values.device.type != "cpu":
        return in_orders(values, numbers, chosen, orders, operations)
    result = torch.empty_like(values)
    # One by one: on a CPU an image stays in its cache, and only its own order is computed.
    for row, place in enumerate(chosen.tolist()):
        rows = slice(row, row + 1)
        result[rows] = in_orders(values[rows], numbers[rows], chosen[rows], orders[place : place + 1], operations)
    return result


def in_orders(
    values: Tensor, numbers: Tensor, chosen: Tensor, orders: tuple[Order, ...], operations: Operations
) -> Tensor:
    """Apply the operations by the numbers of the chosen orders, shape (batch,), without reading these back."""
    columns = {name: numbers[:, column, None, None, None] for column, name in enumerate(operations)}
    for names in zip(*orders, strict=True):
        first, *others = dict.fromkeys(names)
        result = operations[first](values, columns[first])
        for name in others:
            rows = _takers(chosen, [place for place, other in enumerate(names) if other == name])
            result = torch.where(rows, operations[name](values, columns[name]), result)
        values = result
    return values


def _takers(chosen: Tensor, places: list[int]) -> Tensor:
    """Say which images have chosen one of these orders."""
    # Compared one by one: a tensor of the places would have to be copied to the device first.
    return reduce(torch.logical_or, [chosen == place for place in places])[:, None, None, None]


def _check(images: Tensor, numbers: Tensor, orders: tuple[Order, ...], operations: Operations, drawn_by: str) -> None:
    check_all("orders", orders, tuple, hint="give tuples of names of operations")
    for name in (name for order in orders for name in order):
        check_one_of("an operation", name, [*operations])
    if len({len(order) for order in orders}) != 1:
        raise InputError(
            "These orders cannot be chosen from.",
            given=f"orders={orders}",
            expected="one order or more, all with as many operations",
            hint="leave out the orders that are shorter, or give them another operation",
        )
    columns = len(operations) + 1
    known = images.dtype == torch.uint8 or images.is_floating_point()
    if not known or images.ndim != 4 or images.shape[1] != 3 or numbers.shape != (len(images), columns):
        raise InputError(
            "These images cannot be coloured by these numbers.",
            given=f"images of {images.dtype} and shape {tuple(images.shape)}, numbers of shape {tuple(numbers.shape)}",
            expected=f"images of shape (batch, 3, height, width), uint8 or floats; numbers of shape (batch, {columns})",
            hint=f"add {drawn_by} to the augmentations, and pass the field that it names",
        )
