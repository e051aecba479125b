"""Boxes as a detector predicts them: relative to its anchors.

Boxes and anchors are float tensors (..., 4) of top, left, bottom and right, all in the same unit, and codes (...,
`code_size`). Their shapes broadcast: codes (batch, anchors, 4) go with anchors (anchors, 4).
"""

from __future__ import annotations

import math
from typing import assert_never

import torch
from torch import Tensor

from lockstep.detection.blocks import BoxCoder, FasterRcnnBoxCoder, LinearBoxCoder, SquareBoxCoder, XYBoxCoder
from lockstep.tensors import tensor_on

AnyBoxCoder = BoxCoder | XYBoxCoder | LinearBoxCoder

_EPSILON = 1e-8  # the reference's, for the logarithm of a box without area
_LARGEST_LOG = 80.0  # the reference's: e ** x is soon too large for float32
_LARGEST_XY_LOG = math.log(1000 / 16)  # torchvision's


def code_size(coder: AnyBoxCoder) -> int:
    """Return how many numbers encode a box."""
    return 3 if isinstance(coder, SquareBoxCoder) else 4


def encode(coder: AnyBoxCoder, boxes: Tensor, anchors: Tensor) -> Tensor:
    """Encode boxes (..., 4) relative to anchors (..., 4), to codes (..., `code_size`)."""
    match coder:
        case FasterRcnnBoxCoder():
            return torch.stack(_offsets(boxes, anchors), -1) * _factors(coder, boxes)
        case XYBoxCoder():
            y, x, height, width = _offsets(boxes, anchors)
            return torch.stack([x, y, width, height], -1) * _factors(coder, boxes)
        case SquareBoxCoder():
            (centre, size), (box_centre, box_size) = _centre_and_size(anchors), _centre_and_size(boxes)
            side, box_side = _side(size) + _EPSILON, _side(box_size) + _EPSILON
            return torch.cat([(box_centre - centre) / side, (box_side / side).log()], -1) * _factors(coder, boxes)
        case LinearBoxCoder():
            centre, size = _centre_and_size(anchors)
            distances = torch.cat([centre - boxes[..., :2], boxes[..., 2:] - centre], -1) / torch.cat([size, size], -1)
            return _swapped(distances)
    assert_never(coder)


def decode(coder: AnyBoxCoder, codes: Tensor, anchors: Tensor) -> Tensor:
    """Decode codes (..., `code_size`) relative to anchors (..., 4), to boxes (..., 4)."""
    centre, size = _centre_and_size(anchors)
    if isinstance(coder, LinearBoxCoder):
        distances = _swapped(codes) * torch.cat([size, size], -1)
        return torch.cat([centre - distances[..., :2], centre + distances[..., 2:]], -1)
    codes, largest_log = codes / _factors(coder, codes), _LARGEST_LOG
    if isinstance(coder, XYBoxCoder):
        codes, largest_log = _swapped(codes), _LARGEST_XY_LOG
    if isinstance(coder, SquareBoxCoder):
        size = _side(size)
    box_centre, half = codes[..., :2] * size + centre, 0.5 * (codes[..., 2:].clamp(max=largest_log).exp() * size)
    return torch.cat([box_centre - half, box_centre + half], -1)


def _offsets(boxes: Tensor, anchors: Tensor) -> tuple[Tensor, ...]:
    """Return y, x and the logarithms of height and width, relative to the anchors."""
    (centre, size), (box_centre, box_size) = _centre_and_size(anchors), _centre_and_size(boxes)
    size = size + _EPSILON
    return *((box_centre - centre) / size).unbind(-1), *((box_size + _EPSILON) / size).log().unbind(-1)


def _factors(coder: FasterRcnnBoxCoder | XYBoxCoder | SquareBoxCoder, like: Tensor) -> Tensor:
    match coder:
        case XYBoxCoder():
            numbers = [*coder.weights]
        case SquareBoxCoder():
            numbers = [coder.y_scale, coder.x_scale, coder.length_scale]
        case _:
            numbers = [coder.y_scale, coder.x_scale, coder.height_scale, coder.width_scale]
    return tensor_on(like.device, numbers, like.dtype)


def _centre_and_size(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return y and x of the centre, and height and width: (..., 2) each."""
    size = boxes[..., 2:] - boxes[..., :2]
    return boxes[..., :2] + 0.5 * size, size


def _side(size: Tensor) -> Tensor:
    return size.prod(-1, keepdim=True).sqrt()


def _swapped(code: Tensor) -> Tensor:
    """Return x before y as y before x, or the other way round: in the first half of a code and in the second."""
    first, second, third, fourth = code.unbind(-1)
    return torch.stack([second, first, fourth, third], -1)
