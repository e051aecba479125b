"""Areas, overlaps and distances of boxes, with the numbers of the object detection API's own tests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import Tensor, tensor

from lockstep.detection import boxes as b
from lockstep.detection.blocks import (
    IoaSimilarity,
    IouSimilarity,
    Similarity,
    ThresholdedIouSimilarity,
)
from tests.detection.boxes_drawn import boxes_of

ONE = tensor([[4.0, 3.0, 7.0, 5.0], [5.0, 6.0, 10.0, 7.0]])
OTHER = tensor([[3.0, 4.0, 6.0, 8.0], [14.0, 14.0, 15.0, 15.0], [0.0, 0.0, 20.0, 20.0]])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (IouSimilarity(), [[2 / 16, 0, 6 / 400], [1 / 16, 0, 5 / 400]]),
        (IoaSimilarity(), [[2 / 12, 0, 6 / 400], [1 / 12, 0, 5 / 400]]),
        (ThresholdedIouSimilarity(0.013), [[1, 0, 1], [1, 0, 0]]),
    ],
)
def test_similarities_are_the_references(config: Similarity, expected: list[list[float]]) -> None:
    torch.testing.assert_close(b.similarity(config, ONE, OTHER), tensor(expected, dtype=torch.float32))


def test_areas_and_clipping_know_height_from_width() -> None:
    box = tensor([[-5.0, -5.0, 30.0, 50.0]])
    assert b.area(box).tolist() == [35 * 55]
    assert b.clip(box, (20, 40)).tolist() == [[0, 0, 20, 40]]


def test_giou_subtracts_the_share_of_the_hull_that_is_empty() -> None:
    boxes, far = tensor([[0.0, 0.0, 1.0, 1.0]]), tensor([[0.0, 2.0, 1.0, 3.0], [0.0, 0.0, 1.0, 2.0]])
    torch.testing.assert_close(b.matched_giou(boxes[:, None], far), tensor([[-1 / 3, 1 / 2]]))


def test_boxes_without_area_cover_nothing() -> None:
    nothing = tensor([[1.0, 1.0, 1.0, 1.0]])
    assert b.iou(nothing, nothing).tolist() == b.ioa(nothing, nothing).tolist() == [[0.0]]
    assert b.matched_giou(nothing[:, None], nothing).tolist() == [[0.0]]


def test_gradients_of_matched_overlaps_are_finite_where_boxes_are_equal_or_apart() -> None:
    predicted = tensor([[0.0, 0.0, 1.0, 1.0], [5.0, 5.0, 6.0, 6.0], [2.0, 2.0, 2.0, 2.0]], requires_grad=True)
    truth = tensor([[0.0, 0.0, 1.0, 1.0]] * 3)
    (b.matched_giou(predicted, truth) + b.matched_iou(predicted, truth)).sum().backward()
    assert predicted.grad is not None
    assert predicted.grad.isfinite().all()


@given(boxes_of(), boxes_of())
def test_iou_is_symmetric_and_between_0_and_1(one: Tensor, other: Tensor) -> None:
    iou = b.iou(one, other)
    torch.testing.assert_close(iou, b.iou(other, one).T)
    assert ((iou >= 0) & (iou <= 1 + 1e-6)).all()
    assert (b.matched_giou(one[:, None], other) <= iou + 1e-5).all()
    torch.testing.assert_close(b.iou(one, one).diagonal(), torch.ones(len(one)))


@given(boxes_of(3), boxes_of(3))
def test_boxes_side_by_side_have_the_diagonal_of_all_pairs(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(b.matched_iou(one, other), b.iou(one, other).diagonal())
    torch.testing.assert_close(b.matched_giou(one, other), b.matched_giou(one[:, None], other).diagonal())
