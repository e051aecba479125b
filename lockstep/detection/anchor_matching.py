"""Matching of anchors to objects by how similar they are, and the choice of the anchors that losses are computed on.

The latter are drawn in balance, or those with large losses. Matches are int64 (anchors,): the index of the object that
an anchor learns, or that the anchor is background, or that no loss is computed for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import assert_never

import torch
from torch import Tensor

from lockstep.detection.blocks import (
    ArgmaxMatcher,
    BipartiteMatcher,
    HardExampleMiner,
    Matcher,
    Similarity,
    SsdMatcher,
    ThresholdMatcher,
)
from lockstep.detection.boxes import similarity
from lockstep.detection.nms import nms_mask
from lockstep.tensors import tensor_on

AnyMatcher = Matcher | SsdMatcher | ThresholdMatcher

BACKGROUND = -1
IGNORED = -2


def match(matcher: AnyMatcher, likeness: Tensor, counts: Tensor | None = None) -> Tensor:
    """Match the anchors of an image to its objects, by the likeness of both, (objects, anchors): int64 (anchors,).

    Where `counts`, bool (objects,), is False, an object gets no anchor of its own, such as one of weight 0.
    """
    if not len(likeness):
        return torch.full((likeness.shape[1],), BACKGROUND, device=likeness.device)
    match matcher:
        case ArgmaxMatcher():
            return _argmax_matches(matcher, likeness, counts)
        case BipartiteMatcher():
            return _bipartite_matches(likeness, counts)
        case SsdMatcher():
            best, object_of = likeness.max(0)
            matches = torch.where(best < matcher.threshold, BACKGROUND, object_of)
            return torch.where((forced := _forced(likeness, counts, last=True)) >= 0, forced, matches)
        case ThresholdMatcher():
            best, object_of = likeness.max(0)
            matches = _by_thresholds(best, object_of, matcher.high_threshold, matcher.low_threshold)
            if not matcher.allow_low_quality_matches:
                return matches
            is_best_of_an_object = (likeness == likeness.amax(1, keepdim=True)).any(0)
            return torch.where(is_best_of_an_object, object_of, matches)
    assert_never(matcher)


def match_images(
    matcher: AnyMatcher,
    config: Similarity,
    boxes: Sequence[Tensor],
    anchors: Tensor,
    weights: Sequence[Tensor] | None = None,
) -> Tensor:
    """Match the same anchors (anchors, 4) to the objects of each image, one after the other: int64 (images, anchors).

    Each image has boxes (objects, 4) and weights (objects,): an object of weight 0 gets no anchor of its own.
    """
    counts = [None] * len(boxes) if weights is None else [each > 0 for each in weights]
    return torch.stack(
        [match(matcher, similarity(config, each, anchors), valid) for each, valid in zip(boxes, counts, strict=True)]
    )


def rows_of_objects(objects: Sequence[Tensor], image_of: Tensor, object_of: Tensor) -> Tensor:
    """Return the row of each object in `after_none`: int64, of the shape of `object_of`.

    `object_of` is the place of an object among those of the image `image_of`, both int64; negative where there is none.
    """
    firsts = tensor_on(image_of.device, [*accumulate(map(len, objects[:-1]), initial=0)], torch.int64)
    return torch.where(object_of >= 0, firsts[image_of] + object_of + 1, 0)


def after_none(values: Sequence[Tensor]) -> Tensor:
    """Join the rows of the objects of all images, after one of zeros that stands for none."""
    return torch.cat([values[0].new_zeros(1, *values[0].shape[1:]), *values])


def _by_thresholds(
    best: Tensor, object_of: Tensor, high: float, low: float, *, below: int = BACKGROUND, between: int = IGNORED
) -> Tensor:
    return torch.where(best < low, below, torch.where(best < high, between, object_of))


def _argmax_matches(matcher: ArgmaxMatcher, likeness: Tensor, counts: Tensor | None) -> Tensor:
    best, object_of = likeness.max(0)
    matches = object_of
    if not matcher.ignore_thresholds:
        below, between = (BACKGROUND, IGNORED) if matcher.negatives_lower_than_unmatched else (IGNORED, BACKGROUND)
        thresholds = matcher.matched_threshold, matcher.unmatched_threshold
        matches = _by_thresholds(best, object_of, *thresholds, below=below, between=between)
    if not matcher.force_match_for_each_row:
        return matches
    return torch.where((forced := _forced(likeness, counts, last=False)) >= 0, forced, matches)


def _forced(likeness: Tensor, counts: Tensor | None, *, last: bool) -> Tensor:
    """Return for each anchor the first or the last object that it is the most similar anchor of, or -1."""
    number, size = likeness.shape
    objects = torch.arange(number, device=likeness.device)
    forced = torch.full((size,), -1 if last else number, device=likeness.device)
    if counts is not None:
        objects = torch.where(counts, objects, forced[0])
    forced = forced.scatter_reduce(0, likeness.argmax(1), objects, "amax" if last else "amin")
    return forced if last else torch.where(forced < number, forced, -1)


def _bipartite_matches(likeness: Tensor, counts: Tensor | None) -> Tensor:
    """Give the most similar pair to each other, then the most similar of the others, until no object is left."""
    number, size = likeness.shape
    left = likeness.clone() if counts is None else likeness.masked_fill(~counts[:, None], -torch.inf)
    matches = torch.full((size,), BACKGROUND, device=likeness.device)
    for _ in range(min(number, size)):
        best = left.argmax()
        row, column = best // size, best % size
        matches[column] = torch.where(left[row, column] > -torch.inf, row, matches[column])
        left[row] = -torch.inf
        left[:, column] = -torch.inf
    return matches


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
