"""Random crops and padding of images with the objects on them, as TensorFlow's object detection API makes them.

Images that are not decoded yet stay so when they are cropped: no more than the window is decoded, when it is asked for.
The crops of SSD choose one of several operations for each image: Liu et al., SSD: Single shot multibox detector, 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch

from lockstep.augmentations.augment import Share, drawn_corners, drawn_shares
from lockstep.augmentations.crops import DistortedLaw, Windows, objects_in_pixels
from lockstep.augmentations.resizers import check_sizes, pad_images
from lockstep.checks import (
    Checked,
    Hint,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Range,
    check_least_and_most,
)
from lockstep.errors import DataError, InputError
from lockstep.images.fields import Image, cropped_image, decoded, images_of, name_of, sides_of
from lockstep.images.moves import Bools, Float64s, Int64s, Region, move
from lockstep.images.objects import Fields, as_ragged, move_objects, object_fields
from lockstep.ragged import Ragged
from lockstep.randomness import Draws

Colour = Annotated[float, Range(ge=0, le=255)]
Colours = Annotated[tuple[Colour, Colour, Colour], Hint("give red, green and blue from 0 to 255")]
Ratios = Annotated[tuple[PositiveFloat, PositiveFloat], Hint("give two ratios, of the height and of the width")]

_ATTEMPTS = 100

_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
_OVERLAP_OF_THE_SECOND_CROP = 0.3

_BLACK = (0.0,)


@dataclass(frozen=True)
class CropLimits(Checked):
    """Limits of the windows of `sample_distorted_bounding_box`, and of the objects that a window keeps."""

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
        return crop_at_random(batch, draws, [self], self)


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


def crop_at_random(batch: Fields, draws: Draws, limits: Sequence[CropLimits], wanted_by: object) -> Fields:
    """Cut a random window out of each image, as `RandomCropImage` does, by limits of which each is drawn as often."""
    images = images_of(batch, "image", wanted_by)
    height, width = sides_of(images).T
    table = np.array([[getattr(each, name) for name in CropLimits.__dataclass_fields__] for each in limits])
    chosen = _chosen(limits, draws, wanted_by)
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
    room = sides - np.stack([rows, columns], axis=1)
    top, left = drawn_corners(draws, f"{type(wanted_by).__name__} image offset", room).T
    everywhere = np.ones(len(images), dtype=bool)
    return cropped(batch, images, Windows(top, left, rows, columns), np.full(len(images), overlap), everywhere)


def cropped(batch: Fields, images: Sequence[Image], windows: Windows, overlap: Float64s, is_cropped: Bools) -> Fields:
    """Cut windows out of those images that are cropped, and take the objects with them.

    Windows lie within their images. An object is dropped if a smaller share of its box than `overlap`, of shape
    (batch,), is in the window.
    """
    _boxes_of(batch, images)
    rows = zip(sides_of(images).tolist(), windows.regions(), is_cropped, strict=True)
    moves = [move(sides, window if crops else None) for sides, window, crops in rows]
    moved = move_objects(batch, moves, min_overlap=torch.from_numpy(overlap), is_cut=torch.from_numpy(is_cropped))
    return {**moved, "image": [*map(cropped_image, images, moves)]}


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


@dataclass(frozen=True)
class RandomPadImage(Checked):
    """Put each image at a random place of a larger one: random_pad_image.

    The larger one's height and width are drawn from the least to below the most, each as often; a side that would be
    less than the image's is the image's.
    """

    min_image_height: PositiveInt | None = None
    """The least height, in pixels; None: that of the image."""
    min_image_width: PositiveInt | None = None
    """The least width, in pixels; None: that of the image."""
    max_image_height: PositiveInt | None = None
    """The most height, in pixels; None: twice that of the image."""
    max_image_width: PositiveInt | None = None
    """The most width, in pixels; None: twice that of the image."""
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
class RandomAbsolutePadImage(Checked):
    """Put each image at a random place of one that is larger by some pixels: random_absolute_pad_image."""

    max_height_padding: NonNegativeInt = 0
    """What the pixels that are added to the height stay below, each number as often; 0: none are added."""
    max_width_padding: NonNegativeInt = 0
    """What those that are added to the width stay below."""
    pad_color: Colours | None = None
    """Red, green and blue, 0 to 255; None: the mean colour of the image."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images padded: a list of images of several sizes."""
        images = images_of(batch, "image", self)
        sides = sides_of(images)
        most = sides + np.array([self.max_height_padding, self.max_width_padding])
        return _pad_at_random(batch, draws, sides, most, [self.pad_color] * len(images), self)


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
        return crop_and_pad(batch, draws, [self], self)


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
        return pad_to_aspect_ratio(batch, draws, self)


def crop_and_pad(batch: Fields, draws: Draws, operations: Sequence[RandomCropPadImage], wanted_by: object) -> Fields:
    """Crop and pad each image by one of several operations, each as often."""
    chosen = _chosen(operations, draws, wanted_by)
    sides = sides_of(images_of(batch, "image", wanted_by)).astype(np.float32)
    least, most = (
        (sides * np.array([getattr(each, name) for each in operations], np.float32)[chosen]).astype(np.int64)
        for name in ("min_padded_size_ratio", "max_padded_size_ratio")
    )
    crops = crop_at_random(batch, draws, operations, wanted_by)
    colours = [operations[number].pad_color for number in chosen]
    return _pad_at_random(crops, draws, least, most, colours, wanted_by)


def pad_to_aspect_ratio(
    batch: Fields, draws: Draws, option: RandomPadToAspectRatio | SsdRandomCropPadFixedAspectRatio
) -> Fields:
    """Pad each image to the aspect of an option, as `RandomPadToAspectRatio` does."""
    images = images_of(batch, "image", option)
    sides = sides_of(images)
    # In 32 bits, and to even where it lies between: the rounding of the reference.
    exact, wanted = sides.astype(np.float32), np.float32(option.aspect_ratio)
    height, width = exact.T
    rows = np.where(width / height <= wanted, height, width / wanted)
    columns = np.where(width / height >= wanted, width, height * wanted)
    fitting = np.stack([rows, columns], axis=1)
    bounds = option.min_padded_size_ratio, option.max_padded_size_ratio
    low, high = (np.maximum(exact * np.array(share, np.float32), fitting) / fitting for share in bounds)
    largest = high.min(1)
    smallest = np.minimum(low.max(1), largest)
    scale = smallest + draws.uniform(f"{type(option).__name__} image scale") * (largest - smallest)
    targets = np.maximum(np.rint(scale.astype(np.float32)[:, None] * fitting).astype(np.int64), sides)
    return pad_images(batch, images, np.zeros_like(targets), targets, [_BLACK] * len(images), option)


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
    size, offset = (
        drawn_shares(draws, f"{type(wanted_by).__name__} image {what}", "rows", "columns")
        for what in ("size", "offset")
    )
    targets = np.where(most > least, least + np.floor(size * (most - least)), most).astype(np.int64)
    corners = np.floor(offset * (targets - sides)).astype(np.int64)
    return pad_images(batch, images, corners, targets, colours, wanted_by)


@dataclass(frozen=True)
class SsdRandomCropOperation(CropLimits):
    """One of the operations that `SsdRandomCrop` and `SsdRandomCropPadFixedAspectRatio` choose from."""

    min_object_covered: Probability = 0.0
    min_aspect_ratio: PositiveFloat = 0.5
    max_aspect_ratio: PositiveFloat = 2.0
    overlap_thresh: Probability = 0.0


@dataclass(frozen=True)
class SsdRandomCropPadOperation(SsdRandomCropOperation):
    """One of the operations that `SsdRandomCropPad` chooses from."""

    min_padded_size_ratio: Ratios = (1.0, 1.0)
    """As `RandomCropPadImage` has them."""
    max_padded_size_ratio: Ratios = (2.0, 2.0)
    """The most height and width of the result, in those of the crop."""
    pad_color_r: Colour = 0.0
    """Red of the padding, 0 to 255; without operations it has the mean colour of the crop."""
    pad_color_g: Colour = 0.0
    """Green of the padding, 0 to 255."""
    pad_color_b: Colour = 0.0
    """Blue of the padding, 0 to 255."""


@dataclass(frozen=True)
class SsdRandomCropFixedAspectRatioOperation(Checked):
    """One of the operations that `SsdRandomCropFixedAspectRatio` chooses from: see `CropLimits`."""

    min_object_covered: Probability = 0.0
    """The least share of some object that the window covers."""
    min_area: Share = 0.1
    """The least share of the image that the window takes."""
    max_area: Share = 1.0
    """The largest share of the image that the window takes."""
    overlap_thresh: Probability = 0.0
    """Objects stay if the window covers at least this share of them."""
    random_coef: Probability = 0.0
    """Share of the images that are left as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.limits(1.0)

    def limits(self, aspect_ratio: float) -> CropLimits:
        """Return the limits of windows of this aspect."""
        areas = self.min_area, self.max_area
        return CropLimits(
            self.min_object_covered, aspect_ratio, aspect_ratio, *areas, self.overlap_thresh, self.random_coef
        )


@dataclass(frozen=True)
class SsdRandomCrop:
    """Crop each image by one of several operations, each as often: ssd_random_crop."""

    operations: tuple[SsdRandomCropOperation, ...] = ()
    """None: those of the paper, where a window shows a share of 0, 0.1, 0.3, 0.5, 0.7, 0.9 or all of an object, and
    keeps the objects that it shows as much of; an image in 7 stays as it is (0.15)."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images cropped: a list of images of several sizes."""
        return crop_at_random(batch, draws, self.operations or _operations(), self)


@dataclass(frozen=True)
class SsdRandomCropPad:
    """Crop and pad each image by one of several operations, each as often: ssd_random_crop_pad."""

    operations: tuple[SsdRandomCropPadOperation, ...] = ()
    """None: those of the paper without the share of 0; padded to as much as twice the height and the width of the image
    before, with the mean colour of the crop."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images cropped and padded: a list of images of several sizes."""
        operations = [_as_crop_pad(operation) for operation in self.operations] or [
            RandomCropPadImage(share, 0.5, 2.0, overlap_thresh=share, random_coef=0.15) for share in _SHARES
        ]
        return crop_and_pad(batch, draws, operations, self)


@dataclass(frozen=True)
class SsdRandomCropFixedAspectRatio(Checked):
    """Crop by one of several operations, by windows of one aspect: ssd_random_crop_fixed_aspect_ratio.

    Then all images, also those that have stayed as they were, are cropped as by `RandomCropToAspectRatio`.
    """

    operations: tuple[SsdRandomCropFixedAspectRatioOperation, ...] = ()
    """None: those of `SsdRandomCrop`."""
    aspect_ratio: PositiveFloat = 1.0
    """Width / height of a window. Without operations it is 1, whatever is given here, as in the reference."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images cropped: a list of images of several sizes."""
        ratio = self.aspect_ratio if self.operations else 1.0
        limits = [each.limits(ratio) for each in self.operations] or _operations(ratio, ratio)
        batch = crop_at_random(batch, draws, limits, self)
        return crop_to_aspect_ratio(batch, draws, ratio, _OVERLAP_OF_THE_SECOND_CROP, self)


@dataclass(frozen=True)
class SsdRandomCropPadFixedAspectRatio(Checked):
    """Crop as `SsdRandomCrop`, then pad as `RandomPadToAspectRatio`: ssd_random_crop_pad_fixed_aspect_ratio."""

    operations: tuple[SsdRandomCropOperation, ...] = ()
    """None: those of `SsdRandomCrop`."""
    aspect_ratio: PositiveFloat = 1.0
    """Width / height of the result."""
    min_padded_size_ratio: Ratios = (1.0, 1.0)
    """As `RandomPadToAspectRatio` has them, of the crop."""
    max_padded_size_ratio: Ratios = (2.0, 2.0)
    """The most height and width of the result, in those of the crop."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images cropped and padded: a list of images of several sizes."""
        batch = crop_at_random(batch, draws, self.operations or _operations(), self)
        return pad_to_aspect_ratio(batch, draws, self)


@dataclass(frozen=True)
class RandomSquareCropByScale(Checked):
    """Cut a square out of each image, black where it reaches out of it: random_square_crop_by_scale.

    Its side is the image's longer one times a scale, its centre any pixel that is not near the edge (Zhou et al.:
    Objects as Points, 2019). As in the reference the last row and column of the image are left out.
    """

    max_border: PositiveInt = 128
    """Pixels of an edge in which no centre lies; halved until they are less than half of the image."""
    scale_min: PositiveFloat = 0.6
    """The least scale."""
    scale_max: PositiveFloat = 1.3
    """The largest scale."""
    num_scales: PositiveInt = 8
    """So many scales, evenly from the least to the largest, are drawn as often."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least_and_most(self, "scale_min", "scale_max")

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images cut to squares: a list of images of several sizes."""
        images = images_of(batch, "image", self)
        sides = sides_of(images)
        scales = np.linspace(self.scale_min, self.scale_max, self.num_scales, dtype=np.float32)
        chosen = draws.integers("RandomSquareCropByScale image scale", 0, self.num_scales)
        size = (scales[chosen] * sides.max(1, initial=0).astype(np.float32)).astype(np.int64)
        border = self._border(sides)
        corners = border + drawn_corners(draws, "RandomSquareCropByScale image centre", sides - 2 * border)
        corners -= (size // 2)[:, None]
        return _cut_squares(batch, images, corners, size, self)

    def _border(self, sides: Int64s) -> Int64s:
        exact = np.ceil(np.log2(np.float32(2 * self.max_border) / sides.astype(np.float32)))
        border: Int64s = self.max_border // np.clip(np.exp2(exact), 1, self.max_border).astype(np.int64)
        return border


def _cut_squares(batch: Fields, images: Sequence[Image], corners: Int64s, size: Int64s, wanted_by: object) -> Fields:
    """Cut a square out of each image but for its last row and column, from corners that may lie outside of it."""
    check_sizes(images, np.stack([size, size], axis=1), wanted_by)
    squares = [Region(*row) for row in np.column_stack([corners, size, size]).tolist()]
    pixels = []
    for image, sides, square in zip(images, sides_of(images).tolist(), squares, strict=True):
        start = [max(edge, 0) for edge in square[:2]]
        end = [min(edge + square.height // 2 * 2, side - 1) for edge, side in zip(square[:2], sides, strict=True)]
        height, width = (max(stop - first, 0) for stop, first in zip(end, start, strict=True))
        inside = (
            decoded(image, Region(start[0], start[1], height, width)) if height and width else decoded(image)[:, :0, :0]
        )
        below, right = start[0] - square.top, start[1] - square.left
        canvas = inside.new_zeros(square.height, square.width, len(inside)).permute(2, 0, 1)
        canvas[:, below : below + inside.shape[1], right : right + inside.shape[2]] = inside
        pixels.append(canvas)
    return {**move_objects(batch, map(move, sides_of(images).tolist(), squares)), "image": pixels}


def _operations(least: float = 0.5, most: float = 2.0) -> list[CropLimits]:
    """Return the operations of the paper, for windows of a width / height between these."""
    return [CropLimits(share, least, most, overlap_thresh=share, random_coef=0.15) for share in (0.0, *_SHARES)]


def _as_crop_pad(operation: SsdRandomCropPadOperation) -> RandomCropPadImage:
    limits = {name: getattr(operation, name) for name in CropLimits.__dataclass_fields__}
    colour = operation.pad_color_r, operation.pad_color_g, operation.pad_color_b
    return RandomCropPadImage(
        **limits,
        min_padded_size_ratio=operation.min_padded_size_ratio,
        max_padded_size_ratio=operation.max_padded_size_ratio,
        pad_color=colour,
    )


def _chosen(operations: Sequence[CropLimits], draws: Draws, wanted_by: object) -> Int64s:
    """Draw the number of the operation for each image, shape (batch,)."""
    return draws.integers(f"{type(wanted_by).__name__} image operation", 0, len(operations))
