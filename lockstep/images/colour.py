"""Operations on the colours of whole batches, each image by its own numbers and in an order of its own.

Those of TensorFlow (`tf.image.adjust_*`), as the Inception systems use them: brightness is added, contrast is about the
mean of each channel, saturation and hue are those of HSV; nothing is clipped in between. Those of torchvision's
`ColorJitter`: brightness and contrast are factors, contrast is about the mean grey, saturation is away from grey;
values are clipped after each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from itertools import permutations
from operator import add
from typing import TYPE_CHECKING, TypeAlias

import torch

from lockstep.checks import check_all, check_one_of
from lockstep.errors import InputError
from lockstep.images.normalisation import as_floats, mean_in_steps

if TYPE_CHECKING:
    from torch import Tensor


Order = tuple[str, ...]
"""Names of operations."""

Operations: TypeAlias = "Mapping[str, Callable[[Tensor, Tensor], Tensor]]"
"""Functions by name, in the order of their columns: each maps images of shape (batch, 3, height, width) and numbers of
shape (batch, 1, 1, 1) to images."""

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
"""The orders of slim's Inception preprocessing when it is not fast."""

FAST_ORDERS: tuple[Order, ...] = (("brightness", "saturation"),)
"""The order of slim's Inception preprocessing in its fast mode, the default there."""


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


OPERATIONS: Operations = {"brightness": add, "contrast": _contrasted, "saturation": _saturated, "hue": turned_hue}
"""TensorFlow's operations, as `ColourDraws` orders its numbers."""


def _blended(values: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(other, values, factor).clamp_(0, 1)


def _brightness_scaled(values: Tensor, factor: Tensor) -> Tensor:
    return (values * factor).clamp_(0, 1)


def _moved_from_mean_grey(values: Tensor, factor: Tensor) -> Tensor:
    return _blended(values, mean_in_steps(grey(values)), factor)


def _moved_from_grey(values: Tensor, factor: Tensor) -> Tensor:
    return _blended(values, grey(values), factor)


JITTER_OPERATIONS: Operations = {
    "brightness": _brightness_scaled,
    "contrast": _moved_from_mean_grey,
    "saturation": _moved_from_grey,
    "hue": turned_hue,
}
"""Operations of torchvision's `ColorJitter`, as `JitterDraws` orders its numbers."""

JITTER_ORDERS: tuple[Order, ...] = (*permutations(JITTER_OPERATIONS),)
"""All orders of the four operations: torchvision draws one of them for each image."""


def grey(images: Tensor) -> Tensor:
    """Compute 0.2989 red + 0.587 green + 0.114 blue: float32 of shape (..., 1, height, width).

    Images are uint8 or floats of shape (..., 3, height, width).
    """
    red, green, blue = images.unbind(-3)
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).unsqueeze_(-3)


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
            # Compared one by one: a tensor of the places would have to be copied to the device first.
            takers = reduce(torch.logical_or, [chosen == place for place, other in enumerate(names) if other == name])
            result = torch.where(takers[:, None, None, None], operations[name](values, columns[name]), result)
        values = result
    return values


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
            hint=f"add {drawn_by} to the augmentations of the loader that gives the batch",
        )
