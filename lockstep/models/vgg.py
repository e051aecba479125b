"""The features of VGG16, with the layers numbered as in torchvision (Simonyan and Zisserman, 2014)."""

from __future__ import annotations

from torch import Generator, nn

from lockstep.models.initial_weights import give_memory, without_memory
from lockstep.models.layers import kaiming_fan_out

_BLOCKS = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
"""The number and the channels of the convolutions before each pool."""


def vgg16_features(*, generator: Generator | None = None) -> nn.Sequential:
    """Make the 31 layers: 13 convolutions of 3x3 with ReLU, and after each block of them a maximum of stride 2.

    Layer 22 is the ReLU of conv4_3, at stride 8; layer 29 that of conv5_3, at stride 16.
    """
    layers: list[nn.Module] = []
    inputs = 3
    with without_memory():
        for count, outputs in _BLOCKS:
            for _ in range(count):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
                inputs = outputs
            layers.append(nn.MaxPool2d(2, stride=2))
    features = give_memory(nn.Sequential(*layers))
    kaiming_fan_out(features, generator)
    return features
