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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lockstep.detection.anchor_matching import (
    BACKGROUND,
    IGNORED,
    AnyMatcher,
    after_none,
    balanced_sample,
    kinds,
    match_images,
    places_of,
    rows_of_all,
    rows_of_objects,
)
from lockstep.detection.anchors import BackboneAnchors, by_anchor, in_order
from lockstep.detection.blocks import IouSimilarity, PyramidAnchorGenerator, ThresholdMatcher, XYBoxCoder
from lockstep.detection.box_coders import AnyBoxCoder, decode, encode
from lockstep.detection.boxes import Shape, clip
from lockstep.detection.detector import DetectionModel, Detections, Targets
from lockstep.detection.fpn import FeaturePyramidNetwork, LastLevelMaxPool
from lockstep.detection.nms import NmsLimits, batched_nms, multiclass_nms, tried_nms
from lockstep.detection.roi_align import multiscale_roi_align, roi_align_masks
from lockstep.detection.values import FasterRcnnFpn, MaskRcnnFpn
from lockstep.errors import DataError
from lockstep.images.normalisation import normalize
from lockstep.models.initial_weights import check_images, give_memory, without_memory
from lockstep.models.layers import Conv2dNormActivation, FrozenBatchNorm2d, IntermediateLayerGetter, kaiming_fan_out
from lockstep.models.resnet import ResNet
from lockstep.tensors import reading_waits, tensor_on

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
ROUNDS = 32
"""Rounds of NMS between reads; proposals around objects need up to 20."""


class AssignedAnchors(NamedTuple):
    """Anchors matched to objects, before sampling."""

    targets: Targets
    matches: Tensor
    """int64 (batch, anchors): as `anchor_matching.match` gives them."""


class DrawnAnchors(NamedTuple):
    """What the first stage learns from."""

    places: Tensor
    """int64 (drawn,): of the anchors, counted over all images."""
    is_object: Tensor
    """float (drawn,): 1 where an anchor learns an object, else 0."""
    codes: Tensor
    """(drawn, 4): of the object's box; of no use where there is none."""


class Proposals(NamedTuple):
    """Boxes of each image, in blocks of one size: what is in them the host need not know."""

    boxes: Tensor
    """(batch, most, 4)."""
    is_there: Tensor
    """bool (batch, most): False for what is no box, whatever its numbers."""
    is_settled: Tensor
    """bool (): False where NMS has not made enough rounds."""


class Regions(NamedTuple):
    """Proposals of all images, one image after the other."""

    boxes: Tensor
    """(regions, 4)."""
    image_of: Tensor
    """int64 (regions,)."""
    object_of: Tensor
    """int64 (regions,): what each learns, the place of an object on its image; `BACKGROUND` where it learns none."""
    lengths: list[int]
    """How many are on each image."""
    num_learning: list[int]
    """How many on each image learn an object."""
    largest: Shape | None = None
    """Height and width that no box exceeds; None: unknown."""


class FasterRcnnNet(DetectionModel):
    """Faster R-CNN on a feature pyramid.

    Args:
        settings: all but the layers.
        backbone: maps images (batch, 3, height, width) to the levels of a pyramid, finest first. The coarsest has
            anchors alone, and no features of regions.
        rpn: maps the levels to objectness (batch, anchors) and codes (batch, anchors, 4).
        roi_heads: what maps features of regions to logits and codes.
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
            drawn, regions = None, all_regions(self.propose(*found))
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
        """Return what `propose` does, after so many rounds of NMS, without a read where reading waits."""
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
        scores = predictions["logits"].float().softmax(-1)[:, 1:].masked_fill(~is_large, -1)
        limits = NmsLimits(settings.score_threshold, settings.iou_threshold, settings.max_detections)
        return [
            multiclass_nms(*of_image, limits)
            for of_image in zip(torch.split(boxes, regions.lengths), torch.split(scores, regions.lengths), strict=True)
        ]


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


def read_with_kinds(
    numbers: Tensor, of_anchors: Tensor, of_regions: Tensor
) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """Read whole numbers, (n,), and the `kinds` of the matches of anchors and of regions: all of them at once."""
    of_both = [kinds(of_anchors), kinds(of_regions)]
    read = torch.cat([numbers.long(), *(each.flatten() for each in of_both)]).cpu()
    first, rest = read[: len(numbers)].tolist(), read[len(numbers) :].view(2, 2, -1).tolist()
    return first, rest[0], rest[1]


def in_blocks(boxes: Sequence[Tensor]) -> Proposals:
    """Join boxes (n, 4) of each image."""
    lengths = tensor_on(boxes[0].device, [len(each) for each in boxes], torch.int64)
    block = pad_sequence(list(boxes), batch_first=True)
    is_there = torch.arange(block.shape[1], device=block.device) < lengths[:, None]
    return Proposals(block, is_there, is_there.new_ones(()))


def with_objects(proposals: Proposals, targets: Targets) -> Proposals:
    """Return the proposals of each image, and after them the boxes of its objects that are learned."""
    rows = rows_of_all(targets.boxes, proposals.boxes.device)
    boxes = torch.cat([proposals.boxes, after_none(targets.boxes)[rows]], 1)
    is_there = torch.cat([proposals.is_there, F.pad(_are_learned(targets), (1, 0))[rows]], 1)
    return Proposals(torch.where(is_there[..., None], boxes, 0), is_there, proposals.is_settled)


def region_matches(matcher: AnyMatcher, proposals: Proposals, targets: Targets) -> Tensor:
    """Match proposals to the objects of their images: int64 (batch, most)."""
    matches = match_images(matcher, IouSimilarity(), targets.boxes, proposals.boxes)
    return torch.where(proposals.is_there, ignoring(matches, targets), IGNORED)


@torch.no_grad()
def drawn_anchors(
    assigned: AssignedAnchors,
    anchors: Tensor,
    coder: AnyBoxCoder,
    number: int,
    positive_fraction: float,
    numbers: Sequence[list[int]] | None = None,
) -> DrawnAnchors:
    """Draw the anchors, of all (anchors, 4), that the first stage learns from.

    They are at most `number` of an image, and of these at most `positive_fraction` learn an object. `numbers` are those
    of `kinds`, if the host has read them already.
    """
    targets, matches = assigned
    places = balanced_sample(matches, number, positive_fraction, numbers).places
    image_of, object_of = places // len(anchors), matches.flatten()[places]
    codes = encode(coder, object_boxes(targets, image_of, object_of), anchors[places % len(anchors)])
    return DrawnAnchors(places, (object_of >= 0).to(codes.dtype), codes)


@torch.no_grad()
def drawn_regions(
    proposals: Proposals,
    matches: Tensor,
    number: int,
    positive_fraction: float,
    numbers: Sequence[list[int]] | None = None,
) -> Regions:
    """Draw the regions that the second stage learns from, of proposals with their `region_matches`.

    They are at most `number` of an image, and of these at most `positive_fraction` learn an object. `numbers` are those
    of `kinds`, if the host has read them already.
    """
    places, lengths, num_learning = balanced_sample(matches, number, positive_fraction, numbers)
    image_of, object_of = places // matches.shape[1], matches.flatten()[places]
    return Regions(proposals.boxes.flatten(0, 1)[places], image_of, object_of, lengths, num_learning)


def places_that_learn(regions: Regions) -> Tensor:
    """Return the places of the regions that learn objects, int64 (n,)."""
    return places_of(regions.object_of >= 0, sum(regions.num_learning))


def learning_regions(regions: Regions) -> Regions:
    """Return the regions that learn objects."""
    places = places_that_learn(regions)
    boxes, image_of, object_of = (part[places] for part in regions[:3])
    return regions._replace(boxes=boxes, image_of=image_of, object_of=object_of, lengths=regions.num_learning)


def _are_learned(targets: Targets) -> Tensor:
    """Say which objects of all images are learned, bool (objects,): no crowds, and none of weight 0."""
    return (torch.cat(list(targets.weights)) > 0) & ~torch.cat(list(targets.is_crowd))


def ignoring(matches: Tensor, targets: Targets) -> Tensor:
    """Return matches (images, n) with those to objects that are not learned as `IGNORED`."""
    images = torch.arange(len(targets), device=matches.device)[:, None]
    are_ignored = F.pad(~_are_learned(targets), (1, 0))  # the first is read by what is matched to none
    return matches.masked_fill(are_ignored[rows_of_objects(targets.boxes, images, matches)], IGNORED)


def labels_of(targets: Targets, regions: Regions) -> Tensor:
    """Return the label of the object that each region learns, int64 (regions,); 0 where it learns none."""
    return after_none(targets.labels)[rows_of_objects(targets.boxes, regions.image_of, regions.object_of)]


def object_boxes(targets: Targets, image_of: Tensor, object_of: Tensor) -> Tensor:
    """Return the box of each object, (n, 4), and an empty one where there is none."""
    return after_none(targets.boxes)[rows_of_objects(targets.boxes, image_of, object_of)]


def all_regions(boxes: Sequence[Tensor]) -> Regions:
    """Join the boxes of each image, (n, 4), to regions that learn nothing."""
    joined, lengths = torch.cat(list(boxes)), [len(each) for each in boxes]
    repeats = tensor_on(joined.device, lengths, torch.int64)
    image_of = torch.repeat_interleave(repeats, output_size=len(joined))
    return Regions(joined, image_of, torch.full_like(image_of, BACKGROUND), lengths, [0] * len(boxes))


def _box_loss(codes: Tensor, targets: Tensor, is_object: Tensor) -> Tensor:
    """Sum the smooth L1 loss of the codes that belong to objects."""
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
        regions = all_regions([each.boxes for each in detections])
        logits = self.roi_heads.masks(predictions["levels"], regions, predictions["shape"]).float()
        labels = torch.cat([each.labels for each in detections])
        masks = logits[torch.arange(len(labels), device=labels.device), labels].sigmoid()
        lengths = [len(each.boxes) for each in detections]
        return [each._replace(masks=mask) for each, mask in zip(detections, torch.split(masks, lengths), strict=True)]


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


@torch.no_grad()
def mask_targets(targets: Targets, regions: Regions, size: tuple[int, int]) -> Tensor:
    """Return how much of each cell of a grid over each region its object covers: float32 (regions, *size).

    Raises:
        DataError: the objects have no masks.
    """
    boxes, object_of = (torch.split(part, regions.lengths) for part in (regions.boxes, regions.object_of))
    of_images = zip(masks_of(targets), boxes, object_of, strict=True)
    return torch.cat([roi_align_masks(*of_image, size, regions.largest) for of_image in of_images])


def masks_of(targets: Targets) -> Sequence[Tensor]:
    """Return the masks of the objects on each image.

    Raises:
        DataError: the objects have none.
    """
    if targets.masks is None:
        raise DataError(
            "There are no masks to train on.",
            given="objects with boxes alone",
            expected="a mask of each object",
            hint="read them (data.masks=true), or train a detector of boxes",
        )
    return targets.masks
