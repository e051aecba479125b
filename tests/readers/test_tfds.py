"""Data sets of TFDS, some of them changed; that they are read as TFDS meant them is for test_tables_golden."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.errors import DataError, InputError
from lockstep.images.decode import Decoding
from lockstep.readers.fingerprint import fingerprint_of
from lockstep.readers.label_map import Label, LabelMap
from lockstep.readers.tfds import TfdsObjects, TfdsRecords
from lockstep.recipes.data import DetectionData, ImageData
from lockstep.records.example import parse_example, serialize_example
from lockstep.records.tfrecord import read_all, write_records

GOLDEN = Path(__file__).parents[1] / "golden" / "tables" / "tfds"


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "shapes" / "1.2.0", tmp_path / "shapes"))


@pytest.fixture
def boxed(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "boxed" / "2.0.1", tmp_path / "boxed"))


def whole(reader: Any) -> dict[str, Any]:
    fields: dict[str, Any] = reader.read_batch(np.arange(len(reader)))
    return fields


def test_examples_are_those_of_its_records(shapes: Path) -> None:
    reader = TfdsRecords(shapes / "train")
    assert (len(reader), reader.cost) == (4, "decode")
    assert reader.example_id(3) == "shapes-train.tfrecord-00000-of-00001:3"
    assert next(iter(fingerprint_of(reader))) == "shapes-train.tfrecord-00000-of-00001"
    copy = pickle.loads(pickle.dumps(reader))
    assert whole(copy)["label"].tolist() == whole(reader)["label"].tolist()
    assert whole(ImageData(train=f"{shapes}/train").reader("train", 3))["label"].tolist() == [
        *whole(reader)["label"].tolist()
    ]


def test_labels_of_objects(boxed: Path) -> None:
    labels = whole(TfdsRecords(boxed))["labels"].values
    mapped = LabelMap((Label(9, "disc"), Label(5, "square"), Label(7, "ring")))
    reader = TfdsRecords(boxed, label_map=mapped)
    assert whole(reader)["labels"].values.tolist() == [(9, 5, 7)[label - 1] for label in labels.tolist()]
    assert reader.classes == mapped.names
    with pytest.raises(DataError, match="not in the label map"):
        TfdsRecords(boxed, label_map=LabelMap((Label(9, "disc"),)))
    for offset in (0, -1):
        data = DetectionData(train=str(boxed), labels_offset=offset)
        assert whole(data.reader("train", 3, to_train=True))["labels"].values.tolist() == labels.tolist()
    with pytest.raises(InputError, match="cannot be turned"):
        TfdsRecords(boxed, decoding=Decoding(exif=True))


def test_a_data_set_that_is_not_whole_is_named(shapes: Path) -> None:
    file = shapes / "shapes-train.tfrecord-00000-of-00001"
    write_records(file, [payload for _, payload in read_all(file)][:3])
    with pytest.raises(DataError, match=r"'train' in .* is not whole(.|\n)*3 records in 1 file(.|\n)*4, as its"):
        TfdsRecords(shapes / "train")
    file.unlink()
    with pytest.raises(DataError, match=r"Files are missing(.|\n)*no shapes-train.tfrecord-00000-of-00001"):
        TfdsRecords(shapes / "train")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace("image_feature.Image", "audio_feature.Audio"), r"image \(Audio\)(.|\n)*one Image"),
        (lambda text: text.replace("ClassLabel", "Tensor"), r"label \(Tensor\)(.|\n)*one ClassLabel, or a sequence"),
        (
            lambda text: text.replace('"uint8"', '"float32"'),
            r"images in (.|\n)*'image' of float32(.|\n)*uint8 or uint16",
        ),
        (lambda _: "{}", r"the features \(none\)"),
        (lambda _: "[1", r"features\.json cannot be read"),
    ],
)
def test_features_of_other_kinds_are_named(shapes: Path, change: Callable[[str], str], told: str) -> None:
    features = shapes / "features.json"
    features.write_text(change(features.read_text()))
    with pytest.raises(DataError, match=told):
        TfdsRecords(shapes / "train")


def test_boxes_of_another_format_are_refused(boxed: Path) -> None:
    features = boxed / "features.json"
    features.write_text(features.read_text().replace("REL_YXYX", "XYWH"))
    with pytest.raises(DataError, match="bboxFormat XYWH"):
        TfdsRecords(boxed)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"objects/bbox": [0.0, 0.0, 1.0]}, r"'objects/bbox'(.|\n)*four values"),
        ({"objects/bbox": [0.5, 0.0, 0.25, 1.0]}, r"'objects/bbox'(.|\n)*the box 0\.5, 0, 0\.25, 1"),
        ({"objects/bbox": [0.0, 0.0, 20.0, 30.0]}, r"'objects/bbox'(.|\n)*the box 0, 0, 20, 30"),
        ({"objects/label": [1, 2]}, r"'objects/label'"),
    ],
)
def test_records_that_cannot_be_used_are_named(boxed: Path, given: dict[str, list[Any]], told: str) -> None:
    info = json.loads((boxed / "dataset_info.json").read_text())
    info["splits"][0]["shardLengths"] = ["1"]
    (boxed / "dataset_info.json").write_text(json.dumps(info))
    file = boxed / "boxed-train.tfrecord-00000-of-00001"
    values: dict[str, Any] = dict(parse_example(next(read_all(file))[1], "one"))
    values |= {"objects/bbox": np.array([0, 0, 1, 1], np.float32), "objects/label": np.array([1])}
    values["objects/is_crowd"] = np.array([0])
    for name, numbers in given.items():
        values[name] = np.array(numbers, np.float32 if name.endswith("bbox") else np.int64)
    write_records(file, [serialize_example(values)])
    with pytest.raises(DataError, match=told):
        whole(TfdsRecords(boxed))


def test_paths_that_lead_to_other_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no data set of TFDS"):
        TfdsRecords(tmp_path)
    assert TfdsObjects("image", "objects").features == {"image", "objects/bbox", "objects/label"}
