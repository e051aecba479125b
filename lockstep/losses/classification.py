"""Losses of classifiers: cross entropy by softmax and by sigmoid, log loss, hinge loss."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lockstep.checks import Fraction, NonNegativeFloat, check_value
from lockstep.errors import InputError
from lockstep.listing import shorten
from lockstep.losses.weighting import Reduction, Weights, paired, weighted_loss, widened

# Torch drops the labels of one class from the loss, -100 unless told otherwise; no label is meant to be dropped here.
_NO_CLASS = -(2**62)


def softmax_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    weights: Weights = 1.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute -sum(p * log softmax(logits)) of each example, where p is 1 for the right class and 0 elsewhere.

    With smoothing, p * (1 - label_smoothing) + label_smoothing / classes takes the place of p, where a background class
    counts as a class (Szegedy et al., Rethinking the Inception Architecture, 2016).

    Args:
        logits: scores before the softmax, shape (batch, classes).
        labels: right classes, whole numbers from 0 to classes - 1, shape (batch,); or floating point probabilities p,
            shape (batch, classes). An accelerator may stop the whole process at a class number out of range.
        label_smoothing: 0 or more, below 1.
        weights: a number, or a tensor of shape (batch,); see `weighted_loss`.
        reduction: "mean" over the examples present, "sum", or "none" for shape (batch,).
    """
    is_probability = labels.is_floating_point()
    if logits.ndim != 2 or labels.shape != (logits.shape if is_probability else logits.shape[:1]):
        raise InputError(
            "Cross entropy cannot compare these logits and labels.",
            given=f"logits of shape {tuple(logits.shape)}, labels of shape {tuple(labels.shape)}, {labels.dtype}",
            expected="logits of shape (batch, classes), labels of shape (batch,), whole numbers; "
            "or probabilities of shape (batch, classes), floating point",
            hint="give each example one class number (of one-hot labels, labels.argmax(1))",
        )
    check_value("label_smoothing", label_smoothing, Fraction)
    logits = widened(logits)
    targets = labels.to(logits.dtype) if is_probability else labels.long()
    # One kernel computes the plain mean; without examples it would compute NaN.
    is_plain = isinstance(weights, float) and weights == 1.0 and reduction == "mean" and len(labels) > 0
    try:
        losses = F.cross_entropy(
            logits,
            targets,
            reduction="mean" if is_plain else "none",
            label_smoothing=label_smoothing,
            ignore_index=_NO_CLASS,
        )
    except IndexError as error:
        raise _out_of_range(logits, labels) from error
    return losses if is_plain else weighted_loss(losses, weights=weights, reduction=reduction)


def _out_of_range(logits: Tensor, labels: Tensor) -> InputError:
    classes = logits.shape[1]
    wrong = [f"{label} (example {i})" for i, label in enumerate(labels.tolist()) if not 0 <= label < classes]
    return InputError(
        "A label is not the number of a class.",
        given=shorten(wrong, 8),
        expected=f"whole numbers from 0 to {classes - 1}: the logits have {classes} classes",
        hint="number the classes from 0, or give the model as many outputs as there are classes",
    )


def sigmoid_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    weights: Weights = 1.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute -labels * log sigmoid(logits) - (1 - labels) * log(1 - sigmoid(logits)), so that nothing overflows.

    Each element is a question by itself. With smoothing, labels * (1 - label_smoothing) + label_smoothing / 2 takes
    the place of the labels: the softmax's smoothing for two classes.

    Args:
        logits: scores before the sigmoid, any shape.
        labels: 0 for no, 1 for yes, or between; the shape of the logits, any dtype.
        label_smoothing: 0 or more, below 1.
        weights: a number, or a tensor; see `weighted_loss`.
        reduction: "mean" over the elements present, "sum", or "none" for the shape of the logits.
    """
    check_value("label_smoothing", label_smoothing, Fraction)
    logits, labels = paired(logits, labels)
    if label_smoothing:
        labels = labels * (1.0 - label_smoothing) + 0.5 * label_smoothing
    losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return weighted_loss(losses, weights=weights, reduction=reduction)


def log_loss(
    predictions: Tensor,
    labels: Tensor,
    *,
    eps: float = 1e-7,
    weights: Weights = 1.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute -labels * log(predictions + eps) - (1 - labels) * log(1 - predictions + eps), of probabilities.

    The formula of tf.losses.log_loss. Where there are logits, `sigmoid_cross_entropy` is more exact.

    Args:
        predictions: probabilities, 0 to 1, any shape; outside of these the loss is not a number.
        labels: 0 for no, 1 for yes, or between; the shape of the predictions, any dtype.
        eps: keeps the logarithm finite; 0 or more.
        weights: a number, or a tensor; see `weighted_loss`.
        reduction: "mean" over the elements present, "sum", or "none" for the shape of the predictions.
    """
    check_value("eps", eps, NonNegativeFloat)
    predictions, labels = paired(predictions, labels)
    losses = -labels * (predictions + eps).log() - (1.0 - labels) * (1.0 - predictions + eps).log()
    return weighted_loss(losses, weights=weights, reduction=reduction)


def hinge_loss(logits: Tensor, labels: Tensor, *, weights: Weights = 1.0, reduction: Reduction = "mean") -> Tensor:
    """Compute max(0, 1 - sign * logits), where sign is 1 for labels of 1 and -1 for labels of 0 (tf.losses.hinge_loss).

    Args:
        logits: scores, above 0 for yes, any shape.
        labels: 0 for no, 1 for yes; the shape of the logits, any dtype.
        weights: a number, or a tensor; see `weighted_loss`.
        reduction: "mean" over the elements present, "sum", or "none" for the shape of the logits.
    """
    logits, labels = paired(logits, labels)
    losses = F.relu(1.0 - (2.0 * labels - 1.0) * logits)
    return weighted_loss(losses, weights=weights, reduction=reduction)
