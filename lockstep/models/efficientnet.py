"""EfficientNets B0 to B7 without their classifier, with the layers of TensorFlow's (Tan and Le, 2019)."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.models.initial_weights import give_memory, without_memory
from lockstep.models.layers import (
    Conv2dNormActivation,
    InvertedResidual,
    NormLayer,
    Padding,
    kaiming_fan_out,
    make_divisible,
)
from lockstep.models.mobilenet import TORCHVISION_BATCH_NORM, SqueezeExcitation

Size = Literal[0, 1, 2, 3, 4, 5, 6, 7]
_SCALES = ((1.0, 1.0), (1.0, 1.1), (1.1, 1.2), (1.2, 1.4), (1.4, 1.8), (1.6, 2.2), (1.8, 2.6), (2.0, 3.1))
"""Factors of the channels and of the number of blocks, of B0 to B7."""
_STEM_CHANNELS, _DROPPED = 32, 0.2
_SWISH = partial(nn.SiLU, inplace=True)


class _Stage(NamedTuple):
    kernel_size: int
    factor: int
    """How many times a block expands its channels."""
    outputs: int
    blocks: int
    stride: int


_STAGES = (
    _Stage(3, 1, 16, 1, 1),
    _Stage(3, 6, 24, 2, 2),
    _Stage(5, 6, 40, 2, 2),
    _Stage(3, 6, 80, 3, 2),
    _Stage(5, 6, 112, 3, 1),
    _Stage(5, 6, 192, 4, 2),
    _Stage(3, 6, 320, 1, 1),
)


def efficientnet_features(
    size: Size,
    *,
    norm_layer: NormLayer = TORCHVISION_BATCH_NORM,
    padding: Padding = "symmetric",
    generator: Generator | None = None,
) -> nn.Sequential:
    """Make the layers from images to the last block, at stride 32.

    They are "stem", then the blocks: "1_0" is the first one of the first of seven stages, which reach the strides 2, 4,
    8, 16, 16, 32 and 32. In training blocks with residuals are left out at random, the later the more often. Weights of
    TensorFlow give its numbers with the padding "same".
    """
    width, depth = _SCALES[size]
    made = partial(Conv2dNormActivation, norm_layer=norm_layer, padding=padding)
    counts = [math.ceil(stage.blocks * depth) for stage in _STAGES]
    features, number = nn.Sequential(), 0
    with without_memory():
        inputs = make_divisible(_STEM_CHANNELS * width)
        features.add_module("stem", made(3, inputs, 3, 2, activation_layer=_SWISH))
        for index, (stage, count) in enumerate(zip(_STAGES, counts, strict=True), start=1):
            outputs = make_divisible(stage.outputs * width)
            for block in range(count):
                stride, expanded = stage.stride if block == 0 else 1, stage.factor * inputs
                is_residual = stride == 1 and inputs == outputs
                layers: list[nn.Module] = []
                if stage.factor > 1:
                    layers.append(made(inputs, expanded, 1, activation_layer=_SWISH))
                layers += [
                    made(expanded, expanded, stage.kernel_size, stride, groups=expanded, activation_layer=_SWISH),
                    SqueezeExcitation(expanded, max(1, inputs // 4), smooth=True),
                    made(expanded, outputs, 1, activation_layer=None),
                ]
                if is_residual:
                    layers.append(StochasticDepth(_DROPPED * number / sum(counts)))
                features.add_module(f"{index}_{block}", InvertedResidual("block", layers, is_residual=is_residual))
                inputs, number = outputs, number + 1
    give_memory(features)
    kaiming_fan_out(features, generator)
    return features


class StochasticDepth(nn.Module):
    """Sets this share of a batch's maps to 0 in training; the others are larger for it (Huang et al., 2016)."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, hidden: Tensor) -> Tensor:
        """Keep the shape, (batch, ...)."""
        if not self.training or not self.share:
            return hidden
        kept = torch.ones((len(hidden), *[1] * (hidden.ndim - 1)), dtype=hidden.dtype, device=hidden.device)
        return hidden * F.dropout(kept, self.share)
