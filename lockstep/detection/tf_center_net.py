"""CenterNet of the Object Detection API: objects are peaks of a heat map, with a size and a place in their cell.

Objects of some classes may have keypoints: `lockstep.detection.tf_center_net_keypoints`.

After meta_architectures/center_net_meta_arch.py and core/target_assigner.py of tensorflow/models (Apache 2.0). A cell
is 4 x 4 pixels. With several hourglasses the losses are means over theirs, and the last one's predictions count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Generator, Tensor, nn

from lockstep.detection.anchors import by_anchor
from lockstep.detection.boxes import clip
from lockstep.detection.detector import DetectionModel, Detections, Targets
from lockstep.detection.losses import classification_loss, localization_loss
from lockstep.detection.targets import FIRST_LABEL
from lockstep.detection.tf_center_net_configs import CenterNet, PredictionHeadParams
from lockstep.detection.tf_center_net_features import EXTRACTORS, STRIDE, preprocessed
from lockstep.detection.tf_center_net_heat_maps import heat_maps, is_peak, spread_of
from lockstep.detection.tf_center_net_keypoints import (
    KeypointTargets,
    assign_keypoints,
    find_keypoints,
    keypoint_counts,
    keypoint_heads,
    keypoint_losses,
)
from lockstep.detection.tf_layers import draw_weights
from lockstep.detection.tf_object_graphs import center_net_name_map
from lockstep.detection.tf_supported import check_supported
from lockstep.models.initial_weights import check_images, give_memory, without_memory
from lockstep.models.layers import conv2d
from lockstep.tensors import tensor_on
from lockstep.weights.names import NameMap


class CenterTargets(NamedTuple):
    """What the cells of a batch learn."""

    heat_map: Tensor
    """(batch, cells, classes): 1 in the middle of an object."""
    places: Tensor
    """int64 (objects,): the cell of an object's middle, among those of all images."""
    sizes: Tensor
    """(objects, 2): height and width, in cells."""
    offsets: Tensor
    """(objects, 2): from the corner of the cell to the middle, in cells."""
    weights: Tensor
    """(objects,)."""
    keypoints: Sequence[KeypointTargets] = ()
    """What each task of keypoints learns."""


class TfCenterNet(DetectionModel):
    """A CenterNet of the Object Detection API.

    Args:
        config: raises InputError for one that `check_supported` refuses.
        generator: draws the initial weights; torch's default one where none is given.
    """

    anchors_fit_objects = False

    def __init__(self, config: CenterNet, generator: Generator | None = None) -> None:
        check_supported(config)
        super().__init__()
        self.config, self.num_classes = config, config.num_classes
        extractor, boxes, centre = (
            EXTRACTORS[config.feature_extractor.type],
            config.object_detection_task,
            config.object_center_params,
        )
        self.size_divisibility = extractor.divisor
        with without_memory():
            self.backbone = extractor.make(generator)
            channels, number = self.backbone.out_channels, self.backbone.num_outputs
            heads: dict[str, tuple[PredictionHeadParams, int, float | None]] = {
                "logits": (centre.center_head_params, config.num_classes, centre.heatmap_bias_init),
                "sizes": (boxes.scale_head_params, 2, None),
                "offsets": (boxes.offset_head_params, 2, None),
            }
            for task in config.keypoint_estimation_task:
                heads |= keypoint_heads(task)
            self.head = nn.ModuleDict(
                {
                    name: nn.ModuleList(_head(channels, layers, outputs) for _ in range(number))
                    for name, (layers, outputs, _) in heads.items()
                }
            )
        give_memory(self)
        draw_weights(self, None, generator)
        for name, (_, _, bias) in heads.items():
            if bias is not None:
                for layer in cast(nn.ModuleList, self.head[name]):
                    nn.init.constant_(layer.get_parameter("predictor.bias"), bias)

    @property
    def name_maps(self) -> Sequence[NameMap]:
        """The map from checkpoints of TensorFlow 2."""
        return (center_net_name_map(self),)

    def preprocess(self, images: Tensor) -> Tensor:
        """Bring images, (batch, 3, height, width) from 0 to 255, to the scale and order of the backbone."""
        return preprocessed(self.config.feature_extractor, images)

    @torch.no_grad()
    def assign(self, targets: Targets) -> CenterTargets:
        """Draw the heat maps, and find the cells of the objects and of their keypoints.

        Raises:
            DataError: the objects have not the keypoints that are learned.
        """
        height, width = (-(-side // STRIDE) for side in targets.shape)
        edges, weights = torch.cat([*targets.boxes]) / STRIDE, torch.cat([*targets.weights])
        counts = tensor_on(edges.device, [len(each) for each in targets.boxes], torch.int64)
        image_of = torch.repeat_interleave(counts, output_size=len(edges))
        middles, sides = (edges[:, :2] + edges[:, 2:]) / 2, edges[:, 2:] - edges[:, :2]
        row, column = middles.floor().long().unbind(1)
        row, column = row.clamp(0, height - 1), column.clamp(0, width - 1)
        cells = torch.stack([row, column], 1)
        spreads = spread_of(sides, self.config.object_center_params.min_box_overlap_iou)
        classes = torch.cat([*targets.classes]) * weights[:, None]
        maps = heat_maps(cells, spreads, classes, image_of, (len(targets), height, width))
        keypoints = [
            assign_keypoints(task, self.config.num_keypoints, targets, (height, width))
            for task in self.config.keypoint_estimation_task
        ]
        places = (image_of * height + row) * width + column
        return CenterTargets(maps, places, sides, middles - cells, weights, keypoints)

    def counts(self, assigned: CenterTargets) -> Mapping[str, Tensor]:
        """Count the objects whose weight is not 0, and the cells that learn keypoints."""
        counts = dict.fromkeys(("classification", "scale", "offset"), (assigned.weights != 0).sum())
        for task, found in zip(self.config.keypoint_estimation_task, assigned.keypoints, strict=True):
            counts |= keypoint_counts(task, found)
        return counts

    def forward(self, inputs: Tensor, assigned: CenterTargets | None = None) -> dict[str, Any]:
        """Predict, of each of the backbone's maps, logits (batch, cells, classes), sizes and offsets (batch, cells, 2).

        The sizes are of boxes around the middle of an object, the offsets that middle's, in cells. With keypoints their
        heat maps (batch, cells, keypoints), their offsets, and where they are from the middle of their object.
        """
        check_images("This CenterNet", inputs, channels=3, smallest=self.size_divisibility)
        maps = self.backbone(inputs)
        found: dict[str, Any] = {"shape": tuple(maps[-1].shape[2:])}
        for name, heads in self.head.items():
            predicted = [layer(each) for layer, each in zip(cast(nn.ModuleList, heads), maps, strict=True)]
            found[name] = [by_anchor(each, each.shape[1]) for each in predicted]
        return found

    def losses(self, predictions: Mapping[str, Any], assigned: CenterTargets) -> dict[str, Tensor]:
        """Compute the sums over cells, objects and keypoints: of the heat maps' loss, of those of sizes and places."""
        centre, boxes = self.config.object_center_params, self.config.object_detection_task
        of_cells = torch.ones_like(assigned.heat_map[..., 0])
        of_maps = [
            classification_loss(centre.classification_loss, logits.float(), assigned.heat_map, of_cells).sum()
            for logits in predictions["logits"]
        ]

        def of_objects(name: str, wanted: Tensor) -> Tensor:
            found = [each.float().flatten(0, 1)[assigned.places] for each in predictions[name]]
            losses = [
                localization_loss(boxes.localization_loss, each, wanted, assigned.weights).sum() for each in found
            ]
            return torch.stack(losses).mean() * boxes.task_loss_weight

        losses = {
            "classification": torch.stack(of_maps).mean() * centre.object_center_loss_weight,
            "scale": of_objects("sizes", assigned.sizes) * boxes.scale_loss_weight,
            "offset": of_objects("offsets", assigned.offsets) * boxes.offset_loss_weight,
        }
        for task, found in zip(self.config.keypoint_estimation_task, assigned.keypoints, strict=True):
            losses |= keypoint_losses(task, predictions, found)
        return losses

    def postprocess(self, predictions: Mapping[str, Any]) -> Sequence[Detections]:
        """Take the best peaks of the heat map, with what else their cells predict, and the keypoints of each."""
        config, (height, width) = self.config.object_center_params, predictions["shape"]
        logits, sizes, offsets = (predictions[name][-1].float() for name in ("logits", "sizes", "offsets"))
        scores = logits.sigmoid()
        peaks = scores * is_peak(scores.unflatten(1, (height, width)), config.peak_max_pool_kernel_size).flatten(1, 2)
        number = min(config.max_box_predictions, peaks[0].numel())
        top, order = peaks.flatten(1).topk(number)
        cells, is_found = order // self.num_classes, top > 0
        labels = torch.where(is_found, order % self.num_classes + FIRST_LABEL, 0)
        halves, moved = (each.gather(1, cells[..., None].expand(-1, -1, 2)) for each in (sizes.relu() / 2, offsets))
        middles = torch.stack([cells // width, cells % width], -1) + moved
        of_cells = clip(torch.cat([middles - halves, middles + halves], -1), (height, width))
        boxes = of_cells * STRIDE
        points = self._keypoints(predictions, cells, of_cells, labels) if self.config.keypoint_estimation_task else None
        if torch.compiler.is_exporting():
            return [Detections(torch.where(is_found[..., None], boxes, 0.0), top, labels, keypoints=points)]
        found = [
            Detections(*(each[own] for each in (of_boxes, of_scores, of_labels)))
            for of_boxes, of_scores, of_labels, own in zip(boxes, top, labels, is_found, strict=True)
        ]
        if points is None:
            return found
        # Those with a score of 0 are the last.
        return [each._replace(keypoints=block[: len(each.scores)]) for each, block in zip(found, points, strict=True)]

    def _keypoints(self, predictions: Mapping[str, Any], cells: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
        """Find the keypoints of all detections, (batch, detections, keypoints, 3): zeros where a class has none."""
        points = boxes.new_zeros(*labels.shape, self.config.num_keypoints, 3)
        for task in self.config.keypoint_estimation_task:
            found = find_keypoints(task, predictions, cells, boxes, predictions["shape"])
            found[..., :2] *= STRIDE
            is_own = (labels == task.label)[..., None, None]
            ids = tensor_on(points.device, task.ids, torch.int64)
            points.index_add_(2, ids, torch.where(is_own, found, 0.0))
        return points


def _head(channels: int, config: PredictionHeadParams, outputs: int) -> nn.Sequential:
    layers = OrderedDict[str, nn.Module]()
    kernels, depths = config.kernel_sizes or (3,), config.num_filters or (256,)
    for index, (depth, kernel) in enumerate(zip(depths, kernels, strict=True)):
        layers[f"conv{index}"], layers[f"relu{index}"] = conv2d(channels, depth, kernel), nn.ReLU(inplace=True)
        channels = depth
    layers["predictor"] = nn.Conv2d(channels, outputs, 1)
    return nn.Sequential(layers)
