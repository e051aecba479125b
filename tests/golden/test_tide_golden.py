"""TIDE's kinds of mistakes, and what they cost, are those that TIDE has recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tide_inputs import NUM_CLASSES, OF_DETECTION, OF_OBJECT, SIDE, images, mask

from lockstep.metrics.detection_errors import KINDS
from lockstep.metrics.detection_report import DetectionReport


def masks_of(rows: list[Any], power: float) -> np.ndarray:
    return np.array([mask(box, power) for box, *_ in rows], np.uint8).reshape(-1, SIDE, SIDE)


def report_of(
    order: list[int], size: int, made: list[Any] | None = None, measured: Literal["boxes", "masks"] = "boxes"
) -> DetectionReport:
    """The report of the images in this order, so many in a micro-batch."""
    made = made or images()
    report = DetectionReport({label: f"class {label}" for label in range(1, NUM_CLASSES + 1)}, measured)
    for start in range(0, len(order), size):
        columns: dict[str, list[object]] = {name: [] for name in report.fields}
        for number in order[start : start + size]:
            detections, objects = made[number]
            given = {
                "source_id": str(number),
                "boxes": np.array([box for box, *_ in detections]).reshape(-1, 4),
                "labels": np.array([label for _, label, _ in detections], np.int64),
                "scores": np.array([score for *_, score in detections]),
                "truth_boxes": np.array([box for box, *_ in objects]).reshape(-1, 4),
                "truth_labels": np.array([label for _, label, *_ in objects], np.int64),
            }
            if measured == "masks":
                given["masks"] = torch.from_numpy(masks_of(detections, OF_DETECTION))
                given["truth_masks"] = torch.from_numpy(masks_of(objects, OF_OBJECT))
            for name in report.fields:
                columns[name].append(given.get(name, np.zeros(len(objects), bool)))
        report.update(*report.prepare(*columns.values()))
    return report


@pytest.mark.parametrize("measured", ["boxes", "masks"])
def test_kinds_and_costs_are_those_of_tide(measured: Literal["boxes", "masks"]) -> None:
    recorded = json.loads((Path(__file__).parent / "tide_golden.json").read_text())[measured]
    errors = report_of([*range(30)], 30, measured=measured).compute()["errors"]
    assert {kind: error.mistakes for kind, error in errors.items()} == {kind: recorded[kind][0] for kind in KINDS}
    assert [error.cost for error in errors.values()] == pytest.approx([recorded[kind][1] for kind in KINDS], abs=1e-12)
    assert min(count for count, _ in recorded.values()) > 0
    assert errors == report_of([*range(30)][::-1], 7, measured=measured).compute()["errors"]


@pytest.mark.parametrize(("false", "cost"), [([], 0.5), ([([200, 200, 20, 20], 2, 0.8)], 0.0)])
def test_a_class_of_which_all_objects_are_missed(false: list[Any], cost: float) -> None:
    """TIDE 1.0.1 says the same: without its objects the class counts no longer, unless there are detections of it."""
    square = [10, 10, 20, 20]
    image = [(square, 1, 0.9), *false], [(square, 1), ([100, 100, 30, 30], 2)]
    errors = report_of([0], 1, [image]).compute()["errors"]
    assert errors["missed"] == (1, pytest.approx(cost, abs=1e-12))
    assert errors["background"] == (len(false), pytest.approx(0, abs=1e-12))
