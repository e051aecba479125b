"""What is seen of data of somebody's own that holds objects: records and tables, which make detectors."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lockstep.cli import train
from lockstep.errors import DataError
from lockstep.readers.label_map import LabelMap, write_label_map
from lockstep.readers.open import open_source
from lockstep.readers.paths import annotations_at, class_folders
from lockstep.recipes.data import DetectionData
from lockstep.recipes.toml import load
from lockstep.records.example import Values, serialize_example
from lockstep.records.tfrecord import write_records
from lockstep.runs.chosen_recipe import choose_recipe
from lockstep.runs.data_sets import find_data_sets
from lockstep.runs.found_data import look_at

NUM_IMAGES, WIDTH, HEIGHT = 12, 40, 30
NAMES = ("cat", "dog")
BOX = (10.0, 6.0, 20.0, 15.0)
"""x, y, width and height in pixels, of the one object on each image; a cat on even ones, a dog on the others."""


def jpeg(folder: Path, number: int) -> bytes:
    draws = np.random.default_rng(number)
    pixels = draws.integers(0, 90, (HEIGHT, WIDTH, 3), np.uint8)
    x, y, width, height = map(int, BOX)
    pixels[y : y + height, x : x + width, number % 2] += 150
    Image.fromarray(pixels).save(folder / "one.png")
    return (folder / "one.png").read_bytes()


def write_shards(folder: Path, of_object: Callable[[int], dict[str, Values]]) -> Path:
    """Write records as TensorFlow's Object Detection API has them, with what is said of the class of an object."""
    (place := folder / "records").mkdir()
    x, y, width, height = BOX
    edges = {"xmin": x / WIDTH, "xmax": (x + width) / WIDTH, "ymin": y / HEIGHT, "ymax": (y + height) / HEIGHT}
    records = [
        serialize_example(
            {"image/encoded": [jpeg(folder, number)], **of_object(number)}
            | {f"image/object/bbox/{name}": np.array([edge], np.float32) for name, edge in edges.items()}
        )
        for number in range(NUM_IMAGES)
    ]
    write_records(place / "train-00000-of-00001", records)
    return place


def write_table(folder: Path, column: str, of_row: Callable[[int], Any]) -> Path:
    rows = [{"image": {"bytes": jpeg(folder, n), "path": None}, column: of_row(n)} for n in range(NUM_IMAGES)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "table.parquet")
    return folder / "table.parquet"


def chosen_data(path: Path) -> tuple[tuple[str, ...], DetectionData, list[int]]:
    """The classes, the data of the recipe, and the labels that the training reads, which are those of the model."""
    found = look_at(find_data_sets(str(path)))
    assert found.has_objects
    data = choose_recipe(found, "run", None, 0).recipe.data
    assert isinstance(data, DetectionData)
    reader = data.reader("train", len(found.classes), to_train=True)
    labels = reader.read_batch(np.arange(len(reader)))["labels"].values.tolist()
    return found.classes, data, sorted({*labels})


def number_from(first: int) -> Callable[[int], dict[str, Values]]:
    return lambda number: {"image/object/class/label": np.array([first + number % 2])}


def name(number: int) -> dict[str, Values]:
    return {"image/object/class/text": [NAMES[number % 2].encode()]}


@pytest.mark.parametrize(("first", "offset"), [(1, 0), (0, -1)])
def test_records_with_numbers_count_from_either(tmp_path: Path, first: int, offset: int) -> None:
    classes, data, labels = chosen_data(write_shards(tmp_path, number_from(first)))
    assert classes == (str(first), str(first + 1))
    assert (data.labels_offset, data.label_map, labels) == (offset, None, [1, 2])


def test_records_with_names_need_a_label_map_which_the_refusal_writes(tmp_path: Path) -> None:
    place = write_shards(tmp_path, name)
    with pytest.raises(DataError, match=r"have names of classes, and no numbers.*\n.*cat, dog") as caught:
        look_at(find_data_sets(str(place)))
    command = caught.value.hint.removesuffix("; then give the same command again")
    *printf, text, _, file = shlex.split(command)
    assert printf == ["printf", r"%s\n"]
    Path(file).write_text(text + "\n")
    for path in (place, place / "train-*"):
        classes, data, labels = chosen_data(path)
        assert (classes, data.label_map, labels) == (NAMES, str(place / "label_map.pbtxt"), [1, 2])

    write_label_map(place / "label_map.pbtxt", LabelMap.alphabetical(["cat"]))
    with pytest.raises(DataError, match=r"given: +dog in .*, and none of these in .*label_map.pbtxt"):
        look_at(find_data_sets(str(place)))


def test_a_label_map_names_the_numbers(tmp_path: Path) -> None:
    place = write_shards(tmp_path, number_from(1))
    write_label_map(place / "classes.pbtxt", LabelMap.alphabetical(NAMES))
    assert chosen_data(place)[::2] == (NAMES, [1, 2])


@pytest.mark.parametrize(
    ("of_row", "classes", "offset"),
    [
        (lambda n: {"bbox": [[*BOX]], "category": [NAMES[n % 2]]}, NAMES, 0),
        (lambda n: [{"bbox": [*BOX], "category": n % 2}], ("1", "2"), -1),
        (lambda n: [{"bbox": [*BOX], "category_id": 1 + n % 2}], ("1", "2"), 0),
    ],
    ids=["names", "from_0", "from_1"],
)
def test_tables_with_objects(tmp_path: Path, of_row: Any, classes: tuple[str, ...], offset: int) -> None:
    found, data, labels = chosen_data(write_table(tmp_path, "objects", of_row))
    assert (found, data.labels_offset, labels) == (classes, offset, [1, 2])


@pytest.mark.parametrize(
    ("column", "of_row", "said"),
    [
        ("objects", {"bbox": [[30.0, 20.0, 39.0, 29.0]], "category": [1]}, "write right - left and bottom - top"),
        ("objects", {"bbox": [[0.25, 0.2, 0.5, 0.5]], "category": [1]}, "multiply boxes that are shares"),
        ("note", "a cat", "in tables a column label, or a column objects of bbox and category"),
    ],
)
def test_tables_of_other_objects_say_how_to_write_them(tmp_path: Path, column: str, of_row: Any, said: str) -> None:
    with pytest.raises(DataError) as caught:
        look_at(find_data_sets(str(write_table(tmp_path, column, lambda n: of_row))))
    assert said in str(caught.value)


@pytest.mark.slow
@pytest.mark.process
def test_a_table_trains_a_detector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path, "objects", lambda n: {"bbox": [[*BOX]], "category": [n % 2]})
    small = ["--set", "data.resizer.height=96", "--set", "data.resizer.width=96"]
    words = ["train", "table.parquet", "--steps", "2", "--device", "cpu", *small]
    assert train.plan_train(words)["workers"] >= 1
    assert train.train_as_worker(words) == 0
    data = load(Path("runs/table/recipe.toml")).data
    assert isinstance(data, DetectionData)
    assert data.labels_offset == -1
    assert all(Path("runs/table", name).is_file() for name in ("mistakes.png", "confusion.csv", "curves.csv"))


def test_a_set_may_lack_classes_of_that_to_train_on_and_not_have_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for split, names in {"train": NAMES, "valid": NAMES[1:], "test": ("dog", "cow")}.items():
        Path("data", split).mkdir(parents=True)
        lines = ["filename,class,xmin,ymin,xmax,ymax"]
        for number in range(4):
            Path("data", split, f"{number}.png").write_bytes(jpeg(tmp_path, number))
            lines.append(f"{number}.png,{names[number % len(names)]},10,6,30,21")
        Path("data", split, "_annotations.csv").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"of a class that none in data/train/.*, to train on, is of") as caught:
        choose_recipe(look_at(find_data_sets("data")), "run", None, 0)
    assert "an object of it is on 1.png; the class 'cow'" in str(caught.value.given)
    shutil.rmtree("data/test")
    chosen = choose_recipe(look_at(find_data_sets("data")), "run", None, 0)
    reader = chosen.recipe.data.reader("validation", 2)
    assert {*reader.read_batch(np.arange(4))["labels"].values.tolist()} == {2}
    Path("data/train").rename("data/Train")
    assert open_source("data/valid").classes == {1: "cat", 2: "dog"}
    monkeypatch.chdir("data/valid")
    assert open_source(".").classes == open_source("_annotations.csv").classes == {1: "cat", 2: "dog"}


def test_files_of_coco_beside_the_folders_of_their_images_are_sets(tmp_path: Path) -> None:
    for split, name in {"train": "train.json", "val": "instances_val.json"}.items():
        (tmp_path / split).mkdir()
        listed = []
        for number in range(3):
            (tmp_path / split / f"{number}.png").write_bytes(jpeg(tmp_path, number))
            listed.append({"id": number, "file_name": f"{number}.png", "width": WIDTH, "height": HEIGHT})
        objects = [{"id": n, "image_id": n, "category_id": n % 2, "bbox": BOX} for n in range(3)]
        categories = [{"id": number, "name": name} for number, name in enumerate(NAMES)]
        whole = {"images": listed, "annotations": objects, "categories": categories}
        (tmp_path / name).write_text(json.dumps(whole))
    (tmp_path / "one.png").unlink()
    (tmp_path / "annotations").mkdir()
    for split in ("train", "val"):
        shutil.copy(tmp_path / "instances_val.json", tmp_path / f"annotations/instances_{split}.json")
    (tmp_path / "annotations/image_info_test.json").write_text(json.dumps(whole | {"annotations": []}))
    assert find_data_sets(str(tmp_path)).test is None  # the images of COCO's test have no objects to score
    shutil.rmtree(tmp_path / "annotations")
    (tmp_path / "runs/mine").mkdir(parents=True)
    sets = find_data_sets(str(tmp_path))
    assert sets[:2] == (str(tmp_path / "train.json"), str(tmp_path / "instances_val.json"))
    found = look_at(sets)
    assert (found.num_images, found.classes) == (3, NAMES)
    with pytest.raises(DataError, match=r"name one of its files of annotations: .*instances_val\.json"):
        annotations_at(tmp_path)
    (tmp_path / "instances_val.json").write_text((tmp_path / "instances_val.json").read_text()[:200])
    with pytest.raises(DataError, match=r"instances_val\.json"):  # and not a share of the training images in its place
        choose_recipe(look_at(find_data_sets(str(tmp_path))), "run", None, 0)
    for name in ("train.json", "instances_val.json"):
        (tmp_path / name).write_text('{"train": "of something else"}')
    with pytest.raises(DataError, match="holds sets of images"):
        find_data_sets(str(tmp_path))
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(DataError, match="holds sets of images"):
        class_folders(tmp_path)
