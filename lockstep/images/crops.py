"""Crops that keep the scale of an image, or at least its aspect: how slim's LeNet, CIFAR and VGG networks see images.

Each takes a field of `EncodedImage`s, or of decoded images of one size, to a tensor of shape (batch, channels, size,
size). What lies outside of an image is black. `Decode` takes all of each image.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import numpy as np
import torch

from lockstep.checks import Checked, NonNegativeInt, OneOf, PositiveInt, ordered
from lockstep.errors import DataError, InputError
from lockstep.images.augment import Image, decoded, images_of, name_of, sides_of
from lockstep.images.decode import AS_STORED, EncodedImage
from lockstep.images.moves import Move, Region, move
from lockstep.images.objects import Fields, move_objects
from lockstep.images.resizing import ANTIALIASED, METHODS, resized
from lockstep.randomness import Draws

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

Int64s: TypeAlias = "npt.NDArray[np.int64]"


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
        corners = _corners(room, draws, f"RandomCrop {self.field}") - self.padding
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
class ShortSideCrop(Checked):
    """Each image resized to a short side of so many pixels, and a part of it: how VGG networks see images."""

    size: PositiveInt
    """Height and width of the result, in pixels."""
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

    def __call__(self, batch: Fields, draws: Draws) -> Fields:
        """Return the batch with its images decoded, resized and cropped."""
        images = images_of(batch, self.field, self)
        column = f"ShortSideCrop {self.field}"
        short = draws.integers(f"{column} side", self.short_side[0], self.short_side[1] + 1)
        sides = scaled_sides(sides_of(images), short)
        self._check_pixels(images, sides, short)
        room = sides - self.size
        corners = room // 2 if self.place == "middle" else _corners(room, draws, column)
        places = np.concatenate([sides, corners], axis=1).tolist()
        crops = [self._crop(image, *place) for image, place in zip(images, places, strict=True)]
        resizes = (
            move(before, to=after, half_pixel_centers=self.resize == ANTIALIASED)
            for before, after in zip(sides_of(images).tolist(), sides.tolist(), strict=True)
        )
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

    def _crop(self, image: Image, height: int, width: int, top: int, left: int) -> Tensor:
        rows, columns = slice(top, top + self.size), slice(left, left + self.size)
        return resized(decoded(image), height, width, self.resize, rows, columns)


def scaled_sides(sides: Int64s, short: Int64s) -> Int64s:
    """Scale heights and widths, shape (batch, 2), so that the shorter has `short` pixels; rounded as slim does."""
    scale = short.astype(np.float32) / sides.min(1).astype(np.float32)
    scaled: Int64s = np.rint(sides.astype(np.float32) * scale[:, None]).astype(np.int64)
    return scaled


def _corners(room: Int64s, draws: Draws, column: str) -> Int64s:
    """Draw whole numbers from 0 to the room that there is, shape (batch, 2)."""
    shares = np.stack([draws.uniform(f"{column} top"), draws.uniform(f"{column} left")], axis=1)
    corners: Int64s = np.floor(shares * (room + 1)).astype(np.int64)
    return corners


def _cropped(batch: Fields, images: Sequence[Image], corners: Int64s, crop: CropOrPad | RandomCrop) -> Fields:
    """Cut a square from each image, and take the objects with it."""
    moves = _window_moves(sides_of(images), corners, crop.size)
    windows = _windows(map(decoded, images), corners, crop.size)
    return {**move_objects(batch, moves), crop.field: _stacked(windows, batch, crop)}


def _window_moves(sides: Int64s, corners: Int64s, size: int) -> Iterator[Move]:
    for before, (top, left) in zip(sides.tolist(), corners.tolist(), strict=True):
        yield move(before, Region(top, left, size, size))


def _windows(images: Iterable[Tensor], corners: Int64s, size: int) -> list[Tensor]:
    """Cut a square from each image, from its top and left corner on, which may lie outside of it."""
    places = corners.tolist()
    return [_window(image, top, left, size) for image, (top, left) in zip(images, places, strict=True)]


def _stacked(crops: list[Tensor], batch: Fields, crop: CropOrPad | RandomCrop | ShortSideCrop) -> Tensor:
    """Stack to shape (batch, channels, size, size), also in a batch without examples."""
    if crops:
        return torch.stack(crops)
    given = batch[crop.field]
    images = given if isinstance(given, torch.Tensor) else torch.empty(0, 3, 0, 0, dtype=torch.uint8)
    return images.new_empty(0, images.shape[1], crop.size, crop.size)


def _window(image: Tensor, top: int, left: int, size: int) -> Tensor:
    """Cut a square from an image, black where it lies outside."""
    height, width = image.shape[1:]
    window = image.new_zeros(len(image), size, size)
    (from_top, to_bottom), (from_left, to_right) = (
        (max(start, 0), min(start + size, length)) for start, length in ((top, height), (left, width))
    )
    inside = image[:, from_top:to_bottom, from_left:to_right]
    window[:, from_top - top : to_bottom - top, from_left - left : to_right - left] = inside
    return window
