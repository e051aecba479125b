"""Other sizes for images with objects on them: resized, or padded, as TensorFlow's object detection API does it.

uint8 stays uint8: pixels are rounded, where the reference keeps fractions. Floats are not rounded. The objects go with
their images. `FixedShapeResizer` and `KeepAspectRatioResizer` are the last step before a detector: images of one size,
or at least of sizes within bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import torch

from lockstep.augmentations.augment import drawn_between, drawn_shares
from lockstep.augmentations.joining import Colours
from lockstep.checks import Checked, OneOf, PositiveFloat, PositiveInt, check_least_and_most
from lockstep.errors import DataError, InputError
from lockstep.images.decode import AS_STORED, EncodedImage
from lockstep.images.fields import Image, decoded, images_of, name_of, sides_of
from lockstep.images.moves import Int64s, Region, move
from lockstep.images.objects import Fields, move_objects
from lockstep.images.resizing import ANTIALIASED, LEGACY_METHODS, METHODS, resized
from lockstep.randomness import Draws

if TYPE_CHECKING:
    from torch import Tensor

_Method = Annotated[str, OneOf(METHODS)]


@dataclass(frozen=True)
class FixedShapeResizer(Checked):
    """All of each image, resized to one height and width without regard to its aspect."""

    height: PositiveInt = 300
    """Height of the result, in pixels."""
    width: PositiveInt = 300
    """Width of the result, in pixels."""
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
    def largest(self) -> tuple[int, int]:
        """Height and width that no image exceeds, in pixels."""
        return self.shape

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of a resized image, whatever those given."""
        return self.shape

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images decoded and resized; nothing is drawn."""
        return resize_alike(batch, self.shape, self.resize_method, self)


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
    def largest(self) -> tuple[int, int]:
        """Height and width that no image exceeds, in pixels, be it wide or tall."""
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
        batch = resize_each(batch, images, sizes, self.resize_method, self)
        if not self.pad_to_max_dimension:
            return batch
        targets, colours = np.full_like(sizes, self.max_dimension), [self.per_channel_pad_value] * len(images)
        batch = pad_images(batch, batch["image"], np.zeros_like(sizes), targets, colours, self)
        return {**batch, "image": stacked(batch["image"], self.shape)}


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
        factor = drawn_between(draws, "RandomImageScale image factor", self.min_scale_ratio, self.max_scale_ratio)
        sizes = (sides_of(images).astype(np.float32) * factor.astype(np.float32)[:, None]).astype(np.int64)
        return resize_each(batch, images, sizes, "bilinear", self, align_corners=True)


@dataclass(frozen=True)
class RandomResizeMethod(Checked):
    """Resize each image to one size, by one of TensorFlow's four methods, each as often: random_resize_method."""

    target_height: PositiveInt
    """Height of the result, in pixels."""
    target_width: PositiveInt
    """Width of the result, in pixels."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images decoded and resized, in one tensor."""
        chosen = draws.integers("RandomResizeMethod image method", 0, len(LEGACY_METHODS))
        methods = [LEGACY_METHODS[number] for number in chosen]
        return resize_alike(batch, (self.target_height, self.target_width), methods, self)


@dataclass(frozen=True)
class ResizeImage(Checked):
    """Resize each image to one size, without regard to its aspect: resize_image."""

    new_height: PositiveInt = 600
    """Height of the result, in pixels."""
    new_width: PositiveInt = 1024
    """Width of the result, in pixels."""
    method: _Method = "bilinear"
    """"bilinear", "nearest", "bicubic" or "area" as TensorFlow 1 computes them, which alias; or "antialiased"."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images decoded and resized, in one tensor; nothing is drawn."""
        return resize_alike(batch, (self.new_height, self.new_width), self.method, self)


@dataclass(frozen=True)
class RandomScaleCropAndPadToSquare(Checked):
    """Resize each image by a random scale, its aspect kept, and make a square: random_scale_crop_and_pad_to_square.

    At scale 1 the longer side is that of the square. What is larger is cut at a random place, what is smaller gets
    black at the bottom and at the right (Tan et al.: EfficientDet, 2020).
    """

    output_size: PositiveInt = 512
    """Height and width of the square, in pixels."""
    scale_min: PositiveFloat = 0.1
    """The least scale."""
    scale_max: PositiveFloat = 2.0
    """The scales stay below this one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least_and_most(self, "scale_min", "scale_max")

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images decoded, resized and cut to squares, in one tensor."""
        images, size = images_of(batch, "image", self), self.output_size
        sides = sides_of(images)
        scale = drawn_between(draws, "RandomScaleCropAndPadToSquare image scale", self.scale_min, self.scale_max)
        exact = sides.astype(np.float32)
        shares = exact / exact.max(1, initial=1, keepdims=True)
        sizes = np.maximum(((scale.astype(np.float32) * np.float32(size))[:, None] * shares).astype(np.int64), 1)
        check_sizes(images, sizes, self)
        offsets = drawn_shares(draws, "RandomScaleCropAndPadToSquare image offset", "rows", "columns")
        corners = (np.maximum(sizes - size, 0) * offsets).astype(np.int64).tolist()
        pairs = [*zip(sides.tolist(), sizes.tolist(), strict=True)]
        moved = move_objects(batch, [move(side, to=to, half_pixel_centers=False) for side, to in pairs])
        squares = [move(to, Region(top, left, size, size)) for (_, to), (top, left) in zip(pairs, corners, strict=True)]
        moved, pixels = move_objects(moved, squares), []
        for image, (height, width), (top, left) in zip(images, sizes.tolist(), corners, strict=True):
            rows, columns = slice(top, top + size), slice(left, left + size)
            part = resized(decoded(image), height, width, "bilinear", rows, columns)
            pixels.append(part.new_zeros(len(part), size, size))
            pixels[-1][:, : part.shape[1], : part.shape[2]] = part
        return {**moved, "image": stacked(pixels, (size, size))}


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
        return resize_each(batch, images, sizes, "bilinear", self, align_corners=True)


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


def resize_alike(batch: Fields, size: tuple[int, int], method: str | Sequence[str], wanted_by: object) -> Fields:
    """Resize images to one size, in one tensor of shape (batch, channels, *size); see `resize_each`."""
    images = images_of(batch, "image", wanted_by)
    result = resize_each(batch, images, np.tile(size, (len(images), 1)), method, wanted_by)
    return {**result, "image": stacked(result["image"], size)}


def stacked(images: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
    """Stack images of one size, also in a batch without examples."""
    return torch.stack([*images]) if images else torch.empty(0, 3, *size, dtype=torch.uint8)


def resize_each(
    batch: Fields,
    images: Sequence[Image],
    sizes: Int64s,
    method: str | Sequence[str],
    wanted_by: object,
    *,
    align_corners: bool = False,
) -> Fields:
    """Resize each image to its size, shape (batch, 2), by one method or by its own, and take the objects with it."""
    check_sizes(images, sizes, wanted_by)
    targets = sizes.tolist()
    methods = [method] * len(images) if isinstance(method, str) else method
    moves = (
        move(side, to=target, half_pixel_centers=method == ANTIALIASED, align_corners=align_corners)
        for side, target, method in zip(sides_of(images).tolist(), targets, methods, strict=True)
    )
    pixels = [
        resized(decoded(image), height, width, method, align_corners=align_corners)
        for image, (height, width), method in zip(images, targets, methods, strict=True)
    ]
    return {**move_objects(batch, moves), "image": pixels}


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
