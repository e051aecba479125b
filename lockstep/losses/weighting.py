"""Weights and reductions of losses: from one number an element to one number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from lockstep.checks import check_one_of, wrong_type
from lockstep.errors import InputError

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
