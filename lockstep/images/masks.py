"""Masks of the objects on an image, not decoded yet: decoded, they take many times the memory.

They are image files, bits, or outlines as COCO's annotations have them. An annotation's `segmentation` is a list of
polygons, or runs of pixels column by column from the top of the first, the first run of zeros: as a list of lengths, or
as the string that `rleToString` of the COCO API makes of them.

Polygons are drawn as `rleFrPoly` in maskApi.c of the COCO API (https://github.com/cocodataset/cocoapi) draws them, so
that areas and overlaps are those of its evaluation: the corners are rounded to fifths of a pixel, the edges walked
point by point, and a pixel belongs to the polygon by where the edges cross the middle of its column. Only the walk
needs floating point; it is done in the same order of operations, and gives the same bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch

from lockstep.errors import DataError
from lockstep.images.decode import AS_STORED, Decoding
from lockstep.images.moves import Int64s
from lockstep.mask_runs import Flips, joined, lengths_in

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

Int32s: TypeAlias = "npt.NDArray[np.int32]"

_MOST_BYTES = 1 << 31

_FIFTHS = 5  # of a pixel: corners are whole numbers of these
_MOST = 2**31  # what int32 holds is below
_MOST_PIXELS = _MOST // _FIFTHS - 1  # which in fifths are below
_MOST_POINTS = 1 << 22  # of an outline, some 840,000 pixels long: 200 MB while it is walked
_FEWEST_NUMBERS = 6  # of a polygon: three corners


@dataclass(frozen=True, slots=True)
class PngMasks:
    """A mask for each object of an image, each the bytes of an image file of its own, most often a PNG."""

    data: tuple[bytes, ...] = field(repr=False)
    height: int
    """Height of each mask, in pixels."""
    width: int
    source: str
    """The file, or the record and its file, as errors name it."""
    decoding: Decoding = AS_STORED

    def __len__(self) -> int:
        return len(self.data)

    def decode(self) -> Tensor:
        """Decode to uint8 of shape (masks, height, width), 1 where a pixel is not black, else 0.

        Sizes are checked before memory is taken.
        """
        sources = [f"{self.source.removesuffix(',')}, mask {number}," for number in range(len(self.data))]
        for data, source in zip(self.data, sources, strict=True):
            self._check_size(self.decoding.size(data, source), source)
        _check_memory(len(self.data), self.height, self.width, self.source)
        masks = torch.empty(len(self.data), self.height, self.width, dtype=torch.uint8)
        for mask, data, source in zip(masks, self.data, sources, strict=True):
            red, green, blue = self.decoding.decode(data, source)
            torch.gt(red | green | blue, 0, out=mask)
        return masks

    def selected(self, places: Sequence[int]) -> PngMasks:
        """Keep the masks at these places alone."""
        return replace(self, data=tuple(self.data[place] for place in places))

    def _check_size(self, size: tuple[int, int], source: str) -> None:
        width, height = size
        if (height, width) != (self.height, self.width):
            raise DataError(
                f"{source} has not the size of its image.",
                given=f"a header that announces {width} x {height} pixels",
                expected=f"{self.width} x {self.height} pixels",
                hint="write masks of the whole image",
            )


@dataclass(frozen=True, slots=True)
class DenseMasks:
    """A mask for each object of an image, of one bit a pixel."""

    bits: bytes = field(repr=False)
    """Row after row, mask after mask, the first pixel in the highest bit; `dense_masks` packs them."""
    count: int
    height: int
    width: int

    def __len__(self) -> int:
        return self.count

    def decode(self) -> Tensor:
        """Decode to uint8 of shape (masks, height, width), 0 or 1."""
        pixels = np.unpackbits(np.frombuffer(self.bits, np.uint8), count=self.count * self.height * self.width)
        return torch.from_numpy(pixels).view(self.count, self.height, self.width)

    def selected(self, places: Sequence[int]) -> DenseMasks:
        """Keep the masks at these places alone."""
        bits = np.packbits(self.decode()[list(places)].numpy()).tobytes()
        return replace(self, bits=bits, count=len(places))


def dense_masks(values: npt.NDArray[np.float32], height: int, width: int) -> DenseMasks:
    """Pack masks from numbers above 0 where the objects are; any shape that holds masks x height x width values."""
    return DenseMasks(np.packbits(values > 0).tobytes(), values.size // (height * width), height, width)


@dataclass(frozen=True, slots=True)
class MaskOutlines:
    """The masks of the objects on one image; one entry of a field of a batch."""

    outlines: Sequence[Int32s] = field(repr=False)
    """As `packed_outline` makes them, one an object; an empty one is a mask of zeros."""
    height: int
    """Rows of the image."""
    width: int
    """Columns of the image."""
    source: str
    """The image, as errors name it."""

    def __len__(self) -> int:
        return len(self.outlines)

    def decode(self) -> Tensor:
        """Draw to uint8 of shape (objects, height, width), 0 or 1; in memory column after column.

        A pixel is 1 if it lies in any polygon of the object. The pixels are those that pycocotools gives.
        """
        _check_memory(len(self), self.height, self.width, self.source)
        masks = np.zeros((len(self), self.width * self.height), np.uint8)
        for mask, flips in zip(masks, self.flips(), strict=True):
            for start, stop in flips.reshape(-1, 2).tolist():
                mask[start:stop] = 1
        return torch.from_numpy(masks).view(len(self), self.width, self.height).transpose(1, 2)

    def flips(self) -> list[Flips]:
        """Draw to runs, without a pixel; see `lockstep.mask_runs`."""
        masks = []
        for index, outline in enumerate(self.outlines):
            try:
                masks.append(joined(list(self._part_flips(outline))))
            except ValueError as error:
                raise DataError(
                    f"The mask of object {index} on {self.source} cannot be drawn.",
                    given=str(error),
                    expected=f"an outline within {self.height} rows and {self.width} columns",
                    hint="repair its segmentation, or leave the object out",
                ) from error
        return masks

    def selected(self, places: Sequence[int]) -> MaskOutlines:
        """Keep the masks at these places alone."""
        return replace(self, outlines=[self.outlines[place] for place in places])

    def _part_flips(self, outline: Int32s) -> Iterator[Flips]:
        """Yield for each part where its mask changes between 0 and 1."""
        for is_polygon, values in _parts(outline):
            if is_polygon:
                yield _polygon_flips(values, self.height, self.width)
                continue
            height, width = values[:2].tolist()
            if (height, width) != (self.height, self.width):
                raise ValueError(f"runs for {height} rows and {width} columns")
            yield np.cumsum(values[2 : len(values) // 2 * 2], dtype=np.int64)  # not the end of zeros at the end


def _check_memory(count: int, height: int, width: int, source: str) -> None:
    """Refuse masks that take more than 2 GiB once they are decoded: a few bytes may ask for any number of pixels."""
    if count * height * width > _MOST_BYTES:
        raise DataError(
            f"The masks of {source.removesuffix(',')} are too large to be decoded.",
            given=f"{count} masks of {width} x {height} pixels: {count * height * width} bytes",
            expected=f"at most {_MOST_BYTES} bytes, one for each pixel of each mask",
            hint="leave it out, or cut the image into smaller ones",
        )


def packed_outline(segmentation: object) -> Int32s:
    """Pack a `segmentation` as numbers: for each part their count, then the numbers; a ValueError says what is wrong.

    Those of a polygon are x and y in fifths of a pixel. Those of runs are height, width and lengths; their count is
    negative. Polygons of fewer than three corners enclose nothing, and are left out.
    """
    if isinstance(segmentation, list):
        polygons = [_packed_polygon(numbers) for numbers in segmentation]
        return polygons[0] if len(polygons) == 1 else np.concatenate([np.empty(0, np.int32), *polygons])
    if isinstance(segmentation, dict):
        return _packed_runs(segmentation.get("size"), segmentation.get("counts"))
    raise ValueError(f"a {type(segmentation).__name__}, neither polygons nor runs")


class Outlines(NamedTuple):
    """The outlines of all objects, one after the other."""

    numbers: Int32s
    """As `packed_outline` makes them."""
    spans: Int64s
    """Start and stop of each object's numbers, (objects, 2)."""


def joined_outlines(packed: Sequence[bytes]) -> Outlines:
    """Join the outlines of all objects."""
    numbers = np.frombuffer(b"".join(packed), np.int32)
    ends = np.cumsum([len(each) for each in packed], dtype=np.int64) // numbers.itemsize
    return Outlines(numbers, np.stack([np.concatenate([[0], ends])[:-1], ends], axis=1).astype(np.int64))


def _packed_polygon(numbers: object) -> Int32s:
    if not isinstance(numbers, list) or len(numbers) % 2:
        raise ValueError(f"a polygon of {_described(numbers)}")
    if len(numbers) < _FEWEST_NUMBERS:
        return np.empty(0, np.int32)
    try:
        corners = np.frombuffer(array("d", numbers))
    except (TypeError, OverflowError):
        raise ValueError("a polygon of something else than numbers") from None
    is_real = np.abs(corners) < _MOST_PIXELS  # NaN is not
    if not is_real.all():
        raise ValueError(f"a polygon with a corner at {corners[is_real.argmin()]:g}")
    packed = np.empty(1 + len(corners), np.int32)
    packed[0] = len(corners)
    packed[1:] = corners * _FIFTHS + 0.5
    return packed


def _packed_runs(size: object, counts: object) -> Int32s:
    if not isinstance(size, list) or len(size) != 2 or not all(type(side) is int and 0 < side < _MOST for side in size):
        raise ValueError(f"runs of the size {size!r}")
    lengths = lengths_in(counts) if isinstance(counts, str) else _listed(counts)
    if lengths.min(initial=0) < 0 or lengths.max(initial=0) >= _MOST or lengths.sum() != size[0] * size[1]:
        raise ValueError(f"runs of {lengths.sum()} pixels for {size[0]} rows and {size[1]} columns")
    return np.concatenate([[-2 - len(lengths), *size], lengths]).astype(np.int32)


def _listed(counts: object) -> Int64s:
    if not isinstance(counts, list):
        raise ValueError(f"runs that are {_described(counts)}")
    try:
        return np.array(array("q", counts), np.int64)
    except (TypeError, OverflowError):
        raise ValueError("runs that are no whole numbers") from None


def _parts(outline: Int32s) -> Iterator[tuple[bool, Int32s]]:
    """Yield for each part whether it is a polygon, and its numbers."""
    place = 0
    while place < len(outline):
        count = int(outline[place])
        yield count > 0, outline[place + 1 : place + 1 + abs(count)]
        place += 1 + abs(count)


def _described(value: object) -> str:
    return f"{len(value)} numbers" if isinstance(value, list) else f"a {type(value).__name__}"


def _polygon_flips(corners: Int32s, height: int, width: int) -> Int64s:
    """Find where a polygon's mask changes between 0 and 1: pixels counted column by column, ascending, an even number.

    Corners are x and y in turn, in fifths of a pixel: three or more, of which any may lie outside of the image.
    """
    walk = _walk(corners[0::2].astype(np.int64), corners[1::2].astype(np.int64))
    moved = (walk.x[1:] != walk.x[:-1]) & (walk.edge[1:] == walk.edge[:-1])
    before = np.flatnonzero(moved)
    # The middle of column c lies between the fifths 5 c + 2 and 5 c + 3, and that of a row likewise.
    column, rest = np.divmod(np.minimum(walk.x[before], walk.x[before + 1]) - 2, _FIFTHS)
    row = (np.minimum(walk.y[before], walk.y[before + 1]) + 2) // _FIFTHS
    crossed = (rest == 0) & (column >= 0) & (column < width)
    return np.sort(column[crossed] * height + np.clip(row[crossed], 0, height))


class _Walk(NamedTuple):
    """Points along edges, in fifths of a pixel; each edge is walked by itself."""

    edge: Int64s
    x: Int64s
    y: Int64s


def _walk(x: Int64s, y: Int64s) -> _Walk:
    """Walk all points along a closed polygon's edges, each edge from its left or its upper end; refuse one too long."""
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
