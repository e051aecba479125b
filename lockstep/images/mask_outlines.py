"""Masks of the objects on an image, kept as COCO's annotations have them and drawn only when asked for.

An annotation's `segmentation` is a list of polygons, or runs of pixels column by column from the top of the first, the
first run of zeros: as a list of lengths, or as the string that `rleToString` of the COCO API makes of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import DataError
from lockstep.images.masks import check_memory
from lockstep.images.polygons import Int32s, Int64s, in_fifths, polygon_flips

_MOST = 2**31  # what int32 holds is below
_MOST_PIXELS = _MOST // 5 - 1  # which in fifths are below
_FEWEST_NUMBERS = 6  # of a polygon: three corners

# The string of runs: six bits a character, of which five are of the number and one says that it goes on.
_FIRST_CHARACTER = 48
_BITS, _VALUE, _SIGN, _MORE = 5, 0b01_1111, 0b01_0000, 0b10_0000
_MOST_CHARACTERS = 7  # of a number below 2**31 and its sign


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
        """The masks: uint8 of shape (objects, height, width), 0 or 1; in memory column after column.

        A pixel is 1 if it lies in any polygon of the object. The pixels are those that pycocotools gives.

        Raises:
            DataError: an outline belongs to an image of another size, or is too long to be real; or they take more than
                2 GiB.
        """
        check_memory(len(self), self.height, self.width, self.source)
        masks = np.zeros((len(self), self.width * self.height), np.uint8)
        for index, (mask, outline) in enumerate(zip(masks, self.outlines, strict=True)):
            try:
                for flips in self._flips(outline):
                    for start, stop in zip(flips[0::2].tolist(), flips[1::2].tolist(), strict=False):
                        mask[start:stop] = 1
            except ValueError as error:
                raise DataError(
                    f"The mask of object {index} on {self.source} cannot be drawn.",
                    given=str(error),
                    expected=f"an outline within {self.height} rows and {self.width} columns",
                    hint="repair its segmentation, or leave the object out",
                ) from error
        return torch.from_numpy(masks).view(len(self), self.width, self.height).transpose(1, 2)

    def _flips(self, outline: Int32s) -> Iterator[Int64s]:
        """Where the mask of each part changes between 0 and 1.

        Raises:
            ValueError: a part cannot be drawn on this image.
        """
        for is_polygon, values in _parts(outline):
            if is_polygon:
                yield polygon_flips(values, self.height, self.width)
                continue
            height, width = values[:2].tolist()
            if (height, width) != (self.height, self.width):
                raise ValueError(f"runs for {height} rows and {width} columns")
            yield np.cumsum(values[2:], dtype=np.int64)


def packed_outline(segmentation: object) -> Int32s:
    """A `segmentation` as numbers, part after part: how many they are, and they themselves.

    Of a polygon x and y in fifths of a pixel. Of runs height, width and lengths; how many is then negative. Polygons
    of fewer than three corners enclose nothing, and are left out.

    Raises:
        ValueError: it is none, in words that say why.
    """
    if isinstance(segmentation, list):
        polygons = [_packed_polygon(numbers) for numbers in segmentation]
        return polygons[0] if len(polygons) == 1 else np.concatenate([np.empty(0, np.int32), *polygons])
    if isinstance(segmentation, dict):
        return _packed_runs(segmentation.get("size"), segmentation.get("counts"))
    raise ValueError(f"a {type(segmentation).__name__}, neither polygons nor runs")


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
    packed[1:] = in_fifths(corners)
    return packed


def _packed_runs(size: object, counts: object) -> Int32s:
    if not isinstance(size, list) or len(size) != 2 or not all(type(side) is int and 0 < side < _MOST for side in size):
        raise ValueError(f"runs of the size {size!r}")
    lengths = _decompressed(counts) if isinstance(counts, str) else _listed(counts)
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


def _decompressed(text: str) -> Int64s:
    """The lengths in a string of runs: from the fourth on, it has the difference from the one before the last."""
    codes = np.frombuffer(text.encode(errors="surrogatepass"), np.uint8).astype(np.int64) - _FIRST_CHARACTER
    last = np.flatnonzero(codes & _MORE == 0)
    if codes.min(initial=0) < 0 or codes.max(initial=0) > _MORE | _VALUE or len(codes) != last.max(initial=-1) + 1:
        raise ValueError("runs in a string that is damaged or cut short")
    if not len(codes):
        return codes
    first = np.concatenate([[0], last[:-1] + 1])
    num_characters = last - first + 1
    if num_characters.max() > _MOST_CHARACTERS:
        raise ValueError("runs in a string that is damaged")
    shift = _BITS * (np.arange(len(codes)) - np.repeat(first, num_characters))
    lengths: Int64s = np.add.reduceat((codes & _VALUE) << shift, first)
    lengths -= np.where(codes[last] & _SIGN, 1 << _BITS * num_characters, 0)
    lengths[1::2] = np.cumsum(lengths[1::2])
    lengths[2::2] = np.cumsum(lengths[2::2])
    return lengths


def _parts(outline: Int32s) -> Iterator[tuple[bool, Int32s]]:
    """Whether each part is a polygon, and its numbers."""
    place = 0
    while place < len(outline):
        count = int(outline[place])
        yield count > 0, outline[place + 1 : place + 1 + abs(count)]
        place += 1 + abs(count)


def _described(value: object) -> str:
    return f"{len(value)} numbers" if isinstance(value, list) else f"a {type(value).__name__}"
