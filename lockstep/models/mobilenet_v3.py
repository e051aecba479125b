"""MobileNetV3, large and small, without its classifier, with the parameters named as in torchvision.

Howard et al., "Searching for MobileNetV3" (2019). Torchvision's and TF-Slim's nets are the same but for their padding
and batch norm.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.models.initial_weights import without_memory
from lockstep.models.layers import (
    HARD_SWISH,
    RELU,
    Conv2dNormActivation,
    InvertedResidual,
    NormLayer,
    Padding,
    kaiming_fan_out,
    make_divisible,
)

BATCH_NORM: NormLayer = partial(nn.BatchNorm2d, eps=0.001, momentum=0.01)
"""As torchvision's classifiers have it, and TF-Slim's but for the decay."""


class _Block(NamedTuple):
    kernel_size: int
    expanded: int
    outputs: int
    excitation: bool
    hard_swish: bool
    stride: int
    is_tail: bool = False
    """It is one of the last three, which detectors may have with half the channels, or dilated."""


_STEM_CHANNELS = 16
_BLOCKS: dict[str, tuple[_Block, ...]] = {
    "large": (
        _Block(3, 16, 16, False, False, 1),
        _Block(3, 64, 24, False, False, 2),
        _Block(3, 72, 24, False, False, 1),
        _Block(5, 72, 40, True, False, 2),
        _Block(5, 120, 40, True, False, 1),
        _Block(5, 120, 40, True, False, 1),
        _Block(3, 240, 80, False, True, 2),
        _Block(3, 200, 80, False, True, 1),
        _Block(3, 184, 80, False, True, 1),
        _Block(3, 184, 80, False, True, 1),
        _Block(3, 480, 112, True, True, 1),
        _Block(3, 672, 112, True, True, 1),
        _Block(5, 672, 160, True, True, 2, is_tail=True),
        _Block(5, 960, 160, True, True, 1, is_tail=True),
        _Block(5, 960, 160, True, True, 1, is_tail=True),
    ),
    "small": (
        _Block(3, 16, 16, True, False, 2),
        _Block(3, 72, 24, False, False, 2),
        _Block(3, 88, 24, False, False, 1),
        _Block(5, 96, 40, True, True, 2),
        _Block(5, 240, 40, True, True, 1),
        _Block(5, 240, 40, True, True, 1),
        _Block(5, 120, 48, True, True, 1),
        _Block(5, 144, 48, True, True, 1),
        _Block(5, 288, 96, True, True, 2, is_tail=True),
        _Block(5, 576, 96, True, True, 1, is_tail=True),
        _Block(5, 576, 96, True, True, 1, is_tail=True),
    ),
}


def mobilenet_v3_features(
    size: Literal["large", "small"] = "large",
    *,
    width_mult: float = 1.0,
    reduced_tail: bool = False,
    dilated: bool = False,
    norm_layer: NormLayer = BATCH_NORM,
    padding: Padding = "symmetric",
    generator: Generator | None = None,
) -> nn.Sequential:
    """Make the layers from images to 960 channels (small: 576) at stride 32: the "features" of torchvision's net.

    Layer 0 is the first convolution; 1 to 15 (small: 1 to 11) are the inverted residuals; then comes a 1x1 convolution.
    Stride 16 is reached by layer 7 (small: 4); layer 13 (small: 9) goes on to 32, after its expansion.

    Args:
        size: "large" or "small".
        width_mult: scales the channels, which stay divisible by 8.
        reduced_tail: halve the channels of the last three blocks, as nets of detectors do.
        dilated: dilate their convolutions in place of the last stride.
        norm_layer: makes the norms.
        padding: "same" where weights of TF-Slim are to give its numbers.
        generator: draws the initial weights; torch's default one where none is given.
    """

    def width(channels: int, is_tail: bool = False) -> int:
        return make_divisible((channels // 2 if is_tail and reduced_tail else channels) * width_mult)

    ends = partial(Conv2dNormActivation, norm_layer=norm_layer, activation_layer=HARD_SWISH, padding=padding)
    with without_memory():
        inputs = width(_STEM_CHANNELS)
        layers: list[nn.Module] = [ends(3, inputs, 3, 2)]
        for block in _BLOCKS[size]:
            # The first block of the tail expands what is not of the tail.
            expanded = width(block.expanded, block.is_tail and block.stride == 1)
            outputs = width(block.outputs, block.is_tail)
            is_dilated = dilated and block.is_tail
            layers.append(
                _inverted_residual(
                    inputs, expanded, outputs, block, is_dilated=is_dilated, norm_layer=norm_layer, padding=padding
                )
            )
            inputs = outputs
        layers.append(ends(inputs, 6 * inputs, 1))
    features = nn.Sequential(*layers).to_empty(device="cpu")
    kaiming_fan_out(features, generator)
    return features


def _inverted_residual(
    inputs: int,
    expanded: int,
    outputs: int,
    block: _Block,
    *,
    is_dilated: bool,
    norm_layer: NormLayer,
    padding: Padding,
) -> InvertedResidual:
    made = partial(Conv2dNormActivation, norm_layer=norm_layer, padding=padding)
    active = partial(made, activation_layer=HARD_SWISH if block.hard_swish else RELU)
    stride, dilation = (1, 2) if is_dilated else (block.stride, 1)
    layers: list[nn.Module] = [] if expanded == inputs else [active(inputs, expanded, 1)]
    layers.append(active(expanded, expanded, block.kernel_size, stride, dilation=dilation, groups=expanded))
    if block.excitation:
        layers.append(SqueezeExcitation(expanded, make_divisible(expanded // 4)))
    layers.append(made(expanded, outputs, 1, activation_layer=None))
    return InvertedResidual("block", layers, is_residual=block.stride == 1 and inputs == outputs)


class SqueezeExcitation(nn.Module):
    """Scales each channel by a share that two convolutions make of the means of all channels (Hu et al., 2017)."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Keep the shape."""
        squeezed = F.relu(self.fc1(hidden.mean((2, 3), keepdim=True)), inplace=True)
        return F.hardsigmoid(self.fc2(squeezed)) * hidden
