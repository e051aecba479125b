"""Flips, quarter turns and shifts of some of the images, and of the objects on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from lockstep.checks import Checked, Hint, NonNegativeInt, PositiveInt, Probability
from lockstep.errors import InputError
from lockstep.images.fields import image_tensor, images_of, sides_of, turned_image
from lockstep.images.moves import AS_IT_IS, MIRRORED, QUARTER_TURN, UPSIDE_DOWN, Bools, Region, Turn, move
from lockstep.images.objects import Fields, move_objects, object_fields
from lockstep.ragged import Ragged
from lockstep.randomness import Draws


class RandomTurn(Checked, ABC):
    """Base of augmentations that turn some of the images."""

    turn: ClassVar[Turn]
    """How they are turned."""
    p: float

    def rows(self, draws: Draws) -> Bools:
        """Draw which images are turned: shape (batch,)."""
        chosen: Bools = draws.uniform(f"{type(self).__name__} {getattr(self, 'field', 'image')}") < self.p
        return chosen

    @abstractmethod
    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with these images turned."""


@dataclass(frozen=True)
class HorizontalFlip(RandomTurn):
    """Exchange left and right of some of the images, and of the objects on them.

    The field holds images of shape (batch, channels, height, width) and any dtype, or a list of images.
    """

    p: Probability = 0.5
    """The probability that an image is flipped."""
    field: str = "image"
    """The field of a batch that holds the images."""
    keypoint_flip_permutation: tuple[NonNegativeInt, ...] = ()
    """For each keypoint of an object the one that is in its place on the mirrored image: a left eye is a right one
    there. Needed where there are keypoints."""

    turn: ClassVar[Turn] = MIRRORED

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with some of its images flipped; the images given stay as they are."""
        return turned_rows(batch, self.field, self.turn, self.rows(draws), self, self.keypoint_flip_permutation)


@dataclass(frozen=True)
class RandomVerticalFlip(RandomTurn):
    """Exchange top and bottom of some of the images: random_vertical_flip."""

    p: Probability = 0.5
    """The probability that an image is flipped."""
    keypoint_flip_permutation: tuple[NonNegativeInt, ...] = ()
    """For each keypoint of an object the one that is in its place on the flipped image. Needed where there are
    keypoints."""

    turn: ClassVar[Turn] = UPSIDE_DOWN

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with some of its images flipped; those not decoded yet are flipped when they are."""
        return turned_rows(batch, "image", self.turn, self.rows(draws), self, self.keypoint_flip_permutation)


@dataclass(frozen=True)
class RandomRotation90(RandomTurn):
    """Turn some of the images counter-clockwise, by 90 degrees: random_rotation90.

    Images of one size, in one tensor, become a list of images unless they are square.
    """

    p: Probability = 0.5
    """The probability that an image is turned."""

    turn: ClassVar[Turn] = QUARTER_TURN

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with some of its images turned; those not decoded yet are turned when they are."""
        return turned_rows(batch, "image", self.turn, self.rows(draws), self)


@dataclass(frozen=True)
class RandomShift(Checked):
    """Shift each image, and the objects on it, by up to `pixels` in each direction; what moves in is zero.

    The field holds images of shape (batch, channels, height, width) and any dtype.
    """

    pixels: Annotated[PositiveInt, Hint("give the largest shift in pixels, or leave the augmentation out")]
    """The largest shift, in pixels."""
    field: str = "image"
    """The field of a batch that holds the images."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images shifted."""
        images = image_tensor(batch, self.field, self)
        height, width = images.shape[2:]
        padded = torch.nn.functional.pad(images, [self.pixels] * 4)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (batch, channels, shifts, shifts, height, width)
        top, left = (
            torch.from_numpy(draws.integers(f"RandomShift {self.field} {axis}", 0, 2 * self.pixels + 1))
            for axis in ("top", "left")
        )
        shifted = windows[torch.arange(len(images)), :, top, left]
        corners = zip((top - self.pixels).tolist(), (left - self.pixels).tolist(), strict=True)
        moves = (move((height, width), Region(*corner, height, width)) for corner in corners)
        return {**move_objects(batch, moves), self.field: shifted}


def turned_rows(
    batch: Fields, field: str, turn: Turn, rows: Bools, wanted_by: object, keypoint_order: Sequence[int] = ()
) -> Fields:
    """Turn the images of some rows, shape (batch,), and the objects on them; see `move_objects` for the keypoints."""
    images = images_of(batch, field, wanted_by)
    if turn.mirrors and "keypoints" in object_fields(batch):
        keypoints = batch["keypoints"]
        count = (keypoints.values if isinstance(keypoints, Ragged) else keypoints[0]).shape[-2]
        check_keypoint_order(keypoint_order, count, wanted_by)
    moves = (
        move(sides, turn=turn if is_turned else AS_IT_IS)
        for sides, is_turned in zip(sides_of(images).tolist(), rows, strict=True)
    )
    stays_tensor = isinstance(batch[field], torch.Tensor) and not (
        turn.exchange and len(set(batch[field].shape[2:])) > 1
    )
    turned: Any = torch.empty_like(batch[field]) if stays_tensor else [*images]
    # Row by row: to gather and scatter them at once takes several times as long.
    for row, (image, is_turned) in enumerate(zip(images, rows.tolist(), strict=True)):
        if stays_tensor or is_turned:
            turned[row] = turned_image(image, turn) if is_turned else image
    return {**move_objects(batch, moves, keypoint_order=keypoint_order), field: turned}


def check_keypoint_order(order: Sequence[int], count: int, wanted_by: object) -> None:
    """Refuse to mirror so many keypoints without knowing which are left and which are right."""
    if sorted(order) != [*range(count)]:
        name = type(wanted_by).__name__
        raise InputError(
            f"{name} does not know which keypoint is in whose place on a mirrored image.",
            given=f"keypoint_flip_permutation={(*order,)}, for {count} keypoints of an object",
            expected=f"each number from 0 to {count - 1}, once",
            hint="for eyes 0 (left) and 1 (right), and a nose, give keypoint_flip_permutation=(1, 0, 2)",
        )
