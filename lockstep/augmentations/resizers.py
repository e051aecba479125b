"""The last step before a detector: images of one size, or at least of sizes within bounds.

Names, fields and sizes are those of TensorFlow's object detection API. uint8 stays uint8: pixels are rounded, where it
keeps fractions. The objects go with their images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from lockstep.augmentations.joining import Colours
from lockstep.augmentations.padding import pad_images
from lockstep.augmentations.scaling import resize_alike, resize_each, stacked
from lockstep.checks import Checked, OneOf, PositiveInt
from lockstep.errors import InputError
from lockstep.images.augment import images_of, sides_of
from lockstep.images.resizing import METHODS

if TYPE_CHECKING:
    from lockstep.randomness import Draws

_Method = Annotated[str, OneOf(METHODS)]


@dataclass(frozen=True)
class FixedShapeResizer(Checked):
    """All of each image, resized to one height and width without regard to its aspect."""

    height: PositiveInt = 300
    """Of the result, in pixels."""
    width: PositiveInt = 300
    resize_method: _Method = "bilinear"
    """"bilinear", "nearest", "bicubic" or "area" as TensorFlow 1 computes them, which alias; or "antialiased"."""

    has_one_shape: ClassVar[bool] = True
    """Whether all results have the same height and width."""

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of an image that stands for all, in pixels."""
        return self.height, self.width

    @property
    def shorter_side(self) -> str:
        """The field that says the shorter side of `shape`."""
        return "height" if self.height <= self.width else "width"

    @property
    def largest_shape(self) -> tuple[int, int]:
        """The most height and width of a batch of results."""
        return self.shape

    @property
    def largest(self) -> tuple[int, int]:
        """Height and width that no image exceeds, in pixels."""
        return self.shape

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of a resized image, whatever those given."""
        return self.shape

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images decoded and resized; nothing is drawn."""
        methods = [self.resize_method] * len(images_of(batch, "image", self))
        return resize_alike(batch, self.shape, methods, self)


@dataclass(frozen=True)
class KeepAspectRatioResizer(Checked):
    """Each image at the scale that makes its short side `min_dimension`, or its long side `max_dimension` if less.

    It is the API's resize_to_range. Without padding, images of different sizes remain: such batches are lists of
    tensors.
    """

    min_dimension: PositiveInt = 600
    """The short side of the result, in pixels."""
    max_dimension: PositiveInt = 1024
    """The most that its long side may be."""
    resize_method: _Method = "bilinear"
    """As for `FixedShapeResizer`."""
    pad_to_max_dimension: bool = False
    """Put each image into the upper left corner of a square of `max_dimension` pixels, so that all have one size."""
    per_channel_pad_value: Colours = (0, 0, 0)
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
    def has_one_shape(self) -> bool:
        """Whether all results have the same height and width."""
        return self.pad_to_max_dimension

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of an image that stands for all, in pixels: they have no other side below this one."""
        side = self.max_dimension if self.pad_to_max_dimension else self.min_dimension
        return side, side

    @property
    def shorter_side(self) -> str:
        """The field that says the sides of `shape`."""
        return "max_dimension" if self.pad_to_max_dimension else "min_dimension"

    @property
    def largest_shape(self) -> tuple[int, int]:
        """The most height and width of a batch of results: of wide and of tall images."""
        return self.max_dimension, self.max_dimension

    @property
    def largest(self) -> tuple[int, int]:
        """Height and width that no image exceeds, in pixels."""
        return self.max_dimension, self.max_dimension

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
        images = images_of(batch, "image", self)
        sizes = np.array([self.size_of(*side) for side in sides_of(images).tolist()], np.int64).reshape(-1, 2)
        batch = resize_each(batch, images, sizes, [self.resize_method] * len(images), self)
        if not self.pad_to_max_dimension:
            return batch
        targets, colours = np.full_like(sizes, self.max_dimension), [self.per_channel_pad_value] * len(images)
        batch = pad_images(batch, batch["image"], np.zeros_like(sizes), targets, colours, self)
        return {**batch, "image": stacked(batch["image"], self.shape)}
