"""The metrics of PASCAL and Open Images have the values that the Object Detection API computed, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.metrics.detection_sets import DETECTION_METRICS
from lockstep.ragged import Ragged

RECORDED = json.loads(Path(__file__).with_name("detection_metrics_golden.json").read_text())
CATEGORIES = {1: "cat", 2: "dog", 3: "elephant"}
SIDE = 70


def column(name: str) -> Any:
    images = RECORDED["images"]
    if name == "source_id":
        return list(map(str, range(len(images))))
    if name.endswith("masks"):
        return [masks(image[name.replace("masks", "boxes")]) for image in images]
    kinds = {"boxes": torch.float64, "scores": torch.float64, "labels": torch.int64}
    kind = next((kinds[kind] for kind in kinds if name.endswith(kind)), torch.bool)
    shape = (-1, 4) if name.endswith("boxes") else (-1,)
    return Ragged.of([torch.tensor(image[name], dtype=kind).reshape(shape) for image in images])


def masks(boxes: list[list[int]]) -> torch.Tensor:
    """The pixels of the boxes, but for every third diagonal."""
    y, x = np.mgrid[:SIDE, :SIDE]
    left, top, width, height = np.array(boxes, int).reshape(-1, 4).T[:, :, None, None]
    inside = (x >= left) & (x < left + width) & (y >= top) & (y < top + height)
    return torch.from_numpy(inside & ((x + y) % 3 > 0))


@pytest.mark.parametrize("name", RECORDED["values"])
def test_detections_have_the_values_of_the_object_detection_api(name: str) -> None:
    metric = DETECTION_METRICS[name](CATEGORIES, per_category=True)
    metric.update(*metric.prepare(*map(column, metric.fields)))
    # The challenge's values were called otherwise in 2018.
    recorded = {key.split("_", 1)[1]: value for key, value in RECORDED["values"][name].items()}
    assert {key.split("_", 1)[1]: value for key, value in metric.compute().items()} == recorded
    assert 0.1 < min(recorded.values()) < max(recorded.values()) < 0.9
