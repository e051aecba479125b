"""Random crops of images with the objects on them, as TensorFlow's object detection API makes them.

Images that are not decoded yet stay so: no more than the window is decoded, when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.checks import Checked, PositiveFloat, Probability, check_least_and_most
from lockstep.errors import DataError
from lockstep.images.augment import Bools, Image, Int64s, Share, cropped_image, images_of, name_of, sides_of
from lockstep.images.moves import Region, move
from lockstep.images.objects import Fields, as_ragged, move_objects, object_fields
from lockstep.images.resized_crops import DistortedLaw, Windows, objects_in_pixels
from lockstep.ragged import Ragged
from lockstep.randomness import Draws

if TYPE_CHECKING:
    import numpy.typing as npt

_ATTEMPTS = 100


@dataclass(frozen=True)
class CropLimits(Checked):
    """Which window may be cut out of an image, by `sample_distorted_bounding_box`, and which objects it keeps."""

    min_object_covered: Probability = 1.0
    """The share of one of the boxes, or of the image where it has none, that a window has to show."""
    min_aspect_ratio: PositiveFloat = 0.75
    """Width / height of a window, at least."""
    max_aspect_ratio: PositiveFloat = 1.33
    """Width / height of a window, at most."""
    min_area: Share = 0.1
    """The share of the image that a window takes, at least."""
    max_area: Share = 1.0
    """The share of the image that a window takes, at most."""
    overlap_thresh: Probability = 0.3
    """The share of its box that has to be in the window: of an object with less, nothing is kept."""
    random_coef: Probability = 0.0
    """The probability that an image stays as it is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least_and_most(self, "min_aspect_ratio", "max_aspect_ratio")
        check_least_and_most(self, "min_area", "max_area")


@dataclass(frozen=True)
class RandomCropImage(CropLimits):
    """Cut a random window out of each image: random_crop_image.

    After 100 attempts without a window that fits, it is the whole image. Boxes are clipped to the window; objects of
    which too little is in it, and boxes without area, are dropped; keypoints outside become NaN.
    """

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images cropped: a list of images of several sizes."""
        return crop_at_random(batch, draws, [self], np.zeros(len(draws.positions), np.int64), self)


@dataclass(frozen=True)
class RandomCropToAspectRatio(Checked):
    """Cut the largest window of this aspect out of each image, at a random place: random_crop_to_aspect_ratio.

    Boxes are clipped to the window; objects of which too little is in it, and boxes without area, are dropped;
    keypoints outside become NaN.
    """

    aspect_ratio: PositiveFloat = 1.0
    """Width / height."""
    overlap_thresh: Probability = 0.3
    """The share of its box that has to be in the window: of an object with less, nothing is kept."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images cropped: a list of images of several sizes."""
        return crop_to_aspect_ratio(batch, draws, self.aspect_ratio, self.overlap_thresh, self)


def crop_at_random(
    batch: Fields, draws: Draws, limits: Sequence[CropLimits], chosen: Int64s, wanted_by: object
) -> Fields:
    """Cut a random window out of each image, as `RandomCropImage` does.

    Args:
        batch: with images in the field "image".
        draws: those of the batch.
        limits: of the windows.
        chosen: which of the limits hold for each image, shape (batch,).
        wanted_by: the augmentation.
    """
    images = images_of(batch, "image", wanted_by)
    height, width = sides_of(images).T
    table = np.array([[getattr(each, name) for name in CropLimits.__dataclass_fields__] for each in limits])
    covered, low_aspect, high_aspect, low_area, high_area, overlap, untouched = table[chosen].T
    law = DistortedLaw(covered, np.stack([low_aspect, high_aspect]), np.stack([low_area, high_area]), _ATTEMPTS)
    boxes = _boxes_of(batch, images)
    column = f"{type(wanted_by).__name__} image"
    # Only here are boxes clipped: of one that reaches out of the image, a share of all of it has to be in the window.
    objects = objects_in_pixels(boxes.replaced(boxes.values.clamp(0, 1)), images, height, width)
    windows = law.windows(height, width, objects, draws, column)
    return cropped(batch, images, windows, overlap, draws.uniform(f"{column} crop") >= untouched)


def crop_to_aspect_ratio(batch: Fields, draws: Draws, ratio: float, overlap: float, wanted_by: object) -> Fields:
    """Cut the largest window of an aspect out of each image, as `RandomCropToAspectRatio` does."""
    images = images_of(batch, "image", wanted_by)
    sides = sides_of(images)
    # In 32 bits, and to even where it lies between: the rounding of the reference.
    height, width = sides.astype(np.float32).T
    aspect, wanted = width / height, np.float32(ratio)
    rows = np.where(aspect >= wanted, height, np.rint(width / wanted)).astype(np.int64)
    columns = np.where(aspect <= wanted, width, np.rint(height * wanted)).astype(np.int64)
    if (small := np.minimum(rows, columns) < 1).any():
        row = int(small.argmax())
        raise DataError(
            f"{name_of(images[row])} is too thin to be cropped.",
            given=f"{sides[row, 0]} rows and {sides[row, 1]} columns",
            expected=f"a pixel or more in a window of width / height = {ratio:g}",
            hint="leave it out of the data",
        )
    column = f"{type(wanted_by).__name__} image offset"
    room = sides - np.stack([rows, columns], axis=1) + 1
    top, left = (
        np.floor(draws.uniform(f"{column} {side}") * room[:, axis]).astype(np.int64)
        for axis, side in enumerate(("top", "left"))
    )
    everywhere = np.ones(len(images), dtype=bool)
    return cropped(batch, images, Windows(top, left, rows, columns), np.full(len(images), overlap), everywhere)


def cropped(
    batch: Fields, images: Sequence[Image], windows: Windows, overlap: npt.NDArray[np.float64], is_cropped: Bools
) -> Fields:
    """Cut windows out of some of the images, and take the objects with them.

    Args:
        batch: with the images, and perhaps objects.
        images: those of the batch.
        windows: one within each image.
        overlap: the share of its box that an object has to have in the window, or it is dropped; shape (batch,).
        is_cropped: which of the images are cropped, shape (batch,).
    """
    _boxes_of(batch, images)
    sides = sides_of(images).tolist()
    whole = [Region(0, 0, *side) for side in sides]
    parts = [
        part if crops else all_of for part, all_of, crops in zip(windows.regions(), whole, is_cropped, strict=True)
    ]
    moved = move_objects(
        batch,
        map(move, sides, parts),
        min_overlap=torch.from_numpy(overlap),
        is_cut=torch.from_numpy(is_cropped),
    )
    return {**moved, "image": [*map(_part_of, images, parts, whole)]}


def _part_of(image: Image, part: Region, whole: Region) -> Image:
    return image if part == whole else cropped_image(image, part)


def _boxes_of(batch: Fields, images: Sequence[Image]) -> Ragged:
    """Return the boxes of a batch, which may have none; NaN is refused."""
    if "boxes" not in object_fields(batch):
        return Ragged(torch.empty(0, 4), torch.zeros(len(images), dtype=torch.int64))
    boxes = as_ragged(batch["boxes"])
    if (wrong := boxes.values.isnan().any(1)).any():
        place = int(wrong.int().argmax())
        raise DataError(
            f"A box of {name_of(images[int(boxes.owner[place])])} is none.",
            given=f"top, left, bottom and right {', '.join(f'{edge:g}' for edge in boxes.values[place].tolist())}",
            expected="four numbers",
            hint="mend the annotations, or leave the object out",
        )
    return boxes
