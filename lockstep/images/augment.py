"""Augmentations: values that change a whole batch at once, with every random number from the stream's own draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import pad

from lockstep.checks import check_type
from lockstep.errors import InputError
from lockstep.images.arguments import check_no_places
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
