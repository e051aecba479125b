"""A small detector of two stages, two images of 96 x 96, and objects on them."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.detection.detector import Targets
from lockstep.detection.values import FasterRcnnFpn

SMALL = FasterRcnnFpn(
    num_classes=3,
    anchor_sizes=(8, 16, 32, 64, 96),
    rpn_pre_nms_top_n_train=50,
    rpn_post_nms_top_n_train=30,
    rpn_pre_nms_top_n_test=40,
    rpn_post_nms_top_n_test=20,
    rpn_batch_size_per_image=32,
    box_batch_size_per_image=16,
    max_detections=10,
    freeze_batchnorm=False,
)


def images(seed: int = 0) -> Tensor:
    return torch.rand(2, 3, 96, 96, generator=torch.Generator().manual_seed(seed)) * 255


def targets(*boxes: list[list[float]], is_crowd: bool = False) -> Targets:
    """The objects of each image; the labels are 1, 2, 3, 1 ..., the masks ellipses within the boxes."""
    of_images = [torch.tensor(each).view(-1, 4) for each in boxes]
    labels = [torch.arange(len(each)) % 3 + 1 for each in of_images]
    return Targets(
        boxes=of_images,
        labels=labels,
        classes=[torch.eye(3)[each - 1] for each in labels],
        weights=[torch.ones(len(each)) for each in of_images],
        is_crowd=[torch.full((len(each),), is_crowd) for each in of_images],
        shape=(96, 96),
        masks=[ellipses(each) for each in of_images],
    )


def ellipses(boxes: Tensor) -> Tensor:
    """uint8 (n, 96, 96)."""
    centre, half = (boxes[:, :2] + boxes[:, 2:]) / 2, (boxes[:, 2:] - boxes[:, :2]) / 2
    places = torch.arange(96) + 0.5
    rows, columns = ((places - centre[:, axis, None]) / half[:, axis, None] for axis in (0, 1))
    return (rows[:, :, None] ** 2 + columns[:, None] ** 2 <= 1).to(torch.uint8)
