"""Mask R-CNN on a feature pyramid: Faster R-CNN that draws each object too (He et al., 2017).

The numbers and the names of parameters are those of torchvision's maskrcnn_resnet50_fpn. The loss of masks is a mean
over the regions with objects that a tower has drawn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.detection.detector import Detections, Targets
from lockstep.detection.faster_rcnn import (
    CHANNELS,
    AssignedAnchors,
    FasterRcnnNet,
    Regions,
    RoIHeads,
    RpnHead,
    all_regions,
    labels_of,
    resnet_fpn_backbone,
)
from lockstep.detection.roi_align import multiscale_roi_align, roi_align_masks
from lockstep.errors import DataError
from lockstep.models.initial_weights import without_memory
from lockstep.models.layers import Conv2dNormActivation, kaiming_fan_out

if TYPE_CHECKING:
    from lockstep.detection.values import MaskRcnnFpn

_POOLED = (14, 14)
_LAYERS = 4


class MaskRcnnNet(FasterRcnnNet):
    """The net.

    Args:
        settings: as of `FasterRcnnNet`.
        backbone: as of `FasterRcnnNet`.
        rpn: as of `FasterRcnnNet`.
        roi_heads: with layers for masks.
    """

    roi_heads: MaskRoIHeads

    def __init__(self, settings: MaskRcnnFpn, backbone: nn.Module, rpn: RpnHead, roi_heads: MaskRoIHeads) -> None:
        super().__init__(settings, backbone, rpn, roi_heads)

    def forward(self, inputs: Tensor, assigned: AssignedAnchors | None = None) -> dict[str, Any]:
        """Predict as Faster R-CNN, and in training the masks of the regions that learn objects."""
        predictions = super().forward(inputs, assigned)
        if assigned is not None:
            regions: Regions = predictions["regions"]
            learning = Regions(*(part[regions.object_of >= 0] for part in regions))
            logits = self.roi_heads.masks(predictions["levels"], learning, predictions["shape"])
            predictions |= {"mask_regions": learning, "mask_logits": logits}
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
    """Predicts the classes of regions, a box for each class, and a mask for each class.

    Args:
        channels: of each level of the pyramid.
        num_classes: without the background.
        generator: draws the initial weights; torch's default one where none is given.
    """

    def __init__(self, channels: int, num_classes: int, *, generator: Generator | None = None) -> None:
        super().__init__(channels, num_classes, generator=generator)
        with without_memory():
            self.mask_head = nn.Sequential(
                *(Conv2dNormActivation(channels, channels, 3, norm_layer=None) for _ in range(_LAYERS))
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
            part.to_empty(device="cpu")
            kaiming_fan_out(part, generator)
        nn.init.kaiming_normal_(upsampling.weight, mode="fan_out", nonlinearity="relu", generator=generator)
        nn.init.constant_(upsampling.get_parameter("bias"), 0)

    def masks(self, levels: Sequence[Tensor], regions: Regions, shape: tuple[int, int]) -> Tensor:
        """Return logits (regions, 1 + classes, 28, 28), those of the background first."""
        pooled = multiscale_roi_align(
            levels, regions.boxes, regions.image_of, _POOLED, image_shape=shape, sampling_ratio=2
        )
        logits: Tensor = self.mask_predictor(self.mask_head(pooled))
        return logits


def mask_rcnn_fpn(settings: MaskRcnnFpn, generator: Generator) -> MaskRcnnNet:
    """Make the net: its initial weights are drawn from the generator."""
    backbone = resnet_fpn_backbone(settings, generator)
    rpn = RpnHead(CHANNELS, len(settings.aspect_ratios), generator=generator)
    return MaskRcnnNet(settings, backbone, rpn, MaskRoIHeads(CHANNELS, settings.num_classes, generator=generator))


@torch.no_grad()
def mask_targets(targets: Targets, regions: Regions, size: tuple[int, int]) -> Tensor:
    """Return how much of each cell of a grid over each region its object covers: float32 (regions, *size).

    Raises:
        DataError: the objects have no masks.
    """
    found = [regions.boxes.new_empty(0, *size)]
    for image, masks in enumerate(masks_of(targets)):
        is_here = regions.image_of == image
        found.append(roi_align_masks(masks, regions.boxes[is_here], regions.object_of[is_here], size))
    return torch.cat(found)


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
