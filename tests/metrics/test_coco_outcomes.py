"""What became of detections and objects is what COCO's evaluation makes of them at an IoU of 0.5."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.metrics.coco import CocoMetric, Outcomes, outcomes

SQUARE = [10.0, 10.0, 8.0, 8.0]


def on_one_image(detections: list[Any], objects: list[Any]) -> Outcomes:
    """Detections are box, label and score; objects are box, label and whether they are a crowd."""
    boxes, labels, scores = zip(*detections, strict=True) if detections else ((), (), ())
    truth, classes, crowds = zip(*objects, strict=True) if objects else ((), (), ())
    return outcomes(
        np.array(boxes, np.float64).reshape(-1, 4), np.array(labels, np.int64), np.array(scores, np.float64),
        np.array(truth, np.float64).reshape(-1, 4), np.array(classes, np.int64), np.array(crowds, bool),
    )  # fmt: skip


def test_right_wrong_and_missed() -> None:
    near, far = [10.0, 10.0, 8.0, 6.0], [40.0, 10.0, 8.0, 8.0]
    found = on_one_image(
        [(near, 2, 0.5), (SQUARE, 2, 0.9), (far, 3, 0.8), (SQUARE, 1, 0.7)], [(far, 1, 0), (SQUARE, 2, 0)]
    )
    assert found.right.tolist() == [False, True, False, False], (
        "the better one has the object; others are of other classes"
    )
    assert not found.ignored.any()
    assert found.missed.tolist() == [True, False]


def test_half_is_enough_and_less_is_not() -> None:
    half, less = [10.0, 10.0, 8.0, 4.0], [10.0, 10.0, 8.0, 3.9]
    assert on_one_image([(half, 1, 0.5)], [(SQUARE, 1, 0)]).right.tolist() == [True]
    found = on_one_image([(less, 1, 0.5)], [(SQUARE, 1, 0)])
    assert (found.right.tolist(), found.missed.tolist()) == ([False], [True])


def test_a_crowd_is_neither_found_nor_missed() -> None:
    crowd = [0.0, 0.0, 90.0, 90.0]
    found = on_one_image([(SQUARE, 1, 0.5), ([0, 0, 5, 5], 1, 0.4)], [(crowd, 1, 1)])
    assert found.right.tolist() == [False, False]
    assert found.ignored.tolist() == [True, True]
    assert found.missed.tolist() == [False]


def test_only_the_best_hundred_of_a_class_count() -> None:
    others = [([50.0 + place, 50.0, 1.0, 1.0], 1, 1.0 + place) for place in range(100)]
    found = on_one_image([(SQUARE, 1, 0.5), *others], [(SQUARE, 1, 0)])
    assert found.ignored.tolist() == [True, *[False] * 100]
    assert found.missed.tolist() == [True]
    assert on_one_image([(SQUARE, 2, 0.5), *others], [(SQUARE, 2, 0)]).right.sum() == 1


def test_nothing_at_all() -> None:
    assert [len(each) for each in on_one_image([], [])] == [0, 0, 0]
    assert on_one_image([], [(SQUARE, 1, 0)]).missed.tolist() == [True]
    assert on_one_image([(SQUARE, 1, 0.5)], []).right.tolist() == [False]


boxes = st.tuples(*[st.integers(0, 6)] * 2, *[st.integers(1, 6)] * 2).map(lambda box: [float(side) for side in box])
labels = st.integers(1, 2)
scores = st.sampled_from([0.1, 0.5, 0.5, 0.9])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(boxes, labels, scores), max_size=8),
    st.lists(st.tuples(boxes, labels, st.booleans()), max_size=6),
)
def test_outcomes_are_those_that_the_coco_metric_counts(detections: list[Any], objects: list[Any]) -> None:
    found = on_one_image(detections, objects)
    metric = CocoMetric({1: "cat", 2: "dog"})
    columns = {
        "source_id": ["1"],
        "boxes": [torch.tensor([each[0] for each in detections], dtype=torch.float64).view(-1, 4)],
        "scores": [torch.tensor([each[2] for each in detections], dtype=torch.float64)],
        "labels": [torch.tensor([each[1] for each in detections], dtype=torch.int64)],
        "truth_boxes": [torch.tensor([each[0] for each in objects], dtype=torch.float64).view(-1, 4)],
        "truth_labels": [torch.tensor([each[1] for each in objects], dtype=torch.int64)],
        "truth_is_crowd": [torch.tensor([each[2] for each in objects], dtype=torch.bool)],
        "truth_area": [torch.tensor([each[0][2] * each[0][3] for each in objects], dtype=torch.float64)],
    }
    metric.update(*metric.prepare(*(columns[name] for name in metric.fields)))
    num_right, num_objects = int(found.right.sum()), sum(not is_crowd for _, _, is_crowd in objects)
    assert int(found.missed.sum()) == num_objects - num_right
    recalls = [
        sum(right for right, (_, of, _) in zip(found.right, detections, strict=True) if of == label) / number
        for label in (1, 2)
        if (number := sum(of == label and not is_crowd for _, of, is_crowd in objects))
    ]
    right_by_class = metric._tables().recall[0, :, 0, -1]  # at an IoU of 0.5, of all sizes
    assert [recall for recall in right_by_class.tolist() if recall >= 0] == recalls
