"""NMS in blocks keeps what the plain loop over boxes keeps."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from device_calls import accelerator, counted
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.detection import nms as nms_module
from lockstep.detection.blocks import BatchNonMaxSuppression, PostProcessing
from lockstep.detection.boxes import area, iou
from lockstep.detection.nms import NmsLimits, batched_nms, best, multiclass_nms, nms_mask, postprocess, tried_nms

SHAPE = (100, 100)
GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "regions_golden.npz")


def drawn(*shape: int, seed: int = 0, side: float = 100.0) -> Tensor:
    """Boxes (..., 4), so many that some lie over the border of an image of 100 x 100."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(*shape, 2, generator=generator) * side
    sizes = torch.rand(*shape, 2, generator=generator) * side / 3 + 1
    return torch.cat([corners, corners + sizes], -1)


def coarse(*shape: int, seed: int = 0, steps: int = 50) -> Tensor:
    """Scores from 0 to 1, many of them equal."""
    return torch.randint(steps + 1, shape, generator=torch.Generator().manual_seed(seed + 1)) / steps


def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    return batched_nms(boxes, scores, torch.zeros_like(scores, dtype=torch.int64), threshold)


def one_by_one(boxes: Tensor, scores: Tensor, labels: Tensor, threshold: float) -> list[int]:
    dropping = (iou(boxes, boxes) > threshold) & (labels[:, None] == labels)
    dropped, kept = torch.zeros(len(scores), dtype=torch.bool), []
    for place in sorted(range(len(scores)), key=scores.neg().tolist().__getitem__):
        if not dropped[place]:
            kept.append(place)
            dropped |= dropping[place]
    return kept


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 1000),
    count=st.sampled_from([0, 1, 2, 60, 700]),
    classes=st.sampled_from([1, 3]),
    threshold=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
)
def test_keeps_what_a_loop_keeps(seed: int, count: int, classes: int, threshold: float) -> None:
    boxes, scores = drawn(count, seed=seed), coarse(count, seed=seed)
    labels = torch.arange(count) % classes
    expected = one_by_one(boxes, scores, labels, threshold)
    assert batched_nms(boxes, scores, labels, threshold).tolist() == expected
    assert batched_nms(boxes, scores, labels, threshold, max_detections=7).tolist() == expected[:7]
    if classes == 1:
        assert nms(boxes, scores, threshold).tolist() == expected


def test_more_boxes_than_are_sorted_at_first() -> None:
    boxes, scores = drawn(2500, side=400.0), coarse(2500)
    labels = torch.zeros(2500, dtype=torch.int64)
    assert nms(boxes, scores, 0.4).tolist() == one_by_one(boxes, scores, labels, 0.4)


def test_a_chain_of_boxes_takes_as_many_rounds_as_it_has_links() -> None:
    starts = torch.arange(300.0) * 4
    boxes = torch.stack([starts * 0, starts, starts * 0 + 10, starts + 10], 1)
    assert nms(boxes, -starts, 0.4).tolist() == list(range(0, 300, 2))


def test_boxes_without_area_overlap_nothing() -> None:
    boxes = torch.tensor([[5.0, 5, 5, 5], [5, 5, 5, 5], [0, 0, 9, 9]])
    assert nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.0).tolist() == [0, 1, 2]


def test_masks_of_a_batch_are_those_of_its_images() -> None:
    boxes, valid = drawn(3, 600), torch.rand(3, 600) > 0.2
    for image, mask in enumerate(nms_mask(boxes, 0.5, valid)):
        there = valid[image].nonzero()[:, 0]
        kept = nms(boxes[image][there], -torch.arange(float(len(there))), 0.5)
        assert mask.nonzero()[:, 0].tolist() == there[kept].tolist()
    assert torch.equal(nms_mask(boxes, 0.5), nms_mask(boxes, 0.5, torch.ones_like(valid)))


@pytest.mark.parametrize("pairs", [1, 10**9], ids=["in blocks", "at once"])
@pytest.mark.parametrize(("threshold", "waits"), [(0.99, 1), (0.3, 2)])
def test_masks_are_the_same_where_the_host_waits_once(
    threshold: float, waits: int, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes, valid = drawn(3, 600), torch.rand(3, 600) > 0.2
    monkeypatch.setattr(nms_module, "_PAIRS", pairs)
    with accelerator(), counted() as calls:
        masks = nms_mask(boxes, threshold, valid)
    assert len(calls.waits) <= waits
    assert torch.equal(masks, nms_mask(boxes, threshold, valid))


def test_a_chain_that_is_longer_than_the_rounds_is_no_other_where_the_host_waits() -> None:
    starts = torch.arange(300.0) * 4
    boxes = torch.stack([starts * 0, starts, starts * 0 + 10, starts + 10], 1)[None]
    with accelerator():
        assert not tried_nms(boxes, 0.4, None, 150)[1]
        assert nms_mask(boxes, 0.4)[0].nonzero()[:, 0].tolist() == list(range(0, 300, 2))


def test_best_takes_equal_scores_in_their_order() -> None:
    scores = torch.tensor([0.5, 0.9, 0.5, 0.5, 0.1, 0.9])
    assert best(scores, 4).tolist() == [1, 5, 0, 2]
    assert best(scores, 9).tolist() == [1, 5, 0, 2, 3, 4]
    assert best(scores[:0], 4).tolist() == []


@pytest.mark.parametrize("of_its_own", [False, True])
def test_each_class_is_by_itself(of_its_own: bool) -> None:
    """As in torchvision's loop over classes: threshold, the best candidates, NMS, then the best of all."""
    scores = coarse(500, 6, steps=100_000)
    boxes = drawn(500, 6 if of_its_own else 1)
    expected = []
    for label in range(6):
        own, of_class = boxes[:, label % boxes.shape[1]], scores[:, label]
        places = of_class.argsort(descending=True)[:40]
        places = places[of_class[places] > 0.5]
        kept = places[one_by_one(own[places], of_class[places], torch.zeros_like(places), 0.3)]
        expected += [(of_class[place].item(), label + 1, own[place].tolist()) for place in kept]
    expected = sorted(expected, reverse=True)[:60]
    found = multiclass_nms(boxes, scores, NmsLimits(0.5, 0.3, max_detections=60, candidates_per_class=40))
    assert list(zip(found.scores.tolist(), found.labels.tolist(), found.boxes.tolist(), strict=True)) == expected


def test_nothing_over_the_threshold_is_no_detection() -> None:
    found = multiclass_nms(drawn(5, 1), torch.full((5, 3), torch.nan), NmsLimits(0.5, 0.3, max_detections=60))
    assert [tuple(part.shape) for part in found[:3]] == [(0, 4), (0,), (0,)]


def converted(**fields: object) -> PostProcessing:
    return PostProcessing(BatchNonMaxSuppression(**fields), score_converter="sigmoid")  # type: ignore[arg-type]


def test_postprocess_prunes_what_is_outside_after_nms() -> None:
    """A box outside of the image is chosen, and may take the place of another, before it is left out."""
    boxes = torch.tensor([[0.0, 110, 50, 150], [0, 90, 50, 150], [60, 60, 120, 90], [0, 0, 10, 10]])[None, :, None]
    logits = torch.tensor([3.0, 2, 1, -5])[None, :, None]
    (found,) = postprocess(converted(iou_threshold=0.5), boxes, logits, SHAPE, has_background=False)
    assert found.boxes.tolist() == [[60, 60, 100, 90], [0, 0, 10, 10]]
    assert found.labels.tolist() == [1, 1]
    (found,) = postprocess(
        converted(iou_threshold=0.5, score_threshold=0.5, max_detections_per_class=1, max_total_detections=1),
        boxes,
        logits,
        SHAPE,
        has_background=False,
    )
    assert len(found.boxes) == 0, "the one of its class is outside"


def test_postprocess_limits_each_class_and_all() -> None:
    logits = coarse(2, 400, 4, steps=100_000) * 6 - 3
    config = converted(max_detections_per_class=5, max_total_detections=13, iou_threshold=0.4)
    for found in postprocess(config, drawn(2, 400, 1), logits, SHAPE):
        assert len(found.scores) == 13
        assert found.labels.bincount().max() <= 5
        assert set(found.labels.tolist()) == {1, 2, 3}, "the background is none"
        assert (found.scores.diff() <= 0).all()


@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_classes_compete_where_nms_is_class_agnostic(sigma: float) -> None:
    boxes = torch.tensor([[0.0, 0, 50, 50], [0, 0, 50, 49], [60, 60, 90, 90]])[None, :, None]
    logits = torch.tensor([[1.0, 3, 2], [2.5, 1, 0], [0, 0, 1]])[None]
    config = converted(use_class_agnostic_nms=True, iou_threshold=0.5, soft_nms_sigma=sigma)
    (found,) = postprocess(config, boxes, logits, SHAPE, has_background=False)
    assert found.labels.tolist()[:2] == [2, 3]
    assert found.scores.tolist()[:2] == pytest.approx(torch.tensor([3.0, 1]).sigmoid().tolist())
    assert found.boxes.tolist()[:2] == boxes[0, [0, 2], 0].tolist()
    if sigma:
        assert found.labels.tolist() == [2, 3, 1]
        assert found.scores[2] == pytest.approx(torch.tensor(2.5).sigmoid().item() * math.exp(-(0.98**2)))
    else:
        assert len(found.labels) == 2


def test_class_agnostic_nms_takes_the_box_of_the_best_class() -> None:
    boxes = drawn(1, 1, 3, side=50.0)
    config = converted(use_class_agnostic_nms=True)
    (found,) = postprocess(config, boxes, torch.tensor([[[0.0, 2, 1]]]), SHAPE, has_background=False)
    assert found.boxes.tolist() == boxes[0, 0, 1:2].tolist()
    assert found.labels.tolist() == [2]


def test_soft_nms_lowers_scores_within_a_class() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 5]])[None, :, None]
    logits = torch.tensor([[2.0, -9], [1, 1]])[None]
    config = converted(soft_nms_sigma=0.5, score_threshold=0.3)
    (found,) = postprocess(config, boxes, logits, SHAPE, has_background=False)
    lowered = torch.tensor(1.0).sigmoid() * torch.exp(torch.tensor(-(0.5**2)))
    assert found.labels.tolist() == [1, 2, 1]
    assert found.scores.tolist() == pytest.approx([0.880797, 0.731059, lowered.item()])


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1000), soft=st.booleans())
def test_detections_of_an_image_depend_on_no_other(seed: int, soft: bool) -> None:
    boxes, logits = drawn(3, 200, 1, seed=seed), coarse(3, 200, 4, seed=seed) * 6 - 3
    config = converted(max_total_detections=20, soft_nms_sigma=0.5 * soft)
    together = postprocess(config, boxes, logits, SHAPE)
    for image in range(3):
        (alone,) = postprocess(config, boxes[image : image + 1], logits[image : image + 1], SHAPE)
        assert all(torch.equal(a, b) for a, b in zip(alone[:3], together[image][:3], strict=True))


@pytest.mark.parametrize(
    ("converter", "expected"),
    [("identity", [0.0, 2.0]), ("sigmoid", [0.5, 0.880797]), ("softmax", [0.119203, 0.880797])],
)
def test_scores_are_made_of_scaled_logits(converter: str, expected: list[float]) -> None:
    config = PostProcessing(BatchNonMaxSuppression(score_threshold=-1), score_converter=converter, logit_scale=2)  # type: ignore[arg-type]
    boxes = torch.tensor([[0.0, 0, 9, 9]])[None, :, None]
    (found,) = postprocess(config, boxes, torch.tensor([[[0.0, 4.0]]]), SHAPE, has_background=False)
    assert sorted(found.scores.tolist()) == pytest.approx(expected, abs=1e-6)
    (found,) = postprocess(config, boxes, torch.tensor([[[0.0, 4.0]]]), SHAPE)
    assert found.scores.tolist() == pytest.approx(expected[1:], abs=1e-6)


@pytest.mark.parametrize(("number", "sigma"), [(0, 0.0), (1, 0.3), (2, 2.0)])
@pytest.mark.parametrize(("other", "thresholds"), [(0, (1.0, 0.0)), (1, (0.5, 0.2))])
def test_soft_nms_is_that_of_tensorflow(number: int, sigma: float, other: int, thresholds: tuple[float, float]) -> None:
    boxes, scores = torch.from_numpy(GOLDEN["rivals"]), torch.from_numpy(GOLDEN["scores"])
    iou_threshold, score_threshold = thresholds
    rule = BatchNonMaxSuppression(score_threshold, iou_threshold, 50, 50, soft_nms_sigma=sigma)
    logits = scores[None, :, None]
    (found,) = postprocess(PostProcessing(rule), boxes[None, :, None], logits, (10**6, 10**6), has_background=False)
    places = torch.from_numpy(GOLDEN[f"places_{number}_{other}"]).long()
    has_area = area(boxes[places]) > 0  # others are no detections
    assert torch.equal(found.boxes, boxes[places[has_area]])
    torch.testing.assert_close(found.scores, torch.from_numpy(GOLDEN[f"lowered_{number}_{other}"])[has_area])
