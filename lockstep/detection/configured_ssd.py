"""The SSDs of the Object Detection API: a net by its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Generator, Tensor

from lockstep.detection.anchors import anchors_per_cell
from lockstep.detection.box_coders import code_size
from lockstep.detection.box_predictors import ConvolutionalHead, WeightSharedHead
from lockstep.detection.detector import Detections
from lockstep.detection.feature_maps import feature_maps
from lockstep.detection.hyperparams import penalties
from lockstep.detection.layer_configs import ConvolutionalBoxPredictor, WeightSharedConvolutionalBoxPredictor
from lockstep.detection.nms import postprocess
from lockstep.detection.ssd import AnchorTargets, SsdNet, SsdSettings
from lockstep.detection.supported import check_supported
from lockstep.errors import InputError
from lockstep.models.initial_weights import check_images

if TYPE_CHECKING:
    from lockstep.detection.configs import PostProcessing, Ssd

LEAST_SIDE = 33
"""The least height and width of images, in pixels, as in the reference."""
_HALF = (127.5, 127.5, 127.5)
"""Pixels go from -1 to 1."""


class ConfiguredSsd(SsdNet):
    """An SSD of the Object Detection API, whose losses hold those of its layers' regularizers.

    Args:
        config: raises InputError for one that `check_supported` refuses.
        generator: draws the initial weights; torch's default one where none is given.
    """

    def __init__(self, config: Ssd, generator: Generator | None = None) -> None:
        check_supported(config)
        freeze = config.freeze_batchnorm
        backbone = feature_maps(config.feature_extractor, freeze_batchnorm=freeze, generator=generator)
        per_cell = _per_cell(config, len(backbone.out_channels))
        arguments = (backbone.out_channels, per_cell, config.num_classes + config.add_background_class)
        predictor = config.box_predictor
        head: ConvolutionalHead | WeightSharedHead
        if isinstance(predictor, ConvolutionalBoxPredictor):
            head = ConvolutionalHead(predictor, *arguments, freeze_batchnorm=freeze, generator=generator)
        else:
            assert isinstance(predictor, WeightSharedConvolutionalBoxPredictor), "others are refused"
            head = WeightSharedHead(predictor, *arguments, freeze_batchnorm=freeze, generator=generator)
        super().__init__(_settings(config), backbone, head)
        parts = [
            (backbone.of_backbone, backbone.features),
            (backbone.on_top, backbone.extra),
            (head.hyperparams, head),
        ]
        self._penalties = penalties(self, parts) if config.add_regularization_loss else []

    def forward(self, inputs: Tensor, assigned: AnchorTargets | None = None) -> dict[str, Any]:
        """Predict logits, codes of boxes, and the anchors that they are relative to."""
        check_images("This SSD", inputs, channels=3, smallest=LEAST_SIDE)
        return super().forward(inputs, assigned)

    def losses(self, predictions: Mapping[str, Any], assigned: AnchorTargets) -> dict[str, Tensor]:
        """Compute the sums of the losses of classes and boxes over the anchors that count, and the penalties."""
        losses = super().losses(predictions, assigned)
        if self._penalties:
            parameters = dict(self.named_parameters())
            losses["regularization"] = torch.stack([each(parameters) for each in self._penalties]).sum()
        return losses


def _settings(config: Ssd) -> SsdSettings:
    of_class: Literal["class", "zeros"] = "zeros" if config.encode_background_as_zeros else "class"
    return SsdSettings(
        config.num_classes,
        config.anchor_generator,
        partial(_detections, config.post_processing, config.add_background_class),
        config.box_coder,
        config.matcher,
        config.similarity_calculator,
        config.loss,
        background=of_class if config.add_background_class else "none",
        one_label=False,
        negative_class_weight=config.negative_class_weight,
        normalize_loss_by_num_matches=config.normalize_loss_by_num_matches,
        normalize_loc_loss_by_codesize=config.normalize_loc_loss_by_codesize,
        pixel_mean=_HALF,
        pixel_std=_HALF,
    )


def _detections(
    config: PostProcessing, has_background: bool, boxes: Tensor, logits: Tensor, shape: tuple[int, int]
) -> list[Detections]:
    return postprocess(config, boxes[:, :, None], logits, shape, has_background=has_background)


def _per_cell(config: Ssd, num_maps: int) -> tuple[int, ...]:
    """Return the anchors of a cell for each feature map.

    Raises:
        InputError: anchors or codes are not those of the layers.
    """
    per_cell, codes = anchors_per_cell(config.anchor_generator), code_size(config.box_coder)
    if len(per_cell) != num_maps:
        raise InputError(
            "Each feature map of an SSD has anchors of its own.",
            given=f"anchors for {len(per_cell)} feature maps, and {num_maps} feature maps",
            expected="the same number of both",
            hint="correct model.anchor_generator (num_layers, or its levels), or model.feature_extractor.num_layers",
        )
    if isinstance(config.box_predictor, WeightSharedConvolutionalBoxPredictor) and len({*per_cell}) > 1:
        raise InputError(
            "Feature maps that share their predictor have as many anchors a cell.",
            given=f"anchors of a cell: {', '.join(map(str, per_cell))}",
            expected="one number for all feature maps",
            hint="set model.anchor_generator.reduce_boxes_in_lowest_layer=false, or take a convolutional_box_predictor",
        )
    given = getattr(config.box_predictor, "box_code_size", codes)
    if given != codes:
        raise InputError(
            "The box predictor does not predict codes of the box coder.",
            given=f"model.box_predictor.box_code_size={given}",
            expected=f"{codes} numbers, as the box coder has",
            hint=f"--set model.box_predictor.box_code_size={codes}",
        )
    return per_cell
