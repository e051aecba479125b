"""MobileNetV2 without its classifier, with the parameters named as in torchvision (Sandler et al., 2018)."""

from __future__ import annotations

from functools import partial

from torch import Generator, nn

from lockstep.models.initial_weights import without_memory
from lockstep.models.layers import (
    RELU6,
    Conv2dNormActivation,
    InvertedResidual,
    NormLayer,
    Padding,
    kaiming_fan_out,
    make_divisible,
)

_STEM_CHANNELS, _LAST_CHANNELS = 32, 1280
_BLOCKS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""How many times a block expands its channels, its outputs, the number of such blocks, the stride of the first."""


def mobilenet_v2_features(
    *,
    width_mult: float = 1.0,
    min_depth: int = 8,
    wide_last: bool = True,
    norm_layer: NormLayer = nn.BatchNorm2d,
    padding: Padding = "symmetric",
    generator: Generator | None = None,
) -> nn.Sequential:
    """Make the layers from images to 1280 channels at stride 32: the "features" of torchvision's net.

    Layer 0 is the first convolution; 1 to 17 are the inverted residuals; then comes a 1x1 convolution. Stride 16 is
    reached by layer 7; layer 14 goes on to 32, after its expansion.

    Args:
        width_mult: scales the channels, which stay divisible by 8.
        min_depth: channels that remain, whatever the multiplier.
        wide_last: the last layer keeps its channels where others get fewer, as torchvision's does and the Object
            Detection API's does not.
        norm_layer: makes the norms; those of TF-Slim have epsilon 0.001.
        padding: "same" where weights of TF-Slim are to give its numbers.
        generator: draws the initial weights; torch's default one where none is given.
    """

    def width(channels: int, multiplier: float = width_mult) -> int:
        return make_divisible(channels * multiplier, least=min_depth)

    active = partial(Conv2dNormActivation, norm_layer=norm_layer, activation_layer=RELU6, padding=padding)
    with without_memory():
        inputs = width(_STEM_CHANNELS)
        layers: list[nn.Module] = [active(3, inputs, 3, 2)]
        for factor, channels, count, first_stride in _BLOCKS:
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
        layers.append(active(inputs, width(_LAST_CHANNELS, max(1.0, width_mult) if wide_last else width_mult), 1))
    features = nn.Sequential(*layers).to_empty(device="cpu")
    kaiming_fan_out(features, generator)
    return features
