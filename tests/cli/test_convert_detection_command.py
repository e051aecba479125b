from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from PIL import Image

from lockstep.cli.convert import CONVERTERS
from lockstep.readers.label_map import Label, LabelMap, read_label_map, write_label_map
from lockstep.records.example import Values, parse_example
from lockstep.records.record_files import RecordFiles

OBJECT = """<object><name>{name}</name><difficult>{difficult}</difficult>
<bndbox><xmin>2</xmin><ymin>1</ymin><xmax>8</xmax><ymax>4</ymax></bndbox></object>"""


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    """The year 2012 alone: an easy dog and a difficult cat on the image of "val", none on that of "train"."""
    folder = tmp_path / "VOC2012"
    for name, objects in (
        ("a", ""),
        ("b", OBJECT.format(name="dog", difficult=0) + OBJECT.format(name="cat", difficult=1)),
    ):
        for path in (folder / "JPEGImages" / f"{name}.jpg", folder / "Annotations" / f"{name}.xml"):
            path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 8)).save(folder / "JPEGImages" / f"{name}.jpg")
        size = "<size><width>16</width><height>8</height><depth>3</depth></size>"
        (folder / "Annotations" / f"{name}.xml").write_text(
            f"<annotation><filename>{name}.jpg</filename>{size}{objects}</annotation>"
        )
    for split, name in (("train", "a"), ("val", "b")):
        path = folder / "ImageSets" / "Main" / f"{split}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    path = tmp_path / "instances.json"
    Image.new("RGB", (16, 8)).save(tmp_path / "7.jpg")
    categories = [{"id": 18, "name": "dog", "keypoints": ["nose"], "skeleton": []}]
    found = {"id": 1, "image_id": 7, "category_id": 18, "bbox": [2, 1, 6, 4], "area": 20.5, "iscrowd": 0}
    outline = {"segmentation": [[2, 1, 8, 1, 8, 5, 2, 5]], "keypoints": [4, 2, 2], "num_keypoints": 1}
    images = [{"id": 7, "file_name": "7.jpg", "height": 8, "width": 16}]
    path.write_text(json.dumps({"images": images, "categories": categories, "annotations": [{**found, **outline}]}))
    return path


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    path = tmp_path / "labels.pbtxt"
    write_label_map(path, LabelMap((Label(5, "cat"), Label(9, "dog"))))
    return path


def convert(kind: str, output: Path, *words: object) -> list[dict[str, Values]]:
    """What the command writes."""
    command = argparse.ArgumentParser()
    CONVERTERS[kind].add_arguments(command)
    CONVERTERS[kind].run(command.parse_args([*map(str, words), "--to", str(output), "--processes", "1"]))
    records = RecordFiles(output / "*-of-*")
    return [parse_example(records.read(index)) for index in range(len(records))]


def convert_voc(output: Path, *words: object) -> list[dict[str, Values]]:
    return convert("voc", output, *words)


def convert_coco(output: Path, *words: object) -> list[dict[str, Values]]:
    return convert("coco", output, *words)


def test_a_set_of_a_year_of_voc_is_converted(voc: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    (found,) = convert_voc(output, "--data-dir", voc.parent, "--year", "VOC2012", "--set", "val")
    assert found["image/object/class/text"] == [b"dog", b"cat"]
    assert (output / "val-00000-of-00001").exists()
    assert read_label_map(output / "label_map.pbtxt").names == {1: "cat", 2: "dog"}


def test_without_a_year_the_folder_itself_is_converted_and_train_is_the_set(voc: Path, tmp_path: Path) -> None:
    (found,) = convert_voc(tmp_path / "out", "--data-dir", voc)
    assert found["image/filename"] == [b"a.jpg"]


def test_voc_is_converted_as_the_flags_say(voc: Path, labels: Path, tmp_path: Path) -> None:
    words = ["--set", "all", "--ignore-difficult", "--label-map", labels, "--name", "pascal", "--shards", "2"]
    found = convert_voc(tmp_path / "out", "--data-dir", voc, *words)
    assert [[*example["image/object/class/label"]] for example in found] == [[], [9]]
    assert (tmp_path / "out" / "pascal-00001-of-00002").exists()
    assert not (tmp_path / "out" / "label_map.pbtxt").exists()


def test_coco_is_converted(coco: Path, tmp_path: Path) -> None:
    (found,) = convert_coco(tmp_path / "out", "--annotations", coco, "--images", coco.parent)
    assert list(found["image/object/class/label"]) == [18]
    assert not {"image/object/mask", "image/object/keypoint/x"} & {*found}
    assert (tmp_path / "out" / "instances-00000-of-00001").exists()


def test_coco_with_categories_from_0_is_converted(coco: Path, tmp_path: Path) -> None:
    coco.write_text(coco.read_text().replace('"id": 18', '"id": 0').replace('"category_id": 18', '"category_id": 0'))
    (found,) = convert_coco(tmp_path / "out", "--annotations", coco, "--images", coco.parent, "--zero-based")
    assert list(found["image/object/class/label"]) == [1]
    assert read_label_map(tmp_path / "out" / "label_map.pbtxt").names == {1: "dog"}


def test_coco_is_converted_as_the_flags_say(coco: Path, labels: Path, tmp_path: Path) -> None:
    words = ["--masks", "--keypoints", "--label-map", labels, "--name", "val", "--shards", "1"]
    (found,) = convert_coco(tmp_path / "out", "--annotations", coco, "--images", coco.parent, *words)
    assert list(found["image/object/class/label"]) == [9]
    assert len(found["image/object/mask"]) == 1
    assert list(found["image/object/keypoint/x"]) == [0.25]
    assert (tmp_path / "out" / "val-00000-of-00001").exists()
