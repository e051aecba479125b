"""Shears, shifts and turns of one image: each pixel of the result is the nearest one of the image, black outside of it.

They are those of torchvision: shears keep the corner at the top left, turns keep the middle and are anticlockwise. A
place that is as near to one pixel as to another may be read from the other one there.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Floats = npt.NDArray[np.float64]


def sheared_sideways(image: Tensor, slope: float) -> Tensor:
    """Move each row of an image to the left by the slope times its distance from the top.

    Args:
        image: uint8 of shape (channels, height, width), as for all of these functions.
        slope: columns per row.
    """
    rows, columns = _grid(image)
    return _read(image, rows, columns + slope * (rows + 0.5))


def sheared_upwards(image: Tensor, slope: float) -> Tensor:
    """Move each column of an image up by the slope times its distance from the left side, in rows per column."""
    rows, columns = _grid(image)
    return _read(image, rows + slope * (columns + 0.5), columns)


def shifted_right(image: Tensor, pixels: float) -> Tensor:
    """Move an image to the right, by whole pixels: the number is rounded towards 0."""
    shifted, by = torch.zeros_like(image), int(pixels)
    width = image.shape[2]
    shifted[:, :, max(by, 0) : max(width + by, 0)] = image[:, :, max(-by, 0) : max(width - by, 0)]
    return shifted


def shifted_down(image: Tensor, pixels: float) -> Tensor:
    """Move an image down, by whole pixels: the number is rounded towards 0."""
    return shifted_right(image.transpose(1, 2), pixels).transpose(1, 2)


def turned(image: Tensor, degrees: float) -> Tensor:
    """Turn an image about its middle, anticlockwise."""
    rows, columns = _grid(image)
    middle_row, middle_column = (image.shape[1] - 1) / 2, (image.shape[2] - 1) / 2
    down, right = rows - middle_row, columns - middle_column
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return _read(image, middle_row + sine * right + cosine * down, middle_column + cosine * right - sine * down)


def _grid(image: Tensor) -> tuple[_Floats, _Floats]:
    """The rows, shape (height, 1), and the columns, shape (1, width)."""
    height, width = image.shape[1:]
    return np.arange(height, dtype=np.float64)[:, None], np.arange(width, dtype=np.float64)[None]


def _read(image: Tensor, rows: _Floats, columns: _Floats) -> Tensor:
    """The pixels nearest to these places, which broadcast to (height, width)."""
    height, width = image.shape[1:]
    row, column = np.rint(rows).astype(np.int64), np.rint(columns).astype(np.int64)
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    places = torch.from_numpy(np.where(inside, row * width + column, 0)).view(1, -1)
    # To gather is several times as fast as to index.
    read = image.reshape(len(image), -1).gather(1, places.expand(len(image), -1)).view_as(image)
    return read.mul_(torch.from_numpy(inside))
