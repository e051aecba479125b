"""How a detector does by class: what is right, false and missed, what is taken for what, and precision over recall.

One rule says what a detection has found, here and wherever detections are drawn beside objects. It is that of COCO
(`evaluateImg` in cocoeval.py of https://github.com/cocodataset/cocoapi) at an IoU of 0.5, greedy by score: of the 100
best detections of a class on an image, each, the one with the highest score first, takes the object of its class that
it overlaps most and that no other has taken. Of what is left over then, detections take objects of other classes in the
same way, as COCO's rule has it without categories (`useCats=0`): these are taken for another class. A detection that
takes nothing has found background, and an object that nothing takes is missed.

Crowds, groups and difficult objects count neither as found nor as missed, and detections of their class on them do not
count; on a crowd or a group is what lies in it with half of its own area.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from lockstep.checks import FiniteFloat, check_one_of, check_value
from lockstep.listing import csv_line
from lockstep.mask_runs import Flips
from lockstep.metrics.coco import LEVELS, MOST_OF_CLASS, precision_at_levels
from lockstep.metrics.detection_errors import Matched, error_kinds, errors_of
from lockstep.metrics.detection_metric import DetectionMetric, ids_of, ragged_of
from lockstep.metrics.pairs import Bools, Floats, Ints, Pairs, pairs_of_groups, ranks
from lockstep.metrics.scored_images import BACKGROUND, ScoredImages, Values, scored_images
from lockstep.ragged import Ragged

IOU = 0.5
"""The least IoU with which an object is found."""
CORNER = "is / detected from a score of "
"""The first cell of a confusion matrix of a detector as CSV, up to the score."""
FLAGS = ("truth_is_crowd", "truth_group_of", "truth_difficult")
"""Columns of the objects that do not count."""
_NUM_COLUMNS = 8


class ClassReport(NamedTuple):
    """How a detector does on one class, or on all; precision, recall and F1 are NaN where they divide by 0."""

    name: str
    objects: int
    """Objects that count: those that are found right and those that are missed."""
    right: int
    false: int
    """Detections of this class on background, on objects of other classes, or on what was found already."""
    missed: int
    """Objects without a detection of their class."""
    precision: float
    recall: float
    f1: float
    best_f1: float
    """The largest F1 of any least score."""
    best_score: float
    """The highest least score that has it; both are NaN without objects or detections."""


class PrecisionRecallCurve(NamedTuple):
    """Precision over recall, at those of the levels 0, 0.01, ... 1 of recall that are reached."""

    recall: Floats
    precision: Floats
    """The best precision of this recall or a higher one, as COCO's average precision takes it."""
    score: Floats
    """The least score with which the level is reached."""


class ImageMistakes(NamedTuple):
    """An image, and what is wrong on it."""

    source_id: str
    false: int
    missed: int


class DetectionReport(DetectionMetric):
    """A table by class, a confusion matrix with background, and curves of detections; a metric for `lockstep.evaluate`.

    What a detection has found is said by the rule at the head of this module. The values are the same for any number of
    workers and any micro-batch.

    Example:
        report = ls.metrics.DetectionReport(reader.classes)

        def score(model, batch):
            return {"report": report.columns(batch, detect(model, batch))}

        result = ls.evaluate(state, score, loader, metrics={"report": report})
        print(result.computed["report"]["classes"])

    Args:
        categories: the name of each class by its label, from 1 on.
        measured: whose IoU the rule takes.
        min_score: the table and the matrix count detections of this score or a higher one; best F1 and curves, all.

    Raises:
        InputError: the classes are none, see `CocoMetric`; or the score is not finite.
    """

    def __init__(
        self,
        categories: Mapping[int, str] | Sequence[str],
        measured: Literal["boxes", "masks"] = "boxes",
        *,
        min_score: float = 0.5,
    ) -> None:
        check_one_of("measured", measured, ("boxes", "masks"))
        check_value("min_score", min_score, FiniteFloat)
        self.min_score = min_score
        super().__init__(categories, measured, FLAGS, "")

    def columns(self, batch: Mapping[str, Any], detections: Mapping[str, Any]) -> tuple[Any, ...]:
        """Pick what `prepare` takes, as other metrics do; without columns of crowds and the like all objects count."""
        labels = batch.get("truth_labels", ())
        counts = [torch.zeros(len(each), dtype=torch.bool) for each in labels]
        none = {name: counts for name in FLAGS if name not in batch}
        return super().columns({**batch, **none}, detections)

    def prepare(self, *columns: Any) -> tuple[Ragged, ...]:
        """Find out what the detections on some images have found.

        Args:
            columns: in the order of `fields`, as `CocoMetric.prepare` and `PascalMetric.prepare` have them.

        Raises:
            InputError: a column does not fit; it names field, image and object.
        """
        images = scored_images(self.fields, columns, self.categories)
        found = _found(images, self.min_score)
        labels, truth_labels = images.values["labels"], images.values["truth_labels"]
        taken = found.taken[found.is_shown]
        cells = np.concatenate([
            np.stack([np.where(taken < 0, 0, truth_labels[taken] if len(truth_labels) else 0), labels[found.is_shown]]),
            np.stack([truth_labels[found.is_missed], np.zeros(found.is_missed.sum(), np.int64)]),
        ], axis=1)  # fmt: skip
        image = np.concatenate([images.image[found.is_shown], images.truth_image[found.is_missed]])
        by_image, counts, size = np.argsort(image, kind="stable"), ~found.is_ignored, len(images.source_ids)
        wrong = errors_of(found.of_classes, found.pairs, found.overlaps)
        missed = wrong.is_missed
        of_detections = labels, images.values["scores"], found.is_right, wrong.kind, wrong.mended
        return (
            ids_of(images.source_ids),
            *(ragged_of(each[counts], images.image[counts], size) for each in of_detections),
            *(ragged_of(each[by_image], image[by_image], size) for each in cells),
            ragged_of(truth_labels[missed], images.truth_image[missed], size),
        )

    def compute(self) -> dict[str, Any]:
        """Return the table and the matrix.

        "classes": a `ClassReport` each, in the order of `categories`. "all": that of all classes together. "confusion":
        how often the objects of each class (rows) were taken for each (columns), the last row and column being
        background. "errors": an `ErrorKind` of each of TIDE's kinds by its name, of the detections of all scores.
        """
        columns = (column.values for column in self._images.columns(_NUM_COLUMNS))
        labels, scores, right, kind, mended, true, predicted, missed = columns
        size = len(self.categories) + 1
        cells = self._places(true) * size + self._places(predicted)
        confusion = np.bincount(cells, minlength=size * size).reshape(size, size)
        classes = [
            _class_report(name, confusion[place].sum(), confusion[place, place], confusion[:, place].sum(),
                          scores[labels == label], right[labels == label])
            for place, (label, name) in enumerate(self.categories.items())
        ]  # fmt: skip
        objects, shown = confusion[:-1].sum(), confusion[:, :-1].sum()
        of_all = _class_report("all classes", objects, np.trace(confusion), shown, scores, right)
        errors = error_kinds(labels, scores, right, kind, mended, true[true > 0], missed)
        return {"classes": classes, "all": of_all, "confusion": confusion.tolist(), "errors": errors}

    def curves(self) -> dict[str, PrecisionRecallCurve]:
        """Return precision over recall of each class by its name; without objects or detections it has no levels."""
        labels, scores, right, *_, true, _, _ = (column.values for column in self._images.columns(_NUM_COLUMNS))
        return {
            name: _curve(scores[labels == label], right[labels == label], int((true == label).sum()))
            for label, name in self.categories.items()
        }

    def worst(self, count: int) -> list[ImageMistakes]:
        """Return the images with the most false detections and missed objects, at most `count`, the worst first.

        An object that was taken for another class is both. Of equal images, the one of the lower id comes first.
        """
        *_, true, predicted, _ = self._images.columns(_NUM_COLUMNS)
        ids = self._images.ids()
        is_wrong = true.values != predicted.values
        false, missed = (
            np.bincount(true.image[is_wrong & (label.values > 0)], minlength=len(ids)) for label in (predicted, true)
        )
        worst = np.argsort(-(false + missed), kind="stable")[:count].tolist()
        return [ImageMistakes(ids[row], int(false[row]), int(missed[row])) for row in worst if false[row] + missed[row]]

    @property
    def confusion_names(self) -> list[str]:
        """The names of the rows and columns of the confusion matrix."""
        return [*self.categories.values(), BACKGROUND]

    def _places(self, labels: Ints) -> Ints:
        """Return the places of labels in the confusion matrix: that of 0, background, is the last."""
        places = np.searchsorted(np.array(list(self.categories)), labels)
        return np.where(labels == 0, len(self.categories), places)


class Outcomes(NamedTuple):
    """True positives, false positives and misses of one image."""

    right: Bools
    """For each detection: it has found an object of its class."""
    ignored: Bools
    """For each detection: it is on what does not count, or is none of the 100 best of its class."""
    missed: Bools
    """For each object: it counts, and no detection of its class has found it."""


def outcomes(columns: Mapping[str, Values], masks: Mapping[str, Sequence[Flips]]) -> Outcomes:
    """Say what has become of the detections on one image; one that is neither right nor ignored is false.

    Args:
        columns: "boxes" and "truth_boxes", x, y, width and height, shape (n, 4); "scores", "labels" and "truth_labels";
            and, where the data have them, "truth_is_crowd", "truth_group_of" and "truth_difficult", bool.
        masks: "masks" and "truth_masks", which are compared in place of the boxes; or none.
    """
    of_detections, of_objects = (np.zeros(len(columns[name]), np.int64) for name in ("labels", "truth_labels"))
    found = _found(ScoredImages([""], columns, masks, of_detections, of_objects, of_objects[:0]), -math.inf)
    missed = found.is_missed.copy()
    missed[found.taken[~found.is_right & (found.taken >= 0)]] = True
    return Outcomes(found.is_right, found.is_ignored, missed)


class _Found(NamedTuple):
    is_right: Bools
    """For each detection: it has taken an object of its class that counts."""
    is_ignored: Bools
    """For each detection: it does not count."""
    is_shown: Bools
    """For each detection: it counts, and has the least score."""
    taken: Ints
    """For each detection that is shown: the row of the object that it has taken, of any class; else -1."""
    is_missed: Bools
    """For each object: it counts, and no detection that is shown has taken it."""
    of_classes: Matched
    """What detections of all scores have taken of their classes."""
    pairs: Pairs
    """Each detection that counts with each object of its image."""
    overlaps: Floats
    """The IoU of each pair."""


def _found(images: ScoredImages, min_score: float) -> _Found:
    """Match the detections on some images to their objects by the rule of this module."""
    labels, scores, truth_labels = (images.values[name] for name in ("labels", "scores", "truth_labels"))
    is_crowd, is_group, is_difficult = (
        images.values.get(name, np.zeros(len(truth_labels), bool)).astype(bool) for name in FLAGS
    )
    is_region, of_no_account = is_crowd | is_group, is_crowd | is_group | is_difficult
    by_class = np.lexsort((-scores, images.groups))
    is_ignored = np.zeros(len(labels), bool)
    is_ignored[by_class[ranks(images.groups[by_class]) >= MOST_OF_CLASS]] = True
    best_first = np.argsort(-scores, kind="stable")
    best_first = best_first[~is_ignored[best_first]]
    pairs = pairs_of_groups(images.image[best_first], images.truth_image)
    rank, rows = pairs.detection, Pairs(best_first[pairs.detection], pairs.truth)
    overlaps = images.overlaps(rows, is_region)
    # Of objects overlapped alike, the last one is taken, as in COCO.
    order = np.lexsort((-rows.truth, -overlaps, rank))
    order = order[overlaps[order] >= IOU]
    is_same, is_left_out = labels[rows.detection] == truth_labels[rows.truth], of_no_account[rows.truth]
    taken = np.full(len(labels), -1)
    is_free = ~of_no_account
    _take(taken, is_free, rows, order[(is_same & ~is_left_out)[order]])
    is_right = taken >= 0
    on_left_out = order[(is_same & is_left_out)[order]]
    is_ignored[rows.detection[on_left_out][~is_right[rows.detection[on_left_out]]]] = True
    of_classes = Matched(labels, scores, ~is_ignored, taken.copy(), truth_labels, ~of_no_account)
    is_shown = ~is_ignored & (scores >= min_score)
    taken[~is_shown] = -1
    is_free = ~of_no_account
    is_free[taken[taken >= 0]] = False
    _take(taken, is_free, rows, order[(is_shown[rows.detection] & ~is_same & ~is_left_out)[order]])
    return _Found(is_right, is_ignored, is_shown, taken, is_free, of_classes, rows, overlaps)


def _take(taken: Ints, is_free: Bools, pairs: Pairs, order: Ints) -> None:
    """Give objects that are free to detections that have none, pair by pair; both arrays change."""
    for detection, truth in zip(pairs.detection[order].tolist(), pairs.truth[order].tolist(), strict=True):
        if taken[detection] < 0 and is_free[truth]:
            taken[detection], is_free[truth] = truth, False


def _class_report(name: str, objects: Any, right: Any, shown: Any, scores: Floats, is_right: Bools) -> ClassReport:
    """Make the report of one class, with so many objects, and detections of the least score that are right or shown.

    `scores` and `is_right` are of all its detections.
    """
    objects, right, shown = int(objects), int(right), int(shown)
    best_first = np.argsort(-scores, kind="stable")
    ranked = scores[best_first]
    # A least score takes all detections of equal scores.
    last = np.flatnonzero(np.diff(ranked, append=-math.inf))
    f1 = 2 * np.cumsum(is_right[best_first])[last] / (last + 1 + objects)
    best = int(f1.argmax()) if objects and len(last) else None
    return ClassReport(
        name, objects, right, shown - right, objects - right,
        _share(right, shown), _share(right, objects), _share(2 * right, shown + objects),
        math.nan if best is None else float(f1[best]), math.nan if best is None else float(ranked[last[best]]),
    )  # fmt: skip


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def _curve(scores: Floats, is_right: Bools, num_objects: int) -> PrecisionRecallCurve:
    if not num_objects:
        return PrecisionRecallCurve(*np.empty((3, 0)))
    best_first = np.argsort(-scores, kind="stable")
    right = is_right[best_first, None]
    places = np.searchsorted(np.cumsum(right) / num_objects, LEVELS)
    reached = places < len(scores)
    precision = precision_at_levels(right, ~right, num_objects)[0]
    return PrecisionRecallCurve(LEVELS[reached], precision[reached], scores[best_first][places[reached]])


CURVE_COLUMNS = ("class", "recall", "precision", "score")


def curves_csv(curves: Mapping[str, PrecisionRecallCurve]) -> str:
    """Write a line of CSV for each level of recall that a class reaches, below a header."""
    rows: Iterable[Sequence[object]] = (
        [name, *values] for name, curve in curves.items() for values in zip(*map(np.ndarray.tolist, curve), strict=True)
    )
    return "".join(map(csv_line, [CURVE_COLUMNS, *rows]))
