"""FCOS: detections predicted from the points of a feature pyramid, without anchors of sizes (Tian et al., 2019).

The numbers and the names of parameters are those of torchvision's fcos_resnet50_fpn. A point is the middle of an anchor
as large as the cells of its level; it learns the smallest object that it is near the middle of, if that object's size
is one of its level's. As in torchvision, logits have a place for the background, class 0, which nothing learns.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.detection.anchor_matching import BACKGROUND, after_none, rows_of_objects
from lockstep.detection.anchors import BackboneAnchors, by_anchor, in_order
from lockstep.detection.blocks import LinearBoxCoder, PyramidAnchorGenerator, WeightedGiou, WeightedSigmoidFocal
from lockstep.detection.box_coders import decode, encode
from lockstep.detection.boxes import Shape, area, clip
from lockstep.detection.detector import DetectionModel, Detections, Targets
from lockstep.detection.fpn import FeaturePyramidNetwork, LastLevelP6P7
from lockstep.detection.losses import classification_loss, localization_loss
from lockstep.detection.nms import NmsLimits, batched_nms, best, fixed_nms
from lockstep.detection.values import Fcos
from lockstep.images.normalisation import normalize
from lockstep.models.initial_weights import check_images, give_memory, without_memory
from lockstep.models.layers import IntermediateLayerGetter
from lockstep.models.resnet import ResNet

_STRIDES = (8, 16, 32, 64, 128)
_GENERATOR = PyramidAnchorGenerator(tuple((stride,) for stride in _STRIDES), (1.0,))
_CODER = LinearBoxCoder()
_FOCAL = WeightedSigmoidFocal(2.0, 0.25)
_RADIUS = 1.5
"""Within so many cells of its middle a point learns an object."""
_LEAST_SIZE, _MOST_SIZE = 4, 8
"""Cells to the farthest edge of a level's objects, at least and at most; unbounded at the pyramid's ends."""
_CHANNELS, _CONVOLUTIONS, _GROUPS = 256, 4, 32
_PRIOR = 0.01
"""The score of each class at first."""


class PointTargets(NamedTuple):
    """What each point of each image learns."""

    anchors: Tensor
    """(points, 4)."""
    boxes: Tensor
    """(batch, points, 4): of the object, or the anchor itself where none is learned."""
    labels: Tensor
    """int64 (batch, points), 0 where no object is learned."""
    weights: Tensor
    """(batch, points): of the object, 0 where none is learned."""


class FcosNet(DetectionModel):
    """FCOS on a feature pyramid: the backbone maps images (batch, 3, height, width) to five levels, finest first."""

    anchors_fit_objects = False

    def __init__(self, settings: Fcos, backbone: nn.Module, head: FcosHead) -> None:
        super().__init__()
        self.settings = settings
        self.num_classes = settings.num_classes
        self.backbone = backbone
        self.head = head
        self.size_divisibility = 32
        self.level_anchors = BackboneAnchors(_GENERATOR, backbone)

    def preprocess(self, images: Tensor) -> Tensor:
        """Normalise images, (batch, 3, height, width) from 0 to 255, red, green and blue, as for ImageNet."""
        return normalize(images / 255)

    def anchors(self, shape: Shape, device: torch.device) -> Tensor:
        """Return all anchors on an input of this height and width, (points, 4)."""
        return torch.cat(self.level_anchors(shape, device))

    @torch.no_grad()
    def assign(self, targets: Targets) -> PointTargets:
        """Find what each point learns, one image after the other."""
        device = targets.boxes[0].device
        levels = self.level_anchors(targets.shape, device)
        anchors, bounds = torch.cat(levels), _bounds(levels)
        matches = torch.stack([match_points(boxes, anchors, bounds) for boxes in targets.boxes])
        rows = rows_of_objects(targets.boxes, torch.arange(len(targets), device=device)[:, None], matches)
        boxes, labels, weights = (
            after_none(column)[rows] for column in (targets.boxes, targets.labels, targets.weights)
        )
        return PointTargets(anchors, torch.where((labels > 0)[..., None], boxes, anchors), labels, weights)

    def counts(self, assigned: PointTargets) -> Mapping[str, Tensor]:
        """Count the points that learn an object, by their weights."""
        return dict.fromkeys(("classification", "localization", "centerness"), assigned.weights.sum())

    def forward(self, inputs: Tensor, assigned: PointTargets | None = None) -> dict[str, Any]:
        """Predict logits (batch, points, 1 + classes), codes (batch, points, 4) and centerness (batch, points)."""
        check_images(type(self).__name__, inputs, channels=3, smallest=self.settings.smallest_image)
        logits, codes, centerness = self.head(in_order(self.backbone(inputs)))
        shape = (inputs.shape[2], inputs.shape[3])
        levels = self.level_anchors(shape, inputs.device)
        return {"logits": logits, "codes": codes, "centerness": centerness, "levels": levels, "shape": shape}

    def losses(self, predictions: Mapping[str, Any], assigned: PointTargets) -> dict[str, Tensor]:
        """Compute the sums over the points: of focal loss, of 1 - GIoU, of the cross entropy of centerness."""
        logits, codes, centerness = (predictions[name].float() for name in ("logits", "codes", "centerness"))
        is_object = (assigned.labels > 0).to(logits.dtype)
        classes = torch.zeros_like(logits).scatter_(2, assigned.labels[..., None], is_object[..., None])
        of_classes = assigned.weights + (1 - is_object)  # 1 for the background
        boxes = decode(_CODER, codes, assigned.anchors)
        return {
            "classification": classification_loss(_FOCAL, logits, classes, of_classes).sum(),
            "localization": localization_loss(WeightedGiou(), boxes, assigned.boxes, assigned.weights).sum(),
            "centerness": F.binary_cross_entropy_with_logits(
                centerness, centerness_of(assigned), weight=assigned.weights, reduction="sum"
            ),
        }

    def postprocess(self, predictions: Mapping[str, Any]) -> Sequence[Detections]:
        """Choose detections by the root of score times centerness: the best of each level, then NMS."""
        logits, codes, centerness = (predictions[name].float() for name in ("logits", "codes", "centerness"))
        scores = (logits[..., 1:].sigmoid() * centerness.sigmoid()[..., None]).sqrt()
        boxes = clip(decode(_CODER, codes, torch.cat(predictions["levels"])), predictions["shape"])
        sizes = [len(level) for level in predictions["levels"]]
        if torch.compiler.is_exporting():
            return [self._fixed(boxes, scores, sizes)]
        return [self._detections(*of_image, sizes) for of_image in zip(boxes, scores, strict=True)]

    def _detections(self, boxes: Tensor, scores: Tensor, sizes: list[int]) -> Detections:
        settings = self.settings
        chosen = []
        for of_boxes, of_scores in zip(torch.split(boxes, sizes), torch.split(scores, sizes), strict=True):
            places = (of_scores > settings.score_threshold).flatten().nonzero()[:, 0]
            places = places[best(of_scores.flatten()[places], settings.candidates_per_level)]
            points, classes = places // self.num_classes, places % self.num_classes
            chosen.append((of_boxes[points], of_scores[points, classes], classes + 1))
        all_boxes, all_scores, labels = (torch.cat(each) for each in zip(*chosen, strict=True))
        kept = batched_nms(all_boxes, all_scores, labels, settings.iou_threshold, settings.max_detections)
        return Detections(all_boxes[kept], all_scores[kept], labels[kept])

    def _fixed(self, boxes: Tensor, scores: Tensor, sizes: list[int]) -> Detections:
        """Choose as `_detections`, for graphs: boxes (batch, points, 4), scores (batch, points, classes)."""
        settings, chosen = self.settings, []
        for of_boxes, of_scores in zip(torch.split(boxes, sizes, 1), torch.split(scores, sizes, 1), strict=True):
            number = of_scores.shape[1] * self.num_classes
            top, places = of_scores.flatten(1).topk(min(settings.candidates_per_level, number))
            points = (places // self.num_classes)[..., None].expand(-1, -1, 4)
            chosen.append((of_boxes.gather(1, points), top, places % self.num_classes + 1))
        rows = [torch.cat(each, 1)[:, None] for each in zip(*chosen, strict=True)]
        limits = NmsLimits(settings.score_threshold, settings.iou_threshold, settings.max_detections)
        return fixed_nms(rows[0], rows[1], rows[2], limits, by_label=True)


def match_points(boxes: Tensor, anchors: Tensor, bounds: Tensor) -> Tensor:
    """Match points to the objects of an image: int64 (points,), `BACKGROUND` where none is learned.

    The points are in the middle of anchors (points, 4). With bounds (points, 2) an object's farthest edge is farther
    away than the first, and not as far as the second.
    """
    if not len(boxes):
        return torch.full((len(anchors),), BACKGROUND, device=anchors.device)
    points, sizes = (anchors[:, :2] + anchors[:, 2:]) / 2, anchors[:, 2] - anchors[:, 0]
    middles = (boxes[:, :2] + boxes[:, 2:]) / 2
    off = (points[:, None] - middles).abs().amax(-1)
    edges = torch.cat([points[:, None] - boxes[:, :2], boxes[:, 2:] - points[:, None]], -1)
    farthest = edges.amax(-1)
    fits = (off < _RADIUS * sizes[:, None]) & (edges.amin(-1) > 0)
    fits &= (farthest > bounds[:, :1]) & (farthest < bounds[:, 1:])
    areas, object_of = torch.where(fits, area(boxes), torch.inf).min(1)
    return torch.where(areas < torch.inf, object_of, BACKGROUND)


def centerness_of(assigned: PointTargets) -> Tensor:
    """Compute how near each point is to the middle of its object, from 0 at an edge to 1: (batch, points)."""
    left, top, right, bottom = encode(_CODER, assigned.boxes, assigned.anchors).unbind(-1)
    across = torch.minimum(left, right) / torch.maximum(left, right)
    along = torch.minimum(top, bottom) / torch.maximum(top, bottom)
    return (across * along).sqrt()


def _bounds(levels: Sequence[Tensor]) -> Tensor:
    bounds = []
    for number, anchors in enumerate(levels):
        sizes = anchors[:, 2] - anchors[:, 0]
        least = sizes * (_LEAST_SIZE if number else 0)
        most = sizes * _MOST_SIZE if number < len(levels) - 1 else torch.full_like(sizes, torch.inf)
        bounds.append(torch.stack([least, most], 1))
    return torch.cat(bounds)


class FcosHead(nn.Module):
    """Predicts from all levels by the same layers, one tower for the classes and one for boxes and centerness."""

    def __init__(self, num_logits: int) -> None:
        super().__init__()
        self._num_logits = num_logits
        self.classification_head = nn.ModuleDict({"conv": _tower(), "cls_logits": _convolution(num_logits)})
        self.regression_head = nn.ModuleDict(
            {"conv": _tower(), "bbox_reg": _convolution(4), "bbox_ctrness": _convolution(1)}
        )

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw the initial weights anew: normal ones of 0.01; each class has a score of 0.01."""
        for layer in self.modules():
            if isinstance(layer, nn.GroupNorm):
                layer.reset_parameters()
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=0.01, generator=generator)
                assert layer.bias is not None, "made with one"
                is_last = layer is self.classification_head["cls_logits"]
                nn.init.constant_(layer.bias, -math.log((1 - _PRIOR) / _PRIOR) if is_last else 0.0)

    def forward(self, levels: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (batch, points, logits), codes (batch, points, 4) and centerness (batch, points)."""
        logits, codes, centerness = list[Tensor](), list[Tensor](), list[Tensor]()
        classes, regions = self.classification_head, self.regression_head
        for level in levels:
            logits.append(by_anchor(classes["cls_logits"](classes["conv"](level)), self._num_logits))
            hidden = regions["conv"](level)
            codes.append(by_anchor(F.relu(regions["bbox_reg"](hidden)), 4))
            centerness.append(by_anchor(regions["bbox_ctrness"](hidden), 1)[..., 0])
        return torch.cat(logits, 1), torch.cat(codes, 1), torch.cat(centerness, 1)


def _convolution(outputs: int) -> nn.Conv2d:
    return nn.Conv2d(_CHANNELS, outputs, 3, padding=1)


def _tower() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(_CONVOLUTIONS):
        layers += [_convolution(_CHANNELS), nn.GroupNorm(_GROUPS, _CHANNELS), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def fcos(value: Fcos, generator: Generator) -> FcosNet:
    """Make the net of an `Fcos`."""
    names = {"layer2": "0", "layer3": "1", "layer4": "2"}
    body = IntermediateLayerGetter(ResNet(50, generator=generator), names)
    extra = LastLevelP6P7(_CHANNELS, _CHANNELS)
    fpn = FeaturePyramidNetwork((512, 1024, 2048), _CHANNELS, extra, generator=generator)
    with without_memory():
        head = FcosHead(value.num_classes + 1)
    give_memory(head)
    head.reset_parameters(generator)
    return FcosNet(value, nn.Sequential(OrderedDict(body=body, fpn=fpn)), head)
