"""Polygons drawn as COCO's own library draws them, so that areas and overlaps are those of its evaluation.

`rleFrPoly` in maskApi.c of the COCO API (https://github.com/cocodataset/cocoapi): the corners are rounded to fifths of
a pixel, the edges walked point by point, and a pixel belongs to the polygon by where the edges cross the middle of its
column. Only the walk needs floating point; it is done in the same order of operations, and gives the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_FIFTHS = 5  # of a pixel: corners are whole numbers of these
_MOST_POINTS = 1 << 22  # of an outline, some 840,000 pixels long: 200 MB while it is walked


class _Walk(NamedTuple):
    """Points along edges, in fifths of a pixel; each edge is walked by itself."""

    edge: Int64s
    x: Int64s
    y: Int64s


def in_fifths(pixels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Coordinates in fifths of a pixel, so that what is before the point is the rounded number."""
    return pixels * _FIFTHS + 0.5


def polygon_flips(corners: Int32s, height: int, width: int) -> Int64s:
    """Where a polygon's mask changes between 0 and 1, column by column from the top of the first: ascending, even many.

    Args:
        corners: x and y in turn, in fifths of a pixel; three corners or more, of which any may lie outside the image.
        height: rows of the image.
        width: columns of the image.

    Raises:
        ValueError: the outline is longer than any real one, and would take too much memory.
    """
    walk = _walk(corners[0::2].astype(np.int64), corners[1::2].astype(np.int64))
    moved = (walk.x[1:] != walk.x[:-1]) & (walk.edge[1:] == walk.edge[:-1])
    before = np.flatnonzero(moved)
    # The middle of column c lies between the fifths 5 c + 2 and 5 c + 3, and that of a row likewise.
    column, rest = np.divmod(np.minimum(walk.x[before], walk.x[before + 1]) - 2, _FIFTHS)
    row = (np.minimum(walk.y[before], walk.y[before + 1]) + 2) // _FIFTHS
    crossed = (rest == 0) & (column >= 0) & (column < width)
    return np.sort(column[crossed] * height + np.clip(row[crossed], 0, height))


def _walk(x: Int64s, y: Int64s) -> _Walk:
    """Every point along the closed polygon's edges, each edge from its left or its upper end."""
    next_x, next_y = np.roll(x, -1), np.roll(y, -1)
    flat = np.abs(next_x - x) >= np.abs(next_y - y)
    length = np.maximum(np.abs(next_x - x), np.abs(next_y - y))
    if (num_points := int((length + 1).sum())) > _MOST_POINTS:
        raise ValueError(f"a polygon {num_points // _FIFTHS} pixels long, more than {_MOST_POINTS // _FIFTHS}")
    turned = np.where(flat, x > next_x, y > next_y)
    left, right = np.where(turned, next_x, x), np.where(turned, x, next_x)
    top, bottom = np.where(turned, next_y, y), np.where(turned, y, next_y)
    along_from, across_from = np.where(flat, left, top), np.where(flat, top, left)
    slope = np.where(flat, bottom - top, right - left) / np.maximum(length, 1)

    edge = np.repeat(np.arange(len(x)), length + 1)
    step = np.arange(num_points) - (np.cumsum(length + 1) - length - 1)[edge]
    along = along_from[edge] + step
    across = (across_from[edge] + slope[edge] * step + 0.5).astype(np.int64)
    return _Walk(edge, np.where(flat[edge], along, across), np.where(flat[edge], across, along))
