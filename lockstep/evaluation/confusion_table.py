"""A confusion matrix as a file that spreadsheets open."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from io import StringIO

from torch import Tensor

from lockstep.errors import InputError
from lockstep.evaluation.class_names import ClassNames, class_name

_CORNER = "is / predicted"


def confusion_csv(counts: Tensor | Sequence[Sequence[int]], names: ClassNames = ()) -> str:
    """A line of CSV for each class: its name, and how often each class was predicted for it; a header has their names.

    Args:
        counts: shape (right classes, predicted classes), as `lockstep.metrics.ConfusionMatrix` computes them.
        names: of the classes; one without a name appears as its number.

    Raises:
        InputError: the counts are no square.
    """
    rows = counts.tolist() if isinstance(counts, Tensor) else [[*row] for row in counts]
    if any(not isinstance(row, list) or len(row) != len(rows) for row in rows):
        raise InputError(
            "These counts are no confusion matrix.",
            given=f"{len(rows)} rows, of which not all are of {len(rows)} numbers",
            expected="as many numbers in each row as there are rows",
            hint="give what ConfusionMatrix.compute returns",
        )
    classes = [class_name(names, label) for label in range(len(rows))]
    return "".join(map(_line, [[_CORNER, *classes], *([name, *row] for name, row in zip(classes, rows, strict=True))]))


def _line(cells: Sequence[object]) -> str:
    # csv quotes a cell for the line breaks that end its own lines, and no others: so both end them here.
    file = StringIO()
    csv.writer(file, lineterminator="\r\n").writerow(cells)
    return file.getvalue().removesuffix("\r\n") + "\n"
