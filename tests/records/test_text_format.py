from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from google.protobuf import text_format
from google.protobuf.struct_pb2 import Struct
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.records.text_format import Field, Place, Word, parse_text_format, quoted


def read(text: str) -> list[tuple[str, Any]]:
    """The fields of a text without their places."""
    return plain(parse_text_format(text, "x"))


def plain(fields: list[Field]) -> list[tuple[str, Any]]:
    return [(field.name, plain(field.value) if isinstance(field.value, list) else field.value) for field in fields]


def test_fields_and_values_have_their_places() -> None:
    text = 'a: 1\n  b {\n    c: [2,\n 3] # end\n  }\nd: "e"\n "f"'
    first, message, last = parse_text_format(text, "x")
    assert (first.place, first.value_place) == (Place(1, 1), Place(1, 4))
    assert (message.place, message.value_place) == (Place(2, 3), Place(2, 5))
    assert isinstance(message.value, list)
    assert [(field.place, field.value_place) for field in message.value] == [
        (Place(3, 5), Place(3, 9)),
        (Place(3, 5), Place(4, 2)),
    ]
    assert last.value_place == Place(6, 4)


def test_every_kind_of_value_is_read() -> None:
    text = """
    # a comment { with "quotes"
    name: "a # b" 'c' number: -1.5e+3, word: TRUE; path : "d"
    message { inner: 1 inner: 2 } other: < inner: [3, 4] >
    empty {} strings: ["e", 'f'] messages: [{ g: 1 }, < h: 2 >]
    """
    assert read(text) == [
        ("name", "a # bc"),
        ("number", Word("-1.5e+3")),
        ("word", Word("TRUE")),
        ("path", "d"),
        ("message", [("inner", Word("1")), ("inner", Word("2"))]),
        ("other", [("inner", Word("3")), ("inner", Word("4"))]),
        ("empty", []),
        ("strings", "e"),
        ("strings", "f"),
        ("messages", [("g", Word("1"))]),
        ("messages", [("h", Word("2"))]),
    ]


def test_a_text_may_be_empty() -> None:
    assert read(" # nothing\n") == []


@pytest.mark.parametrize(
    ("written", "content"),
    [
        (r"\a\b\f\n\r\t\v\\\'\"\?", "\a\b\f\n\r\t\v\\'\"?"),
        (r"\101\60\0601", "A001"),
        (r"\x41\X4a", "AJ"),
        (r"\303\266", "ö"),
        (r"\xc3\xb6ö\u00f6\U0001F600", "ööö\N{GRINNING FACE}"),
    ],
)
def test_escapes_are_read(written: str, content: str) -> None:
    assert read(f'a: "{written}"') == [("a", content)]


@settings(max_examples=50)
@given(st.text())
def test_strings_survive_writing_and_reading(text: str) -> None:
    assert read(f"a: {quoted(text)}") == [("a", text)]


@settings(max_examples=50)
@given(st.text(min_size=1))
def test_protobuf_reads_what_is_written_and_writes_what_is_read(text: str) -> None:
    written = f"fields {{ key: {quoted(text)} value {{ string_value: {quoted(text)} }} }}"
    message = text_format.Parse(written, Struct())
    assert dict(message) == {text: text}
    for as_utf8 in (False, True):
        printed = text_format.MessageToString(message, as_utf8=as_utf8)
        assert read(printed) == [("fields", [("key", text), ("value", [("string_value", text)])])]


@pytest.mark.parametrize(
    ("text", "place", "given_", "expected"),
    [
        ("a: 1\nb", Place(2, 2), "the end of the text", "a colon after b"),
        ("n01440764\nn01443537\n", Place(2, 1), "n01443537", "a colon after n01440764"),
        ('\n{"a": 1}', Place(2, 1), "{", "the name of a field"),
        ("a: }", Place(1, 4), "}", "a value"),
        ("a {\n b: 1\n", Place(3, 1), "the end of the text", "the name of a field"),
        ("a { b: 1 >", Place(1, 10), ">", "the name of a field"),
        ("a: [1, 2", Place(1, 9), "the end of the text", "a value"),
        ("a: 1 }", Place(1, 6), "}", "the name of a field"),
        ('a: "b\n"', Place(1, 4), '"b', 'a closing " on the same line'),
        ("a {\n  b: 'c\\\n'}", Place(2, 6), "'c\\", "a closing ' on the same line"),
        ('a: "b" "c', Place(1, 8), '"c', 'a closing " on the same line'),
        ("a: $", Place(1, 4), "$", "a value"),
        (r'a: "\303"', Place(1, 4), r'"\303"', "a string of UTF-8"),
        (r'a: "\ud800"', Place(1, 4), r'"\ud800"', "a string of UTF-8"),
        (r'a: "\U00110000"', Place(1, 4), r'"\U00110000"', "a string of UTF-8"),
        (r'a: "b" "\UFFFFFFFF"', Place(1, 4), '"b"', "a string of UTF-8"),
    ],
)
def test_another_format_is_refused_and_the_place_named(text: str, place: Place, given_: str, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_text_format(text, "labels.pbtxt")
    error = caught.value
    assert error.what == f"labels.pbtxt is not in protocol buffers' text format: {place} cannot be read."
    assert (error.given, error.expected) == (given_, expected)
    assert error.hint == "fix that line, or give a file of this format"


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        ('a: "' + '\\"' * 2_000_000, 4, 'a closing " on the same line'),
        ("a: '" + "\\'" * 2_000_000, 4, "a closing ' on the same line"),
        ('a: "' + "b" * 4_000_000 + '\n"', 4, 'a closing " on the same line'),
        ("a: #" + "b" * 4_000_000, 4_000_005, "a value"),
        ("a: " + "$" * 4_000_000, 4, "a value"),
    ],
    ids=["escaped double quotes", "escaped single quotes", "a long line", "a comment", "no tokens"],
)
def test_megabytes_that_are_wrong_take_a_time_linear_in_them(text: str, column: int, expected: str) -> None:
    # If each of these quotes were looked at as the beginning of a string, that would take hours.
    with pytest.raises(DataError) as caught:
        parse_text_format(text, "x")
    assert f"line 1, column {column} cannot" in caught.value.what
    assert caught.value.expected == expected


def test_deep_nesting_is_read() -> None:
    depth = 5000
    fields = parse_text_format("a {" * depth + "}" * depth, "x")
    for _ in range(depth):
        fields = fields[0].value  # type: ignore[assignment]
    assert fields == []


@settings(max_examples=50)
@given(st.text(st.sampled_from("a:1{}<>[]\"'\\#,\n ")))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(DataError):
        assert isinstance(parse_text_format(text, "x"), list)
