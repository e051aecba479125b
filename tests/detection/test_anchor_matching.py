"""Which anchor learns which object, with the numbers of the object detection API's own tests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, tensor

from lockstep.detection.anchor_matching import AnyMatcher, after_none, match, match_images, rows_of_objects
from lockstep.detection.blocks import ArgmaxMatcher, BipartiteMatcher, IouSimilarity, SsdMatcher, ThresholdMatcher
from lockstep.detection.boxes import iou
from tests.detection.boxes_drawn import boxes_of

LIKENESS = tensor([[1.0, 1, 1, 3, 1], [2, -1, 2, 0, 4], [3, 0, -1, 0, 0]])
FORCING = tensor([[1.0, 1, 1, 3, 1], [-1, 0, -2, -2, -1], [3, 0, -1, 2, 0]])


@pytest.mark.parametrize(
    ("matcher", "likeness", "expected"),
    [
        (ArgmaxMatcher(ignore_thresholds=True), LIKENESS, [2, 0, 1, 0, 1]),
        (ArgmaxMatcher(3.0, 3.0), LIKENESS, [2, -1, -1, 0, 1]),
        (ArgmaxMatcher(3.0, 2.0), LIKENESS, [2, -1, -2, 0, 1]),
        (ArgmaxMatcher(3.0, 2.0, negatives_lower_than_unmatched=False), LIKENESS, [2, -2, -1, 0, 1]),
        (ArgmaxMatcher(3.0, 2.0), FORCING, [2, -1, -1, 0, -1]),
        (ArgmaxMatcher(3.0, 2.0, force_match_for_each_row=True), FORCING, [2, 1, -1, 0, -1]),
        (BipartiteMatcher(), tensor([[0.5, 0.1, 0.8], [0.15, 0.2, 0.3]]), [-1, 1, 0]),
        (BipartiteMatcher(), tensor([[0.5], [0.6]]), [1]),
    ],
)
def test_matches_are_the_references(matcher: AnyMatcher, likeness: Tensor, expected: list[int]) -> None:
    assert match(matcher, likeness).tolist() == expected


def test_an_object_that_does_not_count_gets_no_anchor_of_its_own() -> None:
    counts = tensor([True, False, True])
    forced = ArgmaxMatcher(3.0, 2.0, force_match_for_each_row=True)
    assert match(forced, FORCING, counts).tolist() == [2, -1, -1, 0, -1]
    pairs = tensor([[0.15, 0.2, 0.3], [0.5, 0.1, 0.8]])
    assert match(BipartiteMatcher(), pairs, tensor([False, True])).tolist() == [-1, -1, 1]
    assert match(BipartiteMatcher(), pairs, tensor([False, False])).tolist() == [-1, -1, -1]


@pytest.mark.parametrize(("matcher", "owner"), [(SsdMatcher(), 1), (ArgmaxMatcher(force_match_for_each_row=True), 0)])
def test_of_two_objects_with_one_best_anchor_torchvision_takes_the_last(matcher: AnyMatcher, owner: int) -> None:
    likeness = tensor([[0.3, 0.1], [0.2, 0.1]])
    assert match(matcher, likeness).tolist() == [owner, -1]


def test_low_quality_matches_of_torchvision() -> None:
    likeness = tensor([[0.8, 0.5, 0.2, 0.1], [0.1, 0.4, 0.3, 0.4]])
    assert match(ThresholdMatcher(0.7, 0.3), likeness).tolist() == [0, -2, -2, -2]
    # The second object is most similar to two anchors, of which the first is more similar to the first object.
    assert match(ThresholdMatcher(0.7, 0.3, True), likeness).tolist() == [0, 0, -2, 1]


@pytest.mark.parametrize(
    "matcher", [ArgmaxMatcher(), BipartiteMatcher(), SsdMatcher(), ThresholdMatcher(0.7, 0.3, True)]
)
def test_without_objects_all_anchors_are_background(matcher: AnyMatcher) -> None:
    assert match(matcher, torch.zeros(0, 3)).tolist() == [-1, -1, -1]


def test_each_image_is_matched_by_itself() -> None:
    anchors = tensor([[0.0, 0.0, 10.0, 10.0], [0.0, 10.0, 10.0, 20.0]])
    boxes = [torch.zeros(0, 4), anchors[[1]], anchors[[1, 0]]]
    matches = match_images(SsdMatcher(), IouSimilarity(), boxes, anchors, [torch.ones(len(each)) for each in boxes])
    assert matches.tolist() == [[-1, -1], [-1, 0], [1, 0]]


def test_objects_of_all_images_are_rows_after_none() -> None:
    boxes = [tensor([[1.0], [2.0]]), torch.zeros(0, 1), tensor([[3.0]])]
    images, matches = torch.arange(3)[:, None], tensor([[1, -1], [-1, -2], [0, -2]])
    assert after_none(boxes)[rows_of_objects(boxes, images, matches)][..., 0].tolist() == [[2, 0], [0, 0], [3, 0]]


@given(boxes_of(), boxes_of(), st.floats(0.1, 0.9))
def test_a_matched_anchor_is_similar_or_the_best_of_an_object(
    objects: Tensor, anchors: Tensor, threshold: float
) -> None:
    likeness = iou(objects, anchors)
    matches = match(SsdMatcher(threshold), likeness)
    for anchor, found in enumerate(matches.tolist()):
        if found >= 0:
            best = likeness[found, anchor]
            assert best >= threshold or best == likeness[found].max()
    if len(objects) <= 1:
        assert {*range(len(objects))} <= {*matches.tolist()}
