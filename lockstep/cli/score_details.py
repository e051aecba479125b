"""What `lockstep evaluate` shows beside the scores: which classes are taken for which, and the worst mistakes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.cli.mistakes import mistakes_sheet
from lockstep.cli.page import png_bytes
from lockstep.durable import atomic_write
from lockstep.errors import InputError
from lockstep.metrics.classification import ConfusionMatrix, confusion_csv
from lockstep.metrics.metric import Metric
from lockstep.metrics.worst_mistakes import WorstMistakes
from lockstep.readers.reader import Reader
from lockstep.runs.classification import CONFUSION, MISTAKES, Classification
from lockstep.types import Batch


class Details:
    """The confusion matrix and the worst mistakes of an evaluation, those of them that have a file to go to.

    Args:
        task: that is scored.
        num_classes: of the model.
        confusion: a file of CSV.
        mistakes: a PNG.
    """

    def __init__(
        self, task: Classification, num_classes: int, *, confusion: Path | None, mistakes: Path | None
    ) -> None:
        self._task, self._confusion, self._mistakes = task, confusion, mistakes
        self._matrix, self._worst = ConfusionMatrix(num_classes), WorstMistakes()
        self.metrics: dict[str, Metric] = {}
        """By name, for the evaluation."""
        if confusion is not None:
            self.metrics[CONFUSION] = self._matrix
        if mistakes is not None:
            self.metrics[MISTAKES] = self._worst

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """The scores of the task, and what the metrics are made of."""
        if not self.metrics:
            return self._task.score(model, batch)
        found = self._task.score_in_detail(model, batch)
        return {name: value for name, value in found.items() if name in self.metrics or not isinstance(value, tuple)}

    def write(self, open_reader: Callable[[], Reader]) -> None:
        """Write the files; the chief's part, for its metrics alone have seen the examples.

        Args:
            open_reader: gives the examples that were scored; called where there is a file to write.

        Raises:
            InputError: a file cannot be written.
        """
        if not self.metrics:
            return
        reader = open_reader()
        names = class_names(reader)
        if self._confusion is not None:
            with atomic_write(self._confusion, failure=InputError) as file:
                # Classes are named by folders, which may be called what is no text.
                file.write(confusion_csv(self._matrix.compute(), names).encode(errors="backslashreplace"))
        if self._mistakes is not None:
            with atomic_write(self._mistakes, failure=InputError) as file:
                file.write(png_bytes(mistakes_sheet(self._worst.compute(), reader, names)))


def class_names(reader: Reader) -> Mapping[int, str]:
    """The names of the classes by the model's numbers; none where the reader knows none."""
    offset = getattr(reader, "offset", 0)
    return {label - offset: name for label, name in enumerate(getattr(reader, "classes", ()))}
