"""The layers of the SSDs that are values of recipes: a classifier's, cut where a feature map is taken, and more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.detection.anchors import anchors_per_cell
from lockstep.detection.box_configs import AnchorGrid, FlexibleGridAnchorGenerator, SsdMatcher
from lockstep.detection.ssd import SsdHead, SsdNet, SsdSettings, per_class_detections
from lockstep.models.initial_weights import without_memory
from lockstep.models.squeezenet import Fire, squeezenet_features

if TYPE_CHECKING:
    from lockstep.detection.values import SqueezeSsd

_SCALE = 10.0
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


def _halving(inputs: int, outputs: int) -> nn.Sequential:
    """Make a 1x1 convolution to half the channels, and one of 3x3 with stride 2, as the extra layers of SSD300."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs // 2, 1),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs // 2, outputs, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
    )


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
        partial(
            per_class_detections,
            score_threshold=value.score_threshold,
            iou_threshold=value.iou_threshold,
            candidates_per_class=400,
            max_detections=value.max_detections,
        ),
        matcher=SsdMatcher(value.matched_threshold),
        pixel_mean=_CAFFE_MEAN,
        pixel_std=(1.0, 1.0, 1.0),
        bgr=True,
    )
    with without_memory():
        backbone = SqueezeNetMaps(value.layers, value.extra_maps)
        net = SsdNet(settings, backbone, _head(_predictor, backbone.out_channels, settings))
    net.to_empty(device="cpu")
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            nn.init.zeros_(_bias(layer))
        elif isinstance(layer, L2Norm):
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


def _bias(layer: nn.Conv2d) -> Tensor:
    assert layer.bias is not None, "made with one"
    return layer.bias
