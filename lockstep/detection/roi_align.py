"""The features within boxes, resampled to one size: RoIAlign, over the levels of a pyramid too, and crop_and_resize.

Each value of the result is a weighted sum of a few cells of a feature map, of which `embedding_bag` makes all at once:
the cells of all images and levels are its table, a row of channels each. It is faster than torchvision's compiled
operator, in both directions, and its backward pass adds up in the same order each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.detection.boxes import Shape, area
from lockstep.tensors import reading_waits, tensor_on

CANONICAL_SIZE = 224
CANONICAL_LEVEL = 4
_LEVEL_EPSILON = 1e-6  # torchvision's


def multiscale_roi_align(
    features: Sequence[Tensor],
    boxes: Tensor,
    image_of: Tensor,
    output_size: Shape,
    *,
    image_shape: Shape,
    sampling_ratio: int = 0,
) -> Tensor:
    """Average the features within each cell of a grid over each box (He et al.: Mask R-CNN, 2017).

    Each box is on the level of a feature pyramid that its size asks for, as in torchvision's MultiScaleRoIAlign.
    Gradients reach the features, and not the boxes.

    Args:
        features: (batch, channels, height, width) of each level, finest first, each a power of two smaller than the
            image.
        boxes: (n, 4), top, left, bottom and right in pixels.
        image_of: int64 (n,), the image that each box is on.
        output_size: rows and columns of the grid.
        image_shape: height and width of the network's input, in pixels.
        sampling_ratio: points along each side of a cell of the grid, between which the features are interpolated; 0:
            one for each cell of the feature map.

    Returns:
        (n, channels, *output_size).
    """
    scales = [2.0 ** round(math.log2(level.shape[2] / image_shape[0])) for level in features]
    level_of = _levels(boxes, -round(math.log2(scales[0])), -round(math.log2(scales[-1])))
    of_levels = [(*level.shape[2:], scale) for level, scale in zip(features, scales, strict=True)]
    of_boxes = tensor_on(boxes.device, of_levels, boxes.dtype)[level_of]
    rows, columns = _sides(boxes.detach() * of_boxes[:, 2:], of_boxes[:, :2], output_size, sampling_ratio)
    return _weighted_sums(features, image_of, level_of, rows, columns)


def crop_and_resize(features: Tensor, boxes: Tensor, image_of: Tensor, crop_size: Shape) -> Tensor:
    """Interpolate the features at the points of a grid over each box, whose corners are points of it.

    As TensorFlow's operator of this name: a point outside of the feature map is 0. Gradients reach the features, and
    not the boxes.

    Args:
        features: (batch, channels, height, width).
        boxes: (n, 4), top, left, bottom and right, where 1 is the centre of the last cell.
        image_of: int64 (n,), the image that each box is on.
        crop_size: rows and columns of the grid.

    Returns:
        (n, channels, *crop_size).
    """
    rows, columns = _crop_sides(features, boxes, crop_size)
    return _weighted_sums([features], image_of, torch.zeros_like(image_of), rows, columns)


def position_sensitive_crop(
    features: Tensor, boxes: Tensor, image_of: Tensor, parts: Shape, crop_size: Shape
) -> Tensor:
    """Average over each box what the maps of its parts have there, each within its own part (Dai et al.: R-FCN, 2016).

    A box is divided into rows and columns of parts, and the maps are interpolated as by `crop_and_resize`.

    Args:
        features: (batch, parts * channels, height, width): the channels of each part after those of the one before, row
            by row.
        boxes: (n, 4), top, left, bottom and right, where 1 is the centre of the last cell.
        image_of: int64 (n,), the image that each box is on.
        parts: rows and columns of parts.
        crop_size: rows and columns of points in a box, multiples of those of the parts.

    Returns:
        (n, channels).
    """
    number = parts[0] * parts[1]
    places = [(row, column) for row in range(parts[0]) for column in range(parts[1])]
    steps = ((boxes[:, 2:] - boxes[:, :2]) / tensor_on(boxes.device, parts, boxes.dtype))[:, None]
    starts = boxes[:, None, :2] + tensor_on(boxes.device, places, boxes.dtype) * steps
    of_parts = torch.cat([starts, starts + steps], -1).flatten(0, 1)
    # The maps of each part are an image of their own.
    maps = features.reshape(-1, features.shape[1] // number, *features.shape[2:])
    map_of = (image_of[:, None] * number + torch.arange(number, device=image_of.device)).flatten()
    size = (crop_size[0] // parts[0], crop_size[1] // parts[1])
    rows, columns = (
        _Side(side.places.flatten(1)[:, None], side.weights.flatten(1)[:, None] / points)
        for side, points in zip(_crop_sides(maps, of_parts, size), size, strict=True)
    )
    pooled = _weighted_sums([maps], map_of, torch.zeros_like(map_of), rows, columns)
    return pooled.view(-1, number, pooled.shape[1]).mean(1)


def roi_align_masks(
    masks: Tensor, boxes: Tensor, object_of: Tensor, output_size: Shape, largest: Shape | None = None
) -> Tensor:
    """Average the mask of an object within each cell of a grid over each box, as `multiscale_roi_align` does.

    Rows first, columns then: boxes are large beside the grid, and the points within them many.

    Args:
        masks: uint8 (objects, height, width).
        boxes: (n, 4), top, left, bottom and right in pixels.
        object_of: int64 (n,), the object whose mask it is.
        output_size: rows and columns of the grid.
        largest: height and width that no box exceeds; where reading a number waits, they save a read. None: unknown.

    Returns:
        float32 (n, *output_size), from 0 to 1.
    """
    num_boxes, (height, width) = len(boxes), masks.shape[1:]
    limits = tensor_on(boxes.device, (height, width), boxes.dtype).expand(num_boxes, 2)
    rows, columns = _sides(boxes, limits, output_size, 0, largest)
    places = object_of[:, None, None] * height + rows.places
    table = masks.to(boxes.dtype).flatten(0, 1)
    of_rows = F.embedding_bag(
        places.flatten(0, 1), table, mode="sum", per_sample_weights=rows.weights.flatten(0, 1)
    ).view(num_boxes, output_size[0], width)
    weights = boxes.new_zeros((num_boxes, output_size[1], width)).scatter_add_(2, columns.places, columns.weights)
    return of_rows @ weights.transpose(1, 2)


class _Side(NamedTuple):
    """For each box and each row (or column) of its grid: cells along this side, and their weights: (n, grid, k)."""

    places: Tensor
    weights: Tensor


def _crop_sides(features: Tensor, boxes: Tensor, crop_size: Shape) -> tuple[_Side, _Side]:
    """Find the cells and weights along both sides, of the points of `crop_and_resize`."""
    limits = tensor_on(boxes.device, features.shape[2:], boxes.dtype).expand(boxes.shape[0], 2)
    sides = []
    for axis, number in enumerate(crop_size):
        last, points = limits[:, axis, None] - 1, torch.arange(number, device=boxes.device)
        start, end = boxes[:, axis, None] * last, boxes[:, axis + 2, None] * last
        at = (start + points * (end - start) / (number - 1) if number > 1 else (start + end) / 2)[..., None]
        sides.append(_cells(at, (at >= 0) & (at <= last[..., None]), limits[:, axis]))
    return sides[0], sides[1]


def _sides(
    boxes: Tensor, limits: Tensor, output_size: Shape, sampling_ratio: int, largest: Shape | None = None
) -> tuple[_Side, _Side]:
    """Find the cells and weights along both sides: of boxes (n, 4) in cells, on maps of height and width (n, 2)."""
    starts, sizes = boxes[:, :2], boxes[:, 2:] - boxes[:, :2]
    steps = sizes.clamp(min=1) / tensor_on(boxes.device, output_size, boxes.dtype)
    counts = steps.ceil().clamp(min=1) if sampling_ratio == 0 else torch.full_like(steps, sampling_ratio)
    sides = []
    for axis, (length, limit) in enumerate(zip(output_size, limits.T, strict=True)):
        start, step, count = starts[:, axis], steps[:, axis], counts[:, axis]
        if sampling_ratio:
            number = sampling_ratio
        elif largest is not None and reading_waits(boxes.device):
            number = max(-(-largest[axis] // length), 1)  # more points than some boxes have, of weight 0
        else:
            number = int(count.max().item() if len(count) else 1)
        grid = torch.arange(length, device=boxes.device)[:, None]
        points = torch.arange(number, device=boxes.device)
        at = start[:, None, None] + grid * step[:, None, None] + (points + 0.5) * (step / count)[:, None, None]
        counts_here = points < count[:, None, None]
        side = _cells(at, counts_here & (at >= -1) & (at <= limit[:, None, None]), limit)
        sides.append(_Side(side.places, side.weights / count[:, None, None]))
    return sides[0], sides[1]


def _cells(at: Tensor, valid: Tensor, limit: Tensor) -> _Side:
    """Return the two cells around each point of (n, grid, points), and how near each is; weights 0 where invalid."""
    last = limit[:, None, None] - 1
    at = torch.minimum(at.clamp(min=0), last)
    before = at.floor()
    share = at - before
    places = torch.cat([before, torch.minimum(before + 1, last)], -1).to(torch.int64)
    weights = torch.cat([1 - share, share], -1) * torch.cat([valid, valid], -1)
    return _Side(places, weights)


def _weighted_sums(
    features: Sequence[Tensor], image_of: Tensor, level_of: Tensor, rows: _Side, columns: _Side
) -> Tensor:
    """Sum the cells of each row and column of each grid, times their weights: (n, channels, rows, columns)."""
    channels = features[0].shape[1]
    # Autocast's half precision would round the weights of cells. Of an image, the cells of all levels stand together.
    table = torch.cat([level.float().permute(0, 2, 3, 1).flatten(1, 2) for level in features], 1)
    areas = [level.shape[2] * level.shape[3] for level in features]
    of_levels = [(sum(areas[:number]), level.shape[3]) for number, level in enumerate(features)]
    start, width = tensor_on(image_of.device, of_levels, torch.int64)[level_of].unbind(-1)
    in_rows = (start + image_of * sum(areas))[:, None, None] + rows.places * width[:, None, None]
    num_boxes, height, _ = rows.places.shape
    grid = (num_boxes, height, columns.places.shape[1])
    places = in_rows[:, :, None, :, None] + columns.places[:, None, :, None, :]
    weights = rows.weights[:, :, None, :, None] * columns.weights[:, None, :, None, :]
    summed = F.embedding_bag(
        places.flatten(3).flatten(0, 2),
        table.flatten(0, 1),
        mode="sum",
        per_sample_weights=weights.flatten(3).flatten(0, 2),
    )
    return summed.view(*grid, channels).permute(0, 3, 1, 2).to(features[0].dtype)


def _levels(boxes: Tensor, finest: int, coarsest: int) -> Tensor:
    """Return the level of each box, from 0: one more for each doubling of its size (Lin et al.: FPN, 2017)."""
    level = (CANONICAL_LEVEL + torch.log2(area(boxes).sqrt() / CANONICAL_SIZE) + _LEVEL_EPSILON).floor()
    return (level.clamp(finest, coarsest) - finest).to(torch.int64)
