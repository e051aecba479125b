"""`tf.train.Example` and `tf.train.SequenceExample`, read and written by hand.

An example is named features, each a list of byte strings, of int64 or of float32. A sequence example also has lists
with a feature for each step, as for videos. As messages of protocol buffers, field numbers in brackets:

    Example:            Features [1]
    SequenceExample:    context, Features [1]; FeatureLists [2]
    Features:           map entry [1] (repeated):   key [1], Feature [2]
    FeatureLists:       map entry [1] (repeated):   key [1], FeatureList [2]
    FeatureList:        Feature [1] (repeated)
    Feature:            one of BytesList [1], FloatList [2], Int64List [3], each with its values [1] (numbers may be
                        packed)
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.errors import InputError
from lockstep.records.protobuf import (
    FIRST,
    FOUR_BYTES,
    SECOND,
    VARINT,
    VARINT_BYTES,
    WITH_LENGTH,
    Buffer,
    MalformedError,
    Span,
    field_bytes,
    map_entries,
    message_fields,
    read_varint,
    varint_bytes,
)

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Values = list[bytes] | Int64s | Float32s

BYTES, FLOATS, INT64S = 1, 2, 3

_EXAMPLE, _SEQUENCE_EXAMPLE = "tf.train.Example", "tf.train.SequenceExample"
_KINDS = {kind << 3 | WITH_LENGTH: kind for kind in (BYTES, FLOATS, INT64S)}
_VALUE_TAGS = {BYTES: {FIRST}, FLOATS: {FIRST, 1 << 3 | FOUR_BYTES}, INT64S: {FIRST, 1 << 3 | VARINT}}
_LITTLE_ENDIAN = np.dtype("<f4")
# From so many bytes of numbers on, numpy is faster than a loop.
_MANY_BYTES = 128


class Feature(NamedTuple):
    """Places of one feature's values in the bytes of an example."""

    kind: int
    """BYTES, FLOATS or INT64S; 0 for a feature without values of any kind."""
    spans: list[Span]
    """Start and stop of each byte string, or of each run of numbers."""


class SequenceExample(NamedTuple):
    """A parsed `tf.train.SequenceExample`; values are lists of bytes, or arrays of int64 or float32."""

    context: dict[str, Values]
    """Features of the whole, by name."""
    feature_lists: dict[str, list[Values]]
    """Features of each step in turn, by name; lists may differ in length."""


def parse_example(
    data: Buffer, source: str = "The example", names: Container[str] | None = None, end: int | None = None
) -> dict[str, Values]:
    """Parse an example: the values of every feature by name, a list of bytes or an array of int64 or float32.

    As in protocol buffers the last of several features of one name counts, numbers may be packed or not, and unknown
    fields are skipped, as are features that are not among the names, where some are given. A feature without a kind
    counts as missing. Errors name the example by `source`. The message ends at `end` of the data, below 0 counted from
    its end, by default with it.
    """
    features = scan_example(data, source, names, end)
    try:
        return {name: feature_values(data, feature) for name, feature in features.items()}
    except MalformedError as fault:
        raise fault.of(source, _EXAMPLE) from None


def scan_example(
    data: Buffer, source: str = "The example", names: Container[str] | None = None, end: int | None = None
) -> dict[str, Feature]:
    """Find the values of every feature, or of those with the given names, without parsing them."""
    try:
        features = {name: _feature_at(data, spans) for name, spans in map_entries(data, FIRST, names, end).items()}
        return {name: feature for name, feature in features.items() if feature.kind}
    except MalformedError as fault:
        raise fault.of(source, _EXAMPLE) from None


def parse_sequence_example(data: Buffer, source: str = "The example") -> SequenceExample:
    """Parse a sequence example, as `parse_example` does; a step without values is an empty list and keeps its place."""
    try:
        entries = map_entries(data, FIRST)
        features = {name: _feature_at(data, spans) for name, spans in entries.items()}
        context = {name: feature_values(data, feature) for name, feature in features.items() if feature.kind}
        lists = {name: _steps(data, spans) for name, spans in map_entries(data, SECOND).items()}
        return SequenceExample(context, lists)
    except MalformedError as fault:
        raise fault.of(source, _SEQUENCE_EXAMPLE) from None


def serialize_example(features: Mapping[str, Values]) -> bytes:
    """Serialize an example: the same bytes for the same features, whatever their order."""
    return _entries_bytes(1, {name: _feature_bytes(name, values) for name, values in features.items()})


def serialize_sequence_example(context: Mapping[str, Values], feature_lists: Mapping[str, Sequence[Values]]) -> bytes:
    """Serialize a sequence example: the same bytes for the same features, whatever their order."""
    of_all = {name: _feature_bytes(name, values) for name, values in context.items()}
    of_steps = {
        name: b"".join(field_bytes(1, _feature_bytes(name, values)) for values in steps)
        for name, steps in feature_lists.items()
    }
    return _entries_bytes(1, of_all) + _entries_bytes(2, of_steps)


def feature_values(data: Buffer, feature: Feature) -> Values:
    """Read the values of a feature; an empty list if it has no kind."""
    if feature.kind == INT64S:
        return _int64s(data, feature.spans)
    if feature.kind == FLOATS:
        return _floats(data, feature.spans)
    return [bytes(data[start:stop]) for start, stop in feature.spans]


def _feature_at(data: Buffer, spans: Sequence[Span]) -> Feature:
    """Merge the parts of a feature's message: values of one kind add up, those of another kind replace them."""
    if len(spans) == 1 and (usual := _usual_feature(data, *spans[0])):
        return usual
    kind = 0
    values: list[Span] = []
    for start, stop in spans:
        for tag, first, end in message_fields(data, start, stop):
            if found := _KINDS.get(tag):
                if found != kind:
                    kind, values = found, []
                tags = _VALUE_TAGS[kind]
                for value, value_start, value_stop in message_fields(data, first, end):
                    if value in tags:
                        values.append((value_start, value_stop))
    return Feature(kind, values)


def _usual_feature(data: Buffer, start: int, stop: int) -> Feature | None:
    """Read a feature with one byte string, or one run of numbers, as most are; None if it is another one."""
    if stop - start < 4 or not (kind := _KINDS.get(data[start])):
        return None
    length, first = data[start + 1], start + 2
    if length >= 128:
        length, first = read_varint(data, start + 1, stop)
    if first + length != stop or stop - first < 2 or data[first] != FIRST:
        return None
    length, value = data[first + 1], first + 2
    if length >= 128:
        length, value = read_varint(data, first + 1, stop)
    return Feature(kind, [(value, stop)]) if value + length == stop else None


def _steps(data: Buffer, spans: Sequence[Span]) -> list[Values]:
    steps = []
    for start, stop in spans:
        features = [(first, end) for tag, first, end in message_fields(data, start, stop) if tag == FIRST]
        steps += [feature_values(data, _feature_at(data, [feature])) for feature in features]
    return steps


def _floats(data: Buffer, spans: Sequence[Span]) -> Float32s:
    for start, stop in spans:
        if (stop - start) % 4:
            raise MalformedError(f"{stop - start} bytes of floats, 4 bytes each,", start)
    return np.frombuffer(_joined(data, spans), dtype=_LITTLE_ENDIAN).astype(np.float32)


def _int64s(data: Buffer, spans: Sequence[Span]) -> Int64s:
    if spans and spans[-1][1] - spans[0][0] >= _MANY_BYTES:
        joined = np.frombuffer(_joined(data, spans), dtype=np.uint8)
        starts = np.flatnonzero(np.concatenate(([True], joined[:-1] < 128)))
        sizes = np.diff(starts, append=len(joined))
        whole = all(start == stop or data[stop - 1] < 128 for start, stop in spans)
        if whole and len(joined) and sizes.max() <= VARINT_BYTES:
            shifts = 7 * (np.arange(len(joined)) - np.repeat(starts, sizes))
            parts = (joined & 127).astype(np.uint64) << shifts.astype(np.uint64)
            return np.bitwise_or.reduceat(parts, starts).view(np.int64)
    return _few_int64s(data, spans)


def _few_int64s(data: Buffer, spans: Sequence[Span]) -> Int64s:
    values = []
    for place, stop in spans:
        while place < stop:
            if data[place] < 128:
                value, place = data[place], place + 1
            else:
                value, place = read_varint(data, place, stop)
            value &= 0xFFFFFFFFFFFFFFFF
            values.append(value - (value >> 63 << 64))
    return np.array(values, dtype=np.int64)


def _joined(data: Buffer, spans: Sequence[Span]) -> Buffer:
    if len(spans) == 1:
        return data[slice(*spans[0])]
    return b"".join(data[start:stop] for start, stop in spans)


def _entries_bytes(number: int, values: Mapping[str, bytes]) -> bytes:
    """Write a field that is a map, sorted by name."""
    entries = [field_bytes(1, name.encode()) + field_bytes(2, values[name]) for name in sorted(values)]
    return field_bytes(number, b"".join(field_bytes(1, entry) for entry in entries))


def _feature_bytes(name: str, values: Values) -> bytes:
    if isinstance(values, list) and all(isinstance(value, bytes) for value in values):
        return field_bytes(BYTES, b"".join(field_bytes(1, value) for value in values))
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype == np.float32:
        return field_bytes(FLOATS, _packed(values.astype("<f4").tobytes()))
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype == np.int64:
        return field_bytes(INT64S, _packed(b"".join(map(varint_bytes, values.tolist()))))
    raise InputError(
        f"The feature {name!r} cannot be part of a {_EXAMPLE}.",
        given=f"{values.dtype} of shape {values.shape}" if isinstance(values, np.ndarray) else repr(values)[:100],
        expected="a list of bytes, or a one-dimensional array of int64 or float32",
        hint="convert it: np.array([...], dtype=np.int64), np.float32, or [bytes]",
    )


def _packed(numbers: bytes) -> bytes:
    return field_bytes(1, numbers) if numbers else b""
