from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.errors import DataError, InputError
from lockstep.readers.image_records import ImageRecords
from lockstep.readers.schemas import ImageNetSchema
from lockstep.records.example import serialize_example
from lockstep.records.tfrecord import write_records

CIFAR = Path(__file__).parent.parent / "fixtures" / "schemas" / "cifar10_test-first-3.tfrecord"


@pytest.fixture(autouse=True)
def no_user_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def number(value: int) -> Any:
    return np.array([value])


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


# As `build_imagenet_data` writes one with two boxes.
SHUTTLE = {
    "image/height": number(375),
    "image/width": number(500),
    "image/colorspace": [b"RGB"],
    "image/channels": number(3),
    "image/class/label": number(812),
    "image/class/synset": [b"n04266014"],
    "image/class/text": [b"space shuttle"],
    "image/object/bbox/xmin": floats(0.125, 0.5),
    "image/object/bbox/xmax": floats(0.25, 1),
    "image/object/bbox/ymin": floats(0.375, 0),
    "image/object/bbox/ymax": floats(0.5, 0.75),
    "image/object/bbox/label": np.array([812, 812]),
    "image/format": [b"JPEG"],
    "image/filename": [b"n04266014_1.JPEG"],
    "image/encoded": [b"of the shuttle"],
}
# As `build_image_data` does: labels count from 1, there are no synsets and no boxes.
DAISY = {
    "image/height": number(240),
    "image/width": number(320),
    "image/colorspace": [b"RGB"],
    "image/channels": number(3),
    "image/class/label": number(1),
    "image/class/text": [b"daisy"],
    "image/format": [b"JPEG"],
    "image/filename": [b"1.jpg"],
    "image/encoded": [b"of the daisy"],
}
# As slim does.
FLOWER = {
    "image/height": number(240),
    "image/width": number(320),
    "image/class/label": number(0),
    "image/format": [b"jpg"],
    "image/encoded": [b"of the flower"],
}
UNLABELLED = {"image/encoded": [b"of anything"]}


def read(tmp_path: Path, schema: ImageNetSchema, *examples: Any) -> dict[str, Any]:
    write_records(tmp_path / "a", map(serialize_example, examples))
    reader = ImageRecords(tmp_path / "a", schema)
    return reader.read_batch(np.arange(len(reader)))


def test_all_converters_of_classes_are_read_alike(tmp_path: Path) -> None:
    batch = read(tmp_path, ImageNetSchema(), SHUTTLE, DAISY, FLOWER)
    assert batch.keys() == {"image", "label"}
    assert [image.data for image in batch["image"]] == [b"of the shuttle", b"of the daisy", b"of the flower"]
    assert batch["label"].dtype == torch.int64
    assert batch["label"].tolist() == [812, 1, 0]


def test_a_missing_label_is_minus_one_whatever_is_taken_off(tmp_path: Path) -> None:
    assert read(tmp_path, ImageNetSchema(), SHUTTLE, UNLABELLED)["label"].tolist() == [812, -1]
    assert read(tmp_path, ImageNetSchema(label_offset=1), SHUTTLE, UNLABELLED)["label"].tolist() == [811, -1]


def test_boxes_are_top_left_bottom_right_as_shares(tmp_path: Path) -> None:
    batch = read(tmp_path, ImageNetSchema(boxes=True), SHUTTLE, DAISY)
    assert batch["boxes"][0].tolist() == [[0.375, 0.125, 0.5, 0.25], [0, 0.5, 0.75, 1]]
    assert batch["boxes"][1].shape == (0, 4)
    assert {boxes.dtype for boxes in batch["boxes"]} == {torch.float32}


@pytest.mark.parametrize(
    ("edge", "value"),
    [("ymin", -0.2), ("ymin", float("nan")), ("xmin", 7), ("ymax", 300), ("ymax", float("nan")), ("xmax", 1.2)],
)
def test_the_edge_that_is_no_share_is_named(tmp_path: Path, edge: str, value: float) -> None:
    name = f"image/object/bbox/{edge}"
    with pytest.raises(DataError, match=rf"Record 1 of .* has no usable feature '{name}'"):
        read(tmp_path, ImageNetSchema(boxes=True), SHUTTLE, {**SHUTTLE, name: floats(0.5, value)})


def test_boxes_without_an_area_are_left_out(tmp_path: Path) -> None:
    edges = {
        "ymin": floats(1.02, 0, 0.5),
        "ymax": floats(1.05, 0.5, 0.5),
        "xmin": floats(0, 0, 0),
        "xmax": floats(1, 1, 1),
    }
    example = SHUTTLE | {f"image/object/bbox/{edge}": values for edge, values in edges.items()}
    assert [boxes.tolist() for boxes in read(tmp_path, ImageNetSchema(boxes=True), example)["boxes"]] == [
        [[0, 0, 0.5, 1]]
    ]


def test_a_label_that_no_int64_holds_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, ImageNetSchema(label_offset=1), {**DAISY, "image/class/label": number(-(2**63))})
    assert "has no usable feature 'image/class/label'" in caught.value.what
    assert caught.value.given == f"{-(2**63) - 1} then"
    assert caught.value.expected == "a label that is an int64 once the offset is off"
    with pytest.raises(InputError, match=r"label_offset is out of range"):
        ImageNetSchema(label_offset=2**70)


def test_of_no_records_labels_are_whole_numbers(tmp_path: Path) -> None:
    batch = read(tmp_path, ImageNetSchema(boxes=True, text=True))
    assert (batch["label"].dtype, batch["label"].shape) == (torch.int64, (0,))
    assert (batch["image"], [*batch["boxes"]], batch["text"]) == ([], [], [])


def test_texts_are_read_on_request(tmp_path: Path) -> None:
    assert read(tmp_path, ImageNetSchema(text=True), SHUTTLE, FLOWER)["text"] == ["space shuttle", ""]


def test_other_features_may_hold_image_and_label(tmp_path: Path) -> None:
    shutil.copy(CIFAR, tmp_path / CIFAR.name)
    reader = ImageRecords(tmp_path / CIFAR.name, ImageNetSchema(image_feature="image", label_feature="label"))
    batch = reader.read_batch(np.arange(3))
    assert [image.size for image in batch["image"]] == [(32, 32)] * 3
    assert batch["label"].tolist() == [7, 0, 6]


def test_only_features_that_are_asked_for_are_parsed(tmp_path: Path) -> None:
    odd = {**DAISY, "image/class/text": number(3), "image/object/bbox/xmin": [b"no float"]}
    assert read(tmp_path, ImageNetSchema(), odd)["label"].tolist() == [1]
    for schema in (ImageNetSchema(text=True), ImageNetSchema(boxes=True)):
        with pytest.raises(DataError):
            read(tmp_path, schema, odd)


def test_slims_five_shards_of_flowers_are_one_pattern(tmp_path: Path) -> None:
    for shard in range(5):
        example = {**FLOWER, "image/class/label": number(shard)}
        write_records(tmp_path / f"flowers_train_{shard:05}-of-00005.tfrecord", [serialize_example(example)] * 2)
    reader = ImageRecords(tmp_path / "flowers_train_*", ImageNetSchema())
    assert reader.read_batch(np.arange(10))["label"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize(
    ("example", "feature", "expected"),
    [
        ({"image/class/label": number(1)}, "image/encoded", "1 encoded image"),
        ({**DAISY, "image/encoded": [b"a", b"b"]}, "image/encoded", "1 encoded image"),
        ({**DAISY, "image/class/label": np.array([1, 2])}, "image/class/label", "one int64"),
        ({**DAISY, "image/class/label": [b"daisy"]}, "image/class/label", "values of int64"),
        ({**DAISY, "image/class/text": []}, "image/class/text", "one text"),
        (
            {**SHUTTLE, "image/object/bbox/ymax": floats(1)},
            "image/object/bbox/ymax",
            "2 values of float32, as many as of another edge",
        ),
    ],
    ids=["no image", "two images", "two labels", "label as text", "no text", "a box without bottom"],
)
def test_a_record_that_does_not_fit_is_named(tmp_path: Path, example: Any, feature: str, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, ImageNetSchema(boxes=True, text=True), example)
    assert caught.value.what == f"Record 0 of {tmp_path}/a, at byte 0, has no usable feature {feature!r}."
    assert caught.value.expected == expected


@pytest.mark.parametrize(
    ("options", "name"),
    [({"boxes": 1}, "boxes"), ({"text": "yes"}, "text"), ({"label_offset": 0.5}, "label_offset")]
    + [({name: None}, name) for name in ("image_feature", "label_feature")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_option_of_the_wrong_type_is_refused(options: Any, name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is of the wrong type."):
        ImageNetSchema(**options)
