"""Objects on images by the detector of a run, in a script."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from saved_runs import recipe_of_photos, saved
from tiny_detector import TinyDetector, save_detector_run

import lockstep as ls
from lockstep.readers.coco_results import MaskText
from lockstep.runs.predict import found_objects_json

MAP = "PascalBoxes_Precision/mAP@0.5IOU"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_detector_run(tmp_path, monkeypatch)


def test_a_script_gets_the_objects() -> None:
    found = ls.detect("run", ["images/1.png"], weights="average")
    assert (found.files, len(found), found.weights) == (["1.png"], 1, "average")
    best = found.objects(0)[0]
    assert best.name in ("red", "green")
    assert best.mask is None
    assert best.score == max(each.score for each in found.objects(0))


def test_objects_have_masks_or_keypoints_where_a_detector_finds_them() -> None:
    found = ls.detect("run", ["images/1.png"])
    (image,) = found.images
    number, mask = len(image.found.labels), MaskText(2, 2, "04")
    masks = image.found._replace(masks=[mask] * number)
    points = image.found._replace(keypoints=np.full((number, 3, 3), 0.5))
    for results, facts in (
        (masks, {"segmentation": {"size": [2, 2], "counts": "04"}}),
        (points, {"keypoints": [0.5] * 9}),
    ):
        of_image = replace(found, images=[image._replace(found=results)])
        first = json.loads(found_objects_json(of_image))["predictions"][0]["objects"][0]
        assert first.items() >= facts.items()
        assert len(first) == 5
        best = of_image.objects(0)[0]
        assert (best.mask, best.keypoints) == ((mask, None) if results is masks else (None, ((0.5,) * 3,) * 3))


def test_boxes_that_are_not_finite_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TinyDetector, "anchors", lambda net, shape, device: torch.full((net.cells**2, 4), torch.nan))
    with pytest.raises(ls.NonFiniteError, match=r"1\.png"):
        ls.detect("run", "images/1.png")


def test_a_classifier_finds_no_objects() -> None:
    saved(Path("photos"), recipe_of_photos(train="gone", validation="gone"))
    with pytest.raises(ls.InputError, match=r"ls\.predict"):
        ls.detect("photos", "images")
