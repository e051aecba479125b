"""What a data.yaml says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.errors import DataError
from lockstep.readers.paths import class_folders
from lockstep.readers.yolo_sets import find_yolo_sets, parse_data_yaml

ROBOFLOW = """train: ../train/images
val: ../valid/images

nc: 3
names: ['Platelets', 'RBC', 'WBC']

roboflow:
  workspace: team-roboflow
  names: {nested: [1, 2]}
  url: https://universe.roboflow.com/x/y#z
"""
ULTRALYTICS = """# COCO 2017 dataset
path: ../datasets/coco # dataset root dir
train: train2017.txt # train images (relative to 'path') 118287 images
val:
  - images/a
  - 'images/b # c'
test: ~
names:
  0: person
  1: "traffic \\"light\\", red"
  2: 'it''s # one'   # a comment
  3: tennis racket, [2]
kpt_shape: [17, 3]
download: |
  names: no
  print("x")
"""
FLOWING = """names: [ person, "a, b",
  'c: d',   # wrapped
  traffic light ]
train: a/b:c
"""
LISTED = "names:\n- a b\n- \"c, d\"\n- e[1]\n'path': \"x y\"\nval: {0: a, 'b': c}\n"


def texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): texts(each) for key, each in value.items()}
    return [*map(texts, value)] if isinstance(value, list) else str(value)


@pytest.mark.parametrize("text", [ROBOFLOW, ULTRALYTICS, FLOWING, LISTED])
def test_keys_are_read_and_values_are_texts(text: str) -> None:
    whole = yaml.safe_load(text)
    keys = ("path", "train", "val", "test", "names", "nc", "kpt_shape")
    known = {key: texts(whole[key]) for key in keys if whole.get(key) is not None}
    assert parse_data_yaml(text, "data.yaml") == known


def test_nothing_that_a_file_names_is_called() -> None:
    assert parse_data_yaml("names: !!python/object/apply:os.system [ls]", "data.yaml") == {"names": ["ls"]}


GROWING = "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, 30))
"""Lists of lists that are 9**29 texts when they are written out."""


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("names: [a, [b]]", "names: ['b'] is no single value"),
        ("names: &x [a, *x]", "found unconstructable recursive node"),
        ("\nnames:\n  a:\n    b: c\n", "names: {'b': 'c'} is no single value"),
        ("names: [a, b", "line 1, column 13"),
        ("names: " + "[" * 5000, "maximum recursion depth exceeded"),
        ("- a", "no names of classes"),
        ("names: a", "names: a"),
        ("train: a", "no names of classes"),
        ("names: []", "no names of classes"),
        ("names: [a, b, a]", "the name 'a' twice"),
        ("names: {0: a, 2: b}", "names with the numbers 0, 2"),
        ("names: [a, b]\nnc: 3", "nc: 3, and 2 names"),
        ("names: [a]\ntrain: {0: b}", "train with keys"),
        ("names: [a]\nkpt_shape: [17, x]", "kpt_shape: ['17', 'x']"),
        ("names: [a]\nkpt_shape: [17, ²]", "kpt_shape: ['17', '²']"),
        (f"x0: &x0 [a]\n{GROWING}names: [*x29]", "names: [[[[[[[...], [...], "),
        ("names: [a]\ntrain: " + "x" * 300, "x: neither "),
        ("names: [a]\n#" + "x" * (1 << 20), "1048588 bytes"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(text: str, given: str, tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text(text)
    with pytest.raises(DataError) as caught:
        find_yolo_sets(tmp_path / "data.yaml")
    assert given in str(caught.value.given)
    if "neither" not in given:
        assert caught.value.what == f"{tmp_path}/data.yaml does not say what the classes are, and where their images."
        assert "names of classes, each once" in str(caught.value.expected)
        assert "names: [cat, dog]" in str(caught.value.hint)


def test_images_that_are_named_but_not_there_are_said_where_they_were_looked_for(tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text("names: [a]\ntrain: ../train/images\n")
    with pytest.raises(DataError, match=r"names images that are not there") as caught:
        find_yolo_sets(tmp_path)
    assert caught.value.given == (f"../train/images: neither {tmp_path}/train/images nor {tmp_path}/../train/images")


def test_an_export_means_its_own_folder_though_another_data_set_lies_above(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "own"):
        (folder / "train/images").mkdir(parents=True)
    (tmp_path / "own/data.yaml").write_text("names: [a]\ntrain: ../train/images\npath: " + "x" * 300)
    assert find_yolo_sets(tmp_path / "own").images == {"train": (tmp_path / "own/train/images",)}


def test_names_are_in_a_file_beside_the_labels_or_above(tmp_path: Path) -> None:
    folder = tmp_path / "set/images/train"
    for name in ("images/train", "labels/train"):
        (tmp_path / "set" / name).mkdir(parents=True)
    (folder / "1.jpg").touch()
    with pytest.raises(DataError, match=r"Nothing says what the classes in .* are: their labels are numbers"):
        find_yolo_sets(folder)
    (tmp_path / "set/classes.txt").write_text("cat\n\ndog \n")
    assert find_yolo_sets(folder).names == find_yolo_sets(tmp_path / "set").names == ("cat", "dog")
    assert find_yolo_sets(tmp_path / "set").images == {"train": (folder,)}
    (tmp_path / "set/data.yaml").write_text("names: [cow]\ntrain: images/train\n")
    assert find_yolo_sets(tmp_path / "set").names == ("cow",)


def test_a_yaml_of_something_else_beside_folders_of_classes_is_no_data_set(tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
    (tmp_path / "data.yaml").write_text("epochs: 3\nmodel: {names: [a]}\n")
    assert class_folders(tmp_path) == ("cats", "dogs")
    for text in (
        "names: [a]\n",
        "\ufeffnames: [a]\n",
        "--- {train: dogs, names: [a]}",
        '{\n  "nc": 1,\n  "names": ["a"]\n}',
    ):
        (tmp_path / "data.yaml").write_text(text)
        assert class_folders(tmp_path) == ()
        assert find_yolo_sets(tmp_path).names == ("a",)
