"""Have the Object Detection API score detections as PASCAL and Open Images do. Run by hand, never in the tests.

    python3.11 -m venv /tmp/odapi
    /tmp/odapi/bin/pip install --no-deps tf-models-research-object-detection==2.8.0.post1 numpy==1.23.5 six
    /tmp/odapi/bin/python tests/golden/make_detection_metrics_golden.py

The modules of its metrics are NumPy's alone; TensorFlow, which they import for logging, and its label maps, for the
names of classes, are put in by hand. No two scores are equal: the order of such depends on NumPy's sort there.

It writes `detection_metrics_golden.json` beside itself: images with their objects and detections, and all values.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np

for name in ("tensorflow", "tensorflow.compat", "tensorflow.compat.v1"):
    sys.modules[name] = MagicMock()
label_maps = ModuleType("label_map_util")
label_maps.create_category_index = lambda categories: {each["id"]: each for each in categories}  # type: ignore[attr-defined]
sys.modules["object_detection.utils.label_map_util"] = label_maps

from object_detection.core.standard_fields import DetectionResultFields, InputDataFields  # noqa: E402
from object_detection.utils import object_detection_evaluation as reference  # noqa: E402

CATEGORIES = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}, {"id": 3, "name": "elephant"}]
EVALUATORS = {
    "pascal_voc_detection_metrics": reference.PascalDetectionEvaluator,
    "weighted_pascal_voc_detection_metrics": reference.WeightedPascalDetectionEvaluator,
    "pascal_voc_instance_segmentation_metrics": reference.PascalInstanceSegmentationEvaluator,
    "weighted_pascal_voc_instance_segmentation_metrics": reference.WeightedPascalInstanceSegmentationEvaluator,
    "open_images_V2_detection_metrics": reference.OpenImagesDetectionEvaluator,
    "oid_challenge_object_detection_metrics": reference.OpenImagesDetectionChallengeEvaluator,
}
SIDE = 70  # of the images, in pixels
Image = dict[str, list[Any]]


def images() -> list[Image]:
    """Boxes are x, y, width and height."""
    rng = np.random.default_rng(16)
    made = []
    for number in range(20):
        num_objects, num_detections = rng.integers(0, 8), rng.integers(0, 16)
        truth = np.concatenate([rng.integers(0, 30, (num_objects, 2)), rng.integers(1, 30, (num_objects, 2))], 1)
        labels = rng.integers(1, 4, num_objects)
        near = rng.integers(0, num_objects, num_detections) if num_objects else np.zeros(0, int)
        boxes = np.maximum(truth[near] + rng.integers(-2, 3, (len(near), 4)), 0)
        found = np.where(rng.random(len(near)) < 0.8, labels[near], rng.integers(1, 4, len(near)))
        made.append({
            "truth_boxes": truth.tolist(),
            "truth_labels": labels.tolist(),
            "truth_difficult": (rng.random(num_objects) < 0.2).tolist(),
            "truth_group_of": (rng.random(num_objects) < 0.2).tolist(),
            "truth_verified_labels": [int(rng.integers(1, 4))],
            "boxes": boxes.tolist(),
            "labels": found.tolist(),
            "scores": (rng.integers(1, 8, len(boxes)) / 8 + np.arange(len(boxes)) / 2**12 + number / 2**18).tolist(),
        })  # fmt: skip
    return made


def corners(boxes: list[list[int]]) -> np.ndarray:
    left, top, width, height = np.array(boxes, float).reshape(-1, 4).T
    return np.stack([top, left, top + height, left + width], axis=1)


def masks(boxes: list[list[int]]) -> np.ndarray:
    """The pixels of the boxes, but for every third diagonal."""
    y, x = np.mgrid[:SIDE, :SIDE]
    top, left, bottom, right = corners(boxes).T[:, :, None, None]
    inside = (x >= left) & (x < right) & (y >= top) & (y < bottom)
    return (inside & ((x + y) % 3 > 0)).astype(np.uint8)


def evaluated(name: str, made: list[Image]) -> dict[str, float]:
    evaluator = EVALUATORS[name](CATEGORIES)
    for number, image in enumerate(made):
        truth = {
            InputDataFields.groundtruth_boxes: corners(image["truth_boxes"]),
            InputDataFields.groundtruth_classes: np.array(image["truth_labels"], int),
            InputDataFields.groundtruth_difficult: np.array(image["truth_difficult"], bool),
            InputDataFields.groundtruth_group_of: np.array(image["truth_group_of"], bool),
            InputDataFields.groundtruth_image_classes: np.array(image["truth_verified_labels"], int),
            InputDataFields.groundtruth_instance_masks: masks(image["truth_boxes"]),
        }
        detections = {
            DetectionResultFields.detection_boxes: corners(image["boxes"]),
            DetectionResultFields.detection_scores: np.array(image["scores"], float),
            DetectionResultFields.detection_classes: np.array(image["labels"], int),
            DetectionResultFields.detection_masks: masks(image["boxes"]),
        }
        evaluator.add_single_ground_truth_image_info(str(number), truth)
        evaluator.add_single_detected_image_info(str(number), detections)
    return {key.replace("b'", "").rstrip("'"): float(value) for key, value in evaluator.evaluate().items()}


def main() -> None:
    made = images()
    content = {
        "recorded_with": f"tf-models-research-object-detection {version('tf-models-research-object-detection')}",
        "images": made,
        "values": {name: evaluated(name, made) for name in EVALUATORS},
    }
    path = Path(__file__).with_name("detection_metrics_golden.json")
    path.write_text(json.dumps(content, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
