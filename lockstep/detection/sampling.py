"""Which anchors or proposals of each image the losses are computed on: drawn in balance, or those with large losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.detection.configs import HardExampleMiner
from lockstep.detection.nms import nms_mask


def balanced_sample(
    positive: Sequence[Tensor], negative: Sequence[Tensor], count: int, positive_fraction: float
) -> list[Tensor]:
    """Draw positives up to a share of the sample, and fill it with negatives: bool (n,) for each image.

    As torchvision's and the Object Detection API's BalancedPositiveNegativeSampler. It draws from torch's global
    stream, for each image in turn a permutation of its positives and one of its negatives, as torchvision does: from
    the same seed the samples are the same.

    Args:
        positive: bool (n,) of each image.
        negative: bool (n,) of each image; what is neither is not drawn.
        count: size of the sample of an image; smaller where there are too few negatives.
        positive_fraction: share of positives at most.
    """
    samples = []
    for is_positive, is_negative in zip(positive, negative, strict=True):
        positives, negatives = (places.nonzero()[:, 0] for places in (is_positive, is_negative))
        drawn = positives[_permutation(positives)[: int(count * positive_fraction)]]
        others = negatives[_permutation(negatives)[: count - len(drawn)]]
        samples.append(torch.zeros_like(is_positive).index_fill_(0, torch.cat([drawn, others]), True))
    return samples


def hard_examples(
    config: HardExampleMiner, losses: Tensor, boxes: Tensor, positive: Tensor, negative: Tensor
) -> Tensor:
    """Choose the anchors with the largest losses, without near duplicates: bool (batch, anchors).

    As the Object Detection API's `HardExampleMiner`: NMS with losses in place of scores, then at most so many negatives
    for each positive of their image.

    Args:
        config: numbers and thresholds; which losses are given is for the caller to see to.
        losses: (batch, anchors).
        boxes: (batch, anchors, 4), as predicted.
        positive: bool (batch, anchors), the anchors that learn objects.
        negative: bool (batch, anchors), those of the background.
    """
    order = losses.detach().argsort(dim=1, descending=True, stable=True)
    in_order = boxes.detach().gather(1, order[..., None].expand_as(boxes))
    chosen = nms_mask(in_order, config.iou_threshold)
    if config.num_hard_examples:
        chosen &= chosen.cumsum(1) <= config.num_hard_examples
    if config.max_negatives_per_positive:
        positives, negatives = (chosen & kind.gather(1, order) for kind in (positive, negative))
        most = (config.max_negatives_per_positive * positives.sum(1, keepdim=True)).clamp(
            min=config.min_negatives_per_image
        )
        chosen &= positives | (negatives.cumsum(1) <= most)
    return torch.empty_like(chosen).scatter_(1, order, chosen)


def _permutation(places: Tensor) -> Tensor:
    return torch.randperm(len(places), device=places.device)
