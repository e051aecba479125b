"""Which part of an image a random crop takes: the laws of TensorFlow and of torchvision, over a whole batch at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.images.decode import Region
from lockstep.randomness import Draws

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

_TORCHVISION_ATTEMPTS = 10


class Windows(NamedTuple):
    """Parts of the images of a batch, in pixels; each of shape (batch,)."""

    top: Int64s
    left: Int64s
    height: Int64s
    width: Int64s

    def regions(self) -> list[Region]:
        """The same, one for each image."""
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
    last row and column are never reached, unless the window is as long as the image. It fits if the window shows the
    demanded share of one object or more. Without a fit the whole image is taken.
    """

    min_object_covered: float
    aspect: tuple[float, float]
    area: tuple[float, float]
    max_attempts: int

    def windows(self, height: Int64s, width: Int64s, objects: Objects, draws: Draws, column: str) -> Windows:
        """One window for each image.

        Args:
            height: of the images, shape (batch,).
            width: of the images, shape (batch,).
            objects: at least one for each image; those smaller than a pixel are never shown.
            draws: those of the batch.
            column: what the names of their columns begin with.
        """
        windows = _whole(height, width)
        found = np.zeros(len(height), dtype=bool)
        for attempt in range(self.max_attempts):
            tried, possible = self._attempt(height, width, draws, f"{column} {attempt}")
            fits = possible & ~found & _shows(tried, objects, self.min_object_covered)
            windows = _where(fits, tried, windows)
            found |= fits
            if found.all():
                break
        return windows

    def _attempt(self, height: Int64s, width: Int64s, draws: Draws, column: str) -> tuple[Windows, Bools]:
        """A window for each image, and whether it is one."""
        aspect = _between(draws, f"{column} aspect", self.aspect).astype(np.float32)
        low, high = (np.float32(share) * width.astype(np.float32) * height.astype(np.float32) for share in self.area)
        tallest = np.minimum(_tallest(width, _rounded(np.sqrt(high / aspect)), aspect), height)
        lowest = np.minimum(_rounded(np.sqrt(low / aspect)), tallest)
        rows = lowest + _below(draws, f"{column} height", tallest - lowest + 1)
        rows = rows + (rows * _width(rows, aspect) < low)
        rows = rows - (rows * _width(rows, aspect) > high)
        columns = _width(rows, aspect)
        area = rows * columns
        possible = (area >= low) & (area <= high) & (columns <= width) & (rows <= height) & (area > 0)
        top = _below(draws, f"{column} top", height - rows)
        left = _below(draws, f"{column} left", width - columns)
        return Windows(top, left, rows, columns), possible


def resized_crop_windows(
    height: Int64s,
    width: Int64s,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    draws: Draws,
    column: str,
) -> Windows:
    """One window for each image, by the law of torchvision's `RandomResizedCrop`.

    An attempt draws a share of the area and the logarithm of an aspect (width / height); a window that does not fit
    is drawn again, up to 10 times. Then it is the largest central one of an allowed aspect.
    """
    windows = _central(height, width, ratio)
    found = np.zeros(len(height), dtype=bool)
    logarithms = float(np.log(ratio[0])), float(np.log(ratio[1]))
    for attempt in range(_TORCHVISION_ATTEMPTS):
        area = height * width * _between(draws, f"{column} {attempt} area", scale)
        aspect = np.exp(_between(draws, f"{column} {attempt} aspect", logarithms))
        columns, rows = _rounded(np.sqrt(area * aspect)), _rounded(np.sqrt(area / aspect))
        fits = ~found & (columns > 0) & (columns <= width) & (rows > 0) & (rows <= height)
        top = _below(draws, f"{column} {attempt} top", height - rows + 1)
        left = _below(draws, f"{column} {attempt} left", width - columns + 1)
        windows = _where(fits, Windows(top, left, rows, columns), windows)
        found |= fits
        if found.all():
            break
    return windows


def central_region(height: int, width: int, fraction: float) -> Region:
    """The middle of an image, this fraction of each side (not of the area), as TensorFlow's `central_crop` rounds."""
    top, left = int((height - height * fraction) / 2), int((width - width * fraction) / 2)
    return Region(top, left, height - 2 * top, width - 2 * left)


def _tallest(width: Int64s, tallest: Int64s, aspect: Float32s) -> Int64s:
    """The tallest window, no taller than given, that is no wider than the image."""
    # TensorFlow takes this amount off, lest a width of exactly half a pixel more is rounded up. Where 32 bits still
    # round it up, once in 50000 times, the attempt turns out to be impossible.
    fitting = ((width + 0.5 - np.float32(1e-7)) / aspect).astype(np.int64)
    return np.where(_width(tallest, aspect) > width, fitting, tallest)


def _width(height: Int64s, aspect: Float32s) -> Int64s:
    return _rounded(height.astype(np.float32) * aspect)


def _shows(windows: Windows, objects: Objects, share: float) -> Bools:
    """Whether each window shows this share of one of the objects in its image."""
    top, left, height, width = (side[objects.owner] for side in windows)
    rows = np.minimum(top + height, objects.bottom) - np.maximum(top, objects.top)
    columns = np.minimum(left + width, objects.right) - np.maximum(left, objects.left)
    shown = np.maximum(rows, 0) * np.maximum(columns, 0)
    area = (objects.bottom - objects.top) * (objects.right - objects.left)
    enough = (area >= 1) & (shown >= share * area)
    return np.bincount(objects.owner[enough], minlength=len(windows.top)) > 0


def _whole(height: Int64s, width: Int64s) -> Windows:
    return Windows(np.zeros_like(height), np.zeros_like(height), height, width)


def _central(height: Int64s, width: Int64s, ratio: tuple[float, float]) -> Windows:
    rows = np.minimum(height, _rounded(width / ratio[0]))
    columns = np.minimum(width, _rounded(height * ratio[1]))
    return Windows((height - rows) // 2, (width - columns) // 2, rows, columns)


def _where(rows: Bools, chosen: Windows, others: Windows) -> Windows:
    return Windows(*(np.where(rows, one, other) for one, other in zip(chosen, others, strict=True)))


def _between(draws: Draws, column: str, bounds: tuple[float, float]) -> npt.NDArray[np.float64]:
    return bounds[0] + draws.uniform(column) * (bounds[1] - bounds[0])


def _below(draws: Draws, column: str, bound: Int64s) -> Int64s:
    """A whole number from 0 to below the bound; 0 where the bound is 0."""
    return np.floor(draws.uniform(column) * bound).astype(np.int64)


def _rounded(values: npt.NDArray[np.float32] | npt.NDArray[np.float64]) -> Int64s:
    rounded: Int64s = np.rint(values).astype(np.int64)
    return rounded
