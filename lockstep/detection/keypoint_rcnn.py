"""Keypoint R-CNN: a Faster R-CNN that also finds the keypoints of each object (He et al.: Mask R-CNN, 2017).

The numbers and the names of parameters are those of torchvision's keypointrcnn_resnet50_fpn. A keypoint is one cell of
a heat map over its region, found among all of them by a softmax. Its loss is the mean over the keypoints that are in
the regions which a tower has drawn, as the other losses of `FasterRcnnNet` are means over what it has drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.detection.anchor_matching import after_none, rows_of_objects
from lockstep.detection.boxes import Shape
from lockstep.detection.detector import Detections, Targets
from lockstep.detection.faster_rcnn import CHANNELS, FasterRcnnNet, RoIHeads, RpnHead, resnet_fpn_backbone
from lockstep.detection.regions import AssignedAnchors, Regions, by_image, found_regions, learning_regions
from lockstep.detection.roi_align import multiscale_roi_align
from lockstep.detection.values import KeypointRcnnFpn
from lockstep.errors import DataError
from lockstep.models.initial_weights import give_memory, without_memory
from lockstep.models.layers import kaiming_fan_out

_POOLED = (14, 14)
_LAYERS, _WIDTH = 8, 512
_UPSCALED = 2.0
_BICUBIC = -0.75  # the slope of torch's kernel one cell away


class KeypointRcnnNet(FasterRcnnNet):
    """Keypoint R-CNN on a feature pyramid: a `FasterRcnnNet` whose heads have layers for keypoints."""

    roi_heads: KeypointRoIHeads
    settings: KeypointRcnnFpn

    def assign(self, targets: Targets) -> AssignedAnchors:
        """Find which anchor can learn which object.

        Raises:
            DataError: the objects have no keypoints, or another number of them.
        """
        keypoints_of(targets, self.settings.num_keypoints)
        return super().assign(targets)

    def forward(self, inputs: Tensor, assigned: AssignedAnchors | None = None) -> dict[str, Any]:
        """Predict as Faster R-CNN, and in training the heat maps of the regions that learn objects."""
        predictions = super().forward(inputs, assigned)
        if assigned is not None:
            regions = learning_regions(predictions["regions"])
            maps = self.roi_heads.keypoints(predictions["levels"], regions, predictions["shape"])
            predictions |= {"keypoint_regions": regions, "keypoint_maps": maps}
        return predictions

    def losses(self, predictions: Mapping[str, Any], assigned: AssignedAnchors) -> dict[str, Tensor]:
        """Compute the losses of Faster R-CNN, and that of the keypoints."""
        maps = predictions["keypoint_maps"].float()
        cells, counted = keypoint_cells(assigned.targets, predictions["keypoint_regions"], maps.shape[2])
        # No mean of those that count: of none it is 0.
        each = F.cross_entropy(maps.flatten(0, 1).flatten(1), cells.flatten(), reduction="none")
        summed = torch.where(counted.flatten(), each, 0).sum()
        return {**super().losses(predictions, assigned), "keypoint": summed / counted.sum().clamp(min=1)}

    def postprocess(self, predictions: Mapping[str, Any]) -> Sequence[Detections]:
        """Choose the detections of each image, and find the keypoints of each."""
        detections, shape = super().postprocess(predictions), predictions["shape"]
        regions, _ = found_regions(detections)
        maps = self.roi_heads.keypoints(predictions["levels"], regions, shape).float()
        if torch.compiler.is_exporting():
            (block,), (of_images,) = detections, by_image(maps, regions)
            return [block._replace(keypoints=_keypoints_of_graph(of_images, block.boxes, block.labels, shape))]
        points = torch.split(keypoints_in(maps, regions.boxes), regions.lengths)
        return [each._replace(keypoints=own) for each, own in zip(detections, points, strict=True)]


class KeypointRoIHeads(RoIHeads):
    """Predicts what `RoIHeads` predicts, and a heat map for each keypoint."""

    def __init__(
        self, channels: int, num_classes: int, num_keypoints: int, *, generator: Generator | None = None
    ) -> None:
        super().__init__(channels, num_classes, generator=generator)
        with without_memory():
            layers: list[nn.Module] = []
            for inputs in (channels, *[_WIDTH] * (_LAYERS - 1)):
                layers += [nn.Conv2d(inputs, _WIDTH, 3, padding=1), nn.ReLU(inplace=True)]
            self.keypoint_head = nn.Sequential(*layers)
            upsampling = nn.ConvTranspose2d(_WIDTH, num_keypoints, 4, 2, padding=1)
            self.keypoint_predictor = nn.ModuleDict({"kps_score_lowres": upsampling})
        for part in (self.keypoint_head, self.keypoint_predictor):
            give_memory(part)
        kaiming_fan_out(self.keypoint_head, generator)
        nn.init.kaiming_normal_(upsampling.weight, mode="fan_out", nonlinearity="relu", generator=generator)
        nn.init.constant_(upsampling.get_parameter("bias"), 0)

    def keypoints(self, levels: Sequence[Tensor], regions: Regions, shape: Shape) -> Tensor:
        """Return heat maps (regions, keypoints, 56, 56) of logits."""
        pooled = multiscale_roi_align(
            levels, regions.boxes, regions.image_of, _POOLED, image_shape=shape, sampling_ratio=2
        )
        small = self.keypoint_predictor["kps_score_lowres"](self.keypoint_head(pooled))
        return F.interpolate(
            small, scale_factor=_UPSCALED, mode="bilinear", align_corners=False, recompute_scale_factor=False
        )


def keypoint_rcnn_fpn(settings: KeypointRcnnFpn, generator: Generator) -> KeypointRcnnNet:
    """Make the net: its initial weights are drawn from the generator."""
    backbone = resnet_fpn_backbone(settings, generator)
    rpn = RpnHead(CHANNELS, len(settings.anchor_ratios), generator=generator)
    heads = KeypointRoIHeads(CHANNELS, settings.num_classes, settings.num_keypoints, generator=generator)
    return KeypointRcnnNet(settings, backbone, rpn, heads)


@torch.no_grad()
def keypoint_cells(targets: Targets, regions: Regions, side: int) -> tuple[Tensor, Tensor]:
    """Return the cell of each keypoint on a grid of side x side over the object's region, and whether it counts.

    Returns:
        int64 (regions, keypoints), row by row, and bool (regions, keypoints): False where the keypoint is not labelled
        or not in the region, whose cell is 0 then.
    """
    points = keypoints_of(targets)
    own = after_none(points)[rows_of_objects(points, regions.image_of, regions.object_of)]
    first, last = regions.boxes[:, None, :2], regions.boxes[:, None, 2:]
    places = ((own[..., :2] - first) * (side / (last - first))).floor().long()
    places = torch.where(own[..., :2] == last, side - 1, places)
    counted = ((places >= 0) & (places < side)).all(-1) & (own[..., 2] > 0)
    return torch.where(counted, places[..., 0] * side + places[..., 1], 0), counted


@torch.no_grad()
def keypoints_in(maps: Tensor, boxes: Tensor) -> Tensor:
    """Find the peaks of heat maps, which are first resized to their boxes: (boxes, keypoints, 3) of y, x and logit.

    Maps are (boxes, keypoints, side, side); boxes (boxes, 4) of top, left, bottom and right in pixels.
    """
    sides = (boxes[:, 2:] - boxes[:, :2]).clamp(min=1)
    found = [boxes.new_zeros(0, maps.shape[1], 3)]
    for each, (height, width) in zip(maps, sides.ceil().long().tolist(), strict=True):
        sized = F.interpolate(each[:, None], (height, width), mode="bicubic", align_corners=False)[:, 0]
        logits, at = sized.flatten(1).max(1)
        cells = torch.stack([at // width, at % width], 1)
        found.append(torch.cat([cells.to(logits.dtype) + 0.5, logits[:, None]], 1)[None])
    points = torch.cat(found)
    scale = sides / sides.ceil()
    return torch.cat([points[..., :2] * scale[:, None] + boxes[:, None, :2], points[..., 2:]], -1)


def _keypoints_of_graph(maps: Tensor, boxes: Tensor, labels: Tensor, shape: Shape) -> Tensor:
    """Find what `keypoints_in` does, for graphs: maps are resized in a corner of the input, by two products each.

    Args:
        maps: (batch, boxes, keypoints, side, side).
        boxes: (batch, boxes, 4), within the input.
        labels: (batch, boxes); keypoints are zeros where these are 0.
        shape: height and width of the input, in pixels.

    Returns:
        (batch, boxes, keypoints, 3).
    """
    sides = (boxes[..., 2:] - boxes[..., :2]).clamp(min=1)
    cells, side = sides.ceil(), maps.shape[-1]
    rows, columns = (_bicubic_weights(cells[..., axis], shape[axis], side) for axis in (0, 1))
    is_cell = [torch.arange(shape[axis], device=maps.device) < cells[..., axis, None] for axis in (0, 1)]
    bordered = F.pad(maps.flatten(0, 1), (2, 2, 2, 2), mode="replicate").reshape(*maps.shape[:3], side + 4, side + 4)
    found = []
    for place in range(labels.shape[1]):  # one after the other: maps of all boxes would take gigabytes
        sized = rows[:, place, None] @ bordered[:, place] @ columns[:, place, None].transpose(2, 3)
        is_in = is_cell[0][:, place, None, :, None] & is_cell[1][:, place, None, None]
        logits, at = sized.masked_fill(~is_in, -torch.inf).flatten(2).max(2)
        found.append(torch.stack([at // shape[1] + 0.5, at % shape[1] + 0.5, logits], 2))
    points = torch.stack(found, 1)
    on_input = points[..., :2] * (sides / cells)[:, :, None] + boxes[:, :, None, :2]
    return torch.where((labels > 0)[..., None, None], torch.cat([on_input, points[..., 2:]], 3), 0)


def _bicubic_weights(sizes: Tensor, most: int, side: int) -> Tensor:
    """Return the weights of a line's cells, and two on each side of it, in bicubic resizing as torch does it.

    Args:
        sizes: (batch, boxes), what the line is resized to.
        most: no size is larger.
        side: cells of the line.

    Returns:
        (batch, boxes, most, side + 4).
    """
    places = (torch.arange(most, device=sizes.device) + 0.5) * (side / sizes)[..., None] - 0.5
    away = (places[..., None] - torch.arange(-2, side + 2, device=sizes.device)).abs()
    near = (_BICUBIC + 2) * away**3 - (_BICUBIC + 3) * away**2 + 1
    far = _BICUBIC * (away**3 - 5 * away**2 + 8 * away - 4)
    return torch.where(away <= 1, near, torch.where(away < 2, far, 0))


def keypoints_of(targets: Targets, number: int | None = None) -> Sequence[Tensor]:
    """Return the keypoints of the objects on each image.

    Raises:
        DataError: the objects have none, or another number than this.
    """
    given = None if targets.keypoints is None else targets.keypoints[0].shape[1]
    if targets.keypoints is None or number not in (None, given):
        wanted = number or "some"
        raise DataError(
            "The objects have not the keypoints that the detector learns.",
            given="objects without keypoints" if given is None else f"{given} keypoints of each object",
            expected=f"{wanted} of each object",
            hint=f"read them (data.num_keypoints={wanted}), or set the model's number to what the data has; "
            "to learn boxes alone, train a detector of boxes",
        )
    return targets.keypoints
