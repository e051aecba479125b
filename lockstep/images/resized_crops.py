"""Crops that are resized to a square without regard to their aspect, and the laws by which random ones are drawn.

A field of `EncodedImage`s becomes uint8 of shape (batch, 3, size, size). Images of different sizes make no batch, so a
crop, `Resize`, or a function of the user's own must come first among a loader's augmentations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias

import numpy as np
import torch

from lockstep.checks import Checked, NonNegativeFloat, OneOf, PositiveInt
from lockstep.errors import DataError, InputError
from lockstep.images.augment import (
    Bounds,
    Image,
    Share,
    Shares,
    decoded,
    describe_field,
    images_of,
    name_of,
    sides_of,
)
from lockstep.images.moves import Region, move
from lockstep.images.objects import Fields, as_ragged, move_objects
from lockstep.images.resizing import ANTIALIASED, LEGACY_METHODS, METHODS, resized
from lockstep.ragged import Ragged
from lockstep.randomness import Draws

if TYPE_CHECKING:
    import numpy.typing as npt

Int64s: TypeAlias = "npt.NDArray[np.int64]"
_Float32s: TypeAlias = "npt.NDArray[np.float32]"
_Float64s: TypeAlias = "npt.NDArray[np.float64]"
_Bools: TypeAlias = "npt.NDArray[np.bool_]"

RANDOM = "random"
_TORCHVISION_ATTEMPTS = 10
_FIRST_ATTEMPTS = 8


@dataclass(frozen=True)
class DistortedCrop(Checked):
    """The random crop of the Inception systems, drawn by TensorFlow's `sample_distorted_bounding_box`.

    Those systems resize by "bilinear" in their fast mode, else by "random".
    """

    size: PositiveInt
    """Height and width of the result, in pixels."""
    min_object_covered: NonNegativeFloat = 0.1
    """The share of one of the boxes, or of the image where it has none, that a crop has to show."""
    aspect: Bounds = (0.75, 1.33)
    """Width / height of a crop, at least and at most."""
    area: Shares = (0.05, 1.0)
    """The share of the image that a crop takes, at least and at most."""
    max_attempts: PositiveInt = 100
    """After so many the whole image is taken."""
    boxes_field: str | None = None
    """The field of the boxes: for each image a float tensor of shape (boxes, 4) of top, left, bottom and right, as
    shares of its height and width. The returned batch has it no longer: the boxes are not those of the crop."""
    resize: Annotated[str, OneOf((*METHODS, RANDOM))] = ANTIALIASED
    """"antialiased"; "bilinear", "nearest", "bicubic" or "area" as TensorFlow 1 computes them, which alias; or
    "random": one of these four for each image."""
    field: str = "image"

    def __call__(self, batch: Fields, draws: Draws) -> Fields:
        """Return the batch with its images decoded, cropped and resized."""
        rest = {name: value for name, value in batch.items() if name != self.boxes_field}
        return _resized(rest, self.field, self.windows(batch, draws).regions(), self.size, self._methods(draws), self)

    def windows(self, batch: Fields, draws: Draws) -> Windows:
        """Draw the part of each image that is taken."""
        images = images_of(batch, self.field, self, colour=True)
        height, width = sides_of(images).T
        objects = objects_in_pixels(self._boxes(batch, images), images, height, width)
        law = DistortedLaw(self.min_object_covered, self.aspect, self.area, self.max_attempts)
        return law.windows(height, width, objects, draws, f"DistortedCrop {self.field}")

    def _methods(self, draws: Draws) -> str | Sequence[str]:
        if self.resize != RANDOM:
            return self.resize
        chosen = draws.integers(f"DistortedCrop {self.field} resize", 0, len(LEGACY_METHODS))
        return [LEGACY_METHODS[number] for number in chosen]

    def _boxes(self, batch: Fields, images: Sequence[Image]) -> Ragged:
        if self.boxes_field is None or not len(images):
            return Ragged(torch.empty(0, 4), torch.zeros(len(images), dtype=torch.int64))
        boxes = batch.get(self.boxes_field)
        if not isinstance(boxes, list | Ragged) or len(boxes) != len(images) or not all(map(_is_boxes, boxes)):
            raise InputError(
                f"DistortedCrop finds no boxes in the field {self.boxes_field!r}.",
                given=describe_field(batch, self.boxes_field),
                expected="a list with a tensor of shape (boxes, 4) for each image",
                hint="name the field of the boxes: boxes_field=..., or leave it out",
            )
        return as_ragged(boxes)


@dataclass(frozen=True)
class RandomResizedCrop(Checked):
    """A random crop by the law of torchvision's transform of this name."""

    size: PositiveInt
    """Height and width of the result, in pixels."""
    scale: Shares = (0.08, 1.0)
    """The share of the image that a crop takes, at least and at most."""
    ratio: Bounds = (3 / 4, 4 / 3)
    """Width / height of a crop, at least and at most."""
    resize: Annotated[str, OneOf(METHODS)] = ANTIALIASED
    """"antialiased"; or "bilinear", "nearest", "bicubic" or "area" as TensorFlow 1 computes them, which alias."""
    field: str = "image"

    def __call__(self, batch: Fields, draws: Draws) -> Fields:
        """Return the batch with its images decoded, cropped and resized."""
        regions = self.windows(batch, draws).regions()
        return _resized(batch, self.field, regions, self.size, self.resize, self)

    def windows(self, batch: Fields, draws: Draws) -> Windows:
        """Draw the part of each image that is taken."""
        height, width = sides_of(images_of(batch, self.field, self, colour=True)).T
        column = f"RandomResizedCrop {self.field}"
        return resized_crop_windows(height, width, self.scale, self.ratio, draws, column)


@dataclass(frozen=True)
class CentralCrop(Checked):
    """The middle of each image: how the Inception systems evaluate."""

    size: PositiveInt
    """Height and width of the result, in pixels."""
    fraction: Share = 0.875
    """Of each side, not of the area."""
    resize: Annotated[str, OneOf(METHODS)] = ANTIALIASED
    """"antialiased"; or "bilinear", "nearest", "bicubic" or "area" as TensorFlow 1 computes them, which alias."""
    field: str = "image"

    def __call__(self, batch: Fields, draws: Draws) -> Fields:
        """Return the batch with its images decoded, cropped and resized; nothing is drawn."""
        sides = sides_of(images_of(batch, self.field, self, colour=True)).tolist()
        regions = [central_region(height, width, self.fraction) for height, width in sides]
        return _resized(batch, self.field, regions, self.size, self.resize, self)


@dataclass(frozen=True)
class Resize(Checked):
    """All of each image."""

    size: PositiveInt
    """Height and width of the result, in pixels."""
    resize: Annotated[str, OneOf(METHODS)] = ANTIALIASED
    """"antialiased"; or "bilinear", "nearest", "bicubic" or "area" as TensorFlow 1 computes them, which alias."""
    field: str = "image"

    def __call__(self, batch: Fields, draws: Draws) -> Fields:
        """Return the batch with its images decoded and resized; nothing is drawn."""
        return _resized(batch, self.field, None, self.size, self.resize, self)


class Windows(NamedTuple):
    """Parts of the images of a batch, in pixels; each of shape (batch,)."""

    top: Int64s
    left: Int64s
    height: Int64s
    width: Int64s

    def regions(self) -> list[Region]:
        """Return the same parts, one for each image."""
        return [Region(*row) for row in np.stack(self, axis=1).tolist()]


class Objects(NamedTuple):
    """The boxes of all images of a batch, in whole pixels; each of shape (boxes,)."""

    owner: Int64s
    """The row of the image in the batch."""
    top: Int64s
    left: Int64s
    bottom: Int64s
    right: Int64s


@dataclass(frozen=True)
class DistortedLaw:
    """The law of TensorFlow's `sample_distorted_bounding_box`, its rounding included.

    An attempt draws an aspect (width / height), then a height among those that give an allowed area, then a place; the
    last row and column are never reached, unless the window is as long as the image. It is taken if the window shows
    the demanded share of one object or more. If no attempt is, the whole image is taken.
    """

    min_object_covered: float | _Float64s
    """As `DistortedCrop` has them, or one for each image, shape (batch,)."""
    aspect: tuple[float, float] | _Float64s
    """Or shape (2, batch)."""
    area: tuple[float, float] | _Float64s
    """Or shape (2, batch)."""
    max_attempts: int

    def windows(self, height: Int64s, width: Int64s, objects: Objects, draws: Draws, column: str) -> Windows:
        """Draw one window for each image.

        Args:
            height: of the images, shape (batch,).
            width: of the images, shape (batch,).
            objects: at least one for each image; those smaller than a pixel are never shown.
            draws: those of the batch.
            column: the beginning of the names of their columns.
        """
        windows = Windows(np.zeros_like(height), np.zeros_like(height), height, width)
        found = np.zeros(len(height), dtype=bool)
        done = 0
        while done < self.max_attempts and not found.all():
            # Several attempts at once: most images need few, and where one image needs all, they cost little more.
            some = range(done, min(2 * done + _FIRST_ATTEMPTS, self.max_attempts))
            tried, possible = self._attempts(height, width, draws, [f"{column} {attempt}" for attempt in some])
            good = possible & _shows(tried, objects, self.min_object_covered)
            first = good.argmax(0), np.arange(len(height))
            windows = _where(good.any(0) & ~found, Windows(*(side[first] for side in tried)), windows)
            found |= good.any(0)
            done = some.stop
        return windows

    def _attempts(self, height: Int64s, width: Int64s, draws: Draws, columns: Sequence[str]) -> tuple[Windows, _Bools]:
        """Draw windows of shape (attempts, batch), and say which of them are possible."""
        drawn = {
            name: draws.columns([f"{column} {name}" for column in columns])
            for name in ("aspect", "height", "top", "left")
        }
        aspect = (self.aspect[0] + drawn["aspect"] * (self.aspect[1] - self.aspect[0])).astype(np.float32)
        whole = np.float32(width), np.float32(height)
        low, high = (np.float32(share) * whole[0] * whole[1] for share in self.area)
        tallest = np.minimum(_tallest(width, _rounded(np.sqrt(high / aspect)), aspect), height)
        lowest = np.minimum(_rounded(np.sqrt(low / aspect)), tallest)
        rows = lowest + _floor(drawn["height"] * (tallest - lowest + 1))
        rows = rows + (rows * _width(rows, aspect) < low)
        rows = rows - (rows * _width(rows, aspect) > high)
        wide = _width(rows, aspect)
        area = rows * wide
        possible = (area >= low) & (area <= high) & (wide <= width) & (rows <= height) & (area > 0)
        top = _floor(drawn["top"] * (height - rows))
        left = _floor(drawn["left"] * (width - wide))
        return Windows(top, left, rows, wide), possible


def _tallest(width: Int64s, tallest: Int64s, aspect: _Float32s) -> Int64s:
    """Return the tallest window, no taller than given, that is no wider than the image."""
    # TensorFlow takes this amount off, lest a width of exactly half a pixel more is rounded up. Where 32 bits still
    # round it up, once in 50000 times, the attempt turns out to be impossible.
    fitting = ((width + 0.5 - np.float32(1e-7)) / aspect).astype(np.int64)
    return np.where(_width(tallest, aspect) > width, fitting, tallest)


def _width(height: Int64s, aspect: _Float32s) -> Int64s:
    return _rounded(height.astype(np.float32) * aspect)


def _shows(windows: Windows, objects: Objects, share: float | _Float64s) -> _Bools:
    """Say whether each window, of shape (attempts, batch), shows this share of one of the objects in its image."""
    attempts, batch = windows.top.shape
    top, left, height, width = (side[:, objects.owner] for side in windows)
    rows = np.minimum(top + height, objects.bottom) - np.maximum(top, objects.top)
    columns = np.minimum(left + width, objects.right) - np.maximum(left, objects.left)
    shown = np.maximum(rows, 0) * np.maximum(columns, 0)
    area = (objects.bottom - objects.top) * (objects.right - objects.left)
    share = share[objects.owner] if isinstance(share, np.ndarray) else share
    attempt, place = np.nonzero((area >= 1) & (shown >= share * area))
    counts = np.bincount(attempt * batch + objects.owner[place], minlength=attempts * batch)
    return counts.reshape(attempts, batch) > 0


def resized_crop_windows(
    height: Int64s, width: Int64s, scale: tuple[float, float], ratio: tuple[float, float], draws: Draws, column: str
) -> Windows:
    """Draw one window for each image, by the law of torchvision's `RandomResizedCrop`.

    An attempt draws a share of the area and the logarithm of an aspect (width / height). A window that does not fit
    into the image is drawn again, up to 10 times; then it is the largest central one of an allowed aspect.
    """
    rows = np.minimum(height, _rounded(width / ratio[0]))
    columns = np.minimum(width, _rounded(height * ratio[1]))
    windows = Windows((height - rows) // 2, (width - columns) // 2, rows, columns)
    found = np.zeros(len(height), dtype=bool)
    logarithms = float(np.log(ratio[0])), float(np.log(ratio[1]))
    for attempt in range(_TORCHVISION_ATTEMPTS):
        area = height * width * _between(draws, f"{column} {attempt} area", scale)
        aspect = np.exp(_between(draws, f"{column} {attempt} aspect", logarithms))
        columns, rows = _rounded(np.sqrt(area * aspect)), _rounded(np.sqrt(area / aspect))
        taken = ~found & (columns > 0) & (columns <= width) & (rows > 0) & (rows <= height)
        top = _below(draws, f"{column} {attempt} top", height - rows + 1)
        left = _below(draws, f"{column} {attempt} left", width - columns + 1)
        windows = _where(taken, Windows(top, left, rows, columns), windows)
        found |= taken
        if found.all():
            break
    return windows


def central_region(height: int, width: int, fraction: float) -> Region:
    """Return the middle of an image, this fraction of each side, as TensorFlow's `central_crop` rounds."""
    top, left = int((height - height * fraction) / 2), int((width - width * fraction) / 2)
    return Region(top, left, height - 2 * top, width - 2 * left)


def _where(rows: _Bools, chosen: Windows, others: Windows) -> Windows:
    return Windows(*(np.where(rows, one, other) for one, other in zip(chosen, others, strict=True)))


def _between(draws: Draws, column: str, bounds: tuple[float, float]) -> _Float64s:
    return bounds[0] + draws.uniform(column) * (bounds[1] - bounds[0])


def _below(draws: Draws, column: str, bound: Int64s) -> Int64s:
    """Draw whole numbers from 0 to below the bound; 0 where the bound is 0."""
    return _floor(draws.uniform(column) * bound)


def _floor(values: _Float64s) -> Int64s:
    floor: Int64s = np.floor(values).astype(np.int64)
    return floor


def _rounded(values: _Float32s | _Float64s) -> Int64s:
    rounded: Int64s = np.rint(values).astype(np.int64)
    return rounded


def _is_boxes(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 2 and value.shape[1] == 4


def objects_in_pixels(boxes: Ragged, images: Sequence[Image], height: Int64s, width: Int64s) -> Objects:
    """Convert boxes to pixels, rounded down; an image without any has a box over all of it."""
    empty = np.flatnonzero(boxes.lengths.numpy() == 0)
    owner = np.concatenate([boxes.owner.numpy(), empty])
    shares = np.concatenate([boxes.values.numpy(), np.tile([0, 0, 1, 1], (len(empty), 1))]).astype(np.float32)
    if not (inside := (shares >= 0) & (shares <= 1)).all():
        wrong = int((~inside).any(1).argmax())
        raise DataError(
            f"A box does not lie within {name_of(images[owner[wrong]])}.",
            given=f"top, left, bottom and right {', '.join(f'{share:g}' for share in shares[wrong])}",
            expected="shares of its height and width, from 0 to 1",
            hint="divide pixels by the size of the image, clip the boxes, or leave them out",
        )
    sides = np.stack([height, width, height, width], axis=1)[owner]
    return Objects(owner, *(shares * sides.astype(np.float32)).astype(np.int64).T)


def _resized(
    batch: Fields, field: str, regions: Sequence[Region] | None, size: int, methods: str | Sequence[str], crop: object
) -> Fields:
    """Decode, crop and resize images to uint8 of shape (batch, 3, size, size); the objects go with them."""
    images = images_of(batch, field, crop, colour=True)
    pixels = torch.empty(len(images), 3, size, size, dtype=torch.uint8)
    parts = [None] * len(images) if regions is None else regions
    how = [methods] * len(images) if isinstance(methods, str) else methods
    for row, image, region, method in zip(pixels, images, parts, how, strict=True):
        row.copy_(resized(decoded(image, region), size, size, method))
    moves = (
        move(sides, region, to=(size, size), half_pixel_centers=method == ANTIALIASED)
        for sides, region, method in zip(sides_of(images).tolist(), parts, how, strict=True)
    )
    return {**move_objects(batch, moves), field: pixels}
