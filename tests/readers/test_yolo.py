from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data.loader import Loader
from lockstep.errors import DataError
from lockstep.readers.coco import Coco
from lockstep.readers.label_map import Label, LabelMap
from lockstep.readers.open import open_detection, open_source
from lockstep.readers.reader import Reader
from lockstep.readers.yolo import Yolo
from lockstep.recipes.data import DetectionData
from lockstep.runs.data_sets import find_data_sets


def data_set(folder: Path, *labels: str | None, yaml: str = "names: [cat, dog]", split: str = "train") -> Path:
    """An image of 8 x 4 pixels for each text of labels, and a data.yaml that names their set."""
    for name in ("images", "labels"):
        (folder / name / split).mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(labels):
        Image.new("RGB", (8, 4)).save(folder / f"images/{split}/{number}.png")
        if text is not None:
            (folder / f"labels/{split}/{number}.txt").write_text(text)
    there = folder / "data.yaml"
    there.write_text((there.read_text() if there.exists() else yaml) + f"\n{split}: images/{split}\n")
    return folder


def boxes_of(reader: Reader, index: int = 0) -> list[list[float]]:
    rows: list[list[float]] = reader.read_batch(np.array([index]))["boxes"].values.tolist()
    return rows


def test_a_line_is_a_box_a_polygon_or_a_box_with_keypoints(tmp_path: Path) -> None:
    box, polygon = "1 0.5 0.5 0.25 0.5", "0 0.25 0.5 0.5 0.25 0.75 1"
    reader = Yolo(data_set(tmp_path / "a", f"{box}\n\n{polygon}\n", None, ""), truth=True)
    assert [len(each) for each in reader.read_batch(np.arange(3))["boxes"]] == [2, 0, 0]
    assert boxes_of(reader) == [[0.25, 0.375, 0.75, 0.625], [0.25, 0.25, 1, 0.75]]
    batch = reader.read_batch(np.array([0]))
    assert batch["class_text"] == [["dog", "cat"]]
    assert batch["truth_boxes"].values.tolist() == [[3, 1, 2, 2], [2, 1, 4, 3]]
    assert [reader.example_id(index) for index in range(3)] == ["0.png", "1.png", "2.png"]
    keypoints = data_set(tmp_path / "b", f"{box} 0.1 0.2 2 300 400 0", yaml="names: [cat, dog]\nkpt_shape: [2, 3]")
    assert boxes_of(Yolo(keypoints)) == [[0.25, 0.375, 0.75, 0.625]]


def test_sets_are_named_and_without_a_name_all_are_read(tmp_path: Path) -> None:
    folder = data_set(tmp_path, "0 0.5 0.5 1 1")
    data_set(folder, "1 0.5 0.5 1 1", "1 0.5 0.5 1 1", split="val")
    assert [len(Yolo(folder, split)) for split in ("train", "val", None)] == [1, 2, 3]
    assert len(open_source(folder)) == 1
    data = DetectionData(str(folder), str(folder / "data.yaml"), labels_offset=-1)
    assert [len(data.reader(split, 2)) for split in ("train", "validation")] == [1, 2]
    assert len(open_detection(folder / "images/val", split="train")) == 2
    with pytest.raises(DataError, match=r"has no set 'test'\.\n.*train, val in ") as caught:
        DetectionData(test=str(folder)).reader("test", 2)
    assert 'data.validation="10 %"' in str(caught.value.hint)


def test_a_list_names_images_from_its_folder_on(tmp_path: Path) -> None:
    folder = data_set(tmp_path, "0 0.5 0.5 1 1", "1 0.5 0.5 1 1")
    (folder / "some.txt").write_text("./images/train/1.png\n")
    (folder / "data.yaml").write_text("names: [cat, dog]\ntrain: some.txt\n")
    assert Yolo(folder, "train").read_batch(np.array([0]))["class_text"] == [["dog"]]
    (folder / "some.txt").write_text("./images/train/1.png\nimages/train/7.png\n")
    with pytest.raises(DataError, match=r"Images are missing in .*\n.*no 7\.png"):
        Yolo(folder, "train")


def cvat(folder: Path, above: str = "data/") -> Path:
    """What CVAT exports as YOLO 1.1: lists of images, whose paths are those from the folder above on."""
    lists = {"train": ("0 0.5 0.5 1 1", ""), "valid": ("1 0.5 0.5 1 1",)}
    said = [f"classes = 2\nnames = {above}obj.names\nbackup = backup/"]
    for split, texts in lists.items():
        (inside := folder / f"obj_{split}_data").mkdir(parents=True)
        for number, text in enumerate(texts):
            Image.new("RGB", (8, 4)).save(inside / f"{number}.png")
            (inside / f"{number}.txt").write_text(text)
        names = "".join(f"{above}{inside.name}/{number}.png\n" for number in range(len(texts)))
        (folder / f"{split}.txt").write_text(names)
        said.append(f"{split} = {above}{split}.txt")
    (folder / "obj.data").write_text("\n".join(said))
    (folder / "obj.names").write_text("cat\ndog\n")
    return folder


@pytest.mark.parametrize("above", ["data/", ""])
def test_a_folder_of_darknet_as_cvat_exports_it(tmp_path: Path, above: str) -> None:
    folder = cvat(tmp_path, above)
    data = DetectionData(str(folder), str(folder / "obj.data"))
    assert [len(data.reader(split, 2)) for split in ("train", "validation")] == [2, 1]
    for split, texts in {"train": [["cat"], []], "val": [["dog"]]}.items():
        assert open_detection(folder, split=split).read_batch(np.arange(len(texts)))["class_text"] == texts
    assert len(open_source(folder)) == 2
    sets = find_data_sets(str(folder))
    assert (sets.train, sets.validation) == (str(folder), str(folder))
    (folder / "data").mkdir()  # of something else
    assert len(open_source(folder)) == 2
    with (folder / "train.txt").open("a") as listed:
        listed.write("data/gone/1.png\n")
    with pytest.raises(DataError, match=r"cannot be listed\.\n.*/gone"):
        Yolo(folder, "train")
    (folder / "obj.data").write_text("classes = 3\nnames = data/obj.names\n")
    with pytest.raises(DataError, match=r"nc: 3, and 2 names"):
        Yolo(folder)


def test_an_image_that_cannot_be_read_is_a_bad_example_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = data_set(tmp_path, "0 0.5 0.5 1 1", "1 0.5 0.5 1 1", "1 0.5 0.5 0.5 1")
    (folder / "images/train/1.png").write_bytes(b"no image")
    reader = Yolo(folder)
    assert caplog.messages == [f"1 of 3 images in {folder}/images/train cannot be read, and are bad examples: 1.png"]
    assert [boxes_of(reader, index) for index in (0, 2)] == [[[0, 0, 1, 1]], [[0, 0.25, 1, 0.75]]]
    with pytest.raises(DataError, match=r"1\.png"):
        reader.read_batch(np.array([1]))
    loader = Loader(reader, batch_size=2, order="sequential", bad_examples="skip", bad_budget=1000, num_processes=0)
    batches = [next(iter(loader.batches(range(1), 1))) for _ in range(3)]
    assert {name for batch in batches for name in batch["source_id"]} == {"0.png", "2.png"}


def test_a_pipe_among_labels_is_not_waited_for(tmp_path: Path) -> None:
    folder = data_set(tmp_path, "0 0.5 0.5 1 1", None)
    os.mkfifo(folder / "labels/train/1.txt")
    with pytest.raises(DataError, match=r"1\.txt cannot be used as labels(.|\n)*a pipe that nobody writes to"):
        Yolo(folder)


def test_a_label_map_numbers_the_classes_and_has_to_have_them(tmp_path: Path) -> None:
    folder = data_set(tmp_path, "1 0.5 0.5 1 1")
    reader = Yolo(folder, label_map=LabelMap((Label(5, "dog"),)))
    assert torch.equal(reader.read_batch(np.array([0]))["labels"].values, torch.tensor([5]))
    with pytest.raises(DataError, match=r"dog is not in the label map\.\n.*is on 0\.png"):
        Yolo(folder, label_map=LabelMap((Label(1, "cat"),)))


def test_boxes_out_of_the_image_are_clipped_and_those_without_area_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lockstep")
    folder = data_set(tmp_path, "0 0.05 0.5 0.2 1\n1 0.5 0.5 0 1\n")
    torch.testing.assert_close(boxes_of(Yolo(folder)), [[0.0, 0.0, 1.0, 0.15]], rtol=0, atol=1e-6)
    assert caplog.messages == [
        f"1 of 2 boxes in {folder} reach out of their image, and are clipped to it",
        f"1 of 2 objects in {folder} have no area on their image, and are left out: dog on 0.png",
    ]


@pytest.mark.parametrize(
    "line",
    ["0 4 2 2 1", "0 0.5 0.5 1", "0 0.5 0.5 1 1 0.9", "0 a 0.5 1 1", "0 nan 0.5 1 1", "cat 0.5 0.5 1 1", "0", "\ufffe"],
)  # fmt: skip
def test_a_line_that_is_no_label_is_named(tmp_path: Path, line: str) -> None:
    folder = data_set(tmp_path, f"0 0.5 0.5 1 1\n{line}\n")
    with pytest.raises(DataError) as caught:
        Yolo(folder)
    assert caught.value.what == f"{folder}/labels/train/0.txt cannot be used as labels in YOLO's format."
    assert caught.value.given == f"line 2: {line}"
    assert "shares of the image's width and height" in str(caught.value.expected)


@pytest.mark.parametrize("number", ["2", "-1", "0.5"])
def test_a_class_beyond_the_names_is_named(tmp_path: Path, number: str) -> None:
    with pytest.raises(DataError, match="has a class beyond the names") as caught:
        Yolo(data_set(tmp_path, f"{number} 0.5 0.5 1 1"))
    assert caught.value.given == f"line 1: the class {number}; 2 names in {tmp_path}/data.yaml"
    assert caught.value.expected == "0 to 1: cat, dog"


def test_labels_of_images_that_are_not_there_are_named(tmp_path: Path) -> None:
    folder = data_set(tmp_path, "0 0.5 0.5 1 1")
    (folder / "labels/train/classes.txt").write_text("cat\ndog\n")
    assert len(Yolo(folder)) == 1
    (folder / "labels/train/7.txt").write_text("0 0.5 0.5 1 1")
    with pytest.raises(DataError, match=rf"labels of images that are not there\.\n.*{folder}/labels/train/7\.txt"):
        Yolo(folder)


def test_a_set_without_images_or_labels_is_refused(tmp_path: Path) -> None:
    folder = data_set(data_set(tmp_path, "0 0.5 0.5 1 1"), split="val")
    with pytest.raises(DataError, match=r"no images with labels in .*val\.\n.*no images\n"):
        DetectionData(str(folder), str(folder)).reader("validation", 2)
    data_set(folder, None, split="test")
    with pytest.raises(DataError, match=r"1 images, and no text that is named like one of them"):
        Yolo(folder, "test")


def test_an_image_that_exif_turns_is_refused(tmp_path: Path) -> None:
    folder = data_set(tmp_path, "0 0.5 0.5 1 1")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (8, 4)).save(folder / "images/train/0.png", exif=exif)
    with pytest.raises(DataError, match=r"is turned when it is shown\.\n.*the EXIF orientation 6") as caught:
        Yolo(folder)
    assert "mogrify -auto-orient" in str(caught.value.hint)


POLYGONS = [[0.25, 0.5, 0.5, 0.25, 0.75, 1.0], [0.125, 0.25, 0.875, 0.25, 0.875, 0.75, 0.125, 0.75]]
POINTS = [[0.25, 0.5, 2, 0.5, 0.75, 1], [0.75, 0.25, 2, 0, 0, 0]]
BOX = [0.5, 0.5, 0.5, 0.5]


def line(*numbers: float) -> str:
    return " ".join(str(number) for number in (1, *numbers)) + "\n"


def as_coco(folder: Path, objects: list[dict[str, Any]]) -> Coco:
    """The same objects on the same image of 8 x 4 pixels, as COCO's annotations."""
    numbered = [{"id": place, "image_id": 1, "category_id": 2, **each} for place, each in enumerate(objects, 1)]
    image = {"id": 1, "file_name": "0.png", "height": 4, "width": 8}
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    (folder / "all.json").write_text(json.dumps({"images": [image], "annotations": numbered, "categories": categories}))
    named = {"masks": "segmentation" in objects[0], "keypoints": "keypoints" in objects[0]}
    return Coco(folder / "all.json", folder / "images" / "train", truth=True, **named)


def assert_same_objects(ours: Reader, theirs: Reader, names: Sequence[str]) -> None:
    fields, expected = (reader.read_batch(np.array([0])) for reader in (ours, theirs))
    for name in ("boxes", "labels", "truth_boxes", "truth_labels", *names):
        if name.endswith("masks"):
            drawn, wanted = fields[name][0].decode(), expected[name][0].decode()
            assert drawn.any()
        else:
            drawn, wanted = fields[name].values, expected[name].values
        torch.testing.assert_close(drawn, wanted, rtol=0, atol=0, equal_nan=True)


def test_polygons_are_the_masks_that_cocos_are(tmp_path: Path) -> None:
    folder = data_set(tmp_path, "".join(line(*polygon) for polygon in POLYGONS))
    in_pixels = [[share * side for share, side in zip(each, (8, 4) * 4, strict=False)] for each in POLYGONS]
    boxes = [[2, 1, 4, 3], [1, 1, 6, 2]]
    coco = as_coco(tmp_path, [{"segmentation": [p], "bbox": b} for p, b in zip(in_pixels, boxes, strict=True)])
    assert_same_objects(Yolo(folder, masks=True, truth=True), coco, ["masks", "truth_masks"])
    shown = open_source(folder, everything=True).read_batch(np.array([0]))
    assert "masks" in shown
    assert "keypoints" not in shown
    trained = DetectionData(str(folder), masks=True).reader("train", 2).read_batch(np.array([0]))
    assert trained["masks"][0].decode().sum((1, 2)).tolist() == [each.sum() for each in shown["masks"][0].decode()]


def test_keypoints_are_those_that_cocos_are(tmp_path: Path) -> None:
    yaml = "names: [cat, dog]\nkpt_shape: [2, 3]"
    folder = data_set(tmp_path / "a", "".join(line(*BOX, *points) for points in POINTS), yaml=yaml)
    in_pixels = [[number * by for number, by in zip(points, (8, 4, 1) * 2, strict=True)] for points in POINTS]
    coco = as_coco(folder, [{"keypoints": points, "bbox": [2, 1, 4, 2]} for points in in_pixels])
    names = ["keypoints", "keypoint_visibility", "truth_keypoints"]
    assert_same_objects(Yolo(folder, keypoints=True, truth=True), coco, names)
    data = DetectionData(str(folder), num_keypoints=2)
    assert data.reader("train", 2).read_batch(np.array([0]))["keypoint_visibility"].values.tolist() == [[2, 1], [2, 0]]
    flat = data_set(tmp_path / "b", line(*BOX, 0.25, 0.5, -1, -1), yaml="names: [cat, dog]\nkpt_shape: [2, 2]")
    batch = open_source(flat, everything=True).read_batch(np.array([0]))
    assert batch["keypoint_visibility"].values.tolist() == [[2, 0]]
    assert "masks" not in batch
    nowhere = data_set(tmp_path / "c", line(*BOX, 0.25, 0.5, 1, math.nan, -math.inf, 0), yaml=yaml)
    batch = Yolo(nowhere, keypoints=True, truth=True).read_batch(np.array([0]))
    assert batch["truth_keypoints"].values.tolist() == [[[2, 2, 1], [0, 0, 0]]]


def test_sets_without_objects_have_neither_masks_nor_keypoints(tmp_path: Path) -> None:
    reader = Yolo(data_set(tmp_path, "", yaml="names: [cat, dog]\nkpt_shape: [5, 3]"), masks=True, keypoints=True)
    batch = reader.read_batch(np.array([0]))
    assert batch["keypoints"].values.shape == (0, 5, 2)
    assert batch["masks"][0].decode().shape == (0, 4, 8)


def test_masks_and_keypoints_that_are_not_there_are_refused(tmp_path: Path) -> None:
    boxes = str(data_set(tmp_path / "a", line(*BOX)))
    for asked, wrong in ({"masks": True}, "no masks of objects"), ({"num_keypoints": 2}, "no kpt_shape in .*data.yaml"):
        with pytest.raises(DataError, match=wrong):
            DetectionData(boxes, **asked).reader("train", 2)
    yaml = "names: [cat, dog]\nkpt_shape: [1, 3]"
    for name, point in ("b", (0.5, 0.5, 3)), ("c", (math.nan, 0.5, 1)), ("e", (1e300, 0.5, 2)):
        with pytest.raises(DataError, match="3 numbers of each of 1 keypoints"):
            Yolo(data_set(tmp_path / name, line(*BOX, *point), yaml=yaml), keypoints=True)
    with pytest.raises(DataError, match="not the number of keypoints and 2 or 3"):
        Yolo(data_set(tmp_path / "d", line(*BOX), yaml="names: [cat, dog]\nkpt_shape: [1, 4]"))
