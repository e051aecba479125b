"""How far detections cover the objects of an image: IoU of boxes and of masks, and the OKS of keypoints.

The numbers are those of pycocotools (https://github.com/cocodataset/cocoapi) to the last bit: `bbIou` and `rleIou` of
its maskApi.c, and `computeOks` of its cocoeval.py, with their operations in their order, in float64.

An object that is a region, such as a crowd or a group, is covered by the share of the detection that lies in it: the
intersection is divided by the detection's own area, not by the union.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lockstep.mask_runs import Flips, area_of, intersections
from lockstep.metrics.pairs import Bools, Floats, Pairs

_TENTHS = (
    *(0.26, 0.25, 0.25, 0.35, 0.35),  # nose, eyes, ears
    *(0.79, 0.79, 0.72, 0.72, 0.62, 0.62),  # shoulders, elbows, wrists
    *(1.07, 1.07, 0.87, 0.87, 0.89, 0.89),  # hips, knees, ankles
)
COCO_SIGMAS = tuple(each / 10 for each in _TENTHS)
"""How far apart people mark each of the 17 keypoints of COCO's persons, in parts of the object's size."""


def box_overlaps(boxes: Floats, truth: Floats, is_region: Bools, pairs: Pairs) -> Floats:
    """Compute the IoU of each pair of boxes of x, y, width and height."""
    left, top, width, height = boxes[pairs.detection].T
    other_left, other_top, other_width, other_height = truth[pairs.truth].T
    wide = np.minimum(width + left, other_width + other_left) - np.maximum(left, other_left)
    high = np.minimum(height + top, other_height + other_top) - np.maximum(top, other_top)
    area = width * height
    common = wide * high
    whole = np.where(is_region[pairs.truth], area, area + other_width * other_height - common)
    overlaps: Floats = np.divide(common, whole, out=np.zeros(len(common)), where=(wide > 0) & (high > 0))
    return overlaps


def mask_overlaps(masks: Sequence[Flips], truth: Sequence[Flips], is_region: Bools, pairs: Pairs) -> Floats:
    """Compute the IoU of each pair of masks, from their runs."""
    areas = mask_areas(masks)
    overlaps = np.zeros(len(pairs.truth))
    for number, places in pairs.by_object():
        detections = pairs.detection[places]
        common = intersections([masks[detection] for detection in detections.tolist()], truth[number])
        area = areas[detections]
        whole = area if is_region[number] else area + area_of(truth[number]) - common
        overlaps[places] = common / np.where(common == 0, 1, whole)
    return overlaps


def mask_areas(masks: Sequence[Flips]) -> Floats:
    """Count the pixels of each mask."""
    return np.array([area_of(mask) for mask in masks], np.float64)


class KeypointTruth(NamedTuple):
    """What the similarity of keypoints is measured with."""

    keypoints: Floats
    """x, y and visibility: shape (objects, keypoints, 3)."""
    boxes: Floats
    """x, y, width and height."""
    areas: Floats
    """Areas of the objects, in pixels."""


def keypoint_similarities(keypoints: Floats, truth: KeypointTruth, sigmas: Floats, pairs: Pairs) -> Floats:
    """Compute the object keypoint similarity of each pair: 1 where all labelled keypoints are met, down to 0.

    Of an object without labelled keypoints the distance is that to a box three times as wide and high as its own.
    """
    variances = (sigmas * 2) ** 2
    similarities = np.zeros(len(pairs.truth))
    for number, places in pairs.by_object():
        x, y = np.moveaxis(keypoints[pairs.detection[places], :, :2], 2, 0)
        true_x, true_y, visibility = truth.keypoints[number].T
        is_labelled = visibility > 0
        if is_labelled.any():
            off_x, off_y = x - true_x, y - true_y
        else:
            left, top, width, height = truth.boxes[number]
            off_x = np.maximum(0, left - width - x) + np.maximum(0, x - (left + width * 2))
            off_y = np.maximum(0, top - height - y) + np.maximum(0, y - (top + height * 2))
            is_labelled = np.ones_like(is_labelled)
        error = (off_x**2 + off_y**2) / variances / (truth.areas[number] + np.spacing(1)) / 2
        # In one piece, row by row: NumPy adds up numbers in another order where they lie apart.
        likeness = np.ascontiguousarray(np.exp(-error)[:, is_labelled])
        similarities[places] = likeness.sum(1) / likeness.shape[1]
    return similarities


def keypoint_areas(keypoints: Floats) -> Floats:
    """Compute the area of the smallest box around the keypoints of each detection; shape (detections, keypoints, 2)."""
    if not keypoints.size:
        return np.zeros(len(keypoints))
    width, height = np.ptp(keypoints[:, :, :2], axis=1).T
    area: Floats = width * height
    return area
