"""The training steps of detectors that detection.py compares: ours and torchvision's, from the same weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.detection.detector import DetectionModel
from lockstep.detection.values import Detector, FasterRcnnFpn, Ssd300, Ssdlite
from lockstep.ragged import Ragged
from lockstep.recipes.data import DetectionData
from lockstep.recipes.tasks import Detection

BATCH_SIZE, NUM_OBJECTS, NUM_CLASSES = 4, 7, 90
LR, MOMENTUM, WEIGHT_DECAY = 1e-4, 0.9, 1e-4
Step = Callable[[], float]
"""Makes one update; returns the loss before it."""


@dataclass(frozen=True)
class Compared:
    """A detector of both."""

    value: Detector
    shape: tuple[int, int]
    """Height and width of the images."""
    theirs: Callable[[], nn.Module]
    """Makes torchvision's, as its reference scripts train it."""


def their_ssd(name: str) -> nn.Module:
    from torchvision.models import detection

    model: nn.Module = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=NUM_CLASSES + 1)
    return model


def their_faster_rcnn(height: int, width: int) -> nn.Module:
    """With the norms of the backbone frozen and its stem and first layer, as it is with trained weights."""
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
    from torchvision.ops import FrozenBatchNorm2d

    backbone = resnet_fpn_backbone(
        backbone_name="resnet50", weights=None, norm_layer=FrozenBatchNorm2d, trainable_layers=3
    )
    model: nn.Module = FasterRCNN(backbone, NUM_CLASSES + 1, min_size=height, max_size=width)
    return model


DETECTORS = {
    "ssdlite": Compared(Ssdlite(NUM_CLASSES), (320, 320), partial(their_ssd, "ssdlite320_mobilenet_v3_large")),
    "ssd300": Compared(Ssd300(NUM_CLASSES), (300, 300), partial(their_ssd, "ssd300_vgg16")),
    "faster_rcnn": Compared(FasterRcnnFpn(NUM_CLASSES), (320, 448), partial(their_faster_rcnn, 320, 448)),
}
STEM = ("backbone.body.conv1.*", "backbone.body.layer1.*")


def contenders(name: str, only: str | None = None) -> dict[str, Step]:
    """The steps of both sides, or of one: a process whose memory is measured makes no other."""
    made: dict[str, Callable[[], Step]] = {
        "ours": partial(our_step, name, "fp32"),
        "ours, bf16": partial(our_step, name, "bf16"),
        "theirs": partial(their_step, name),
    }
    return {contender: make() for contender, make in made.items() if only in (None, contender)}


def images_and_boxes(shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 (batch, 3, height, width); boxes (batch, objects, 4) as shares, top, left, bottom, right; labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (BATCH_SIZE, 3, *shape), dtype=torch.uint8, generator=generator)
    corners = torch.rand(BATCH_SIZE, NUM_OBJECTS, 2, generator=generator) * 0.6
    sides = 0.1 + 0.3 * torch.rand(BATCH_SIZE, NUM_OBJECTS, 2, generator=generator)
    labels = torch.randint(1, NUM_CLASSES + 1, (BATCH_SIZE, NUM_OBJECTS), generator=generator)
    return images, torch.cat([corners, corners + sides], 2), labels


def our_detector(name: str) -> DetectionModel:
    model: DetectionModel = DETECTORS[name].value.build(0)
    return model


def our_step(name: str, precision: Any, num_workers: int = 1, rank: int = 0) -> Step:
    """A run's step: one tower a worker, channels_last as in the recipes."""
    number = BATCH_SIZE // num_workers
    here = slice(rank * number, (rank + 1) * number)
    images, boxes, labels = (each[here] for each in images_and_boxes(DETECTORS[name].shape))
    task = Detection(DetectionData(), NUM_CLASSES)
    model = our_detector(name)
    frozen = STEM if name == "faster_rcnn" else ()
    optimizer = ls.optim.SGD(LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    state = ls.TrainState(model, optimizer, frozen=frozen)
    towers = ls.Towers(num_workers, precision=precision, channels_last=True)
    counts = task.counts(model)
    fields = {
        "image": images,
        "boxes": Ragged.of(list(boxes)),
        "labels": Ragged.of(list(labels)),
        "classes": Ragged.of(list(torch.eye(NUM_CLASSES)[labels - 1])),
        "weights": Ragged.of(list(torch.ones(number, NUM_OBJECTS))),
        "is_crowd": Ragged.of(list(torch.zeros(number, NUM_OBJECTS, dtype=torch.bool))),
    }

    def step() -> float:
        own = range(rank, rank + 1)
        batch = ls.Batch(dict(fields), position=0, batch_size=BATCH_SIZE, towers=own, epoch_size=BATCH_SIZE)
        return float(ls.train_step(state, task.losses, batch, towers, counts=counts).total)

    return step


def their_step(name: str) -> Step:
    """That of `train_one_epoch` in references/detection/engine.py, without its logging."""
    height, width = DETECTORS[name].shape
    model = DETECTORS[name].theirs()
    model.load_state_dict(our_detector(name).state_dict(), strict=False)
    parameters = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    images, boxes, labels = images_and_boxes((height, width))
    floats = list(images.float() / 255)
    corners = boxes[..., [1, 0, 3, 2]] * torch.tensor([width, height, width, height])
    targets = [{"boxes": box, "labels": label} for box, label in zip(corners, labels, strict=True)]

    def step() -> float:
        losses = sum(model(floats, targets).values())
        loss: float = losses.item()
        if not math.isfinite(loss):
            raise FloatingPointError(f"torchvision's loss is {loss}")
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        return loss

    return step
