"""The table by class of a detector's newest evaluation, and its curves of precision over recall."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.metrics.detection_report import CURVE_COLUMNS, ClassReport
from lockstep.report.pictures import bytes_in
from lockstep.run_files import CURVES
from lockstep.runs.record import as_number

Drawn = tuple[tuple[float, float], ...]
"""Recall and precision of each point of a curve, 0 to 1."""


NUMBERS = ClassReport._fields[1:]
"""The columns of the table but for the name of the class."""


@dataclass(frozen=True)
class ClassTable:
    """How a detector does by class."""

    scored: str
    """What was scored: the split, the weights, the step, the least score of the detections that count."""
    rows: tuple[Mapping[str, Any], ...]
    """The fields of a `ClassReport` by name, of each class and of all; a number that is not known is None, or NaN."""


def class_table(evaluations: Sequence[Mapping[str, Any]]) -> ClassTable | None:
    """Return the newest table among the evaluations of a run; None where there is none."""
    for facts in reversed(evaluations):
        table = facts.get("by_class")
        if not isinstance(table, dict) or not isinstance(table.get("classes"), list):
            continue
        rows = [_row(each) for each in (*table["classes"], table.get("all")) if isinstance(each, dict)]
        least = as_number(table.get("min_score"))
        scored = f"{facts.get('split')}, {facts.get('weights')} weights of step {facts['step']}"
        from_score = "" if least is None else f"; detections of a score of {least:g} or more"
        # Of one class the last line says the same.
        return ClassTable(scored + from_score, tuple(rows if len(rows) > 2 else rows[:1]))
    return None


def _row(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": str(facts.get("name")), **{name: as_number(facts.get(name)) for name in NUMBERS}}


def precision_curves(path: Path, problems: list[str]) -> dict[str, Drawn]:
    """Read the curves in a run's folder, by class; none where there are none."""
    data = bytes_in(path / CURVES, problems)
    if data is None:
        return {}
    curves: dict[str, list[tuple[float, float]]] = {}
    try:
        header, *rows = csv.reader(io.StringIO(data.decode(errors="replace"), newline=""))
        if tuple(header) != CURVE_COLUMNS:
            raise ValueError(f"its columns are not {', '.join(CURVE_COLUMNS)}")
        for name, recall, precision, _ in rows:
            point = float(recall), float(precision)
            if not all(0 <= value <= 1 for value in point):
                raise ValueError("a value is not from 0 to 1")
            curves.setdefault(name, []).append(point)
    except (ValueError, csv.Error) as error:
        problems.append(f"{CURVES} is no table of curves: {error}")
        return {}
    return {name: tuple(points) for name, points in curves.items()}
