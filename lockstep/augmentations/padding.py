"""Padding around images with objects on them, as TensorFlow's object detection API puts it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch

from lockstep.augmentations.random_crops import CropLimits, crop_at_random
from lockstep.augmentations.scaling import check_sizes
from lockstep.checks import Checked, Hint, PositiveFloat, PositiveInt, Range
from lockstep.errors import InputError
from lockstep.images.augment import Image, Int64s, decoded, images_of, name_of, sides_of
from lockstep.images.moves import Region, move
from lockstep.images.objects import Fields, move_objects
from lockstep.randomness import Draws

if TYPE_CHECKING:
    from torch import Tensor

Colour = Annotated[float, Range(ge=0, le=255)]
Colours = Annotated[tuple[Colour, Colour, Colour], Hint("give red, green and blue from 0 to 255")]
Ratios = Annotated[tuple[PositiveFloat, PositiveFloat], Hint("give two ratios, of the height and of the width")]

_BLACK = (0.0,)


@dataclass(frozen=True)
class RandomPadImage(Checked):
    """Put each image at a random place of a larger one: random_pad_image.

    The larger one's height and width are drawn from the least to below the most, each as often; a side that would be
    less than the image's is the image's.
    """

    min_image_height: PositiveInt | None = None
    """In pixels; None: that of the image."""
    min_image_width: PositiveInt | None = None
    max_image_height: PositiveInt | None = None
    """In pixels; None: twice that of the image."""
    max_image_width: PositiveInt | None = None
    pad_color: Colours | None = None
    """Red, green and blue, 0 to 255; None: the mean colour of the image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for which in ("min", "max"):
            height, width = f"{which}_image_height", f"{which}_image_width"
            given = getattr(self, height), getattr(self, width)
            if given.count(None) == 1:
                raise InputError(
                    f"{height} and {width} go together.",
                    given=f"{height}={given[0]}, {width}={given[1]}",
                    expected="both or none",
                    hint="give the other one, too",
                )

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images padded: a list of images of several sizes."""
        images = images_of(batch, "image", self)
        sides = sides_of(images)
        least = _sides(self.min_image_height, self.min_image_width, sides)
        most = _sides(self.max_image_height, self.max_image_width, 2 * sides)
        return _pad_at_random(batch, draws, least, most, [self.pad_color] * len(images), self)


@dataclass(frozen=True)
class RandomCropPadImage(CropLimits):
    """Crop as `RandomCropImage`, then pad as `RandomPadImage`: random_crop_pad_image.

    The size of the result is drawn in proportion to that of the image before it was cropped.
    """

    min_padded_size_ratio: Ratios = (1.0, 1.0)
    """The least height and width of the result, as multiples of those of the image before."""
    max_padded_size_ratio: Ratios = (2.0, 2.0)
    """What height and width of the result stay below, as multiples of those of the image before."""
    pad_color: Colours | None = None
    """Red, green and blue, 0 to 255; None: the mean colour of the crop."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images cropped and padded: a list of images of several sizes."""
        return crop_and_pad(batch, draws, [self], np.zeros(len(draws.positions), np.int64), self)


@dataclass(frozen=True)
class RandomPadToAspectRatio(Checked):
    """Put black at the bottom and at the right of each image, to an aspect: random_pad_to_aspect_ratio."""

    aspect_ratio: PositiveFloat = 1.0
    """Width / height of the result."""
    min_padded_size_ratio: Ratios = (1.0, 1.0)
    """The least height and width of the result, as multiples of those of the image."""
    max_padded_size_ratio: Ratios = (2.0, 2.0)
    """The most. Where they do not allow the aspect, there is no more padding than it takes."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images padded: a list of images of several sizes."""
        ratios = self.min_padded_size_ratio, self.max_padded_size_ratio
        return pad_to_aspect_ratio(batch, draws, self.aspect_ratio, *ratios, self)


def crop_and_pad(
    batch: Fields, draws: Draws, operations: Sequence[RandomCropPadImage], chosen: Int64s, wanted_by: object
) -> Fields:
    """Crop and pad each image by one of several operations; `chosen` says by which, shape (batch,)."""
    sides = sides_of(images_of(batch, "image", wanted_by)).astype(np.float32)
    least, most = (
        (sides * np.array([getattr(each, name) for each in operations], np.float32)[chosen]).astype(np.int64)
        for name in ("min_padded_size_ratio", "max_padded_size_ratio")
    )
    crops = crop_at_random(batch, draws, operations, chosen, wanted_by)
    colours = [operations[number].pad_color for number in chosen]
    return _pad_at_random(crops, draws, least, most, colours, wanted_by)


def pad_to_aspect_ratio(
    batch: Fields,
    draws: Draws,
    ratio: float,
    least: tuple[float, float],
    most: tuple[float, float],
    wanted_by: object,
) -> Fields:
    """Pad each image to an aspect, as `RandomPadToAspectRatio` does."""
    images = images_of(batch, "image", wanted_by)
    sides = sides_of(images)
    # In 32 bits, and to even where it lies between: the rounding of the reference.
    exact, wanted = sides.astype(np.float32), np.float32(ratio)
    height, width = exact.T
    rows = np.where(width / height <= wanted, height, width / wanted)
    columns = np.where(width / height >= wanted, width, height * wanted)
    fitting = np.stack([rows, columns], axis=1)
    low, high = (np.maximum(exact * np.array(share, np.float32), fitting) / fitting for share in (least, most))
    largest = high.min(1)
    smallest = np.minimum(low.max(1), largest)
    scale = smallest + draws.uniform(f"{type(wanted_by).__name__} image scale") * (largest - smallest)
    targets = np.maximum(np.rint(scale.astype(np.float32)[:, None] * fitting).astype(np.int64), sides)
    return pad_images(batch, images, np.zeros_like(targets), targets, [_BLACK] * len(images), wanted_by)


def _sides(height: int | None, width: int | None, others: Int64s) -> Int64s:
    return others if height is None or width is None else np.broadcast_to(np.array([height, width]), others.shape)


def _pad_at_random(
    batch: Fields,
    draws: Draws,
    least: Int64s,
    most: Int64s,
    colours: Sequence[Sequence[float] | None],
    wanted_by: object,
) -> Fields:
    """Put each image at a random place of a larger one, of a size from `least` to below `most`, shape (batch, 2)."""
    images = images_of(batch, "image", wanted_by)
    sides = sides_of(images)
    least, most = np.maximum(least, sides), np.maximum(most, sides)
    drawn = {
        what: np.stack(
            [draws.uniform(f"{type(wanted_by).__name__} image {what} {axis}") for axis in ("rows", "columns")], 1
        )
        for what in ("size", "offset")
    }
    targets = np.where(most > least, least + np.floor(drawn["size"] * (most - least)), most).astype(np.int64)
    corners = np.floor(drawn["offset"] * (targets - sides)).astype(np.int64)
    return pad_images(batch, images, corners, targets, colours, wanted_by)


def pad_images(
    batch: Fields,
    images: Sequence[Image],
    corners: Int64s,
    targets: Int64s,
    colours: Sequence[Sequence[float] | None],
    wanted_by: object,
) -> Fields:
    """Put each image onto a canvas of its target size, from a corner on, and take the objects with it."""
    check_sizes(images, targets, wanted_by)
    sides = [tuple(side) for side in sides_of(images).tolist()]
    places = [
        Region(-top, -left, *target) for (top, left), target in zip(corners.tolist(), targets.tolist(), strict=True)
    ]
    moved = move_objects(batch, map(move, sides, places))
    # An image that gets no padding is not decoded for it.
    pixels = [
        image if place[2:] == side else _on_canvas(image, place, colour)
        for image, side, place, colour in zip(images, sides, places, colours, strict=True)
    ]
    return {**moved, "image": pixels}


def _on_canvas(image: Image, place: Region, colour: Sequence[float] | None) -> Tensor:
    pixels = decoded(image)
    values = (
        torch.tensor(colour, dtype=torch.float32) if colour is not None else pixels.mean((1, 2), dtype=torch.float32)
    )
    if len(values) not in (1, len(pixels)):
        raise InputError(
            f"{name_of(image)} has another number of channels than pad_color.",
            given=f"{len(pixels)} channels, pad_color={tuple(colour or ())}",
            expected="an image of three channels",
            hint="leave pad_color out, to pad with the mean of each channel",
        )
    values = values if pixels.is_floating_point() else values.round()
    # Channels last in memory, as decoded images most often are.
    canvas = values.to(pixels.dtype).expand(place.height, place.width, len(pixels)).contiguous().permute(2, 0, 1)
    height, width = pixels.shape[1:]
    canvas[:, -place.top : height - place.top, -place.left : width - place.left] = pixels
    return canvas
