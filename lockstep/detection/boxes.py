"""How boxes lie to each other: areas, IoU and its relatives, of all pairs or of boxes side by side.

Boxes are float tensors (..., 4) of top, left, bottom and right, all in the same unit.
"""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from lockstep.detection.blocks import IoaSimilarity, IouSimilarity, Similarity, ThresholdedIouSimilarity

Shape = tuple[int, int]
"""Height and width, in pixels or cells."""
_EPSILON = 1e-7  # torchvision's, for boxes without area


def area(boxes: Tensor) -> Tensor:
    """Compute height times width: (..., 4) to (...)."""
    height, width = (boxes[..., 2:] - boxes[..., :2]).unbind(-1)
    return height * width


def clip(boxes: Tensor, shape: Shape) -> Tensor:
    """Move edges that are outside of an image of this height and width to its border."""
    height, width = shape
    top, left, bottom, right = boxes.unbind(-1)
    return torch.stack([top.clamp(0, height), left.clamp(0, width), bottom.clamp(0, height), right.clamp(0, width)], -1)


def intersection(a: Tensor, b: Tensor) -> Tensor:
    """Compute the area that each pair of boxes has in common: (..., n, 4) and (..., m, 4) to (..., n, m)."""
    return _common(a[..., :, None, :], b[..., None, :, :])


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Compute intersection over union of each pair: (..., n, 4) and (..., m, 4) to (..., n, m).

    It is 0 where both are without area.
    """
    common = intersection(a, b)
    return _share(common, area(a)[..., :, None] + area(b)[..., None, :] - common)


def ioa(a: Tensor, b: Tensor) -> Tensor:
    """Compute the share of each box of `b` that each of `a` covers: (..., n, 4) and (..., m, 4) to (..., n, m)."""
    return _share(intersection(a, b), area(b)[..., None, :])


def matched_iou(a: Tensor, b: Tensor) -> Tensor:
    """Compute intersection over union of boxes side by side: (..., 4) and (..., 4) to (...)."""
    common = _common(a, b)
    return common / (area(a) + area(b) - common + _EPSILON)


def matched_giou(a: Tensor, b: Tensor) -> Tensor:
    """Compute the generalised IoU of boxes side by side: (..., 4) and (..., 4) to (...).

    The share of the smallest box around both that neither covers is subtracted (Rezatofighi et al., 2019).
    """
    common = _common(a, b)
    union = area(a) + area(b) - common
    # Not `prod`, whose gradient reads from the device whether there are zeros.
    height, width = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).unbind(-1)
    around = height * width
    return common / (union + _EPSILON) - (around - union) / (around + _EPSILON)


def similarity(config: Similarity, objects: Tensor, anchors: Tensor) -> Tensor:
    """Compute how similar each object is to each anchor: (..., n, 4) and (..., m, 4) to (..., n, m)."""
    match config:
        case IouSimilarity():
            return iou(objects, anchors)
        case IoaSimilarity():
            return ioa(objects, anchors)
        case ThresholdedIouSimilarity():
            return (iou(objects, anchors) > config.iou_threshold).to(objects.dtype)
    assert_never(config)


def _common(a: Tensor, b: Tensor) -> Tensor:
    # Both sides by themselves: a tensor with a last dimension of 2 takes three times as long.
    height = torch.minimum(a[..., 2], b[..., 2]) - torch.maximum(a[..., 0], b[..., 0])
    width = torch.minimum(a[..., 3], b[..., 3]) - torch.maximum(a[..., 1], b[..., 1])
    return height.clamp(min=0) * width.clamp(min=0)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(part > 0, part / whole, 0)
