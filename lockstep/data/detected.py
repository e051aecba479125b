"""Detections beside the objects that are there: which are right, which are wrong, and which objects are missed."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.checks import Checked, FiniteFloat
from lockstep.data.batch_reader import read_examples
from lockstep.data.rows import Rows
from lockstep.errors import DataError
from lockstep.images.drawing import GREEN, GREY, RED, YELLOW, Colour, Marks
from lockstep.mask_runs import pixels_in
from lockstep.metrics.outcomes import outcomes
from lockstep.readers.coco_results import CocoResults, ImageResults

if TYPE_CHECKING:
    from lockstep.readers.reader import Reader

TRUTH = ("truth_boxes", "truth_labels", "truth_is_crowd")
_ID, _AT_ONCE = "source_id", 64


@dataclass(frozen=True, eq=False)
class Compared:
    """The detections on an image and the objects that they have not found, as they are drawn."""

    marks: Marks
    num_right: int
    num_wrong: int
    num_missed: int

    def __str__(self) -> str:
        return f"{self.num_right} right, {self.num_wrong} wrong, {self.num_missed} missed"


@dataclass(frozen=True)
class Comparison(Checked):
    """Detections of a file, to be compared with the objects of a reader that gives the fields "truth_...".

    They are matched as COCO's evaluation does at an IoU of 0.5: the best first, each to the object of its class that it
    covers most; those in a crowd do not count.
    """

    results: CocoResults
    min_score: FiniteFloat = 0.5
    """Detections of lower scores are left out."""

    def of(self, fields: Mapping[str, Any], size: tuple[int, int], classes: Mapping[int, str]) -> Compared:
        """Compare the detections on the only image of a batch.

        Args:
            fields: of the batch.
            size: height and width of the image as it is stored.
            classes: the name of each class by its label.
        """
        found = self.results.on(fields[_ID][0]).above(self.min_score)
        boxes, labels, is_crowd = (_of_only_image(fields, name) for name in TRUTH)
        result = outcomes(found.boxes, found.labels, found.scores, boxes, labels, is_crowd)
        named = [classes.get(label) or str(label) for label in found.labels.tolist()]
        kinds = [_kind(*each) for each in zip(result.right, result.ignored, strict=True)]
        missed = [f"missed: {classes.get(label) or label}" for label in labels[result.missed].tolist()]
        names = [
            f"{word}{name} {score:.2f}" for (word, *_), name, score in zip(kinds, named, found.scores, strict=True)
        ]
        marks = Marks(
            _shares(np.concatenate([boxes[result.missed], found.boxes]), size),
            [*missed, *names],
            colours=[*[YELLOW] * len(missed), *(colour for _, colour, _ in kinds)],
            dashed=[*[True] * len(missed), *(dashed for _, _, dashed in kinds)],
        )
        num_right, num_ignored = int(result.right.sum()), int(result.ignored.sum())
        return Compared(marks, num_right, len(names) - num_right - num_ignored, len(missed))


def comparison(reader: Reader, results: CocoResults, min_score: float, source: str) -> Comparison:
    """Make the comparison of a file of results with the objects of a reader, whose images and classes it has to know.

    Args:
        reader: gives the ground truth.
        results: the detections.
        min_score: see `Comparison`.
        source: the data, as errors name it.
    """
    classes = getattr(reader, "classes", ())
    results.check(_source_ids(reader, source), set(classes) if isinstance(classes, Mapping) else (), source)
    return Comparison(results, min_score)


def detection_marks(
    found: ImageResults, size: tuple[int, int], classes: Mapping[int, str], *, labels: bool = True, scores: bool = True
) -> Marks:
    """Mark the detections on an image, each with the name of its class and its score.

    Args:
        found: in pixels of the stored image.
        size: its height and width.
        classes: the name of each class by its label; one without a name is called by its number.
        labels: name the classes.
        scores: write the scores.
    """
    named = ([classes.get(label) or str(label)] if labels else [] for label in found.labels.tolist())
    scored = ([f"{score:.2f}"] if scores else [] for score in found.scores.tolist())
    masks = [torch.from_numpy(pixels_in(mask.runs, mask.height, mask.width)) for mask in found.masks]
    return Marks(
        _shares(found.boxes, size),
        [" ".join(words) for words in map(operator.add, named, scored)],
        labels=found.labels.tolist(),
        masks=torch.stack(masks) if masks else None,
    )


def _source_ids(reader: Reader, source: str) -> set[str]:
    """Return the ids of all images; of records they are only known once all are read."""
    if hasattr(reader, "source_ids"):
        return {*reader.source_ids}
    found: set[str] = set()
    for first in range(0, len(reader), _AT_ONCE):
        indices = np.arange(first, min(first + _AT_ONCE, len(reader)))
        fields = read_examples(reader, Rows(indices, indices), seed=0)
        if _ID not in fields or TRUTH[0] not in fields:
            raise DataError(
                f"There are no objects in {source} to show detections beside.",
                given=f"the fields {', '.join(fields)}",
                expected="records of detection, a folder of VOC, or a file of COCO's annotations",
                hint="name the data that the detector was run on",
            )
        found.update(fields[_ID])
    return found


def _of_only_image(fields: Mapping[str, Any], name: str) -> Any:
    """Return a field of ground truth; without it, no object is a crowd."""
    if name in fields:
        return fields[name][0].numpy()
    return np.zeros(len(fields[TRUTH[0]][0]), bool)


def _kind(is_right: bool, is_ignored: bool) -> tuple[str, Colour, bool]:
    """Return for a detection the word before its name, the colour, and whether its line is broken."""
    if is_right:
        return "", GREEN, False
    return ("ignored: ", GREY, True) if is_ignored else ("false: ", RED, True)


def _shares(boxes: Any, size: tuple[int, int]) -> torch.Tensor:
    """Convert x, y, width and height in pixels to top, left, bottom and right as shares."""
    left, top, width, height = boxes.T
    edges = np.stack([top, left, top + height, left + width], axis=1)
    return torch.from_numpy(edges / np.tile(size, 2))
