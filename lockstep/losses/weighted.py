"""Losses of single elements: of classifiers, and of models that predict numbers; their weights and reductions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import torch

from lockstep.checks import Fraction, NonNegativeFloat, Range, check_one_of, check_value, wrong_type
from lockstep.errors import InputError
from lockstep.listing import shorten

if TYPE_CHECKING:
    from torch import Tensor

Weights: TypeAlias = "float | Tensor"
"""A number, or a tensor that fits the first dimensions of the losses."""

Reduction = Literal["mean", "sum", "none"]
"""How the weighted losses become one number."""


def weighted_loss(losses: Tensor, *, weights: Weights = 1.0, reduction: Reduction = "mean") -> Tensor:
    """Multiply losses of single elements by their weights and reduce them, as tf.losses.compute_weighted_loss does.

    The mean is over the elements present, those whose weight is not 0: sum(losses * weights) / present. So weights
    scale the loss, and are not divided out again. If no element is present, the mean and its gradients are 0.

    Args:
        losses: one number an element, any shape. Where the weight is 0 they must be finite all the same: 0 * inf is
            not a number. 16-bit ones are taken as float32.
        weights: a number, or a tensor of shape (), (batch,), (batch, ...): each size that of the losses or 1, and
            dimensions at the end may be missing. A mask of bools will do.
        reduction: "mean"; "sum", for a loss that is divided by a count over all towers; or "none", the weighted losses
            in the shape of `losses`.
    """
    check_one_of("reduction", reduction, ("mean", "sum", "none"))
    losses = widened(losses)
    factors = _fitted(weights, losses) if isinstance(weights, torch.Tensor) else _number(weights)
    weighted = losses if isinstance(factors, float) and factors == 1.0 else losses * factors
    if reduction == "none":
        return weighted
    total = weighted.sum()
    return total if reduction == "sum" else total / _num_present(factors, losses)


def _num_present(factors: Weights, losses: Tensor) -> int | Tensor:
    # At least 1: where nothing is present the sum is 0 already. A tensor stays on its device, nobody waits for it.
    if isinstance(factors, torch.Tensor):
        return torch.count_nonzero(factors.expand_as(losses)).clamp(min=1)
    return max(1, losses.numel())


def _fitted(weights: Tensor, losses: Tensor) -> Tensor:
    """Give the weights as many dimensions as the losses have, and their dtype."""
    shape = weights.shape
    while len(shape) > losses.ndim and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) > losses.ndim or any(size not in (1, n) for size, n in zip(shape, losses.shape, strict=False)):
        raise InputError(
            "The weights do not fit the losses.",
            given=f"weights of shape {tuple(weights.shape)}, losses of shape {tuple(losses.shape)}",
            expected="a number, one weight an example, shape (batch,), or one an element",
            hint="give the weights the first dimensions of the losses, each of the same size or 1",
        )
    return weights.reshape(*shape, *[1] * (losses.ndim - len(shape))).to(losses.dtype)


def _number(weights: object) -> float:
    if not isinstance(weights, int | float):
        raise wrong_type(
            "weights",
            weights,
            expected="a number or a tensor",
            hint="leave the weights out where all are 1, and give them as a tensor where they differ",
        )
    if not math.isfinite(weights):
        raise InputError(
            "weights cannot scale a loss.",
            given=f"weights={weights}",
            expected="a finite number",
            hint="give a weight such as 1.0, or a tensor with one an example",
        )
    return float(weights)


def paired(predictions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Convert both to one floating point dtype: that of the predictions, or float32 if that has fewer bits.

    Raises:
        InputError: their shapes differ.
    """
    if predictions.shape != labels.shape:
        raise InputError(
            "Labels are compared with predictions one by one, and these do not pair up.",
            given=f"predictions of shape {tuple(predictions.shape)}, labels of shape {tuple(labels.shape)}",
            expected="two tensors of the same shape",
            hint="reshape one of them, as in labels.view_as(predictions) or predictions.squeeze(1)",
        )
    predictions = widened(predictions)
    return predictions, labels.to(predictions.dtype)


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor of float32 or float64 as it is, any other as float32."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


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
        losses = torch.nn.functional.cross_entropy(
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
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return weighted_loss(losses, weights=weights, reduction=reduction)


def log_loss(
    predictions: Tensor, labels: Tensor, *, eps: float = 1e-7, weights: Weights = 1.0, reduction: Reduction = "mean"
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

    Logits are above 0 for yes. Labels are 0 for no and 1 for yes; they have the shape of the logits, and any dtype.
    Weights and reduction are those of `weighted_loss`.
    """
    logits, labels = paired(logits, labels)
    losses = torch.nn.functional.relu(1.0 - (2.0 * labels - 1.0) * logits)
    return weighted_loss(losses, weights=weights, reduction=reduction)


def absolute_difference(
    predictions: Tensor, labels: Tensor, *, weights: Weights = 1.0, reduction: Reduction = "mean"
) -> Tensor:
    """Compute |predictions - labels| (tf.losses.absolute_difference; torch calls it l1_loss).

    Labels have the shape of the predictions, and any dtype. Weights and reduction are those of `weighted_loss`.
    """
    predictions, labels = paired(predictions, labels)
    return weighted_loss((predictions - labels).abs(), weights=weights, reduction=reduction)


def squared_error(
    predictions: Tensor, labels: Tensor, *, weights: Weights = 1.0, reduction: Reduction = "mean"
) -> Tensor:
    """Compute (predictions - labels) ** 2, without a half (tf.losses.mean_squared_error; torch calls it mse_loss).

    Labels have the shape of the predictions, and any dtype. Weights and reduction are those of `weighted_loss`.
    """
    predictions, labels = paired(predictions, labels)
    return weighted_loss((predictions - labels).square(), weights=weights, reduction=reduction)


def cosine_distance(
    predictions: Tensor, labels: Tensor, *, dim: int, weights: Weights = 1.0, reduction: Reduction = "mean"
) -> Tensor:
    """Compute 1 - sum(predictions * labels) along one dimension: the cosine distance of vectors of length 1.

    As tf.losses.cosine_distance: vectors are not scaled to length 1 here, and the result lacks the dimension.

    Args:
        predictions: vectors of length 1 along `dim`, any shape.
        labels: the shape of the predictions, any dtype.
        dim: the dimension of the vectors; those below 0 count from the end.
        weights: a number, or a tensor that fits the shape without `dim`; see `weighted_loss`.
        reduction: "mean" over the vectors present, "sum", or "none" for the shape without `dim`.
    """
    check_value("dim", dim, Annotated[int, Range(ge=-predictions.ndim, lt=predictions.ndim)])
    predictions, labels = paired(predictions, labels)
    return weighted_loss(1.0 - (predictions * labels).sum(dim), weights=weights, reduction=reduction)
