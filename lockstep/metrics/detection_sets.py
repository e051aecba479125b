"""The metrics of the Object Detection API by the names that its configs have for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from lockstep.errors import InputError
from lockstep.listing import did_you_mean
from lockstep.metrics.coco import CocoMetric
from lockstep.metrics.detection_metric import DetectionMetric
from lockstep.metrics.pascal import PascalMetric

_OPEN_IMAGES = partial(PascalMetric, difficult=False, group_weight=0.0, prefix="OpenImagesV2")
_CHALLENGE = partial(PascalMetric, difficult=False, group_weight=1.0, verified=True, prefix="OpenImagesChallenge2018")

DETECTION_METRICS: Mapping[str, Callable[..., DetectionMetric]] = {
    "pascal_voc_metrics": PascalMetric,
    "pascal_voc_detection_metrics": PascalMetric,
    "weighted_pascal_voc_detection_metrics": partial(PascalMetric, weighted=True),
    "pascal_voc_instance_segmentation_metrics": partial(PascalMetric, measured="masks"),
    "weighted_pascal_voc_instance_segmentation_metrics": partial(PascalMetric, measured="masks", weighted=True),
    "open_images_metrics": _OPEN_IMAGES,
    "open_images_V2_detection_metrics": _OPEN_IMAGES,
    "oid_V2_detection_metrics": _OPEN_IMAGES,
    "oid_challenge_object_detection_metrics": _CHALLENGE,
    "oid_challenge_detection_metrics": _CHALLENGE,
    "coco_detection_metrics": CocoMetric,
    "coco_mask_metrics": partial(CocoMetric, measured="masks"),
    "coco_keypoint_metrics": partial(CocoMetric, measured="keypoints"),
}
"""What makes the metric that the eval_config of a pipeline names: called with the categories, and `per_category`.

Some have several names: one of 2017 (`pascal_voc_metrics`, `open_images_metrics`), and one of later releases.
"""


def detection_metrics(
    names: Sequence[str],
    categories: Mapping[int, str] | Sequence[str],
    *,
    per_category: bool = False,
    keypoint_sigmas: Sequence[float] = (),
) -> dict[str, DetectionMetric]:
    """Make the metrics of these names of the Object Detection API, for `lockstep.evaluate`.

    Args:
        names: such as "coco_detection_metrics" and "pascal_voc_detection_metrics".
        categories: the name of each class by its label, from 1 on.
        per_category: compute values of each class, too.
        keypoint_sigmas: for "coco_keypoint_metrics", those of `CocoMetric`; none: those of COCO's persons.

    Raises:
        InputError: a name is none of the metrics, or two of the metrics would compute values of the same names.
    """
    if isinstance(names, str):
        raise InputError(
            "Metrics are made of a list of names.",
            given=repr(names),
            expected="a list, also of one name",
            hint=f"give [{names!r}]",
        )
    metrics: dict[str, DetectionMetric] = {}
    first_with: dict[str, str] = {}
    for name in names:
        if name not in DETECTION_METRICS:
            raise InputError(
                f"Metric not found: {name}",
                given=repr(name),
                expected=", ".join(DETECTION_METRICS),
                hint=did_you_mean(name, DETECTION_METRICS) or "take one of these",
            )
        sigmas = {"sigmas": keypoint_sigmas} if keypoint_sigmas and name == "coco_keypoint_metrics" else {}
        metric = DETECTION_METRICS[name](categories, per_category=per_category, **sigmas)
        if metric.prefix in first_with:
            raise InputError(
                "Two detection metrics would compute values of the same names.",
                given=f"{first_with[metric.prefix]!r} and {name!r}, whose values begin with {metric.prefix!r}",
                expected="metrics whose values have names of their own",
                hint="leave one out: they are the same metric",
            )
        first_with[metric.prefix] = name
        metrics[name] = metric
    return metrics
