"""The feature maps of the Object Detection API's CenterNets: one of stride 4, of a backbone and layers that double it.

After models/center_net_*_feature_extractor.py of tensorflow/models (Apache 2.0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.detection.tf_center_net_configs import CenterNetFeatureExtractor
from lockstep.images.normalisation import normalize
from lockstep.models.hourglass import StackedHourglass
from lockstep.models.layers import Conv2dNormActivation, IntermediateLayerGetter
from lockstep.models.mobilenet import mobilenet_v2_features
from lockstep.models.resnet import ResNet, ResNetV2

STRIDE = 4
"""Pixels to a cell."""
_NORM = partial(nn.BatchNorm2d, eps=0.001, momentum=0.01)
"""Batch norm by Keras's defaults."""
_RESNET_NORM = partial(nn.BatchNorm2d, eps=1.001e-5, momentum=0.01)
_MOBILENET_NORM = partial(nn.BatchNorm2d, eps=0.001, momentum=0.0003)
_CAFFE_MEAN = (103.939, 116.779, 123.68)
_ONES = (1.0, 1.0, 1.0)


class PyramidFeatures(nn.Module):
    """Goes down a pyramid to its finest map alone: doubles a map, adds the next one, smooths the sum.

    Args:
        features: maps images to four maps, of the strides 4 to 32.
        in_channels: of these.
        depths: channels that they have in the sums.
    """

    num_outputs = 1

    def __init__(self, features: nn.Module, in_channels: Sequence[int], depths: Sequence[int]) -> None:
        super().__init__()
        self.features = features
        self.out_channels = depths[0]
        self.lateral = nn.ModuleList(nn.Conv2d(*each, 1) for each in zip(in_channels, depths, strict=True))
        after = [depths[0], *depths[:-2]]
        self.smoothing = nn.ModuleList(
            Conv2dNormActivation(*each, norm_layer=_NORM) for each in zip(depths[:-1], after, strict=True)
        )

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map images (batch, 3, height, width) to one map (batch, channels, height / 4, width / 4)."""
        *finer, hidden = (layer(each) for layer, each in zip(self.lateral, self.features(images).values(), strict=True))
        for lateral, smoothing in zip(reversed(finer), reversed(self.smoothing), strict=True):
            hidden = smoothing(F.interpolate(hidden, scale_factor=2.0) + lateral)
        return [hidden]


class UpsampledFeatures(nn.Module):
    """Doubles the last map of a backbone three times: a convolution, then a transposed one of stride 2, both normed.

    Args:
        features: maps images to one map, of stride 32.
        in_channels: of this map.
        kernel_size: height and width of the first convolution of the two, in cells.
    """

    num_outputs = 1
    out_channels = 64

    def __init__(self, features: nn.Module, in_channels: int, kernel_size: int) -> None:
        super().__init__()
        self.features = features
        self.doubling = nn.Sequential()
        for inputs, outputs in pairwise((in_channels, 256, 128, self.out_channels)):
            self.doubling.append(Conv2dNormActivation(inputs, outputs, kernel_size, norm_layer=_NORM))
            self.doubling.append(nn.Sequential(TransposedSame(outputs), _NORM(outputs), nn.ReLU(inplace=True)))

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map images (batch, 3, height, width) to one map (batch, 64, height / 4, width / 4)."""
        (hidden,) = self.features(images).values()
        return [self.doubling(hidden)]


class TransposedSame(nn.ConvTranspose2d):
    """A transposed convolution of 3x3 that doubles height and width as TensorFlow's SAME does."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, 2, bias=False)

    def forward(self, hidden: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Map shape (batch, channels, height, width) to (batch, channels, 2 * height, 2 * width)."""
        return super().forward(hidden, output_size)[..., :-1, :-1]


class HourglassFeatures(StackedHourglass):
    """The maps of two hourglasses, of which the last one's predictions are those that count."""

    num_outputs = StackedHourglass.num_hourglasses


Features = PyramidFeatures | UpsampledFeatures | HourglassFeatures


def _resnet_pyramid(depth: Literal[50, 101], generator: Generator | None) -> Features:
    names = ("layer1", "layer2", "layer3", "layer4")
    net = ResNet(depth, style="keras_applications", norm_layer=_RESNET_NORM, generator=generator)
    getter = IntermediateLayerGetter(net, {name: name for name in names})
    return PyramidFeatures(getter, (256, 512, 1024, 2048), (64, 128, 256, 256))


def _resnet_v2(depth: Literal[50, 101], _: Generator | None) -> Features:
    getter = IntermediateLayerGetter(ResNetV2(depth, norm_layer=_RESNET_NORM), {"layer4": "layer4"})
    return UpsampledFeatures(getter, 2048, 3)


def _mobilenet(generator: Generator | None, *layers: str) -> IntermediateLayerGetter:
    net = mobilenet_v2_features(norm_layer=_MOBILENET_NORM, padding="same", generator=generator)
    return IntermediateLayerGetter(net, {name: name for name in layers})


def _mobilenet_pyramid(generator: Generator | None) -> Features:
    return PyramidFeatures(_mobilenet(generator, "3", "6", "10", "18"), (24, 32, 64, 1280), (24, 32, 64, 64))


def _mobilenet_v2(generator: Generator | None) -> Features:
    return UpsampledFeatures(_mobilenet(generator, "18"), 1280, 1)


@dataclass(frozen=True)
class _Extractor:
    """How features are made, with the generator of weights; what is done to pixels; what divides the images' sides."""

    make: Callable[[Generator | None], Features]
    pixels: Literal["caffe", "half", "as they are"]
    divisor: int = 32


EXTRACTORS: Mapping[str, _Extractor] = {
    "resnet_v1_50_fpn": _Extractor(partial(_resnet_pyramid, 50), "caffe"),
    "resnet_v1_101_fpn": _Extractor(partial(_resnet_pyramid, 101), "caffe"),
    "resnet_v2_50": _Extractor(partial(_resnet_v2, 50), "half"),
    "resnet_v2_101": _Extractor(partial(_resnet_v2, 101), "half"),
    "mobilenet_v2": _Extractor(_mobilenet_v2, "half"),
    "mobilenet_v2_fpn": _Extractor(_mobilenet_pyramid, "half"),
    "hourglass_104": _Extractor(lambda _: HourglassFeatures(), "as they are", 128),
}
"""The feature extractors that there are, by the reference's names."""


def preprocessed(config: CenterNetFeatureExtractor, images: Tensor) -> Tensor:
    """Make the input of a feature extractor of images of 0 to 255, as the configuration and its net want it."""
    if config.bgr_ordering:
        images = images.flip(1)
    images = normalize(images, config.channel_means or (0.0, 0.0, 0.0), config.channel_stds or _ONES)
    match EXTRACTORS[config.type].pixels:
        case "caffe":
            return normalize(images.flip(1), _CAFFE_MEAN, _ONES)
        case "half":
            return images / 127.5 - 1
    return images
