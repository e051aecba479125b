"""Protocol buffers' wire format."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.records.protobuf import (
    FIRST,
    SECOND,
    MalformedError,
    field_bytes,
    map_entries,
    message_fields,
    read_varint,
    varint_bytes,
)


@pytest.mark.parametrize(
    ("value", "encoded"),
    [(0, "00"), (127, "7f"), (128, "80 01"), (300, "ac 02"), (2**63, "80 80 80 80 80 80 80 80 80 01")],
)
def test_a_number_is_written_as_the_specification_says_and_read_again(value: int, encoded: str) -> None:
    data = bytes.fromhex(encoded)
    assert varint_bytes(value) == data
    assert read_varint(data, 0, len(data)) == (value, len(data))


def test_a_negative_number_has_all_its_64_bits() -> None:
    assert varint_bytes(-1) == b"\xff" * 9 + b"\x01"


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 11])
def test_a_number_without_an_end_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedError, match="a number without an end"):
        read_varint(data, 0, len(data))


def test_fields_are_found_by_tag_start_and_stop() -> None:
    data = field_bytes(1, b"abc") + b"\x10\x07" + b"\x1d" + bytes(4) + b"\x21" + bytes(8)
    assert list(message_fields(data, 0, len(data))) == [(0x0A, 2, 5), (0x10, 6, 7), (0x1D, 8, 12), (0x21, 13, 21)]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\x0a\x05ab", "a field longer than its message"),
        (b"\x0b", "a field of the unknown wire type 3"),
        (b"\x02\x00", "a field of number 0"),
    ],
)
def test_bytes_that_are_no_message_are_refused(data: bytes, what: str) -> None:
    with pytest.raises(MalformedError) as caught:
        list(message_fields(data, 0, len(data)))
    assert caught.value.what == what
    assert caught.value.place == 0


def test_a_map_has_the_spans_of_each_value_and_the_last_of_a_name_counts() -> None:
    def entry(name: bytes, value: bytes) -> bytes:
        return field_bytes(1, field_bytes(1, name) + field_bytes(2, value))

    data = field_bytes(2, b"other") + field_bytes(1, entry(b"a", b"old") + entry(b"b", b"") + entry(b"a", b"new"))
    found = {name: [data[slice(*span)] for span in spans] for name, spans in map_entries(data, FIRST).items()}
    assert found == {"a": [b"new"], "b": [b""]}
    with pytest.raises(MalformedError, match="not UTF-8"):
        map_entries(field_bytes(1, entry(b"\xff", b"")), FIRST)


UNUSUAL_ENTRIES = [
    field_bytes(2, b"first") + field_bytes(1, b"name"),  # the value before the name
    field_bytes(1, b"name"),
    field_bytes(2, b"value"),
    field_bytes(1, b"name") + field_bytes(2, b"one") + field_bytes(2, b"two"),
    field_bytes(1, b"name") + b"\x10\x05" + field_bytes(2, b"value"),
    field_bytes(1, b"n" * 130) + field_bytes(2, b"value"),
    field_bytes(1, b"name") + field_bytes(2, b"v" * 130),
    b"",
]


@given(st.lists(st.sampled_from([field_bytes(1, entry) for entry in UNUSUAL_ENTRIES] + [b"\x10\x05"]), max_size=6))
def test_a_map_is_read_as_its_fields_are_however_its_entries_are_written(entries: list[bytes]) -> None:
    data = field_bytes(1, b"".join(entries))
    expected: dict[str, list[bytes]] = {}
    for tag, start, stop in message_fields(data, len(data) - len(b"".join(entries)), len(data)):
        if tag == FIRST:
            fields = [(number, data[first:end]) for number, first, end in message_fields(data, start, stop)]
            names = [content for number, content in fields if number == FIRST]
            name = (names or [b""])[-1].decode()
            expected[name] = [content for number, content in fields if number == SECOND]
    for buffer in (data, memoryview(data)):
        for names in (None, {"name"}):
            found = map_entries(buffer, FIRST, names)
            assert {name: [data[start:stop] for start, stop in spans] for name, spans in found.items()} == {
                name: values for name, values in expected.items() if names is None or name in names
            }


@given(st.binary(max_size=12))
def test_damaged_bytes_of_a_map_are_refused_or_read_and_nothing_else(damage: bytes) -> None:
    whole = field_bytes(1, field_bytes(1, field_bytes(1, b"name") + field_bytes(2, b"value")))
    for place in range(len(whole)):
        data = whole[:place] + damage + whole[place + len(damage) :]
        try:
            found = map_entries(data, FIRST)
        except MalformedError:
            continue
        assert all(0 <= start <= stop <= len(data) for spans in found.values() for start, stop in spans)
