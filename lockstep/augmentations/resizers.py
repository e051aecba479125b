"""The last step before a detector: images of one size, or at least of sizes within bounds.

Names, fields and sizes are those of TensorFlow's object detection API. uint8 stays uint8: pixels are rounded, where it
keeps fractions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch

from lockstep.checks import Checked, Hint, OneOf, PositiveInt, Range
from lockstep.errors import InputError
from lockstep.images.augment import check_no_locations, describe_field
from lockstep.images.decode import EncodedImage
from lockstep.images.resizing import METHODS, resized

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images decoded and resized; nothing is drawn."""
        pixels = [resized(image, *self.shape, self.resize_method) for image in _images(batch, self)]
        return {**batch, _IMAGE: torch.stack(pixels)}


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

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images decoded and resized; nothing is drawn."""
        pixels = [resized(image, *self.size_of(*image.shape[1:]), self.resize_method) for image in _images(batch, self)]
        if not self.pad_to_max_dimension:
            return {**batch, _IMAGE: pixels}
        check_no_locations(batch, self)
        return {**batch, _IMAGE: self._padded(pixels)}

    def _padded(self, images: Sequence[Tensor]) -> Tensor:
        colour = torch.tensor(self.per_channel_pad_value, dtype=images[0].dtype)[:, None, None]
        padded = colour.repeat(len(images), 1, *self.shape)
        for row, image in zip(padded, images, strict=True):
            row[:, : image.shape[1], : image.shape[2]] = image
        return padded


def _images(batch: dict[str, Any], wanted_by: object) -> Iterator[Tensor]:
    """Yield the image of each example, decoded if it is not."""
    for image in batch.get(_IMAGE, ()):
        pixels = image.decode() if isinstance(image, EncodedImage) else image
        if not isinstance(pixels, torch.Tensor) or pixels.ndim != 3:
            raise InputError(
                f"{type(wanted_by).__name__} finds no images in the field {_IMAGE!r}.",
                given=describe_field(batch, _IMAGE),
                expected="encoded images, or tensors of shape (3, height, width)",
                hint="give it what a reader of images reads",
            )
        yield pixels
