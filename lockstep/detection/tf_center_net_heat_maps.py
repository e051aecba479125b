"""Heat maps of a CenterNet: drawn around what is to be found, and searched for their peaks.

After core/target_assigner.py and meta_architectures/center_net_meta_arch.py of tensorflow/models (Apache 2.0).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_SAME = 1e-6
"""A cell that is below the largest one around it by less is a peak, as in the reference."""


def heat_maps(cells: Tensor, spreads: Tensor, classes: Tensor, image_of: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Draw the largest of the Gaussians around the middles of objects, of each image and class.

    Args:
        cells: int64 (objects, 2), row and column of the middles.
        spreads: (objects,): standard deviations, in cells.
        classes: (objects, classes): the height of an object's Gaussian.
        image_of: int64 (objects,), the image that each is on.
        shape: number of images, height and width of the maps.

    Returns:
        (images, height * width, classes).
    """
    images, number = shape[0], classes.shape[1]
    objects, of_class = classes.nonzero().unbind(1)  # scores of all classes may be given: how many are not 0 is read
    maps = image_of[objects] * number + of_class
    shape = (images * number, *shape[1:])
    drawn = gaussian_maps(cells[objects], spreads[objects], classes[objects, of_class], maps, shape)
    return drawn.view(images, number, -1).transpose(1, 2)


def gaussian_maps(
    cells: Tensor, spreads: Tensor, heights: Tensor, map_of: Tensor, shape: tuple[int, int, int]
) -> Tensor:
    """Draw the largest of the Gaussians around points of each map.

    Args:
        cells: int64 (points, 2), row and column.
        spreads: (points,): standard deviations, in cells.
        heights: (points,): of the Gaussians.
        map_of: int64 (points,), the map that each is on.
        shape: number of maps, and their height and width.

    Returns:
        (maps, height * width).
    """
    device = cells.device
    down, across = (
        (torch.arange(side, device=device) - cells[:, axis, None]).square() for axis, side in enumerate(shape[1:])
    )
    distances = (down[:, :, None] + across[:, None, :]).flatten(1)
    gaussians = torch.exp(-distances / (2 * spreads.square())[:, None]) * heights[:, None]
    drawn = torch.zeros(shape[0], distances.shape[1], device=device)
    return drawn.scatter_reduce(0, map_of[:, None].expand_as(gaussians), gaussians, "amax")


def spread_of(sides: Tensor, least_iou: float) -> Tensor:
    """Compute a third of how far corners may move until a box overlaps by less than `least_iou`, and a sixth.

    Args:
        sides: (objects, 2), height and width in cells.
        least_iou: above 0, below 1.

    Returns:
        (objects,): standard deviations in cells.
    """
    total, product = sides.sum(1), sides.prod(1)
    cases = (
        (1.0, -total, product * ((1 - least_iou) / (1 + least_iou))),
        (4.0, -2 * total, (1 - least_iou) * product),
        (4 * least_iou, 2 * least_iou * total, (least_iou - 1) * product),
    )
    # The reference's roots, which are those of the first CenterNet: they lack a division by the first number.
    roots = [(-b + (b.square() - 4 * a * c).sqrt()) / 2 for a, b, c in cases]
    return (2 * torch.stack(roots).amin(0).floor().clamp(min=0) + 1) / 6


def is_peak(scores: Tensor, size: int) -> Tensor:
    """Tell which scores are the largest within so many cells: (batch, height, width, classes) to bool of that shape."""
    if size == 1:
        return torch.ones_like(scores, dtype=torch.bool)
    maps = scores.permute(0, 3, 1, 2)
    before = (size - 1) // 2
    padded = F.pad(maps, (before, size - 1 - before) * 2, value=float("-inf"))
    return ((maps - F.max_pool2d(padded, size, stride=1)).abs() < _SAME).permute(0, 2, 3, 1)
