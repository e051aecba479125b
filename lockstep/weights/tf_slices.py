"""The slices of a partitioned tensor: the keys that they are stored under, and how they make it whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from lockstep.weights.tf_messages import Slice

Destination = tuple[slice, ...]


class NotWholeError(Exception):
    """What is wrong with slices that do not make a tensor whole."""


def slice_key(name: str, extents: Slice) -> bytes:
    """The key of a slice: an ordered code of 0, the tensor's name, its rank, and each extent's start and length.

    As `EncodeTensorNameSlice` in TensorFlow's `core/util/saved_tensor_slice_util.cc`.
    """
    numbers = b"".join(_signed(number) for extent in extents for number in extent)
    return _unsigned(0) + _string(name.encode()) + _unsigned(len(extents)) + numbers


def slice_ranges(slices: Sequence[Slice], shape: tuple[int, ...]) -> list[Destination]:
    """Where each slice lies in a tensor of this shape.

    Raises:
        NotWholeError: one reaches beyond it, two overlap, or together they are not all of it.
    """
    places = [_place(extents, shape) for extents in slices]
    held = sum(math.prod(part.stop - part.start for part in place) for place in places)
    if held != math.prod(shape):
        raise NotWholeError(f"slices with {held} values together, where it has {math.prod(shape)}")
    _check_apart(places, len(shape))
    return places


def join_slices(
    shape: tuple[int, ...], dtype: torch.dtype, places: Sequence[Destination], pieces: Iterable[Tensor]
) -> Tensor:
    """The tensor whose slices have these values, each in one dimension, row by row."""
    if len(places) == 1:
        (piece,) = pieces
        return piece.reshape(shape)
    whole = torch.empty(math.prod(shape), dtype=dtype).reshape(shape)
    for place, piece in zip(places, pieces, strict=True):
        part = whole[place]
        part.copy_(piece.reshape(part.shape))
    return whole


def _place(extents: Slice, shape: tuple[int, ...]) -> Destination:
    if len(extents) != len(shape):
        raise NotWholeError(f"a slice of {len(extents)} dimensions, where it has {len(shape)}")
    place = tuple(
        slice(start, size if length < 0 else start + length)
        for (start, length), size in zip(extents, shape, strict=True)
    )
    if not all(0 <= part.start <= part.stop <= size for part, size in zip(place, shape, strict=True)):
        raise NotWholeError(f"a slice with starts and lengths {extents}, where it has the shape {shape}")
    return place


def _check_apart(places: Sequence[Destination], rank: int) -> None:
    """Compare each with those that begin before it ends, along the dimension in which they differ most."""
    if len(places) < 2 or not rank:
        return
    starts = np.array([[part.start for part in place] for place in places], np.int64)
    stops = np.array([[part.stop for part in place] for place in places], np.int64)
    axis = max(range(rank), key=lambda dimension: np.unique(starts[:, dimension]).size)
    # What is empty overlaps with nothing, and there is no limit to how many such slices there are.
    filled = np.flatnonzero((starts < stops).all(axis=1))
    order = filled[np.argsort(starts[filled, axis], kind="stable")]
    starts, stops = starts[order], stops[order]
    ends = np.searchsorted(starts[:, axis], stops[:, axis])
    for number, end in enumerate(ends):
        near = slice(number + 1, end)
        common = (np.maximum(starts[near], starts[number]) < np.minimum(stops[near], stops[number])).all(axis=1)
        if common.any():
            later = max(order[number], order[near][common.argmax()])
            raise NotWholeError(f"slice {later + 1} of {len(places)} overlaps with another")


def _unsigned(number: int) -> bytes:
    """How many bytes, and the bytes, the highest first."""
    content = number.to_bytes((number.bit_length() + 7) // 8, "big")
    return bytes((len(content),)) + content


def _string(content: bytes) -> bytes:
    """The bytes 0 and 255 escaped, and a mark for the end."""
    return content.replace(b"\xff", b"\xff\x00").replace(b"\x00", b"\x00\xff") + b"\x00\x01"


def _signed(number: int) -> bytes:
    """As many bytes as 7 bits of each have room for, its sign included; their count is that of the first bits set."""
    size = (number if number >= 0 else ~number).bit_length() // 7 + 1
    return ((number & (1 << 8 * size) - 1) ^ (1 << size) - 1 << 7 * size).to_bytes(size, "big")
