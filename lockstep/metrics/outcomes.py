"""What became of each detection and each object at one threshold, as COCO's evaluation matches them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lockstep.metrics.matching import Runs, matched_to_objects
from lockstep.metrics.overlaps import box_overlaps
from lockstep.metrics.pairs import Bools, Floats, Ints, Pairs, pairs_of_groups, ranks

_MOST = 100  # of the detections of a class on an image count, the best ones
_ANY_AREA = ((0.0, np.inf),)


class Outcomes(NamedTuple):
    """Of the detections and the objects of one image."""

    right: Bools
    """Of each detection: it has found an object that counts."""
    ignored: Bools
    """Of each detection: it lies in a crowd, or is none of the 100 best of its class."""
    missed: Bools
    """Of each object: it counts, and no detection has found it."""


def outcomes(
    boxes: Floats, labels: Ints, scores: Floats, truth_boxes: Floats, truth_labels: Ints, truth_is_crowd: Bools,
    *, threshold: float = 0.5,
) -> Outcomes:  # fmt: skip
    """Match the detections on one image to its objects; a detection that is neither right nor ignored is wrong.

    Args:
        boxes: of the detections: x, y, width and height, shape (detections, 4).
        labels: of the detections.
        scores: of the detections.
        truth_boxes: of the objects, likewise.
        truth_labels: of the objects.
        truth_is_crowd: of the objects: any number of detections may lie in one, and do not count.
        threshold: the least IoU with which an object is found.
    """
    order = np.lexsort((-scores, labels))
    order = order[ranks(labels[order]) < _MOST]
    by_class = np.argsort(truth_labels, kind="stable")
    pairs = pairs_of_groups(labels[order], truth_labels[by_class])
    rows = Pairs(order[pairs.detection], by_class[pairs.truth])
    overlaps = box_overlaps(boxes, truth_boxes, truth_is_crowd, rows)
    counted = np.where(truth_is_crowd, 0, 1)
    matches = matched_to_objects(
        len(order), pairs, overlaps, counted[by_class], truth_is_crowd[by_class], Runs((threshold,), _ANY_AREA)
    )
    right, ignored, missed = np.zeros(len(labels), bool), np.ones(len(labels), bool), ~truth_is_crowd
    right[order] = (matches.taken & ~matches.ignored) > 0
    ignored[order] = matches.ignored > 0
    missed[by_class[matches.found > 0]] = False
    return Outcomes(right, ignored, missed)
