"""The images of a classifier: each label is checked, and names its record where it is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_images import image_folder, image_shards
from torch import Tensor

from lockstep.errors import DataError, InputError
from lockstep.readers.classification import ClassificationReader
from lockstep.readers.open import open_source
from lockstep.readers.reader import Arrays, Int64s, decoder_of, draws_globally

FIXTURES = Path(__file__).parent.parent / "fixtures"


def of_labels(labels: Any, **more: Tensor) -> Arrays:
    labels = torch.as_tensor(labels)
    return Arrays({"image": torch.arange(len(labels)), "label": labels, **more})


def read(reader: ClassificationReader, *indices: int) -> dict[str, Any]:
    return reader.read_batch(np.array(indices or range(len(reader))))


def refusal(reader: ClassificationReader, *indices: int) -> str:
    with pytest.raises(DataError) as caught:
        read(reader, *indices)
    return str(caught.value)


# Labels ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_labels", "offset", "expected"),
    [([0, 1, 2], 0, [0, 1, 2]), ([1, 2, 3], 1, [0, 1, 2]), ([0, 1], -1, [1, 2])],
    ids=["as_they_are", "without_background", "with_background"],
)
def test_the_offset_is_taken_off(given_labels: list[int], offset: int, expected: list[int]) -> None:
    assert read(ClassificationReader(of_labels(given_labels), 3, offset=offset))["label"].tolist() == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 8), min_size=1), st.integers(-3, 3))
def test_a_label_is_given_or_refused(given_labels: list[int], offset: int) -> None:
    reader = ClassificationReader(of_labels(given_labels), 4, offset=offset)
    if all(label >= 0 and 0 <= label - offset < 4 for label in given_labels):
        assert read(reader)["label"].tolist() == [label - offset for label in given_labels]
    else:
        refusal(reader)


def test_a_label_past_the_classes_names_its_record(tmp_path: Path) -> None:
    reader = ClassificationReader(open_source(image_shards(tmp_path, "train", [1, 1, 1, 1000])), 1000)
    assert refusal(reader) == (
        "The label of train-00001-of-00002:1 is none of the model's classes.\n"
        "  given:    label 1000\n"
        "  expected: 0 to 999, for a model with 1000 classes\n"
        "  hint:     set model.num_classes to 1001 or more; or data.labels_offset to 1, if the labels begin there"
    )


@pytest.mark.parametrize(
    ("label", "offset", "given_text", "expected", "hint"),
    [
        (
            0,
            1,
            "label 0, and data.labels_offset=1",
            "1 to 3,",
            "set data.labels_offset to 0, if the labels begin there",
        ),
        (4, 1, "label 4, and data.labels_offset=1", "1 to 3,", "set model.num_classes to 4 or more; or "),
        (2, -1, "label 2, and data.labels_offset=-1", "0 to 1,", "set model.num_classes to 4 or more; or "),
        (-7, 0, "label -7", "0 to 2,", "convert the images again: their labels have to be 0 or more"),
    ],
)
def test_what_to_do_about_a_label(label: int, offset: int, given_text: str, expected: str, hint: str) -> None:
    said = refusal(ClassificationReader(of_labels([label]), 3, offset=offset))
    assert said.startswith("The label of 0 is none of the model's classes.")
    assert f"given:    {given_text}\n" in said
    assert f"expected: {expected}" in said
    assert f"hint:     {hint}" in said


@pytest.mark.parametrize("offset", [0, 1, -1])
def test_a_record_without_a_label_is_none_of_any_class(tmp_path: Path, offset: int) -> None:
    """With an offset of -1, too, which would make it the background."""
    reader = ClassificationReader(open_source(image_shards(tmp_path, "train", [1, None, 1, None])), 4, offset=offset)
    said = refusal(reader, 1, 2)
    assert said.startswith("train-00001-of-00002:0 has no label.\n  given:    a record without a class\n")
    assert f"expected: a label from {max(0, offset)} to {offset + 3}, for a model with 4 classes" in said
    assert said.endswith(
        "hint:     convert the images again with their classes; or leave such examples out: "
        '--set feed.bad_examples="skip"'
    )


# Fields ---------------------------------------------------------------------------------------------------------------


def test_only_what_a_classifier_needs_is_passed_on(tmp_path: Path) -> None:
    source = open_source(image_shards(tmp_path, "train", [1, 2], boxes=True), everything=True)
    assert {*source.read_batch(np.array([0]))} == {"image", "label", "boxes", "text"}
    assert [*read(ClassificationReader(source, 4))] == ["image", "label"]
    with_boxes = read(ClassificationReader(source, 4, boxes=True))
    assert [*with_boxes] == ["image", "label", "boxes"]
    assert with_boxes["boxes"][1].tolist() == [pytest.approx([0.1, 0.2, 0.7, 0.8])]


def test_where_there_are_no_boxes_each_image_has_none(tmp_path: Path) -> None:
    boxes = read(ClassificationReader(open_source(image_folder(tmp_path / "photos")), 3, boxes=True))["boxes"]
    assert [tuple(each.shape) for each in boxes] == [(0, 4)] * 6


@pytest.mark.parametrize(
    ("path", "name", "fields"),
    [
        ("voc/bccd", "BloodImage_00343.jpg", "image, source_id, boxes, labels"),
        ("coco/instances.json:coco/images", "000000159269.jpg", "image, source_id, boxes, labels"),
    ],
    ids=["voc", "coco"],
)
def test_objects_are_no_classes_of_images(path: str, name: str, fields: str) -> None:
    source = open_source(":".join(str(FIXTURES / part) for part in path.split(":")))
    said = refusal(ClassificationReader(source, 4), 0)
    assert said.startswith(f"This data has not one class for each image.\n  given:    the fields {fields}")
    assert f", of {name}\n" in said
    assert 'expected: "image", and "label" as int64 of shape (1,)' in said
    assert "hint:     give data that has classes; convert folders of images with `lockstep convert images`" in said


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (of_labels(torch.zeros(2, dtype=torch.int32)), "label is torch.int32 of shape (2,); the fields image, label"),
        (of_labels(torch.zeros(2, 5)), "label is torch.float32 of shape (2, 5); the fields image, label, of 0"),
        (Arrays({"label": torch.zeros(2, dtype=torch.int64)}), "label is torch.int64 of shape (2,); the fields label"),
        (Arrays({"image": torch.zeros(2, 3)}), "the fields image, of 0"),
    ],
    ids=["narrow", "one_hot", "no_images", "no_labels"],
)  # fmt: skip
def test_fields_of_a_function_of_ones_own_are_checked(source: Arrays, found: str) -> None:
    assert f"given:    {found}" in refusal(ClassificationReader(source, 4))


def test_a_batch_of_nothing_is_no_crash() -> None:
    assert read(ClassificationReader(of_labels([0, 1]), 4), *[])["label"].tolist() == [0, 1]
    empty = ClassificationReader(of_labels([0, 1]), 4).read_batch(np.array([], dtype=np.int64))
    assert empty["label"].tolist() == []


# What the reader says of itself ---------------------------------------------------------------------------------------


class Drawing:
    """A reader that draws, and knows its classes."""

    cost = "decode"
    decoder = "some decoder 1.0"
    draws_globally = True
    classes = ("background", "cat")

    def __len__(self) -> int:
        return 5

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        return {"image": [None] * len(indices), "label": torch.ones(len(indices), dtype=torch.int64)}

    def example_id(self, index: int) -> str:
        return f"image {index}"


def test_a_classification_reader_has_the_properties_of_its_source() -> None:
    reader = ClassificationReader(Drawing(), 2, offset=1)  # type: ignore[arg-type]
    assert (len(reader), reader.cost, decoder_of(reader), draws_globally(reader)) == (
        5,
        "decode",
        Drawing.decoder,
        True,
    )
    assert (reader.classes, reader.offset, reader.example_id(3)) == (("background", "cat"), 1, "image 3")
    plain = ClassificationReader(of_labels([0]), 2)
    assert (plain.cost, decoder_of(plain), draws_globally(plain), plain.classes) == ("memory", "none", False, ())


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"num_classes": 0}, "num_classes is out of range."),
        ({"num_classes": 1.0}, "num_classes is of the wrong type."),
        ({"num_classes": 3, "offset": 2**31}, "offset is out of range."),
        ({"num_classes": 3, "offset": -(2**31)}, "offset is out of range."),
        ({"num_classes": 3, "offset": True}, "offset is of the wrong type."),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError) as caught:
        ClassificationReader(of_labels([0]), **options)
    assert caught.value.what == what
