"""What a detector's mistakes are by TIDE's kinds, and what each kind costs.

The kinds and their bounds are those of TIDE (Bolya et al., "TIDE: A General Toolbox for Identifying Object Detection
Errors", 2020). A detection that has not found an object of its class is, by the first of these that holds:

- "location": its IoU with an object of its class is from 0.1 to 0.5
- "class": it overlaps an object of another class by 0.5 or more
- "duplicate": it overlaps an object of its class by 0.5 or more, which another detection has found
- "background": it overlaps no object by more than 0.1
- "both": the rest, which overlaps an object of another class by less than 0.5

"missed" is an object that nothing has found, and that no detection of the first two kinds would find if it were mended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lockstep.metrics.coco import precision_at_levels
from lockstep.metrics.pairs import Bools, Floats, Ints, Pairs

KINDS = ("class", "location", "both", "duplicate", "background", "missed")
_CLASS, _LOCATION, _BOTH, _DUPLICATE, _BACKGROUND, _MISSED = range(len(KINDS))
NO_ERROR = -1
_NEAR, _FOUND = 0.1, 0.5
"""IoUs: with more than the first a detection is on an object, with the second it has found it."""


class ErrorKind(NamedTuple):
    """The mistakes of one kind."""

    mistakes: int
    cost: float
    """How much higher the mean average precision at an IoU of 0.5 would be without them, from 0 to 1."""


class Errors(NamedTuple):
    """The kind of each mistake on some images."""

    kind: Ints
    """For each detection: the place of its kind among `KINDS`, or `NO_ERROR`."""
    mended: Ints
    """For each detection: the label with which it would be right if the mistake were mended; 0, it would be gone."""
    is_missed: Bools
    """For each object: it is missed, and no mended detection would find it."""


class Matched(NamedTuple):
    """Detections and objects of some images, as they are matched."""

    labels: Ints
    scores: Floats
    is_counted: Bools
    """For each detection."""
    found: Ints
    """For each detection: the row of the object of its class that it has found, or -1."""
    truth_labels: Ints
    truth_is_counted: Bools
    """For each object."""


def errors_of(matched: Matched, pairs: Pairs, overlaps: Floats) -> Errors:
    """Say of what kind each mistake is, by the IoU of each detection with each object of its image."""
    labels, truth_labels, found = matched.labels, matched.truth_labels, matched.found
    is_wrong = matched.is_counted & (found < 0)
    used = is_wrong[pairs.detection] & matched.truth_is_counted[pairs.truth]
    pairs, overlaps = pairs.where(used), overlaps[used]
    is_same = labels[pairs.detection] == truth_labels[pairs.truth]
    is_found = np.zeros(len(truth_labels), bool)
    is_found[found[found >= 0]] = True
    same, own = _nearest(pairs, overlaps, is_same, len(labels))
    other, foreign = _nearest(pairs, overlaps, ~is_same, len(labels))
    twice, _ = _nearest(pairs, overlaps, is_same & is_found[pairs.truth], len(labels))
    kind = np.select(
        [~is_wrong, (same >= _NEAR) & (same <= _FOUND), other >= _FOUND, twice >= _FOUND, other.clip(same) <= _NEAR],
        [NO_ERROR, _LOCATION, _CLASS, _DUPLICATE, _BACKGROUND],
        _BOTH,
    )
    target = np.select([kind == _LOCATION, kind == _CLASS], [own, foreign], -1)
    there = target >= 0
    target[there] = np.where(is_found[target[there]], -1, target[there])
    # Of several that would find an object, the one of the highest score would; the others would be gone.
    best_first = np.argsort(-matched.scores, kind="stable")
    best_first = best_first[target[best_first] >= 0]
    objects, first = np.unique(target[best_first], return_index=True)
    mended = np.zeros(len(labels), np.int64)
    mended[best_first[first]] = truth_labels[objects]
    is_missed = matched.truth_is_counted & ~is_found
    is_missed[objects] = False
    return Errors(kind, mended, is_missed)


def _nearest(pairs: Pairs, overlaps: Floats, among: Bools, num_detections: int) -> tuple[Floats, Ints]:
    """Return the largest overlap of each detection among some pairs, and the object; 0 and -1 where there is none."""
    detection, truth, overlap = pairs.detection[among], pairs.truth[among], overlaps[among]
    # The last one that is written stays: of the largest, the first.
    order = np.lexsort((-truth, overlap))
    nearest, largest = np.full(num_detections, -1), np.zeros(num_detections)
    nearest[detection[order]], largest[detection[order]] = truth[order], overlap[order]
    return largest, nearest


def error_kinds(
    labels: Ints, scores: Floats, is_right: Bools, kind: Ints, mended: Ints, truth_labels: Ints, missed: Ints
) -> Mapping[str, ErrorKind]:
    """Count the mistakes of each kind, and say what they cost.

    The first five are of each detection, those of the first image first, with the fields of `Errors`; `is_right` is
    whether it has found an object of its class. `missed` are the labels of the objects that are missed.
    """
    classes, num_objects = np.unique(truth_labels, return_counts=True)

    def mean_precision(labels: Ints, is_right: Bools, kept: Bools, num_objects: Ints) -> float:
        order = np.lexsort((-scores, labels))
        order = order[kept[order]]
        ranked, right = labels[order], is_right[order, None]
        starts, stops = (np.searchsorted(ranked, classes, side).tolist() for side in ("left", "right"))
        each = [
            precision_at_levels(right[start:stop], ~right[start:stop], max(number, 1)).mean()
            for start, stop, number in zip(starts, stops, num_objects.tolist(), strict=True)
            if number
            or stop > start  # as in TIDE, a class of which nothing is left but detections has a precision of 0
        ]
        return float(np.mean(each)) if each else 0.0

    now = mean_precision(labels, is_right, np.ones(len(labels), bool), num_objects)
    found: dict[str, ErrorKind] = {}
    left = num_objects - np.bincount(np.searchsorted(classes, missed), minlength=len(classes))
    for place, name in enumerate(KINDS):
        of_kind = kind == place
        without = mean_precision(
            np.where(of_kind, mended, labels),
            is_right | (of_kind & (mended > 0)),
            ~of_kind | (mended > 0),
            left if place == _MISSED else num_objects,
        )
        mistakes = len(missed) if place == _MISSED else int(of_kind.sum())
        found[name] = ErrorKind(mistakes, max(without - now, 0.0))
    return found
