"""The tensors in TensorFlow's checkpoints: the messages that describe them, data types, values, and slices.

Field numbers in brackets:

    TensorShapeProto:      dim [2], each with its size [1]; unknown_rank [3]
    TensorSliceProto:      extent [1], each with start [1] and length [2]; without a length it is all of its dimension
    VersionDef:            producer [1], min_consumer [2]
    BundleHeaderProto:     num_shards [1], endianness [2] (0 little, 1 big), version [3]
    BundleEntryProto:      dtype [1], shape [2], shard_id [3], offset [4], size [5], crc32c [6], slices [7]
    SavedTensorSlices:     meta [1]: SavedTensorSliceMeta; data [2]: SavedSlice
    SavedTensorSliceMeta:  tensor [1]: SavedSliceMeta; versions [2]
    SavedSliceMeta:        name [1], shape [2], type [3], slice [4]
    SavedSlice:            name [1], slice [2], data [3]: TensorProto

As in TensorFlow's `core/protobuf/tensor_bundle.proto`, `core/util/saved_tensor_slice.proto` and `core/framework`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.records import example, protobuf
from lockstep.weights.source import TensorInfo

Extent = tuple[int, int]
"""Start and length along a dimension; a length of -1 is all of it."""
Slice = tuple[Extent, ...]

# The version of both formats, the same from the start.
_VERSION = 1

# TensorFlow takes no more.
_MOST_DIMENSIONS = 254


class Message:
    """The fields of a message, each looked up by its number. A field of an unexpected wire type counts as unknown.

    Raises:
        MalformedError: these are no fields.
    """

    def __init__(self, data: protobuf.Buffer, start: int = 0, stop: int | None = None) -> None:
        self.data = data
        self.fields = list(protobuf.message_fields(data, start, len(data) if stop is None else stop))

    def spans(self, number: int, wire_type: int = protobuf.WITH_LENGTH) -> list[protobuf.Span]:
        """Start and stop of each content of a field."""
        wanted = number << 3 | wire_type
        return [(start, stop) for tag, start, stop in self.fields if tag == wanted]

    def messages(self, number: int) -> list[Message]:
        """Each message of a repeated field."""
        return [Message(self.data, *span) for span in self.spans(number)]

    def message(self, number: int) -> Message:
        """The message of a field; one without fields if there is none."""
        found = self.messages(number)
        return found[-1] if found else Message(b"")

    def integer(self, number: int, default: int = 0) -> int:
        """An integer of 64 bits with a sign; the default if the field is absent."""
        spans = self.spans(number, protobuf.VARINT)
        if not spans:
            return default
        value = protobuf.read_varint(self.data, *spans[-1])[0] & 0xFFFFFFFFFFFFFFFF
        return value - (value >> 63 << 64)

    def fixed32(self, number: int) -> int:
        """An unsigned integer of 4 bytes; 0 if the field is absent."""
        spans = self.spans(number, protobuf.FOUR_BYTES)
        return int.from_bytes(self.data[slice(*spans[-1])], "little") if spans else 0

    def text(self, number: int) -> str:
        """A string; what is not UTF-8 in it is escaped."""
        spans = self.spans(number)
        return text_of(self.data[slice(*spans[-1])]) if spans else ""


@dataclass(frozen=True, slots=True)
class BundleHeader:
    """The header of a bundle."""

    num_shards: int
    is_big_endian: bool
    least_version: int
    """The least version of a reader that may read it."""

    @classmethod
    def of(cls, message: Message) -> BundleHeader:
        """Read a BundleHeaderProto."""
        return cls(message.integer(1), message.integer(2) == 1, least_version(message.message(3)))


@dataclass(frozen=True, slots=True)
class BundleEntry:
    """A tensor of a bundle, or a slice of one. With slices, only the data type and the shape mean anything."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    """Size in bytes."""
    crc: int
    """Masked CRC-32C of its bytes as they are in the file."""
    slices: tuple[Slice, ...]

    @classmethod
    def of(cls, message: Message) -> BundleEntry:
        """Read a BundleEntryProto."""
        shard, offset, size = map(message.integer, (3, 4, 5))
        if min(shard, offset, size) < 0:
            raise protobuf.MalformedError(f"shard {shard}, offset {offset} and size {size}", 0)
        slices = tuple(map(slice_of, message.messages(7)))
        return cls(message.integer(1), shape_of(message.message(2)), shard, offset, size, message.fixed32(6), slices)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that a V1 file lists, and its slices in that file."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]

    @classmethod
    def of(cls, message: Message) -> SavedTensor:
        """Read a SavedSliceMeta."""
        slices = tuple(map(slice_of, message.messages(4)))
        return cls(message.text(1), message.integer(3), shape_of(message.message(2)), slices)


def shape_of(message: Message) -> tuple[int, ...]:
    """Read a TensorShapeProto.

    Raises:
        MalformedError: a size is below 0, or there is no fixed number of dimensions.
    """
    shape = tuple(dimension.integer(1) for dimension in message.messages(2))
    if message.integer(3) or len(shape) > _MOST_DIMENSIONS or min(shape, default=0) < 0:
        raise protobuf.MalformedError(f"the shape {shape[:8]}", 0)
    return shape


def slice_of(message: Message) -> Slice:
    """Read a TensorSliceProto."""
    return tuple((extent.integer(1), extent.integer(2, -1)) for extent in message.messages(1))


def least_version(message: Message) -> int:
    """The least version of a reader, from a VersionDef."""
    return message.integer(2)


def text_of(data: protobuf.Buffer) -> str:
    """Bytes as text; what is not UTF-8 in it is escaped."""
    return bytes(data).decode(errors="backslashreplace")


def check_reader_version(least: int, path: Path) -> None:
    """Refuse a file for readers of a later version of the format."""
    if least > _VERSION:
        raise CheckpointError(
            f"{path} is of a later version of the format.",
            given=f"a file for readers of version {least} or later",
            expected=f"one that readers of version {_VERSION} may read",
            hint="save the checkpoint with an earlier TensorFlow",
        )


STRING = 7
"""Data types have the numbers of TensorFlow's `core/framework/types.proto`."""


class DataType(NamedTuple):
    """A data type of TensorFlow."""

    name: str
    """Torch's name ("float32"), or TensorFlow's ("DT_STRING") where torch has none."""
    dtype: torch.dtype | None
    """None where torch has none."""

    def info(self, shape: tuple[int, ...], stored_bytes: int = 0) -> TensorInfo:
        """What is known of a tensor of this type; where torch has no such type, its size is that in the file."""
        return TensorInfo.of(shape, self.dtype) if self.dtype else TensorInfo(shape, self.name, stored_bytes)


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
    torch.float32: (5, protobuf.FOUR_BYTES),
    torch.float64: (6, _EIGHT_BYTES),
    torch.complex64: (9, protobuf.FOUR_BYTES),
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
        raise protobuf.MalformedError(f"{dtype}, which version 1 does not have,", 0)
    number, stored = _VARINTS[dtype]
    spans = message.spans(number) + message.spans(number, protobuf.VARINT)
    values = example.feature_values(message.data, example.Feature(example.INT64S, spans))
    return torch.from_numpy(np.asarray(values).astype(stored)).view(dtype)


def _fixed(message: Message, dtype: torch.dtype, number: int, wire_type: int) -> Tensor:
    spans = message.spans(number, protobuf.WITH_LENGTH) + message.spans(number, wire_type)
    data = b"".join(message.data[start:stop] for start, stop in spans)
    if len(data) % dtype.itemsize:
        raise protobuf.MalformedError(f"{len(data)} bytes of {dtype.itemsize} each", spans[0][0])
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
