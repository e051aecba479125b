from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.example import parse_example, scan_example, serialize_example
from lockstep.data.tfrecord import read_all
from lockstep.errors import DataError, InputError

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tfrecord"

INT64S = st.lists(st.integers(-(2**63), 2**63 - 1)).map(lambda values: np.array(values, dtype=np.int64))
FLOATS = st.lists(st.floats(width=32)).map(lambda values: np.array(values, dtype=np.float32))
EXAMPLES = st.dictionaries(st.text(max_size=8), st.lists(st.binary(max_size=200)) | INT64S | FLOATS, max_size=6)


def protobuf_example() -> Any:
    """The message class `tf.train.Example` of the protobuf library."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto

    def message(name: str, *fields: tuple[str, int, int, str, bool]) -> Any:
        added = file.message_type.add(name=name)
        for field, number, kind, type_name, repeated in fields:
            label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            added.field.add(name=field, number=number, type=kind, type_name=type_name or None, label=label)
        return added

    message("BytesList", ("value", 1, kinds.TYPE_BYTES, "", True))
    message("FloatList", ("value", 1, kinds.TYPE_FLOAT, "", True))
    message("Int64List", ("value", 1, kinds.TYPE_INT64, "", True))
    lists = ["BytesList", "FloatList", "Int64List"]
    feature = message("Feature", *((f"f{i + 1}", i + 1, kinds.TYPE_MESSAGE, f".t.{lists[i]}", False) for i in range(3)))
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
    features = message("Features", ("feature", 1, kinds.TYPE_MESSAGE, ".t.Features.FeatureEntry", True))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=kinds.TYPE_MESSAGE, type_name=".t.Feature", label=kinds.LABEL_OPTIONAL)
    entry.options.map_entry = True
    message("Example", ("features", 1, kinds.TYPE_MESSAGE, ".t.Features", False))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


Example = protobuf_example()


def by_protobuf(data: bytes) -> dict[str, Any]:
    """The same as `parse_example`, by the protobuf library."""
    features = Example.FromString(data).features.feature
    parsed: dict[str, Any] = {}
    for name, feature in features.items():
        kind = feature.WhichOneof("kind")
        if kind == "f1":
            parsed[name] = list(feature.f1.value)
        elif kind:
            parsed[name] = np.array(getattr(feature, kind).value, dtype=np.float32 if kind == "f2" else np.int64)
    return parsed


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def plain(values: Any) -> Any:
        return values if isinstance(values, list) else (values.dtype, values.tobytes())

    return {name: plain(values) for name, values in one.items()} == {
        name: plain(values) for name, values in other.items()
    }


def field(number: int, content: bytes, wire_type: int = 2) -> bytes:
    length = bytes([len(content)]) if wire_type == 2 else b""
    return bytes([number << 3 | wire_type]) + length + content


def example(*entries: bytes) -> bytes:
    return field(1, b"".join(field(1, entry) for entry in entries))


def entry(name: bytes, *features: bytes) -> bytes:
    return field(1, name) + b"".join(field(2, feature) for feature in features)


@given(written=EXAMPLES)
@settings(max_examples=50, deadline=None)
def test_what_is_parsed_is_what_was_serialised(written: dict[str, Any]) -> None:
    data = serialize_example(written)
    assert same(parse_example(data), written)
    assert same(parse_example(memoryview(data)), written)


@given(written=EXAMPLES)
@settings(max_examples=50, deadline=None)
def test_protobuf_reads_what_we_write_and_writes_what_we_read(written: dict[str, Any]) -> None:
    data = serialize_example(written)
    assert same(by_protobuf(data), written)
    assert same(parse_example(Example.FromString(data).SerializeToString()), written)
    for name, values in written.items():
        alone = serialize_example({name: values})
        assert Example.FromString(alone).SerializeToString() == alone


def test_the_order_of_the_features_does_not_show() -> None:
    one: dict[str, Any] = {"b": [b"x"], "a": np.array([1])}
    assert serialize_example(one) == serialize_example(dict(reversed(one.items())))


def test_examples_that_tensorflow_wrote() -> None:
    parsed: list[dict[str, Any]] = [
        dict(parse_example(payload)) for _, payload in read_all(FIXTURES / "example.tfrecord")
    ]
    for number, features in enumerate(parsed):
        assert features["x_byte"] == [b"test str"]
        assert features["x_int"].tolist() == [number * 100 + 10 * value for value in range(10)]
        assert features["x_float"].tolist() == [number * 10.0 + value for value in range(10)]
        assert [features[name].dtype for name in ("x_int", "x_float")] == [np.int64, np.float32]


WIRE = {
    "unpacked ints": (example(entry(b"a", field(3, b"\x08\x05\x08\x07"))), [5, 7]),
    "packed and unpacked ints": (example(entry(b"a", field(3, b"\x08\x05\x0a\x02\x06\x07\x08\x08"))), [5, 6, 7, 8]),
    "a negative int": (example(entry(b"a", field(3, b"\x08" + b"\xff" * 9 + b"\x01"))), [-1]),
    "an int of more bytes than it needs": (example(entry(b"a", field(3, b"\x08\x85\x80\x00"))), [5]),
    "unpacked floats": (example(entry(b"a", field(2, b"\x0d\x00\x00\x80\x3f\x0d\x00\x00\x00\x40"))), [1.0, 2.0]),
    "the last of two features of one name": (
        example(entry(b"a", field(3, b"\x08\x05")), entry(b"a", field(1, field(1, b"last")))),
        [b"last"],
    ),
    "a feature in two parts": (example(entry(b"a", field(3, b"\x08\x05"), field(3, b"\x08\x06"))), [5, 6]),
    "a feature that changes its kind": (
        example(entry(b"a", field(3, b"\x08\x05") + field(1, field(1, b"x")))),
        [b"x"],
    ),
    "features in two parts": (
        example(entry(b"b", field(3, b"\x08\x05"))) + example(entry(b"a", field(3, b"\x08\x06"))),
        [6],
    ),
    "the value before the name": (
        example(field(2, field(3, b"\x08\x05")) + field(1, b"a")),
        [5],
    ),
    "unknown fields of every type": (
        field(9, b"skipped")
        + example(entry(b"a", field(8, b"\x07", 0) + field(3, b"\x08\x05") + field(7, bytes(8), 1)))
        + field(9, bytes(4), 5),
        [5],
    ),
    "a field of more than one byte of tag": (b"\xfa\x7f\x01x" + example(entry(b"a", field(3, b"\x08\x05"))), [5]),
}


@pytest.mark.parametrize(("data", "expected"), WIRE.values(), ids=WIRE.keys())
def test_every_way_to_write_an_example(data: bytes, expected: list[Any]) -> None:
    assert list(parse_example(data)["a"]) == expected
    assert same(parse_example(data), by_protobuf(data))


@pytest.mark.parametrize("data", [b"", example(), example(entry(b"a")), example(entry(b"a", b""))])
def test_nothing_is_no_features(data: bytes) -> None:
    assert parse_example(data) == {}


def test_a_feature_without_a_name_has_the_empty_one() -> None:
    assert parse_example(example(field(2, field(1, field(1, b"x"))))) == {"": [b"x"]}


MALFORMED = {
    "a field longer than its message at byte 0": b"\x0a\x05abc",
    "a field longer than its message at byte 2": b"\x0a\x03\x0a\x02x",
    "a number without an end at byte 1": b"\x0a" + b"\xff" * 20,
    "a number without an end at byte 0": b"\xff",
    "a number without an end at byte 3": b"\x0a\x01\x0a",
    "a field of the unknown wire type 3 at byte 0": b"\x0b",
    "a field of number 0 at byte 0": b"\x02\x00",
    "the name b'\\xff', which is not UTF-8, at byte 4": example(entry(b"\xff")),
    "a number without an end at byte 13": example(entry(b"a", field(3, b"\x0a\x01\x80"))),
    "5 bytes of floats, 4 bytes each, at byte 13": example(entry(b"a", field(2, b"\x0a\x05" + bytes(5)))),
}


@pytest.mark.parametrize(("given_", "data"), MALFORMED.items(), ids=MALFORMED.keys())
def test_what_is_no_example_is_told_with_its_byte(given_: str, data: bytes) -> None:
    with pytest.raises(DataError) as caught:
        parse_example(data, source="Record 3 of x.tfrecord")
    assert caught.value.what == "Record 3 of x.tfrecord is not a tf.train.Example."
    assert caught.value.given == given_
    assert "wire format" in str(caught.value.expected)
    assert caught.value.mend == "write the record again, or read it as what it is"


@given(written=EXAMPLES, places=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4))
@settings(max_examples=50, deadline=None)
def test_damaged_bytes_are_an_error_or_an_example(written: dict[str, Any], places: list[tuple[int, int]]) -> None:
    data = bytearray(serialize_example(written))
    for place, value in places:
        data[place % len(data)] = value
    try:
        features = scan_example(bytes(data))
        parsed = parse_example(bytes(data))
    except DataError:
        return
    assert features.keys() == parsed.keys()
    assert all(0 <= start <= stop <= len(data) for feature in features.values() for start, stop in feature.spans)


@pytest.mark.parametrize(
    ("values", "given_"),
    [
        (["text"], r"\['text'\]"),
        (b"alone", "b'alone'"),
        (np.array([1], dtype=np.int32), r"int32 of shape \(1,\)"),
        (np.array(1), r"int64 of shape \(\)"),
    ],
)
def test_values_that_do_not_fit_are_refused(values: Any, given_: str) -> None:
    message = rf"The feature 'a' cannot be part of a tf.train.Example.\n  given: +{given_}\n.*a list of bytes, or"
    with pytest.raises(InputError, match=message):
        serialize_example({"a": values})
