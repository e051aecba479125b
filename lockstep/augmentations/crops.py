"""Crops to one size: some are resized to it without regard to their aspect, others keep the scale or the aspect.

A field of `EncodedImage`s, or of decoded images, becomes one tensor of shape (batch, channels, size, size). Images of
different sizes make no batch, so a crop, `Resize`, or a function of the user's own must come first among a loader's
augmentations. Those that keep the scale, or resize by the short side, are how slim's LeNet, CIFAR and VGG networks see
images: what lies outside of an image is black. `Decode` takes all of each image at its own size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from lockstep.augmentations.augment import Bounds, Share, Shares, drawn_between, drawn_corners
from lockstep.checks import Checked, NonNegativeFloat, NonNegativeInt, OneOf, PositiveInt, ordered
from lockstep.errors import DataError, InputError
from lockstep.images.decode import AS_STORED, EncodedImage
from lockstep.images.fields import Image, decoded, describe_field, draw_moved, images_of, name_of, sides_of
from lockstep.images.moves import Bools, Float64s, Int64s, Move, Region, move
from lockstep.images.objects import Fields, as_ragged, move_objects
from lockstep.images.resizing import ANTIALIASED, LEGACY_METHODS, METHODS, resized
from lockstep.ragged import Ragged
from lockstep.randomness import Draws

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

_Float32s: TypeAlias = "npt.NDArray[np.float32]"

RANDOM = "random"
_TORCHVISION_ATTEMPTS = 10
_FIRST_ATTEMPTS = 8


class ResizedPart(NamedTuple):
    """How one image becomes a square: a part of it is resized, and of that a part is taken."""

    region: Region
    """The part, in pixels of the image."""
    height: int
    """Height of the part once it is resized."""
    width: int
    top: int
    """First row of the square there."""
    left: int
    method: str
    """One of `METHODS`."""

    def of(self, image: Image, size: int) -> Tensor:
        """Decode and resize the part, and take the square of this height and width."""
        rows, columns = slice(self.top, self.top + size), slice(self.left, self.left + size)
        return resized(decoded(image, self.region), self.height, self.width, self.method, rows, columns)


class ResizingCrop(Checked, ABC):
    """Base of the crops that resize: `parts` says what becomes of each image, and it is made where images are read."""

    size: int
    """Height and width of the result, in pixels."""
    field: str

    @abstractmethod
    def parts(self, batch: Fields, draws: Draws) -> list[ResizedPart]:
        """Draw the part of each image."""

    def without_used(self, batch: Fields) -> Fields:
        """Return the batch without fields that the crop alone has use for."""
        return batch

    def __call__(self, batch: Fields, draws: Draws) -> Fields:
        """Return the batch with its images decoded, cropped and resized; the objects go with them."""
        images = images_of(batch, self.field, self, colour=True)
        parts = self.parts(batch, draws)
        pixels = torch.empty(len(images), 3, self.size, self.size, dtype=torch.uint8)
        for row, image, part in zip(pixels, images, parts, strict=True):
            row.copy_(part.of(image, self.size))
        moves = (
            move(sides, part.region, to=(self.size, self.size), half_pixel_centers=part.method == ANTIALIASED)
            for sides, part in zip(sides_of(images).tolist(), parts, strict=True)
        )
        return {**move_objects(self.without_used(batch), moves), self.field: pixels}

    def _whole_parts(self, regions: Sequence[Region], methods: str | Sequence[str]) -> list[ResizedPart]:
        """Return parts that are resized to squares, by one method or one each."""
        how = [methods] * len(regions) if isinstance(methods, str) else methods
        return [ResizedPart(part, self.size, self.size, 0, 0, by) for part, by in zip(regions, how, strict=True)]


@dataclass(frozen=True)
class DistortedCrop(ResizingCrop):
    """The random crop of the Inception systems, drawn by TensorFlow's `sample_distorted_bounding_box`.

    Those systems resize by "bilinear" in their fast mode, else by "random".
    """

    size: PositiveInt
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

    def parts(self, batch: Fields, draws: Draws) -> list[ResizedPart]:
        """Draw the part of each image, and how it is resized."""
        return self._whole_parts(self.windows(batch, draws).regions(), self._methods(draws))

    def without_used(self, batch: Fields) -> Fields:
        """Return the batch without the boxes, which are not those of the crop."""
        return {name: value for name, value in batch.items() if name != self.boxes_field}

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
class RandomResizedCrop(ResizingCrop):
    """A random crop by the law of torchvision's transform of this name."""

    size: PositiveInt
    scale: Shares = (0.08, 1.0)
    """The share of the image that a crop takes, at least and at most."""
    ratio: Bounds = (3 / 4, 4 / 3)
    """Width / height of a crop, at least and at most."""
    resize: Annotated[str, OneOf(METHODS)] = ANTIALIASED
    """"antialiased"; or "bilinear", "nearest", "bicubic" or "area" as TensorFlow 1 computes them, which alias."""
    field: str = "image"

    def parts(self, batch: Fields, draws: Draws) -> list[ResizedPart]:
        """Draw the part of each image."""
        return self._whole_parts(self.windows(batch, draws).regions(), self.resize)

    def windows(self, batch: Fields, draws: Draws) -> Windows:
        """Draw the part of each image that is taken."""
        height, width = sides_of(images_of(batch, self.field, self, colour=True)).T
        column = f"RandomResizedCrop {self.field}"
        return resized_crop_windows(height, width, self.scale, self.ratio, draws, column)


@dataclass(frozen=True)
class CentralCrop(ResizingCrop):
    """The middle of each image: how the Inception systems evaluate."""

    size: PositiveInt
    fraction: Share = 0.875
    """The share of each side, not of the area."""
    resize: Annotated[str, OneOf(METHODS)] = ANTIALIASED
    """"antialiased"; or "bilinear", "nearest", "bicubic" or "area" as TensorFlow 1 computes them, which alias."""
    field: str = "image"

    def parts(self, batch: Fields, draws: Draws) -> list[ResizedPart]:
        """Return the middle of each image; nothing is drawn."""
        sides = sides_of(images_of(batch, self.field, self, colour=True)).tolist()
        return self._whole_parts([central_region(rows, columns, self.fraction) for rows, columns in sides], self.resize)


@dataclass(frozen=True)
class Resize(ResizingCrop):
    """All of each image."""

    size: PositiveInt
    resize: Annotated[str, OneOf(METHODS)] = ANTIALIASED
    """"antialiased"; or "bilinear", "nearest", "bicubic" or "area" as TensorFlow 1 computes them, which alias."""
    field: str = "image"

    def parts(self, batch: Fields, draws: Draws) -> list[ResizedPart]:
        """Return all of each image; nothing is drawn."""
        sides = sides_of(images_of(batch, self.field, self, colour=True)).tolist()
        return self._whole_parts([Region(0, 0, *each) for each in sides], self.resize)


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

    min_object_covered: float | Float64s
    """As `DistortedCrop` has them, or one for each image, shape (batch,)."""
    aspect: tuple[float, float] | Float64s
    """Or shape (2, batch)."""
    area: tuple[float, float] | Float64s
    """Or shape (2, batch)."""
    max_attempts: int

    def windows(self, height: Int64s, width: Int64s, objects: Objects, draws: Draws, column: str) -> Windows:
        """Draw one window for each image, from columns whose names begin with this one.

        There is an object for each image at least; those smaller than a pixel are never shown.
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

    def _attempts(self, height: Int64s, width: Int64s, draws: Draws, columns: Sequence[str]) -> tuple[Windows, Bools]:
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


def _shows(windows: Windows, objects: Objects, share: float | Float64s) -> Bools:
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
        area = height * width * drawn_between(draws, f"{column} {attempt} area", *scale)
        aspect = np.exp(drawn_between(draws, f"{column} {attempt} aspect", *logarithms))
        columns, rows = _rounded(np.sqrt(area * aspect)), _rounded(np.sqrt(area / aspect))
        taken = ~found & (columns > 0) & (columns <= width) & (rows > 0) & (rows <= height)
        top = _floor(draws.uniform(f"{column} {attempt} top") * (height - rows + 1))
        left = _floor(draws.uniform(f"{column} {attempt} left") * (width - columns + 1))
        windows = _where(taken, Windows(top, left, rows, columns), windows)
        found |= taken
        if found.all():
            break
    return windows


def central_region(height: int, width: int, fraction: float) -> Region:
    """Return the middle of an image, this fraction of each side, as TensorFlow's `central_crop` rounds."""
    top, left = int((height - height * fraction) / 2), int((width - width * fraction) / 2)
    return Region(top, left, height - 2 * top, width - 2 * left)


def _where(rows: Bools, chosen: Windows, others: Windows) -> Windows:
    return Windows(*(np.where(rows, one, other) for one, other in zip(chosen, others, strict=True)))


def _floor(values: Float64s) -> Int64s:
    floor: Int64s = np.floor(values).astype(np.int64)
    return floor


def _rounded(values: _Float32s | Float64s) -> Int64s:
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


@dataclass(frozen=True)
class Decode:
    """All of each image at its own size: for models that take images of several sizes, as detectors do.

    The field becomes a list of uint8 tensors of shape (3, height, width). To have one size, crop or resize instead.
    """

    field: str = "image"

    def __call__(self, batch: Fields, draws: Draws) -> Fields:
        """Return the batch with its images decoded; nothing is drawn."""
        return {**batch, self.field: [decoded(image) for image in images_of(batch, self.field, self)]}


@dataclass(frozen=True)
class CropOrPad(Checked):
    """The middle of each image, with black around it where it is too small: `resize_image_with_crop_or_pad`."""

    size: PositiveInt
    """Height and width of the result, in pixels."""
    field: str = "image"

    def __call__(self, batch: Fields, draws: Draws) -> Fields:
        """Return the batch with its images decoded and cropped; nothing is drawn."""
        images = images_of(batch, self.field, self)
        sides = sides_of(images)
        # Towards 0: of an odd rest the larger part is cut off, or added, at the bottom and at the right.
        corners = np.trunc((sides - self.size) / 2).astype(np.int64)
        return _cropped(batch, images, corners, self)


@dataclass(frozen=True)
class RandomCrop(Checked):
    """A part of each image at a random place, once black is put around the image."""

    size: PositiveInt
    """Height and width of the result, in pixels."""
    padding: NonNegativeInt = 0
    """How much black is put at each side, in pixels."""
    field: str = "image"

    def __call__(self, batch: Fields, draws: Draws) -> Fields:
        """Return the batch with its images decoded and cropped."""
        images = images_of(batch, self.field, self)
        sides = sides_of(images)
        room = sides + 2 * self.padding - self.size
        if (room < 0).any():
            raise self._too_small(images, sides, int((room < 0).any(1).argmax()))
        corners = drawn_corners(draws, f"RandomCrop {self.field}", room) - self.padding
        return _cropped(batch, images, corners, self)

    def _too_small(self, images: Sequence[Image], sides: Int64s, row: int) -> DataError:
        height, width = sides[row]
        return DataError(
            f"{name_of(images[row])} is too small to be cropped.",
            given=f"{height} rows and {width} columns, with {self.padding} more at each side",
            expected=f"{self.size} rows and columns or more",
            hint="ask for a smaller size or more padding, or use CropOrPad",
        )


@dataclass(frozen=True)
class ShortSideCrop(ResizingCrop):
    """Each image resized to a short side of so many pixels, and a part of it: how VGG networks see images."""

    size: PositiveInt
    short_side: Annotated[tuple[PositiveInt, PositiveInt], ordered] = (256, 512)
    """The least and the most pixels of the short side; each whole number between them is drawn as often."""
    place: Literal["random", "middle"] = "random"
    resize: Annotated[str, OneOf(METHODS)] = ANTIALIASED
    """"antialiased"; or "bilinear", "nearest", "bicubic" or "area" as TensorFlow 1 computes them, which alias."""
    field: str = "image"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size > self.short_side[0]:
            raise InputError(
                "short_side is out of range.",
                given=f"short_side={self.short_side}, size={self.size}",
                expected="size <= least <= most",
                hint="give short_side=(least, most), neither below the size of the result",
            )

    def parts(self, batch: Fields, draws: Draws) -> list[ResizedPart]:
        """Draw the side of each image, and the place of the part."""
        images = images_of(batch, self.field, self)
        column = f"ShortSideCrop {self.field}"
        short = draws.integers(f"{column} side", self.short_side[0], self.short_side[1] + 1)
        before = sides_of(images)
        sides = scaled_sides(before, short)
        self._check_pixels(images, sides, short)
        room = sides - self.size
        corners = room // 2 if self.place == "middle" else drawn_corners(draws, column, room)
        rows = zip(before.tolist(), sides.tolist(), corners.tolist(), strict=True)
        return [
            ResizedPart(Region(0, 0, *all_of_it), height, width, top, left, self.resize)
            for all_of_it, (height, width), (top, left) in rows
        ]

    def __call__(self, batch: Fields, draws: Draws) -> Fields:
        """Return the batch with its images decoded, resized and cropped."""
        images = images_of(batch, self.field, self)
        parts = self.parts(batch, draws)
        crops = [part.of(image, self.size) for image, part in zip(images, parts, strict=True)]
        resizes = (
            move(part.region[2:], to=(part.height, part.width), half_pixel_centers=self.resize == ANTIALIASED)
            for part in parts
        )
        sides, corners = (np.array([part[i : i + 2] for part in parts], np.int64).reshape(-1, 2) for i in (1, 3))
        moved = move_objects(move_objects(batch, resizes), _window_moves(sides, corners, self.size))
        return {**moved, self.field: _stacked(crops, batch, self)}

    def _check_pixels(self, images: Sequence[Image], sides: Int64s, short: Int64s) -> None:
        """Refuse an image that takes too much memory once it is resized: if it is thin, a small file may."""
        for image, pixels, side in zip(images, sides.prod(1).tolist(), short.tolist(), strict=True):
            most = (image.decoding if isinstance(image, EncodedImage) else AS_STORED).max_pixels
            if pixels > most:
                height, width = sides_of([image])[0]
                raise DataError(
                    f"{name_of(image)} is too thin to be resized by its short side.",
                    given=f"{height} rows and {width} columns, for a short side of {side} pixels",
                    expected=f"at most {most} pixels once it is resized",
                    hint="leave it out of the data, or use Resize or RandomResizedCrop",
                )


def scaled_sides(sides: Int64s, short: Int64s) -> Int64s:
    """Scale heights and widths, shape (batch, 2), so that the shorter has `short` pixels; rounded as slim does."""
    scale = short.astype(np.float32) / sides.min(1).astype(np.float32)
    scaled: Int64s = np.rint(sides.astype(np.float32) * scale[:, None]).astype(np.int64)
    return scaled


def _cropped(batch: Fields, images: Sequence[Image], corners: Int64s, crop: CropOrPad | RandomCrop) -> Fields:
    moves = [*_window_moves(sides_of(images), corners, crop.size)]
    windows = []
    for pixels, by in zip(map(decoded, images), moves, strict=True):
        window = pixels.new_zeros(len(pixels), crop.size, crop.size)
        draw_moved(pixels, by, window)
        windows.append(window)
    return {**move_objects(batch, moves), crop.field: _stacked(windows, batch, crop)}


def _window_moves(sides: Int64s, corners: Int64s, size: int) -> Iterator[Move]:
    for before, (top, left) in zip(sides.tolist(), corners.tolist(), strict=True):
        yield move(before, Region(top, left, size, size))


def _stacked(crops: list[Tensor], batch: Fields, crop: CropOrPad | RandomCrop | ShortSideCrop) -> Tensor:
    """Stack to shape (batch, channels, size, size), also in a batch without examples."""
    if crops:
        return torch.stack(crops)
    given = batch[crop.field]
    images = given if isinstance(given, torch.Tensor) else torch.empty(0, 3, 0, 0, dtype=torch.uint8)
    return images.new_empty(0, images.shape[1], crop.size, crop.size)
