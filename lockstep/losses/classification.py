"""Losses of classifiers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import InputError


def softmax_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the batch of -log softmax(logits)[label]; a scalar.

    Args:
        logits: scores before the softmax, shape (batch, classes).
        labels: right classes, whole numbers from 0 to classes - 1, shape (batch,).

    Raises:
        InputError: the shapes do not fit, or the labels are not whole numbers.
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or labels.is_floating_point():
        raise InputError(
            "Cross entropy cannot compare these logits and labels.",
            given=f"logits of shape {tuple(logits.shape)}, labels of shape {tuple(labels.shape)}, {labels.dtype}",
            expected="logits of shape (batch, classes), labels of shape (batch,), whole numbers",
            mend="give each example one class number (of one-hot labels, labels.argmax(1))",
        )
    return F.cross_entropy(logits, labels.long())
