"""The tensors in TensorFlow's checkpoints: their data types, their values, and the slices of partitioned ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.records import example
from lockstep.records.protobuf import FOUR_BYTES, VARINT, WITH_LENGTH, MalformedError
from lockstep.weights.tf_messages import Message, Slice

STRING = 7
"""Data types have the numbers of TensorFlow's `core/framework/types.proto`."""


class DataType(NamedTuple):
    """A data type of TensorFlow."""

    name: str
    """Torch's name ("float32"), or TensorFlow's ("DT_STRING") where torch has none."""
    dtype: torch.dtype | None
    """None where torch has none."""

    def num_bytes(self, count: int) -> int:
        """The size of so many values in memory; 0 where torch has no such type."""
        return count * self.dtype.itemsize if self.dtype else 0


# Quantised integers mean nothing without the range that they stand for, which TensorFlow keeps elsewhere.
_WITHOUT_TORCH = {
    0: "DT_INVALID",
    STRING: "DT_STRING",
    11: "DT_QINT8",
    12: "DT_QUINT8",
    13: "DT_QINT32",
    15: "DT_QINT16",
    16: "DT_QUINT16",
    20: "DT_RESOURCE",
    21: "DT_VARIANT",
    27: "DT_FLOAT8_E4M3B11FNUZ",
    29: "DT_INT4",
    30: "DT_UINT4",
    31: "DT_INT2",
    32: "DT_UINT2",
    33: "DT_FLOAT4_E2M1FN",
}
_WITH_TORCH = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    5: torch.int16,
    6: torch.int8,
    8: torch.complex64,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    17: torch.uint16,
    18: torch.complex128,
    19: torch.float16,
    22: torch.uint32,
    23: torch.uint64,
    24: torch.float8_e5m2,
    25: torch.float8_e4m3fn,
    26: torch.float8_e4m3fnuz,
    28: torch.float8_e5m2fnuz,
}
_KINDS = {number: DataType(name, None) for number, name in _WITHOUT_TORCH.items()} | {
    number: DataType(str(dtype).removeprefix("torch."), dtype) for number, dtype in _WITH_TORCH.items()
}


def data_type(number: int) -> DataType:
    """The data type with a number of TensorFlow's."""
    return _KINDS.get(number) or DataType(f"DataType({number})", None)


def from_bytes(data: bytes, dtype: torch.dtype, *, big_endian: bool = False) -> Tensor:
    """Read values, in one dimension, from their bytes; each part of a complex number is swapped on its own."""
    if not data:
        return torch.empty(0, dtype=dtype)
    unit = dtype.itemsize // (2 if dtype.is_complex else 1)
    stored = np.dtype(f"{'>' if big_endian else '<'}u{unit}")
    values = torch.from_numpy(np.frombuffer(data, stored).astype(stored.newbyteorder("=")))
    # A byte that is neither 0 nor 1 is no boolean of torch's.
    return values.ne(0) if dtype == torch.bool else values.view(dtype)


_EIGHT_BYTES = 1
# Numbers of the fields with packed values, by data type: float_val, double_val, scomplex_val, dcomplex_val ...
_FIXED = {
    torch.float32: (5, FOUR_BYTES),
    torch.float64: (6, _EIGHT_BYTES),
    torch.complex64: (9, FOUR_BYTES),
    torch.complex128: (12, _EIGHT_BYTES),
}
# ... and int_val, int64_val, bool_val, half_val (the bits of a half), with what an integer there is cast to.
_VARINTS: dict[torch.dtype, tuple[int, npt.DTypeLike]] = {
    torch.int32: (7, np.int32),
    torch.uint8: (7, np.uint8),
    torch.int16: (7, np.int16),
    torch.int8: (7, np.int8),
    torch.uint16: (7, np.uint16),
    torch.int64: (10, np.int64),
    torch.bool: (11, np.bool_),
    torch.float16: (13, np.uint16),
}


def proto_values(message: Message, dtype: torch.dtype) -> Tensor:
    """The values in one dimension.

    Raises:
        MalformedError: they are no such numbers; or version 1 has no field for their kind.
    """
    if dtype in _FIXED:
        return _fixed(message, dtype, *_FIXED[dtype])
    if dtype not in _VARINTS:
        raise MalformedError(f"{dtype}, which version 1 does not have,", 0)
    number, stored = _VARINTS[dtype]
    spans = message.spans(number) + message.spans(number, VARINT)
    values = example.feature_values(message.data, example.Feature(example.INT64S, spans))
    return torch.from_numpy(np.asarray(values).astype(stored)).view(dtype)


def _fixed(message: Message, dtype: torch.dtype, number: int, wire_type: int) -> Tensor:
    spans = message.spans(number, WITH_LENGTH) + message.spans(number, wire_type)
    data = b"".join(message.data[start:stop] for start, stop in spans)
    if len(data) % dtype.itemsize:
        raise MalformedError(f"{len(data)} bytes of {dtype.itemsize} each", spans[0][0])
    return from_bytes(data, dtype)


_Place = tuple[slice, ...]


class NotWholeError(Exception):
    """Slices do not make a tensor whole."""


def slice_key(name: str, extents: Slice) -> bytes:
    """The key of a slice: 0, the tensor's name, its rank, and each extent's start and length in an ordered code.

    As `EncodeTensorNameSlice` in TensorFlow's `core/util/saved_tensor_slice_util.cc`.
    """
    numbers = b"".join(_signed(number) for extent in extents for number in extent)
    return _unsigned(0) + _string(name.encode()) + _unsigned(len(extents)) + numbers


def slice_ranges(slices: Sequence[Slice], shape: tuple[int, ...]) -> list[_Place]:
    """The place of each slice in a tensor of this shape.

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
    shape: tuple[int, ...], dtype: torch.dtype, places: Sequence[_Place], pieces: Iterable[Tensor]
) -> Tensor:
    """Join slices into a tensor; each has its values in one dimension, row by row."""
    if len(places) == 1:
        (piece,) = pieces
        return piece.reshape(shape)
    whole = torch.empty(math.prod(shape), dtype=dtype).reshape(shape)
    for place, piece in zip(places, pieces, strict=True):
        part = whole[place]
        part.copy_(piece.reshape(part.shape))
    return whole


def _place(extents: Slice, shape: tuple[int, ...]) -> _Place:
    if len(extents) != len(shape):
        raise NotWholeError(f"a slice of {len(extents)} dimensions, where it has {len(shape)}")
    place = tuple(
        slice(start, size if length < 0 else start + length)
        for (start, length), size in zip(extents, shape, strict=True)
    )
    if not all(0 <= part.start <= part.stop <= size for part, size in zip(place, shape, strict=True)):
        raise NotWholeError(f"a slice with starts and lengths {extents}, where it has the shape {shape}")
    return place


def _check_apart(places: Sequence[_Place], rank: int) -> None:
    """Refuse slices that overlap: compare each with those that begin before it ends, along the axis of most starts."""
    if len(places) < 2 or not rank:
        return
    starts = np.array([[part.start for part in place] for place in places], np.int64)
    stops = np.array([[part.stop for part in place] for place in places], np.int64)
    axis = max(range(rank), key=lambda dimension: np.unique(starts[:, dimension]).size)
    # Empty slices overlap with nothing, and there may be any number of them.
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
    """Encode a number as the count of its bytes, and these, the highest first."""
    content = number.to_bytes((number.bit_length() + 7) // 8, "big")
    return bytes((len(content),)) + content


def _string(content: bytes) -> bytes:
    """Escape the bytes 0 and 255, and mark the end."""
    return content.replace(b"\xff", b"\xff\x00").replace(b"\x00", b"\x00\xff") + b"\x00\x01"


def _signed(number: int) -> bytes:
    """Encode a signed number with 7 bits a byte; the count of leading ones (zeros if negative) is that of the bytes."""
    size = (number if number >= 0 else ~number).bit_length() // 7 + 1
    return ((number & (1 << 8 * size) - 1) ^ (1 << size) - 1 << 7 * size).to_bytes(size, "big")
