"""Which classes are taken for which."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.checks import PositiveInt, check_value
from lockstep.errors import InputError


class ConfusionMatrix:
    """Counts the examples of each class by the class that was predicted for them; a metric for `lockstep.evaluate`.

    Raises:
        InputError: num_classes is no whole number from 1 on.
    """

    def __init__(self, num_classes: int) -> None:
        check_value("num_classes", num_classes, PositiveInt)
        self.num_classes = num_classes
        self.reset()

    def reset(self) -> None:
        """Forget all examples."""
        self._counts = torch.zeros(self.num_classes, self.num_classes, dtype=torch.int64)

    def update(self, predicted: Tensor, labels: Tensor) -> None:
        """Count some more examples.

        Args:
            predicted: classes, whole numbers, shape (batch,).
            labels: the right ones.

        Raises:
            InputError: they are of other shapes, no whole numbers, or no classes; nothing is counted then.
        """
        _check_shapes(predicted, labels)
        # In a small type the number of classes would wrap around.
        predicted, labels = predicted.long(), labels.long()
        self._check_classes("predicted class", predicted)
        self._check_classes("label", labels)
        cells = (labels * self.num_classes + predicted).to(self._counts.device)
        self._counts.view(-1).index_add_(0, cells, torch.ones_like(cells))

    def compute(self) -> Tensor:
        """The counts, int64 of shape (right classes, predicted classes)."""
        return self._counts.clone()

    def recall(self) -> Tensor:
        """Share of the examples of each class that were predicted to be of it; float64, NaN where it has none."""
        return self._counts.diagonal() / self._counts.sum(1).double()

    def precision(self) -> Tensor:
        """Share of the predictions of each class that were right; float64, NaN where it was never predicted."""
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
