"""A detector of few parameters, and COCO's annotations of images that it can learn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from saved_runs import saved
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, binary_cross_entropy_with_logits, smooth_l1_loss

from lockstep.augmentations.resizers import FixedShapeResizer, KeepAspectRatioResizer
from lockstep.data.loader import Loader
from lockstep.detection.detector import DetectionModel, Detections, Targets
from lockstep.detection.nms import NmsLimits, multiclass_nms
from lockstep.optim import SGD, MovingAverage
from lockstep.readers.detection import DetectionReader
from lockstep.readers.reader import Cost, Int64s
from lockstep.recipes.code import Function
from lockstep.recipes.data import DetectionData
from lockstep.recipes.parts import DataLoading, DetectionEvaluation, Evaluate
from lockstep.recipes.python_parts import PythonModel
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.tasks import Detection
from lockstep.runs.workdir import KnownData, Workdir
from lockstep.types import Interval, Steps

CATEGORIES = {3: "red", 90: "green"}


class TinyDetector(DetectionModel):
    """Predicts for each cell of a grid which class is there, and how its object differs from the cell.

    `coupled` puts batch norm and dropout into it.
    """

    def __init__(self, num_classes: int = 2, cells: int = 4, seed: int = 0, *, coupled: bool = False) -> None:
        super().__init__()
        self.num_classes, self.cells = num_classes, cells
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.features = nn.Conv2d(3, 8, 3, padding=1)
            self.between = nn.Sequential(nn.BatchNorm2d(8), nn.Dropout(0.2)) if coupled else nn.Identity()
            self.head = nn.Conv2d(8, num_classes + 4, 1)

    def preprocess(self, images: Tensor) -> Tensor:
        return images / 255 - 0.5

    def anchors(self, shape: Sequence[int], device: torch.device) -> Tensor:
        height, width = (side / self.cells for side in shape)
        y, x = torch.meshgrid(*[torch.arange(self.cells)] * 2, indexing="ij")
        return torch.stack([y * height, x * width, (y + 1) * height, (x + 1) * width], -1).view(-1, 4).to(device)

    def assign(self, targets: Targets) -> Any:
        cells = self.cells
        classes = torch.zeros(len(targets), cells**2, self.num_classes)
        boxes = torch.zeros(len(targets), cells**2, 4)
        for row, own in enumerate(targets.boxes):
            centres = (own[:, :2] + own[:, 2:]) / 2
            y, x = ((centres * cells / torch.tensor(targets.shape)).long().clamp(0, cells - 1)).unbind(1)
            classes[row, y * cells + x] = targets.classes[row]
            boxes[row, y * cells + x] = own - self.anchors(targets.shape, own.device)[y * cells + x]
        return classes, boxes

    def counts(self, assigned: Any) -> Mapping[str, Tensor]:
        num_found = assigned[0].amax(2).sum()
        return {"classification": num_found, "localization": num_found}

    def forward(self, inputs: Tensor, assigned: Any = None) -> Mapping[str, Any]:
        pooled = adaptive_avg_pool2d(self.between(self.features(inputs)).relu(), self.cells)
        found = self.head(pooled).flatten(2).transpose(1, 2)
        return {
            "logits": found[..., : self.num_classes],
            "offsets": found[..., self.num_classes :],
            "shape": inputs.shape[2:],
        }

    def losses(self, predictions: Mapping[str, Any], assigned: Any) -> Mapping[str, Tensor]:
        classes, boxes = assigned
        shift = smooth_l1_loss(predictions["offsets"], boxes, reduction="none").sum(2)
        return {
            "classification": binary_cross_entropy_with_logits(predictions["logits"], classes, reduction="sum"),
            "localization": (shift * classes.amax(2)).sum(),
        }

    def postprocess(self, predictions: Mapping[str, Any]) -> Sequence[Detections]:
        boxes = self.anchors(predictions["shape"], predictions["offsets"].device) + predictions["offsets"]
        scores = predictions["logits"].sigmoid()
        return [
            multiclass_nms(own[:, None], each, NmsLimits(0.01, 0.5, 10))
            for own, each in zip(boxes, scores, strict=True)
        ]


class Objects:
    """Noise with one to three objects on each image, but for every third, which has none."""

    cost: Cost = "memory"

    def __init__(self, num_images: int = 24, sides: Sequence[tuple[int, int]] = ((24, 24),)) -> None:
        generator = torch.Generator().manual_seed(3)
        self._images = [
            torch.randint(0, 256, (3, *sides[number % len(sides)]), generator=generator, dtype=torch.uint8)
            for number in range(num_images)
        ]
        corners = [torch.rand(number % 3, 2, 2, generator=generator) for number in range(num_images)]
        self._boxes = [torch.cat([0.5 * each[:, 0], 0.5 + 0.5 * each[:, 1]], 1) for each in corners]
        self._labels = [torch.randint(1, 3, (len(each),), generator=generator) for each in corners]

    def __len__(self) -> int:
        return len(self._images)

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        columns = {"image": self._images, "boxes": self._boxes, "labels": self._labels}
        return {name: [rows[index] for index in indices.tolist()] for name, rows in columns.items()}

    def example_id(self, index: int) -> str:
        return f"objects-{index}"


def make_task(resizer: FixedShapeResizer | KeepAspectRatioResizer | None = None, **data: Any) -> Detection:
    return Detection(
        DetectionData(function=Function.of(Objects), resizer=resizer or FixedShapeResizer(24, 24), **data), 2
    )


def make_loader(task: Detection, reader: Any = None, batch_size: int = 8) -> Loader:
    augment = [*task.data.training(), *task.targets()]
    return Loader(DetectionReader(reader or Objects(), 2), batch_size=batch_size, seed=5, augment=augment)


def write_coco(folder: Path, num_images: int, sides: tuple[int, int] | None = None) -> Path:
    """Write images with red and green rectangles, and their annotations; returns the path of these.

    Args:
        folder: for the images and the annotations.
        num_images: their ids are 7, 14, ...
        sides: height and width; None: each image has sides of its own.
    """
    rng = np.random.default_rng(0)
    images, annotations = list[dict[str, Any]](), list[dict[str, Any]]()
    for number in range(1, num_images + 1):
        height, width = sides or rng.integers(24, 56, 2).tolist()
        pixels = np.full((height, width, 3), 60, np.uint8)
        for _ in range(rng.integers(0, 4)):
            box_height, box_width = rng.integers(6, 16, 2).tolist()
            top, left = int(rng.integers(0, height - box_height)), int(rng.integers(0, width - box_width))
            category = list(CATEGORIES)[int(rng.integers(0, 2))]
            pixels[top : top + box_height, left : left + box_width] = (250, 0, 0) if category == 3 else (0, 250, 0)
            annotation = {"id": len(annotations) + 1, "image_id": 7 * number, "category_id": category, "iscrowd": 0}
            annotations.append(
                annotation | {"bbox": [left, top, box_width, box_height], "area": box_width * box_height}
            )
        Image.fromarray(pixels).save(folder / f"{number}.png")
        images.append({"id": 7 * number, "file_name": f"{number}.png", "height": height, "width": width})
    categories = [{"id": number, "name": name} for number, name in CATEGORIES.items()]
    path = folder / "annotations.json"
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return path


def tiny_recipe(annotations: Path, **evaluation: Any) -> Recipe:
    """A recipe whose model is the tiny detector: one of a user's own."""
    path = str(annotations)
    return Recipe(
        name="tiny",
        model=PythonModel(Function.of(TinyDetector), num_classes=2),
        data=DetectionData(train=path, validation=path, resizer=FixedShapeResizer(32, 48)),
        optimizer=SGD(0.01),
        batch_size=4,
        num_towers=2,
        num_workers=1,
        device="cpu",
        feed=DataLoading(num_processes=0),
        end=Steps(4),
        average=MovingAverage(0.9),
        evaluate=Evaluate(every=Interval(2, "steps"), detection=DetectionEvaluation(**evaluation)),
    )


def save_detector_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a folder with the run of a tiny detector, which has a checkpoint of step 7, and its data in images/."""
    monkeypatch.chdir(folder)
    Path("images").mkdir()
    saved(Path("run"), tiny_recipe(write_coco(Path("images"), 5), per_category=True))
    KnownData(folder, {1: "red", 2: "green"}).write(Workdir(Path("run")))
