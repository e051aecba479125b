"""Masks as runs: the places where their pixels, counted column by column, change between 0 and 1.

The flips of a mask are its runs of ones, each as its first pixel and the one after its last: ascending, an even number.
Areas and overlaps are whole numbers, and those of maskApi.c of the COCO API (https://github.com/cocodataset/cocoapi),
which walks along the runs of two masks at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

Flips: TypeAlias = "npt.NDArray[np.int64]"
Lengths: TypeAlias = "npt.NDArray[np.int64]"
"""Lengths of all runs, of zeros and of ones in turn, the first of zeros."""

# A text of lengths: six bits a character, of which five are of the number and one says that it goes on.
_FIRST_CHARACTER = 48
_BITS, _VALUE, _SIGN, _MORE = 5, 0b01_1111, 0b01_0000, 0b10_0000
_MOST_CHARACTERS = 7  # of a number below 2**31 and its sign


def flips_of_pixels(masks: npt.NDArray[np.uint8]) -> list[Flips]:
    """Find the flips of masks of shape (masks, height, width); a pixel that is not 0 counts as 1."""
    count, height, width = masks.shape
    size = width * height + 1
    pixels = np.zeros(count * size + 1, bool)  # a zero before each mask, and one after the last
    for start, mask in zip(range(1, len(pixels), size), masks, strict=True):
        np.not_equal(mask.T, 0, out=pixels[start : start + size - 1].reshape(width, height))
    places = np.flatnonzero(pixels[1:] != pixels[:-1])
    ends = np.searchsorted(places, np.arange(count + 1) * size)
    return [places[ends[row] : ends[row + 1]] - row * size for row in range(count)]


def pixels_in(text: str, height: int, width: int) -> npt.NDArray[np.uint8]:
    """Draw a mask from the text of its runs: shape (height, width), 0 or 1."""
    lengths = lengths_in(text)
    values = np.arange(len(lengths), dtype=np.uint8) % 2
    return np.repeat(values, lengths).reshape(width, height).T


def joined(parts: Sequence[Flips]) -> Flips:
    """Join the flips of several masks of one image: a pixel is 1 if it is in any of them."""
    if len(parts) == 1:
        return parts[0]
    places = np.concatenate([np.empty(0, np.int64), *(part[0::2] for part in parts), *(part[1::2] for part in parts)])
    change = np.repeat([1, -1], len(places) // 2)
    order = np.lexsort((-change, places))  # what begins where another ends goes on with it
    change = change[order]
    depth = np.cumsum(change)
    is_edge: npt.NDArray[np.bool_] = depth == (change > 0)
    return places[order][is_edge]


def area_of(flips: Flips) -> int:
    """Count the pixels that are 1."""
    return int((flips[1::2] - flips[0::2]).sum())


def intersections(masks: Sequence[Flips], other: Flips) -> Flips:
    """Count the pixels that each of these masks and one other mask of the same image have in common."""
    before = _pixels_before(np.concatenate([np.empty(0, np.int64), *masks]), other)
    up_to = np.concatenate([[0], np.cumsum(before[1::2] - before[0::2])])
    ends = np.cumsum([0, *(len(mask) // 2 for mask in masks)])
    common: Flips = np.diff(up_to[ends])
    return common


def _pixels_before(places: Flips, flips: Flips) -> Flips:
    """Count for each place the pixels before it that are 1."""
    num_flips = np.searchsorted(flips, places, side="right")
    # Runs that have ended count by their length, stop - start; of one that has not, only the start is among the flips.
    signs = np.tile([-1, 1], len(flips) // 2)
    ended = np.concatenate([[0], np.cumsum(signs * flips)])
    count: Flips = ended[num_flips] + num_flips % 2 * places
    return count


def runs_text(flips: Flips, num_pixels: int) -> str:
    """Write the runs of a mask as text, as `rleToString` of the COCO API does."""
    lengths = np.diff(flips, prepend=0, append=num_pixels)
    if not lengths[-1]:
        lengths = lengths[:-1]
    values = lengths.copy()
    values[3:] -= lengths[1:-2]
    bits = np.frexp(np.where(values < 0, ~values, values))[1] + 1  # with that of the sign
    last = (bits - 1) // _BITS
    place = np.arange(_MOST_CHARACTERS)
    codes = (values[:, None] >> _BITS * place) & _VALUE | np.where(place < last[:, None], _MORE, 0)
    return bytes((codes + _FIRST_CHARACTER)[place <= last[:, None]].astype(np.uint8)).decode()


def lengths_in(text: str) -> Lengths:
    """Read the lengths of runs from such a text; a ValueError says that it is damaged."""
    # The fourth number and later ones are stored less the one before the last.
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
    lengths: Lengths = np.add.reduceat((codes & _VALUE) << shift, first)
    lengths -= np.where(codes[last] & _SIGN, 1 << _BITS * num_characters, 0)
    lengths[1::2] = np.cumsum(lengths[1::2])
    lengths[2::2] = np.cumsum(lengths[2::2])
    return lengths
