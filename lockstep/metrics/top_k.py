"""Whether the right class is among the k with the highest scores."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.errors import InputError


def in_top_k(logits: Tensor, labels: Tensor, k: int = 1) -> Tensor:
    """1 where fewer than k classes score higher than the right one, else 0; float32, shape (batch,).

    So classes that tie across the boundary all count as inside. An example counts 0 where any of its scores is not
    finite, and where its label is no class.

    Args:
        logits: scores, shape (batch, classes).
        labels: right classes, whole numbers, shape (batch,).
        k: how many places count as right, 1 or more.

    Raises:
        InputError: the shapes do not fit, the labels are not whole numbers, or k is below 1.
    """
    _check(logits, labels, k)
    nearest_class = labels.long().clamp(0, logits.shape[1] - 1)
    num_higher = (logits > logits.gather(1, nearest_class[:, None])).sum(1)
    is_known = logits.isfinite().all(1) & (nearest_class == labels)
    return ((num_higher < k) & is_known).to(torch.float32)


def _check(logits: Tensor, labels: Tensor, k: int) -> None:
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
