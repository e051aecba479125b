"""Non-maximum suppression of a fixed number of steps, for graphs that `torch.export` traces: no shape depends on data.

The detections are those of `lockstep.detection.nms`, below them rows of zeros up to the most that there may be.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The loop of a traced graph; torch.onnx knows it, too.
from torch._higher_order_ops.scan import scan

from lockstep.detection.boxes import area, clip
from lockstep.detection.detector import Detections
from lockstep.detection.targets import FIRST_LABEL


def fixed_detections(
    boxes: Tensor,
    scores: Tensor,
    *,
    score_threshold: float,
    iou_threshold: float,
    max_detections: int,
    candidates_per_class: int | None = None,
    max_detections_per_class: int | None = None,
    shape: tuple[int, int] | None = None,
) -> Detections:
    """Choose the detections of one image, each class by itself.

    Args:
        boxes: (anchors, q, 4), q being 1, or the number of classes where each has boxes of its own.
        scores: (anchors, classes), without the background.
        score_threshold: what has no higher score is dropped.
        iou_threshold: boxes that overlap a better one of their class by more are dropped.
        max_detections: the best so many remain.
        candidates_per_class: the best so many of each class compete; None: all.
        max_detections_per_class: the best so many of each class remain; None: `max_detections`.
        shape: height and width that boxes are clipped to once they are chosen; without area there they are dropped.
    """
    num_anchors, num_classes = scores.shape
    number = min(candidates_per_class or num_anchors, num_anchors)
    # Each class is a row from here on. ONNX has no stable sort: equal scores may go in another order.
    ranked, places = scores.T.topk(number)
    left = torch.where(ranked > score_threshold, ranked, -torch.inf)
    by_class = boxes.transpose(0, 1).expand(num_classes, -1, -1)
    candidates = by_class.gather(1, places[:, :, None].expand(-1, -1, 4))

    def choose(left: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        """Take the best box of each class, and drop it and those that overlap it."""
        score, place = left.max(1)
        chosen = candidates.gather(1, place[:, None, None].expand(-1, 1, 4))
        dropped = (_iou(chosen, candidates) > iou_threshold).scatter(1, place[:, None], True)
        return torch.where(dropped, -torch.inf, left), torch.cat([score[:, None], chosen[:, 0]], dim=1)

    steps = torch.arange(min(max_detections_per_class or max_detections, max_detections, number))
    _, found = scan(choose, left, steps)  # (steps, classes, 5)
    flat = found.transpose(0, 1).flatten(0, 1)
    found_boxes = flat[:, 1:] if shape is None else clip(flat[:, 1:], shape)
    kept = flat[:, 0] if shape is None else torch.where(area(found_boxes) > 0, flat[:, 0], -torch.inf)
    best, rows = kept.topk(min(max_detections, len(flat)))
    is_found = best > -torch.inf
    labels = rows // len(steps) + FIRST_LABEL
    return Detections(
        torch.where(is_found[:, None], found_boxes[rows], 0.0),
        torch.where(is_found, best, 0.0),
        torch.where(is_found, labels, 0),
    )


def _iou(chosen: Tensor, boxes: Tensor) -> Tensor:
    """Compute the IoU of a box of each class, (classes, 1, 4), with all of them: (classes, n, 4) to (classes, n)."""
    sides = (torch.minimum(chosen[..., 2:], boxes[..., 2:]) - torch.maximum(chosen[..., :2], boxes[..., :2])).clamp(0)
    common = sides[..., 0] * sides[..., 1]
    return common / (area(chosen) + area(boxes) - common)
