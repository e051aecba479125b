"""Detections as they are drawn."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.readers.coco_results import ImageResults, MaskText
from lockstep.runs.showing import detection_marks

FOUND = ImageResults(
    np.array([[10.0, 0, 20, 5], [0, 0, 40, 10]]), np.array([2, 7]), np.array([0.876, 0.5]), [MaskText(2, 2, "13")] * 2
)
POINTS = np.array([[[10.0, 5, 0.9]], [[40, 10, -3]]])


@pytest.mark.parametrize(
    ("labels", "scores", "names"),
    [
        (True, True, ["cat 0.88", "7 0.50"]),
        (True, False, ["cat", "7"]),
        (False, True, ["0.88", "0.50"]),
        (False, False, ["", ""]),
    ],
)
def test_detections_are_drawn_with_names_and_scores(labels: bool, scores: bool, names: list[str]) -> None:
    marks = detection_marks(FOUND._replace(keypoints=POINTS), (10, 40), {2: "cat"}, labels=labels, scores=scores)
    assert list(marks.names) == names
    assert marks.boxes is not None
    assert marks.boxes.tolist() == [[0, 0.25, 0.5, 0.75], [0, 0, 1, 1]]
    assert marks.masks is not None
    assert marks.masks.tolist() == [[[0, 1], [1, 1]]] * 2
    assert marks.keypoints is not None
    assert marks.keypoints.tolist() == [[[0.5, 0.25]], [[1, 1]]]


def test_without_masks_none_are_drawn() -> None:
    assert detection_marks(FOUND._replace(masks=()), (10, 40), {}).masks is None
    nothing = FOUND.at(np.array([], np.int64))
    assert detection_marks(nothing, (10, 40), {}).masks is None
