"""MobileNet v1 without its classifier, with the layers named as in TF-Slim (Howard et al., 2017)."""

from __future__ import annotations

from functools import partial

from torch import Generator, nn

from lockstep.models.initial_weights import clear_statistics, truncated_normal, without_memory
from lockstep.models.layers import RELU6, ActivationLayer, Conv2dNormActivation, NormLayer, Padding

SLIM_BATCH_NORM: NormLayer = partial(nn.BatchNorm2d, eps=0.001, momentum=0.0003)
"""As TF-Slim's MobileNets have it: a decay of 0.9997."""

_STEM_CHANNELS = 32
_LAYERS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))
"""Channels after, and stride of, each depthwise convolution with the 1x1 one that follows it."""
_STDDEV = 0.09


def mobilenet_v1_features(
    *,
    depth_multiplier: float = 1.0,
    min_depth: int = 8,
    norm_layer: NormLayer | None = SLIM_BATCH_NORM,
    activation_layer: ActivationLayer | None = RELU6,
    padding: Padding = "same",
    generator: Generator | None = None,
) -> nn.Sequential:
    """Make the layers from images to 1024 channels at stride 32.

    They are "Conv2d_0", then "Conv2d_1_depthwise" and "Conv2d_1_pointwise" to "Conv2d_13_pointwise". "Conv2d_11" is the
    last one of stride 16.

    Args:
        depth_multiplier: scales the channels.
        min_depth: channels that remain, whatever the multiplier.
        norm_layer: makes the norms; None: there are none, and convolutions have biases.
        activation_layer: makes the activations; None: there are none.
        padding: "symmetric" pads both sides, as TF-Slim's "use_explicit_padding" does.
        generator: draws the initial weights; torch's default one where none is given.
    """

    def depth(channels: int) -> int:
        return max(int(channels * depth_multiplier), min_depth)

    active = partial(Conv2dNormActivation, norm_layer=norm_layer, activation_layer=activation_layer, padding=padding)
    features = nn.Sequential()
    with without_memory():
        inputs = depth(_STEM_CHANNELS)
        features.add_module("Conv2d_0", active(3, inputs, 3, 2))
        for index, (channels, stride) in enumerate(_LAYERS, start=1):
            features.add_module(f"Conv2d_{index}_depthwise", active(inputs, inputs, 3, stride, groups=inputs))
            features.add_module(f"Conv2d_{index}_pointwise", active(inputs, outputs := depth(channels), 1))
            inputs = outputs
    features.to_empty(device="cpu")
    clear_statistics(features)
    for module in features.modules():
        if isinstance(module, nn.Conv2d):
            truncated_normal(module.weight, _STDDEV, generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return features
