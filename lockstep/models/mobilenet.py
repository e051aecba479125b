"""MobileNets without their classifiers.

Version 1 has the layers named as in TF-Slim (Howard et al., 2017), versions 2 (Sandler et al., 2018) and 3 (Howard et
al., 2019) have the parameters named as in torchvision. Torchvision's and TF-Slim's nets of version 3 are the same but
for their padding and batch norm.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.models.initial_weights import clear_statistics, give_memory, truncated_normal, without_memory
from lockstep.models.layers import (
    HARD_SWISH,
    RELU,
    RELU6,
    ActivationLayer,
    Conv2dNormActivation,
    InvertedResidual,
    NormLayer,
    Padding,
    kaiming_fan_out,
    make_divisible,
)

SLIM_BATCH_NORM: NormLayer = partial(nn.BatchNorm2d, eps=0.001, momentum=0.0003)
"""As TF-Slim's MobileNets have it: a decay of 0.9997."""

_V1_STEM_CHANNELS = 32
_V1_LAYERS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5)
"""Channels after, and stride of, each depthwise convolution with the 1x1 one that follows it, but for the last two."""
_V1_LAST_STRIDES = (2, 1)
_V1_STDDEV = 0.09


def mobilenet_v1_features(
    *,
    depth_multiplier: float = 1.0,
    min_depth: int = 8,
    last_channels: tuple[int, int] = (1024, 1024),
    norm_layer: NormLayer | None = SLIM_BATCH_NORM,
    activation_layer: ActivationLayer | None = RELU6,
    padding: Padding = "same",
    generator: Generator | None = None,
) -> nn.Sequential:
    """Make the layers from images to the last channels, of "Conv2d_12" and "Conv2d_13", at stride 32.

    They are "Conv2d_0", then "Conv2d_1_depthwise" and "Conv2d_1_pointwise" to "Conv2d_13_pointwise". "Conv2d_11" is the
    last one of stride 16. The multiplier scales the channels, of which `min_depth` remain in any case. Without norms
    the convolutions have biases. "symmetric" padding is that of TF-Slim's "use_explicit_padding".
    """

    def depth(channels: int) -> int:
        return max(int(channels * depth_multiplier), min_depth)

    active = partial(Conv2dNormActivation, norm_layer=norm_layer, activation_layer=activation_layer, padding=padding)
    features = nn.Sequential()
    with without_memory():
        inputs = depth(_V1_STEM_CHANNELS)
        features.add_module("Conv2d_0", active(3, inputs, 3, 2))
        layers = *_V1_LAYERS, *zip(last_channels, _V1_LAST_STRIDES, strict=True)
        for index, (channels, stride) in enumerate(layers, start=1):
            features.add_module(f"Conv2d_{index}_depthwise", active(inputs, inputs, 3, stride, groups=inputs))
            features.add_module(f"Conv2d_{index}_pointwise", active(inputs, outputs := depth(channels), 1))
            inputs = outputs
    give_memory(features)
    clear_statistics(features)
    for module in features.modules():
        if isinstance(module, nn.Conv2d):
            truncated_normal(module.weight, _V1_STDDEV, generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return features


_V2_STEM_CHANNELS = 32
_V2_BLOCKS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""How many times a block expands its channels, its outputs, the number of such blocks, the stride of the first."""


def mobilenet_v2_features(
    *,
    width_mult: float = 1.0,
    min_depth: int = 8,
    last_channels: int = 1280,
    wide_last: bool = True,
    norm_layer: NormLayer = nn.BatchNorm2d,
    activation_layer: ActivationLayer | None = RELU6,
    padding: Padding = "symmetric",
    generator: Generator | None = None,
) -> nn.Sequential:
    """Make the layers from images to the last channels at stride 32: the "features" of torchvision's net.

    Layer 0 is the first convolution; 1 to 17 are the inverted residuals; then comes a 1x1 convolution. Stride 16 is
    reached by layer 7; layer 14 goes on to 32, after its expansion. The multiplier scales the channels, which stay
    divisible by 8, and of which `min_depth` remain in any case. Weights of TF-Slim give its numbers with the padding
    "same" and norms of epsilon 0.001.

    With `wide_last` the last layer keeps its channels where others get fewer, as torchvision's does and the Object
    Detection API's does not.
    """

    def width(channels: int, multiplier: float = width_mult) -> int:
        return make_divisible(channels * multiplier, least=min_depth)

    active = partial(Conv2dNormActivation, norm_layer=norm_layer, activation_layer=activation_layer, padding=padding)
    with without_memory():
        inputs = width(_V2_STEM_CHANNELS)
        layers: list[nn.Module] = [active(3, inputs, 3, 2)]
        for factor, channels, count, first_stride in _V2_BLOCKS:
            outputs = width(channels)
            for index in range(count):
                stride, expanded = first_stride if index == 0 else 1, factor * inputs
                inside: list[nn.Module] = [] if factor == 1 else [active(inputs, expanded, 1)]
                inside += [
                    active(expanded, expanded, 3, stride, groups=expanded),
                    nn.Conv2d(expanded, outputs, 1, bias=False),
                    norm_layer(outputs),
                ]
                layers.append(InvertedResidual("conv", inside, is_residual=stride == 1 and inputs == outputs))
                inputs = outputs
        layers.append(active(inputs, width(last_channels, max(1.0, width_mult) if wide_last else width_mult), 1))
    features = give_memory(nn.Sequential(*layers))
    kaiming_fan_out(features, generator)
    return features


TORCHVISION_BATCH_NORM: NormLayer = partial(nn.BatchNorm2d, eps=0.001, momentum=0.01)
"""As torchvision's classifiers have it, and TF-Slim's but for the decay."""


class _V3Block(NamedTuple):
    kernel_size: int
    expanded: int
    outputs: int
    excitation: bool
    hard_swish: bool
    stride: int
    is_tail: bool = False
    """It is one of the last three, which detectors have with half the channels."""


_V3_STEM_CHANNELS = 16
_V3_BLOCKS: dict[str, tuple[_V3Block, ...]] = {
    "large": (
        _V3Block(3, 16, 16, False, False, 1),
        _V3Block(3, 64, 24, False, False, 2),
        _V3Block(3, 72, 24, False, False, 1),
        _V3Block(5, 72, 40, True, False, 2),
        _V3Block(5, 120, 40, True, False, 1),
        _V3Block(5, 120, 40, True, False, 1),
        _V3Block(3, 240, 80, False, True, 2),
        _V3Block(3, 200, 80, False, True, 1),
        _V3Block(3, 184, 80, False, True, 1),
        _V3Block(3, 184, 80, False, True, 1),
        _V3Block(3, 480, 112, True, True, 1),
        _V3Block(3, 672, 112, True, True, 1),
        _V3Block(5, 672, 160, True, True, 2, is_tail=True),
        _V3Block(5, 960, 160, True, True, 1, is_tail=True),
        _V3Block(5, 960, 160, True, True, 1, is_tail=True),
    ),
    "small": (
        _V3Block(3, 16, 16, True, False, 2),
        _V3Block(3, 72, 24, False, False, 2),
        _V3Block(3, 88, 24, False, False, 1),
        _V3Block(5, 96, 40, True, True, 2),
        _V3Block(5, 240, 40, True, True, 1),
        _V3Block(5, 240, 40, True, True, 1),
        _V3Block(5, 120, 48, True, True, 1),
        _V3Block(5, 144, 48, True, True, 1),
        _V3Block(5, 288, 96, True, True, 2, is_tail=True),
        _V3Block(5, 576, 96, True, True, 1, is_tail=True),
        _V3Block(5, 576, 96, True, True, 1, is_tail=True),
    ),
}


def mobilenet_v3_features(
    size: Literal["large", "small"] = "large",
    *,
    width_mult: float = 1.0,
    reduced_tail: bool = False,
    norm_layer: NormLayer = TORCHVISION_BATCH_NORM,
    padding: Padding = "symmetric",
    generator: Generator | None = None,
) -> nn.Sequential:
    """Make the layers from images to 960 channels (small: 576) at stride 32: the "features" of torchvision's net.

    Layer 0 is the first convolution; 1 to 15 (small: 1 to 11) are the inverted residuals; then comes a 1x1 convolution.
    Stride 16 is reached by layer 7 (small: 4); layer 13 (small: 9) goes on to 32, after its expansion. The multiplier
    scales the channels, which stay divisible by 8. A reduced tail has half the channels in the last three blocks, as
    nets of detectors have it. Weights of TF-Slim give its numbers with the padding "same".
    """

    def width(channels: int, is_tail: bool = False) -> int:
        return make_divisible((channels // 2 if is_tail and reduced_tail else channels) * width_mult)

    ends = partial(Conv2dNormActivation, norm_layer=norm_layer, activation_layer=HARD_SWISH, padding=padding)
    with without_memory():
        inputs = width(_V3_STEM_CHANNELS)
        layers: list[nn.Module] = [ends(3, inputs, 3, 2)]
        for block in _V3_BLOCKS[size]:
            # The first block of the tail expands what is not of the tail.
            expanded = width(block.expanded, block.is_tail and block.stride == 1)
            outputs = width(block.outputs, block.is_tail)
            layers.append(_inverted_residual(inputs, expanded, outputs, block, norm_layer=norm_layer, padding=padding))
            inputs = outputs
        layers.append(ends(inputs, 6 * inputs, 1))
    features = give_memory(nn.Sequential(*layers))
    kaiming_fan_out(features, generator)
    return features


def _inverted_residual(
    inputs: int, expanded: int, outputs: int, block: _V3Block, *, norm_layer: NormLayer, padding: Padding
) -> InvertedResidual:
    made = partial(Conv2dNormActivation, norm_layer=norm_layer, padding=padding)
    active = partial(made, activation_layer=HARD_SWISH if block.hard_swish else RELU)
    layers: list[nn.Module] = [] if expanded == inputs else [active(inputs, expanded, 1)]
    layers.append(active(expanded, expanded, block.kernel_size, block.stride, groups=expanded))
    if block.excitation:
        layers.append(SqueezeExcitation(expanded, make_divisible(expanded // 4)))
    layers.append(made(expanded, outputs, 1, activation_layer=None))
    return InvertedResidual("block", layers, is_residual=block.stride == 1 and inputs == outputs)


class SqueezeExcitation(nn.Module):
    """Scales each channel by a share that two convolutions make of the means of all channels (Hu et al., 2017).

    They end with a ReLU and a hard sigmoid, or, if it is `smooth`, with a swish and a sigmoid.
    """

    def __init__(self, channels: int, squeezed: int, *, smooth: bool = False) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)
        self._smooth = smooth

    def forward(self, hidden: Tensor) -> Tensor:
        """Keep the shape."""
        squeezed = self.fc1(hidden.mean((2, 3), keepdim=True))
        if self._smooth:
            return torch.sigmoid(self.fc2(F.silu(squeezed))) * hidden
        return F.hardsigmoid(self.fc2(F.relu(squeezed, inplace=True))) * hidden
