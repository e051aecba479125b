"""Random erasing: paint over a rectangle of some of the images.

Zhong et al., Random erasing data augmentation, 2017; rectangles by the law of torchvision's `RandomErasing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np
import torch

from lockstep.checks import Checked, OneOf, Probability
from lockstep.images.augment import Bounds, Shares, colour_images
from lockstep.images.normalisation import IMAGENET_MEAN
from lockstep.randomness import Draws, mix_arrays

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

_Floats: TypeAlias = "npt.NDArray[np.float64]"
_Int64s: TypeAlias = "npt.NDArray[np.int64]"

_ATTEMPTS = 10
_COLOURS = {"black": (0, 0, 0), "mean": tuple(round(255 * share) for share in IMAGENET_MEAN)}


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
    """"mean", the mean colour of ImageNet, which `normalised` makes 0; "black"; or "noise" of all values alike."""
    field: str = "image"

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        """Return the batch with some of its images changed; the images given stay as they are."""
        images = colour_images(batch, self.field, self).clone()
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

    def _rectangles(self, height: int, width: int, draws: Draws, column: str) -> _Int64s:
        """Draw top, left, height and width in pixels, shape (4, batch); all 0 where no attempt is within the image."""
        found = np.zeros((4, len(draws.positions)), dtype=np.int64)
        for attempt in range(_ATTEMPTS):
            area = _between(draws, f"{column} {attempt} area", *self.scale) * height * width
            ratio = np.exp(_between(draws, f"{column} {attempt} ratio", *np.log(self.ratio)))
            rows, columns = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
            taken = (found[2] == 0) & (rows < height) & (columns < width) & (rows > 0) & (columns > 0)
            top = np.floor(draws.uniform(f"{column} {attempt} top") * (height - rows + 1))
            left = np.floor(draws.uniform(f"{column} {attempt} left") * (width - columns + 1))
            found = np.where(taken, np.stack([top, left, rows, columns]).astype(np.int64), found)
        return found


def _between(draws: Draws, column: str, low: float, high: float) -> _Floats:
    return low + draws.uniform(column) * (high - low)


def _noise(key: int, count: int) -> Tensor:
    """Draw bytes that depend on the key alone."""
    hashes = mix_arrays(key, np.arange(-(-count // 8), dtype=np.uint64))
    return torch.from_numpy(hashes.astype("<u8").view(np.uint8)[:count])
