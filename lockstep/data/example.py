"""`tf.train.Example`: named features, each a list of byte strings, of int64 or of float32. Read and written by hand.

The messages in protocol buffers' wire format, field numbers in brackets:

    Example:    Features [1]
    Features:   map entry [1] (repeated):   key [1], Feature [2]
    Feature:    one of BytesList [1], FloatList [2], Int64List [3], each with its values [1] (numbers may be packed)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError, InputError

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Values = list[bytes] | Int64s | Float32s

Span = tuple[int, int]
Buffer = bytes | memoryview

BYTES, FLOATS, INT64S = 1, 2, 3

# A tag is a field's number and its wire type: how long it is.
_VARINT, _WITH_LENGTH, _FOUR_BYTES = 0, 2, 5
_FIXED_BYTES = {1: 8, _FOUR_BYTES: 4}
_FIRST, _SECOND = 1 << 3 | _WITH_LENGTH, 2 << 3 | _WITH_LENGTH
_KINDS = {kind << 3 | _WITH_LENGTH: kind for kind in (BYTES, FLOATS, INT64S)}
_VALUE_TAGS = {BYTES: {_FIRST}, FLOATS: {_FIRST, 1 << 3 | _FOUR_BYTES}, INT64S: {_FIRST, 1 << 3 | _VARINT}}

_VARINT_BYTES = 10


class Feature(NamedTuple):
    """Where the values of one feature lie in the bytes of an example."""

    kind: int
    """BYTES, FLOATS or INT64S."""
    spans: list[Span]
    """Start and stop of each value; of numbers, of each run of values."""


_NO_FEATURE = Feature(0, [])


def parse_example(data: Buffer, source: str = "The example") -> dict[str, Values]:
    """The values of every feature by name: a list of bytes, or an array of int64 or float32.

    As in protocol buffers the last of several features of one name counts, numbers may be packed or not, and unknown
    fields are skipped. A feature without a kind counts as missing.

    Args:
        data: the serialised message.
        source: what to call it in an error.

    Raises:
        DataError: these are not the bytes of an example.
    """
    features = scan_example(data, source)
    try:
        return {name: _values(data, feature) for name, feature in features.items()}
    except _MalformedError as fault:
        raise fault.of(source) from None


def scan_example(data: Buffer, source: str = "The example") -> dict[str, Feature]:
    """Where the values of every feature lie.

    Raises:
        DataError: these are not the bytes of an example.
    """
    try:
        return {name: feature for name, feature in _features(data).items() if feature.kind}
    except _MalformedError as fault:
        raise fault.of(source) from None


def serialize_example(features: Mapping[str, Values]) -> bytes:
    """An example of these features: the same bytes for the same features, whatever their order.

    Raises:
        InputError: values that are neither a list of bytes nor a one-dimensional array of int64 or float32.
    """
    entries = [_field(1, name.encode()) + _field(2, _feature(name, features[name])) for name in sorted(features)]
    return _field(1, b"".join(_field(1, entry) for entry in entries))


class _MalformedError(Exception):
    """What is wrong at which byte."""

    def __init__(self, what: str, place: int) -> None:
        super().__init__(what, place)
        self.what, self.place = what, place

    def of(self, source: str) -> DataError:
        return DataError(
            f"{source} is not a tf.train.Example.",
            given=f"{self.what} at byte {self.place}",
            expected="the features of a tf.train.Example, in protocol buffers' wire format",
            mend="write the record again, or read it as what it is",
        )


def _features(data: Buffer) -> dict[str, Feature]:
    features: dict[str, Feature] = {}
    for tag, start, stop in _fields(data, 0, len(data)):
        if tag == _FIRST:
            entries = _fields(data, start, stop)
            features.update(_entry(data, start, stop) for tag, start, stop in entries if tag == _FIRST)
    return features


def _entry(data: Buffer, start: int, stop: int) -> tuple[str, Feature]:
    name, feature = b"", _NO_FEATURE
    for tag, first, end in _fields(data, start, stop):
        if tag == _FIRST:
            name = bytes(data[first:end])
        elif tag == _SECOND:
            feature = _extended(feature, data, first, end)
    try:
        return name.decode(), feature
    except UnicodeDecodeError:
        raise _MalformedError(f"the name {name!r}, which is not UTF-8,", start) from None


def _extended(feature: Feature, data: Buffer, start: int, stop: int) -> Feature:
    """The feature with one more message of it: the values of one kind add up, those of another replace them."""
    for tag, first, end in _fields(data, start, stop):
        if kind := _KINDS.get(tag):
            values = _fields(data, first, end)
            spans = [(first, end) for tag, first, end in values if tag in _VALUE_TAGS[kind]]
            feature = Feature(kind, feature.spans + spans if kind == feature.kind else spans)
    return feature


def _fields(data: Buffer, place: int, end: int) -> list[tuple[int, int, int]]:
    """Tag, start and stop of every field of a message. Written to be fast: an example has a hundred of them."""
    fields = []
    while place < end:
        tag, start = data[place], place + 1
        if tag >= 128:
            tag, start = _varint(data, place, end)
        wire_type = tag & 7
        if wire_type == _WITH_LENGTH:
            if start < end and data[start] < 128:
                length, start = data[start], start + 1
            else:
                length, start = _varint(data, start, end)
            stop = start + length
        elif wire_type == _VARINT:
            stop = _varint(data, start, end)[1]
        elif wire_type in _FIXED_BYTES:
            stop = start + _FIXED_BYTES[wire_type]
        else:
            raise _MalformedError(f"a field of the unknown wire type {wire_type}", place)
        if stop > end:
            raise _MalformedError("a field longer than its message", place)
        if tag < 1 << 3:
            raise _MalformedError("a field of number 0", place)
        fields.append((tag, start, stop))
        place = stop
    return fields


def _varint(data: Buffer, start: int, end: int) -> tuple[int, int]:
    """A number of 7 bits a byte, lowest first, the last byte below 128; and where it stops."""
    value = 0
    for place in range(start, min(end, start + _VARINT_BYTES)):
        byte = data[place]
        value |= (byte & 127) << 7 * (place - start)
        if byte < 128:
            return value, place + 1
    raise _MalformedError("a number without an end", start)


def _values(data: Buffer, feature: Feature) -> Values:
    if feature.kind == BYTES:
        return [bytes(data[start:stop]) for start, stop in feature.spans]
    if feature.kind == INT64S:
        return np.array([value for span in feature.spans for value in _int64s(data, span)], dtype=np.int64)
    for start, stop in feature.spans:
        if (stop - start) % 4:
            raise _MalformedError(f"{stop - start} bytes of floats, 4 bytes each,", start)
    floats = b"".join(data[start:stop] for start, stop in feature.spans)
    return np.frombuffer(floats, dtype="<f4").astype(np.float32)


def _int64s(data: Buffer, span: Span) -> Iterator[int]:
    place, end = span
    while place < end:
        value, place = _varint(data, place, end)
        value &= 0xFFFFFFFFFFFFFFFF
        yield value - (value >> 63 << 64)


def _feature(name: str, values: Values) -> bytes:
    if isinstance(values, list) and all(isinstance(value, bytes) for value in values):
        return _field(BYTES, b"".join(_field(1, value) for value in values))
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype == np.float32:
        return _field(FLOATS, _packed(values.astype("<f4").tobytes()))
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype == np.int64:
        return _field(INT64S, _packed(b"".join(map(_as_varint, values.tolist()))))
    raise InputError(
        f"The feature {name!r} cannot be part of a tf.train.Example.",
        given=f"{values.dtype} of shape {values.shape}" if isinstance(values, np.ndarray) else repr(values)[:100],
        expected="a list of bytes, or a one-dimensional array of int64 or float32",
        mend="convert it: np.array([...], dtype=np.int64), np.float32, or [bytes]",
    )


def _packed(numbers: bytes) -> bytes:
    return _field(1, numbers) if numbers else b""


def _field(number: int, content: bytes) -> bytes:
    return _as_varint(number << 3 | _WITH_LENGTH) + _as_varint(len(content)) + content


def _as_varint(value: int) -> bytes:
    if 0 <= value < 128:
        return bytes((value,))
    value &= 0xFFFFFFFFFFFFFFFF
    encoded = bytearray()
    while value >= 128:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
