"""Records of images that TensorFlow wrote, and what it makes of them: `make_schemas_golden.py` says how."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.readers.image_records import ImageRecords, Schema
from lockstep.readers.label_map import Label, LabelMap
from lockstep.readers.schemas import DetectionSchema, ImageNetSchema, MnistSchema

HERE = Path(__file__).parent
LABEL_MAP = LabelMap((Label(1, "cat"), Label(2, "/m/0bt9lr", "dog")))
# Where a record lacks them, TensorFlow gives none, and we one for each box.
ONE_A_BOX = {"area", "is_crowd", "difficult", "group_of", "keypoints"}


def read(tmp_path: Path, name: str, schema: Schema) -> dict[str, Any]:
    path = tmp_path / f"schemas_golden_{name}.tfrecord"
    shutil.copy(HERE / path.name, path)
    reader = ImageRecords(path, schema)
    return reader.read_batch(np.arange(len(reader)))


def golden(name: str) -> list[dict[str, Any]]:
    """By record and field."""
    with np.load(HERE / "schemas_golden.npz") as stored:
        records: dict[str, dict[str, Any]] = {}
        for key in stored:
            file, record, field = key.split("/")
            if file == name:
                records.setdefault(record, {})[field] = stored[key]
    return list(records.values())


def test_images_of_one_class_are_those_of_tensorflow(tmp_path: Path) -> None:
    batch = read(tmp_path, "imagenet", ImageNetSchema(boxes=True, text=True))
    expected = golden("imagenet")
    assert len(expected) == len(batch["image"]) == 3
    assert batch["label"].tolist() == [each["label"] for each in expected] == [812, 1, -1]
    assert batch["text"] == [str(each["text"]) for each in expected]
    for image, boxes, each in zip(batch["image"], batch["boxes"], expected, strict=True):
        np.testing.assert_array_equal(boxes, each["boxes"])
        np.testing.assert_array_equal(image.decode().permute(1, 2, 0), each["pixels"])


def test_digits_are_those_of_tensorflow(tmp_path: Path) -> None:
    batch = read(tmp_path, "mnist", MnistSchema())
    expected = golden("mnist")
    assert batch["label"].tolist() == [each["label"] for each in expected] == [7, 0]
    np.testing.assert_array_equal(batch["image"], [each["image"] for each in expected])


@pytest.mark.parametrize("masks", ["numerical", "png"])
def test_objects_are_those_of_tensorflow(tmp_path: Path, masks: str) -> None:
    batch = read(tmp_path, masks, DetectionSchema(LABEL_MAP, masks=masks, num_keypoints=2))
    expected = golden(masks)
    assert batch["source_id"] == [str(each.pop("source_id")) for each in expected] == ["7", "", "", ""]
    for number, record in enumerate(expected):
        record.pop("numbers")
        found = {name: batch[name][number] for name in record}
        found["masks"] = found["masks"].decode()
        for name, value in record.items():
            if len(value) or name not in ONE_A_BOX:
                assert found[name].dtype == torch.from_numpy(value).dtype
                np.testing.assert_array_equal(found[name], value)
            assert len(found[name]) == len(record["boxes"])


def test_without_a_label_map_labels_are_the_numbers_in_the_records(tmp_path: Path) -> None:
    path = tmp_path / "schemas_golden_png.tfrecord"
    shutil.copy(HERE / path.name, path)
    expected = golden("png")
    with_numbers = np.array([0, 2, 3])
    batch = ImageRecords(path, DetectionSchema()).read_batch(with_numbers)
    for labels, number in zip(batch["labels"], with_numbers, strict=True):
        np.testing.assert_array_equal(labels, expected[number]["numbers"])
