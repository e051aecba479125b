"""Losses of models that predict numbers or directions."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from lockstep.checks import Range, check_value
from lockstep.losses.weighting import Reduction, Weights, paired, weighted_loss


def absolute_difference(
    predictions: Tensor, labels: Tensor, *, weights: Weights = 1.0, reduction: Reduction = "mean"
) -> Tensor:
    """Compute |predictions - labels| (tf.losses.absolute_difference; torch calls it l1_loss).

    Args:
        predictions: any shape.
        labels: the shape of the predictions, any dtype.
        weights: a number, or a tensor; see `weighted_loss`.
        reduction: "mean" over the elements present, "sum", or "none" for the shape of the predictions.
    """
    predictions, labels = paired(predictions, labels)
    return weighted_loss((predictions - labels).abs(), weights=weights, reduction=reduction)


def squared_error(
    predictions: Tensor, labels: Tensor, *, weights: Weights = 1.0, reduction: Reduction = "mean"
) -> Tensor:
    """Compute (predictions - labels) ** 2, without a half (tf.losses.mean_squared_error; torch calls it mse_loss).

    Args:
        predictions: any shape.
        labels: the shape of the predictions, any dtype.
        weights: a number, or a tensor; see `weighted_loss`.
        reduction: "mean" over the elements present, "sum", or "none" for the shape of the predictions.
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
