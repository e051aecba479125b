"""Targets of a detector's losses, with the numbers of the object detection API's own tests."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.detection.targets import (
    DetectionTargets,
    merge_multiple_label_boxes,
    padded_one_hot_encoding,
)
from lockstep.errors import DataError, InputError
from lockstep.ragged import Ragged
from lockstep.randomness import Draws

DRAWS = Draws(0, np.arange(2))
A, B = [0.25, 0.25, 0.75, 0.75], [0.0, 0.0, 0.5, 0.75]


def one(values: Any, dtype: torch.dtype = torch.float32) -> Ragged:
    return Ragged.of([torch.tensor(values, dtype=dtype)])


def boxes_of(*counts: int) -> Ragged:
    """Boxes that differ, so many an image."""
    corners = torch.arange(sum(counts)).float()[:, None] / 100 + torch.tensor([0.0, 0.1, 0.2, 0.3])
    return Ragged(corners, torch.tensor(counts))


def batch_of(labels: list[list[int]], **more: Any) -> dict[str, Any]:
    given = Ragged.of([torch.tensor(each, dtype=torch.int64) for each in labels])
    return {"boxes": boxes_of(*map(len, labels)), "labels": given, **more}


# One-hot --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_pad", "expected"),
    [
        (0, [[0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1]]),
        (1, [[0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1]]),
        (
            3,
            [
                [0, 0, 0, 0, 1, 0, 0, 0, 0],
                [0, 0, 0, 0, 0, 1, 0, 0, 0],
                [0, 0, 0, 0, 0, 0, 1, 0, 0],
                [0, 0, 0, 0, 0, 0, 0, 0, 1],
            ],
        ),
    ],
)
def test_indices_become_rows_with_a_one_after_the_padding(left_pad: int, expected: list[list[int]]) -> None:
    encoded = padded_one_hot_encoding(torch.tensor([1, 2, 3, 5]), 6, left_pad)
    assert encoded is not None
    assert encoded.dtype == torch.float32
    assert encoded.tolist() == expected


def test_no_indices_are_no_rows_and_without_depth_there_is_no_encoding() -> None:
    encoded = padded_one_hot_encoding(torch.zeros(0, dtype=torch.int64), 6, 3)
    assert encoded is not None
    assert encoded.shape == (0, 9)
    assert padded_one_hot_encoding(torch.tensor([1, 2]), 0) is None


@pytest.mark.parametrize(
    ("indices", "depth", "left_pad"), [([[1], [2]], 6, 0), ([1], -1, 0), ([1], 0.1, 0), ([1], 6, -1), ([1], 6, 0.1)]
)
def test_what_cannot_be_encoded_is_refused(indices: Any, depth: Any, left_pad: Any) -> None:
    with pytest.raises(InputError):
        padded_one_hot_encoding(torch.tensor(indices), depth, left_pad)


def test_an_index_beyond_the_classes_is_a_row_of_zeros() -> None:
    encoded = padded_one_hot_encoding(torch.tensor([-1, 2]), 2, 1)
    assert encoded is not None
    assert encoded.tolist() == [[0, 0, 0], [0, 0, 0]]


# Merging --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bins", [None, 10_000])
def test_labels_of_the_same_box_are_merged(bins: int | None) -> None:
    merged = merge_multiple_label_boxes(
        one([A, B, A]), one([1, 5, 3], torch.int64), 5, quantization_bins=bins, confidences=one([0.8, 0.2, 0.1])
    )
    assert merged.boxes[0].tolist() == [A, B]
    assert merged.classes[0].tolist() == [[1, 0, 1, 0, 0], [0, 0, 0, 0, 1]]
    assert merged.places.tolist() == [0, 1]
    assert merged.confidences is not None
    torch.testing.assert_close(merged.confidences[0], torch.tensor([[0.8, 0, 0.1, 0, 0], [0, 0, 0, 0, 0.2]]))


def test_labels_become_one_vector() -> None:
    """As `one_hot_encoding` of the reference, whose labels 1, 2 and 4 count from 0."""
    assert merge_multiple_label_boxes(one([A, A, A]), one([2, 3, 5], torch.int64), 5).classes[0].tolist() == [
        [0, 1, 1, 0, 1]
    ]


@pytest.mark.parametrize("bins", [None, 10_000])
def test_eight_boxes_in_the_corners_become_four_with_two_labels_each(bins: int | None) -> None:
    corners = [[0, 0, 1, 1], [0, 0, 0.5, 0.75], [0.25, 0.25, 0.75, 0.75], [0.5, 0.25, 1, 1]]
    merged = merge_multiple_label_boxes(
        one(corners + corners), one([1, 2, 3, 4, 5, 1, 2, 3], torch.int64), 5, quantization_bins=bins
    )
    assert merged.boxes[0].tolist() == corners
    assert merged.classes[0].tolist() == [[1, 0, 0, 0, 1], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0]]


def test_nearly_equal_boxes_are_merged_by_bins_alone_and_the_first_is_kept() -> None:
    near = [A, [0.250001, 0.25, 0.75, 0.75]]
    labels = one([1, 2], torch.int64)
    assert merge_multiple_label_boxes(one(near), labels, 2).classes[0].tolist() == [[1, 0], [0, 1]]
    merged = merge_multiple_label_boxes(one(near), labels, 2, quantization_bins=10_000)
    assert merged.boxes[0].tolist() == [A]
    assert merged.classes[0].tolist() == [[1, 1]]
    with pytest.raises(InputError, match="within their image"):
        merge_multiple_label_boxes(one([[0.0, 0, 1, 1.5]]), one([1], torch.int64), 2, quantization_bins=10_000)


def test_nothing_merges_to_nothing() -> None:
    merged = merge_multiple_label_boxes(one(np.zeros((0, 4))), one([], torch.int64), 5, confidences=one([]))
    assert merged.boxes[0].shape == (0, 4)
    assert merged.classes[0].shape == (0, 5)
    assert merged.confidences is not None
    assert merged.confidences[0].shape == (0, 5)


corner = st.sampled_from([0.0, 0.25, 0.5])


@given(st.lists(st.lists(st.tuples(corner, corner, st.integers(1, 3)), max_size=5), min_size=1, max_size=3))
def test_a_batch_is_merged_as_its_images_alone(images: list[list[tuple[float, float, int]]]) -> None:
    boxes = Ragged.of([torch.tensor([[t, c, 1, 1] for t, c, _ in image]).view(-1, 4) for image in images])
    labels = Ragged.of([torch.tensor([label for *_, label in image], dtype=torch.int64) for image in images])
    merged = merge_multiple_label_boxes(boxes, labels, 3)
    for row, image in enumerate(images):
        expected: dict[tuple[float, float], list[float]] = {}
        for top, left, label in image:
            expected.setdefault((top, left), [0, 0, 0])[label - 1] = 1
        assert [(top, left) for top, left, _, _ in merged.boxes[row].tolist()] == list(expected)
        assert merged.classes[row].tolist() == list(expected.values())


# Targets --------------------------------------------------------------------------------------------------------------


def test_each_object_has_its_class_vector_and_counts_once_unless_told_otherwise() -> None:
    made = DetectionTargets(3)(batch_of([[1, 3], []]), DRAWS)
    assert made["classes"][0].tolist() == [[1, 0, 0], [0, 0, 1]]
    assert made["classes"][1].shape == (0, 3)
    assert made["weights"].values.tolist() == [1, 1]
    assert [made[flag].values.tolist() for flag in ("is_crowd", "difficult", "group_of")] == [[False, False]] * 3
    given = batch_of([[1, 3], []], weights=boxes_of(2, 0).replaced(torch.tensor([0.5, 2])))
    assert DetectionTargets(3)(given, DRAWS)["weights"].values.tolist() == [0.5, 2]


def test_lists_of_tensors_do_as_well() -> None:
    rows = [torch.tensor([[0.0, 0, 1, 1]]), torch.zeros(0, 4)]
    batch = {"boxes": rows, "labels": [torch.tensor([2]), torch.zeros(0, dtype=torch.int64)]}
    assert DetectionTargets(2)(batch, DRAWS)["classes"][0].tolist() == [[0, 1]]


def test_merged_objects_keep_the_fields_of_the_first() -> None:
    batch = batch_of([[1, 2, 3], [2]])
    batch["boxes"].values[2] = batch["boxes"].values[0]
    batch["is_crowd"] = batch["labels"].replaced(torch.tensor([True, False, False, False]))
    batch |= {"class_text": [["cat", "dog", "pet"], ["dog"]], "label_scores": batch["boxes"].replaced(torch.rand(4))}
    made = DetectionTargets(3, merge_multiple_label_boxes=True)(batch, DRAWS)
    assert [each.tolist() for each in made["classes"]] == [[[1, 0, 1], [0, 1, 0]], [[0, 1, 0]]]
    assert [each.tolist() for each in made["is_crowd"]] == [[True, False], [False]]
    assert [each.tolist() for each in made["labels"]] == [[1, 2], [2]]
    assert made["class_text"] == [["cat", "dog"], ["dog"]]
    assert torch.equal(made["label_scores"].values, batch["label_scores"].values[[0, 1, 3]])


@pytest.mark.parametrize("name", ["masks", "keypoints"])
def test_what_belongs_to_one_object_is_not_merged(name: str) -> None:
    with pytest.raises(InputError, match="for boxes alone"):
        DetectionTargets(3, merge_multiple_label_boxes=True)(batch_of([[1], [2]], **{name: []}), DRAWS)


def test_scores_of_all_classes_stand_in_for_labels() -> None:
    scores = boxes_of(1, 1).replaced(torch.tensor([[0.7, 0.3], [0.1, 0.9]]))
    make = DetectionTargets(2, use_multiclass_scores=True)
    assert torch.equal(make(batch_of([[1], [2]], multiclass_scores=scores), DRAWS)["classes"].values, scores.values)
    with pytest.raises(DataError, match="no scores of all classes"):
        make(batch_of([[1], [2]]), DRAWS)
    with pytest.raises(InputError, match="no labels to be merged"):
        DetectionTargets(2, merge_multiple_label_boxes=True, use_multiclass_scores=True)


def test_keypoints_that_are_none_are_zeros_that_do_not_count() -> None:
    points = torch.tensor([[[0.1, 0.2], [math.nan, math.nan]], [[0.3, 0.4], [0.5, math.nan]]])
    visibility = torch.tensor([[2, 0], [0, 1]])
    counts = boxes_of(2)
    batch = batch_of([[1, 1]], keypoints=counts.replaced(points), keypoint_visibility=counts.replaced(visibility))
    made = DetectionTargets(1)(batch, DRAWS)
    assert made["keypoint_weights"].values.tolist() == [[1, 0], [0, 0]]
    expected = torch.tensor([[[0.1, 0.2], [0, 0]], [[0, 0], [0, 0]]])
    assert torch.equal(made["keypoints"].values, expected)


class _Squares:
    def __init__(self, count: int) -> None:
        self._count = count

    def decode(self) -> Tensor:
        return torch.ones(self._count, 2, 2, dtype=torch.uint8)


def test_an_image_without_masks_takes_none_from_the_others() -> None:
    made = DetectionTargets(2)(batch_of([[1, 2], []], masks=[_Squares(2), _Squares(0)]), DRAWS)
    assert [each.shape[0] for each in made["masks"]] == [2, 0]


@pytest.mark.parametrize("label", [0, -1, 3])
def test_a_label_that_is_no_class_is_refused(label: int) -> None:
    with pytest.raises(DataError, match="none of the detector's classes"):
        DetectionTargets(2)(batch_of([[1, label]]), DRAWS)


@pytest.mark.parametrize("name", ["boxes", "weights"])
def test_no_nan_reaches_a_loss(name: str) -> None:
    batch = batch_of([[1]], weights=boxes_of(1).replaced(torch.ones(1)))
    batch[name].values[0] = math.nan
    with pytest.raises(DataError, match=f"The {name} of an object are no finite numbers"):
        DetectionTargets(2)(batch, DRAWS)
