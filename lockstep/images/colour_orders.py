"""Operations on the colours of a batch, in orders that the images choose: each image has numbers of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce

import torch
from torch import Tensor

from lockstep.checks import check_all, check_one_of
from lockstep.errors import InputError

Order = tuple[str, ...]

Operations = Mapping[str, Callable[[Tensor, Tensor], Tensor]]
"""By name: from images of shape (batch, 3, height, width) and numbers of shape (batch, 1, 1, 1) to images."""


def in_chosen_orders(values: Tensor, numbers: Tensor, orders: tuple[Order, ...], operations: Operations) -> Tensor:
    """The images after all operations of the order that each has chosen.

    On a device that runs on its own no order is looked up: each step computes every operation that stands there in
    one of the orders, and nobody waits for the device.

    Args:
        values: floats of shape (batch, 3, height, width); they stay as they are.
        numbers: for each image one number for each of the operations, and last where among the orders to choose one: 0
            is the first, just below 1 the last.
        orders: names of operations.
        operations: as the columns of the numbers are ordered.
    """
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
    """The same without a look at what was chosen: whole numbers of shape (batch,)."""
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
    """Which images have chosen one of these orders."""
    # Compared one by one: a tensor of the places would have to be copied to the device first.
    return reduce(torch.logical_or, [chosen == place for place in places])[:, None, None, None]


def check_colours(
    images: Tensor, numbers: Tensor, orders: tuple[Order, ...], operations: Operations, drawn_by: str
) -> None:
    """Refuse what `in_chosen_orders` cannot work on; images may be uint8 here.

    Args:
        images: of shape (batch, 3, height, width).
        numbers: of shape (batch, operations + 1).
        orders: all of the same length.
        operations: those that there are.
        drawn_by: what draws such numbers, for the error.

    Raises:
        InputError: the shapes do not fit, an order names no operation, or is shorter than another.
    """
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
