"""RT-DETR: a fixed number of queries each become one object, so that nothing has to be suppressed (Zhao et al., 2023).

The numbers are those of RTDetrForObjectDetection in Hugging Face's transformers. Each object is learned by one query of
each layer: the pairs of the least cost, of all pairs that there are. In training each object is also given as queries
with noise, of which half are to find it again, and half, that are farther off, to see that they are none (Zhang et al.:
DINO, 2022). Losses are sums over the objects, and over the queries with noise that are to find one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.detection.anchor_matching import after_none, rows_of_all
from lockstep.detection.anchors import by_anchor
from lockstep.detection.boxes import Shape, clip, matched_giou, matched_iou
from lockstep.detection.detector import DetectionModel, Detections, Targets
from lockstep.detection.rt_detr_layers import (
    DeformableAttention,
    HybridEncoder,
    Mlp,
    QueryDecoder,
    QuerySelfAttention,
    ResNetVd,
    RtDetrSizes,
    logit,
)
from lockstep.detection.targets import FIRST_LABEL
from lockstep.detection.values import RtDetr
from lockstep.models.initial_weights import check_images, give_memory, without_memory
from lockstep.models.layers import FrozenBatchNorm2d, conv2d, kaiming_fan_out
from lockstep.models.torchvision_models import imported
from lockstep.tensors import tensor_on
from lockstep.weights.names import NameMap, Rename

SIZES: Mapping[str, RtDetrSizes] = {
    "r18vd": RtDetrSizes((2, 2, 2, 2), bottleneck=False, decoder_layers=3, expansion=0.5),
    "r34vd": RtDetrSizes((3, 4, 6, 3), bottleneck=False, decoder_layers=4, expansion=0.5),
    "r50vd": RtDetrSizes((3, 4, 6, 3), bottleneck=True, decoder_layers=6, expansion=1.0),
    "r101vd": RtDetrSizes((3, 4, 23, 3), True, 6, 1.0, channels=384, feed_forward=2048),
}
"""The sizes of the published nets by their backbones."""
_ANCHOR = 0.05
"""Height and width of the finest level's anchors, as shares of the image; each level's are twice those before."""
_EDGE = 0.01
"""Anchors whose centre is nearer to the edge are left out."""
_PRIOR = 0.01
"""The score of each class at first."""
_CLASSES, _L1, _GIOU = 1.0, 5.0, 2.0
"""The weights of the losses."""
_CLASS_COST, _L1_COST, _GIOU_COST = 2.0, 5.0, 2.0
_COST_ALPHA, _ALPHA, _GAMMA = 0.25, 0.75, 2.0
"""Alpha of the focal loss in the cost, and of the varifocal loss; gamma of both."""
_LEAST_PROBABILITY = 1e-8
_DRAWS = 10
"""Numbers that are drawn for a query with noise."""


_OF_TRANSFORMERS = NameMap(
    (
        Rename(r"^model\.", ""),
        Rename(r"^encoder\.aifi\.", "encoder.encoder."),
        Rename(r"\.o_proj\.", ".out_proj."),
        Rename(r"\.mlp\.(fc[12])\.", r".\1."),
    ),
    system="torch",
)
"""Takes the names that parameters have in version 5 of transformers: its files still have the old ones."""


class QueryTargets(NamedTuple):
    """The objects of a batch."""

    boxes: Tensor
    """(1 + objects, 4): centre (x, y), width and height as shares of the input; the first stands for none."""
    labels: Tensor
    """int64 (1 + objects,), 0 for none."""
    weights: Tensor
    """(1 + objects,)."""
    rows: Tensor
    """int64 (batch, most objects of an image): the row of each image's objects, 0 beyond."""
    lengths: Sequence[int]
    """Objects of each image."""
    shape: Shape
    """Height and width of the network's input, in pixels."""


class RtDetrNet(DetectionModel):
    """RT-DETR (Zhao et al.: DETRs Beat YOLOs on Real-time Object Detection, 2024)."""

    anchors_fit_objects = False
    size_divisibility = 32
    name_maps = (_OF_TRANSFORMERS,)

    def __init__(self, settings: RtDetr, sizes: RtDetrSizes, generator: Generator | None = None) -> None:
        super().__init__()
        self.settings, self.num_classes = settings, settings.num_classes
        channels, size, classes = sizes.channels, sizes.queries, settings.num_classes
        norm_layer = FrozenBatchNorm2d if settings.freeze_batchnorm else nn.BatchNorm2d
        with without_memory():
            self.backbone = ResNetVd(sizes, norm_layer)
            self.encoder_input_proj = nn.ModuleList(_projection(each, channels) for each in sizes.stages[1:])
            self.encoder = HybridEncoder(sizes)
            self.decoder_input_proj = nn.ModuleList(_projection(channels, size) for _ in sizes.stages[1:])
            self.denoising_class_embed: nn.Embedding | None = None
            if settings.num_denoising:
                self.denoising_class_embed = nn.Embedding(classes + 1, size, padding_idx=classes)
            self.enc_output = nn.Sequential(nn.Linear(size, size), nn.LayerNorm(size))
            self.enc_score_head = nn.Linear(size, classes)
            self.enc_bbox_head = Mlp(size, size, size, 4)
            self.decoder = QueryDecoder(sizes, classes)
        give_memory(self)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw the initial weights anew, as the authors do: torch's own, but for attention and what predicts."""
        kaiming_fan_out(self, generator)
        for name, module in self.named_modules():
            if isinstance(module, nn.Conv2d) and not name.startswith("backbone."):
                nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5), generator=generator)
            if isinstance(module, nn.Linear):
                bound = module.in_features**-0.5
                nn.init.uniform_(module.weight, -bound, bound, generator=generator)
                nn.init.uniform_(module.bias, -bound, bound, generator=generator)
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        for module in self.modules():
            if isinstance(module, DeformableAttention | QuerySelfAttention):
                for child in module.children():
                    nn.init.xavier_uniform_(child.get_parameter("weight"), generator=generator)
                    nn.init.zeros_(child.get_parameter("bias"))
            if isinstance(module, DeformableAttention):
                module.reset_offsets()
        first: Any = self.enc_output[0]
        for layer in (first, *self.decoder.query_pos_head.layers):
            nn.init.xavier_uniform_(layer.get_parameter("weight"), generator=generator)
        for head in (self.enc_score_head, *self.decoder.class_embed):
            nn.init.constant_(head.get_parameter("bias"), -math.log((1 - _PRIOR) / _PRIOR))
        for boxes in (self.enc_bbox_head, *self.decoder.bbox_embed):
            nn.init.zeros_(boxes.get_parameter("layers.2.weight"))
            nn.init.zeros_(boxes.get_parameter("layers.2.bias"))
        if self.denoising_class_embed is not None:
            self.denoising_class_embed.weight.normal_(generator=generator)
            self.denoising_class_embed.weight[-1] = 0

    def preprocess(self, images: Tensor) -> Tensor:
        """Scale to 0 to 1."""
        return images / 255

    @torch.no_grad()
    def assign(self, targets: Targets) -> QueryTargets:
        """Join the objects of all images; which query learns which is found once there are predictions."""
        (height, width), device = targets.shape, targets.boxes[0].device
        scale = tensor_on(device, [height, width, height, width], torch.float32)
        top, left, bottom, right = (after_none(targets.boxes) / scale).unbind(-1)
        return QueryTargets(
            torch.stack([(left + right) / 2, (top + bottom) / 2, right - left, bottom - top], -1),
            after_none(targets.labels),
            after_none(targets.weights),
            rows_of_all(targets.boxes, device),
            [len(each) for each in targets.boxes],
            targets.shape,
        )

    def counts(self, assigned: QueryTargets) -> Mapping[str, Tensor]:
        """Count the objects, by their weights, and the queries with noise that are to find them."""
        objects = assigned.weights.sum()
        noised = objects * self._groups(assigned)
        names = ("classification", "boxes", "giou")
        return dict.fromkeys(names, objects) | dict.fromkeys([f"denoising_{name}" for name in names], noised)

    def _groups(self, assigned: QueryTargets) -> int:
        """Return how many times each object is given with noise."""
        number = self.settings.num_denoising
        return max(1, number // max(1, *assigned.lengths)) if number else 0

    def forward(self, inputs: Tensor, assigned: QueryTargets | None = None) -> dict[str, Any]:
        """Predict logits (layers, batch, queries, classes) and boxes (layers, batch, queries, 4).

        The first layer is the encoder; where nothing is learned there is the last one alone. In training the
        predictions of the queries with noise come under "denoising_logits" and "denoising_boxes", without the encoder,
        and the rows of the objects that these are to find under "denoising_rows", int64 (batch, queries).
        """
        check_images(type(self).__name__, inputs, channels=3, smallest=self.settings.smallest_image)
        parts = zip(self.encoder_input_proj, self.backbone(inputs), strict=True)
        maps = self.encoder([project(each) for project, each in parts])
        maps = [project(each) for project, each in zip(self.decoder_input_proj, maps, strict=True)]
        shapes = [(each.shape[2], each.shape[3]) for each in maps]
        memory = torch.cat([by_anchor(each, each.shape[1]) for each in maps], 1)
        queries, logits, boxes = self._selected(memory, shapes)
        begin, number, may_see = boxes.detach(), 0, None
        if noised := self._noised(assigned):
            queries, begin = torch.cat([noised.queries, queries], 1), torch.cat([noised.boxes, begin], 1)
            number, may_see = noised.queries.shape[1], noised.may_see(boxes.shape[1])
        found = self.decoder(queries, begin, memory, shapes, may_see, last=assigned is None)
        of_layers = [torch.stack(each).float() for each in found]
        shape = (inputs.shape[2], inputs.shape[3])
        if assigned is None:
            return {"logits": of_layers[0], "boxes": of_layers[1], "shape": shape}
        denoising, matched = zip(*(each.tensor_split([number], 2) for each in of_layers), strict=True)
        rows = noised.rows if noised else assigned.rows[:, :0]
        return {
            "logits": torch.cat([logits[None].float(), matched[0]]),
            "boxes": torch.cat([boxes[None].float(), matched[1]]),
            "shape": shape,
            "denoising_logits": denoising[0],
            "denoising_boxes": denoising[1],
            "denoising_rows": rows,
        }

    def _selected(self, memory: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, Tensor, Tensor]:
        """Make queries of the cells with the highest scores; returns them, and their logits and boxes."""
        anchors, is_inside = anchors_of_cells(shapes, memory.device)
        features = self.enc_output(memory * is_inside)
        scores = self.enc_score_head(features)
        number = min(self.settings.num_queries, memory.shape[1])
        places = scores.amax(-1).topk(number, 1).indices

        def chosen(values: Tensor) -> Tensor:
            return values.gather(1, places[..., None].expand(-1, -1, values.shape[-1]))

        queries = chosen(features)
        return queries.detach(), chosen(scores), (self.enc_bbox_head(queries).float() + anchors[places]).sigmoid()

    def _noised(self, assigned: QueryTargets | None) -> NoisedQueries | None:
        if assigned is None or not self.training or self.denoising_class_embed is None:
            return None
        groups, (batch, most) = self._groups(assigned), assigned.rows.shape
        uniform = torch.rand(batch, 2 * groups * most, _DRAWS, device=assigned.rows.device)
        labels, boxes, rows = noised(assigned, uniform, groups, self.settings)
        return NoisedQueries(self.denoising_class_embed(labels), boxes, rows, groups)

    def losses(self, predictions: Mapping[str, Any], assigned: QueryTargets) -> dict[str, Tensor]:
        """Compute the sums over the objects and layers: of varifocal loss, of distances of boxes, and of 1 - GIoU."""
        logits, boxes = predictions["logits"], predictions["boxes"]
        rows = match_queries(logits, boxes, assigned)
        of_objects = losses_of_layers(logits, boxes, rows, assigned)
        logits, boxes = predictions["denoising_logits"], predictions["denoising_boxes"]
        rows = predictions["denoising_rows"].expand(len(logits), -1, -1)
        of_noise = losses_of_layers(logits, boxes, rows, assigned)
        return {name: each.sum() for name, each in of_objects.items()} | {
            f"denoising_{name}": each.sum() for name, each in of_noise.items()
        }

    def postprocess(self, predictions: Mapping[str, Any]) -> Sequence[Detections]:
        """Take the pairs of query and class with the highest scores."""
        settings, (height, width) = self.settings, predictions["shape"]
        scores = predictions["logits"][-1].sigmoid().flatten(1)
        top, places = scores.topk(min(settings.max_detections, scores.shape[1]))
        queries = (places // self.num_classes)[..., None].expand(-1, -1, 4)
        corners = in_pixels(predictions["boxes"][-1].gather(1, queries), (height, width))
        boxes, labels = clip(corners, (height, width)), places % self.num_classes + FIRST_LABEL
        is_found = top > settings.score_threshold
        if torch.compiler.is_exporting():
            return [
                Detections(
                    torch.where(is_found[..., None], boxes, 0.0),
                    torch.where(is_found, top, 0.0),
                    torch.where(is_found, labels, 0),
                )
            ]
        return [
            Detections(*(each[found] for each in of_image))
            for *of_image, found in zip(boxes, top, labels, is_found, strict=True)
        ]


def anchors_of_cells(shapes: Sequence[Shape], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a box around each cell of all levels, as logits of its shares, (cells, 4), and which of them are inside.

    The latter are 1, or 0 near the edge of the image: (cells, 1). Boxes there are of infinite logits, nearly.
    """
    anchors = []
    for level, (height, width) in enumerate(shapes):
        y, x = ((torch.arange(side, device=device, dtype=torch.float32) + 0.5) / side for side in (height, width))
        centres = torch.stack([x.expand(height, -1), y[:, None].expand(-1, width)], -1).flatten(0, 1)
        anchors.append(torch.cat([centres, torch.full_like(centres, _ANCHOR * 2**level)], 1))
    joined = torch.cat(anchors)
    is_inside = ((joined > _EDGE) & (joined < 1 - _EDGE)).all(1, keepdim=True)
    most = torch.finfo(torch.float32).max
    return torch.where(is_inside, (joined / (1 - joined)).log(), most), is_inside.float()


def in_pixels(boxes: Tensor, shape: Shape) -> Tensor:
    """Make top, left, bottom and right in pixels of centre (x, y), width and height as shares: (..., 4)."""
    height, width = shape
    x, y, across, down = boxes.unbind(-1)
    top, bottom = (y - down / 2) * height, (y + down / 2) * height
    return torch.stack([top, (x - across / 2) * width, bottom, (x + across / 2) * width], -1)


# Queries with noise ---------------------------------------------------------------------------------------------------


class NoisedQueries(NamedTuple):
    """Queries in groups, each of all objects twice: those that are to find them, then those that are to see no object.

    An image with fewer objects than another has queries for none in their places.
    """

    queries: Tensor
    """(batch, n, size)."""
    boxes: Tensor
    """(batch, n, 4)."""
    rows: Tensor
    """int64 (batch, n): of the objects to be found, 0 where there is none."""
    groups: int

    def may_see(self, num_others: int) -> Tensor:
        """Say which query may look at which, bool (n + others, n + others).

        Those with noise see their group and the others; the others, which are to find objects unaided, only each other.
        """
        number, device = self.queries.shape[1], self.queries.device
        group = torch.arange(number, device=device) // max(1, number // max(1, self.groups))
        of_all = torch.cat([group, torch.full((num_others,), -1, device=device)])
        return (of_all[:, None] == of_all) | (of_all < 0)


@torch.no_grad()
def noised(assigned: QueryTargets, uniform: Tensor, groups: int, settings: RtDetr) -> tuple[Tensor, Tensor, Tensor]:
    """Put noise on the objects of a batch.

    Args:
        assigned: the objects.
        uniform: (batch, 2 * groups * most objects of an image, 10), from 0 to 1: whether a label is another, and which;
            for each of a box's edges whether it moves back or forth; and how far.
        groups: times that each object is given, to be found and not to be found.
        settings: how much noise.

    Returns:
        Labels from 0 on, int64 (batch, n), as many as there are classes where there is no object; boxes, (batch, n, 4);
        and the rows of the objects that are to be found, int64 (batch, n), 0 for none.
    """
    rows, most, classes = assigned.rows.tile(1, 2 * groups), assigned.rows.shape[1], settings.num_classes
    labels = torch.where(rows > 0, assigned.labels[rows] - FIRST_LABEL, classes)
    another = (uniform[..., 1] * classes).long().clamp(max=classes - 1)
    is_wrong = (uniform[..., 0] < settings.label_noise_ratio / 2) & (rows > 0)
    boxes = assigned.boxes[rows]
    is_far = torch.arange(rows.shape[1], device=rows.device) // max(1, most) % 2
    centres, halves = boxes[..., :2], boxes[..., 2:] / 2
    moved = (uniform[..., 6:] + is_far[:, None]) * torch.where(uniform[..., 2:6] < 0.5, -1.0, 1.0)
    corners = torch.cat([centres - halves, centres + halves], -1)
    corners = (corners + moved * halves.tile(1, 1, 2) * settings.box_noise_scale).clamp(0, 1)
    first, second = corners[..., :2], corners[..., 2:]
    around = torch.cat([(first + second) / 2, second - first], -1)
    # A corner may have gone past the other: what the decoder gets are shares for all that.
    return torch.where(is_wrong, another, labels), logit(around).sigmoid(), torch.where(is_far > 0, 0, rows)


# Matching and losses --------------------------------------------------------------------------------------------------


@torch.no_grad()
def match_queries(logits: Tensor, boxes: Tensor, assigned: QueryTargets) -> Tensor:
    """Find the pairs of queries and objects with the least cost, of each layer and image, in one read of the device.

    Args:
        logits: (layers, batch, queries, classes).
        boxes: (layers, batch, queries, 4).
        assigned: the objects.

    Returns:
        int64 (layers, batch, queries): the row of the object that a query learns, 0 for none.

    Raises:
        InputError: scipy cannot be imported.
    """
    layers, batch, queries, _ = logits.shape
    found = np.zeros((layers, batch, queries), np.int64)
    if most := assigned.rows.shape[1]:
        solve = imported("scipy.optimize").linear_sum_assignment
        costs = _costs(logits, boxes, assigned).cpu().numpy()
        first = 1
        for image, length in enumerate(assigned.lengths):
            for layer in range(layers):
                chosen, objects = solve(costs[layer, image, :, : min(length, most)])
                found[layer, image, chosen] = first + objects
            first += length
    return tensor_on(logits.device, found, torch.int64)


def _costs(logits: Tensor, boxes: Tensor, assigned: QueryTargets) -> Tensor:
    """Compute the cost of each pair: (layers, batch, queries, most objects); what is no number costs the most."""
    rows = assigned.rows
    places = (assigned.labels[rows] - FIRST_LABEL).clamp(min=0)[:, None].expand(*logits.shape[:3], -1)
    scores = logits.sigmoid().gather(3, places)
    of_right = _COST_ALPHA * (1 - scores) ** _GAMMA * -(scores + _LEAST_PROBABILITY).log()
    of_wrong = (1 - _COST_ALPHA) * scores**_GAMMA * -(1 - scores + _LEAST_PROBABILITY).log()
    objects = assigned.boxes[rows]
    distances = torch.cdist(boxes, objects.expand(len(boxes), -1, -1, -1), p=1.0)
    shape = assigned.shape
    likeness = matched_giou(in_pixels(boxes, shape)[..., :, None, :], in_pixels(objects, shape)[:, None])
    costs = _CLASS_COST * (of_right - of_wrong) + _L1_COST * distances - _GIOU_COST * likeness
    most = torch.finfo(costs.dtype).max
    return costs.nan_to_num(nan=most, posinf=most, neginf=most)


def losses_of_layers(logits: Tensor, boxes: Tensor, rows: Tensor, assigned: QueryTargets) -> dict[str, Tensor]:
    """Compute the losses, each summed over a layer's objects: (layers,).

    Logits are (layers, batch, queries, classes), boxes (layers, batch, queries, 4), and rows, int64 (layers, batch,
    queries), those of the object that each learns, 0 for none.
    """
    is_object = rows > 0
    weights, wanted = assigned.weights[rows], assigned.boxes[rows]
    found, corners = in_pixels(boxes, assigned.shape), in_pixels(wanted, assigned.shape)
    likeness = matched_iou(found.detach(), corners) * is_object
    labels = (assigned.labels[rows] - FIRST_LABEL).clamp(min=0)[..., None]
    scores = torch.zeros_like(logits).scatter_(3, labels, likeness[..., None])
    classes = torch.zeros_like(logits).scatter_(3, labels, is_object.to(logits.dtype)[..., None])
    # Varifocal (Zhang et al., 2020): what is no object weighs the less the better that is seen.
    focus = _ALPHA * logits.detach().sigmoid() ** _GAMMA * (1 - classes) + scores
    entropy = F.binary_cross_entropy_with_logits(logits, scores, focus, reduction="none").sum(3)
    sums = {
        "classification": _CLASSES * entropy * torch.where(is_object, weights, 1.0),
        "boxes": _L1 * (boxes - wanted).abs().sum(3) * weights,
        "giou": _GIOU * (1 - matched_giou(found, corners)) * weights,
    }
    return {name: each.sum((1, 2)) for name, each in sums.items()}


def rt_detr(value: RtDetr, generator: Generator) -> RtDetrNet:
    """Make the net of an `RtDetr`."""
    return RtDetrNet(value, SIZES[value.backbone], generator)


def _projection(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
