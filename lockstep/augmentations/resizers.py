"""The last step before a detector: images of one size, or at least of sizes within bounds.

Names, fields and sizes are those of TensorFlow's object detection API. uint8 stays uint8: pixels are rounded, where it
keeps fractions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch

from lockstep.checks import Checked, Hint, OneOf, PositiveInt, Range
from lockstep.errors import InputError
from lockstep.images.augment import decoded, images_of, sides_of
from lockstep.images.moves import Region, move
from lockstep.images.objects import Fields, move_objects
from lockstep.images.resizing import ANTIALIASED, METHODS, resampled, resized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lockstep.randomness import Draws

_IMAGE = "image"
_Method = Annotated[str, OneOf(METHODS)]
_Colour = Annotated[int, Range(ge=0, le=255)]


@dataclass(frozen=True)
class FixedShapeResizer(Checked):
    """All of each image, resized to one height and width without regard to its aspect."""

    height: PositiveInt = 300
    """Of the result, in pixels."""
    width: PositiveInt = 300
    resize_method: _Method = "bilinear"
    """"bilinear", "nearest", "bicubic" or "area" as TensorFlow 1 computes them, which alias; or "antialiased"."""

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of an image that stands for all, in pixels."""
        return self.height, self.width

    def __call__(self, batch: Fields, draws: Draws) -> Fields:
        """Return the batch with its images decoded and resized, to one tensor; nothing is drawn."""
        images = images_of(batch, _IMAGE, self)
        pixels = torch.stack([_resized(decoded(image), self.shape, self.resize_method) for image in images])
        return {**_resized_objects(batch, [self.shape] * len(images), self.resize_method), _IMAGE: pixels}


@dataclass(frozen=True)
class KeepAspectRatioResizer(Checked):
    """Each image at the scale that makes its short side `min_dimension`, or its long side `max_dimension` if less.

    Without padding, images of different sizes remain: such batches are lists of tensors.
    """

    min_dimension: PositiveInt = 600
    """The short side of the result, in pixels."""
    max_dimension: PositiveInt = 1024
    """The most that its long side may be."""
    resize_method: _Method = "bilinear"
    """As for `FixedShapeResizer`."""
    pad_to_max_dimension: bool = False
    """Put each image into the upper left corner of a square of `max_dimension` pixels, so that all have one size."""
    per_channel_pad_value: Annotated[tuple[_Colour, _Colour, _Colour], Hint("write [0, 0, 0]")] = (0, 0, 0)
    """Red, green and blue of the padding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_dimension > self.max_dimension:
            raise InputError(
                "The short side of an image cannot be larger than its long side.",
                given=f"min_dimension={self.min_dimension}, max_dimension={self.max_dimension}",
                expected="a max_dimension of at least min_dimension",
                hint="exchange them, or raise max_dimension",
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of an image that stands for all, in pixels: they have no other side below this one."""
        side = self.max_dimension if self.pad_to_max_dimension else self.min_dimension
        return side, side

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Compute height and width of a resized image, before it is padded, from those given."""
        # In float32, and to even where it lies between: the rounding of the reference.
        sides = np.array([height, width], np.float32)
        large = np.round(sides * (np.float32(self.min_dimension) / sides.min()))
        small = np.round(sides * (np.float32(self.max_dimension) / sides.max()))
        rows, columns = (small if large.max() > self.max_dimension else large).clip(1).astype(int).tolist()
        return rows, columns

    def __call__(self, batch: Fields, draws: Draws) -> Fields:
        """Return the batch with its images decoded and resized: a list, or padded to one tensor; nothing is drawn."""
        images = images_of(batch, _IMAGE, self)
        sizes = [self.size_of(*sides) for sides in sides_of(images).tolist()]
        pixels = [_resized(decoded(image), size, self.resize_method) for image, size in zip(images, sizes, strict=True)]
        batch = _resized_objects(batch, sizes, self.resize_method)
        if not self.pad_to_max_dimension:
            return {**batch, _IMAGE: pixels}
        moves = [move(size, Region(0, 0, *self.shape)) for size in sizes]
        return {**move_objects(batch, moves), _IMAGE: self._padded(pixels)}

    def _padded(self, images: Sequence[Tensor]) -> Tensor:
        colour = torch.tensor(self.per_channel_pad_value, dtype=images[0].dtype)[:, None, None]
        padded = colour.repeat(len(images), 1, *self.shape)
        for row, image in zip(padded, images, strict=True):
            row[:, : image.shape[1], : image.shape[2]] = image
        return padded


def _resized_objects(batch: Fields, sizes: Sequence[tuple[int, int]], method: str) -> Fields:
    """Have the objects follow their images to these sizes."""
    before = sides_of(batch[_IMAGE]).tolist()
    at_middles = method == ANTIALIASED
    moves = [
        move((height, width), to=size, half_pixel_centers=at_middles)
        for (height, width), size in zip(before, sizes, strict=True)
    ]
    return move_objects(batch, moves)


def _resized(image: Tensor, size: tuple[int, int], method: str) -> Tensor:
    if image.dtype == torch.uint8 or tuple(image.shape[1:]) == size:
        return resized(image, *size, method)
    if method == ANTIALIASED:
        return torch.nn.functional.interpolate(image[None], size, mode="bilinear", antialias=True)[0]
    return resampled(image.contiguous(), *size, method)
