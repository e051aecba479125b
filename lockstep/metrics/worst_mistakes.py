"""The wrong predictions that cost most."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.checks import PositiveInt, check_value
from lockstep.errors import InputError


class Mistake(NamedTuple):
    """An example whose class was predicted wrong."""

    example_index: int
    loss: float
    predicted: int
    label: int


class WorstMistakes:
    """Keeps the wrong predictions of the highest loss; a metric for `lockstep.evaluate`.

    A loss that is not a number counts as the highest; of equal ones, that of the example with the lower index.

    Args:
        count: how many are kept, 1 or more.
    """

    def __init__(self, count: int = 16) -> None:
        check_value("count", count, PositiveInt)
        self.count = count
        self.reset()

    def reset(self) -> None:
        """Forget all examples."""
        self._losses = torch.zeros(0, dtype=torch.float64)
        self._others = torch.zeros(0, 3, dtype=torch.int64)  # columns: index, predicted, label

    def update(self, losses: Tensor, predicted: Tensor, labels: Tensor, indices: Tensor) -> None:
        """Look through more examples.

        Args:
            losses: of each example, floating, shape (batch,).
            predicted: classes, whole numbers, shape (batch,).
            labels: the right ones.
            indices: of the examples in their reader, as `lockstep.evaluation.evaluate.example_indices` gives them.
        """
        columns = (losses, predicted, labels, indices)
        if losses.ndim != 1 or len({column.shape for column in columns}) > 1:
            raise InputError(
                "Mistakes are found among examples, one number of each kind an example.",
                given=f"shapes {', '.join(str(tuple(column.shape)) for column in columns)}",
                expected="losses, predicted classes, labels and indices, each of shape (batch,)",
                hint='give losses unreduced (reduction="none"), and of logits, logits.argmax(1)',
            )
        losses, predicted, labels, indices = (column.cpu() for column in columns)
        wrong = predicted != labels
        others = torch.stack([column[wrong].long() for column in (indices, predicted, labels)], dim=1)
        losses, others = torch.cat([self._losses, losses[wrong].double()]), torch.cat([self._others, others])
        by_index = others[:, 0].argsort(stable=True)
        # NaN comes first.
        worst = by_index[losses[by_index].argsort(descending=True, stable=True)][: self.count]
        self._losses, self._others = losses[worst], others[worst]

    def compute(self) -> list[Mistake]:
        """Return the mistakes, the worst first."""
        return [
            Mistake(index, loss, predicted, label)
            for loss, (index, predicted, label) in zip(self._losses.tolist(), self._others.tolist(), strict=True)
        ]
