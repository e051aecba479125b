"""Checks of what augmentations of images are given: arguments, and fields of a batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lockstep.checks import check_all, check_range
from lockstep.errors import InputError


def check_probability(name: str, value: float) -> None:
    """Refuse what is no number from 0 to 1, both of them allowed.

    Raises:
        InputError: naming the argument.
    """
    check_range(name, value, 0, math.nextafter(1, 2))


PLACES = ("boxes", "masks", "keypoints", "keypoint_visibility", "area")
"""The fields that say where objects are on an image, or how much of it they take."""


def pair_of(name: str, bounds: tuple[Any, Any]) -> tuple[Any, Any]:
    """The least and the most of what may be drawn.

    Raises:
        InputError: these are not two numbers; the argument is named.
    """
    check_all(name, bounds, (int, float), hint=f"give {name}=(least, most)")
    if len(bounds) != 2:
        raise InputError(
            f"{name} is out of range.",
            given=f"{name}={bounds}",
            expected="two numbers",
            hint=f"give {name}=(least, most)",
        )
    return bounds


def check_bounds(name: str, bounds: tuple[float, float], most: float = math.inf) -> None:
    """Refuse what is not 0 < least <= most of two finite numbers, the second at most `most`.

    Raises:
        InputError: naming the argument.
    """
    low, high = pair_of(name, bounds)
    if not 0 < low <= high <= most or high == math.inf:
        limit = f" <= {most:g}" if most < math.inf else ", finite"
        raise InputError(
            f"{name} is out of range.",
            given=f"{name}={bounds}",
            expected=f"0 < least <= most{limit}",
            hint=f"give {name} within these bounds",
        )


def check_no_places(batch: dict[str, Any], moved_by: object, taken: str | None = None) -> None:
    """Refuse the places of objects on the images, which an augmentation that moves what is on them would leave wrong.

    What says of objects only that they are there may stay: the labels of an image, as its one label does. So may the
    field `taken`, which the augmentation takes out of the batch.

    Raises:
        InputError: the fields and the class of `moved_by` are named.
    """
    wrong = [name for name in PLACES if name in batch and name != taken and not _one_each(batch[name])]
    if wrong:
        name, kept = type(moved_by).__name__, [f'"{name}"' for name in batch if name not in wrong]
        raise InputError(
            f"{name} would leave {', '.join(wrong)} where they are, and move the images.",
            given=f"a batch of {', '.join(batch)}",
            expected=f"no places of objects on the images, none of {', '.join(PLACES)}",
            hint=f"read the fields wanted alone: ls.data.OnlyFields(reader, [{', '.join(kept)}])",
        )


def _one_each(values: object) -> bool:
    """Whether a field has one number for each example, so that it is about no objects."""
    return isinstance(values, Tensor) and values.ndim == 1


def colour_images(batch: dict[str, Any], field: str, wanted_by: object) -> Tensor:
    """The decoded images in a field of a batch: uint8 of shape (batch, 3, height, width).

    Raises:
        InputError: they are missing, or are something else; the class of `wanted_by` is named.
    """
    images = batch.get(field)
    if isinstance(images, Tensor) and images.dtype == torch.uint8 and images.ndim == 4 and images.shape[1] == 3:
        return images
    name = type(wanted_by).__name__
    raise InputError(
        f"{name} finds no decoded images in the field {field!r}.",
        given=f"{field!r} is {kind_of(batch, field)}; the fields are {', '.join(batch)}",
        expected="a uint8 tensor of shape (batch, 3, height, width)",
        hint=f"crop or resize encoded images first, or name their field: {name}(..., field=...)",
    )


def kind_of(batch: dict[str, Any], field: str) -> str:
    """What a field of a batch is, in words for an error."""
    value = batch.get(field)
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
    if isinstance(value, list) and value:
        return f"a list of {', '.join(sorted({type(item).__name__ for item in value}))}"
    return type(value).__name__ if field in batch else "missing"
