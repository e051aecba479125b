from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.errors import DataError, InputError
from lockstep.readers.label_map import (
    Label,
    LabelMap,
    read_label_map,
    read_labels,
    write_label_map,
)
from lockstep.storage.remote_path import RemotePath

FIXTURES = Path(__file__).parent.parent / "fixtures" / "label_maps"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "labels.pbtxt"
    path.write_text(text)
    return path


def test_files_of_labels_in_a_store_are_read() -> None:
    folder = RemotePath(f"memory://{uuid.uuid4().hex}")
    (folder / "labels.txt").write_bytes(b"cat\ndog\n")
    (folder / "map.pbtxt").write_bytes(b'item { id: 1 name: "cat" }')
    assert read_labels(f"{folder}/labels.txt") == ("cat", "dog")
    assert read_label_map(f"{folder}/map.pbtxt").ids == {"cat": 1}
    with pytest.raises(DataError, match=f"{folder}/none cannot be read"):
        read_label_map(f"{folder}/none")


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


def test_keypoints_are_read_and_other_fields_are_skipped(tmp_path: Path) -> None:
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
    assert label_map.labels == (Label(3, "person", keypoints=((7, "nose"), (8, "eye"))), Label(4, "", "dog"))
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
        ('item { id: 2147483648 name: "a" }', "the id 2147483648 of 'a'"),
        ('item { id: "1" name: "a" }', "the item in line 1"),
        ('item { id: 1.5 name: "a" }', "the item in line 1"),
        ("item { id: 1 name: a }", "the item in line 1"),
        ('item { id: 1 name: "a" keypoints { id: -1 label: "b" } }', "the item in line 1"),
        ('item { id: 1 name: "a" keypoints: 3 }', "the item in line 1"),
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
    assert refusal_of(Path("/dev/zero")).given == "it has more than 32 MiB"
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
    points = tuple((number % 7, shown) for number, (_, shown) in classes.items())
    label_map = LabelMap(tuple(Label(number, *texts, points) for number, texts in classes.items()))
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
