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
from lockstep.errors import InputError
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

    Args:
        boxes: (n, 4).
        scores: (n,).
        labels: int64 (n,), 0 or more.
        iou_threshold: boxes that overlap a better one of their label by more are dropped.
        max_detections: the best so many remain; None: all.
    """
    return _first(_kept(_Candidates(boxes, scores, labels), iou_threshold), max_detections, scores)


def nms_mask(boxes: Tensor, iou_threshold: float, valid: Tensor | None = None) -> Tensor:
    """Say which boxes greedy NMS keeps, on many images at once: bool (batch, n).

    Args:
        boxes: (batch, n, 4), best first.
        iou_threshold: boxes that overlap a better one by more are dropped.
        valid: bool (batch, n), the boxes that take part; None: all.
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

    Args:
        boxes: (anchors, q, 4), q being 1, or the number of classes where each has boxes of its own.
        scores: (anchors, classes), without the background.
        limits: which of them remain.
    """
    if torch.compiler.is_exporting():
        return fixed_detections(boxes, scores, limits)
    score_threshold, iou_threshold, most, competing, most_of_class = limits
    candidates = _candidates(boxes, scores, score_threshold)
    kept = _kept(candidates, iou_threshold, competing=competing, most_of_class=most_of_class)
    return candidates.at(_first(kept, most, scores)).detections()


def postprocess(
    config: PostProcessing, boxes: Tensor, logits: Tensor, shape: Shape, *, has_background: bool = True
) -> list[Detections]:
    """Choose the detections of each image as the Object Detection API does.

    Boxes are clipped to the image once they are chosen; those without area in it give way to the next best.

    Args:
        config: thresholds, numbers, and how logits become scores.
        boxes: (batch, anchors, q, 4) in pixels, q being 1, or the number of classes where each has boxes of its own.
        logits: (batch, anchors, classes), those of the background first if there are some.
        shape: height and width of the image.
        has_background: leave out the scores of the first class.
    """
    scores = convert_scores(config, logits)[..., int(has_background) :]
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
    if torch.compiler.is_exporting():
        return _exported(config, boxes, scores, shape)
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


def _exported(config: BatchNonMaxSuppression, boxes: Tensor, scores: Tensor, shape: Shape) -> Detections:
    if config.use_class_agnostic_nms or config.soft_nms_sigma:
        raise InputError(
            "A graph has no such non-maximum suppression.",
            given="soft_nms_sigma above 0" if config.soft_nms_sigma else "use_class_agnostic_nms=true",
            expected="greedy suppression, each class by itself",
            hint="export the tensors alone, as .safetensors",
        )
    most, of_class = config.max_total_detections, config.max_detections_per_class
    limits = NmsLimits(config.score_threshold, config.iou_threshold, most, max_detections_per_class=of_class)
    return fixed_detections(boxes, scores, limits, shape)


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

    Args:
        candidates: in any order.
        iou_threshold: what overlaps a better one of its class by more is dropped.
        competing: the best so many of each class take part.
        most_of_class: the best so many of each class remain.
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
    """Say which boxes greedy NMS keeps: bool (..., n).

    A box is kept if it is free and no better one overlaps it that is kept. Starting from all that are free, each round
    settles at least one more box for good, in practice many: a few rounds suffice.

    Args:
        overlaps: bool (..., n, n), which boxes overlap, best first.
        free: bool (..., n), which boxes may be kept.
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


def fixed_detections(boxes: Tensor, scores: Tensor, limits: NmsLimits, shape: Shape | None = None) -> Detections:
    """Choose the detections of one image, each class by itself, in a fixed number of steps.

    It is `multiclass_nms` for graphs that `torch.export` traces, where no shape depends on data: below the detections
    are rows of zeros. With a shape, height and width, boxes are clipped to it once they are chosen, and those without
    area there are dropped.
    """
    # The loop of a traced graph; torch.onnx knows it, too.
    from torch._higher_order_ops.scan import scan

    score_threshold, iou_threshold, most, competing, most_of_class = limits
    num_anchors, num_classes = scores.shape
    number = min(competing or num_anchors, num_anchors)
    # Each class is a row from here on. ONNX has no stable sort: equal scores may go in another order.
    ranked, places = scores.T.topk(number)
    left = torch.where(ranked > score_threshold, ranked, -torch.inf)
    by_class = boxes.transpose(0, 1).expand(num_classes, -1, -1)
    candidates = by_class.gather(1, places[:, :, None].expand(-1, -1, 4))

    def choose(left: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        """Take the best box of each class, and drop it and those that overlap it."""
        score, place = left.max(1)
        chosen = candidates.gather(1, place[:, None, None].expand(-1, 1, 4))
        dropped = (_traced_iou(chosen, candidates) > iou_threshold).scatter(1, place[:, None], True)
        return torch.where(dropped, -torch.inf, left), torch.cat([score[:, None], chosen[:, 0]], dim=1)

    steps = torch.arange(min(most_of_class or most, most, number))
    _, found = scan(choose, left, steps)  # (steps, classes, 5)
    flat = found.transpose(0, 1).flatten(0, 1)
    found_boxes = flat[:, 1:] if shape is None else clip(flat[:, 1:], shape)
    kept = flat[:, 0] if shape is None else torch.where(area(found_boxes) > 0, flat[:, 0], -torch.inf)
    top, rows = kept.topk(min(most, len(flat)))
    is_found = top > -torch.inf
    labels = rows // len(steps) + FIRST_LABEL
    return Detections(
        torch.where(is_found[:, None], found_boxes[rows], 0.0),
        torch.where(is_found, top, 0.0),
        torch.where(is_found, labels, 0),
    )


def _traced_iou(chosen: Tensor, boxes: Tensor) -> Tensor:
    """Compute the IoU of a box of each class, (classes, 1, 4), with all of them: (classes, n, 4) to (classes, n)."""
    sides = (torch.minimum(chosen[..., 2:], boxes[..., 2:]) - torch.maximum(chosen[..., :2], boxes[..., :2])).clamp(0)
    common = sides[..., 0] * sides[..., 1]
    return common / (area(chosen) + area(boxes) - common)
