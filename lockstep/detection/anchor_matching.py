"""Matching of anchors to objects by how similar they are, and the choice of the anchors that losses are computed on.

The latter are drawn in balance, or those with large losses. Matches are int64 (anchors,): the index of the object that
an anchor learns, or that the anchor is background, or that no loss is computed for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from lockstep.detection import blocks
from lockstep.detection.boxes import similarity
from lockstep.detection.nms import nms_mask
from lockstep.tensors import reading_waits, tensor_on

AnyMatcher = blocks.Matcher | blocks.SsdMatcher | blocks.ThresholdMatcher

BACKGROUND = -1
IGNORED = -2
_PAIRS = 2**26
"""Pairs of objects and anchors that are compared at once: 256 MB in float32."""


def match(matcher: AnyMatcher, likeness: Tensor, counts: Tensor | None = None) -> Tensor:
    """Match anchors to objects by the likeness of both: (..., objects, anchors) to int64 (..., anchors).

    Where `counts`, bool (..., objects), is False, an object gets no anchor of its own, such as one of weight 0.
    """
    if not likeness.shape[-2]:
        return likeness.new_full((*likeness.shape[:-2], likeness.shape[-1]), BACKGROUND, dtype=torch.int64)
    match matcher:
        case blocks.ArgmaxMatcher():
            return _argmax_matches(matcher, likeness, counts)
        case blocks.BipartiteMatcher():
            return _bipartite_matches(likeness, counts)
        case blocks.SsdMatcher():
            best, object_of = likeness.max(-2)
            matches = torch.where(best < matcher.threshold, BACKGROUND, object_of)
            return torch.where((forced := _forced(likeness, counts, last=True)) >= 0, forced, matches)
        case blocks.ThresholdMatcher():
            best, object_of = likeness.max(-2)
            matches = _by_thresholds(best, object_of, matcher.high_threshold, matcher.low_threshold)
            if not matcher.allow_low_quality_matches:
                return matches
            best_of = likeness.amax(-1, keepdim=True)
            best_of = torch.where(best_of > -torch.inf, best_of, torch.nan)  # a row that pads is like no anchor
            return torch.where((likeness == best_of).any(-2), object_of, matches)
    assert_never(matcher)


def match_images(
    matcher: AnyMatcher,
    config: blocks.Similarity,
    boxes: Sequence[Tensor],
    anchors: Tensor,
    weights: Sequence[Tensor] | None = None,
) -> Tensor:
    """Match anchors to the objects of each image: int64 (images, anchors).

    Where launches cost it is done for many images at once, and else one after the other, so that none is padded. Boxes
    are (objects, 4) of each image; anchors (anchors, 4), the same for all images, or (images, anchors, 4). An object of
    weight 0 gets no anchor of its own.
    """
    anchors = anchors.expand(len(boxes), -1, -1)
    if reading_waits(anchors.device):
        return _padded_matches(matcher, config, boxes, anchors, weights)
    counts = [None] * len(boxes) if weights is None else [each > 0 for each in weights]
    of_images = zip(boxes, anchors, counts, strict=True)
    return torch.stack([match(matcher, similarity(config, each, own), valid) for each, own, valid in of_images])


def _padded_matches(
    matcher: AnyMatcher,
    config: blocks.Similarity,
    boxes: Sequence[Tensor],
    anchors: Tensor,
    weights: Sequence[Tensor] | None,
) -> Tensor:
    """Match as `match_images`, as many images at once as memory should hold pairs."""
    rows = rows_of_all(boxes, anchors.device)
    is_there, objects = rows > 0, after_none(boxes)[rows]
    counts = is_there if weights is None else after_none(weights)[rows] > 0
    number = max(_PAIRS // max(rows.shape[1] * anchors.shape[1], 1), 1)
    matches = []
    for some, own, there, valid in zip(
        *(torch.split(part, number) for part in (objects, anchors, is_there, counts)), strict=True
    ):
        likeness = torch.where(there[..., None], similarity(config, some, own), -torch.inf)
        found = match(matcher, likeness, valid)
        matches.append(torch.where(there.any(1, keepdim=True), found, BACKGROUND))
    return torch.cat(matches)


def rows_of_objects(objects: Sequence[Tensor], image_of: Tensor, object_of: Tensor) -> Tensor:
    """Return the row of each object in `after_none`: int64, of the shape of `object_of`.

    `object_of` is the place of an object among those of the image `image_of`, both int64; negative where there is none.
    """
    firsts = tensor_on(image_of.device, [*accumulate(map(len, objects[:-1]), initial=0)], torch.int64)
    return torch.where(object_of >= 0, firsts[image_of] + object_of + 1, 0)


def rows_of_all(objects: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the row of each object in `after_none`, image by image: int64 (images, most of an image), 0 beyond."""
    most, first, rows = max(map(len, objects)), 1, []
    for each in objects:
        rows.append([*range(first, first := first + len(each)), *[0] * (most - len(each))])
    return tensor_on(device, rows, torch.int64)


def after_none(values: Sequence[Tensor]) -> Tensor:
    """Join the rows of the objects of all images, after one of zeros that stands for none."""
    return torch.cat([values[0].new_zeros(1, *values[0].shape[1:]), *values])


def _by_thresholds(
    best: Tensor, object_of: Tensor, high: float, low: float, *, below: int = BACKGROUND, between: int = IGNORED
) -> Tensor:
    return torch.where(best < low, below, torch.where(best < high, between, object_of))


def _argmax_matches(matcher: blocks.ArgmaxMatcher, likeness: Tensor, counts: Tensor | None) -> Tensor:
    best, object_of = likeness.max(-2)
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
    number, size = likeness.shape[-2:]
    objects, none = torch.arange(number, device=likeness.device).expand(likeness.shape[:-1]), -1 if last else number
    forced = objects.new_full((*likeness.shape[:-2], size), none)
    if counts is not None:
        objects = torch.where(counts, objects, none)
    forced = forced.scatter_reduce(-1, likeness.argmax(-1), objects, "amax" if last else "amin")
    return forced if last else torch.where(forced < number, forced, -1)


def _bipartite_matches(likeness: Tensor, counts: Tensor | None) -> Tensor:
    """Give the most similar pair to each other, then the most similar of the others, until no object is left."""
    number, size = likeness.shape[-2:]
    left = likeness.clone() if counts is None else likeness.masked_fill(~counts[..., None], -torch.inf)
    matches = likeness.new_full((*likeness.shape[:-2], size), BACKGROUND, dtype=torch.int64)
    for _ in range(min(number, size)):
        found, best = left.flatten(-2).max(-1, keepdim=True)
        row, column = best // size, best % size
        matches.scatter_(-1, column, torch.where(found > -torch.inf, row, matches.gather(-1, column)))
        left.scatter_(-2, row[..., None].expand(*row.shape, size), -torch.inf)
        left.scatter_(-1, column[..., None, :].expand(*row.shape[:-1], number, 1), -torch.inf)
    return matches


class Sample(NamedTuple):
    """What was drawn on all images, one image after the other."""

    places: Tensor
    """int64 (drawn,): of the anchors, counted over all images, in their order."""
    lengths: list[int]
    num_positives: list[int]
    """How many of these learn an object."""


def kinds(matches: Tensor) -> Tensor:
    """Count the anchors of each image that learn an object, and those of the background: int64 (2, images)."""
    return torch.stack([(matches >= 0).sum(1), (matches == BACKGROUND).sum(1)])


def balanced_sample(
    matches: Tensor, count: int, positive_fraction: float, numbers: Sequence[list[int]] | None = None
) -> Sample:
    """Draw anchors that learn objects up to a share of the sample, and fill it with those of the background.

    As torchvision's and the Object Detection API's BalancedPositiveNegativeSampler. It draws from torch's global
    stream, for each image in turn a permutation of its positives and one of its negatives, as torchvision does: from
    the same seed the samples are the same. Matches are int64 (images, anchors); what is ignored is not drawn, and where
    there are too few negatives the sample is smaller. `numbers` are those of `kinds`, if the host has read them
    already.
    """
    numbers = kinds(matches).tolist() if numbers is None else numbers
    flat, drawn, lengths, num_positives = matches.flatten(), [], [], []
    positive, negative = (
        torch.split(places_of(mask, sum(number)), number)
        for mask, number in zip((flat >= 0, flat == BACKGROUND), numbers, strict=True)
    )
    for positives, negatives in zip(positive, negative, strict=True):
        some = positives[_permutation(positives)[: int(count * positive_fraction)]]
        others = negatives[_permutation(negatives)[: count - len(some)]]
        drawn += [some, others]
        num_positives.append(len(some))
        lengths.append(len(some) + len(others))
    return Sample(torch.cat(drawn).sort().values, lengths, num_positives)


def places_of(mask: Tensor, number: int) -> Tensor:
    """Return the places, int64 (number,), where a mask (n,) is True: so many, which the host knows."""
    # Without a read; on a CPU it would be slower.
    return torch.nonzero_static(mask, size=number)[:, 0] if reading_waits(mask.device) else mask.nonzero()[:, 0]


def hard_examples(
    config: blocks.HardExampleMiner, losses: Tensor, boxes: Tensor, positive: Tensor, negative: Tensor
) -> Tensor:
    """Choose the anchors with the largest losses, without near duplicates: bool (batch, anchors).

    As the Object Detection API's `HardExampleMiner`: NMS with losses in place of scores, then at most so many negatives
    for each positive of their image. Boxes are those predicted, (batch, anchors, 4), all else is (batch, anchors);
    `positive` are the anchors that learn objects, `negative` those of the background.
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
