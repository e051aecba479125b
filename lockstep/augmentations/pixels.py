"""Options of TensorFlow's object detection API that change single pixels of an image, by their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch

from lockstep.augmentations.colours import IMAGE, WHITE, with_images
from lockstep.checks import Checked, NonNegativeFloat, NonNegativeInt, Probability, Range, ordered
from lockstep.images.augment import decoded, images_of
from lockstep.images.decode import EncodedImage
from lockstep.randomness import Draws, mix_arrays

if TYPE_CHECKING:
    from torch import Tensor


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
