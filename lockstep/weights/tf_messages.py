"""The protocol buffers in TensorFlow's checkpoints, read by hand.

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

from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import CheckpointError
from lockstep.records.protobuf import (
    FOUR_BYTES,
    VARINT,
    WITH_LENGTH,
    Buffer,
    MalformedError,
    Span,
    message_fields,
    read_varint,
)

Extent = tuple[int, int]
"""Start and length along a dimension; a length of -1 is all of it."""
Slice = tuple[Extent, ...]

# The version of both formats, the same from the start.
_VERSION = 1

WHOLE: Extent = (0, -1)

# TensorFlow takes no more.
_MOST_DIMENSIONS = 254


class Message:
    """The fields of a message, each looked up by its number. A field of an unexpected wire type counts as unknown.

    Raises:
        MalformedError: these are no fields.
    """

    def __init__(self, data: Buffer, start: int = 0, stop: int | None = None) -> None:
        self.data = data
        self.fields = list(message_fields(data, start, len(data) if stop is None else stop))

    def spans(self, number: int, wire_type: int = WITH_LENGTH) -> list[Span]:
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
        spans = self.spans(number, VARINT)
        if not spans:
            return default
        value = read_varint(self.data, *spans[-1])[0] & 0xFFFFFFFFFFFFFFFF
        return value - (value >> 63 << 64)

    def fixed32(self, number: int) -> int:
        """An unsigned integer of 4 bytes; 0 if the field is absent."""
        spans = self.spans(number, FOUR_BYTES)
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
        """From a BundleHeaderProto."""
        return cls(message.integer(1), message.integer(2) == 1, least_version(message.message(3)))


@dataclass(frozen=True, slots=True)
class BundleEntry:
    """A tensor of a bundle, or a slice of one. With slices, only the data type and the shape mean anything."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    """In bytes."""
    crc: int
    """Masked CRC-32C of its bytes as they are in the file."""
    slices: tuple[Slice, ...]

    @classmethod
    def of(cls, message: Message) -> BundleEntry:
        """From a BundleEntryProto."""
        shard, offset, size = map(message.integer, (3, 4, 5))
        if min(shard, offset, size) < 0:
            raise MalformedError(f"shard {shard}, offset {offset} and size {size}", 0)
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
        """From a SavedSliceMeta."""
        slices = tuple(map(slice_of, message.messages(4)))
        return cls(message.text(1), message.integer(3), shape_of(message.message(2)), slices)


def shape_of(message: Message) -> tuple[int, ...]:
    """From a TensorShapeProto.

    Raises:
        MalformedError: a size is below 0, or there is no fixed number of dimensions.
    """
    shape = tuple(dimension.integer(1) for dimension in message.messages(2))
    if message.integer(3) or len(shape) > _MOST_DIMENSIONS or min(shape, default=0) < 0:
        raise MalformedError(f"the shape {shape[:8]}", 0)
    return shape


def slice_of(message: Message) -> Slice:
    """From a TensorSliceProto."""
    return tuple((extent.integer(1), extent.integer(2, -1)) for extent in message.messages(1))


def least_version(message: Message) -> int:
    """The least version of a reader, from a VersionDef."""
    return message.integer(2)


def text_of(data: Buffer) -> str:
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
