"""PASCAL's and Open Images' metrics: the toy images of the Object Detection API, and loops written from its text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep as ls
from lockstep.metrics.detection_sets import DETECTION_METRICS
from lockstep.metrics.pascal import average_precision
from lockstep.ragged import Ragged

CATEGORIES = {1: "cat", 2: "dog", 3: "elephant"}
Image = dict[str, Any]


def corners(*boxes: tuple[float, float, float, float]) -> torch.Tensor:
    """Boxes of x, y, width and height from top, left, bottom and right."""
    return torch.tensor([[x, y, right - x, bottom - y] for y, x, bottom, right in boxes]).reshape(-1, 4).double()


def toy_images() -> list[Image]:
    """The images of object_detection_evaluation_test.py: three, of which the second has detections."""
    nothing = {"boxes": corners(), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64)}
    return [
        {
            "source_id": "img1",
            "truth_boxes": corners((0, 0, 1, 1), (0, 0, 2, 2), (0, 0, 3, 3)),
            "truth_labels": torch.tensor([1, 3, 1]),
            **nothing,
        },
        {
            "source_id": "img2",
            "truth_boxes": corners((10, 10, 11, 11), (500, 500, 510, 510), (10, 10, 12, 12)),
            "truth_labels": torch.tensor([1, 1, 3]),
            "truth_difficult": torch.tensor([False, True, False]),
            "truth_group_of": torch.tensor([False, True, False]),
            "boxes": corners((10, 10, 11, 11), (100, 100, 120, 120), (100, 100, 220, 220)),
            "labels": torch.tensor([1, 1, 3]),
            "scores": torch.tensor([0.7, 0.8, 0.9]),
        },
        {
            "source_id": "img3",
            "truth_boxes": corners((0, 0, 1, 1)),
            "truth_labels": torch.tensor([2]),
            **nothing,
        },
    ]


def scored(metric: Any, images: list[Image], size: int = 2) -> dict[str, float]:
    metric.reset()
    for start in range(0, len(images), size):
        metric.update(*metric.prepare(*columns_of(images[start : start + size], metric.fields)))
    return metric.compute()


def columns_of(images: list[Image], fields: tuple[str, ...]) -> list[Any]:
    def column(name: str) -> Any:
        if name in {"truth_difficult", "truth_group_of"}:
            return Ragged.of([i.get(name, torch.zeros(len(i["truth_labels"]), dtype=torch.bool)) for i in images])
        if name == "truth_verified_labels":
            return Ragged.of([i.get(name, torch.zeros(0, dtype=torch.int64)) for i in images])
        column = [image[name] for image in images]
        return column if name == "source_id" or name.endswith("masks") else Ragged.of(column)

    return [column(name) for name in fields]


def test_the_toy_images_have_the_numbers_of_the_reference() -> None:
    values = scored(ls.metrics.PascalMetric(CATEGORIES, per_category=True), toy_images())
    assert values == pytest.approx({
        "PascalBoxes_Precision/mAP@0.5IOU": 0.5 / 3 / 3,
        "PascalBoxes_PerformanceByCategory/AP@0.5IOU/cat": 0.5 / 3,
        "PascalBoxes_PerformanceByCategory/AP@0.5IOU/dog": 0,
        "PascalBoxes_PerformanceByCategory/AP@0.5IOU/elephant": 0,
    })  # fmt: skip
    assert values["PascalBoxes_Precision/mAP@0.5IOU"] == pytest.approx(0.05555555, abs=1e-8)


@pytest.mark.parametrize("difficult", [False, True])
def test_weighted_by_the_objects_of_a_class(difficult: bool) -> None:
    num_cats = 3 if difficult else 4
    metric = ls.metrics.PascalMetric(CATEGORIES, weighted=True, difficult=difficult, per_category=True)
    values = scored(metric, toy_images())
    assert values["WeightedPascalBoxes_PerformanceByCategory/AP@0.5IOU/cat"] == pytest.approx(0.5 / num_cats)
    assert values["WeightedPascalBoxes_Precision/mAP@0.5IOU"] == pytest.approx(1 / (num_cats + 1 + 2) / 3)


def test_open_images_leaves_groups_out() -> None:
    metric = DETECTION_METRICS["open_images_V2_detection_metrics"](CATEGORIES, per_category=True)
    values = scored(metric, toy_images())
    assert values["OpenImagesV2_PerformanceByCategory/AP@0.5IOU/cat"] == pytest.approx(0.5 / 3)
    assert values["OpenImagesV2_Precision/mAP@0.5IOU"] == pytest.approx(0.5 / 3 / 3)


def with_group(score_inside: float) -> list[Image]:
    """A cat, found, and a group of cats, in which two detections lie."""
    return [{
        "source_id": "a",
        "truth_boxes": corners((0, 0, 10, 10), (100, 100, 200, 200)),
        "truth_labels": torch.tensor([1, 1]),
        "truth_group_of": torch.tensor([False, True]),
        "boxes": corners((0, 0, 10, 10), (110, 110, 120, 120), (130, 130, 140, 140), (300, 300, 400, 400)),
        "labels": torch.tensor([1, 1, 1, 1]),
        "scores": torch.tensor([0.9, score_inside, 0.1, 0.5]),
    }]  # fmt: skip


def test_a_group_of_the_challenge_is_one_object_found_by_the_best_detection_in_it() -> None:
    challenge = DETECTION_METRICS["oid_challenge_object_detection_metrics"](CATEGORIES)
    key = "OpenImagesChallenge2018_Precision/mAP@0.5IOU"
    # Ranked: right, group, wrong; or right, wrong, group.
    assert scored(challenge, with_group(0.8))[key] == 1
    assert scored(challenge, with_group(0.3))[key] == pytest.approx(0.5 + 0.5 * 2 / 3)
    v2 = DETECTION_METRICS["oid_V2_detection_metrics"](CATEGORIES)
    assert scored(v2, with_group(0.8))["OpenImagesV2_Precision/mAP@0.5IOU"] == 1


def test_the_challenge_passes_over_classes_that_nobody_has_verified() -> None:
    challenge = DETECTION_METRICS["oid_challenge_object_detection_metrics"](CATEGORIES, per_category=True)
    images = toy_images()
    images[0] |= {"boxes": corners((0, 0, 1, 1)), "labels": torch.tensor([2]), "scores": torch.tensor([1.0])}
    images[2] |= {"boxes": corners((0, 0, 1, 1)), "labels": torch.tensor([2]), "scores": torch.tensor([0.5])}
    key = "OpenImagesChallenge2018_PerformanceByCategory/AP@0.5IOU/dog"
    assert scored(challenge, images)[key] == 1
    images[0]["truth_verified_labels"] = torch.tensor([2])
    assert scored(challenge, images)[key] == 0.5


def test_corloc_is_asked_for_by_name() -> None:
    images = toy_images()
    images[2] |= {"boxes": corners((0, 0, 1, 1)), "labels": torch.tensor([2]), "scores": torch.tensor([0.5])}
    values = scored(ls.metrics.PascalMetric(CATEGORIES, corloc=True, per_category=True), images)
    assert {name: value for name, value in values.items() if "CorLoc" in name} == {
        "PascalBoxes_Precision/meanCorLoc@0.5IOU": 1 / 3,
        "PascalBoxes_PerformanceByCategory/CorLoc@0.5IOU/cat": 0,  # the best cat is at 100, 100
        "PascalBoxes_PerformanceByCategory/CorLoc@0.5IOU/dog": 1,
        "PascalBoxes_PerformanceByCategory/CorLoc@0.5IOU/elephant": 0,
    }


def test_masks_are_compared_by_their_pixels() -> None:
    whole, half, other = torch.zeros(3, 8, 8, dtype=torch.uint8)
    whole[2:6, 2:6], half[2:6, 2:4], other[2:6, 4:6] = 1, 1, 1
    images: list[Image] = [{
        "source_id": "a",
        "truth_masks": whole[None], "truth_labels": torch.tensor([1]),
        "masks": torch.stack([half, other, torch.zeros_like(whole)]),
        "labels": torch.tensor([1, 1, 1]), "scores": torch.tensor([0.5, 0.9, 1.0]),
    }]  # fmt: skip
    metric = DETECTION_METRICS["pascal_voc_instance_segmentation_metrics"](CATEGORIES)
    assert scored(metric, images) == {"PascalMasks_Precision/mAP@0.5IOU": 1}
    metric = ls.metrics.PascalMetric(CATEGORIES, "masks", threshold=0.75, weighted=True)
    assert scored(metric, images) == {"WeightedPascalMasks_Precision/mAP@0.75IOU": 0}


def test_without_objects_there_is_no_value() -> None:
    for weighted in (False, True):
        metric = ls.metrics.PascalMetric(CATEGORIES, weighted=weighted, corloc=True)
        assert all(math.isnan(value) for value in metric.compute().values())


def made_up(seed: int) -> list[Image]:
    rng = np.random.default_rng(seed)
    images = []
    for number in range(6):
        num_objects, num_detections = rng.integers(0, 8), rng.integers(0, 16)
        truth = np.concatenate([rng.integers(0, 30, (num_objects, 2)), rng.integers(1, 30, (num_objects, 2))], 1)
        truth[num_objects // 2 :] = truth[: num_objects - num_objects // 2]  # twice in one place
        labels = rng.integers(1, 4, num_objects)
        near = rng.integers(0, num_objects, num_detections) if num_objects else np.zeros(0, int)
        boxes = np.maximum(truth[near] + rng.integers(-3, 4, (len(near), 4)), 0)
        found = np.where(rng.random(len(near)) < 0.8, labels[near], rng.integers(1, 4, len(near)))
        images.append({
            "source_id": f"image {number}",
            "truth_boxes": torch.from_numpy(truth).double(),
            "truth_labels": torch.from_numpy(labels),
            "truth_difficult": torch.from_numpy(rng.random(num_objects) < 0.2),
            "truth_group_of": torch.from_numpy(rng.random(num_objects) < 0.2),
            "truth_verified_labels": torch.from_numpy(rng.integers(1, 4, 1)),
            "boxes": torch.from_numpy(boxes).double(),
            "labels": torch.from_numpy(found),
            "scores": torch.from_numpy(rng.integers(1, 8, len(boxes)) / 8),
        })  # fmt: skip
    return images


def overlap(one: list[float], other: list[float], of_first: bool = False) -> float:
    wide = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
    high = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
    if wide <= 0 or high <= 0:
        return 0
    return wide * high / (one[2] * one[3] + (0 if of_first else other[2] * other[3] - wide * high))


def judged_by_a_loop(image: Image, label: int, metric: Any) -> tuple[list[tuple[float, float]], float, bool]:
    """Scores and values of the detections of a class, the number of its objects, and whether the best one is right."""
    columns = {name: image[name].tolist() for name in image if name != "source_id"}
    truth = [
        (box, difficult and "truth_difficult" in metric.fields, group and metric.group_weight is not None)
        for box, of, difficult, group in zip(
            *(columns[f"truth_{name}"] for name in ("boxes", "labels", "difficult", "group_of")), strict=True
        )
        if of == label
    ]
    detections = [
        (score, box)
        for box, of, score in zip(columns["boxes"], columns["labels"], columns["scores"], strict=True)
        if of == label and min(box[2:]) > 0
        if "truth_verified_labels" not in metric.fields
        or label in columns["truth_labels"] + columns["truth_verified_labels"]
    ]
    best = max(detections, key=lambda detection: detection[0], default=None)
    located = best is not None and any(overlap(best[1], box) >= 0.5 for box, *_ in truth)
    values, found, groups = [], set(), {}
    for _, (score, box) in sorted(enumerate(detections), key=lambda each: (-each[1][0], -each[0])):
        overlaps = [(overlap(box, other), -place) for place, (other, _, group) in enumerate(truth) if not group]
        most, place = max(overlaps, default=(0, 0))
        if most >= 0.5 and truth[-place][1]:
            continue
        if most >= 0.5 and place not in found:
            found.add(place)
            values.append((score, 1.0))
            continue
        inside = [(overlap(box, other, True), -place) for place, (other, _, group) in enumerate(truth) if group]
        most, place = max(inside, default=(0, 0))
        if most >= 0.5:
            groups.setdefault(place, score)
        else:
            values.append((score, 0.0))
    weight = metric.group_weight or 0
    values += [(score, weight) for _, score in sorted(groups.items(), reverse=True) if weight]
    number = sum(not difficult and not group for _, difficult, group in truth)
    return values, number + weight * sum(group for *_, group in truth), located


@pytest.mark.parametrize("name", [name for name in DETECTION_METRICS if "coco" not in name and "segm" not in name])
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 6))
@settings(max_examples=6, deadline=None)
def test_the_values_are_those_of_a_loop(name: str, seed: int, size: int) -> None:
    images = made_up(seed)
    metric = DETECTION_METRICS[name](CATEGORIES, per_category=True, corloc=True)
    values = scored(metric, images, size)
    every, total = [], 0.0
    for label, category in CATEGORIES.items():
        judged = [judged_by_a_loop(image, label, metric) for image in images]
        detections = [detection for some, *_ in judged for detection in some]
        number = sum(number for _, number, _ in judged)
        present = [
            located for image, (*_, located) in zip(images, judged, strict=True) if label in image["truth_labels"]
        ]
        scores, right = np.array(detections).reshape(-1, 2).T
        average = average_precision(scores, right, number)
        own = values[f"{metric.prefix}PerformanceByCategory/AP@0.5IOU/{category}"]
        assert own == average or (math.isnan(own) and math.isnan(average))
        located = values[f"{metric.prefix}PerformanceByCategory/CorLoc@0.5IOU/{category}"]
        assert located == sum(present) / len(present) if present else math.isnan(located)
        every += detections if number else []
        total += number
    if metric.weighted and total:
        scores, right = np.array(every).reshape(-1, 2).T
        mean = average_precision(scores, right, total)
        assert values[f"{metric.prefix}Precision/mAP@0.5IOU"] == mean
