"""COCO's average precision and recall, of boxes, masks and keypoints: to the last bit the numbers of pycocotools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from lockstep.checks import check_one_of, check_value
from lockstep.metrics.detection_metric import DetectionMetric, ids_of, ragged_of
from lockstep.metrics.matching import Runs, matched_to_objects
from lockstep.metrics.overlaps import COCO_SIGMAS, KeypointTruth, keypoint_areas, keypoint_similarities, mask_areas
from lockstep.metrics.pairs import Bools, Floats, Ints, Pairs, pairs_of_groups, ranks
from lockstep.metrics.scored_images import ScoredImages, check_keypoints, scored_images
from lockstep.ragged import Ragged

Measured = Literal["boxes", "masks", "keypoints"]

_SMALL, _LARGE, _MOST = 32.0**2, 96.0**2, 1e5**2  # pixels
_AREA_RANGES = {"all": (0.0, _MOST), "small": (0.0, _SMALL), "medium": (_SMALL, _LARGE), "large": (_LARGE, _MOST)}
_THRESHOLDS = tuple(np.linspace(0.5, 0.95, 10).tolist())
_AT = {".50": 0, ".75": 5}  # places of thresholds that have a value of their own
LEVELS = np.linspace(0.0, 1.0, 101)  # of recall, at which precision is read
_NONE = -1.0  # the value of what has no object
MOST_OF_CLASS = 100  # of the detections of a class on an image count, the best ones


class _Rule(NamedTuple):
    """How COCO evaluates one kind of detection."""

    prefix: str
    sizes: tuple[str, ...]
    """The area ranges beside that of all."""
    most: tuple[int, ...]
    """How many detections of a class on an image count: each has a recall of its own, the last is that of the rest."""


_RULES: Mapping[Measured, _Rule] = MappingProxyType({
    "boxes": _Rule("DetectionBoxes_", ("small", "medium", "large"), (1, 10, 100)),
    "masks": _Rule("DetectionMasks_", ("small", "medium", "large"), (1, 10, 100)),
    "keypoints": _Rule("Keypoints_", ("medium", "large"), (20,)),
})  # fmt: skip


class _Tables(NamedTuple):
    """Values of each class, -1 where it has no object."""

    precision: Floats
    """Shape (thresholds, levels of recall, classes, area ranges)."""
    recall: Floats
    """Shape (thresholds, classes, area ranges, numbers of detections)."""


class CocoMetric(DetectionMetric):
    """COCO's average precision and recall of all images; a metric for `lockstep.evaluate`.

    The values are those of `COCOeval` in pycocotools (https://github.com/cocodataset/cocoapi), to the last bit, for any
    number of workers and any micro-batch: of equal scores, that of the image with the lower id comes first. Each image
    is matched by the worker that scored it. Values of what has no object are -1. They have the names of the Object
    Detection API, such as `DetectionBoxes_Precision/mAP`, `DetectionBoxes_Precision/mAP@.50IOU`,
    `DetectionBoxes_Precision/mAP (small)`, `DetectionBoxes_Recall/AR@100`; the recalls of keypoints are called what
    they are: `Keypoints_Recall/AR@20`, `Keypoints_Recall/AR@.50IOU`.

    Example:
        reader = ls.data.Coco(annotations, images, truth=True)
        coco = ls.metrics.CocoMetric(reader.classes)

        def score(model, batch):
            return {"coco": coco.columns(batch, detect(model, batch))}

        ls.evaluate(state, score, loader, metrics={"coco": coco})

    Args:
        categories: the name of each class by its label, from 1 on; as readers and label maps have them.
        per_category: compute values of each class, too: `DetectionBoxes_PerformanceByCategory/mAP/cat`, of keypoints
            each value, as `Keypoints_Precision/mAP ByCategory/person`.
        sigmas: of each keypoint, how far apart people mark it, in parts of the object's size; COCO's persons by
            default.

    Raises:
        InputError: there is no class, a label is not from 1 to 1,000,000, or two classes have one name.
    """

    def __init__(
        self,
        categories: Mapping[int, str] | Sequence[str],
        measured: Measured = "boxes",
        *,
        per_category: bool = False,
        sigmas: Sequence[float] = COCO_SIGMAS,
    ) -> None:
        check_one_of("measured", measured, tuple(_RULES))
        check_value("per_category", per_category, bool)
        self._rule = _RULES[measured]
        boxes = ("truth_boxes",) if measured == "keypoints" else ()
        super().__init__(categories, measured, ("truth_is_crowd", "truth_area", *boxes), self._rule.prefix)
        self.per_category = per_category
        self._runs = Runs(_THRESHOLDS, tuple(_AREA_RANGES[size] for size in ("all", *self._rule.sizes)))
        self._sigmas = np.array(sigmas, np.float64)
        self.score_names = tuple(self.compute())

    def prepare(self, *columns: Any) -> tuple[Ragged, ...]:
        """Match the detections of some images, and return what is left to be known of them.

        Args:
            columns: in the order of `fields`, each with an entry for each image: a `Ragged`, or a list of tensors.
                "source_id": ids of the images, texts; the other columns of ground truth begin with "truth_".
                "boxes": x, y, width, height, in pixels of the stored image; shape (n, 4).
                "masks": uint8 of shape (n, height, width), of the whole stored image, or lazy masks.
                "keypoints": x, y and anything, such as a score; shape (n, keypoints, 2 or more). "truth_keypoints": x,
                y and visibility, 0 where it is not labelled; shape (n, keypoints, 3).
                "scores": any finite numbers; shape (n,). "labels": those of `categories`. "truth_is_crowd": any number
                of detections may lie in it, and do not count. "truth_area": the annotation's, in pixels.

        Raises:
            InputError: a column does not fit; it names field, image and object.
        """
        images = scored_images(self.fields, columns, self.categories)
        labels, scores, is_crowd = (images.values[name] for name in ("labels", "scores", "truth_is_crowd"))
        groups = images.groups
        order = np.lexsort((-scores, groups))
        order = order[ranks(groups[order]) < self._rule.most[-1]]
        pairs = pairs_of_groups(groups[order], images.truth_groups)
        overlaps = self._overlaps(images, Pairs(order[pairs.detection], pairs.truth), is_crowd)
        counted = self._counted(images)
        matches = matched_to_objects(len(order), pairs, overlaps, counted, is_crowd, self._runs)
        right = matches.taken & ~matches.ignored
        wrong = self._runs.within(self._areas(images)[order]) & ~matches.taken
        size = len(images.source_ids)
        return (
            ids_of(images.source_ids),
            *(ragged_of(column, images.image[order], size) for column in (labels[order], scores[order], right, wrong)),
            *(ragged_of(column, images.truth_image, size) for column in (images.values["truth_labels"], counted)),
        )

    def compute(self) -> dict[str, float]:
        """Return the values by name."""
        tables = self._tables()
        everything = slice(None)
        values = {self.prefix + name: value for name, value in self._summary(tables, everything)}
        for place, name in enumerate(self.categories.values()) if self.per_category else ():
            own = dict(self._summary(tables, slice(place, place + 1)))
            if self.measured == "keypoints":
                values |= {f"{self.prefix}{key} ByCategory/{name}": value for key, value in own.items()}
            else:
                values[f"{self.prefix}PerformanceByCategory/mAP/{name}"] = own["Precision/mAP"]
        return values

    def _overlaps(self, images: ScoredImages, pairs: Pairs, is_region: Bools) -> Floats:
        if self.measured != "keypoints":
            return images.overlaps(pairs, is_region)
        check_keypoints(images, len(self._sigmas))
        truth = KeypointTruth(*(images.values[f"truth_{name}"] for name in ("keypoints", "boxes", "area")))
        return keypoint_similarities(images.values["keypoints"], truth, self._sigmas, pairs)

    def _counted(self, images: ScoredImages) -> Ints:
        """Return for each object the runs in which it counts."""
        is_ignored = images.values["truth_is_crowd"]
        if self.measured == "keypoints":
            is_ignored = is_ignored | ~(images.values["truth_keypoints"][:, :, 2] > 0).any(1)
        return np.where(is_ignored, 0, self._runs.within(images.values["truth_area"]))

    def _areas(self, images: ScoredImages) -> Floats:
        if self.measured == "masks":
            return mask_areas(images.masks["masks"])
        if self.measured == "keypoints":
            return keypoint_areas(images.values["keypoints"])
        areas: Floats = images.values["boxes"][:, 2:].prod(1)
        return areas

    def _tables(self) -> _Tables:
        labels, scores, right, wrong, truth_labels, counted = self._images.columns(6)
        order = np.lexsort((labels.image, labels.values))
        classes = np.array(list(self.categories))
        starts = np.searchsorted(labels.values[order], classes, side="left")
        stops = np.searchsorted(labels.values[order], classes, side="right")
        sizes = len(self._runs.area_ranges)
        precision = np.full((len(_THRESHOLDS), len(LEVELS), len(classes), sizes), _NONE)
        recall = np.full((len(_THRESHOLDS), len(classes), sizes, len(self._rule.most)), _NONE)
        for place, (label, start, stop) in enumerate(zip(classes, starts, stops, strict=True)):
            some = order[start:stop]
            rank = ranks(labels.image[some])
            best_first = np.argsort(-scores.values[some], kind="stable")
            objects = counted.values[truth_labels.values == label]
            for size in range(sizes):
                num_objects = int(self._runs.unpacked(objects, size)[:, 0].sum())
                if not num_objects:
                    continue
                is_right = self._runs.unpacked(right.values[some], size)
                is_wrong = self._runs.unpacked(wrong.values[some], size)
                precision[:, :, place, size] = precision_at_levels(
                    is_right[best_first], is_wrong[best_first], num_objects
                )
                for number, most in enumerate(self._rule.most):
                    recall[:, place, size, number] = is_right[rank < most].sum(0) / num_objects
        return _Tables(precision, recall)

    def _summary(self, tables: _Tables, classes: slice) -> Iterator[tuple[str, float]]:
        """Yield the values over some classes, in the order of the reference."""
        precision, recall = tables.precision[:, :, classes], tables.recall[:, classes]
        yield "Precision/mAP", _mean(precision[..., 0])
        for text, place in _AT.items():
            yield f"Precision/mAP@{text}IOU", _mean(precision[place, ..., 0])
        for number, size in enumerate(self._rule.sizes, start=1):
            yield f"Precision/mAP ({size})", _mean(precision[..., number])
        for number, most in enumerate(self._rule.most):
            yield f"Recall/AR@{most}", _mean(recall[..., 0, number])
        for text, place in _AT.items() if self.measured == "keypoints" else ():
            yield f"Recall/AR@{text}IOU", _mean(recall[place, ..., 0, -1])
        for number, size in enumerate(self._rule.sizes, start=1):
            yield f"Recall/AR@{self._rule.most[-1]} ({size})", _mean(recall[..., number, -1])


def precision_at_levels(is_right: Bools, is_wrong: Bools, num_objects: int) -> Floats:
    """Read the precision at each level of recall, the best of any recall from there on: shape (thresholds, levels).

    Detections are given best first, by threshold, as right or wrong, (detections, thresholds); one that is neither does
    not count.
    """
    num_right = np.cumsum(is_right.T, axis=1, dtype=np.float64)
    num_wrong = np.cumsum(is_wrong.T, axis=1, dtype=np.float64)
    precision = num_right / (num_wrong + num_right + np.spacing(1))
    envelope = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    padded = np.pad(envelope, ((0, 0), (0, 1)))  # levels that are never reached
    recall = num_right / num_objects
    return np.stack([row[np.searchsorted(found, LEVELS)] for row, found in zip(padded, recall, strict=True)])


def _mean(values: Floats) -> float:
    some = values[values > _NONE]
    return float(some.mean()) if some.size else _NONE
