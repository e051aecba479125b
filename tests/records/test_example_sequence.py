from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protobuf_messages import SequenceExample, plain, sequence_values

from lockstep.errors import DataError, InputError
from lockstep.records.example import (
    parse_example,
    parse_sequence_example,
    serialize_example,
    serialize_sequence_example,
)
from lockstep.records.tfrecord import read_all

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tfrecord"

INT64S = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(lambda values: np.array(values, dtype=np.int64))
FLOATS = st.lists(st.floats(width=32), max_size=4).map(lambda values: np.array(values, dtype=np.float32))
VALUES = st.lists(st.binary(max_size=150), max_size=3) | INT64S | FLOATS
CONTEXTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
LISTS = st.dictionaries(st.text(max_size=5), st.lists(VALUES, max_size=4), max_size=3)


@given(context=CONTEXTS, lists=LISTS)
@settings(max_examples=50, deadline=None)
def test_what_is_parsed_is_what_was_serialised(context: dict[str, Any], lists: dict[str, Any]) -> None:
    data = serialize_sequence_example(context, lists)
    assert plain(parse_sequence_example(data)) == plain((context, lists))
    assert plain(parse_sequence_example(memoryview(data))) == plain((context, lists))


@given(context=CONTEXTS, lists=LISTS)
@settings(max_examples=50, deadline=None)
def test_protobuf_reads_what_we_write_and_writes_what_we_read(context: dict[str, Any], lists: dict[str, Any]) -> None:
    data = serialize_sequence_example(context, lists)
    assert plain(sequence_values(data)) == plain((context, lists))
    written = SequenceExample.FromString(data).SerializeToString()
    assert plain(parse_sequence_example(written)) == plain((context, lists))
    for name, steps in lists.items():
        alone = serialize_sequence_example({"a": [b"x"]}, {name: steps})
        assert SequenceExample.FromString(alone).SerializeToString() == alone


@given(lists=LISTS, places=st.lists(st.tuples(st.integers(0, 999), st.integers(0, 255)), max_size=4))
@settings(max_examples=50, deadline=None)
def test_damaged_bytes_are_an_error_or_a_sequence_example(lists: dict[str, Any], places: list[tuple[int, int]]) -> None:
    damaged = bytearray(serialize_sequence_example({"a": [b"x"]}, lists))
    for place, value in places:
        damaged[place % len(damaged)] = value
    try:
        parsed = parse_sequence_example(bytes(damaged))
    except DataError:
        return
    assert plain(parse_sequence_example(serialize_sequence_example(*parsed))) == plain(parsed)


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


def entry(name: bytes, value: bytes) -> bytes:
    return field(1, field(1, name) + field(2, value))


NUMBER = {value: field(1, field(3, b"\x08" + bytes([value]))) for value in (5, 6)}
WIRE: dict[str, tuple[bytes, list[Any]]] = {
    "the last of two lists of one name": (field(2, entry(b"a", NUMBER[5]) + entry(b"a", NUMBER[6])), [[6]]),
    "a list in two parts": (field(2, field(1, field(1, b"a") + field(2, NUMBER[5]) + field(2, NUMBER[6]))), [[5], [6]]),
    "lists in two parts": (field(2, entry(b"b", NUMBER[5])) + field(2, entry(b"a", NUMBER[6])), [[6]]),
    "a step without values": (field(2, entry(b"a", NUMBER[5] + field(1, b"") + NUMBER[6])), [[5], [], [6]]),
    "no steps": (field(2, entry(b"a", b"")), []),
    "unknown fields": (field(9, b"x") + field(2, field(7, b"x") + entry(b"a", field(8, b"x") + NUMBER[5])), [[5]]),
}


@pytest.mark.parametrize(("data", "expected"), WIRE.values(), ids=WIRE.keys())
def test_every_way_to_write_a_list(data: bytes, expected: list[Any]) -> None:
    parsed = parse_sequence_example(data)
    assert [list(step) for step in parsed.feature_lists["a"]] == expected
    assert plain(parsed) == plain(sequence_values(data))


def test_an_example_is_a_sequence_example_without_lists() -> None:
    data = serialize_example({"a": [b"x"]})
    assert parse_sequence_example(data) == ({"a": [b"x"]}, {})
    assert serialize_sequence_example({"a": [b"x"]}, {"b": [[b"y"]]}).startswith(data)
    assert parse_example(serialize_sequence_example({"a": [b"x"]}, {"b": [[b"y"]]})) == {"a": [b"x"]}


def test_sequence_examples_that_tensorflow_wrote() -> None:
    parsed = [parse_sequence_example(payload) for _, payload in read_all(FIXTURES / "sequence_example.tfrecord")]
    assert len(parsed) == 4
    for number, (context, lists) in enumerate(parsed):
        assert context["x_byte"] == [b"test str"]
        assert context["x_int"].tolist() == [number * 100 + 10 * value for value in range(10)]  # type: ignore[union-attr]
        assert [len(steps) for steps in lists.values()] == [2 * number + 3] * 3
        assert {name: len(steps[-1]) for name, steps in lists.items()} == {
            "x_byte_seq": 1,
            "x_int_seq": 10,
            "x_float_seq": 10,
        }


def test_the_order_of_the_features_does_not_show() -> None:
    context: dict[str, Any] = {"b": [b"x"], "a": np.array([1])}
    lists: dict[str, Any] = {"d": [[b"x"]], "c": []}
    reversed_ = [dict(reversed(each.items())) for each in (context, lists)]
    assert serialize_sequence_example(context, lists) == serialize_sequence_example(*reversed_)


def test_what_is_no_sequence_example_is_told_with_its_byte() -> None:
    with pytest.raises(DataError) as caught:
        parse_sequence_example(field(2, b"\x0a\x05ab"), source="Record 3 of x.tfrecord")
    assert caught.value.what == "Record 3 of x.tfrecord is not a tf.train.SequenceExample."
    assert caught.value.given == "a field longer than its message at byte 2"
    assert "the features of a tf.train.SequenceExample" in str(caught.value.expected)
    assert caught.value.hint == "write the record again, or read it as what it is"


def test_values_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"The feature 'b' cannot be part[\s\S]*given: +\['y'\][\s\S]*a list of bytes"):
        serialize_sequence_example({"a": [b"x"]}, {"b": [["y"]]})  # type: ignore[list-item]
