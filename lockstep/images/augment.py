"""Augmentations: values that change a whole batch at once, with every random number from the stream's own draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lockstep.checks import check_all, check_range, check_type
from lockstep.errors import InputError
from lockstep.randomness import Draws


class Augment(Protocol):
    """What a `Loader` accepts as an augmentation; a frozen dataclass with this method is one.

    It may run in the trainer's process or in a loader process, on any part of a batch. So an example's result may
    depend on the example and on its own row of `draws` alone: on no other random number, no other example, no state.
    Equal column names give equal numbers: name a column after the augmentation and the field. Only where a list holds
    two augmentations that are equal, the later one draws other numbers.
    """

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the changed batch: the same number of examples in the same order."""
        ...


def turns(augmentations: Sequence[Augment]) -> list[int]:
    """For each augmentation, how many before it in the list are equal to it: its turn for `Draws.again`.

    Two equal flips with the same numbers would undo each other.
    """
    return [
        sum(_are_equal(augment, earlier) for earlier in augmentations[:place])
        for place, augment in enumerate(augmentations)
    ]


def _are_equal(one: Augment, other: Augment) -> bool:
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except Exception:  # a dataclass that holds an array or a tensor cannot be compared
        return False


@dataclass(frozen=True)
class RandomShift:
    """Shift each image by up to `pixels` in each direction; what moves in is zero.

    The field holds images of shape (batch, channels, height, width) and any dtype.
    """

    pixels: int
    field: str = "image"

    def __post_init__(self) -> None:
        check_type("pixels", self.pixels, int, expected="a whole number above 0", hint="give pixels as a whole number")
        if self.pixels < 1:
            raise InputError(
                f"A shift by up to {self.pixels} pixels shifts nothing.",
                given=f"pixels={self.pixels}",
                expected="a whole number above 0",
                hint="give the largest shift in pixels, or leave the augmentation out",
            )

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images shifted.

        Raises:
            InputError: the batch has no such field, or it holds no images of four dimensions; or there are places of
                objects: boxes, masks, keypoints.
        """
        images = self._images(batch)
        check_no_places(batch, self)
        height, width = images.shape[2:]
        padded = pad(images, [self.pixels] * 4)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (batch, channels, shifts, shifts, height, width)
        top, left = (
            torch.from_numpy(draws.integers(f"RandomShift {self.field} {axis}", 0, 2 * self.pixels + 1))
            for axis in ("top", "left")
        )
        return {**batch, self.field: windows[torch.arange(len(images)), :, top, left]}

    def _images(self, batch: dict[str, Any]) -> torch.Tensor:
        images = batch.get(self.field)
        if isinstance(images, torch.Tensor) and images.ndim == 4:
            return images
        found = (
            f"a tensor of shape {tuple(images.shape)}" if isinstance(images, torch.Tensor) else type(images).__name__
        )
        raise InputError(
            f"RandomShift finds no images in the field {self.field!r}.",
            given=f"{self.field!r} is {found if self.field in batch else 'missing'}; the fields are {', '.join(batch)}",
            expected="a tensor of shape (batch, channels, height, width)",
            hint="name the field of the images: RandomShift(pixels, field=...)",
        )


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
        given=f"{field!r} is {describe_field(batch, field)}; the fields are {', '.join(batch)}",
        expected="a uint8 tensor of shape (batch, 3, height, width)",
        hint=f"crop or resize encoded images first, or name their field: {name}(..., field=...)",
    )


def describe_field(batch: dict[str, Any], field: str) -> str:
    """What a field of a batch is, in words for an error."""
    value = batch.get(field)
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
    if isinstance(value, list) and value:
        return f"a list of {', '.join(sorted({type(item).__name__ for item in value}))}"
    return type(value).__name__ if field in batch else "missing"


@dataclass(frozen=True)
class HorizontalFlip:
    """Exchange left and right of some of the images.

    The field holds images of shape (batch, channels, height, width) and any dtype.

    Raises:
        InputError: the probability is out of range.
    """

    p: float = 0.5
    """The probability that an image is flipped, from 0 to 1."""
    field: str = "image"

    def __post_init__(self) -> None:
        check_probability("p", self.p)

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with some of its images flipped; the images given stay as they are.

        Raises:
            InputError: the batch has no such field, or it holds no images of four dimensions; or there are places of
                objects: boxes, masks, keypoints.
        """
        images = batch.get(self.field)
        if not isinstance(images, torch.Tensor) or images.ndim != 4:
            raise self._without_images(batch)
        check_no_places(batch, self)
        flipped = images.clone()
        # Row by row: to gather and scatter them at once takes several times as long.
        for row in np.flatnonzero(draws.uniform(f"HorizontalFlip {self.field}") < self.p).tolist():
            flipped[row] = images[row].flip(-1)
        return {**batch, self.field: flipped}

    def _without_images(self, batch: dict[str, Any]) -> InputError:
        images = batch.get(self.field)
        shape = f"a tensor of shape {tuple(images.shape)}" if isinstance(images, torch.Tensor) else ""
        found = shape or (type(images).__name__ if self.field in batch else "missing")
        return InputError(
            f"HorizontalFlip finds no images in the field {self.field!r}.",
            given=f"{self.field!r} is {found}; the fields are {', '.join(batch)}",
            expected="a tensor of shape (batch, channels, height, width)",
            hint="crop or resize encoded images first, or name the field: HorizontalFlip(field=...)",
        )
