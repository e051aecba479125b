"""What torchvision's detectors and ours are both given: weights, images, objects. All are made by arithmetic."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

NUM_CLASSES = 4
"""Without the background."""
NUM_KEYPOINTS, NUM_WITH_KEYPOINTS = 5, 20
"""Of each object; and the most detections of an image whose keypoints are found, which takes long."""
SEED = 17
"""Of torch's stream before a forward pass in training: two-stage detectors draw their samples from it."""


@dataclass(frozen=True)
class Case:
    """What a detector is tested on."""

    height: int
    width: int
    num_images: int = 3
    gains: Mapping[str, float] = field(default_factory=dict)
    """Factors on the usual size of the kernels whose names have these in them, so that detections are of all kinds."""


# The last norm of a residual block is small: activations would double in each of the sixteen.
_RESNET = {".bn3.": 0.3}
_REGIONS = {**_RESNET, "fpn.": 0.5, "rpn.head.": 0.3, "box_predictor.": 0.3, "bbox_pred.": 0.5}
CASES = {
    "ssd300_vgg16": Case(300, 300, 2, {"backbone.features.0.": 0.02, "head.": 0.1}),
    "ssdlite320_mobilenet_v3_large": Case(320, 320, 3, {"_head.": 0.4}),
    "fcos_resnet50_fpn": Case(128, 160, 3, {**_RESNET, "cls_logits": 0.8, "bbox_reg.": 3.0}),
    "fasterrcnn_resnet50_fpn": Case(64, 96, 3, _REGIONS),
    "maskrcnn_resnet50_fpn": Case(96, 128, 3, _REGIONS),
    "keypointrcnn_resnet50_fpn": Case(64, 96, 3, _REGIONS),
}
"""By torchvision's names of the detectors."""


def weights_for(state: Mapping[str, Tensor], gains: Mapping[str, float]) -> dict[str, Tensor]:
    """Make values for the entries of a `state_dict`, each from its name and shape alone."""
    return {name: _values(name, tensor, gains).to(tensor.dtype) for name, tensor in state.items()}


def _values(name: str, tensor: Tensor, gains: Mapping[str, float]) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros_like(tensor)
    random = np.random.RandomState(zlib.crc32(name.encode())).random_sample(tensor.numel())
    between = torch.from_numpy(2 * random - 1).view(tensor.shape)  # -1 and 1
    if tensor.ndim == 2:  # else all that is found would have one label
        between = between - between.mean(1, keepdim=True)
    if name.endswith("cls_logits.bias"):
        # FCOS has a class 0 too, which no object has, and none is to be found.
        between = between.where(torch.arange(len(between)) % (NUM_CLASSES + 1) > 0, -200.0)
    gain = math.prod(factor for part, factor in gains.items() if part in name)
    if tensor.ndim > 1:
        return gain * math.sqrt(6 / math.prod(tensor.shape[1:])) * between  # He et al., 2015
    if name.endswith("scale_weight"):
        return 20 + 4 * between
    if name.endswith("running_var"):
        return 1 + 0.3 * between
    return gain * (1 + 0.2 * between) if name.endswith("weight") else 0.1 * between


def images_of(case: Case) -> Tensor:
    """Make images, whole numbers from 0 to 255 in float32 (images, 3, height, width)."""
    y, x = torch.meshgrid(torch.arange(case.height), torch.arange(case.width), indexing="ij")
    channels = [
        (x * (3 + number) + y * (5 - channel) + (x * y) // (7 + number + channel)) % 256
        for number in range(case.num_images)
        for channel in range(3)
    ]
    return torch.stack(channels).view(case.num_images, 3, case.height, case.width).float()


def boxes_of(case: Case) -> list[Tensor]:
    """Make objects of each image, none on the third: left, top, right and bottom in pixels, (objects, 4)."""
    shares = [
        [[0.1, 0.05, 0.55, 0.5], [0.45, 0.4, 0.95, 0.9], [0.7, 0.1, 0.85, 0.33]],
        [[0.02, 0.3, 0.4, 0.97], [0.5, 0.55, 0.8, 0.75]],
        [],
    ]
    sides = torch.tensor([case.width, case.height] * 2)
    return [torch.tensor(each).reshape(-1, 4) * sides for each in shares[: case.num_images]]


def labels_of(case: Case) -> list[Tensor]:
    """Label the objects from 1 on: int64 (objects,) of each image."""
    return [torch.tensor(each, dtype=torch.int64) for each in ([1, 3, 4], [2, 1], [])[: case.num_images]]


def masks_of(case: Case) -> list[Tensor]:
    """Make the ellipses in the boxes: uint8 (objects, height, width) of each image."""
    y, x = torch.meshgrid(torch.arange(case.height) + 0.5, torch.arange(case.width) + 0.5, indexing="ij")
    masks = []
    for boxes in boxes_of(case):
        left, top, right, bottom = boxes.T[:, :, None, None]
        from_centre = ((2 * x - left - right) / (right - left)) ** 2 + ((2 * y - top - bottom) / (bottom - top)) ** 2
        masks.append((from_centre <= 1).to(torch.uint8))
    return masks


def keypoints_of(case: Case) -> list[Tensor]:
    """Make keypoints of each object, in its box, on its edge and outside: (objects, keypoints, 3) of x, y, visibility.

    Some are hidden (1), and some not labelled (0).
    """
    shares = torch.tensor([[0.2, 0.3], [0.8, 0.4], [0.51, 0.55], [1.0, 1.0], [1.3, 0.51]])
    points = []
    for boxes in boxes_of(case):
        places = boxes[:, None, :2] + shares * (boxes[:, 2:] - boxes[:, :2])[:, None]
        places = torch.where(shares == 1, boxes[:, None, 2:], places)
        visibility = (torch.arange(len(boxes))[:, None] + torch.arange(NUM_KEYPOINTS) + 1) % 3
        points.append(torch.cat([places, visibility[..., None].float()], 2))
    return points


def freeze_norms(model: nn.Module) -> None:
    """Have batch norms use their statistics in training too: of three images' smallest maps they would be noise."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def summary(tensor: Tensor) -> tuple[float, float]:
    """The norm of a tensor, and its product with numbers from -1 to 1, which depends on the order of its values."""
    values = tensor.detach().double().flatten()
    return values.norm().item(), (values @ torch.linspace(-1, 1, len(values), dtype=torch.float64)).item()
