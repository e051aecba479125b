"""Detections as they are drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep.mask_runs import flips_of_pixels, runs_text
from lockstep.metrics import detection_report
from lockstep.readers.coco_results import ImageResults, MaskText
from lockstep.runs.showing import Comparison, detection_marks

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


def test_keypoints_that_a_class_has_not_are_not_drawn() -> None:
    marks = detection_marks(FOUND._replace(keypoints=np.stack([POINTS[0], np.zeros((1, 3))])), (10, 40), {})
    assert marks.keypoints is not None
    assert torch.isnan(marks.keypoints).flatten(1).tolist() == [[False, False], [True, True]]


def test_without_masks_none_are_drawn() -> None:
    assert detection_marks(FOUND._replace(masks=()), (10, 40), {}).masks is None
    nothing = FOUND.at(np.array([], np.int64))
    assert detection_marks(nothing, (10, 40), {}).masks is None


class Found:
    """Detections of each image: the masks of a box of 4 x 4 pixels are its upper and its lower half."""

    def on(self, image_id: str) -> ImageResults:
        boxes, labels, scores = np.array([[0.0, 0, 4, 4]] * 2), np.array([1, 1]), np.array([0.9, 0.8])
        halves = np.zeros((2, 4, 4), np.uint8)
        halves[0, :2], halves[1, 2:] = 1, 1
        masks = [MaskText(4, 4, runs_text(each, 16)) for each in flips_of_pixels(halves)]
        return ImageResults(boxes, labels, scores, masks)


@pytest.mark.parametrize(("by_masks", "right"), [(False, 0), (True, 1)])
def test_detections_are_compared_by_masks_where_they_are_scored_by_them(
    monkeypatch: pytest.MonkeyPatch, by_masks: bool, right: int
) -> None:
    """The object is in the lower half of its box, which both detections have."""
    monkeypatch.setattr(detection_report, "errors_of", None)  # kinds of mistakes are not drawn, and not computed
    lower = torch.zeros(1, 4, 4, dtype=torch.uint8)
    lower[:, 2:] = 1
    truth = {"truth_boxes": torch.tensor([[0.0, 0, 4, 4]]).double(), "truth_labels": torch.tensor([1])}
    fields = {"source_id": ["a"], "truth_masks": [lower], **{name: [each] for name, each in truth.items()}}
    compared = Comparison(Found(), by_masks=by_masks).of(fields, (4, 4), {1: "cat"})  # type: ignore[arg-type]
    assert str(compared) == "1 right, 1 wrong, 0 missed"
    assert compared.marks.names[right] == f"cat 0.{9 - right}0"
