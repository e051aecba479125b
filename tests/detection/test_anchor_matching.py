"""Which anchor learns which object, with the numbers of the object detection API's own tests."""

from __future__ import annotations

import pytest
import torch
from device_calls import accelerator, counted
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, tensor

from lockstep.detection import anchor_matching
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


MATCHERS = [
    *(ArgmaxMatcher(0.6, 0.4, force_match_for_each_row=force) for force in (False, True)),
    ArgmaxMatcher(0.6, 0.4, negatives_lower_than_unmatched=False),
    ArgmaxMatcher(ignore_thresholds=True),
    BipartiteMatcher(),
    SsdMatcher(),
    *(ThresholdMatcher(0.7, 0.3, low_quality) for low_quality in (False, True)),
]


@pytest.mark.parametrize("matcher", MATCHERS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pairs", [1, 10**6], ids=["by parts", "at once"])
def test_images_are_matched_at_once_as_they_are_one_by_one(
    matcher: AnyMatcher, weighted: bool, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(2)
    corners = torch.rand(5, 40, 2, generator=generator) * 20
    drawn = torch.cat([corners, corners + 4 + torch.rand(5, 40, 2, generator=generator) * 8], -1).round()
    boxes = [each[:number] for each, number in zip(drawn, (3, 0, 9, 1, 5), strict=True)]
    weights = [torch.randint(2, (len(each),), generator=generator).float() for each in boxes] if weighted else None
    monkeypatch.setattr(anchor_matching, "_PAIRS", pairs)
    for anchors in (drawn[0], drawn.flip(1)):
        for some in (slice(5), slice(1, 2)):
            own = anchors if anchors.ndim == 2 else anchors[some]
            given = matcher, IouSimilarity(), boxes[some], own, weights and weights[some]
            one_by_one = match_images(*given)
            with accelerator():
                assert torch.equal(match_images(*given), one_by_one)


def test_matching_images_at_once_launches_no_more_for_more_of_them_and_never_waits() -> None:
    """Nor do the bipartite matches of objects wait."""
    boxes, anchors = [torch.rand(number, 4) for number in (3, 0, 9, 1)], torch.rand(30, 4)
    for matcher in MATCHERS:
        launches = []
        for images in (boxes[2:3], boxes):
            with accelerator(), counted(refuse_waits=True) as calls:
                match_images(matcher, IouSimilarity(), images, anchors, [each[:, 0] for each in images])
            launches.append(calls.num_launches)
        assert launches[0] == launches[1] or isinstance(matcher, BipartiteMatcher)


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
