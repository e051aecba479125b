"""Faster R-CNN on a feature pyramid, in two stages: proposals, then their classes and boxes (Ren et al., 2015).

Mask R-CNN draws each object too (He et al., 2017). The numbers and the names of parameters are those of torchvision's
fasterrcnn_resnet50_fpn and maskrcnn_resnet50_fpn. Losses are means over the anchors, proposals and masks that a tower
has drawn, not sums over those of all towers; what is drawn depends on the tower's random stream. So, other than with an
SSD, 1 x 8 and 2 x 4 images give updates that are not quite the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.detection.anchor_matching import IGNORED, match_images
from lockstep.detection.anchors import BackboneAnchors, by_anchor, in_order
from lockstep.detection.blocks import IouSimilarity, PyramidAnchorGenerator, ThresholdMatcher, XYBoxCoder
from lockstep.detection.box_coders import decode, encode
from lockstep.detection.boxes import Shape, clip
from lockstep.detection.detector import DetectionModel, Detections, Targets
from lockstep.detection.fpn import FeaturePyramidNetwork, LastLevelMaxPool
from lockstep.detection.nms import NmsLimits, batched_nms, detections_of_all, fixed_nms, tried_nms
from lockstep.detection.regions import (
    ROUNDS,
    AssignedAnchors,
    DrawnAnchors,
    Proposals,
    Regions,
    all_regions,
    by_image,
    drawn_anchors,
    drawn_regions,
    fixed_regions,
    found_regions,
    ignoring,
    in_blocks,
    labels_of,
    learning_regions,
    mask_targets,
    object_boxes,
    read_with_kinds,
    region_matches,
    with_masks,
    with_objects,
)
from lockstep.detection.roi_align import multiscale_roi_align
from lockstep.detection.values import FasterRcnnFpn, MaskRcnnFpn
from lockstep.images.normalisation import normalize
from lockstep.models.initial_weights import check_images, give_memory, without_memory
from lockstep.models.layers import Conv2dNormActivation, FrozenBatchNorm2d, IntermediateLayerGetter, kaiming_fan_out
from lockstep.models.resnet import ResNet
from lockstep.tensors import reading_waits

CHANNELS = 256
"""Channels of each level of the pyramid."""
_RPN_CODER, _BOX_CODER = XYBoxCoder((1.0, 1.0, 1.0, 1.0)), XYBoxCoder()
_RPN_MATCHER = ThresholdMatcher(0.7, 0.3, allow_low_quality_matches=True)
_BOX_MATCHER = ThresholdMatcher(0.5, 0.5)
_BETA = 1 / 9
_LEAST_PROPOSAL, _LEAST_DETECTION = 1e-3, 1e-2
_POOLED, _REPRESENTATION = (7, 7), 1024
_MASK_POOLED = (14, 14)
_MASK_LAYERS = 4


class FasterRcnnNet(DetectionModel):
    """Faster R-CNN on a feature pyramid.

    Args:
        backbone: maps images (batch, 3, height, width) to the levels of a pyramid, finest first. The coarsest has
            anchors alone, and no features of regions.
        rpn: maps the levels to objectness (batch, anchors) and codes (batch, anchors, 4).
    """

    def __init__(self, settings: FasterRcnnFpn, backbone: nn.Module, rpn: RpnHead, roi_heads: RoIHeads) -> None:
        super().__init__()
        self.settings = settings
        self.num_classes = settings.num_classes
        self.backbone = backbone
        self.rpn = nn.ModuleDict({"head": rpn})
        self.roi_heads = roi_heads
        sizes = tuple((size,) for size in settings.anchor_sizes)
        self.level_anchors = BackboneAnchors(PyramidAnchorGenerator(sizes, settings.anchor_ratios), backbone)

    def preprocess(self, images: Tensor) -> Tensor:
        """Normalise images, (batch, 3, height, width) from 0 to 255, red, green and blue, as for ImageNet."""
        return normalize(images / 255)

    def anchors(self, shape: Shape, device: torch.device) -> Tensor:
        """Return the anchors of all levels on an input of this height and width, (anchors, 4)."""
        return torch.cat(self.level_anchors(shape, device))

    @torch.no_grad()
    def assign(self, targets: Targets) -> AssignedAnchors:
        """Find which anchor can learn which object."""
        anchors = self.anchors(targets.shape, targets.boxes[0].device)
        matches = match_images(_RPN_MATCHER, IouSimilarity(), targets.boxes, anchors)
        return AssignedAnchors(targets, ignoring(matches, targets))

    def draw_anchors(self, assigned: AssignedAnchors, numbers: Sequence[list[int]] | None = None) -> DrawnAnchors:
        """Draw the anchors that the first stage learns from; the numbers are those of `kinds`, if they are known."""
        settings, anchors = self.settings, self.anchors(assigned.targets.shape, assigned.matches.device)
        number, fraction = settings.rpn_batch_size_per_image, settings.rpn_positive_fraction
        return drawn_anchors(assigned, anchors, _RPN_CODER, number, fraction, numbers)

    def forward(self, inputs: Tensor, assigned: AssignedAnchors | None = None) -> dict[str, Any]:
        """Predict objectness and codes of all anchors, and logits and codes of the proposals.

        With `assigned` anchors and proposals are drawn from torch's global stream, in torchvision's order, for the
        losses to be computed on, and there are no predictions of other proposals; the objects are among them.
        """
        check_images(type(self).__name__, inputs, channels=3, smallest=1)
        levels, shape = in_order(self.backbone(inputs)), (inputs.shape[2], inputs.shape[3])
        objectness, codes = self.rpn["head"](levels)
        found = objectness.detach().float(), codes.detach().float(), shape
        if assigned is None:
            drawn, regions = None, self._regions(*found)
        else:
            drawn, regions = self._draw(*found, assigned)
        logits, region_codes = self.roi_heads(levels[:-1], regions, shape)
        return {
            "objectness": objectness,
            "anchor_codes": codes,
            "drawn": drawn,
            "levels": levels[:-1],
            "regions": regions,
            "logits": logits,
            "codes": region_codes,
            "shape": shape,
        }

    def _regions(self, objectness: Tensor, codes: Tensor, shape: Shape) -> Regions:
        if torch.compiler.is_exporting():
            return fixed_regions(self.tried_proposals(objectness, codes, shape, ROUNDS))
        return all_regions(self.propose(objectness, codes, shape))

    @torch.no_grad()
    def propose(self, objectness: Tensor, codes: Tensor, shape: Shape) -> list[Tensor]:
        """Return the proposals of each image, (proposals, 4), best first, by objectness: logits (batch, anchors).

        Codes are (batch, anchors, 4), and the shape is that of the input.
        """
        rounds = ROUNDS
        while True:
            proposals = self.tried_proposals(objectness, codes, shape, rounds)
            is_settled, *lengths = torch.cat([proposals.is_settled[None], proposals.is_there.sum(1)]).tolist()
            if is_settled:
                return [boxes[:length] for boxes, length in zip(proposals.boxes, lengths, strict=True)]
            rounds *= 4

    @torch.no_grad()
    def tried_proposals(self, objectness: Tensor, codes: Tensor, shape: Shape, rounds: int) -> Proposals:
        """Return what `propose` does, after so many rounds of NMS, without a read where reading waits.

        In a traced graph the rounds do not count.
        """
        settings, levels = self.settings, self.level_anchors(shape, codes.device)
        pre_nms_top_n, post_nms_top_n = settings.proposals(training=self.training)
        sizes = [len(anchors) for anchors in levels]
        best = [each.topk(min(pre_nms_top_n, each.shape[1]), 1) for each in torch.split(objectness, sizes, 1)]
        firsts = accumulate(sizes, initial=0)
        places = torch.cat([of_level.indices + first for of_level, first in zip(best, firsts, strict=False)], 1)
        chosen = codes.gather(1, places[..., None].expand(-1, -1, 4))
        boxes = clip(decode(_RPN_CODER, chosen, torch.cat(levels)[places]), shape)
        scores = torch.cat([of_level.values for of_level in best], 1).sigmoid()
        sizes = [of_level.values.shape[1] for of_level in best]
        if torch.compiler.is_exporting():
            return _best_of_graph(boxes, scores, sizes, settings.rpn_iou_threshold, post_nms_top_n)
        if reading_waits(boxes.device):
            return _best_at_once(boxes, scores, sizes, settings.rpn_iou_threshold, post_nms_top_n, rounds)
        level_of = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        proposals = []
        for candidates, of_image, valid in zip(boxes, scores, _are_proposals(boxes), strict=True):
            some = candidates[valid]
            kept = batched_nms(some, of_image[valid], level_of[valid], settings.rpn_iou_threshold, post_nms_top_n)
            proposals.append(some[kept])
        return in_blocks(proposals)

    @torch.no_grad()
    def _draw(
        self, objectness: Tensor, codes: Tensor, shape: Shape, assigned: AssignedAnchors
    ) -> tuple[DrawnAnchors, Regions]:
        """Draw what both stages learn from; the host reads once, all numbers of all images."""
        settings, targets, rounds = self.settings, assigned.targets, ROUNDS
        while True:
            proposals = with_objects(self.tried_proposals(objectness, codes, shape, rounds), targets)
            matches = region_matches(_BOX_MATCHER, proposals, targets)
            sides = F.pad(proposals.boxes[..., 2:] - proposals.boxes[..., :2], (0, 0, 0, 1)).amax((0, 1))
            first = torch.cat([proposals.is_settled[None].to(sides), sides.ceil()])
            (is_settled, *largest), of_anchors, of_regions = read_with_kinds(first, assigned.matches, matches)
            if is_settled:
                break
            rounds *= 4
        drawn = self.draw_anchors(assigned, of_anchors)
        number, fraction = settings.box_batch_size_per_image, settings.box_positive_fraction
        regions = drawn_regions(proposals, matches, number, fraction, of_regions)
        return drawn, regions._replace(largest=(largest[0], largest[1]))

    def losses(self, predictions: Mapping[str, Any], assigned: AssignedAnchors) -> dict[str, Tensor]:
        """Compute the means of the losses over the anchors and the regions that were drawn on this tower's images."""
        regions: Regions = predictions["regions"]
        drawn: DrawnAnchors = predictions["drawn"]
        objectness = predictions["objectness"].float().flatten()[drawn.places]
        of_anchors = predictions["anchor_codes"].float().flatten(0, 1)[drawn.places]
        labels = labels_of(assigned.targets, regions)
        targets = encode(_BOX_CODER, object_boxes(assigned.targets, regions.image_of, regions.object_of), regions.boxes)
        codes = predictions["codes"].float()[torch.arange(len(labels), device=labels.device), labels]
        # Sums over numbers of which none is 0, and not means: with nothing drawn they are 0.
        num_anchors, num_regions = max(len(objectness), 1), max(len(labels), 1)
        return {
            "rpn_classification": F.binary_cross_entropy_with_logits(objectness, drawn.is_object, reduction="sum")
            / num_anchors,
            "rpn_localization": _box_loss(of_anchors, drawn.codes, drawn.is_object) / num_anchors,
            "classification": F.cross_entropy(predictions["logits"].float(), labels, reduction="sum") / num_regions,
            "localization": _box_loss(codes, targets, labels > 0) / num_regions,
        }

    def postprocess(self, predictions: Mapping[str, Any]) -> Sequence[Detections]:
        """Choose the detections of each image: of each class by itself, and no more than `max_detections`."""
        settings, regions = self.settings, predictions["regions"]
        codes, shape = predictions["codes"].float(), predictions["shape"]
        boxes = clip(decode(_BOX_CODER, codes, regions.boxes[:, None]), shape)[:, 1:]
        is_large = (boxes[..., 2:] - boxes[..., :2] >= _LEAST_DETECTION).all(-1)
        is_there = regions.object_of[:, None] != IGNORED
        scores = predictions["logits"].float().softmax(-1)[:, 1:].masked_fill(~(is_large & is_there), -1)
        limits = NmsLimits(settings.score_threshold, settings.iou_threshold, settings.max_detections)
        parts = zip(by_image(boxes, regions), by_image(scores, regions), strict=True)
        return [found for part in parts for found in detections_of_all(*part, limits)]


class RpnHead(nn.Module):
    """Predicts which anchors, so many a cell, have objects, and their boxes, by the same layers on each level."""

    def __init__(self, channels: int, per_cell: int, *, generator: Generator | None = None) -> None:
        super().__init__()
        with without_memory():
            self.conv = nn.Sequential(Conv2dNormActivation(channels, channels, 3, norm_layer=None))
            self.cls_logits = nn.Conv2d(channels, per_cell, 1)
            self.bbox_pred = nn.Conv2d(channels, per_cell * 4, 1)
        give_memory(self)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=0.01, generator=generator)
                nn.init.constant_(layer.get_parameter("bias"), 0)

    def forward(self, levels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return objectness (batch, anchors) and codes (batch, anchors, 4), in the order of the anchors."""
        hidden = [self.conv(level) for level in levels]
        objectness = [by_anchor(self.cls_logits(each), 1)[..., 0] for each in hidden]
        codes = [by_anchor(self.bbox_pred(each), 4) for each in hidden]
        return torch.cat(objectness, 1), torch.cat(codes, 1)


class RoIHeads(nn.Module):
    """Predicts the classes of regions, the background among them, and a box for each class."""

    def __init__(self, channels: int, num_classes: int, *, generator: Generator | None = None) -> None:
        super().__init__()
        rows, columns = _POOLED
        with without_memory():
            self.box_head = nn.ModuleDict(
                {
                    "fc6": nn.Linear(channels * rows * columns, _REPRESENTATION),
                    "fc7": nn.Linear(_REPRESENTATION, _REPRESENTATION),
                }
            )
            self.box_predictor = nn.ModuleDict(
                {
                    "cls_score": nn.Linear(_REPRESENTATION, num_classes + 1),
                    "bbox_pred": nn.Linear(_REPRESENTATION, (num_classes + 1) * 4),
                }
            )
        give_memory(self)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                bound = layer.in_features**-0.5
                nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
                nn.init.uniform_(layer.bias, -bound, bound, generator=generator)

    def forward(self, levels: Sequence[Tensor], regions: Regions, shape: Shape) -> tuple[Tensor, Tensor]:
        """Return logits (regions, 1 + classes) and codes (regions, 1 + classes, 4), the background first."""
        pooled = multiscale_roi_align(
            levels, regions.boxes, regions.image_of, _POOLED, image_shape=shape, sampling_ratio=2
        )
        hidden = F.relu(self.box_head["fc6"](pooled.flatten(1)))
        hidden = F.relu(self.box_head["fc7"](hidden))
        logits = self.box_predictor["cls_score"](hidden)
        return logits, self.box_predictor["bbox_pred"](hidden).view(*logits.shape, 4)


def faster_rcnn_fpn(settings: FasterRcnnFpn, generator: Generator) -> FasterRcnnNet:
    """Make the net: its initial weights are drawn from the generator."""
    backbone = resnet_fpn_backbone(settings, generator)
    rpn = RpnHead(CHANNELS, len(settings.anchor_ratios), generator=generator)
    return FasterRcnnNet(settings, backbone, rpn, RoIHeads(CHANNELS, settings.num_classes, generator=generator))


def resnet_fpn_backbone(settings: FasterRcnnFpn, generator: Generator) -> nn.Module:
    """Make a ResNet-50 with a pyramid of the maps of its four layers, and of one more level.

    Its parameters are named as in torchvision. It maps images (batch, 3, height, width) to the levels by name, finest
    first.
    """
    norm_layer = FrozenBatchNorm2d if settings.freeze_batchnorm else nn.BatchNorm2d
    net = ResNet(50, norm_layer=norm_layer, generator=generator)
    body = IntermediateLayerGetter(net, {f"layer{number + 1}": str(number) for number in range(4)})
    fpn = FeaturePyramidNetwork((256, 512, 1024, 2048), CHANNELS, LastLevelMaxPool(), generator=generator)
    return nn.Sequential(OrderedDict(body=body, fpn=fpn))


def _are_proposals(boxes: Tensor) -> Tensor:
    """Say which boxes are large enough: bool (...), False where one is not finite."""
    return (boxes[..., 2:] - boxes[..., :2] >= _LEAST_PROPOSAL).all(-1)


def _best_at_once(
    boxes: Tensor, scores: Tensor, sizes: list[int], iou_threshold: float, most: int, rounds: int
) -> Proposals:
    """Choose the best of boxes (batch, n, 4), so many of each level, for all levels of all images at once."""
    longest = max(sizes)
    levels = [F.pad(each, (0, 0, 0, longest - each.shape[1])) for each in torch.split(boxes, sizes, 1)]
    apart = torch.cat(levels)  # what pads has no sides
    kept, is_settled = tried_nms(apart, iou_threshold, _are_proposals(apart), rounds)
    of_levels = zip(torch.split(kept, len(boxes)), sizes, strict=True)
    left = torch.cat([of_level[:, :size] for of_level, size in of_levels], 1)
    places = torch.where(left, scores, -1).argsort(stable=True, dim=1, descending=True)[:, :most]
    return Proposals(boxes.gather(1, places[..., None].expand(-1, -1, 4)), left.gather(1, places), is_settled)


def _best_of_graph(boxes: Tensor, scores: Tensor, sizes: list[int], iou_threshold: float, most: int) -> Proposals:
    """Choose as `_best_at_once`, for graphs: a row for each level."""
    found = scores.masked_fill(~_are_proposals(boxes), -torch.inf)
    longest = max(sizes)
    rows = torch.stack([F.pad(each, (0, 0, 0, longest - each.shape[1])) for each in torch.split(boxes, sizes, 1)], 1)
    padded = [F.pad(each, (0, longest - each.shape[1]), value=-torch.inf) for each in torch.split(found, sizes, 1)]
    left = torch.stack(padded, 1)
    chosen = fixed_nms(rows, left, torch.ones_like(left, dtype=torch.int64), NmsLimits(-1, iou_threshold, most))
    return Proposals(chosen.boxes, chosen.labels > 0, chosen.labels.new_ones((), dtype=torch.bool))


def _box_loss(codes: Tensor, targets: Tensor, is_object: Tensor) -> Tensor:
    losses = F.smooth_l1_loss(codes, targets, beta=_BETA, reduction="none").sum(-1)
    return torch.where(is_object > 0, losses, 0).sum()


class MaskRcnnNet(FasterRcnnNet):
    """Mask R-CNN on a feature pyramid: a `FasterRcnnNet` whose heads have layers for masks."""

    roi_heads: MaskRoIHeads

    def forward(self, inputs: Tensor, assigned: AssignedAnchors | None = None) -> dict[str, Any]:
        """Predict as Faster R-CNN, and in training the masks of the regions that learn objects."""
        predictions = super().forward(inputs, assigned)
        if assigned is not None:
            regions = learning_regions(predictions["regions"])
            logits = self.roi_heads.masks(predictions["levels"], regions, predictions["shape"])
            predictions |= {"mask_regions": regions, "mask_logits": logits}
        return predictions

    def losses(self, predictions: Mapping[str, Any], assigned: AssignedAnchors) -> dict[str, Tensor]:
        """Compute the losses of Faster R-CNN, and that of the masks."""
        regions, logits = predictions["mask_regions"], predictions["mask_logits"].float()
        labels = labels_of(assigned.targets, regions)
        logits = logits[torch.arange(len(labels), device=labels.device), labels]
        targets = mask_targets(assigned.targets, regions, (logits.shape[1], logits.shape[2]))
        # Not a mean: of no region it is 0.
        summed = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
        return {**super().losses(predictions, assigned), "mask": summed / max(logits.numel(), 1)}

    def postprocess(self, predictions: Mapping[str, Any]) -> Sequence[Detections]:
        """Choose the detections of each image, and draw them: 28 x 28 probabilities within each box."""
        detections = super().postprocess(predictions)
        regions, labels = found_regions(detections)
        logits = self.roi_heads.masks(predictions["levels"], regions, predictions["shape"]).float()
        masks = logits[torch.arange(labels.shape[0], device=labels.device), labels].sigmoid()
        return with_masks(detections, masks, regions)


class MaskRoIHeads(RoIHeads):
    """Predicts what `RoIHeads` predicts, and a mask for each class."""

    def __init__(self, channels: int, num_classes: int, *, generator: Generator | None = None) -> None:
        super().__init__(channels, num_classes, generator=generator)
        with without_memory():
            self.mask_head = nn.Sequential(
                *(Conv2dNormActivation(channels, channels, 3, norm_layer=None) for _ in range(_MASK_LAYERS))
            )
            upsampling = nn.ConvTranspose2d(channels, channels, 2, 2)
            self.mask_predictor = nn.Sequential(
                OrderedDict(
                    conv5_mask=upsampling,
                    relu=nn.ReLU(inplace=True),
                    mask_fcn_logits=nn.Conv2d(channels, num_classes + 1, 1),
                )
            )
        for part in (self.mask_head, self.mask_predictor):
            give_memory(part)
            kaiming_fan_out(part, generator)
        nn.init.kaiming_normal_(upsampling.weight, mode="fan_out", nonlinearity="relu", generator=generator)
        nn.init.constant_(upsampling.get_parameter("bias"), 0)

    def masks(self, levels: Sequence[Tensor], regions: Regions, shape: Shape) -> Tensor:
        """Return logits (regions, 1 + classes, 28, 28), those of the background first."""
        pooled = multiscale_roi_align(
            levels, regions.boxes, regions.image_of, _MASK_POOLED, image_shape=shape, sampling_ratio=2
        )
        logits: Tensor = self.mask_predictor(self.mask_head(pooled))
        return logits


def mask_rcnn_fpn(settings: MaskRcnnFpn, generator: Generator) -> MaskRcnnNet:
    """Make the net: its initial weights are drawn from the generator."""
    backbone = resnet_fpn_backbone(settings, generator)
    rpn = RpnHead(CHANNELS, len(settings.anchor_ratios), generator=generator)
    return MaskRcnnNet(settings, backbone, rpn, MaskRoIHeads(CHANNELS, settings.num_classes, generator=generator))
