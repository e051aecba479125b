from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protobuf_messages import Example, example_values, plain

from lockstep.errors import DataError, InputError
from lockstep.records.example import parse_example, scan_example, serialize_example
from lockstep.records.protobuf import field_bytes
from lockstep.records.tfrecord import read_all

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tfrecord"

INTEGERS = st.integers(-(2**63), 2**63 - 1)
INT64S = st.lists(INTEGERS, max_size=40).map(lambda values: np.array(values, dtype=np.int64))
FLOATS = st.lists(st.floats(width=32)).map(lambda values: np.array(values, dtype=np.float32))
EXAMPLES = st.dictionaries(st.text(max_size=8), st.lists(st.binary(max_size=200)) | INT64S | FLOATS, max_size=6)


def varint(value: int, size: int = 1) -> bytes:
    """A number in 7 bits a byte, in more bytes than it needs if `size` says so."""
    value &= 2**64 - 1
    size = max(size, -(-value.bit_length() // 7))
    parts = [value >> 7 * place & 127 | 128 for place in range(size)]
    return bytes([*parts[:-1], parts[-1] & 127])


def field(number: int, content: bytes, wire_type: int = 2) -> bytes:
    length = varint(len(content)) if wire_type == 2 else b""
    return bytes([number << 3 | wire_type]) + length + content


def example(*entries: bytes) -> bytes:
    return field(1, b"".join(field(1, entry) for entry in entries))


def entry(name: bytes, *features: bytes) -> bytes:
    return field(1, name) + b"".join(field(2, feature) for feature in features)


@given(written=EXAMPLES)
@settings(max_examples=50, deadline=None)
def test_what_is_parsed_is_what_was_serialised(written: dict[str, Any]) -> None:
    data = serialize_example(written)
    assert plain(parse_example(data)) == plain(written)
    assert plain(parse_example(memoryview(data))) == plain(written)


@given(written=EXAMPLES)
@settings(max_examples=50, deadline=None)
def test_protobuf_reads_what_we_write_and_writes_what_we_read(written: dict[str, Any]) -> None:
    data = serialize_example(written)
    assert plain(example_values(data)) == plain(written)
    assert plain(parse_example(Example.FromString(data).SerializeToString())) == plain(written)
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
    assert plain(parse_example(data)) == plain(example_values(data))


def in_parts(number: int, packed: st.SearchStrategy[bytes], each: st.SearchStrategy[bytes]) -> Any:
    """Some features of a kind, as writers may write them: their values packed, one by one, and both."""
    return st.lists(packed.map(lambda content: field(1, content)) | each, max_size=3).map(
        lambda parts: field(number, b"".join(parts))
    )


NUMBERS = st.builds(varint, INTEGERS, st.integers(1, 10))
FOUR_BYTES = st.binary(min_size=4, max_size=4)
UNKNOWN = st.sampled_from(
    [field(9, b"skipped"), field(15, b"\x80\x01", 0), field(7, bytes(8), 1), field(8, bytes(4), 5)]
)
FEATURES = st.lists(
    UNKNOWN
    | in_parts(1, st.binary(max_size=9), UNKNOWN)
    | in_parts(2, st.lists(FOUR_BYTES, max_size=5).map(b"".join), FOUR_BYTES.map(lambda value: field(1, value, 5)))
    | in_parts(3, st.lists(NUMBERS, max_size=30).map(b"".join), NUMBERS.map(lambda value: field(1, value, 0))),
    max_size=3,
).map(b"".join)
# Without unknown fields: for one of them, protobuf's Python library drops the whole entry.
ENTRIES = st.lists(
    st.sampled_from([field(1, b"a"), field(1, b"b")]) | FEATURES.map(lambda feature: field(2, feature)),
    max_size=4,
).map(b"".join)
MESSAGES = st.lists(UNKNOWN | st.lists(ENTRIES, max_size=3).map(lambda entries: example(*entries)), max_size=2).map(
    b"".join
)


@given(data=MESSAGES)
@settings(max_examples=50, deadline=None)
def test_however_an_example_is_written_it_is_read_as_protobuf_reads_it(data: bytes) -> None:
    assert plain(parse_example(data)) == plain(example_values(data))


@given(data=MESSAGES, wanted=st.sets(st.sampled_from(["a", "b", ""])))
@settings(max_examples=50, deadline=None)
def test_the_features_that_are_wanted_are_those_of_all(data: bytes, wanted: set[str]) -> None:
    parsed = parse_example(data)
    expected = {name: values for name, values in parsed.items() if name in wanted}
    assert plain(parse_example(data, names=wanted)) == plain(expected)


def test_what_features_hold_that_are_not_wanted_is_not_looked_at() -> None:
    data = example(entry(b"a", field(3, b"\x0a\x01\x80")), entry(b"b", field(1, field(1, b"x"))))
    assert parse_example(data, names={"b"}) == {"b": [b"x"]}


@pytest.mark.parametrize("count", [1, 20, 63, 64, 65, 300])
@pytest.mark.parametrize("value", [0, 127, 128, -1, 2**63 - 1])
def test_integers_are_the_same_however_many_there_are(count: int, value: int) -> None:
    values = np.resize(np.array([value, 1, -(2**63), 300]), count)
    packed = field(3, field(1, b"".join(map(varint, values.tolist()))))
    one_by_one = field(3, b"".join(field(1, varint(each), 0) for each in values.tolist()))
    for feature in (packed, one_by_one):
        assert parse_example(example(entry(b"a", feature)))["a"].tolist() == values.tolist()  # type: ignore[union-attr]


@given(size=st.integers(0, 400), lie=st.integers(1, 2**63), depth=st.integers(0, 4))
@settings(max_examples=50, deadline=None)
def test_a_length_that_lies_is_an_error_and_takes_no_memory(size: int, lie: int, depth: int) -> None:
    content = bytes(size)
    lying = b"\x0a" + varint(size + lie) + content
    for number in (1, 2, 1, 1)[4 - depth :]:
        lying = field(number, lying)
    with pytest.raises(DataError, match="a field longer than its message at byte "):
        parse_example(lying)


@given(written=EXAMPLES)
@settings(max_examples=20, deadline=None)
def test_an_example_cut_anywhere_is_an_error_or_has_fewer_features(written: dict[str, Any]) -> None:
    data = serialize_example(written)
    for size in range(1, len(data)):
        with pytest.raises(DataError, match=r"is not a tf\.train\.Example"):
            parse_example(data[:size])


IMAGENET = {
    "image/encoded": [b"\xff\xd8"],
    "image/class/label": np.array([812]),
    "image/object/bbox/xmin": np.array([0.25, 0.5], np.float32),
}


@pytest.mark.parametrize("left_out", IMAGENET)
def test_a_feature_that_was_not_written_is_not_among_those_read(left_out: str) -> None:
    features = {name: values for name, values in IMAGENET.items() if name != left_out}
    parsed = parse_example(serialize_example(features), names=IMAGENET)
    assert plain(parsed) == plain(features)


@pytest.mark.parametrize("boxes", [0, 1, 300])
def test_a_feature_has_as_many_values_as_were_written(boxes: int) -> None:
    features = {**IMAGENET, "image/object/bbox/xmin": np.linspace(0, 1, boxes, dtype=np.float32)}
    assert plain(parse_example(serialize_example(features))) == plain(features)


@pytest.mark.parametrize("data", [b"", example(), example(entry(b"a")), example(entry(b"a", b""))])
def test_an_empty_example_has_no_features(data: bytes) -> None:
    assert parse_example(data) == {}


def test_unknown_fields_beside_a_feature_are_skipped() -> None:
    assert parse_example(example(field(9, b"x") + entry(b"a", field(1, field(1, b"y"))))) == {"a": [b"y"]}


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
    assert caught.value.hint == "write the record again, or read it as what it is"


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


def test_many_lists_without_numbers_are_no_numbers() -> None:
    numbers = field_bytes(3, field_bytes(1, b"") * 100)
    example = field_bytes(1, field_bytes(1, field_bytes(1, b"label") + field_bytes(2, numbers)))
    assert parse_example(example)["label"].tolist() == []  # type: ignore[union-attr]
