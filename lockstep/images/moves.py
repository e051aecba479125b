"""How an image is moved: one map an example moves its pixels, boxes, masks and keypoints together.

A `Move` cuts a part out of an image, turns and flips it, and resizes it. Its axes never mix, so all that it does to a
raster is said by two lists: which row to read for each row of the result, and which column. Moves of moves are lists of
lists: masks are read once, however often they were moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from lockstep.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

Int64s: TypeAlias = "npt.NDArray[np.int64]"
Float64s: TypeAlias = "npt.NDArray[np.float64]"
Bools: TypeAlias = "npt.NDArray[np.bool_]"

_OUTSIDE = -1  # of the image: black, and no object's


class Region(NamedTuple):
    """A part of an image, in pixels of the whole one."""

    top: int
    left: int
    height: int
    width: int

    def cut(self, pixels: Tensor) -> Tensor:
        """Cut the part out of a raster of shape (..., height, width)."""
        return pixels[..., self.top : self.top + self.height, self.left : self.left + self.width]


class Turn(NamedTuple):
    """One of the eight ways to lay an image down: rows and columns are exchanged first, then some are reversed."""

    exchange: bool = False
    flip_rows: bool = False
    flip_columns: bool = False

    @property
    def mirrors(self) -> bool:
        """Whether left and right are those of a mirror then, whichever way it is laid down."""
        return self.exchange ^ self.flip_rows ^ self.flip_columns

    def __call__(self, pixels: Tensor) -> Tensor:
        """Turn a raster of shape (..., height, width)."""
        turned = pixels.transpose(-2, -1) if self.exchange else pixels
        flips = [axis for axis, flip in ((-2, self.flip_rows), (-1, self.flip_columns)) if flip]
        return turned.flip(flips) if flips else turned

    def then(self, other: Turn) -> Turn:
        """Return the turn that does this one, then the other one."""
        rows, columns = (self.flip_columns, self.flip_rows) if other.exchange else (self.flip_rows, self.flip_columns)
        return Turn(self.exchange ^ other.exchange, rows ^ other.flip_rows, columns ^ other.flip_columns)

    def sides(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of an image of these sides once it is turned."""
        return (width, height) if self.exchange else (height, width)

    def region_before(self, region: Region, height: int, width: int) -> Region:
        """Return the part of an image of these sides that is this region of the turned image."""
        (top, left, rows, columns), (turned_height, turned_width) = region, self.sides(height, width)
        top = turned_height - top - rows if self.flip_rows else top
        left = turned_width - left - columns if self.flip_columns else left
        return Region(left, top, columns, rows) if self.exchange else Region(top, left, rows, columns)


AS_IT_IS = Turn()
MIRRORED = Turn(flip_columns=True)
UPSIDE_DOWN = Turn(flip_rows=True)
QUARTER_TURN = Turn(exchange=True, flip_rows=True)
"""Counter-clockwise, by 90 degrees."""


class Move(NamedTuple):
    """How one image is moved: a part of it is cut out, turned, then resized."""

    height: int
    """Height of the image before, in pixels."""
    width: int
    region: Region
    """The part, in pixels of the image before; it may reach out of the image."""
    turn: Turn
    to_height: int
    """Height of the image after, in pixels."""
    to_width: int
    half_pixel_centers: bool = True
    """Whether pixels are sampled at their middles; else at i * (from / to), as TensorFlow 1 does."""
    align_corners: bool = False
    """Whether they are sampled at i * (from - 1) / (to - 1) instead."""

    @property
    def stays_whole(self) -> bool:
        """Whether all of the image is still there."""
        top, left, height, width = self.region
        return top <= 0 and left <= 0 and top + height >= self.height and left + width >= self.width

    @property
    def zoom(self) -> float:
        """The factor by which areas in pixels grow."""
        return self.to_height * self.to_width / (self.region.height * self.region.width)


def move(
    sides: Sequence[int],
    region: Region | None = None,
    turn: Turn = AS_IT_IS,
    to: Sequence[int] | None = None,
    *,
    half_pixel_centers: bool = True,
    align_corners: bool = False,
) -> Move:
    """Make the `Move` of an image of these sides, height and width in pixels; `to` are those after it.

    By default it keeps all of the image, as it is laid, at the size of the turned part.
    """
    height, width = sides
    part = region or Region(0, 0, height, width)
    to_height, to_width = to or turn.sides(part.height, part.width)
    return Move(height, width, part, turn, to_height, to_width, half_pixel_centers, align_corners)


def moved_points(points: Tensor, owner: Tensor, moves: Sequence[Move]) -> Tensor:
    """Move points, float of shape (total, ..., 2) of y and x as shares of height and width; they may leave the image.

    They are those of all images of a batch: `owner` is the row of the image of each, shape (total,).
    """
    scale, shift, exchange = (torch.from_numpy(column)[owner] for column in _affine(moves))
    ones = [1] * (points.ndim - 2)
    moved = points.double() * scale.view(-1, *ones, 2) + shift.view(-1, *ones, 2)
    if exchange.any():
        moved = torch.where(exchange.view(-1, *ones, 1), moved.flip(-1), moved)
    return moved.to(points.dtype)


def moved_boxes(boxes: Tensor, owner: Tensor, moves: Sequence[Move]) -> Tensor:
    """Move boxes, float (total, 4) of top, left, bottom and right as shares; they may reach out of the image."""
    corners = moved_points(boxes.view(-1, 2, 2), owner, moves)
    return torch.cat([corners.amin(1), corners.amax(1)], dim=1)


def _affine(moves: Sequence[Move]) -> tuple[Float64s, Float64s, Bools]:
    """Return scale and shift of y and x, shape (batch, 2), and whether they are exchanged afterwards, (batch,)."""
    sides = np.array([each[:2] for each in moves], np.float64).reshape(-1, 2)
    regions = np.array([each.region for each in moves], np.float64).reshape(-1, 4)
    turns = np.array([each.turn for each in moves], np.bool_).reshape(-1, 3)
    exchange, flips = turns[:, 0], turns[:, 1:]
    flips = np.where(exchange[:, None], flips[:, ::-1], flips)
    scale, shift = sides / regions[:, 2:], -regions[:, :2] / regions[:, 2:]
    return np.where(flips, -scale, scale), np.where(flips, 1 - shift, shift), exchange


class Masks(Protocol):
    """The masks of the objects on one image, not decoded yet."""

    @property
    def height(self) -> int:
        """Height of each mask, in pixels."""
        ...

    @property
    def width(self) -> int:
        """Width of each mask, in pixels."""
        ...

    def __len__(self) -> int: ...

    def decode(self) -> Tensor:
        """Decode to uint8 of shape (masks, height, width), 0 or 1."""
        ...

    def selected(self, places: Sequence[int]) -> Masks:
        """Keep the masks at these places alone."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class MovedMasks:
    """Masks that were moved with their image, and are decoded and read once when they are asked for."""

    stored: Masks
    """As they were before any move."""
    exchange: bool = field(repr=False)
    """Rows and columns of the stored masks are exchanged first."""
    rows: Int64s = field(repr=False)
    """The row to read for each row of the result; -1 for none."""
    columns: Int64s = field(repr=False)
    """The column to read for each column of the result; -1 for none."""

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def height(self) -> int:
        """Height of each mask, in pixels."""
        return len(self.rows)

    @property
    def width(self) -> int:
        """Width of each mask, in pixels."""
        return len(self.columns)

    def decode(self) -> Tensor:
        """Decode and read: uint8 of shape (masks, height, width), 0 or 1."""
        stored = self.stored.decode()
        return _read(stored.transpose(1, 2) if self.exchange else stored, self.rows, self.columns)

    def selected(self, places: Sequence[int]) -> MovedMasks:
        """Keep the masks at these places alone."""
        return replace(self, stored=self.stored.selected(places))

    def moved(self, by: Move) -> MovedMasks:
        """Move them once more."""
        rows, columns = (self.columns, self.rows) if by.turn.exchange else (self.rows, self.columns)
        rows, columns = (_composed(*both) for both in zip((rows, columns), _places(by), strict=True))
        return MovedMasks(self.stored, self.exchange ^ by.turn.exchange, rows, columns)


def moved_masks(masks: Masks | Tensor, by: Move) -> MovedMasks | Tensor:
    """Move masks with their image; a tensor of shape (masks, height, width) at once, others when they are decoded.

    Raises:
        DataError: they are not of the size of their image.
    """
    sides = tuple(masks.shape[1:]) if isinstance(masks, torch.Tensor) else (masks.height, masks.width)
    if sides != by[:2]:
        raise DataError(
            "Masks are of another size than their image.",
            given=f"masks of {' x '.join(map(str, sides))} pixels, an image of {by.height} x {by.width}",
            expected="a mask as high and as wide as the image",
            hint="resize the masks, or leave them out",
        )
    if isinstance(masks, torch.Tensor):
        return _read(masks.transpose(1, 2) if by.turn.exchange else masks, *_places(by))
    if not isinstance(masks, MovedMasks):
        masks = MovedMasks(masks, False, np.arange(masks.height), np.arange(masks.width))
    return masks.moved(by)


def _places(by: Move) -> tuple[Int64s, Int64s]:
    """Return the row and the column of the image, exchanged if it is, to read for those of the result."""
    rows = _inside(by.region.top, by.region.height, by.height)
    columns = _inside(by.region.left, by.region.width, by.width)
    rows, columns = (columns, rows) if by.turn.exchange else (rows, columns)
    rows = rows[::-1] if by.turn.flip_rows else rows
    columns = columns[::-1] if by.turn.flip_columns else columns
    how = by.half_pixel_centers, by.align_corners
    return rows[nearest(len(rows), by.to_height, *how)], columns[nearest(len(columns), by.to_width, *how)]


def _inside(start: int, length: int, whole: int) -> Int64s:
    places = np.arange(start, start + length)
    return np.where((places >= 0) & (places < whole), places, _OUTSIDE)


def _composed(outer: Int64s, inner: Int64s) -> Int64s:
    """Look up places in places; what is outside stays outside."""
    return np.where(inner == _OUTSIDE, _OUTSIDE, outer[inner])


def nearest(length: int, to: int, half_pixel_centers: bool = True, align_corners: bool = False) -> Int64s:
    """Return for each pixel of a resized line the nearest pixel of the line."""
    if length == to:
        return np.arange(to)
    if align_corners and to > 1:
        at = np.arange(to, dtype=np.float32) * (np.float32(length - 1) / np.float32(to - 1))
        rounded: Int64s = np.floor(at + np.float32(0.5)).astype(np.int64)
        return rounded
    scale = np.float32(length) / np.float32(to)
    at = np.arange(to, dtype=np.float32) + np.float32(0.5 if half_pixel_centers else 0)
    places: Int64s = np.minimum(np.floor(at * scale).astype(np.int64), length - 1)
    return places


def _read(raster: Tensor, rows: Int64s, columns: Int64s) -> Tensor:
    """Read rows and columns of rasters, shape (any, height, width); what is outside is 0."""
    if raster.stride(1) < raster.stride(2):  # in memory column after column
        return _read(raster.transpose(1, 2), columns, rows).transpose(1, 2)
    for_rows, for_columns = np.flatnonzero(rows != _OUTSIDE), np.flatnonzero(columns != _OUTSIDE)
    # Whole rows first, since each of them stands together.
    read = raster.numpy()[:, _steps(rows[for_rows])][:, :, _steps(columns[for_columns])]
    if read.shape[1:] == (len(rows), len(columns)):
        return torch.from_numpy(read)
    result = raster.new_zeros(len(raster), len(rows), len(columns))
    if read.size:
        # What is outside lies at the edges: what is inside is one part of the result.
        inside = slice(for_rows[0], for_rows[-1] + 1), slice(for_columns[0], for_columns[-1] + 1)
        result[:, *inside] = torch.from_numpy(read)
    return result


def _steps(places: Int64s) -> Int64s | slice:
    """Return places as a slice if they follow one another: then nothing has to be copied."""
    if len(places) and (np.diff(places) == 1).all():  # neither resized nor reversed
        return slice(places[0], places[-1] + 1)
    return places
