"""Detectors of torchvision by their names, such as RetinaNet, where torchvision can be imported.

They run as torchvision makes them, their losses too, which are means over the images of a tower. The detectors that
Lockstep has itself need no torchvision.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Generator, Tensor, nn

from lockstep.detection.detector import DetectionModel, Detections, Targets
from lockstep.detection.keypoint_rcnn import keypoints_of
from lockstep.detection.nms import batched_nms
from lockstep.detection.values import TorchvisionDetector
from lockstep.models.initial_weights import check_images
from lockstep.models.torchvision_models import built, check_known, imported

_SWAPPED = (1, 0, 3, 2)
"""Torchvision's boxes are left, top, right, bottom."""


class TorchvisionDetectionNet(DetectionModel):
    """A detector of torchvision, with a background class, which takes images of one size as they are."""

    backbone_prefixes = ("model.backbone.",)

    def __init__(self, model: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.model = model
        self.num_classes = num_classes
        transform: Any = model.transform
        transform.resize, transform.postprocess = _unchanged, _as_found

    def preprocess(self, images: Tensor) -> Tensor:
        """Scale to 0 to 1: the model normalises."""
        return images / 255

    def assign(self, targets: Targets) -> list[dict[str, Tensor]]:
        """Return the objects of each image as torchvision takes them."""
        assigned = [
            {"boxes": boxes[:, _SWAPPED], "labels": labels}
            for boxes, labels in zip(targets.boxes, targets.labels, strict=True)
        ]
        for of_image, masks in zip(assigned, targets.masks or (), strict=False):
            of_image["masks"] = masks
        if "keypoint_predictor" in dict(getattr(self.model, "roi_heads", nn.Module()).named_children()):
            for of_image, points in zip(assigned, keypoints_of(targets), strict=True):
                of_image["keypoints"] = points[..., [1, 0, 2]]
        return assigned

    def forward(self, inputs: Tensor, assigned: list[dict[str, Tensor]] | None = None) -> dict[str, Any]:
        """Compute the losses in training, with `assigned`, and else the detections."""
        check_images(type(self).__name__, inputs, channels=3, smallest=1)
        return {"losses" if assigned is not None else "detections": self.model(list(inputs), assigned)}

    def losses(self, predictions: Mapping[str, Any], assigned: list[dict[str, Tensor]]) -> Mapping[str, Tensor]:
        """Return torchvision's losses, by its names."""
        losses: Mapping[str, Tensor] = predictions["losses"]
        return losses

    def postprocess(self, predictions: Mapping[str, Any]) -> Sequence[Detections]:
        """Return torchvision's detections."""
        return [
            Detections(
                each["boxes"][:, _SWAPPED],
                each["scores"],
                each["labels"],
                each["masks"][:, 0] if "masks" in each else None,
                _points_of(each) if "keypoints" in each else None,
            )
            for each in predictions["detections"]
        ]


def torchvision_detector(value: TorchvisionDetector, generator: Generator) -> TorchvisionDetectionNet:
    """Make the net of a `TorchvisionDetector`.

    Raises:
        InputError: torchvision cannot be imported, or has no such detector.
    """
    models = imported("torchvision.models")
    _complete_operators()
    known = models.list_models(module=models.detection)
    check_known("torchvision", value.name, known, models.list_models(), kind="detector")
    weights = {"weights": None, "weights_backbone": None}
    model = built(
        value,
        generator.initial_seed(),
        lambda: models.get_model(value.name, num_classes=value.num_classes + 1, **weights, **value.options),
    )
    return TorchvisionDetectionNet(model, value.num_classes)


def _points_of(found: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([found["keypoints"][..., [1, 0]], found["keypoints_scores"][..., None]], -1)


def _complete_operators() -> None:
    """Give torchvision a non-maximum suppression where its own operators do not load.

    Its RoIAlign is then one of its own in Python, which is not compiled: that takes a minute.
    """
    from torchvision import extension, ops

    if not extension._has_ops():
        ops.boxes.nms = ops.nms = _nms
        align: Any = import_module("torchvision.ops.roi_align")
        align._roi_align = inspect.unwrap(align._roi_align)


def _nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    return batched_nms(boxes, scores, torch.zeros(len(scores), dtype=torch.int64, device=scores.device), iou_threshold)


def _unchanged(image: Tensor, target: Any = None) -> tuple[Tensor, Any]:
    """Leave out torchvision's own resizing: the data has a resizer."""
    return image, target


def _as_found(result: Any, image_shapes: Any, original_image_sizes: Any) -> Any:
    """Leave out the way back to the sizes before, which are the same."""
    return result
