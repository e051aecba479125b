"""Inception-v2 without its classifier, as TF-Slim has it, with TF-Slim's names of layers.

Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate Shift"
(2015). The first convolution is depthwise separable there; all layers pad as TensorFlow's SAME does.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial

from torch import Generator, nn

from lockstep.models.initial_weights import give_memory, truncated_normal, without_memory
from lockstep.models.layers import (
    RELU,
    ActivationLayer,
    Branches,
    Conv2dNormActivation,
    MaxPool2dSame,
    NormLayer,
    conv2d,
)

_BLOCKS = {
    "Mixed_3b": (64, 64, 64, 64, 96, 32),
    "Mixed_3c": (64, 64, 96, 64, 96, 64),
    "Mixed_4a": (128, 160, 64, 96),
    "Mixed_4b": (224, 64, 96, 96, 128, 128),
    "Mixed_4c": (192, 96, 128, 96, 128, 128),
    "Mixed_4d": (160, 128, 160, 128, 160, 96),
    "Mixed_4e": (96, 128, 192, 160, 192, 96),
    "Mixed_5a": (128, 192, 192, 256),
    "Mixed_5b": (352, 192, 320, 160, 224, 128),
    "Mixed_5c": (352, 192, 320, 192, 224, 128),
}
"""Channels of the layers in a block's branches; those with four numbers halve height and width."""
_POOLS_MAXIMA = "Mixed_5c"
_COPIES = 8
"""Outputs of the first convolution for each colour, before they are joined."""
_STDDEVS = {
    r"^Conv2d_1a_7x7\.": 1.0,
    r"^Conv2d_2b_1x1\.|\.Conv2d_0b_1x1\.": 0.1,
    r"\.Branch_[12]\.Conv2d_0a_1x1\.|^Mixed_[45]a\.Branch_0\.Conv2d_0a_1x1\.": 0.09,
}
"""Standard deviations of the first weights that are TF-Slim's own, by a pattern of their names."""


def inception_v2_features(
    *,
    depth: Callable[[int], int] = int,
    norm_layer: NormLayer = nn.BatchNorm2d,
    activation_layer: ActivationLayer | None = RELU,
) -> nn.Sequential:
    """Make the layers from images to 1024 channels, each number scaled by `depth`: "Conv2d_1a_7x7" to "Mixed_5c".

    "Mixed_4a" to "Mixed_4e" have 576 channels at a stride of 16, those from "Mixed_5a" on 1024 at 32. First weights are
    still to be drawn, those of `draw_own_weights` last.
    """
    made = partial(Conv2dNormActivation, norm_layer=norm_layer, activation_layer=activation_layer, padding="same")
    stem, inputs = depth(64), depth(192)
    copies = 3 * min(stem // 3, _COPIES)
    with without_memory():
        separable = OrderedDict[str, nn.Module](
            depthwise=conv2d(3, copies, 7, 2, groups=3, bias=False, padding="same"), pointwise=made(copies, stem, 1)
        )
        layers = OrderedDict[str, nn.Module](
            Conv2d_1a_7x7=nn.Sequential(separable),
            MaxPool_2a_3x3=MaxPool2dSame(3, 2),
            Conv2d_2b_1x1=made(stem, stem, 1),
            Conv2d_2c_3x3=made(stem, inputs, 3),
            MaxPool_3a_3x3=MaxPool2dSame(3, 2),
        )
        for name, widths in _BLOCKS.items():
            scaled = {
                branch: {layer: depth(width) for layer, width in inside.items()}
                for branch, inside in _branches(*widths).items()
            }
            pool = nn.MaxPool2d(3, 1, 1) if name == _POOLS_MAXIMA else nn.AvgPool2d(3, 1, 1, count_include_pad=False)
            layers[name] = _block(inputs, scaled, pool, made)
            inputs = sum([*each.values()][-1] if each else inputs for each in scaled.values())
        net = nn.Sequential(layers)
    return give_memory(net)


def _branches(*widths: int) -> Mapping[str, Mapping[str, int]]:
    """Return the convolutions of each branch, and their outputs; the last branch has a pool before them."""
    if len(widths) == 4:  # a convolution "1a" has a stride of 2
        a, b, c, d = widths
        return {
            "Branch_0": {"Conv2d_0a_1x1": a, "Conv2d_1a_3x3": b},
            "Branch_1": {"Conv2d_0a_1x1": c, "Conv2d_0b_3x3": d, "Conv2d_1a_3x3": d},
            "Branch_2": {},
        }
    a, b, c, d, e, f = widths
    return {
        "Branch_0": {"Conv2d_0a_1x1": a},
        "Branch_1": {"Conv2d_0a_1x1": b, "Conv2d_0b_3x3": c},
        "Branch_2": {"Conv2d_0a_1x1": d, "Conv2d_0b_3x3": e, "Conv2d_0c_3x3": e},
        "Branch_3": {"Conv2d_0b_1x1": f},
    }


def _block(
    inputs: int, branches: Mapping[str, Mapping[str, int]], pool: nn.Module, made: Callable[..., nn.Module]
) -> Branches:
    block, (*_, last) = Branches(), branches
    for branch, widths in branches.items():
        layers, channels = OrderedDict[str, nn.Module](), inputs
        if branch == last:
            layers["Pool"] = pool if widths else MaxPool2dSame(3, 2)
        for name, outputs in widths.items():
            layers[name] = made(channels, outputs, int(name[-1]), 2 if "_1a_" in name else 1)
            channels = outputs
        block[branch] = nn.Sequential(layers)
    return block


def draw_own_weights(net: nn.Module, generator: Generator | None = None) -> None:
    """Draw the first weights of Inception-v2 that TF-Slim draws its own way, whatever those of others are."""
    for name, parameter in net.named_parameters():
        for pattern, stddev in _STDDEVS.items():
            if parameter.ndim == 4 and re.search(pattern, name):
                truncated_normal(parameter, stddev, generator)
