"""Non-maximum suppression in plain torch: which of many boxes become the detections of an image.

Greedy NMS keeps the best box, drops those that overlap it, and so on. The fate of a box depends on better ones alone.
So boxes are taken best first, a block at a time, against those kept so far: matrices in place of a loop over boxes, and
the work ends when enough boxes are kept, mostly within the first block. Equal scores go in the order of their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.detection.blocks import BatchNonMaxSuppression, PostProcessing
from lockstep.detection.boxes import Shape, area, clip
from lockstep.detection.detector import Detections
from lockstep.detection.targets import FIRST_LABEL
from lockstep.tensors import reading_waits

_BLOCK = 256
_SORTED_FIRST = 1000
_PAIRS = 2**26
"""Pairs of boxes that are compared at once where a launch costs: 256 MB in float32."""
_ROUNDS = 8
"""Rounds after which it is looked first whether what is kept is settled; the miners of SSDs need two."""


def batched_nms(
    boxes: Tensor, scores: Tensor, labels: Tensor, iou_threshold: float, max_detections: int | None = None
) -> Tensor:
    """Return the places of the boxes that remain, int64 (kept,), best first, where only boxes of one label compete.

    Boxes are (n, 4), scores (n,), labels int64 (n,), 0 or more. What overlaps a better one of its label by more than
    the threshold is dropped.
    """
    return _first(_kept(_Candidates(boxes, scores, labels), iou_threshold), max_detections, scores)


def nms_mask(boxes: Tensor, iou_threshold: float, valid: Tensor | None = None) -> Tensor:
    """Say which boxes greedy NMS keeps, on many images at once: bool (batch, n), of boxes (batch, n, 4), best first.

    What overlaps a better one by more than the threshold is dropped. `valid`, bool (batch, n), are those that take
    part.
    """
    rounds = _ROUNDS
    while True:
        kept, is_settled = tried_nms(boxes, iou_threshold, valid, rounds)
        if is_settled:  # where reading waits, all images wait for it once
            return kept
        rounds *= 4


def tried_nms(boxes: Tensor, iou_threshold: float, valid: Tensor | None, rounds: int) -> tuple[Tensor, Tensor]:
    """Say as `nms_mask` which boxes remain, without a read, and whether that is settled: bool (batch, n) and bool ().

    Where reading waits so many rounds are made and the host is not asked: it is settled if no box depends on a chain of
    as many better ones, each of which the one before would drop. On a CPU it is always settled.
    """
    kept = boxes.new_ones(boxes.shape[:2], dtype=torch.bool) if valid is None else valid.clone()
    is_settled = kept.new_ones(())
    size, waits = _BLOCK, reading_waits(boxes.device)
    if waits:  # larger ones are fewer launches
        size = max(_PAIRS // max(kept.numel(), 1), size)
    for start in range(0, boxes.shape[1], size):
        block = slice(start, start + size)
        overlaps = _iou(boxes[:, : block.stop], boxes[:, block]) > iou_threshold
        free = kept[:, block] & ~_hit(kept[:, :start], overlaps[:, :start])
        if waits:
            kept[:, block], is_last = _greedy_after(rounds, overlaps[:, start:], free)
            is_settled &= is_last
        else:
            kept[:, block] = _greedy(overlaps[:, start:], free)
    return kept, is_settled


def best(scores: Tensor, count: int) -> Tensor:
    """Return the places of the best scores, int64 (count,), best first, equal ones in the order of their places.

    `torch.topk` does not say which of equal scores it takes.
    """
    if count >= len(scores):
        return scores.argsort(descending=True, stable=True)
    least = scores.topk(count).values[-1]
    above = (scores > least).nonzero()[:, 0]
    places = torch.cat([above, (scores == least).nonzero()[: count - len(above), 0]])
    return places[scores[places].argsort(descending=True, stable=True)]


class NmsLimits(NamedTuple):
    """The limits by which boxes of an image become its detections, each class by itself."""

    score_threshold: float
    """What has no higher score is dropped."""
    iou_threshold: float
    """Boxes that overlap a better one of their class by more are dropped."""
    max_detections: int
    """The best so many remain."""
    candidates_per_class: int | None = None
    """The best so many of each class compete; None: all."""
    max_detections_per_class: int | None = None
    """The best so many of each class remain; None: `max_detections`."""


def multiclass_nms(boxes: Tensor, scores: Tensor, limits: NmsLimits) -> Detections:
    """Choose the detections of one image as torchvision's SSD and R-CNN do.

    Boxes are (anchors, q, 4), q being 1, or the number of classes where each has boxes of its own; scores are (anchors,
    classes), without the background.
    """
    if torch.compiler.is_exporting():
        return Detections(*(each[0] for each in fixed_detections(boxes[None], scores[None], limits)[:3]))
    score_threshold, iou_threshold, most, competing, most_of_class = limits
    candidates = _candidates(boxes, scores, score_threshold)
    kept = _kept(candidates, iou_threshold, competing=competing, most_of_class=most_of_class)
    return candidates.at(_first(kept, most, scores)).detections()


def detections_of_all(boxes: Tensor, scores: Tensor, limits: NmsLimits) -> list[Detections]:
    """Choose the detections of each image as `multiclass_nms` does; in a traced graph they are one block.

    Boxes are (batch, anchors, q, 4), scores (batch, anchors, classes).
    """
    if torch.compiler.is_exporting():
        return [fixed_detections(boxes, scores, limits)]
    return [multiclass_nms(*of_image, limits) for of_image in zip(boxes, scores, strict=True)]


def postprocess(
    config: PostProcessing, boxes: Tensor, logits: Tensor, shape: Shape, *, has_background: bool = True
) -> list[Detections]:
    """Choose the detections of each image as the Object Detection API does; in a traced graph they are one block.

    Boxes, (batch, anchors, q, 4) in pixels, q being 1, or the number of classes where each has boxes of its own, are
    clipped to the image once they are chosen; those without area in it give way to the next best. Logits are (batch,
    anchors, classes), those of the background first if there is one, whose scores are left out.
    """
    scores = convert_scores(config, logits)[..., int(has_background) :]
    if torch.compiler.is_exporting():
        return [_fixed_of_api(config.batch_non_max_suppression, boxes, scores, shape)]
    # One by one: how many candidates must be looked at differs, and no image may change the detections of another.
    return [
        _detections(config.batch_non_max_suppression, *of_image, shape) for of_image in zip(boxes, scores, strict=True)
    ]


def convert_scores(config: PostProcessing, logits: Tensor) -> Tensor:
    """Make scores of logits: (..., classes) to (..., classes)."""
    scaled = logits / config.logit_scale
    if config.score_converter == "identity":
        return scaled
    return scaled.sigmoid() if config.score_converter == "sigmoid" else scaled.softmax(-1)


class _Candidates(NamedTuple):
    """Boxes (n, 4), their scores (n,), and their classes (n,) counted from 0; only boxes of one class compete."""

    boxes: Tensor
    scores: Tensor
    classes: Tensor

    def at(self, places: Tensor) -> _Candidates:
        return _Candidates(self.boxes[places], self.scores[places], self.classes[places])

    def detections(self) -> Detections:
        return Detections(self.boxes, self.scores, self.classes + FIRST_LABEL)


def _candidates(boxes: Tensor, scores: Tensor, score_threshold: float) -> _Candidates:
    """Take what has a score over the threshold from boxes (anchors, q, 4) and scores (anchors, classes)."""
    num_classes = scores.shape[1]
    places = (scores > score_threshold).flatten().nonzero()[:, 0]
    of_boxes = places if boxes.shape[1] > 1 else places // num_classes
    return _Candidates(boxes.flatten(0, 1)[of_boxes], scores.flatten()[places], places % num_classes)


def _detections(config: BatchNonMaxSuppression, boxes: Tensor, scores: Tensor, shape: Shape) -> Detections:
    """Choose the detections of one image: boxes (anchors, q, 4), scores (anchors, classes)."""
    if config.use_class_agnostic_nms:
        is_best = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.argmax(1, keepdim=True), True)
        scores = scores.masked_fill(~is_best, -torch.inf)
    candidates = _candidates(boxes, scores, config.score_threshold)
    found, most = [candidates.at(_no_places(scores))], config.max_total_detections
    for chosen in _chosen(config, candidates):
        clipped = chosen._replace(boxes=clip(chosen.boxes, shape))
        found.append(clipped.at((area(clipped.boxes) > 0).nonzero()[:, 0]))
        if sum(len(each.scores) for each in found) >= most:
            break
    joined = _Candidates(*(torch.cat(part)[:most] for part in zip(*found, strict=True)))
    return joined.detections()


def _chosen(config: BatchNonMaxSuppression, candidates: _Candidates) -> Iterator[_Candidates]:
    """Yield the candidates that remain, with the scores they have then, best first."""
    by_class = not config.use_class_agnostic_nms
    rivals = candidates if by_class else candidates._replace(classes=torch.zeros_like(candidates.classes))
    most = config.max_detections_per_class if by_class else config.max_total_detections
    if config.soft_nms_sigma:
        lowered = _softly_kept(rivals, config.soft_nms_sigma, config.score_threshold, most)
        for place, score in lowered:
            yield candidates.at(place)._replace(scores=score)
        return
    for places in _kept(rivals, config.iou_threshold, most_of_class=most):
        yield candidates.at(places)


def _kept(
    candidates: _Candidates, iou_threshold: float, *, competing: int | None = None, most_of_class: int | None = None
) -> Iterator[Tensor]:
    """Yield the places of what greedy NMS keeps, best first, a block at a time.

    What overlaps a better one of its class by more than the threshold is dropped. The best `competing` of each class
    take part, and the best `most_of_class` remain.
    """
    taking_part, remaining = _Quota(candidates, competing), _Quota(candidates, most_of_class)
    kept = _no_places(candidates.scores)
    for places in _best_first(candidates.scores):
        block = places[taking_part.admits(candidates.classes[places])]
        rivals = torch.cat([kept, block])
        boxes, classes = candidates.boxes[rivals], candidates.classes[rivals]
        overlaps = _iou(boxes, boxes[len(kept) :]) > iou_threshold
        overlaps &= classes[:, None] == classes[len(kept) :]
        free = ~overlaps[: len(kept)].any(0)
        block = block[_greedy(overlaps[len(kept) :], free)]
        block = block[remaining.admits(candidates.classes[block])]
        kept = torch.cat([kept, block])
        yield block


def _best_first(scores: Tensor) -> Iterator[Tensor]:
    """Yield the places of all scores, best first, a block at a time; the rest is sorted once it is asked for."""
    first = best(scores, _SORTED_FIRST)
    yield from torch.split(first, _BLOCK)
    if len(first) < len(scores):
        rest = torch.ones_like(scores, dtype=torch.bool).index_fill_(0, first, False).nonzero()[:, 0]
        yield from torch.split(rest[scores[rest].argsort(descending=True, stable=True)], _BLOCK)


class _Quota:
    """Lets the first so many of each class pass; None: all."""

    def __init__(self, candidates: _Candidates, limit: int | None) -> None:
        self.limit = limit
        most = int(candidates.classes.max()) if len(candidates.classes) else 0
        self.seen = candidates.classes.new_zeros(most + 1)

    def admits(self, classes: Tensor) -> Tensor:
        """Say which of the next ones pass."""
        if self.limit is None:
            return torch.ones_like(classes, dtype=torch.bool)
        ordered, order = classes.sort(stable=True)
        rank = torch.empty_like(classes)
        rank[order] = torch.arange(len(classes), device=classes.device) - torch.searchsorted(ordered, ordered)
        rank += self.seen[classes]
        self.seen += classes.bincount(minlength=len(self.seen))
        return rank < self.limit


def _softly_kept(
    candidates: _Candidates, sigma: float, score_threshold: float, most_of_class: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the place and the lowered score of what Soft-NMS keeps, best first, one at a time: each of shape (1,)."""
    boxes, scores, classes = candidates
    remaining = _Quota(candidates, most_of_class)
    alive = scores > score_threshold
    while alive.any():
        place = torch.where(alive, scores, -torch.inf).argmax()[None]
        rivals = classes == classes[place]
        if remaining.admits(classes[place]).all():
            yield place, scores[place]
        else:
            alive &= ~rivals
        # Boxes without area overlap nothing.
        overlaps = _iou(boxes[place], boxes)[0].nan_to_num(0) * rivals
        scores = scores * torch.exp(overlaps**2 * (-0.5 / sigma))
        alive = (alive & (scores > score_threshold)).index_fill(0, place, False)


def _greedy(overlaps: Tensor, free: Tensor) -> Tensor:
    """Say which boxes greedy NMS keeps, bool (..., n), by what is free, and what overlaps: (..., n, n), best first.

    A box is kept if it is free and no better one overlaps it that is kept. Starting from all that are free, each round
    settles at least one more box for good, in practice many: a few rounds suffice.
    """
    better = overlaps.triu(1)
    kept = free
    while True:
        settled = free & ~_hit(kept, better)
        if torch.equal(settled, kept):
            return kept
        kept = settled


def _greedy_after(rounds: int, overlaps: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """Say which boxes `_greedy` keeps after so many rounds, bool (batch, n), and whether the last changed none."""
    with torch.autocast(free.device.type, enabled=False):  # it would cast the overlaps in each round
        better, at_first = overlaps.triu(1).to(torch.float16), free.to(torch.float16)[:, None]
        kept = before = at_first
        for _ in range(rounds):
            # 1 less how many better ones overlap it, of those that are kept: two launches.
            before, kept = kept, torch.baddbmm(at_first, kept, better, alpha=-1).relu_()
    return kept[:, 0] > 0, (kept == before).all()


def _hit(kept: Tensor, overlaps: Tensor) -> Tensor:
    """Say which boxes overlap a kept one: bool (..., n) and (..., n, m) to (..., m)."""
    return (kept.to(torch.float32)[..., None, :] @ overlaps.to(torch.float32))[..., 0, :] > 0


def _iou(a: Tensor, b: Tensor) -> Tensor:
    """Compute intersection over union of each pair: (..., n, 4) and (..., m, 4) to (..., n, m).

    As `boxes.iou`, for large matrices: each edge by itself, and in place.
    """
    top, left, bottom, right = a[..., :, None, :].unbind(-1)
    other_top, other_left, other_bottom, other_right = b[..., None, :, :].unbind(-1)
    height = torch.minimum(bottom, other_bottom).sub_(torch.maximum(top, other_top)).clamp_(min=0)
    width = torch.minimum(right, other_right).sub_(torch.maximum(left, other_left)).clamp_(min=0)
    common = height.mul_(width)
    union = (area(a)[..., :, None] + area(b)[..., None, :]).sub_(common)
    return common.div_(union)


def _first(kept: Iterator[Tensor], count: int | None, scores: Tensor) -> Tensor:
    """Join blocks of places until there are so many; None: all."""
    found = [_no_places(scores)]
    for places in kept:
        found.append(places)
        if count is not None and sum(map(len, found)) >= count:
            break
    return torch.cat(found)[:count]


def _no_places(scores: Tensor) -> Tensor:
    return scores.new_empty(0, dtype=torch.int64)


def fixed_detections(
    boxes: Tensor, scores: Tensor, limits: NmsLimits, shape: Shape | None = None, *, sigma: float = 0.0
) -> Detections:
    """Choose the detections of images, each class by itself, for graphs: `multiclass_nms` by `fixed_nms`.

    Boxes are (batch, anchors, q, 4), q being 1, or the number of classes where each has boxes of its own; scores are
    (batch, anchors, classes), without the background.
    """
    num_anchors, num_classes = scores.shape[1:]
    by_class, ranked = boxes.transpose(1, 2).expand(-1, num_classes, -1, -1), scores.transpose(1, 2)
    if limits.candidates_per_class and limits.candidates_per_class < num_anchors:
        ranked, places = ranked.topk(limits.candidates_per_class)
        by_class = by_class.gather(2, _of_boxes(places))
    labels = (torch.arange(num_classes, device=scores.device) + FIRST_LABEL)[:, None].expand_as(ranked)
    return fixed_nms(by_class, ranked, labels, limits, shape, sigma=sigma)


def fixed_nms(
    boxes: Tensor,
    scores: Tensor,
    labels: Tensor,
    limits: NmsLimits,
    shape: Shape | None = None,
    *,
    sigma: float = 0.0,
    by_label: bool = False,
) -> Detections:
    """Suppress boxes in a fixed number of steps, for graphs that `torch.export` traces, where no shape depends on data.

    Args:
        boxes: (batch, rows, n, 4); only boxes of a row compete.
        scores: (batch, rows, n).
        labels: int64 (batch, rows, n), 1 or more.
        limits: which of them remain; `max_detections_per_class` of a row.
        shape: height and width that boxes are clipped to once they are chosen; what has no area there is dropped.
        sigma: above 0, scores are lowered in place of leaving boxes out (Soft-NMS).
        by_label: of a row, only boxes of one label compete.

    Returns:
        Tensors (batch, most, ...), the best first; what is below the detections is 0, their labels, too.
    """
    # The loop of a traced graph; torch.onnx knows it, too.
    from torch._higher_order_ops.scan import scan

    least, iou_threshold, most, _, most_of_class = limits

    def choose(left: Tensor, _: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Take the best box of each row, and drop it, and those that overlap it, or lower their scores."""
        score, place = left.max(-1, keepdim=True)
        overlaps = _traced_iou(boxes.gather(2, _of_boxes(place)), boxes)
        if sigma:
            lowered = left * torch.exp(overlaps.nan_to_num(0) ** 2 * (-0.5 / sigma))
            is_left = lowered > least
        else:
            lowered, is_left = left, ~(overlaps > iou_threshold)
        if by_label:
            is_left = is_left | (labels != labels.gather(2, place))
        rest = torch.where(is_left, lowered, -torch.inf).scatter(2, place, -torch.inf)
        return rest.contiguous(), (score[..., 0], place[..., 0])

    steps = torch.arange(min(most_of_class or most, most, scores.shape[2]), device=scores.device)
    first = torch.where(scores > least, scores, -torch.inf).contiguous()  # as each step leaves it
    _, (of_steps, places) = scan(choose, first, steps)  # each (steps, batch, rows)
    places = places.permute(1, 2, 0)
    kept = of_steps.permute(1, 2, 0).flatten(1)
    found, found_labels = boxes.gather(2, _of_boxes(places)).flatten(1, 2), labels.gather(2, places).flatten(1)
    if shape is not None:
        found = clip(found, shape)
        kept = torch.where(area(found) > 0, kept, -torch.inf)
    top, order = kept.topk(min(most, kept.shape[1]))
    is_found = top > -torch.inf
    return Detections(
        torch.where(is_found[..., None], found.gather(1, _of_boxes(order)), 0.0),
        torch.where(is_found, top, 0.0),
        torch.where(is_found, found_labels.gather(1, order), 0),
    )


def _fixed_of_api(config: BatchNonMaxSuppression, boxes: Tensor, scores: Tensor, shape: Shape) -> Detections:
    """Choose as `_detections` does, for graphs: boxes (batch, anchors, q, 4), scores (batch, anchors, classes)."""
    most, sigma = config.max_total_detections, config.soft_nms_sigma
    limits = NmsLimits(config.score_threshold, config.iou_threshold, most)
    if not config.use_class_agnostic_nms:
        limits = limits._replace(max_detections_per_class=config.max_detections_per_class)
        return fixed_detections(boxes, scores, limits, shape, sigma=sigma)
    best_scores, classes = scores.max(-1)
    own = boxes.expand(-1, -1, scores.shape[2], -1).gather(2, classes[..., None, None].expand(-1, -1, 1, 4))
    labels = classes[:, None] + FIRST_LABEL
    return fixed_nms(own.transpose(1, 2), best_scores[:, None], labels, limits, shape, sigma=sigma)


def _of_boxes(places: Tensor) -> Tensor:
    """Lay out places for `gather` to take all four edges of a box: (...) to (..., 4)."""
    return places[..., None].expand(*places.shape, 4)


def _traced_iou(chosen: Tensor, boxes: Tensor) -> Tensor:
    """Compute the IoU of a box of each row, (..., rows, 1, 4), with all of its row: (..., rows, n, 4)."""
    sides = (torch.minimum(chosen[..., 2:], boxes[..., 2:]) - torch.maximum(chosen[..., :2], boxes[..., :2])).clamp(0)
    common = sides[..., 0] * sides[..., 1]
    return common / (area(chosen) + area(boxes) - common)
