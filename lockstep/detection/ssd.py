"""SSD: detections predicted from anchors in one stage (Liu et al., 2016).

The net is made of its parts: a backbone, a head, and `SsdSettings` that say what anchors are, which of them learn
which objects, by which losses, and what becomes of the predictions. So it is torchvision's SSD300 and SSDlite, an SSD
or RetinaNet of the Object Detection API (core/target_assigner.py, meta_architectures/ssd_meta_arch.py there), and a
small one on SqueezeNet. Losses are computed for all images at once, on shapes that do not depend on the objects: the
host waits for nothing, but where hard examples are chosen by non-maximum suppression.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.detection.anchors import AnyAnchorGenerator, BackboneAnchors, in_order
from lockstep.detection.box_coders import AnyBoxCoder, code_size, decode, encode
from lockstep.detection.box_configs import IouSimilarity, Similarity, SsdMatcher, XYBoxCoder
from lockstep.detection.boxes import clip
from lockstep.detection.configs import HardExampleMiner, Loss, WeightedSmoothL1, WeightedSoftmax
from lockstep.detection.detector import DetectionModel, Detections, Targets
from lockstep.detection.losses import classification_loss, localization_loss, takes_boxes
from lockstep.detection.matching import BACKGROUND, IGNORED, AnyMatcher, after_none, match_images, rows_of_objects
from lockstep.detection.nms import multiclass_nms
from lockstep.detection.sampling import hard_examples
from lockstep.images.normalisation import normalised
from lockstep.models.initial_weights import check_images

Postprocess = Callable[[Tensor, Tensor, tuple[int, int]], Sequence[Detections]]
"""Chooses the detections of each image from boxes (batch, anchors, 4), logits (batch, anchors, classes), and the height
and width of the network's input."""

HARD_NEGATIVES = HardExampleMiner(0, 1.0, "classification", 3)
"""Of the background the anchors with the largest losses count, three for each that learns an object (Liu et al.)."""
MULTIBOX_LOSS = Loss(WeightedSmoothL1(), WeightedSoftmax(), HARD_NEGATIVES)
"""The loss of the publication, and of torchvision."""


@dataclass(frozen=True)
class SsdSettings:
    """What an SSD is beside its layers."""

    num_classes: int
    """Without the background."""
    anchor_generator: AnyAnchorGenerator
    postprocess: Postprocess
    box_coder: AnyBoxCoder = field(default_factory=XYBoxCoder)
    matcher: AnyMatcher = field(default_factory=SsdMatcher)
    similarity: Similarity = field(default_factory=IouSimilarity)
    loss: Loss = MULTIBOX_LOSS
    background: Literal["class", "zeros", "none"] = "class"
    """The background is the first class; or that class is there, and 0 in the targets; or there is no such class."""
    one_label: bool = True
    """An object has one class, its label, and not those that `DetectionTargets` may have merged."""
    negative_class_weight: float = 1.0
    """Weight of the classification loss of the background."""
    normalize_loss_by_num_matches: bool = True
    normalize_loc_loss_by_codesize: bool = False
    pixel_mean: tuple[float, float, float] = (123.675, 116.28, 103.53)
    """Subtracted from red, green and blue."""
    pixel_std: tuple[float, float, float] = (58.395, 57.12, 57.375)
    """They are divided by it then."""
    bgr: bool = False
    """The net takes blue, green, red, as Caffe's do."""
    smallest_image: int = 1
    """Least height and width of its input, in pixels."""


class AnchorTargets(NamedTuple):
    """What each anchor of each image learns."""

    anchors: Tensor
    """(anchors, 4)."""
    matches: Tensor
    """int64 (batch, anchors): as `matching.match` gives them."""
    boxes: Tensor
    """(batch, anchors, 4): of the object, or the anchor itself where it learns none."""
    classes: Tensor
    """int64 (batch, anchors), or float (batch, anchors, classes)."""
    classification_weights: Tensor
    """(batch, anchors)."""
    localization_weights: Tensor
    """(batch, anchors): 0 where no object is learned."""


class SsdNet(DetectionModel):
    """The net.

    Args:
        settings: all but the layers.
        backbone: maps images (batch, 3, height, width) to feature maps, by name or in order.
        head: maps the feature maps to logits (batch, anchors, classes) and codes (batch, anchors, code size), in the
            order of `anchors`.
    """

    def __init__(self, settings: SsdSettings, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.settings = settings
        self.num_classes = settings.num_classes
        self.backbone = backbone
        self.head = head
        self._anchors = BackboneAnchors(settings.anchor_generator, backbone)

    def preprocess(self, images: Tensor) -> Tensor:
        """Normalise images, (batch, 3, height, width) from 0 to 255, red, green and blue."""
        mean, std = (
            tuple(number / 255 for number in numbers) for numbers in (self.settings.pixel_mean, self.settings.pixel_std)
        )
        normal = normalised(images / 255, mean, std)  # in torchvision's order, for its numbers
        return normal.flip(1) if self.settings.bgr else normal

    def anchors(self, shape: tuple[int, int], device: torch.device) -> Tensor:
        """Return all anchors on an input of this height and width, (anchors, 4)."""
        return torch.cat(self._anchors(shape, device))

    @torch.no_grad()
    def assign(self, targets: Targets) -> AnchorTargets:
        """Find what each anchor learns: one image after the other where anchors are compared with objects."""
        settings, device = self.settings, targets.boxes[0].device
        anchors = self.anchors(targets.shape, device)
        matches = match_images(settings.matcher, settings.similarity, targets.boxes, anchors, targets.weights)
        is_matched = matches >= 0
        rows = rows_of_objects(targets.boxes, torch.arange(len(targets), device=device)[:, None], matches)
        weights = after_none(targets.weights)[rows]
        of_background = torch.where(matches == IGNORED, 0.0, settings.negative_class_weight)
        return AnchorTargets(
            anchors,
            matches,
            torch.where(is_matched[..., None], after_none(targets.boxes)[rows], anchors),
            self._class_targets(targets)[rows],
            torch.where(is_matched, weights, of_background),
            weights,
        )

    def _class_targets(self, targets: Targets) -> Tensor:
        """Return what an anchor without an object learns, and after it what those of each object do."""
        background, loss = self.settings.background, self.settings.loss.classification_loss
        if self.settings.one_label and background == "class" and isinstance(loss, WeightedSoftmax):
            return after_none(targets.labels)
        of_objects = after_none(targets.classes)
        if background == "none":
            return of_objects
        is_background = of_objects.new_zeros(len(of_objects), 1)
        is_background[0] = float(background == "class")
        return torch.cat([is_background, of_objects], 1)

    def counts(self, assigned: AnchorTargets) -> Mapping[str, Tensor]:
        """Count the anchors that learn an object, by their weights."""
        if not self.settings.normalize_loss_by_num_matches:
            return {}
        number = assigned.localization_weights.sum()
        codes = code_size(self.settings.box_coder) if self.settings.normalize_loc_loss_by_codesize else 1
        return {"classification": number, "localization": number * codes}

    def forward(self, inputs: Tensor, assigned: AnchorTargets | None = None) -> dict[str, Any]:
        """Predict logits, codes of boxes, and the anchors that they are relative to."""
        check_images(type(self).__name__, inputs, channels=3, smallest=self.settings.smallest_image)
        logits, codes = self.head(in_order(self.backbone(inputs)))
        shape = (inputs.shape[2], inputs.shape[3])
        return {"logits": logits, "codes": codes, "anchors": self.anchors(shape, inputs.device), "shape": shape}

    def losses(self, predictions: Mapping[str, Any], assigned: AnchorTargets) -> dict[str, Tensor]:
        """Compute the sums of the losses of classes and boxes over the anchors that count."""
        loss, coder = self.settings.loss, self.settings.box_coder
        logits, codes = predictions["logits"].float(), predictions["codes"].float()
        of_classes = classification_loss(
            loss.classification_loss, logits, assigned.classes, assigned.classification_weights
        )
        if takes_boxes(loss.localization_loss):
            pair = decode(coder, codes, assigned.anchors), assigned.boxes
        else:
            pair = codes, encode(coder, assigned.boxes, assigned.anchors)
        of_boxes = localization_loss(loss.localization_loss, *pair, assigned.localization_weights)
        if (miner := loss.hard_example_miner) is not None:
            counted = self._hard_examples(miner, of_classes, of_boxes, codes, assigned)
            of_classes, of_boxes = of_classes * counted, of_boxes * counted
        return {
            "classification": loss.classification_weight * of_classes.sum(),
            "localization": loss.localization_weight * of_boxes.sum(),
        }

    @torch.no_grad()
    def _hard_examples(
        self, miner: HardExampleMiner, of_classes: Tensor, of_boxes: Tensor, codes: Tensor, assigned: AnchorTargets
    ) -> Tensor:
        """Choose the anchors that count: bool (batch, anchors)."""
        limit = miner.max_negatives_per_positive
        if limit and miner == replace(HARD_NEGATIVES, max_negatives_per_positive=limit):
            return _hard_negatives(limit, of_classes, assigned.matches)
        loss, losses = self.settings.loss, of_classes
        if miner.loss_type != "classification":
            losses = loss.localization_weight * of_boxes
        if miner.loss_type == "both":
            losses = losses + loss.classification_weight * of_classes
        boxes = decode(self.settings.box_coder, codes, assigned.anchors)[..., :4]
        return hard_examples(miner, losses, boxes, assigned.matches >= 0, assigned.matches == BACKGROUND)

    def postprocess(self, predictions: Mapping[str, Any]) -> Sequence[Detections]:
        """Decode the boxes, and choose those that become detections."""
        logits, codes = predictions["logits"].float(), predictions["codes"].float()
        boxes = decode(self.settings.box_coder, codes, predictions["anchors"])
        return self.settings.postprocess(boxes, logits, predictions["shape"])


def _hard_negatives(per_positive: int, losses: Tensor, matches: Tensor) -> Tensor:
    """Choose all anchors with an object, and for each so many others of its image, those with the largest losses."""
    is_object = matches >= 0
    number = per_positive * is_object.sum(1, keepdim=True)
    order = losses.masked_fill(matches != BACKGROUND, -torch.inf).argsort(dim=1, descending=True, stable=True)
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    ranks = torch.empty_like(order).scatter_(1, order, places)
    return is_object | ((matches == BACKGROUND) & (ranks < number))


def per_class_detections(
    boxes: Tensor,
    logits: Tensor,
    shape: tuple[int, int],
    *,
    score_threshold: float,
    iou_threshold: float,
    candidates_per_class: int,
    max_detections: int,
) -> list[Detections]:
    """Choose detections as torchvision's SSD does: the softmax's best ones of each class, then NMS.

    Args:
        boxes: (batch, anchors, 4), which are clipped to the input first.
        logits: (batch, anchors, classes), those of the background first.
        shape: height and width of the input.
        score_threshold: what has no higher score is dropped.
        iou_threshold: boxes that overlap a better one of their class by more are dropped.
        candidates_per_class: the best so many of a class compete.
        max_detections: the best so many of an image remain.
    """
    scores = logits.softmax(-1)[..., 1:]
    return [
        multiclass_nms(
            each[:, None],
            of_image,
            score_threshold=score_threshold,
            iou_threshold=iou_threshold,
            max_detections=max_detections,
            candidates_per_class=candidates_per_class,
        )
        for each, of_image in zip(clip(boxes, shape), scores, strict=True)
    ]


class SsdHead(nn.Module):
    """For each feature map a predictor of classes and one of codes, numbered as in torchvision.

    Args:
        classification: layers that map a feature map to (batch, anchors of a cell * classes, height, width), for each.
        regression: layers that map it to (batch, anchors of a cell * code size, height, width).
        num_classes: logits of an anchor, those of a background class among them.
        code_size: numbers of a code.
    """

    def __init__(
        self, classification: Sequence[nn.Module], regression: Sequence[nn.Module], num_classes: int, code_size: int = 4
    ) -> None:
        super().__init__()
        self.classification_head = _Predictors(classification, num_classes)
        self.regression_head = _Predictors(regression, code_size)

    def forward(self, maps: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits (batch, anchors, classes) and codes (batch, anchors, code size)."""
        return self.classification_head(maps), self.regression_head(maps)


class _Predictors(nn.Module):
    def __init__(self, layers: Sequence[nn.Module], size: int) -> None:
        super().__init__()
        self.module_list = nn.ModuleList(layers)
        self.size = size

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        predicted = [layer(each) for layer, each in zip(self.module_list, maps, strict=True)]
        return torch.cat([each.permute(0, 2, 3, 1).reshape(len(each), -1, self.size) for each in predicted], 1)
