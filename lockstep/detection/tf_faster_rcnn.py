"""The Faster and Mask R-CNNs of the Object Detection API, and its R-FCNs: a net by its configuration.

The second stage sees crops of the one feature map of the first (C4), through the last layers of the backbone; that of
an R-FCN sees all of the map through them, and then crops what they predict. After
meta_architectures/{faster_rcnn,rfcn}_meta_arch.py and predictors/{mask_rcnn,rfcn}_box_predictor.py of tensorflow/models
(Apache 2.0).
Losses are means over the images of a tower, of the means over what was drawn on each, from torch's global stream.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lockstep.detection import blocks
from lockstep.detection.anchor_matching import IGNORED, hard_examples, match_images
from lockstep.detection.anchors import BackboneAnchors, anchors_per_cell, by_anchor
from lockstep.detection.box_coders import decode, encode
from lockstep.detection.boxes import Shape, area, clip
from lockstep.detection.detector import DetectionModel, Detections, Targets
from lockstep.detection.losses import classification_loss
from lockstep.detection.nms import postprocess, tried_nms
from lockstep.detection.regions import (
    ROUNDS,
    AssignedAnchors,
    DrawnAnchors,
    Proposals,
    Regions,
    by_image,
    drawn_anchors,
    drawn_regions,
    found_regions,
    ignoring,
    in_blocks,
    labels_of,
    learning_regions,
    masks_of,
    object_boxes,
    places_that_learn,
    read_with_kinds,
    region_matches,
    with_masks,
)
from lockstep.detection.roi_align import crop_and_resize, position_sensitive_crop
from lockstep.detection.tf_configs import FasterRcnn, Hyperparams, MaskRcnnBoxPredictor, RfcnBoxPredictor
from lockstep.detection.tf_layers import PartPenalties, activation_layer, draw_weights, norm_layer
from lockstep.detection.tf_object_graphs import faster_rcnn_name_map
from lockstep.detection.tf_region_features import REGION_FEATURES
from lockstep.detection.tf_supported import check_supported
from lockstep.images.normalisation import normalize
from lockstep.models.initial_weights import check_images, give_memory, without_memory
from lockstep.models.layers import Conv2dNormActivation, conv2d
from lockstep.tensors import reading_waits, tensor_on
from lockstep.weights.name_maps import FASTER_RCNN_NETS, with_mask_layers
from lockstep.weights.names import NameMap

CANDIDATES = 4096
"""The best boxes of an image, among which NMS looks for proposals first where reading waits."""
_LEAST_SIDE = 33
_CODER = blocks.FasterRcnnBoxCoder()
_ANCHOR_MATCHER = blocks.ArgmaxMatcher(0.7, 0.3, force_match_for_each_row=True)
_REGION_MATCHER = blocks.ArgmaxMatcher(0.5, 0.5)


class TfFasterRcnn(DetectionModel):
    """A Faster R-CNN of the Object Detection API, a Mask R-CNN, or an R-FCN.

    Args:
        config: raises InputError for one that `check_supported` refuses.
        generator: draws the initial weights; torch's default one where none is given.
    """

    backbone_prefixes = ("backbone.", "second_stage.")

    def __init__(self, config: FasterRcnn, generator: Generator | None = None) -> None:
        super().__init__()
        check_supported(config)
        self.config, self.num_classes = config, config.num_classes
        self._features = REGION_FEATURES[config.feature_extractor.net]
        first, second = self._features.channels
        self.backbone, self.second_stage = self._features.parts(config.feature_extractor, generator)
        self.rpn = FirstStage(config, first, generator=generator)
        predictor = config.second_stage_box_predictor
        self.box_head: BoxHead | RfcnHead
        self.mask_head: MaskHead | None = None
        if isinstance(predictor, RfcnBoxPredictor):
            self.box_head = RfcnHead(predictor, second, config.num_classes, generator=generator)
        else:
            assert isinstance(predictor, MaskRcnnBoxPredictor), "others are refused"
            self.box_head = BoxHead(predictor, second, config.num_classes, generator=generator)
            if predictor.predict_instance_masks:
                self.mask_head = MaskHead(predictor, second, config.num_classes, generator=generator)
        heads = [part for part in (self.rpn, self.box_head, self.mask_head) if part is not None]
        parts = [(part.hyperparams, part) for part in heads] if config.add_regularization_loss else []
        self._penalties = PartPenalties(self, parts)
        self._anchors = BackboneAnchors(config.first_stage_anchor_generator, self.backbone)

    @property
    def name_maps(self) -> Sequence[NameMap]:
        """The map from checkpoints of TensorFlow 2; those of TensorFlow 1 have shipped ones, but for masks."""
        maps = [faster_rcnn_name_map(self)]
        if self.mask_head is not None:
            net = re.sub(r"_resnet\d+$", "_resnet_v1", self.config.feature_extractor.net)
            maps.append(with_mask_layers(FASTER_RCNN_NETS[net], len(self.mask_head.layers)))
        return maps

    def preprocess(self, images: Tensor) -> Tensor:
        """Normalise images (batch, 3, height, width), red, green and blue, 0 to 255, as the backbone's are."""
        return normalize(images.float(), self._features.mean, self._features.std)

    def anchors(self, shape: Shape, device: torch.device) -> Tensor:
        """Return all anchors on an input of this height and width, (anchors, 4); clipped to it, but for training."""
        (anchors,) = self._anchors(shape, device)
        return clip(anchors, shape) if self._clips_anchors else anchors

    @property
    def _clips_anchors(self) -> bool:
        """Whether anchors are clipped to the image; else those that reach out of it are left out."""
        return self.config.clip_anchors_to_image or not self.training

    @torch.no_grad()
    def assign(self, targets: Targets) -> AssignedAnchors:
        """Find which anchor can learn which object."""
        device = targets.boxes[0].device
        anchors = self.anchors(targets.shape, device)
        if self._clips_anchors:
            matches = match_images(_ANCHOR_MATCHER, blocks.IouSimilarity(), targets.boxes, anchors, targets.weights)
            return AssignedAnchors(targets, ignoring(matches, targets))
        inside = self._anchors.inside(targets.shape, device)
        matches = anchors.new_full((len(targets), len(anchors)), IGNORED, dtype=torch.int64)
        matches[:, inside] = match_images(
            _ANCHOR_MATCHER, blocks.IouSimilarity(), targets.boxes, anchors[inside], targets.weights
        )
        return AssignedAnchors(targets, ignoring(matches, targets))

    def forward(self, inputs: Tensor, assigned: AssignedAnchors | None = None) -> dict[str, Any]:
        """Predict logits and codes of all anchors, and of the proposals; in training, of those that are drawn."""
        check_images("This Faster R-CNN", inputs, channels=3, smallest=_LEAST_SIDE)
        shape, features = (inputs.shape[2], inputs.shape[3]), self.backbone(inputs)["0"]
        objectness, codes = self.rpn(features)
        found = objectness.detach().float(), codes.detach().float(), shape
        if assigned is None:
            drawn, regions = None, found_regions(self._proposed(*found))[0]
        else:
            drawn, regions = self._draw(*found, assigned)
        masks = None
        if isinstance(self.box_head, RfcnHead):
            shares = _shares(regions.boxes, shape)
            logits, region_codes = self.box_head(self.second_stage(features), shares, regions.image_of)
        else:
            hidden = self._features_of(features, regions, shape)
            logits, region_codes = self.box_head(hidden)
            if self.mask_head is not None and assigned is not None:
                masks = self.mask_head(hidden[places_that_learn(regions)])
        return {
            "objectness": objectness,
            "anchor_codes": codes,
            "drawn": drawn,
            "features": features,
            "regions": regions,
            "logits": logits,
            "codes": region_codes,
            "masks": masks,
            "shape": shape,
        }

    @torch.no_grad()
    def propose(self, objectness: Tensor, codes: Tensor, shape: Shape) -> list[Tensor]:
        """Return the proposals of each image, (proposals, 4), best first.

        Objectness is logits (batch, anchors, 2), of the background first, and codes are (batch, anchors, 4).
        """
        return [each.boxes for each in self._proposed(objectness, codes, shape)]

    @torch.no_grad()
    def _proposed(self, objectness: Tensor, codes: Tensor, shape: Shape) -> list[Detections]:
        boxes, scores = self._candidates(objectness, codes, shape)
        boxes, scores, config = boxes[:, :, None], scores[..., None], blocks.PostProcessing(self._proposal_rule)
        return postprocess(config, boxes, scores, shape, has_background=False)

    @torch.no_grad()
    def tried_proposals(
        self, objectness: Tensor, codes: Tensor, shape: Shape, rounds: int, num_candidates: int
    ) -> Proposals:
        """Return what `propose` does, without a read where reading waits.

        There NMS makes so many rounds over so many of the best boxes of each image. It is settled where these were
        enough, so that no other box would be a proposal.
        """
        if not reading_waits(codes.device):
            return in_blocks(self.propose(objectness, codes, shape))
        rule = self._proposal_rule
        boxes, scores = self._candidates(objectness, codes, shape)
        is_valid = scores > rule.score_threshold
        ranked = scores.masked_fill(~is_valid, -torch.inf).argsort(dim=1, descending=True, stable=True)
        order = ranked[:, :num_candidates]
        boxes = boxes.gather(1, order[..., None].expand(-1, -1, 4))
        kept, is_settled = tried_nms(boxes, rule.iou_threshold, is_valid.gather(1, order), rounds)
        kept &= kept.cumsum(1) <= rule.max_total_detections
        is_enough = (kept.sum(1) == rule.max_total_detections) | (is_valid.sum(1) <= order.shape[1])
        boxes = clip(boxes, shape)
        is_there = kept & (area(boxes) > 0)
        places = is_there.byte().argsort(dim=1, descending=True, stable=True)[:, : rule.max_total_detections]
        boxes = boxes.gather(1, places[..., None].expand(-1, -1, 4))
        return Proposals(boxes, is_there.gather(1, places), is_settled & is_enough.all())

    def _candidates(self, objectness: Tensor, codes: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        """Return boxes (batch, anchors, 4) and their scores (batch, anchors), below all for those of no use."""
        anchors = self.anchors(shape, codes.device)
        boxes = decode(_CODER, codes, anchors)
        is_usable = (anchors == clip(anchors, shape)).all(-1) & torch.isfinite(boxes).all(-1)
        return boxes, objectness.softmax(-1)[..., 1].masked_fill(~is_usable, -torch.inf)

    @property
    def _proposal_rule(self) -> blocks.BatchNonMaxSuppression:
        config, most = self.config, self.config.first_stage_max_proposals
        return blocks.BatchNonMaxSuppression(
            config.first_stage_nms_score_threshold, config.first_stage_nms_iou_threshold, most, most
        )

    @torch.no_grad()
    def _draw(
        self, objectness: Tensor, codes: Tensor, shape: Shape, assigned: AssignedAnchors
    ) -> tuple[DrawnAnchors, Regions]:
        """Draw what both stages learn from; the host reads once, all numbers of all images.

        The second stage learns from all proposals where a miner chooses among their losses.
        """
        config, rounds, num_candidates = self.config, ROUNDS, CANDIDATES
        while True:
            proposals = self.tried_proposals(objectness, codes, shape, rounds, num_candidates)
            matches = region_matches(_REGION_MATCHER, proposals, assigned.targets)
            (is_settled,), of_anchors, of_regions = read_with_kinds(
                proposals.is_settled[None], assigned.matches, matches
            )
            if is_settled:
                break
            rounds, num_candidates = 4 * rounds, 4 * num_candidates
        number, fraction = config.second_stage_batch_size, config.second_stage_balance_fraction
        if config.hard_example_miner is not None:
            number, fraction = config.first_stage_max_proposals, 1.0
        drawn = self.draw_anchors(assigned, of_anchors)
        return drawn, drawn_regions(proposals, matches, number, fraction, of_regions)

    def draw_anchors(self, assigned: AssignedAnchors, numbers: Sequence[list[int]] | None = None) -> DrawnAnchors:
        """Draw the anchors that the first stage learns from; the numbers are those of `kinds`, if they are known."""
        config, anchors = self.config, self.anchors(assigned.targets.shape, assigned.matches.device)
        number, fraction = config.first_stage_minibatch_size, config.first_stage_positive_balance_fraction
        return drawn_anchors(assigned, anchors, _CODER, number, fraction, numbers)

    def _features_of(self, features: Tensor, regions: Regions, shape: Shape) -> Tensor:
        """Return what the last layers of the backbone make of each region: (regions, channels, height, width)."""
        size = self.config.initial_crop_size
        kernel, stride = self.config.maxpool_kernel_size, self.config.maxpool_stride
        assert size is not None and kernel is not None and stride is not None, "a config without them is refused"  # noqa: PT018
        crops = crop_and_resize(features, _shares(regions.boxes, shape), regions.image_of, (size, size))
        hidden: Tensor = self.second_stage(F.max_pool2d(crops, kernel, stride))
        return hidden

    def losses(self, predictions: Mapping[str, Any], assigned: AssignedAnchors) -> dict[str, Tensor]:
        """Compute the losses of both stages, of the masks, and the penalties of the regularizers."""
        losses = self._first_stage_losses(predictions, assigned) | self._second_stage_losses(predictions, assigned)
        if predictions["masks"] is not None:
            losses["mask"] = self.config.second_stage_mask_prediction_loss_weight * _mask_loss(predictions, assigned)
        return losses | self._penalties.losses(self)

    def _first_stage_losses(self, predictions: Mapping[str, Any], assigned: AssignedAnchors) -> dict[str, Tensor]:
        drawn: DrawnAnchors = predictions["drawn"]
        logits = predictions["objectness"].float().flatten(0, 1)[drawn.places]
        codes = predictions["anchor_codes"].float().flatten(0, 1)[drawn.places]
        weights = _of_means(drawn.places // assigned.matches.shape[1], len(assigned.targets))
        of_classes = F.cross_entropy(logits, drawn.is_object.long(), reduction="none")
        of_boxes = F.huber_loss(codes, drawn.codes, reduction="none").sum(-1)
        of_boxes = torch.where(drawn.is_object > 0, of_boxes, 0)
        return {
            "rpn_classification": self.config.first_stage_objectness_loss_weight * (of_classes * weights).sum(),
            "rpn_localization": self.config.first_stage_localization_loss_weight * (of_boxes * weights).sum(),
        }

    def _second_stage_losses(self, predictions: Mapping[str, Any], assigned: AssignedAnchors) -> dict[str, Tensor]:
        config, regions = self.config, predictions["regions"]
        labels = labels_of(assigned.targets, regions)
        weights = _of_means(regions.image_of, len(assigned.targets))
        classes = (labels[:, None] == torch.arange(self.num_classes + 1, device=labels.device)).to(weights.dtype)
        of_classes = classification_loss(
            config.second_stage_classification_loss, predictions["logits"].float()[None], classes[None], weights[None]
        ).reshape(-1)
        codes = _of_labels(predictions["codes"].float(), labels)
        targets = encode(_CODER, object_boxes(assigned.targets, regions.image_of, regions.object_of), regions.boxes)
        of_boxes = F.huber_loss(codes, targets, reduction="none").sum(-1) * weights
        of_boxes = torch.where(labels > 0, of_boxes, 0) * config.second_stage_localization_loss_weight
        of_classes = of_classes * config.second_stage_classification_loss_weight
        if config.hard_example_miner is not None:
            counted = self._hard_regions(of_classes.detach(), of_boxes.detach(), regions)
            of_classes, of_boxes = of_classes * counted, of_boxes * counted
        return {"classification": of_classes.sum(), "localization": of_boxes.sum()}

    def _hard_regions(self, of_classes: Tensor, of_boxes: Tensor, regions: Regions) -> Tensor:
        """Say which regions count, bool (regions,)."""
        assert self.config.hard_example_miner is not None, "the caller has looked"
        miner = replace(self.config.hard_example_miner, max_negatives_per_positive=0)
        losses = {"both": of_classes + of_boxes, "classification": of_classes, "localization": of_boxes}[
            miner.loss_type
        ]
        # Images have different numbers of regions: those that pad come last, and overlap nothing.
        of_images = pad_sequence([*torch.split(losses, regions.lengths)], batch_first=True, padding_value=-torch.inf)
        boxes = pad_sequence([*torch.split(regions.boxes, regions.lengths)], batch_first=True)
        none = torch.zeros_like(of_images, dtype=torch.bool)
        counted = hard_examples(miner, of_images, boxes, none, none)
        places = [image * none.shape[1] + place for image, n in enumerate(regions.lengths) for place in range(n)]
        return counted.flatten()[tensor_on(losses.device, places, torch.int64)]

    def postprocess(self, predictions: Mapping[str, Any]) -> Sequence[Detections]:
        """Choose the detections of each image, and draw their masks, if the net has learned them."""
        regions, shape = predictions["regions"], predictions["shape"]
        boxes = decode(_CODER, predictions["codes"].float(), regions.boxes[:, None])
        # No score of what is no region is over a threshold.
        logits = predictions["logits"].float().masked_fill((regions.object_of == IGNORED)[:, None], torch.nan)
        config, detections = self.config.second_stage_post_processing, list[Detections]()
        for of_boxes, of_logits in zip(by_image(boxes, regions), by_image(logits, regions), strict=True):
            detections += postprocess(config, of_boxes, of_logits, shape)
        if self.mask_head is None:
            return detections
        regions, labels = found_regions(detections)
        masks = self.mask_head(self._features_of(predictions["features"], regions, shape)).float()
        return with_masks(detections, _of_labels(masks, labels).sigmoid(), regions)


def _mask_loss(predictions: Mapping[str, Any], assigned: AssignedAnchors) -> Tensor:
    """Compute the mean cross entropy of the masks of the regions that learn objects; 0 where there are none."""
    regions, targets = learning_regions(predictions["regions"]), assigned.targets
    logits = _of_labels(predictions["masks"].float(), labels_of(targets, regions))
    size, wanted = (logits.shape[1], logits.shape[2]), []
    of_images = (torch.split(part, regions.lengths) for part in (regions.boxes, regions.object_of))
    for masks, boxes, object_of in zip(masks_of(targets), *of_images, strict=True):
        # Masks are as large as their image, and the network's input may be larger.
        shares = _shares(boxes, (masks.shape[1], masks.shape[2]))
        wanted.append(crop_and_resize(masks[:, None].to(boxes.dtype), shares, object_of, size)[:, 0])
    return F.binary_cross_entropy_with_logits(logits, torch.cat(wanted), reduction="sum") / max(logits.numel(), 1)


def _of_labels(values: Tensor, labels: Tensor) -> Tensor:
    """Return what is predicted for each region's label: (n, classes or 1, ...) to (n, ...)."""
    places = (labels - 1).clamp(min=0, max=values.shape[1] - 1)
    return values[torch.arange(labels.shape[0], device=labels.device), places]


def _of_means(image_of: Tensor, num_images: int) -> Tensor:
    """Return the weights that make of a sum a mean over the images, of the means over what was drawn on each."""
    images = torch.arange(num_images, device=image_of.device)[:, None]
    counts = (image_of == images).sum(1).clamp(min=1)
    return 1 / (counts[image_of] * num_images).to(torch.float32)


def _shares(boxes: Tensor, shape: Shape) -> Tensor:
    return boxes / tensor_on(boxes.device, (*shape, *shape), boxes.dtype)


class FirstStage(nn.Module):
    """Predicts which anchors have objects, and their boxes, from a map of so many channels."""

    def __init__(self, config: FasterRcnn, channels: int, *, generator: Generator | None = None) -> None:
        super().__init__()
        self.hyperparams = config.first_stage_box_predictor_conv_hyperparams or Hyperparams()
        depth, kernel = config.first_stage_box_predictor_depth, config.first_stage_box_predictor_kernel_size
        (per_cell,) = anchors_per_cell(config.first_stage_anchor_generator)
        with without_memory():
            self.conv = conv2d(channels, depth, kernel, dilation=config.first_stage_atrous_rate)
            self.box_predictor = nn.Conv2d(depth, per_cell * 4, 1)
            self.class_predictor = nn.Conv2d(depth, per_cell * 2, 1)
        give_memory(self)
        draw_weights(self, self.hyperparams.initializer, generator)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (batch, anchors, 2), of the background first, and codes (batch, anchors, 4)."""
        hidden = F.relu6(self.conv(features))
        return by_anchor(self.class_predictor(hidden), 2), by_anchor(self.box_predictor(hidden), 4)


class BoxHead(nn.Module):
    """Predicts the classes of regions, and a box for each class or one for all, from features of so many channels."""

    def __init__(
        self, config: MaskRcnnBoxPredictor, channels: int, num_classes: int, *, generator: Generator | None = None
    ) -> None:
        super().__init__()
        self.hyperparams = config.fc_hyperparams or Hyperparams(op="fc")
        with without_memory():
            self.dropout = nn.Dropout(1 - config.dropout_keep_probability if config.use_dropout else 0.0)
            self.box_predictor = nn.Linear(channels, 4 * (1 if config.share_box_across_classes else num_classes))
            self.class_predictor = nn.Linear(channels, num_classes + 1)
        give_memory(self)
        draw_weights(self, self.hyperparams.initializer, generator)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (regions, 1 + classes), of the background first, and codes (regions, classes or 1, 4)."""
        means = self.dropout(hidden.mean((2, 3)))
        codes = self.box_predictor(means)
        return self.class_predictor(means), codes.view(codes.shape[0], codes.shape[1] // 4, 4)


class RfcnHead(nn.Module):
    """Predicts classes, and a box for each, by maps of scores for each part of an object (Dai et al.: R-FCN, 2016).

    The maps have as many channels as parts times predictions, one part after the other.
    """

    def __init__(
        self, config: RfcnBoxPredictor, channels: int, num_classes: int, *, generator: Generator | None = None
    ) -> None:
        super().__init__()
        self.hyperparams = config.conv_hyperparams or Hyperparams()
        activation = activation_layer(self.hyperparams)
        self._parts = (config.num_spatial_bins_height, config.num_spatial_bins_width)
        self._points = (config.crop_height, config.crop_width)
        count = math.prod(self._parts)
        with without_memory():
            self.reduce_depth = nn.Conv2d(channels, config.depth, 1)
            self.activation = nn.Identity() if activation is None else activation()
            self.refined_locations = nn.Conv2d(config.depth, count * num_classes * 4, 1)
            self.class_predictions = nn.Conv2d(config.depth, count * (num_classes + 1), 1)
        give_memory(self)
        draw_weights(self, self.hyperparams.initializer, generator)

    def forward(self, features: Tensor, boxes: Tensor, image_of: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (regions, 1 + classes), of the background first, and codes (regions, classes, 4).

        Features are of all of each image, and boxes of regions shares of it: see `position_sensitive_crop`.
        """
        hidden = self.activation(self.reduce_depth(features))
        logits, codes = (
            position_sensitive_crop(layer(hidden), boxes, image_of, self._parts, self._points)
            for layer in (self.class_predictions, self.refined_locations)
        )
        return logits, codes.view(codes.shape[0], codes.shape[1] // 4, 4)


class MaskHead(nn.Module):
    """Predicts a mask for each class or one for all, from features of so many channels."""

    def __init__(
        self, config: MaskRcnnBoxPredictor, channels: int, num_classes: int, *, generator: Generator | None = None
    ) -> None:
        super().__init__()
        self.hyperparams = config.conv_hyperparams or Hyperparams()
        self._size = (config.mask_height, config.mask_width)
        self._upsamples_first = not config.convolve_then_upsample_masks
        depth = config.mask_prediction_conv_depth or _mask_depth(channels, num_classes)
        count = config.mask_prediction_num_conv_layers - 1
        norm, activation = norm_layer(self.hyperparams), activation_layer(self.hyperparams)
        with without_memory():
            self.layers = nn.Sequential(
                *(
                    Conv2dNormActivation(
                        depth if number else channels, depth, norm_layer=norm, activation_layer=activation
                    )
                    for number in range(count)
                )
            )
            outputs = 1 if config.masks_are_class_agnostic else num_classes
            self.predictor = conv2d(depth if count else channels, outputs, 3)
        give_memory(self)
        draw_weights(self, self.hyperparams.initializer, generator)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits (regions, classes or 1, height, width)."""
        if self._upsamples_first:
            hidden = self._resized(hidden)
        hidden = self.layers(hidden)
        logits: Tensor = self.predictor(hidden if self._upsamples_first else self._resized(hidden))
        return logits

    def _resized(self, hidden: Tensor) -> Tensor:
        if not hidden.shape[0]:  # which torch does not resize
            return hidden.new_empty(0, hidden.shape[1], *self._size) + hidden.sum()
        return F.interpolate(hidden, self._size, mode="bilinear", align_corners=True)


def _mask_depth(channels: int, num_classes: int) -> int:
    """Return the channels of a mask's layers where the configuration leaves them to the reference's rule."""
    return int(2 ** round((math.log2(channels) * 2 + math.log2(num_classes) * 3) / 5))
