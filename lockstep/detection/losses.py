"""Losses of a detector, for each anchor: not reduced, times the anchor's weight.

The formulas are those of the Object Detection API's core/losses.py (tensorflow/models, Apache 2.0).
"""

from __future__ import annotations

from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.detection import blocks
from lockstep.detection.boxes import matched_giou, matched_iou

_LEAST_PROBABILITY = 1e-4  # of the reference's focal loss of heat maps


def takes_boxes(config: blocks.LocalizationLoss) -> bool:
    """Tell whether a localization loss compares decoded boxes, and not codes."""
    return isinstance(config, blocks.WeightedIou | blocks.WeightedGiou)


def localization_loss(config: blocks.LocalizationLoss, predictions: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Compute the loss of predicted boxes, shape (...), as the weights.

    Predictions and targets are codes, (..., code size), or where `takes_boxes(config)` boxes, (..., 4).
    """
    match config:
        case blocks.WeightedSmoothL1():
            return F.huber_loss(predictions, targets, reduction="none", delta=config.delta).sum(-1) * weights
        case blocks.WeightedL2():
            return 0.5 * ((predictions - targets) * weights[..., None]).square().sum(-1)
        case blocks.L1LocalizationLoss():
            return (predictions - targets).abs().sum(-1) * weights
        case blocks.WeightedIou():
            return (1 - matched_iou(predictions, targets)) * weights
        case blocks.WeightedGiou():
            return (1 - matched_giou(predictions, targets)) * weights
    assert_never(config)


def classification_loss(config: blocks.ClassificationLoss, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Compute the loss of predicted classes, summed over the classes: (batch, anchors); Dice's loss is (batch, 1).

    Args:
        config: the loss.
        logits: (batch, anchors, classes).
        targets: of the same shape, 1 for the right class, or probabilities, or a teacher's logits. With
            `WeightedSoftmax` the numbers of the right classes too, int64 (batch, anchors).
        weights: (batch, anchors) or (batch, anchors, classes); a softmax takes their mean over the classes.
    """
    match config:
        case blocks.WeightedSoftmax():
            return _softmax_loss(logits / config.logit_scale, targets) * _of_anchors(weights)
        case blocks.WeightedLogitsSoftmax():
            probabilities = (targets / config.logit_scale).softmax(-1)
            return _softmax_loss(logits / config.logit_scale, probabilities) * _of_anchors(weights)
        case blocks.WeightedDiceClassificationLoss():
            return _dice_loss(config, logits.sigmoid(), targets, _of_classes(weights))
        case blocks.WeightedSigmoid():
            losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        case blocks.WeightedSigmoidFocal():
            losses = _focal_loss(config, logits, targets)
        case blocks.BootstrappedSigmoid():
            own = (logits > 0).to(logits.dtype) if config.hard_bootstrap else logits.sigmoid()
            mixed = config.alpha * targets + (1 - config.alpha) * own
            losses = F.binary_cross_entropy_with_logits(logits, mixed, reduction="none")
        case blocks.PenaltyReducedLogisticFocalLoss():
            losses = _heat_map_loss(config, logits, targets)
        case _:
            assert_never(config)
    return (losses * _of_classes(weights)).sum(-1)


def _of_anchors(weights: Tensor) -> Tensor:
    return weights if weights.ndim == 2 else weights.mean(-1)


def _of_classes(weights: Tensor) -> Tensor:
    return weights[..., None] if weights.ndim == 2 else weights


def _softmax_loss(logits: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return -(targets * logits.log_softmax(-1)).sum(-1)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def _focal_loss(config: blocks.WeightedSigmoidFocal, logits: Tensor, targets: Tensor) -> Tensor:
    """Lower the loss of what is nearly right: cross entropy times (1 - p) ** gamma (Lin et al.: RetinaNet, 2017)."""
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    probabilities = logits.sigmoid()
    of_truth = probabilities * targets + (1 - probabilities) * (1 - targets)
    if config.gamma:
        losses = losses * (1 - of_truth) ** config.gamma
    if config.alpha is not None:
        losses = losses * (config.alpha * targets + (1 - config.alpha) * (1 - targets))
    return losses


def _heat_map_loss(config: blocks.PenaltyReducedLogisticFocalLoss, logits: Tensor, targets: Tensor) -> Tensor:
    alpha, beta = config.alpha or 0.0, config.beta or 0.0
    probabilities = logits.sigmoid().clamp(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY)
    of_peaks = (1 - probabilities) ** alpha * probabilities.log()
    of_others = (1 - targets) ** beta * probabilities**alpha * (1 - probabilities).log()
    return -torch.where(targets == 1, of_peaks, of_others)


def _dice_loss(
    config: blocks.WeightedDiceClassificationLoss, probabilities: Tensor, targets: Tensor, weights: Tensor
) -> Tensor:
    """Compare all anchors of an image at once, class by class."""
    probabilities, targets = probabilities * weights, targets * weights
    both = (probabilities * targets).sum(1)
    power = 2 if config.squared_normalization else 1
    either = (probabilities**power + targets**power).sum(1)
    return (1 - 2 * both / torch.where(either > 0, either, 1)).sum(-1, keepdim=True)
