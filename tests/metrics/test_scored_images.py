"""What detection metrics refuse: the error names the field, the object and the image."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lockstep as ls
from lockstep.images.masks import dense_masks
from lockstep.mask_runs import flips_of_pixels
from lockstep.ragged import Ragged

CATEGORIES = {1: "cat", 2: "dog"}
GOOD: dict[str, Any] = {
    "source_id": ["first.jpg", "second.jpg"],
    "boxes": Ragged.of([torch.zeros(0, 4), torch.tensor([[0.0, 0, 5, 5], [1, 2, 3, 4]])]),
    "scores": Ragged.of([torch.zeros(0), torch.tensor([0.5, 0.25])]),
    "labels": Ragged.of([torch.tensor([], dtype=torch.int64), torch.tensor([1, 2])]),
    "truth_boxes": Ragged.of([torch.tensor([[1.0, 2, 3, 4]]), torch.zeros(0, 4)]),
    "truth_labels": Ragged.of([torch.tensor([1]), torch.tensor([], dtype=torch.int64)]),
    "truth_is_crowd": Ragged.of([torch.tensor([False]), torch.tensor([], dtype=torch.bool)]),
    "truth_area": Ragged.of([torch.tensor([12.0]), torch.zeros(0)]),
}


def prepare(metric: Any = None, **changes: Any) -> Any:
    metric = metric or ls.metrics.CocoMetric(CATEGORIES)
    return metric.prepare(*({**GOOD, **changes}[name] for name in metric.fields))


def second(*values: Any, like: str) -> Ragged:
    return GOOD[like].replaced(torch.tensor(values, dtype=GOOD[like].values.dtype))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boxes": second([0, 0, 5, 5], [1, 2, 3, -4], like="boxes")}, "'boxes'.*object 1 of the image 'second.jpg'"),
        ({"boxes": second([0, 0, 5, torch.nan], [1, 2, 3, 4], like="boxes")}, "'boxes'.*object 0 of .*'second.jpg'"),
        ({"scores": second(0.5, torch.inf, like="scores")}, "'scores'.*inf: object 1 of the image 'second.jpg'"),
        ({"scores": second(torch.nan, torch.nan, like="scores")}, "'scores'.*'second.jpg'; 1 more like it"),
        ({"labels": second(1, 3, like="labels")}, "'labels'.*3: object 1 .*'second.jpg'.*one of 2 classes from 1 to 2"),
        ({"labels": second(0, 1, like="labels")}, "'labels'.*0: object 0"),
        ({"labels": GOOD["scores"]}, "'labels'.*torch.float32"),
        ({"truth_labels": second(7, like="truth_labels")}, "'truth_labels'.*7: object 0 of the image 'first.jpg'"),
        ({"truth_area": second(-1, like="truth_area")}, "'truth_area'.*-1.0: object 0 of the image 'first.jpg'"),
        ({"truth_boxes": second([0, 0, -1, 1], like="truth_boxes")}, "'truth_boxes'.*'first.jpg'"),
        ({"boxes": GOOD["boxes"].replaced(torch.zeros(2, 5))}, r"'boxes'.*shape \(2, 5\).*shape \(objects, 4\)"),
        ({"scores": Ragged.of([torch.zeros(1), torch.zeros(1)])}, "'scores' and 'labels' differ.*'first.jpg'.*1 and 0"),
        ({"truth_area": Ragged.of([torch.zeros(0)] * 2)}, "'truth_area' and 'truth_labels' differ.*'first.jpg'"),
        ({"scores": Ragged.of([torch.zeros(2)])}, "'scores'.*not as many images.*1 images, and 2 values"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ls.errors.InputError, match=f"(?s){message}"):
        prepare(**changes)


def test_an_image_that_comes_twice_is_refused() -> None:
    for metric in (ls.metrics.CocoMetric(CATEGORIES), ls.metrics.PascalMetric(CATEGORIES, difficult=False)):
        metric.update(*prepare(metric))
        with pytest.raises(ls.errors.InputError, match=r"The image 'first\.jpg' was scored twice"):
            metric.update(*prepare(metric))
        metric.reset()
        metric.update(*prepare(metric))
        with pytest.raises(ls.errors.InputError, match="The image 'one' was scored twice"):
            metric.update(*prepare(metric, source_id=["one", "one"]))


@pytest.mark.parametrize(
    ("categories", "message"),
    [
        ({}, "no class"),
        ({0: "background", 1: "cat"}, "the label 0"),
        ({1: "cat", 2**31: "dog"}, "the label 2147483648"),
        ({1: "cat", 2: "cat"}, "the name 'cat' twice"),
        (["cat"], "categories"),
        (["background"], "no class"),
        ("background", "categories"),
    ],
)
def test_classes_that_cannot_be_told_apart_are_refused(categories: Any, message: str) -> None:
    for make in (ls.metrics.CocoMetric, ls.metrics.PascalMetric):
        with pytest.raises(ls.errors.InputError, match=message):
            make(categories)


def test_an_id_that_is_no_utf_8_is_named() -> None:
    metric = ls.metrics.PascalMetric(CATEGORIES, difficult=False)
    with pytest.raises(ls.errors.InputError, match=r"The image '\\udce9\.jpg' was scored twice"):
        metric.update(*prepare(metric, source_id=["\udce9.jpg", "\udce9.jpg"]))


def test_a_list_of_classes_begins_with_the_background() -> None:
    metric = ls.metrics.CocoMetric(["background", "cat", "", "dog"], per_category=True)
    assert metric.categories == {1: "cat", 3: "dog"}


def test_columns_that_are_missing_are_refused() -> None:
    metric = ls.metrics.CocoMetric(CATEGORIES)
    with pytest.raises(ls.errors.InputError, match=r"(?s)2 columns.*'source_id', 'boxes'"):
        metric.prepare(["1"], GOOD["boxes"])


def test_lists_of_tensors_and_numbers_of_any_type_are_taken() -> None:
    lists = {name: column if isinstance(column, list) else list(column) for name, column in GOOD.items()}
    lists["boxes"] = [boxes.bfloat16() for boxes in lists["boxes"]]
    for ours, theirs in zip(prepare(**lists), prepare(), strict=True):
        assert ours.values.tolist() == theirs.values.tolist()
        assert ours.lengths.tolist() == theirs.lengths.tolist()


def test_masks_of_another_size_are_refused() -> None:
    masks = {
        "masks": [torch.zeros(0, 4, 4, dtype=torch.uint8), torch.ones(2, 4, 4, dtype=torch.uint8)],
        "truth_masks": [torch.ones(1, 4, 4, dtype=torch.uint8), torch.zeros(0, 3, 3, dtype=torch.uint8)],
    }
    metric = ls.metrics.CocoMetric(CATEGORIES, "masks")
    prepare(metric, **masks)  # the second image has no objects whose size could be another
    masks["truth_masks"] = [torch.zeros(0, 3, 3, dtype=torch.uint8), torch.ones(1, 5, 4, dtype=torch.uint8)]
    other = [GOOD[name][torch.tensor([1, 0])] for name in ("truth_labels", "truth_is_crowd", "truth_area")]
    masks |= dict(zip(("truth_labels", "truth_is_crowd", "truth_area"), other, strict=True))  # type: ignore[arg-type]
    with pytest.raises(ls.errors.InputError, match=r"'second.jpg' differ in size.*\n.*masks of 4 x 4, .* of 4 x 5"):
        prepare(metric, **masks)


def test_masks_of_probabilities_are_refused() -> None:
    masks = [torch.zeros(0, 4, 4, dtype=torch.bool), torch.rand(2, 4, 4)]
    truth = [torch.ones(1, 4, 4, dtype=torch.uint8), torch.zeros(0, 4, 4, dtype=torch.uint8)]
    metric = ls.metrics.CocoMetric(CATEGORIES, "masks")
    with pytest.raises(ls.errors.InputError, match=r"(?s)'masks' of the image 'second.jpg'.*float32.*masks > 0.5"):
        prepare(metric, masks=masks, truth_masks=truth)
    prepare(metric, masks=[each > 0.5 for each in masks], truth_masks=truth)


def test_keypoints_of_another_number_are_refused() -> None:
    points = Ragged(torch.zeros(2, 5, 2), GOOD["labels"].lengths)
    truth = Ragged(torch.zeros(1, 17, 3), GOOD["truth_labels"].lengths)
    with pytest.raises(ls.errors.InputError, match=r"17 keypoints.*'keypoints'"):
        prepare(ls.metrics.CocoMetric(CATEGORIES, "keypoints"), keypoints=points, truth_keypoints=truth)
    with pytest.raises(ls.errors.InputError, match=r"5 keypoints.*'truth_keypoints'"):
        prepare(
            ls.metrics.CocoMetric(CATEGORIES, "keypoints", sigmas=[0.1] * 5), keypoints=points, truth_keypoints=truth
        )


def test_lazy_masks_are_decoded_unless_they_know_their_runs() -> None:
    pixels = (torch.rand(2, 6, 5, generator=torch.Generator().manual_seed(0)) > 0.5).to(torch.uint8)
    lazy = dense_masks(pixels.float().numpy(), 6, 5)
    metric = ls.metrics.PascalMetric(CATEGORIES, "masks", difficult=False)
    truth = [torch.ones(1, 6, 5, dtype=torch.uint8), torch.zeros(0, 6, 5, dtype=torch.uint8)]
    none = torch.zeros(0, 6, 5, dtype=torch.uint8)
    ours, theirs = (prepare(metric, masks=[none, each], truth_masks=truth) for each in (lazy, pixels))
    assert all(one.values.equal(other.values) for one, other in zip(ours, theirs, strict=True))
    assert len(flips_of_pixels(pixels.numpy())) == 2
