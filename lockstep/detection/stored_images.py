"""Detections as they lie on the images of the data, of any size, in place of the network's input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import interpolate, pad

from lockstep.mask_runs import Flips

if TYPE_CHECKING:
    from torch import Tensor

_THRESHOLD = 0.5  # of the probability that a pixel is the object's


def boxes_on_stored(boxes: Tensor, resized: Sequence[int], stored: Sequence[int]) -> Tensor:
    """Scale boxes from an image as the network sees it to the same image as it is stored, and clip them to it.

    Args:
        boxes: float (n, 4) of top, left, bottom and right in pixels of the network's input.
        resized: height and width of the image in the input, without the padding below it and to its right.
        stored: height and width of the image in the data.

    Returns:
        float64 (n, 4) of top, left, bottom and right. A box in the padding has no area.
    """
    sides = torch.tensor([stored, resized], dtype=torch.float64, device=boxes.device).repeat(1, 2)
    return (boxes.double() * (sides[0] / sides[1])).clamp(min=0).minimum(sides[0])


@dataclass(frozen=True, eq=False)
class FoundMasks:
    """The masks of the detections on one image, as runs over all of it; see `lockstep.mask_runs`."""

    height: int
    width: int
    runs: Sequence[Flips]

    def __len__(self) -> int:
        return len(self.runs)

    def flips(self) -> Sequence[Flips]:
        """Return where each mask changes between 0 and 1."""
        return self.runs


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> FoundMasks:
    """Put masks of detections into their boxes on an image: the pixels are those that torchvision gives.

    Args:
        masks: probabilities within each box, (n, side, side).
        boxes: (n, 4) of top, left, bottom and right in pixels of the image.
        size: height and width of the image.
    """
    side = masks.shape[-1]
    # As torchvision does: a border of zeros is put around the mask, and as much around the box.
    centres, halves = (boxes[:, 2:] + boxes[:, :2]) / 2, (boxes[:, 2:] - boxes[:, :2]) / 2 * ((side + 2) / side)
    edges = torch.cat([centres - halves, centres + halves], dim=1).long().tolist()
    bordered = pad(masks.float(), (1, 1, 1, 1)).cpu()
    return FoundMasks(*size, [_pasted(mask, box, size) for mask, box in zip(bordered, edges, strict=True)])


def _pasted(mask: Tensor, box: Sequence[int], size: tuple[int, int]) -> Flips:
    """Resize a mask to a box, whose last pixels belong to it, and find its runs on the image."""
    (top, left, bottom, right), (height, width) = box, size
    sides = max(bottom - top + 1, 1), max(right - left + 1, 1)
    pixels = interpolate(mask[None, None], sides, mode="bilinear", align_corners=False)[0, 0] > _THRESHOLD
    first_row, first_column = max(top, 0), max(left, 0)
    seen = pixels[first_row - top : max(height - top, 0), first_column - left : max(width - left, 0)]
    # Each column ends with a zero, so that its runs are its own.
    by_column = np.pad(seen.numpy().T, ((0, 0), (1, 1))).astype(np.int8)
    columns, rows = np.nonzero(np.diff(by_column, axis=1))
    flips = (columns + first_column) * height + rows + first_row
    # A run that goes on at the top of the next column is one.
    goes_on = np.flatnonzero(flips[1:-1:2] == flips[2::2]) * 2 + 1
    return np.delete(flips, np.concatenate([goes_on, goes_on + 1]))
