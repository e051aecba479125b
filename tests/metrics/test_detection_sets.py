"""The metrics of the Object Detection API by name."""

from __future__ import annotations

import pytest

import lockstep as ls
from lockstep.metrics.detection_sets import DETECTION_METRICS

CATEGORIES = {1: "cat"}


def test_each_name_makes_the_metric_whose_values_the_reference_calls_so() -> None:
    first = {name: next(iter(make(CATEGORIES).compute())) for name, make in DETECTION_METRICS.items()}
    assert first == {
        "pascal_voc_metrics": "PascalBoxes_Precision/mAP@0.5IOU",
        "pascal_voc_detection_metrics": "PascalBoxes_Precision/mAP@0.5IOU",
        "weighted_pascal_voc_detection_metrics": "WeightedPascalBoxes_Precision/mAP@0.5IOU",
        "pascal_voc_instance_segmentation_metrics": "PascalMasks_Precision/mAP@0.5IOU",
        "weighted_pascal_voc_instance_segmentation_metrics": "WeightedPascalMasks_Precision/mAP@0.5IOU",
        "open_images_metrics": "OpenImagesV2_Precision/mAP@0.5IOU",
        "open_images_V2_detection_metrics": "OpenImagesV2_Precision/mAP@0.5IOU",
        "oid_V2_detection_metrics": "OpenImagesV2_Precision/mAP@0.5IOU",
        "oid_challenge_object_detection_metrics": "OpenImagesChallenge2018_Precision/mAP@0.5IOU",
        "oid_challenge_detection_metrics": "OpenImagesChallenge2018_Precision/mAP@0.5IOU",
        "coco_detection_metrics": "DetectionBoxes_Precision/mAP",
        "coco_mask_metrics": "DetectionMasks_Precision/mAP",
        "coco_keypoint_metrics": "Keypoints_Precision/mAP",
    }


def test_several_metrics_are_made_at_once() -> None:
    metrics = ls.metrics.detection_metrics(
        ["coco_detection_metrics", "pascal_voc_metrics"], CATEGORIES, per_category=True
    )
    assert list(metrics) == ["coco_detection_metrics", "pascal_voc_metrics"]
    names = [name for metric in metrics.values() for name in metric.compute()]
    assert "DetectionBoxes_PerformanceByCategory/mAP/cat" in names
    assert "PascalBoxes_PerformanceByCategory/AP@0.5IOU/cat" in names
    assert names == [name for metric in metrics.values() for name in metric.score_names]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ls.InputError, match=r"(?s)Metric not found: coco_detection_metric.*did you mean"):
        ls.metrics.detection_metrics(["coco_detection_metric"], CATEGORIES)


def test_a_name_that_is_in_no_list_is_refused() -> None:
    with pytest.raises(ls.InputError, match=r"(?s)list of names.*\['coco_detection_metrics'\]"):
        ls.metrics.detection_metrics("coco_detection_metrics", CATEGORIES)


@pytest.mark.parametrize("other", ["oid_V2_detection_metrics", "open_images_V2_detection_metrics"])
def test_metrics_whose_values_have_the_same_names_are_refused(other: str) -> None:
    with pytest.raises(ls.InputError, match=f"'oid_V2_detection_metrics' and '{other}'.*'OpenImagesV2_'"):
        ls.metrics.detection_metrics(["oid_V2_detection_metrics", "coco_mask_metrics", other], CATEGORIES)
