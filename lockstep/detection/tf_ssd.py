"""The SSDs of the Object Detection API: a net by its configuration, and its box predictors.

After predictors/convolutional_box_predictor.py and predictors/heads of tensorflow/models (Apache 2.0).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Generator, Tensor, nn

from lockstep.detection.anchors import anchors_per_cell, by_anchor
from lockstep.detection.blocks import PostProcessing
from lockstep.detection.box_coders import code_size
from lockstep.detection.boxes import Shape
from lockstep.detection.detector import Detections
from lockstep.detection.nms import postprocess
from lockstep.detection.ssd import AnchorTargets, SsdNet, SsdSettings
from lockstep.detection.tf_configs import (
    ConvolutionalBoxPredictor,
    Hyperparams,
    Ssd,
    WeightSharedConvolutionalBoxPredictor,
)
from lockstep.detection.tf_feature_maps import HALF, SsdFeatures, feature_maps
from lockstep.detection.tf_layers import PartPenalties, activation_layer, draw_weights, norm_layer
from lockstep.detection.tf_object_graphs import ssd_name_map
from lockstep.detection.tf_supported import check_supported
from lockstep.errors import InputError
from lockstep.models.initial_weights import check_images, give_memory, without_memory
from lockstep.models.layers import ActivationLayer, Conv2dNormActivation, NormLayer, conv2d
from lockstep.weights.names import NameMap


class TfSsd(SsdNet):
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
        super().__init__(_settings(config, backbone), backbone, head)
        parts = [(backbone.of_backbone, backbone.features), (backbone.on_top, backbone.extra), (head.hyperparams, head)]
        if config.feature_extractor.is_keras:  # the reference hands the regularizer on to Keras's depthwise layers
            parts = [(replace(hyperparams, regularize_depthwise=True), part) for hyperparams, part in parts]
        self._penalties = PartPenalties(self, parts if config.add_regularization_loss else ())

    @property
    def name_maps(self) -> Sequence[NameMap]:
        """The map from checkpoints of TensorFlow 2; those of TensorFlow 1 have shipped ones."""
        return (ssd_name_map(self),)

    def forward(self, inputs: Tensor, assigned: AnchorTargets | None = None) -> dict[str, Any]:
        """Predict logits, codes of boxes, and the anchors that they are relative to."""
        check_images("This SSD", inputs, channels=3, smallest=self.settings.smallest_image)
        return super().forward(inputs, assigned)

    def losses(self, predictions: Mapping[str, Any], assigned: AnchorTargets) -> dict[str, Tensor]:
        """Compute the sums of the losses of classes and boxes over the anchors that count, and the penalties."""
        return super().losses(predictions, assigned) | self._penalties.losses(self)


def _settings(config: Ssd, backbone: SsdFeatures) -> SsdSettings:
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
        pixel_mean=backbone.mean or HALF,
        pixel_std=backbone.std if backbone.mean else HALF,
        smallest_image=backbone.least_side,
    )


def _detections(
    config: PostProcessing, has_background: bool, boxes: Tensor, logits: Tensor, shape: Shape
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


class ConvolutionalHead(nn.Module):
    """Predicts by layers of each feature map's own, from maps of `in_channels`, with `per_cell` anchors a cell each.

    An anchor has `num_logits`, that of the background among them. A frozen batch norm normalises with the moving
    statistics in training too.
    """

    def __init__(
        self,
        config: ConvolutionalBoxPredictor,
        in_channels: Sequence[int],
        per_cell: Sequence[int],
        num_logits: int,
        *,
        freeze_batchnorm: bool = False,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        self.hyperparams = config.conv_hyperparams or Hyperparams()
        norm = norm_layer(self.hyperparams, freeze_batchnorm=freeze_batchnorm)
        made = partial(Conv2dNormActivation, norm_layer=norm, activation_layer=activation_layer(self.hyperparams))
        depths = [max(min(channels, config.max_depth), config.min_depth) for channels in in_channels]
        count = config.num_layers_before_predictor if min(depths) else 0
        dropout = nn.Dropout(1 - config.dropout_keep_probability if config.use_dropout else 0.0)

        def predictor(channels: int, outputs: int, dropout: nn.Module | None = None) -> nn.Sequential:
            layer = nn.Sequential() if dropout is None else nn.Sequential(OrderedDict(dropout=dropout))
            if config.use_depthwise:
                layer.add_module("depthwise", made(channels, channels, config.kernel_size, groups=channels))
            layer.add_module("predictor", conv2d(channels, outputs, 1 if config.use_depthwise else config.kernel_size))
            return layer

        with without_memory():
            self.layers = nn.ModuleList(
                nn.Sequential(*(made(depth if index else channels, depth, 1) for index in range(count)))
                for channels, depth in zip(in_channels, depths, strict=True)
            )
            pairs = [*zip(depths if count else in_channels, per_cell, strict=True)]
            self.box_predictor = nn.ModuleList(predictor(each, cell * config.box_code_size) for each, cell in pairs)
            self.class_predictor = nn.ModuleList(predictor(each, cell * num_logits, dropout) for each, cell in pairs)
        give_memory(self)
        draw_weights(self, self.hyperparams.initializer, generator)
        for each in self.class_predictor:
            nn.init.constant_(each.get_parameter("predictor.bias"), config.class_prediction_bias_init)
        self._sizes = (num_logits, config.box_code_size)
        self._is_sigmoid = config.apply_sigmoid_to_scores

    def forward(self, maps: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits (batch, anchors, classes) and codes (batch, anchors, code size)."""
        hidden = [layers(each) for layers, each in zip(self.layers, maps, strict=True)]
        logits, codes = (
            torch.cat([by_anchor(layer(each), size) for layer, each in zip(predictors, hidden, strict=True)], 1)
            for predictors, size in zip((self.class_predictor, self.box_predictor), self._sizes, strict=True)
        )
        return logits.sigmoid() if self._is_sigmoid else logits, codes


class WeightSharedHead(nn.Module):
    """Predicts by the same layers for all feature maps, each of which has norms of its own, as RetinaNet does.

    Maps of another number of channels than most have first go through a 1x1 convolution. The arguments are those of
    `ConvolutionalHead`; `per_cell` is one number again and again.
    """

    def __init__(
        self,
        config: WeightSharedConvolutionalBoxPredictor,
        in_channels: Sequence[int],
        per_cell: Sequence[int],
        num_logits: int,
        *,
        freeze_batchnorm: bool = False,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        self.hyperparams = config.conv_hyperparams or Hyperparams()
        norm = norm_layer(self.hyperparams, freeze_batchnorm=freeze_batchnorm)
        usual = Counter(in_channels).most_common(1)[0][0]
        width = config.depth if config.num_layers_before_predictor else usual
        projected = partial(Conv2dNormActivation, norm_layer=norm, activation_layer=None)

        def tower() -> _Tower:
            count = config.num_layers_before_predictor
            shared = [
                _convolution(
                    usual if index == 0 else width, width, config.kernel_size, config.use_depthwise, norm is None
                )
                for index in range(count)
            ]
            return _Tower(shared, width, len(in_channels), norm, activation_layer(self.hyperparams))

        def predictor(outputs: int) -> nn.Module:
            return _convolution(width, outputs, config.kernel_size, config.use_depthwise, True)

        with without_memory():
            is_uniform = len({*in_channels}) == 1
            self.projection = nn.ModuleList(
                nn.Identity() if is_uniform else projected(channels, usual, 1) for channels in in_channels
            )
            self.box_tower = tower()
            self.class_tower = None if config.share_prediction_tower else tower()
            self.dropout = nn.Dropout(1 - config.dropout_keep_probability if config.use_dropout else 0.0)
            self.box_predictor = predictor(per_cell[0] * config.box_code_size)
            self.class_predictor = predictor(per_cell[0] * num_logits)
        give_memory(self)
        draw_weights(self, self.hyperparams.initializer, generator)
        (bias,) = (each for name, each in self.class_predictor.named_parameters() if name.endswith("bias"))
        nn.init.constant_(bias, config.class_prediction_bias_init)
        self._sizes = (num_logits, config.box_code_size)
        self._is_sigmoid = config.score_converter == "sigmoid"
        self._clip = config.box_encodings_clip_range

    def forward(self, maps: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits (batch, anchors, classes) and codes (batch, anchors, code size)."""
        found = [
            self._predictions(projection(each), i)
            for i, (projection, each) in enumerate(zip(self.projection, maps, strict=True))
        ]
        logits, codes = (torch.cat(each, 1) for each in zip(*found, strict=True))
        if self._clip is not None:
            codes = codes.clamp(self._clip.min, self._clip.max)
        return logits.sigmoid() if self._is_sigmoid else logits, codes

    def _predictions(self, hidden: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Predict from the feature map of this number."""
        of_boxes = self.box_tower(hidden, index)
        of_classes = of_boxes if self.class_tower is None else self.class_tower(hidden, index)
        logits, codes = self.class_predictor(self.dropout(of_classes)), self.box_predictor(of_boxes)
        return by_anchor(logits, self._sizes[0]), by_anchor(codes, self._sizes[1])


class _Tower(nn.Module):
    """Convolutions that all feature maps share, with norms that they do not share."""

    def __init__(
        self,
        convolutions: Sequence[nn.Module],
        channels: int,
        num_maps: int,
        norm: NormLayer | None,
        activation: ActivationLayer | None,
    ) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(convolutions)
        self.norms = nn.ModuleList(
            nn.ModuleList(nn.Identity() if norm is None else norm(channels) for _ in range(num_maps))
            for _ in convolutions
        )
        self.activation = nn.Identity() if activation is None else activation()

    def forward(self, hidden: Tensor, index: int) -> Tensor:
        """Map a feature map, the one of this number."""
        for convolution, norms in zip(self.convolutions, self.norms, strict=True):
            norm = cast(nn.ModuleList, norms)[index]
            hidden = self.activation(norm(convolution(hidden)))
        return hidden


def _convolution(inputs: int, outputs: int, kernel_size: int, use_depthwise: bool, bias: bool) -> nn.Module:
    if not use_depthwise:
        return nn.Sequential(OrderedDict(convolution=conv2d(inputs, outputs, kernel_size, bias=bias)))
    depthwise = conv2d(inputs, inputs, kernel_size, groups=inputs, bias=False)
    return nn.Sequential(OrderedDict(depthwise=depthwise, convolution=conv2d(inputs, outputs, 1, bias=bias)))
