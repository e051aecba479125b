"""A detector of two convolutions and batch norm on a grid of square anchors, with data for it: cheap enough for laws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls
from lockstep.augmentations.resizers import FixedShapeResizer, KeepAspectRatioResizer
from lockstep.detection.boxes import iou
from lockstep.detection.configs import Detector
from lockstep.detection.detector import DetectionModel, Detections, Targets
from lockstep.ragged import Ragged
from lockstep.readers.detection import DetectionReader
from lockstep.readers.reader import Arrays
from lockstep.recipes.detection import DetectionData
from lockstep.recipes.tasks import Detection

NUM_CLASSES, SIDE, STRIDE = 2, 24, 8
RESIZER = FixedShapeResizer(SIDE, SIDE)


class TinyDetector(DetectionModel):
    """An anchor of two strides at each cell learns the object that it overlaps most, if by a tenth at least."""

    num_classes = NUM_CLASSES
    size_divisibility = STRIDE

    def __init__(self, *, norm: bool = True, dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = nn.Conv2d(3, 6, STRIDE, stride=STRIDE)
            self.norm = nn.BatchNorm2d(6) if norm else nn.Identity()
            self.dropout = nn.Dropout(dropout)
            self.head = nn.Conv2d(6, NUM_CLASSES + 1 + 4, 3, padding=1)

    def preprocess(self, images: Tensor) -> Tensor:
        return images / 128 - 1

    def anchors(self, shape: tuple[int, int], device: torch.device) -> Tensor:
        rows, columns = (torch.arange(side // STRIDE, device=device) * STRIDE + STRIDE / 2 for side in shape)
        centres = torch.cartesian_prod(rows, columns)
        return torch.cat([centres - STRIDE, centres + STRIDE], 1)

    def assign(self, targets: Targets) -> list[dict[str, Tensor]]:
        anchors = self.anchors(targets.shape, targets.boxes[0].device)
        assigned = []
        for boxes, labels in zip(targets.boxes, targets.labels, strict=True):
            best, place = iou(anchors, boxes).max(1) if len(boxes) else (anchors.new_zeros(len(anchors)),) * 2
            learns = best > 0.1
            wanted = boxes[place[learns]] if len(boxes) else boxes
            truth = torch.zeros(len(anchors), dtype=torch.int64)
            truth[learns] = labels[place[learns]] if len(boxes) else labels
            assigned.append({"labels": truth, "learns": learns, "edges": (wanted - anchors[learns]) / STRIDE})
        return assigned

    def counts(self, assigned: Any) -> Mapping[str, Tensor]:
        number = sum(each["learns"].sum() for each in assigned)
        return {"classes": number, "boxes": number}

    def forward(self, inputs: Tensor, assigned: Any = None) -> Mapping[str, Any]:
        maps = self.head(self.dropout(self.norm(self.body(inputs)).relu()))
        flat = maps.flatten(2).transpose(1, 2)
        return {"logits": flat[..., : NUM_CLASSES + 1], "edges": flat[..., NUM_CLASSES + 1 :], "shape": inputs.shape[2:]}

    def losses(self, predictions: Mapping[str, Any], assigned: Any) -> Mapping[str, Tensor]:
        logits, edges = predictions["logits"], predictions["edges"]
        of_classes = [
            F.cross_entropy(rows, each["labels"], reduction="sum") for rows, each in zip(logits, assigned, strict=True)
        ]
        of_boxes = [
            F.smooth_l1_loss(rows[each["learns"]], each["edges"], reduction="sum")
            for rows, each in zip(edges, assigned, strict=True)
        ]
        return {"classes": torch.stack(of_classes).sum(), "boxes": torch.stack(of_boxes).sum()}

    def postprocess(self, predictions: Mapping[str, Any]) -> Sequence[Detections]:
        height, width = predictions["shape"]
        anchors = self.anchors((height, width), predictions["edges"].device)
        found = []
        for logits, edges in zip(predictions["logits"], predictions["edges"], strict=True):
            scores, labels = logits.softmax(1)[:, 1:].max(1)
            order = scores.argsort(descending=True, stable=True)[:5]
            found.append(Detections((anchors + edges * STRIDE)[order], scores[order], labels[order] + 1))
        return found


class Tiny(Detector):
    """It as the model of a recipe."""

    num_classes: ClassVar[int] = NUM_CLASSES

    def build(self, seed: int) -> TinyDetector:
        return TinyDetector(seed=seed)


def make_reader(
    num_images: int = 24, *, sides: Sequence[tuple[int, int]] = ((SIDE, SIDE),), empty: int = 3
) -> DetectionReader:
    """Noise with one to three objects on each image, but for every `empty`th."""
    generator = torch.Generator().manual_seed(3)
    counts = [0 if number % empty == 0 else number % 3 + 1 for number in range(num_images)]
    corners = torch.rand(sum(counts), 2, 2, generator=generator).sort(1).values
    boxes = torch.cat([corners[:, 0] * 0.6, 0.4 + corners[:, 1] * 0.6], 1)
    fields = {
        "image": torch.randint(0, 256, (num_images, 3, *sides[0]), generator=generator, dtype=torch.uint8),
        "boxes": Ragged(boxes, torch.tensor(counts)),
        "labels": Ragged(torch.randint(1, NUM_CLASSES + 1, (sum(counts),), generator=generator), torch.tensor(counts)),
    }
    return DetectionReader(Arrays(fields), NUM_CLASSES)


def make_task(resizer: FixedShapeResizer | KeepAspectRatioResizer = RESIZER, **data: Any) -> Detection:
    return Detection(DetectionData(function="make_reader", resizer=resizer, **data), NUM_CLASSES)


def make_loader(task: Detection, batch_size: int = 8, reader: DetectionReader | None = None, **more: Any) -> Any:
    augment = [*task.data.training(), *task.targets()]
    return ls.data.Loader(reader or make_reader(), batch_size=batch_size, seed=5, augment=augment, **more)
