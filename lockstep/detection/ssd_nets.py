"""The layers of the SSDs that are values of recipes: a classifier's, cut where a feature map is taken, and more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.detection.anchors import anchors_per_cell
from lockstep.detection.box_configs import (
    AnchorGrid,
    DefaultBoxGenerator,
    FlexibleGridAnchorGenerator,
    SsdMatcher,
)
from lockstep.detection.ssd import Postprocess, SsdHead, SsdNet, SsdSettings, per_class_detections
from lockstep.models.initial_weights import clear_statistics, without_memory
from lockstep.models.layers import RELU6, Conv2dNormActivation, NormLayer
from lockstep.models.mobilenet_v3 import mobilenet_v3_features
from lockstep.models.squeezenet import Fire, squeezenet_features
from lockstep.models.vgg import vgg16_features

if TYPE_CHECKING:
    from lockstep.detection.values import SqueezeSsd, Ssd300, Ssdlite

_SCALE = 10.0
_VGG_POOL3, _VGG_POOL4 = 16, 23
_LITE_SPLIT = 13  # the inverted residual that goes from stride 16 to 32
_LITE_NORM: NormLayer = partial(nn.BatchNorm2d, eps=0.001, momentum=0.03)
_PADDING = 3
"""Zeros around an image, of which SqueezeNet itself adds none: the cells at the edges see as much of it as the others,
and in the middle of what each sees is its corner at (stride - 4) pixels."""
_CAFFE_MEAN = (123.68, 116.779, 103.939)


class SqueezeNetMaps(nn.Module):
    """Maps of SqueezeNet 1.1, and on top of them maps that each have half the height and width of the one before.

    The maps of the trained net have values in the hundreds: without the norms, predictors learn little from few images.

    Args:
        layers: numbers of the features whose outputs are maps, in order. 3 and 4 have a cell for 4 x 4 pixels, 6 and 7
            for 8 x 8, 9 to 12 for 16 x 16. What is above the last one is left out.
        num_extra: maps on top of the last one.
        extra_channels: of these.
    """

    def __init__(self, layers: Sequence[int], num_extra: int = 0, extra_channels: int = 256) -> None:
        super().__init__()
        self.features = nn.Sequential(*list(squeezenet_features())[: layers[-1] + 1])
        self._layers = frozenset(layers)
        fires = [self.features[layer] for layer in layers]
        channels = [2 * fire.expand1x1.out_channels for fire in fires if isinstance(fire, Fire)]
        self.extra = nn.ModuleList(
            _halving(channels[-1] if number == 0 else extra_channels, extra_channels) for number in range(num_extra)
        )
        self.out_channels = [*channels, *[extra_channels] * num_extra]
        """Of each map."""
        self.norms = nn.ModuleList(L2Norm(each, _SCALE) for each in self.out_channels)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map images (batch, 3, height, width) to feature maps, the finest first."""
        maps, hidden = list[Tensor](), F.pad(images, (_PADDING,) * 4)
        for number, layer in enumerate(self.features):
            hidden = layer(hidden)
            if number in self._layers:
                maps.append(hidden)
        for block in self.extra:
            hidden = block(hidden)
            maps.append(hidden)
        return [norm(each) for norm, each in zip(self.norms, maps, strict=True)]


class L2Norm(nn.Module):
    """Divides the channels of each cell by their Euclidean norm, and multiplies each by a number that is learned.

    Args:
        channels: of the map.
        scale: the number at first.
    """

    def __init__(self, channels: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the numbers as they are at first."""
        nn.init.constant_(self.weight, self.scale)

    def forward(self, hidden: Tensor) -> Tensor:
        """Keep the shape, (batch, channels, height, width)."""
        return F.normalize(hidden) * self.weight[:, None, None]


class VggMaps(nn.Module):
    """Maps of VGG16, the first after its fourth block, and of layers on top, as in SSD300 (Liu et al., 2016)."""

    out_channels = (512, 1024, 512, 256, 256, 256)
    """Of each map."""

    def __init__(self, generator: Generator | None = None) -> None:
        super().__init__()
        vgg = [*vgg16_features(generator=generator)]
        vgg[_VGG_POOL3] = nn.MaxPool2d(2, stride=2, ceil_mode=True)
        self.features = nn.Sequential(*vgg[:_VGG_POOL4])
        with without_memory():
            dense = nn.Sequential(
                nn.MaxPool2d(3, stride=1, padding=1),
                nn.Conv2d(512, 1024, 3, padding=6, dilation=6),
                nn.ReLU(inplace=True),
                nn.Conv2d(1024, 1024, 1),
                nn.ReLU(inplace=True),
            )
            shrinking = [_halving(1024, 512), _halving(512, 256), _cutting(256, 256), _cutting(256, 256)]
        for layers in (dense, *shrinking):
            _xavier(layers.to_empty(device="cpu"), generator)
        self.extra = nn.ModuleList([nn.Sequential(*vgg[_VGG_POOL4:-1], dense), *shrinking])
        self.scale_weight = nn.Parameter(torch.full((512,), 20.0))

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map images (batch, 3, height, width) to feature maps, the finest first."""
        hidden = self.features(images)
        maps = [F.normalize(hidden) * self.scale_weight[:, None, None]]
        for block in self.extra:
            hidden = block(hidden)
            maps.append(hidden)
        return maps


class MobileNetMaps(nn.Module):
    """Maps of MobileNetV3 large, after the expansion of its last stride and at its end, and of layers on top.

    Args:
        reduced_tail: the last blocks have half the channels.
        generator: draws the initial weights.
    """

    def __init__(self, *, reduced_tail: bool, generator: Generator | None = None) -> None:
        super().__init__()
        net = mobilenet_v3_features(reduced_tail=reduced_tail, norm_layer=_LITE_NORM, generator=generator)
        block = cast(nn.Sequential, net.get_submodule(f"{_LITE_SPLIT}.block"))
        expansion, last = (cast(Conv2dNormActivation, layer).out_channels for layer in (block[0], net[-1]))
        # A slice of a Sequential keeps the names of its children, so the parts are named as in torchvision.
        self.features = nn.Sequential(
            nn.Sequential(*[*net][:_LITE_SPLIT], block[0]), nn.Sequential(block[1:], *[*net][_LITE_SPLIT + 1 :])
        )
        channels = (last, 512, 256, 256, 128)
        with without_memory():
            extra = nn.ModuleList(_lite_halving(*pair) for pair in pairwise(channels))
        self.extra = extra.to_empty(device="cpu")
        self.out_channels = (expansion, *channels)
        """Of each map."""

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map images (batch, 3, height, width) to feature maps, the finest first."""
        maps, hidden = list[Tensor](), images
        for block in (*self.features, *self.extra):
            hidden = block(hidden)
            maps.append(hidden)
        return maps


def _halving(inputs: int, outputs: int) -> nn.Sequential:
    """Make a 1x1 convolution to half the channels, and one of 3x3 with stride 2, as the extra layers of SSD300."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs // 2, 1),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs // 2, outputs, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
    )


def _cutting(inputs: int, outputs: int) -> nn.Sequential:
    """Make the same without stride and padding, which takes a row away at each side."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs // 2, 1),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs // 2, outputs, 3),
        nn.ReLU(inplace=True),
    )


def _lite_halving(inputs: int, outputs: int) -> nn.Sequential:
    """Make a 1x1 convolution to half the channels, a depthwise one with stride 2, and a 1x1 convolution."""
    made = partial(Conv2dNormActivation, norm_layer=_LITE_NORM, activation_layer=RELU6)
    half = outputs // 2
    return nn.Sequential(made(inputs, half, 1), made(half, half, 3, 2, groups=half), made(half, outputs, 1))


def ssd300(value: Ssd300, generator: Generator) -> SsdNet:
    """Make the net of an `Ssd300`."""
    settings = SsdSettings(
        value.num_classes,
        DefaultBoxGenerator(
            ((2.0,), (2.0, 3.0), (2.0, 3.0), (2.0, 3.0), (2.0,), (2.0,)),
            (0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05),
            (8, 16, 32, 64, 100, 300),
        ),
        _postprocess(value, candidates_per_class=400),
        pixel_mean=(0.48235 * 255, 0.45882 * 255, 0.40784 * 255),
        pixel_std=(1.0, 1.0, 1.0),
        smallest_image=value.smallest_image,
    )
    backbone = VggMaps(generator)
    with without_memory():
        head = _head(_predictor, backbone.out_channels, settings)
    _xavier(head.to_empty(device="cpu"), generator)
    return SsdNet(settings, backbone, head)


def ssdlite(value: Ssdlite, generator: Generator) -> SsdNet:
    """Make the net of an `Ssdlite`."""
    settings = SsdSettings(
        value.num_classes,
        DefaultBoxGenerator(((2.0, 3.0),) * 6, (0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.0)),
        _postprocess(value, candidates_per_class=300),
        pixel_mean=(127.5, 127.5, 127.5),
        pixel_std=(127.5, 127.5, 127.5),
        smallest_image=value.smallest_image,
    )
    backbone = MobileNetMaps(reduced_tail=value.reduced_tail, generator=generator)
    with without_memory():
        head = _head(_lite_predictor, backbone.out_channels, settings)
    net = SsdNet(settings, backbone, head.to_empty(device="cpu"))
    clear_statistics(net)
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.normal_(layer.weight, std=0.03, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return net


def squeeze_ssd(value: SqueezeSsd, generator: Generator) -> SsdNet:
    """Make the net of a `SqueezeSsd`."""
    grids = [
        AnchorGrid(
            stride,
            stride,
            tuple(size for _ in value.aspect_ratios for size in sizes),
            tuple(ratio for ratio in value.aspect_ratios for _ in sizes),
            min(stride, 16) - 1 - _PADDING,
            min(stride, 16) - 1 - _PADDING,
        )
        for stride, sizes in zip(value.strides, value.anchor_sizes, strict=True)
    ]
    settings = SsdSettings(
        value.num_classes,
        FlexibleGridAnchorGenerator(tuple(grids)),
        _postprocess(value, candidates_per_class=400),
        matcher=SsdMatcher(value.matched_threshold),
        pixel_mean=_CAFFE_MEAN,
        pixel_std=(1.0, 1.0, 1.0),
        bgr=True,
        smallest_image=value.smallest_image,
    )
    with without_memory():
        backbone = SqueezeNetMaps(value.layers, value.extra_maps)
        net = SsdNet(settings, backbone, _head(_predictor, backbone.out_channels, settings))
    _xavier(net.to_empty(device="cpu"), generator)
    for layer in net.modules():
        if isinstance(layer, L2Norm):
            layer.reset_parameters()
    for layer in backbone.features.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_uniform_(layer.weight, generator=generator)
    return net


def _head(
    predictor: Callable[[int, int], nn.Module], channels: Sequence[int], settings: SsdSettings, code_size: int = 4
) -> SsdHead:
    """Make a predictor of classes, the background among them, and one of boxes for each feature map."""
    numbers = anchors_per_cell(settings.anchor_generator)
    sizes = settings.num_classes + 1, code_size
    classification, regression = (
        [predictor(inputs, number * size) for inputs, number in zip(channels, numbers, strict=True)] for size in sizes
    )
    return SsdHead(classification, regression, *sizes)


def _predictor(inputs: int, outputs: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def _lite_predictor(inputs: int, outputs: int) -> nn.Module:
    depthwise = Conv2dNormActivation(inputs, inputs, 3, groups=inputs, norm_layer=_LITE_NORM, activation_layer=RELU6)
    return nn.Sequential(depthwise, nn.Conv2d(inputs, outputs, 1))


def _postprocess(value: Ssd300 | Ssdlite | SqueezeSsd, candidates_per_class: int) -> Postprocess:
    return partial(
        per_class_detections,
        score_threshold=value.score_threshold,
        iou_threshold=value.iou_threshold,
        candidates_per_class=candidates_per_class,
        max_detections=value.max_detections,
    )


def _xavier(layers: nn.Module, generator: Generator | None) -> None:
    """Draw Xavier's uniform weights; biases are 0."""
    for layer in layers.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
