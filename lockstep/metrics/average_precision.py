"""Precision and recall of ranked detections, the area between them, and CorLoc.

The formulas are those of object_detection/utils/metrics.py of the Object Detection API
(https://github.com/tensorflow/models/tree/master/research), with its operations in their order, in float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from lockstep.metrics.pairs import Floats, Ints


class PrecisionRecall(NamedTuple):
    """Both, over the detections up to each one, the best first."""

    precision: Floats
    recall: Floats


def precision_and_recall(scores: Floats, right: Floats, num_objects: float) -> PrecisionRecall:
    """Rank detections by their scores, and compute precision and recall over the best so many.

    Args:
        scores: of each detection; of equal ones, the later one comes first.
        right: above 0 where it is a true positive, which counts by that number; else 0.
        num_objects: that are to be found, more than 0.
    """
    best_first = np.argsort(scores, kind="stable")[::-1]
    num_right = np.cumsum(right[best_first], dtype=np.float64)
    num_wrong = np.cumsum(right[best_first] <= 0, dtype=np.float64)
    return PrecisionRecall(num_right / (num_right + num_wrong), num_right / num_objects)


def average_precision(scores: Floats, right: Floats, num_objects: float) -> float:
    """Compute the area under the precision over recall, precision being the best of any recall from there on.

    It is NaN without objects, and 0 without detections. Arguments are those of `precision_and_recall`.
    """
    if not num_objects:
        return math.nan
    precision, recall = precision_and_recall(scores, right, num_objects)
    recall = np.concatenate([[0], recall, [1]])
    envelope = np.maximum.accumulate(np.concatenate([[0], precision, [0]])[::-1])[::-1]
    grows = np.flatnonzero(recall[1:] != recall[:-1]) + 1
    # Without detections there is one step, to the recall of 1, with the precision of 0.
    return float(np.sum((recall[grows] - recall[grows - 1]) * envelope[grows]))


def correct_localisation(num_images: Ints, num_correct: Ints) -> Floats:
    """Compute CorLoc of each class: the share of the images with the class on which its best detection is right.

    It is that of https://www.robots.ox.ac.uk/~vgg/rg/papers/deselaers-eccv10.pdf; NaN where no image has the class.
    """
    share: Floats = np.divide(num_correct, num_images, out=np.full(len(num_images), np.nan), where=num_images > 0)
    return share


def mean_of_known(values: Floats) -> float:
    """Average the values that are not NaN; NaN if there is none."""
    return math.nan if np.isnan(values).all() else float(np.nanmean(values))
