"""What `lockstep evaluate` says of a detector beside its scores: a table by class, and the files that are asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.cli.cards import card, contact_sheet
from lockstep.durable import atomic_write
from lockstep.errors import InputError
from lockstep.evaluation.kept_detections import KeptDetections
from lockstep.images.drawing import printable
from lockstep.images.pillow import png_bytes
from lockstep.metrics.classification import ClassNames, confusion_csv
from lockstep.metrics.detection_errors import ErrorKind
from lockstep.metrics.detection_report import CORNER, IOU, ClassReport, DetectionReport, curves_csv
from lockstep.readers.reader import Reader
from lockstep.recipes.tasks import KEPT, REPORT, Detection
from lockstep.reporting.jsonl import without_nonfinite
from lockstep.runs.showing import Comparison, examples
from lockstep.screen import Lines, log
from lockstep.terminal import in_columns, num_columns
from lockstep.types import Batch

_MOST_CLASSES, _MOST_IMAGES, _SIDE_PIXELS = 20, 12, 300
_HEAD = ("class", "objects", "right", "false", "missed", "precision", "recall", "F1", "best F1", "at a score of")
_LEGEND = "beside each, green: right, red: false, yellow: missed, grey: not counted"


class DetectorDetails:
    """The table by class of each evaluation; its confusion matrix, curves and worst images, if there is a file each."""

    def __init__(
        self,
        task: Detection,
        classes: Mapping[int, str],
        *,
        confusion: Path | None,
        curves: Path | None,
        mistakes: Path | None,
    ) -> None:
        self.task = task.in_detail(classes, keep_all=mistakes is not None)
        self.metrics: Mapping[str, Any] = self.task.metrics
        self._files = {"confusion": confusion, "curves": curves, "mistakes": mistakes}
        unmade = {name: path for name, path in self._files.items() if path is not None and REPORT not in self.metrics}
        if unmade:
            raise InputError(
                "Where detections are written down alone, none is known to be right.",
                given=" ".join(f"--{name} {path}" for name, path in unmade.items())
                + ", and evaluate.detection.ignore_ground_truth=true",
                expected="detections that are compared with the objects of the data",
                hint="--set evaluate.detection.ignore_ground_truth=false, if the data have objects; else leave it out",
            )

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Give each metric what it takes."""
        return dict(self.task.score(model, batch))

    @property
    def facts(self) -> dict[str, Any]:
        """The table as JSON, "by_class", and the matrix if it is asked for; numbers that are not finite are text."""
        if REPORT not in self.metrics:
            return {}
        report, found = self._report, self._report.compute()
        rows = [without_nonfinite(row._asdict()) for row in (*found["classes"], found["all"])]
        matrix = {"confusion": found["confusion"]} if self._files["confusion"] else {}
        errors = {kind: error._asdict() for kind, error in found["errors"].items()}
        how = {"measured": report.measured, "min_score": report.min_score, "iou": IOU}
        return {"by_class": {**how, "classes": rows[:-1], "all": rows[-1], "errors": errors}, **matrix}

    def write(self, reader: Reader, names: ClassNames) -> None:
        """Log the table and write the files, on the chief: its metrics alone have seen the detections."""
        if REPORT not in self.metrics:
            return
        report, found = self._report, self._report.compute()
        lines = [*_table(found["classes"], found["all"], report), *_errors(found["errors"])]
        log.info("%s", Lines("\n".join(lines)))
        confusion, curves, mistakes = self._files.values()
        if confusion is not None:
            corner = f"{CORNER}{report.min_score:g}"
            _write(confusion, confusion_csv(found["confusion"], report.confusion_names, corner))
        if curves is not None:
            _write(curves, curves_csv(report.curves()))
        if mistakes is not None:
            with atomic_write(mistakes, failure=InputError) as file:
                file.write(self._worst_images(reader))

    @property
    def _report(self) -> DetectionReport:
        report = self.metrics[REPORT]
        assert isinstance(report, DetectionReport)
        return report

    def _worst_images(self, reader: Reader) -> bytes:
        kept: KeptDetections = self.metrics[KEPT]
        indices = [kept.index_of(image.source_id) for image in self._report.worst(_MOST_IMAGES)]
        compared = Comparison(kept, self._report.min_score, by_masks=self._report.measured == "masks")
        shown = examples(reader, indices, order="sequential", detections=compared)
        cards = [card(example, _SIDE_PIXELS) for example in shown]
        title = f"the worst {len(cards)} of {len(kept)} images; {_LEGEND}" if cards else "no mistakes"
        return png_bytes(contact_sheet(title, cards, _SIDE_PIXELS))


def _write(path: Path, text: str) -> None:
    with atomic_write(path, failure=InputError) as file:
        file.write(text.encode(errors="backslashreplace"))


def _table(classes: list[ClassReport], of_all: ClassReport, report: DetectionReport) -> Iterator[str]:
    """Yield the lines of the table; of many classes it has those with the most mistakes."""
    shown = classes
    if len(classes) > _MOST_CLASSES:
        shown = sorted(classes, key=lambda each: -(each.false + each.missed))[:_MOST_CLASSES]
    overlap = f"an IoU of {IOU:g}" + (" of masks" if report.measured == "masks" else "")
    yield f"detections of a score of {report.min_score:g} or more, right from {overlap} with an object of their class:"
    rows = [_HEAD, *map(_cells, shown if len(classes) == 1 else [*shown, of_all])]
    width = max(num_columns(name) for name, *_ in rows)
    named = [[name + " " * (width - num_columns(name)), *cells] for name, *cells in rows]
    yield from in_columns(named, to_the_right=True)
    if len(shown) < len(classes):
        yield f"{len(classes) - len(shown)} more classes have fewer mistakes; --json tells of all"


def _errors(errors: Mapping[str, ErrorKind]) -> Iterator[str]:
    if any(error.mistakes for error in errors.values()):
        yield f"mistakes of all scores by kind, and how much higher mAP at an IoU of {IOU:g} would be without them:"
        counts = ["mistakes", *(f"{error.mistakes:,}" for error in errors.values())]
        costs = ["mAP     ", *(f"{error.cost:.3f}" for error in errors.values())]
        yield from in_columns([[" " * len(counts[0]), *errors], counts, costs], to_the_right=True)


def _cells(row: ClassReport) -> list[str]:
    return [printable(row.name), *(f"{value:,}" if isinstance(value, int) else _number(value) for value in row[1:])]


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
