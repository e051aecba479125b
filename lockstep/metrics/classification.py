"""Metrics of classifiers: top-k accuracy of each example, and the confusion matrix of all, which can become CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lockstep.checks import PositiveInt, check_value
from lockstep.errors import InputError
from lockstep.listing import csv_line


def in_top_k(logits: Tensor, labels: Tensor, k: int = 1) -> Tensor:
    """Return 1 where fewer than k classes score higher than the right one, else 0; float32, shape (batch,).

    Classes that tie across the boundary all count as inside. An example counts 0 where any of its scores is not
    finite, and where its label is no class.

    Args:
        logits: scores, shape (batch, classes).
        labels: right classes, whole numbers, shape (batch,).
        k: how many places count as right, 1 or more.
    """
    _check_top_k(logits, labels, k)
    nearest_class = labels.long().clamp(0, logits.shape[1] - 1)
    num_higher = (logits > logits.gather(1, nearest_class[:, None])).sum(1)
    is_known = logits.isfinite().all(1) & (nearest_class == labels)
    return ((num_higher < k) & is_known).to(torch.float32)


def _check_top_k(logits: Tensor, labels: Tensor, k: int) -> None:
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or labels.is_floating_point():
        raise InputError(
            "Top k cannot compare these logits and labels.",
            given=f"logits of shape {tuple(logits.shape)}, labels of shape {tuple(labels.shape)}, {labels.dtype}",
            expected="logits of shape (batch, classes), labels of shape (batch,), whole numbers",
            hint="give each example one class number (of one-hot labels, labels.argmax(1))",
        )
    if k < 1:
        raise InputError(
            f"No class can be among the top {k}.",
            given=f"k={k}",
            expected="1 or more",
            hint="give k=1 for accuracy, k=5 for the usual second figure",
        )


class ConfusionMatrix:
    """Counts the examples of each class by the class that was predicted for them; a metric for `lockstep.evaluate`."""

    def __init__(self, num_classes: int) -> None:
        check_value("num_classes", num_classes, PositiveInt)
        self.num_classes = num_classes
        self.reset()

    def reset(self) -> None:
        """Forget all examples."""
        self._counts = torch.zeros(self.num_classes, self.num_classes, dtype=torch.int64)

    def update(self, predicted: Tensor, labels: Tensor) -> None:
        """Count more examples: predicted classes, and the right ones, whole numbers of shape (batch,).

        Raises:
            InputError: the shapes or types do not fit, or a number is no class; nothing is counted then.
        """
        _check_shapes(predicted, labels)
        # In a small type the number of classes would wrap around.
        predicted, labels = predicted.long(), labels.long()
        self._check_classes("predicted class", predicted)
        self._check_classes("label", labels)
        cells = (labels * self.num_classes + predicted).to(self._counts.device)
        self._counts.view(-1).index_add_(0, cells, torch.ones_like(cells))

    def compute(self) -> Tensor:
        """Return the counts, int64 of shape (right classes, predicted classes)."""
        return self._counts.clone()

    def recall(self) -> Tensor:
        """Compute the share of the examples of each class that were predicted so; float64, NaN where it has none."""
        return self._counts.diagonal() / self._counts.sum(1).double()

    def precision(self) -> Tensor:
        """Compute the share of right predictions of each class; float64, NaN where it was never predicted."""
        return self._counts.diagonal() / self._counts.sum(0).double()

    def _check_classes(self, what: str, classes: Tensor) -> None:
        wrong = ((classes < 0) | (classes >= self.num_classes)).nonzero()
        if len(wrong):
            row = int(wrong[0, 0])
            raise InputError(
                f"A {what} is none of the {self.num_classes} classes.",
                given=f"{int(classes[row])} in row {row}",
                expected=f"0 to {self.num_classes - 1}",
                hint="count the classes as the network does, a background class included, and check the labels",
            )


def _check_shapes(predicted: Tensor, labels: Tensor) -> None:
    if predicted.ndim != 1 or labels.shape != predicted.shape or _is_fractional(predicted) or _is_fractional(labels):
        raise InputError(
            "A confusion matrix cannot count these predictions and labels.",
            given=f"predictions of shape {tuple(predicted.shape)}, {predicted.dtype}; "
            f"labels of shape {tuple(labels.shape)}, {labels.dtype}",
            expected="both of shape (batch,), whole numbers",
            hint="give one class an example (of logits, logits.argmax(1))",
        )


def _is_fractional(values: Tensor) -> bool:
    return values.is_floating_point() or values.is_complex()


_CORNER = "is / predicted"


def confusion_csv(counts: Tensor | Sequence[Sequence[int]], names: ClassNames = (), corner: str = _CORNER) -> str:
    """Write a line of CSV for each class: its name, and how often each class was predicted for it, below a header.

    Counts are (right classes, predicted classes), as `ConfusionMatrix` computes them. A class without a name appears as
    its number; `corner` is the first cell of the header.
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
    lines = [[corner, *classes], *([name, *row] for name, row in zip(classes, rows, strict=True))]
    return "".join(map(csv_line, lines))


ClassNames = Sequence[str] | Mapping[int, str]
"""Names by label; some may be missing."""


def class_name(names: ClassNames, label: int) -> str:
    """Return the name of a class, or its number where it has none."""
    known = names if isinstance(names, Mapping) else dict(enumerate(names))
    return known.get(label) or str(label)
