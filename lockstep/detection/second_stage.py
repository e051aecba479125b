"""The layers of a Faster R-CNN of the Object Detection API beside its ResNet: proposals, boxes, classes and masks.

Features of regions have 2048 channels, those of the first stage 1024.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.detection.anchors import anchors_per_cell
from lockstep.detection.hyperparams import activation_layer, draw_weights, norm_layer
from lockstep.detection.layer_configs import Hyperparams, MaskRcnnBoxPredictor
from lockstep.models.initial_weights import without_memory
from lockstep.models.layers import Conv2dNormActivation, NormLayer, conv2d, kaiming_fan_out
from lockstep.models.resnet import Bottleneck

if TYPE_CHECKING:
    from lockstep.detection.configs import FasterRcnn

_FIRST, _SECOND, _BLOCKS = 1024, 2048, 3


class FirstStage(nn.Module):
    """Predicts which anchors have objects, and their boxes.

    Args:
        config: of the detector.
        generator: draws the initial weights; torch's default one where none is given.
    """

    def __init__(self, config: FasterRcnn, *, generator: Generator | None = None) -> None:
        super().__init__()
        self.hyperparams = config.first_stage_box_predictor_conv_hyperparams or Hyperparams()
        depth, kernel = config.first_stage_box_predictor_depth, config.first_stage_box_predictor_kernel_size
        (per_cell,) = anchors_per_cell(config.first_stage_anchor_generator)
        with without_memory():
            self.conv = conv2d(_FIRST, depth, kernel, dilation=config.first_stage_atrous_rate)
            self.box_predictor = nn.Conv2d(depth, per_cell * 4, 1)
            self.class_predictor = nn.Conv2d(depth, per_cell * 2, 1)
        self.to_empty(device="cpu")
        draw_weights(self, self.hyperparams.initializer, generator)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (batch, anchors, 2), of the background first, and codes (batch, anchors, 4)."""
        hidden = F.relu6(self.conv(features))
        logits = self.class_predictor(hidden).permute(0, 2, 3, 1).reshape(len(features), -1, 2)
        return logits, self.box_predictor(hidden).permute(0, 2, 3, 1).reshape(len(features), -1, 4)


class BoxHead(nn.Module):
    """Predicts the classes of regions, and a box for each class or one for all.

    Args:
        config: of the predictor.
        num_classes: without the background.
        generator: draws the initial weights; torch's default one where none is given.
    """

    def __init__(self, config: MaskRcnnBoxPredictor, num_classes: int, *, generator: Generator | None = None) -> None:
        super().__init__()
        self.hyperparams = config.fc_hyperparams or Hyperparams(op="fc")
        with without_memory():
            self.dropout = nn.Dropout(1 - config.dropout_keep_probability if config.use_dropout else 0.0)
            self.box_predictor = nn.Linear(_SECOND, 4 * (1 if config.share_box_across_classes else num_classes))
            self.class_predictor = nn.Linear(_SECOND, num_classes + 1)
        self.to_empty(device="cpu")
        draw_weights(self, self.hyperparams.initializer, generator)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (regions, 1 + classes), of the background first, and codes (regions, classes or 1, 4)."""
        means = self.dropout(hidden.mean((2, 3)))
        codes = self.box_predictor(means)
        return self.class_predictor(means), codes.view(len(codes), codes.shape[1] // 4, 4)


class MaskHead(nn.Module):
    """Predicts a mask for each class or one for all.

    Args:
        config: of the predictor.
        num_classes: without the background.
        generator: draws the initial weights; torch's default one where none is given.
    """

    def __init__(self, config: MaskRcnnBoxPredictor, num_classes: int, *, generator: Generator | None = None) -> None:
        super().__init__()
        self.hyperparams = config.conv_hyperparams or Hyperparams()
        self._size = (config.mask_height, config.mask_width)
        self._upsamples_first = not config.convolve_then_upsample_masks
        depth = config.mask_prediction_conv_depth or _mask_depth(num_classes)
        count = config.mask_prediction_num_conv_layers - 1
        norm, activation = norm_layer(self.hyperparams), activation_layer(self.hyperparams)
        with without_memory():
            self.layers = nn.Sequential(
                *(
                    Conv2dNormActivation(
                        depth if number else _SECOND, depth, norm_layer=norm, activation_layer=activation
                    )
                    for number in range(count)
                )
            )
            outputs = 1 if config.masks_are_class_agnostic else num_classes
            self.predictor = conv2d(depth if count else _SECOND, outputs, 3)
        self.to_empty(device="cpu")
        draw_weights(self, self.hyperparams.initializer, generator)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits (regions, classes or 1, height, width)."""
        if self._upsamples_first:
            hidden = self._resized(hidden)
        hidden = self.layers(hidden)
        logits: Tensor = self.predictor(hidden if self._upsamples_first else self._resized(hidden))
        return logits

    def _resized(self, hidden: Tensor) -> Tensor:
        if not len(hidden):  # which torch does not resize
            return hidden.new_empty(0, hidden.shape[1], *self._size) + hidden.sum()
        return F.interpolate(hidden, self._size, mode="bilinear", align_corners=True)


def last_layer(norm: NormLayer, generator: Generator | None = None) -> nn.Sequential:
    """Make the last layer of a ResNet without its stride: it maps (regions, 1024, ...) to (regions, 2048, ...)."""
    with without_memory():
        layer = nn.Sequential(
            *(Bottleneck(_SECOND if number else _FIRST, _SECOND // 4, 1, 1, norm) for number in range(_BLOCKS))
        )
    layer.to_empty(device="cpu")
    kaiming_fan_out(layer, generator)
    return layer


def _mask_depth(num_classes: int) -> int:
    """Return the channels of a mask's layers where the configuration leaves them to the reference's rule."""
    return int(2 ** ((math.log2(_SECOND) * 2 + math.log2(num_classes) * 3) / 5))
