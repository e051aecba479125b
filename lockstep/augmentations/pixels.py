"""Augmentations that change single pixels of an image by their place: noise, and parts that are painted over.

`RandomErasing`: Zhong et al., Random erasing data augmentation, 2017; rectangles by the law of torchvision's transform
of this name. The others are options of TensorFlow's object detection API.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch

from lockstep.augmentations.augment import Bounds, Shares, drawn_between
from lockstep.augmentations.colours import IMAGE, WHITE, with_images
from lockstep.checks import Checked, NonNegativeFloat, NonNegativeInt, OneOf, Probability, Range, ordered
from lockstep.images.decode import EncodedImage
from lockstep.images.fields import decoded, image_tensor, images_of
from lockstep.images.moves import Int64s
from lockstep.images.normalisation import IMAGENET_MEAN
from lockstep.randomness import Draws, mix_arrays

if TYPE_CHECKING:
    from torch import Tensor

_ATTEMPTS = 10
_COLOURS = {"black": (0, 0, 0), "mean": tuple(round(255 * share) for share in IMAGENET_MEAN)}


@dataclass(frozen=True)
class RandomPixelValueScale(Checked):
    """Multiply each value of an image by a factor of its own: random_pixel_value_scale.

    Images become float32, 0 to 255.
    """

    minval: NonNegativeFloat = 0.9
    """The least factor."""
    maxval: NonNegativeFloat = 1.1
    """The largest factor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ordered("(minval, maxval)", (self.minval, self.maxval))

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images decoded and changed."""
        keys = draws.integers(f"RandomPixelValueScale {IMAGE} key", 0, 2**53).tolist()
        images = zip(images_of(batch, IMAGE, self), keys, strict=True)
        return with_images(batch, [self._scaled(decoded(image), key) for image, key in images])

    def _scaled(self, image: Tensor, key: int) -> Tensor:
        factors = _uniform(key, image.numel()).view(image.shape).mul_(self.maxval - self.minval).add_(self.minval)
        return factors.mul_(image).clamp_(0, WHITE)


def _uniform(key: int, count: int) -> Tensor:
    """Draw float32 numbers in [0, 1) that depend on the key alone: shape (count,)."""
    hashes = mix_arrays(key, np.arange(-(-count // 2), dtype=np.uint64))  # each makes two
    return torch.from_numpy((hashes.astype("<u8").view("<u4")[:count] >> 8).astype(np.float32)).mul_(2.0**-24)


@dataclass(frozen=True)
class RandomBlackPatches(Checked):
    """Paint black squares over an image, wherever there are objects: random_black_patches."""

    max_black_patches: NonNegativeInt = 10
    """How many there are at most."""
    probability: Probability = 0.5
    """The probability of each of them."""
    size_to_image_ratio: Annotated[float, Range(ge=0, le=1)] = 0.1
    """The side of a square, as a share of the shorter side of the image."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with its images decoded and painted over; those given stay as they are."""
        given = images_of(batch, IMAGE, self)
        images = [image.decode() if isinstance(image, EncodedImage) else image.clone() for image in given]
        for patch in range(self.max_black_patches):
            column = f"RandomBlackPatches {IMAGE} {patch}"
            top, left = draws.uniform(f"{column} top"), draws.uniform(f"{column} left")
            for row in np.flatnonzero(draws.uniform(column) <= self.probability).tolist():
                self._paint(images[row], top[row], left[row])
        return with_images(batch, images)

    def _paint(self, image: Tensor, top: float, left: float) -> None:
        """Paint a square black, which begins at shares of the room that it has."""
        height, width = image.shape[1:]
        # In 32 bits, as the reference computes them.
        ratio, rest = np.float32(self.size_to_image_ratio), np.float32(1 - self.size_to_image_ratio)
        side = int(np.float32(min(height, width)) * ratio)
        first_row = int(np.float32(top) * rest * np.float32(height))
        first_column = int(np.float32(left) * rest * np.float32(width))
        image[:, first_row : first_row + side, first_column : first_column + side] = 0


@dataclass(frozen=True)
class RandomErasing(Checked):
    """Paint over a rectangle of some of the images.

    The field holds decoded images: uint8 of shape (batch, 3, height, width). Colours that change later change the
    rectangle too.
    """

    p: Probability = 0.5
    """The probability that an image loses a rectangle."""
    scale: Shares = (0.02, 0.33)
    """The share of the image that a rectangle takes, at least and at most."""
    ratio: Bounds = (0.3, 3.3)
    """Height / width of a rectangle, at least and at most."""
    fill: Annotated[str, OneOf((*_COLOURS, "noise"))] = "mean"
    """"mean", the mean colour of ImageNet, which `normalize` makes 0; "black"; or "noise" of all values alike."""
    field: str = "image"
    """The field of a batch that holds the images."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with some of its images changed; the images given stay as they are."""
        images = image_tensor(batch, self.field, self, colour=True).clone()
        column = f"RandomErasing {self.field}"
        rectangles = self._rectangles(images.shape[2], images.shape[3], draws, column)
        erased = (draws.uniform(column) < self.p) & (rectangles[2] > 0)
        keys = draws.integers(f"{column} noise", 0, 2**53)
        for row in np.flatnonzero(erased).tolist():
            top, left, height, width = rectangles[:, row].tolist()
            part = images[row, :, top : top + height, left : left + width]
            part.copy_(self._paint(part, int(keys[row])))
        return {**batch, self.field: images}

    def _paint(self, part: Tensor, key: int) -> Tensor:
        if self.fill == "noise":
            return _noise(key, part.numel()).view_as(part)
        return torch.tensor(_COLOURS[self.fill], dtype=torch.uint8)[:, None, None]

    def _rectangles(self, height: int, width: int, draws: Draws, column: str) -> Int64s:
        """Draw top, left, height and width in pixels, shape (4, batch); all 0 where no attempt is within the image."""
        found = np.zeros((4, len(draws.positions)), dtype=np.int64)
        for attempt in range(_ATTEMPTS):
            area = drawn_between(draws, f"{column} {attempt} area", *self.scale) * height * width
            ratio = np.exp(drawn_between(draws, f"{column} {attempt} ratio", *np.log(self.ratio)))
            rows, columns = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
            taken = (found[2] == 0) & (rows < height) & (columns < width) & (rows > 0) & (columns > 0)
            top = np.floor(draws.uniform(f"{column} {attempt} top") * (height - rows + 1))
            left = np.floor(draws.uniform(f"{column} {attempt} left") * (width - columns + 1))
            found = np.where(taken, np.stack([top, left, rows, columns]).astype(np.int64), found)
        return found


def _noise(key: int, count: int) -> Tensor:
    """Draw bytes that depend on the key alone."""
    hashes = mix_arrays(key, np.arange(-(-count // 8), dtype=np.uint64))
    return torch.from_numpy(hashes.astype("<u8").view(np.uint8)[:count])
