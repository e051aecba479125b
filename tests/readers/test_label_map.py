from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from google.protobuf import text_format
from google.protobuf.struct_pb2 import Struct
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.errors import DataError, InputError
from lockstep.readers.label_map import (
    Label,
    LabelMap,
    Word,
    parse_text_format,
    quoted,
    read_label_map,
    read_labels,
    write_label_map,
)

FIXTURES = Path(__file__).parent.parent / "fixtures" / "label_maps"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "labels.pbtxt"
    path.write_text(text)
    return path


def refusal_of(path: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        read_label_map(path)
    return caught.value


def test_a_map_of_codes_is_read() -> None:
    label_map = read_label_map(FIXTURES / "mscoco_label_map.pbtxt")
    assert len(label_map.labels) == 80
    assert label_map.labels[0] == Label(1, "/m/01g317", "person")
    assert (label_map.ids["/m/01g317"], label_map.ids["person"], label_map.names[90]) == (1, 1, "toothbrush")
    assert label_map.ids.get("unicorn", -1) == -1


def test_a_map_with_single_quotes_is_read() -> None:
    label_map = read_label_map(FIXTURES / "pascal_label_map.pbtxt")
    assert len(label_map.labels) == 20
    assert (label_map.ids["aeroplane"], label_map.names[20]) == (1, "tvmonitor")


def test_other_fields_are_skipped(tmp_path: Path) -> None:
    text = """
    # people
    item {
      keypoints { id: 7 label: "nose" }
      keypoints: { id: 8 label: 'eye' }
      id: 3  # not 7
      name: "person"
      ancestor_ids: ["a", "b"]
      frequency: FREQUENT
    }
    item: < display_name: 'dog' id: 4 >
    """
    label_map = read_label_map(written(tmp_path, text))
    assert label_map.labels == (Label(3, "person"), Label(4, "", "dog"))
    assert label_map.names == {3: "person", 4: "dog"}


def test_a_display_name_of_several_classes_stands_for_none() -> None:
    label_map = LabelMap((Label(1, "a", "x"), Label(2, "b", "x"), Label(3, "c", "a")))
    assert label_map.ids == {"a": 1, "b": 2, "c": 3}
    assert label_map.names == {1: "x", 2: "x", 3: "a"}


@pytest.mark.parametrize("item", ['id: 0 name: "background"', 'name: "none" display_name: "background"'])
def test_the_background_may_have_the_id_0(tmp_path: Path, item: str) -> None:
    assert read_label_map(written(tmp_path, f"item {{ {item} }}")).labels[0].id == 0


@pytest.mark.parametrize(
    ("text", "given_"),
    [
        ('item { id: -1 name: "a" }', "the id -1 of 'a'"),
        ('item { id: 0 name: "a" }', "the id 0 of 'a'"),
        ('item { name: "a" }', "the id 0 of 'a'"),
        ("item { id: 1 }", "no name for the id 1"),
        ('item { id: 1 name: "a" } item { id: 1 name: "b" }', "the id 1 twice, of 'a' among others"),
        ('item { id: 1 name: "a" } item { id: 2 name: "a" }', "the name 'a' twice, of the id 1 among others"),
        ('item { id: "1" name: "a" }', "the item [('id', '1'), ('name', 'a')]"),
        ('item { id: 1.5 name: "a" }', "the item [('id', Word(text='1.5')), ('name', 'a')]"),
        ("item { id: 1 name: a }", "the item [('id', Word(text='1')), ('name', Word(text='a'))]"),
        ("model { ssd {} } train_config {}", "the fields model, train_config"),
        ("", "the fields (none)"),
        ("item: 1", "the fields item"),
    ],
)
def test_a_map_that_cannot_be_used_is_refused(tmp_path: Path, text: str, given_: str) -> None:
    path = written(tmp_path, text)
    error = refusal_of(path)
    assert error.what == f"{path} cannot be used as a label map."
    assert error.given == given_
    assert error.expected == "items with an id above 0 (0 for the background) and a name, both of this item alone"
    assert error.hint == "give every class an id and a name of its own"


def test_a_map_made_by_hand_is_held_to_the_same() -> None:
    with pytest.raises(DataError, match=r"The label map cannot be used.*\n.*the id -2 of 'a'"):
        LabelMap((Label(-2, "a"),))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = refusal_of(tmp_path / "missing.pbtxt")
    assert missing.what == f"{tmp_path / 'missing.pbtxt'} cannot be read."
    assert "No such file" in str(missing.given)
    (tmp_path / "binary.pbtxt").write_bytes(b"\xff\xfe")
    binary = refusal_of(tmp_path / "binary.pbtxt")
    assert "utf-8" in str(binary.given)
    assert binary.expected == "a text file in UTF-8 that may be read"
    assert binary.hint == "check the path, and who may read it"


NAMES = st.text(min_size=1, max_size=12)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.integers(1, 2**31 - 1), st.tuples(NAMES, st.text(max_size=12)), min_size=1, max_size=6))
def test_a_map_survives_writing_and_reading(tmp_path: Path, classes: dict[int, tuple[str, str]]) -> None:
    names = {name for name, _ in classes.values()}
    if len(names) < len(classes):
        classes = {number: (f"{name} {number}", shown) for number, (name, shown) in classes.items()}
    label_map = LabelMap(tuple(Label(number, *texts) for number, texts in classes.items()))
    write_label_map(tmp_path / "labels.pbtxt", label_map)
    assert read_label_map(tmp_path / "labels.pbtxt") == label_map


def test_a_map_is_written_as_it_is_read_elsewhere(tmp_path: Path) -> None:
    write_label_map(tmp_path / "labels.pbtxt", LabelMap((Label(1, 'a"b'), Label(2, "", "c"), Label(3, "d", "e"))))
    assert (tmp_path / "labels.pbtxt").read_text() == (
        'item {\n  name: "a\\042b"\n  id: 1\n}\n\nitem {\n  id: 2\n  display_name: "c"\n}\n\n'
        'item {\n  name: "d"\n  id: 3\n  display_name: "e"\n}\n'
    )


def test_a_list_of_labels_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, "n01440764\r\n n01443537 \ntabby cat\n\n\n")
    assert read_labels(path) == ("n01440764", "n01443537", "tabby cat")


@pytest.mark.parametrize(
    ("text", "given_"),
    [
        ("", "no labels"),
        ("\n \n", "no labels"),
        ("a\n\nb\n", "line 2 is empty"),
        ("a\nb\na\n", "'a' twice: lines 1, 3"),
    ],
)
def test_a_list_whose_numbers_are_not_clear_is_refused(tmp_path: Path, text: str, given_: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(DataError) as caught:
        read_labels(path)
    assert caught.value.what == f"{path} is no list of labels."
    assert caught.value.given == given_
    assert caught.value.expected == "one label a line, each once: a label's number is that of its line"
    assert caught.value.hint == "write each label on a line of its own"


def test_a_path_may_be_text(tmp_path: Path) -> None:
    path = str(tmp_path / "map.pbtxt")
    label_map = LabelMap((Label(1, "cat"),))
    write_label_map(path, label_map)
    assert read_label_map(path) == label_map
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    assert read_labels(str(tmp_path / "labels.txt")) == ("cat", "dog")
    with pytest.raises(InputError, match=r"path is NoneType(.|\n)*a path: text, or a Path"):
        read_label_map(None)  # type: ignore[arg-type]


def test_every_kind_of_value_is_read() -> None:
    text = """
    # a comment { with "quotes"
    name: "a # b" 'c' number: -1.5e+3, word: TRUE; path : "d"
    message { inner: 1 inner: 2 } other: < inner: [3, 4] >
    empty {} strings: ["e", 'f'] messages: [{ g: 1 }, < h: 2 >]
    """
    assert parse_text_format(text, "x") == [
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
    assert parse_text_format(" # nothing\n", "x") == []


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"\a\b\f\n\r\t\v\\\'\"\?", "\a\b\f\n\r\t\v\\'\"?"),
        (r"\101\60\0601", "A001"),
        (r"\x41\X4a", "AJ"),
        (r"\303\266", "ö"),
        (r"\xc3\xb6ö\u00f6\U0001F600", "ööö\N{GRINNING FACE}"),
    ],
)
def test_escapes_are_read(written: str, read: str) -> None:
    assert parse_text_format(f'a: "{written}"', "x") == [("a", read)]


@settings(max_examples=50)
@given(st.text())
def test_strings_survive_writing_and_reading(text: str) -> None:
    assert parse_text_format(f"a: {quoted(text)}", "x") == [("a", text)]


@settings(max_examples=50)
@given(st.text(min_size=1))
def test_protobuf_reads_what_is_written_and_writes_what_is_read(text: str) -> None:
    written = f"fields {{ key: {quoted(text)} value {{ string_value: {quoted(text)} }} }}"
    message = text_format.Parse(written, Struct())
    assert dict(message) == {text: text}
    for as_utf8 in (False, True):
        printed = text_format.MessageToString(message, as_utf8=as_utf8)
        assert parse_text_format(printed, "x") == [("fields", [("key", text), ("value", [("string_value", text)])])]


@pytest.mark.parametrize(
    ("text", "line", "given_", "expected"),
    [
        ("a: 1\nb", 2, "the end of the text", "a colon after b"),
        ("n01440764\nn01443537\n", 2, "n01443537", "a colon after n01440764"),
        ('\n{"a": 1}', 2, "{", "the name of a field"),
        ("a: }", 1, "}", "a value"),
        ("a {\n b: 1\n", 3, "the end of the text", "the name of a field"),
        ("a { b: 1 >", 1, ">", "the name of a field"),
        ("a: [1, 2", 1, "the end of the text", "a value"),
        ("a: 1 }", 1, "}", "the name of a field"),
        ('a: "b\n"', 1, '"', "a value"),
        ("a: $", 1, "$", "a value"),
        (r'a: "\303"', 1, r'"\303"', "a string of UTF-8"),
        (r'a: "\ud800"', 1, r'"\ud800"', "a string of UTF-8"),
    ],
)
def test_another_format_is_refused_and_the_line_named(text: str, line: int, given_: str, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_text_format(text, "labels.pbtxt")
    error = caught.value
    assert error.what == f"labels.pbtxt is not in protocol buffers' text format: line {line} cannot be read."
    assert (error.given, error.expected) == (given_, expected)
    assert error.hint == "fix that line, or give a file of this format"


def test_deep_nesting_is_read() -> None:
    depth = 5000
    fields = parse_text_format("a {" * depth + "}" * depth, "x")
    for _ in range(depth):
        ((_, fields),) = fields  # type: ignore[assignment]
    assert fields == []


@settings(max_examples=50)
@given(st.text(st.sampled_from("a:1{}<>[]\"'\\#,\n ")))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(DataError):
        assert isinstance(parse_text_format(text, "x"), list)
