"""Detections on the images of the data: boxes in their pixels, masks over all of them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import interpolate, pad

from lockstep.detection.detector import boxes_on_stored, paste_masks
from lockstep.mask_runs import flips_of_pixels


def test_boxes_are_scaled_from_the_resized_image_and_clipped() -> None:
    boxes = torch.tensor([[10.0, 20.0, 30.0, 60.0], [-5.0, 0.0, 500.0, 70.0], [60.0, 0.0, 64.0, 9.0]])
    found = boxes_on_stored(boxes, resized=(50, 100), stored=(100, 400))
    assert found.dtype == torch.float64
    assert found.tolist() == [[20, 80, 60, 240], [0, 0, 100, 280], [100, 0, 100, 36]]
    assert boxes_on_stored(torch.zeros(0, 4), (5, 5), (9, 9)).shape == (0, 4)


def torchvision_pasted(mask: torch.Tensor, box: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """What torchvision's paste_masks_in_image gives, written down from its source (BSD-3-Clause)."""
    scale = (mask.shape[-1] + 2) / mask.shape[-1]
    top, left, bottom, right = box.tolist()
    centre_x, centre_y = (right + left) * 0.5, (bottom + top) * 0.5
    half_x, half_y = (right - left) * 0.5 * scale, (bottom - top) * 0.5 * scale
    x0, y0, x1, y1 = (
        int(edge) for edge in (centre_x - half_x, centre_y - half_y, centre_x + half_x, centre_y + half_y)
    )
    w, h = max(x1 - x0 + 1, 1), max(y1 - y0 + 1, 1)
    resized = interpolate(pad(mask, (1, 1, 1, 1))[None, None], (h, w), mode="bilinear", align_corners=False)[0, 0]
    image = torch.zeros(height, width)
    left_, right_, top_, bottom_ = max(x0, 0), min(x1 + 1, width), max(y0, 0), min(y1 + 1, height)
    image[top_:bottom_, left_:right_] = resized[top_ - y0 : bottom_ - y0, left_ - x0 : right_ - x0]
    return image


@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(1, 30), st.sampled_from([2, 7, 28]))
def test_masks_have_the_pixels_that_torchvision_gives_them(seed: int, height: int, width: int, side: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    corners = torch.rand(4, 2, 2, generator=draw) * torch.tensor([height, width])
    boxes = torch.cat([corners.amin(1), corners.amax(1)], 1)
    boxes[0] = torch.tensor([0.0, 0.0, height, width])
    masks = torch.rand(4, side, side, generator=draw)
    masks[1] = 1  # a run from column to column
    found = paste_masks(masks, boxes, (height, width))
    assert (len(found), found.height, found.width) == (4, height, width)
    dense = torch.stack([torchvision_pasted(*each, height, width) for each in zip(masks, boxes, strict=True)])
    expected = flips_of_pixels((dense > 0.5).to(torch.uint8).numpy())
    assert all(np.array_equal(*both) for both in zip(found.flips(), expected, strict=True))


def test_no_detections_have_no_masks() -> None:
    assert len(paste_masks(torch.zeros(0, 28, 28), torch.zeros(0, 4), (3, 4))) == 0
