"""Average precision of PASCAL VOC and of Open Images: the area under a curve, at one overlap.

The values are those of object_detection_evaluation.py and per_image_evaluation.py in object_detection/utils of the
Object Detection API (https://github.com/tensorflow/models/tree/master/research). Of equal scores, the later detection
comes first, as in its sort, which is a reversed one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from lockstep.checks import NonNegativeFloat, Probability, check_one_of, check_value
from lockstep.metrics.detection_metric import DetectionMetric, ids_of, ragged_of
from lockstep.metrics.matching import assigned_to_objects
from lockstep.metrics.overlaps import mask_areas
from lockstep.metrics.pairs import Bools, Floats, Ints, Pairs, groups_of, pairs_of_groups, ranks
from lockstep.metrics.scored_images import VERIFIED_LABELS, ScoredImages, scored_images
from lockstep.ragged import Ragged

_PREFIXES = {"boxes": "PascalBoxes", "masks": "PascalMasks"}


class _Detected(NamedTuple):
    """What counts of the detections, those of an image together."""

    image: Ints
    labels: Ints
    scores: Floats
    right: Floats
    """1 for a true positive, 0 for a false one; for a group that was found, its weight."""


class _Classes(NamedTuple):
    """The classes that each image has objects of."""

    image: Ints
    labels: Ints
    num_objects: Ints
    """Numbers of objects that are neither difficult nor groups."""
    num_groups: Ints
    is_located: Ints
    """1 if the best detection of the class is right."""


class PascalMetric(DetectionMetric):
    """Average precision at one IoU, as PASCAL VOC and Open Images have it; a metric for `lockstep.evaluate`.

    A detection is matched to the object of its class that it overlaps most. It is right if their IoU reaches the
    threshold and no detection with a higher score has had that object. Detections of difficult objects do not count,
    nor do these objects. The average precision of a class is the area under its precision over recall, the precision
    being the best of any recall from there on; the mean is that of the classes with objects, NaN without any.
    Detections without area do not count.

    Values have the names of the Object Detection API, such as `PascalBoxes_Precision/mAP@0.5IOU`. The bits are the same
    for any number of workers and any micro-batch.

    Args:
        categories: the name of each class by its label, from 1 on; as readers and label maps have them.
        threshold: the IoU to be reached.
        weighted: compute the average precision of the detections of all classes together, so that a class counts by
            how many objects it has: `WeightedPascalBoxes_Precision/mAP@0.5IOU`.
        difficult: the data say which objects are difficult ("truth_difficult").
        group_weight: the data say which objects stand for a group ("truth_group_of"). Detections that lie in a group
            of their class, by the threshold of their own area, do not count; the group counts as an object of this
            weight, found once one lies in it: 0 in Open Images V2, 1 in its challenge. Groups are objects like any
            other if it is None.
        verified: the data name further classes for each image ("truth_verified_labels") of which people looked
            whether it shows them; detections of classes that are neither these nor those of its objects do not count.
        corloc: compute CorLoc, too: the share of the images with a class on which its best detection is right, as
            `PascalBoxes_Precision/meanCorLoc@0.5IOU`.
        per_category: compute the values of each class, too: `PascalBoxes_PerformanceByCategory/AP@0.5IOU/cat`, and
            `.../CorLoc@0.5IOU/cat`.
        prefix: what the names of values begin with, if not with what is measured.

    Raises:
        InputError: there is no class, a label is not from 1 to 1,000,000, or two classes have one name; or another
            argument is wrong.
    """

    def __init__(
        self,
        categories: Mapping[int, str] | Sequence[str],
        measured: Literal["boxes", "masks"] = "boxes",
        *,
        threshold: float = 0.5,
        weighted: bool = False,
        difficult: bool = True,
        group_weight: float | None = None,
        verified: bool = False,
        corloc: bool = False,
        per_category: bool = False,
        prefix: str = "",
    ) -> None:
        check_one_of("measured", measured, tuple(_PREFIXES))
        switches = {"weighted": weighted, "difficult": difficult, "verified": verified, "corloc": corloc}
        for name, value in {**switches, "per_category": per_category}.items():
            check_value(name, value, bool)
        check_value("threshold", threshold, Probability)
        check_value("group_weight", group_weight, NonNegativeFloat | None)
        self.threshold = threshold
        self.weighted, self.corloc, self.per_category = weighted, corloc, per_category
        self.group_weight = group_weight
        optional = {"truth_difficult": difficult, "truth_group_of": group_weight is not None, VERIFIED_LABELS: verified}
        truth = [name for name, given in optional.items() if given]
        prefix = prefix or "Weighted" * weighted + _PREFIXES[measured]
        super().__init__(categories, measured, truth, f"{prefix}_")
        self.score_names = tuple(self.compute())

    def prepare(self, *columns: Any) -> tuple[Ragged, ...]:
        """Match the detections of some images, and return what is left to be known of them.

        Args:
            columns: in the order of `fields`, each with an entry for each image, as `CocoMetric.prepare` has them.
                "truth_difficult" and "truth_group_of": bool of shape (n,); "truth_verified_labels": of the image.

        Raises:
            InputError: a column does not fit; it names field, image and object.
        """
        images = scored_images(self.fields, columns, self.categories)
        rows = np.flatnonzero(self._may_count(images))
        size = len(images.source_ids)
        detected, classes = self._detected(images, rows), self._classes(images, rows)
        return (
            ids_of(images.source_ids),
            *(ragged_of(column, detected.image, size) for column in detected[1:]),
            *(ragged_of(column, classes.image, size) for column in classes[1:]),
        )

    def compute(self) -> dict[str, float]:
        """Return the values by name; NaN where there is no object."""
        labels, scores, right, present, objects, groups, located = (rows.values for rows in self._images.columns(7))
        size = max(self.categories) + 1
        num_objects = np.bincount(present, objects, size) + (self.group_weight or 0) * np.bincount(
            present, groups, size
        )
        by_label = np.argsort(labels, kind="stable")
        by_class = np.split(by_label, np.searchsorted(labels[by_label], np.arange(1, size)))
        precision = [average_precision(scores[b], right[b], n) for b, n in zip(by_class, num_objects, strict=True)]
        own = {"AP": np.array(precision)}
        mean = mean_of_known(own["AP"][1:])
        if self.weighted:
            with_objects = np.flatnonzero(num_objects).tolist()
            known = np.concatenate([by_class[label] for label in (0, *with_objects)])  # 0 has no detections
            mean = average_precision(scores[known], right[known], num_objects.sum())
        at = f"@{self.threshold}IOU"
        values = {f"Precision/mAP{at}": mean}
        if self.corloc:
            num_images = np.bincount(present, minlength=size)
            own["CorLoc"] = correct_localisation(num_images, np.bincount(present, located, size))
            values[f"Precision/meanCorLoc{at}"] = mean_of_known(own["CorLoc"][1:])
        for label, name in self.categories.items() if self.per_category else ():
            values |= {f"PerformanceByCategory/{what}{at}/{name}": float(own[what][label]) for what in own}
        return {self.prefix + name: value for name, value in values.items()}

    def _may_count(self, images: ScoredImages) -> Bools:
        """Say of each detection whether it has an area, and a class known to be on its image or not to be."""
        if self.measured == "masks":
            has_area = mask_areas(images.masks["masks"]) > 0
        else:
            has_area = images.values["boxes"][:, 2:].min(1, initial=np.inf) > 0
        if VERIFIED_LABELS not in images.values:
            return has_area
        verified = groups_of(images.verified_image, images.values[VERIFIED_LABELS])
        is_known: Bools = has_area & np.isin(images.groups, np.concatenate([verified, images.truth_groups]))
        return is_known

    def _detected(self, images: ScoredImages, rows: Ints) -> _Detected:
        labels, scores, groups = images.values["labels"], images.values["scores"], images.groups
        # Of equal scores, the later one first.
        order = rows[np.lexsort((-rows, -scores[rows], groups[rows]))]
        pairs = pairs_of_groups(groups[order], images.truth_groups)
        is_group, is_difficult = _flags(images, "truth_group_of"), _flags(images, "truth_difficult")
        overlaps = images.overlaps(Pairs(order[pairs.detection], pairs.truth), is_group)
        found = assigned_to_objects(len(order), pairs, overlaps, is_group, is_difficult, self.threshold)
        # After the detections of an image, the groups that were found, with the best scores in them.
        best = found.groups.detection if self.group_weight else np.empty(0, np.int64)
        places = np.concatenate([np.flatnonzero(~found.ignored), best])
        right = np.concatenate([found.right[~found.ignored], np.full(len(best), self.group_weight or 0.0)])
        by_image = np.argsort(images.image[order[places]], kind="stable")
        some = order[places[by_image]]
        return _Detected(images.image[some], labels[some], scores[some], right[by_image])

    def _classes(self, images: ScoredImages, rows: Ints) -> _Classes:
        """Count the objects of each class on each image, and look where its best detection is."""
        groups, is_group = images.groups, _flags(images, "truth_group_of")
        present, first, group = np.unique(images.truth_groups, return_index=True, return_inverse=True)
        order = rows[np.lexsort((-images.values["scores"][rows], groups[rows]))]
        best = order[ranks(groups[order]) == 0]
        pairs = pairs_of_groups(groups[best], images.truth_groups)
        pairs = Pairs(best[pairs.detection], pairs.truth)
        is_right = images.overlaps(pairs, np.zeros_like(is_group)) >= self.threshold
        return _Classes(
            images.truth_image[first],
            images.values["truth_labels"][first],
            np.bincount(group[~is_group & ~_flags(images, "truth_difficult")], minlength=len(present)),
            np.bincount(group[is_group], minlength=len(present)),
            np.isin(present, groups[pairs.detection[is_right]]).astype(np.int64),
        )


def _flags(images: ScoredImages, name: str) -> Bools:
    """Return a column of objects, all false where the data do not say it."""
    flags: Bools = images.values.get(name, np.zeros(len(images.truth_image), bool))
    return flags


class PrecisionRecall(NamedTuple):
    """Both, over the detections up to each one, the best first."""

    precision: Floats
    recall: Floats


def precision_and_recall(scores: Floats, right: Floats, num_objects: float) -> PrecisionRecall:
    """Rank detections by their scores, and compute precision and recall over the best so many.

    Of equal scores, the later one comes first. `right` is above 0 for a true positive, which counts by that number,
    else 0. There is one object or more.
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
