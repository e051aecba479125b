"""Other sizes for images with objects on them, as TensorFlow's object detection API computes them.

uint8 stays uint8: pixels are rounded, where the reference keeps fractions. Floats are not rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch

from lockstep.checks import Checked, OneOf, PositiveFloat, PositiveInt, check_least_and_most
from lockstep.errors import DataError
from lockstep.images.augment import Image, Int64s, decoded, images_of, name_of, sides_of
from lockstep.images.decode import AS_STORED, EncodedImage
from lockstep.images.moves import move
from lockstep.images.objects import Fields, move_objects
from lockstep.images.resizing import ANTIALIASED, LEGACY_METHODS, METHODS, resized
from lockstep.randomness import Draws

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RandomImageScale(Checked):
    """Enlarge or shrink each image, its aspect kept: random_image_scale."""

    min_scale_ratio: PositiveFloat = 0.5
    """The least factor of height and width."""
    max_scale_ratio: PositiveFloat = 2.0
    """The most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least_and_most(self, "min_scale_ratio", "max_scale_ratio")

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images decoded and resized: a list of images of several sizes."""
        images = images_of(batch, "image", self)
        spread = self.max_scale_ratio - self.min_scale_ratio
        factor = self.min_scale_ratio + draws.uniform("RandomImageScale image factor") * spread
        sizes = (sides_of(images).astype(np.float32) * factor.astype(np.float32)[:, None]).astype(np.int64)
        return resize_each(batch, images, sizes, ["bilinear"] * len(images), self, align_corners=True)


@dataclass(frozen=True)
class RandomResizeMethod(Checked):
    """Resize each image to one size, by one of TensorFlow's four methods, each as often: random_resize_method."""

    target_height: PositiveInt
    """Of the result, in pixels."""
    target_width: PositiveInt

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images decoded and resized, in one tensor."""
        chosen = draws.integers("RandomResizeMethod image method", 0, len(LEGACY_METHODS))
        methods = [LEGACY_METHODS[number] for number in chosen]
        return resize_alike(batch, (self.target_height, self.target_width), methods, self)


@dataclass(frozen=True)
class ResizeImage(Checked):
    """Resize each image to one size, without regard to its aspect: resize_image."""

    new_height: PositiveInt = 600
    """Of the result, in pixels."""
    new_width: PositiveInt = 1024
    method: Annotated[str, OneOf(METHODS)] = "bilinear"
    """"bilinear", "nearest", "bicubic" or "area" as TensorFlow 1 computes them, which alias; or "antialiased"."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images decoded and resized, in one tensor; nothing is drawn."""
        methods = [self.method] * len(images_of(batch, "image", self))
        return resize_alike(batch, (self.new_height, self.new_width), methods, self)


@dataclass(frozen=True)
class ResizeToMinDimension(Checked):
    """Enlarge each image whose short side is less than this, its aspect kept: resize_to_min_dimension."""

    min_dimension: PositiveInt = 600
    """The least pixels of the short side."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its small images decoded and enlarged; nothing is drawn."""
        images = images_of(batch, "image", self)
        sides = sides_of(images).astype(np.float32)
        short = sides.min(1, initial=np.inf)
        sizes = (sides * (np.maximum(short, np.float32(self.min_dimension)) / short)[:, None]).astype(np.int64)
        return resize_each(batch, images, sizes, ["bilinear"] * len(images), self, align_corners=True)


def check_sizes(images: Sequence[Image], sizes: Int64s, wanted_by: object) -> None:
    """Refuse sizes of images, shape (batch, 2), without a pixel, or that take too much memory."""
    for image, (height, width) in zip(images, sizes.tolist(), strict=True):
        most = (image.decoding if isinstance(image, EncodedImage) else AS_STORED).max_pixels
        if not 0 < height * width <= most:
            rows, columns = sides_of([image])[0]
            raise DataError(
                f"{name_of(image)} is too {'large' if height * width else 'small'} for {type(wanted_by).__name__}.",
                given=f"{rows} rows and {columns} columns, which would become {height} and {width}",
                expected=f"from 1 to {most} pixels",
                hint="leave it out of the data, or resize it before",
            )


def resize_alike(batch: Fields, size: tuple[int, int], methods: Sequence[str], wanted_by: object) -> Fields:
    """Resize images to one size, in one tensor of shape (batch, channels, *size)."""
    images = images_of(batch, "image", wanted_by)
    result = resize_each(batch, images, np.tile(size, (len(images), 1)), methods, wanted_by)
    return {**result, "image": stacked(result["image"], size)}


def stacked(images: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
    """Stack images of one size, also in a batch without examples."""
    return torch.stack([*images]) if images else torch.empty(0, 3, *size, dtype=torch.uint8)


def resize_each(
    batch: Fields,
    images: Sequence[Image],
    sizes: Int64s,
    methods: Sequence[str],
    wanted_by: object,
    *,
    align_corners: bool = False,
) -> Fields:
    """Resize each image to its size, shape (batch, 2), and take the objects with it."""
    check_sizes(images, sizes, wanted_by)
    targets = sizes.tolist()
    moves = (
        move(side, to=target, half_pixel_centers=method == ANTIALIASED, align_corners=align_corners)
        for side, target, method in zip(sides_of(images).tolist(), targets, methods, strict=True)
    )
    pixels = [
        resized(decoded(image), height, width, method, align_corners=align_corners)
        for image, (height, width), method in zip(images, targets, methods, strict=True)
    ]
    return {**move_objects(batch, moves), "image": pixels}
