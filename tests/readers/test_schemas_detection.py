from __future__ import annotations

import math
import os
import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lockstep.errors import DataError, InputError
from lockstep.images.decode import AS_STORED, Decoding
from lockstep.images.masks import DenseMasks, PngMasks
from lockstep.ragged import Ragged
from lockstep.readers.image_records import ImageRecords, ParsedExample
from lockstep.readers.label_map import Label, LabelMap
from lockstep.readers.schemas import DetectionSchema, ImageNetSchema
from lockstep.records.example import serialize_example
from lockstep.records.tfrecord import write_records

MORE_RECORDS = os.environ.get("LOCKSTEP_MORE_TFRECORDS")
SCHEMAS = {
    "pets_examples.record": DetectionSchema(masks="png"),
    "val-00000-of-00001.tfrecord": ImageNetSchema(),
    "cifar10_train.tfrecord": ImageNetSchema(image_feature="image", label_feature="label"),
    "cifar10_test.tfrecord": ImageNetSchema(image_feature="image", label_feature="label"),
}
LABEL_MAP = LabelMap((Label(1, "cat"), Label(2, "/m/0bt9lr", "dog")))
HEIGHT, WIDTH = 2, 3
OBJECT = "image/object/"


def png(height: int = HEIGHT, width: int = WIDTH, shade: int = 200) -> bytes:
    file = BytesIO()
    Image.new("L", (width, height), shade).save(file, "PNG")
    return file.getvalue()


def turned_jpeg() -> bytes:
    """Stored in 2 rows and 3 columns, to be shown on its side."""
    exif = Image.Exif()
    exif[0x0112] = 6
    file = BytesIO()
    Image.new("RGB", (WIDTH, HEIGHT)).save(file, "JPEG", exif=exif)
    return file.getvalue()


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


def whole_numbers(*values: int) -> Any:
    return np.array(values, np.int64)


def scene(count: int = 2, **objects: Any) -> dict[str, Any]:
    """An example of `count` objects with labels 5, 6, ... and other features of objects, "/" written as "__"."""
    starts, stops = np.linspace(0, 0.25, count), np.linspace(0.5, 1, count)
    edges = {"bbox/ymin": starts, "bbox/xmin": starts / 2, "bbox/ymax": stops, "bbox/xmax": stops / 2}
    features = {
        "image/encoded": [png()],
        "image/source_id": [b"000007"],
        "image/height": whole_numbers(HEIGHT),
        "image/width": whole_numbers(WIDTH),
        **{OBJECT + name: floats(*values) for name, values in edges.items()},
        OBJECT + "class/label": whole_numbers(*range(5, 5 + count)),
        **{OBJECT + name.replace("__", "/"): values for name, values in objects.items()},
    }
    return {name: values for name, values in features.items() if values is not None}


def read(schema: DetectionSchema, *examples: dict[str, Any], decoding: Decoding = AS_STORED) -> dict[str, Any]:
    return schema.fields(
        [
            ParsedExample(
                {name: values for name, values in features.items() if name in schema.features},
                f"Record {number} of x, at byte 5,",
                decoding,
                lambda features=features: serialize_example(features),  # type: ignore[misc]
            )
            for number, features in enumerate(examples)
        ]
    )


def without(example: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values for name, values in example.items() if name not in names}


def test_records_give_the_fields_of_detection(tmp_path: Path) -> None:
    write_records(tmp_path / "a", map(serialize_example, [scene(2), scene(0), scene(1)]))
    batch = ImageRecords(tmp_path / "a", DetectionSchema()).read_batch(np.array([2, 1, 0]))
    assert [len(boxes) for boxes in batch["boxes"]] == [1, 0, 2]
    expected = ["image", "source_id", "boxes", "labels", "class_text", "weights", "area", "is_crowd", "difficult"]
    assert list(batch) == [*expected, "group_of"]
    lists = ("image", "source_id", "class_text")
    kinds = {name: list if name in lists else Ragged for name in batch}
    assert {name: (len(value), type(value)) for name, value in batch.items()} == {
        name: (3, kind) for name, kind in kinds.items()
    }


def test_what_a_record_says_of_its_objects_is_read() -> None:
    objects = {
        "area": floats(7, 8),
        "weight": floats(0.5, 0),
        "is_crowd": whole_numbers(0, 1),
        "difficult": whole_numbers(1, 0),
        "group_of": whole_numbers(1, 1),
        "class__text": [b"cat", "Waschbär".encode()],
    }
    batch = read(DetectionSchema(), scene(2, **objects))
    assert [image.data for image in batch["image"]] == [png()]
    assert batch["source_id"] == ["000007"]
    assert batch["boxes"][0].tolist() == [[0, 0, 0.5, 0.25], [0.25, 0.125, 1, 0.5]]
    assert batch["labels"][0].tolist() == [5, 6]
    assert batch["class_text"] == [["cat", "Waschbär"]]
    assert batch["weights"][0].tolist() == [0.5, 0]
    assert batch["area"][0].tolist() == [7, 8]
    flags = {name: batch[name][0].tolist() for name in ("is_crowd", "difficult", "group_of")}
    assert flags == {"is_crowd": [False, True], "difficult": [True, False], "group_of": [True, True]}


@pytest.mark.parametrize("count", [0, 2])
def test_what_a_record_does_not_say_has_a_default_for_each_box(count: int) -> None:
    schema = DetectionSchema(num_keypoints=3)
    batch = read(schema, without(scene(count), "image/source_id"))
    kinds = {
        **{"boxes": torch.float32, "labels": torch.int64, "weights": torch.float32, "area": torch.float32},
        **{"is_crowd": torch.bool, "difficult": torch.bool, "group_of": torch.bool},
        **{"keypoints": torch.float32, "keypoint_visibility": torch.int64},
    }
    assert {name: (batch[name][0].dtype, len(batch[name][0])) for name in kinds} == {
        name: (kind, count) for name, kind in kinds.items()
    }
    assert batch["source_id"] == [""]
    assert batch["class_text"] == [[""] * count]
    assert batch["weights"][0].tolist() == [1] * count
    assert not any(batch[name][0].any() for name in ("is_crowd", "difficult", "group_of", "keypoint_visibility"))
    assert batch["keypoints"][0].shape == (count, 3, 2)
    assert batch["keypoints"][0].isnan().all()


def test_features_of_objects_may_be_missing_where_there_are_none() -> None:
    batch = read(DetectionSchema(masks="png", num_keypoints=2), {"image/encoded": [png(4, 5)]})
    assert batch["boxes"][0].shape == (0, 4)
    assert batch["labels"][0].dtype == torch.int64
    assert batch["masks"][0].decode().shape == (0, 4, 5)


@pytest.mark.parametrize(
    ("texts", "labels", "expected"),
    [
        ([b"dog", b"cat"], (3, 4), [2, 1]),
        ([b"/m/0bt9lr", b"unicorn"], None, [2, -1]),
        ([b"Cat", b"\xff"], (3, 4), [-1, -1]),
        ([], (3, 4), [3, 4]),
        (None, (3, 4), [3, 4]),
        ([b"", b""], (3, 4), [3, 4]),
        ([b"", b"cat"], (3, 4), [-1, 1]),
    ],
    ids=["display name and name", "unknown", "not quite", "no texts", "missing", "empty texts", "one empty text"],
)
def test_labels_are_those_of_the_label_map(texts: Any, labels: Any, expected: list[int]) -> None:
    example = scene(2, class__text=texts, class__label=labels and whole_numbers(*labels))
    assert read(DetectionSchema(LABEL_MAP), example)["labels"][0].tolist() == expected


def test_without_a_label_map_texts_do_not_change_labels() -> None:
    assert read(DetectionSchema(), scene(2, class__text=[b"cat", b"cat"]))["labels"][0].tolist() == [5, 6]


def test_an_area_that_is_missing_is_that_of_the_box_in_pixels() -> None:
    for example in (scene(2), without(scene(2), "image/height"), without(scene(2), "image/height", "image/width")):
        areas = read(DetectionSchema(), example)["area"][0]
        assert areas.tolist() == pytest.approx([0.5 * 0.25 * HEIGHT * WIDTH, 0.75 * 0.375 * HEIGHT * WIDTH])
        assert areas.dtype == torch.float32


def test_keypoints_are_y_and_x_and_nan_where_not_labelled() -> None:
    y, x = floats(0.1, 0.2, 0.3, math.nan), floats(0.5, 0.6, 0.7, 0.8)
    points = {"keypoint__y": y, "keypoint__x": x}
    schema = DetectionSchema(num_keypoints=2)
    first = read(schema, scene(2, **points))
    assert first["keypoint_visibility"][0].tolist() == [[2, 2], [2, 0]]
    expected = floats(0.1, 0.5, 0.2, 0.6, 0.3, 0.7, math.nan, math.nan).reshape(2, 2, 2)
    np.testing.assert_array_equal(first["keypoints"][0], expected)
    second = read(schema, scene(2, **points, keypoint__visibility=whole_numbers(2, 0, 1, 2)))
    assert second["keypoint_visibility"][0].tolist() == [[2, 0], [1, 0]]
    expected[0, 1] = math.nan
    np.testing.assert_array_equal(second["keypoints"][0], expected)


def test_numerical_masks_are_above_0_where_the_object_is() -> None:
    example = scene(2, mask=floats(0, 1, 0.5, -1, 0, 0, 1, 0, 0, 0, 0, 1e-9))
    (masks,) = read(DetectionSchema(masks="numerical"), example)["masks"]
    assert isinstance(masks, DenseMasks)
    assert masks.decode().tolist() == [[[0, 1, 1], [0, 0, 0]], [[1, 0, 0], [0, 0, 1]]]


def test_png_masks_are_decoded_when_they_are_asked_for() -> None:
    damaged = png()[:-30]
    good, bad = read(DetectionSchema(masks="png"), scene(2, mask=[png(), png(shade=0)]), scene(1, mask=[damaged]))[
        "masks"
    ]
    assert isinstance(good, PngMasks)
    assert good.decode().sum((1, 2)).tolist() == [HEIGHT * WIDTH, 0]
    with pytest.raises(DataError, match=r"Record 1 of x, at byte 5, mask 0, cannot be decoded\."):
        bad.decode()


@pytest.mark.parametrize("kind", ["numerical", "png"])
def test_a_record_without_masks_has_none(kind: str) -> None:
    (masks,) = read(DetectionSchema(masks=kind), scene(2))["masks"]
    assert len(masks) == 0
    assert masks.decode().shape == (0, HEIGHT, WIDTH)


def test_boxes_and_masks_are_of_the_image_as_it_is_stored(tmp_path: Path) -> None:
    example = {**scene(1, mask=[png()]), "image/encoded": [turned_jpeg()]}
    batch = read(DetectionSchema(masks="png"), example)
    assert batch["image"][0].size == (WIDTH, HEIGHT)
    assert batch["masks"][0].decode().shape == (1, HEIGHT, WIDTH)
    write_records(tmp_path / "a", [serialize_example(example)])
    for schema in (DetectionSchema(), ImageNetSchema(boxes=True)):
        with pytest.raises(InputError, match="cannot be turned as EXIF asks for"):
            ImageRecords(tmp_path / "a", schema, decoding=Decoding(exif=True))
    assert len(ImageRecords(tmp_path / "a", ImageNetSchema(), decoding=Decoding(exif=True))) == 1


def test_fields_that_were_not_asked_for_are_not_read() -> None:
    example = scene(1, mask=floats(1), keypoint__x=floats(1))
    batch = read(DetectionSchema(), example)
    assert not {"masks", "keypoints", "keypoint_visibility", "additional_channels"} & batch.keys()


def test_additional_channels_are_images() -> None:
    example = {**scene(1), "image/additional_channels/encoded": [png(shade=7), png(shade=8)]}
    (channels,) = read(DetectionSchema(num_additional_channels=2), example)["additional_channels"]
    assert [int(image.decode().unique()) for image in channels] == [7, 8]
    with pytest.raises(DataError, match="has no usable feature 'image/additional_channels/encoded'"):
        read(DetectionSchema(num_additional_channels=3), example)


@pytest.mark.parametrize(
    ("changes", "feature", "given_", "expected"),
    [
        (
            {"bbox/xmin": floats(0)},
            "bbox/xmin",
            "1 values of float32",
            "2 values of float32, as many as of another edge",
        ),
        ({"class/label": whole_numbers(1, 2, 3)}, "class/label", "3 values of int64", "2 values of int64, or none"),
        (
            {"class/label": whole_numbers()},
            "class/label",
            "0 values of int64",
            "2 values of int64, one for each box; or texts, and a label map",
        ),
        ({"class/text": [b"cat"]}, "class/text", "1 values of bytes", "2 texts, one for each box, or none"),
        ({"class/label": floats(1, 2)}, "class/label", "2 values of float32", "values of int64"),
        ({"weight": floats(1)}, "weight", "1 values of float32", "2 values of float32, or none"),
        ({"area": floats(1, 2, 3)}, "area", "3 values of float32", "2 values of float32, or none"),
        ({"is_crowd": whole_numbers(1)}, "is_crowd", "1 values of int64", "2 values of int64, or none"),
        ({"difficult": floats(1, 0)}, "difficult", "2 values of float32", "values of int64"),
        ({"group_of": whole_numbers(1)}, "group_of", "1 values of int64", "2 values of int64, or none"),
        ({"mask": [png()]}, "mask", "1 values of bytes", "2 encoded masks, one for each box, or none"),
        ({"mask": floats(1)}, "mask", "1 values of float32", "byte strings"),
        ({"keypoint/y": floats(1, 2)}, "keypoint/y", "2 values of float32", "6 values of float32, or none"),
        (
            {"keypoint/y": floats(*range(6))},
            "keypoint/x",
            "the features ",
            "6 values of float32, as many as 'image/object/keypoint/y' has",
        ),
        (
            {"keypoint/y": floats(*range(6)), "keypoint/x": floats(*range(6)), "keypoint/visibility": whole_numbers(1)},
            "keypoint/visibility",
            "1 values of int64",
            "6 values of int64, or none",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_feature_of_another_length_or_kind_is_named(changes: Any, feature: str, given_: str, expected: str) -> None:
    bad = {**scene(2), **{OBJECT + name: values for name, values in changes.items()}}
    with pytest.raises(DataError) as caught:
        read(DetectionSchema(masks="png", num_keypoints=3), scene(1), bad)
    assert caught.value.what == f"Record 1 of x, at byte 5, has no usable feature '{OBJECT}{feature}'."
    assert str(caught.value.given).startswith(given_)
    assert caught.value.expected == expected


def test_numerical_masks_must_fill_the_images() -> None:
    with pytest.raises(DataError) as caught:
        read(DetectionSchema(masks="numerical"), scene(2, mask=floats(*range(11))))
    assert caught.value.what == "Record 0 of x, at byte 5, has no usable feature 'image/object/mask'."
    assert caught.value.expected == "12 values of float32, or none"


@pytest.mark.parametrize("schema", [DetectionSchema(), DetectionSchema(masks="numerical")], ids=["boxes", "masks"])
@pytest.mark.parametrize(
    ("name", "told", "side"),
    [("height", 0, HEIGHT), ("height", 2**62, HEIGHT), ("height", WIDTH, HEIGHT), ("width", -3, WIDTH)],
)
def test_a_size_that_is_not_the_images_is_refused(schema: DetectionSchema, name: str, told: int, side: int) -> None:
    with pytest.raises(DataError) as caught:
        read(schema, {**scene(1), f"image/{name}": whole_numbers(told)})
    assert caught.value.what == f"Record 0 of x, at byte 5, has no usable feature 'image/{name}'."
    assert caught.value.given == f"{told} pixels"
    assert caught.value.expected == f"{side} pixels, as the image's header says"


@pytest.mark.parametrize(
    ("feature", "values", "given_", "expected"),
    [
        ("weight", floats(1, math.nan), "the value nan", "finite numbers of 0 or more"),
        ("weight", floats(-0.5, 1), "the value -0.5", "finite numbers of 0 or more"),
        ("area", floats(1, -2), "the value -2", "finite numbers of 0 or more"),
        ("area", floats(math.inf, 1), "the value inf", "finite numbers of 0 or more"),
        ("keypoint/visibility", whole_numbers(2, 7), "the value 7", "0 (not labelled), 1 (hidden) or 2 (visible)"),
        ("keypoint/visibility", whole_numbers(-3, 1), "the value -3", "0 (not labelled), 1 (hidden) or 2 (visible)"),
    ],
    ids=["weight-nan", "weight-below-0", "area-below-0", "area-infinite", "visibility-7", "visibility-below-0"],
)
def test_values_out_of_range_are_named(feature: str, values: Any, given_: str, expected: str) -> None:
    points = {"keypoint__y": floats(0, 1), "keypoint__x": floats(0, 1)}
    with pytest.raises(DataError) as caught:
        read(DetectionSchema(num_keypoints=1), scene(2, **points) | {OBJECT + feature: values})
    assert caught.value.what == f"Record 0 of x, at byte 5, has no usable feature '{OBJECT}{feature}'."
    assert caught.value.given == given_
    assert caught.value.expected == expected


@pytest.mark.parametrize("masks", ["none", "numerical", "png"])
def test_objects_without_an_area_on_the_image_are_left_out(masks: str) -> None:
    whole = np.arange(3 * HEIGHT * WIDTH) // (HEIGHT * WIDTH) == 2
    example = scene(3, class__text=[b"cat", b"dog", b"cow"], weight=floats(1, 2, 3))
    example[OBJECT + "bbox/ymin"], example[OBJECT + "bbox/ymax"] = floats(1.02, 0.5, 0.25), floats(1.05, 0.5, 1)
    points = {OBJECT + "keypoint/y": floats(0.1, 0.2, 0.3), OBJECT + "keypoint/x": floats(0.1, 0.2, 0.3)}
    of_masks = {"none": [], "numerical": floats(*whole), "png": [png(shade=0), png(shade=0), png()]}[masks]
    schema = DetectionSchema(masks=masks, num_keypoints=1)
    batch = read(schema, scene(1), {**example, **points, OBJECT + "mask": of_masks})
    assert [len(boxes) for boxes in batch["boxes"]] == [1, 1]
    assert batch["boxes"][1].tolist() == [[0.25, 0.125, 1, 0.5]]
    assert batch["labels"][1].tolist() == [7]
    assert batch["class_text"][1] == ["cow"]
    assert batch["weights"][1].tolist() == [3]
    assert batch["keypoints"][1].flatten().tolist() == pytest.approx([0.3, 0.3])
    assert {len(batch[name][1]) for name in batch if name not in ("image", "source_id", "masks")} == {1}
    if masks != "none":
        assert batch["masks"][1].decode().tolist() == [[[1] * WIDTH] * HEIGHT]


@pytest.mark.parametrize(
    "schema", [DetectionSchema(), DetectionSchema(masks="png", num_keypoints=3)], ids=["few", "all"]
)
def test_of_no_records_there_are_no_fields(schema: DetectionSchema) -> None:
    assert set(map(len, read(schema).values())) == {0}


def test_a_record_without_an_image_is_named() -> None:
    with pytest.raises(DataError, match="Record 0 of x, at byte 5, has no usable feature 'image/encoded'"):
        read(DetectionSchema(), without(scene(1), "image/encoded"))


def test_boxes_without_labels_or_texts_are_refused() -> None:
    with pytest.raises(DataError) as caught:
        read(DetectionSchema(LABEL_MAP), scene(1, class__label=None))
    assert caught.value.what == "Record 0 of x, at byte 5, has no usable feature 'image/object/class/label'."
    assert "the features image/encoded, image/height" in caught.value.given


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_map": {"cat": 1}}, "label_map is of the wrong type."),
        ({"masks": "rle"}, "masks cannot be 'rle'."),
        ({"masks": True}, "masks is of the wrong type."),
        ({"num_keypoints": -1}, "num_keypoints is out of range."),
        ({"num_keypoints": 10**12}, "num_keypoints is out of range."),
        ({"num_additional_channels": 1.0}, "num_additional_channels is of the wrong type."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_option_that_is_none_is_refused(options: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        DetectionSchema(**options)
    assert caught.value.what == message


def test_a_schema_travels_to_loader_processes() -> None:
    schema = DetectionSchema(LABEL_MAP, masks="png", num_keypoints=17)
    assert pickle.loads(pickle.dumps(schema)) == schema


VALUES = st.one_of(
    st.lists(st.floats(-0.25, 1.25, width=32), max_size=3).map(lambda values: floats(*values)),
    st.lists(st.integers(-3, 3), max_size=3).map(lambda values: whole_numbers(*values)),
    st.lists(st.binary(max_size=3), max_size=3),
)


@settings(max_examples=50, deadline=None)
@given(
    count=st.integers(0, 3),
    changes=st.dictionaries(st.sampled_from(sorted(DetectionSchema(masks="png", num_keypoints=1).features)), VALUES),
    masks=st.sampled_from(["none", "numerical", "png"]),
)
def test_any_record_gives_fields_of_one_length_or_is_named(count: int, changes: dict[str, Any], masks: str) -> None:
    schema = DetectionSchema(LABEL_MAP, masks=masks, num_keypoints=1)
    batch, problem = {}, ""
    try:
        batch = read(schema, {**scene(count), **changes})
    except DataError as error:
        problem = error.what
    if problem:
        assert problem.startswith("Record 0 of x, at byte 5,")
        return
    boxes = batch["boxes"][0]
    assert ((boxes >= 0) & (boxes <= 1)).all()
    for name, (value,) in batch.items():
        if name == "masks":
            assert len(value) in (0, len(boxes))
        elif name not in ("image", "source_id"):
            assert len(value) == len(boxes)


@pytest.mark.skipif(not MORE_RECORDS, reason="LOCKSTEP_MORE_TFRECORDS names no folder of other TFRecord files")
def test_other_files_of_images_are_read_by_their_schemas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths = [path for path in Path(MORE_RECORDS or "").rglob("*") if path.name in SCHEMAS]
    assert paths
    for path in paths:
        reader = ImageRecords(path, SCHEMAS[path.name])
        batch = reader.read_batch(np.arange(len(reader)))
        assert all(image.decode().ndim == 3 for image in batch["image"])
        assert {len(value) for value in batch.values()} == {len(reader)}


def test_the_truth_is_in_pixels_with_objects_without_area() -> None:
    points = {"keypoint__y": floats(0.5, 1, 0, 0), "keypoint__x": floats(0.5, 0, 0, 0)}
    visible = whole_numbers(2, 1, 0, 2)
    example = scene(2, is_crowd=whole_numbers(1, 0), area=floats(7, 8), **points, keypoint__visibility=visible)
    example[OBJECT + "bbox/ymax"] = floats(0.5, 0.25)
    batch = read(DetectionSchema(truth=True, num_keypoints=2, masks="any"), example)
    assert batch["boxes"].lengths.tolist() == [1]
    top, left, bottom, right = (
        example[f"{OBJECT}bbox/{edge}"].astype(float) for edge in ("ymin", "xmin", "ymax", "xmax")
    )
    expected = np.stack([left * WIDTH, top * HEIGHT, (right - left) * WIDTH, (bottom - top) * HEIGHT], axis=1)
    assert batch["truth_boxes"].values.dtype == torch.float64
    np.testing.assert_allclose(batch["truth_boxes"][0], expected)
    assert batch["truth_labels"][0].tolist() == [5, 6]
    assert batch["truth_is_crowd"][0].tolist() == [True, False]
    assert batch["truth_area"][0].tolist() == [7, 8]
    assert batch["truth_keypoints"][0].tolist() == [[[1.5, 1, 2], [0, 2, 1]], [[0, 0, 0], [0, 0, 2]]]
    assert len(batch["truth_masks"]) == 1


def test_the_labels_of_an_image_are_among_the_truth() -> None:
    numbers = {"image/class/label": whole_numbers(3, 7)}
    texts = {"image/class/text": [b"dog", b"bird"]}
    batch = read(DetectionSchema(LABEL_MAP, truth=True), scene() | numbers, scene() | texts, scene())
    assert [each.tolist() for each in batch["truth_verified_labels"]] == [[3, 7], [2, -1], []]


def test_boxes_may_be_left_to_be_checked_by_a_reader_of_detectors() -> None:
    example = scene(2, bbox__ymax=floats(-0.5, 40))
    with pytest.raises(DataError, match="bbox/ymin"):
        read(DetectionSchema(), example)
    edges = read(DetectionSchema(check_boxes=False), example)["boxes"][0][:, 2]
    assert edges.tolist() == [-0.5, 40]


def test_a_score_for_each_class_of_each_object_is_read() -> None:
    schema = DetectionSchema(num_multiclass_scores=3)
    scores = floats(0.1, 0.2, 0.7, 0.3, 0.3, 0.4)
    found = read(schema, scene(2, class__multiclass_scores=scores))["multiclass_scores"][0]
    assert found.flatten().tolist() == scores.tolist()
    assert found.shape == (2, 3)
    with pytest.raises(DataError, match="multiclass_scores"):
        read(schema, scene(2))


@pytest.mark.parametrize("kind", ["png", "numerical", "none"])
def test_masks_of_any_kind_are_read_as_each_record_has_them(kind: str) -> None:
    pixels = np.zeros((1, HEIGHT, WIDTH), np.float32)
    pixels[0, 0, 1] = 1
    file = BytesIO()
    Image.fromarray(pixels[0].astype(np.uint8) * 255).save(file, "PNG")
    masks = {"png": {"mask": [file.getvalue()]}, "numerical": {"mask": pixels.ravel()}, "none": {}}[kind]
    found = read(DetectionSchema(masks="any"), scene(1, **masks))["masks"][0]
    assert found.decode().tolist() == ([] if kind == "none" else pixels.tolist())
