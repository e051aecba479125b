"""The feature extractors of the Object Detection API's Faster R-CNNs: a backbone, and layers for features of regions.

After models/faster_rcnn_*_feature_extractor.py of tensorflow/models (Apache 2.0).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Generator, nn

from lockstep.detection.tf_configs import BatchNorm, FasterRcnnFeatureExtractor
from lockstep.detection.tf_feature_maps import HALF, IMAGENET_MEAN, UNIT
from lockstep.detection.tf_layers import TfBatchNorm, draw_weights
from lockstep.models.inception_resnet_v2 import inception_resnet_v2_features
from lockstep.models.inception_v2 import draw_own_weights, inception_v2_features
from lockstep.models.initial_weights import give_memory, without_memory
from lockstep.models.layers import IntermediateLayerGetter, NormLayer, kaiming_fan_out
from lockstep.models.resnet import Bottleneck, ResNet

_Parts = tuple[nn.Module, nn.Module]
_Make = Callable[[FasterRcnnFeatureExtractor, NormLayer, Generator | None], _Parts]


@dataclass(frozen=True)
class RegionFeatures:
    """A feature extractor of the reference."""

    make: _Make
    """Makes the backbone, whose map is called "0", and the layers of the second stage."""
    channels: tuple[int, int]
    """Channels of the backbone's map, and of the features of regions."""
    batch_norm: BatchNorm
    """Batch norm after each convolution, whatever the configuration."""
    mean: tuple[float, float, float] = HALF
    """Subtracted from red, green and blue of 0 to 255."""
    std: tuple[float, float, float] = HALF
    """They are divided by it then."""

    def parts(self, config: FasterRcnnFeatureExtractor, generator: Generator | None = None) -> _Parts:
        """Make the backbone, and the layers of the second stage."""
        norm = partial(TfBatchNorm, self.batch_norm, is_fixed=not config.batch_norm_trainable)
        return self.make(config, norm, generator)


def _output_stride(config: FasterRcnnFeatureExtractor) -> Literal[8, 16]:
    return 8 if config.first_stage_features_stride == 8 else 16


_FIRST, _SECOND, _BLOCKS = 1024, 2048, 3


def _resnet(
    depth: Literal[50, 101, 152], config: FasterRcnnFeatureExtractor, norm: NormLayer, generator: Generator | None
) -> _Parts:
    net = ResNet(
        depth,
        output_stride=_output_stride(config),
        style="keras" if config.is_keras else "slim",
        norm_layer=norm,
        generator=generator,
    )
    layer4 = _last_layer(norm, generator, is_keras=config.is_keras)
    return IntermediateLayerGetter(net, {"layer3": "0"}), nn.Sequential(OrderedDict(layer4=layer4))


def _last_layer(norm: NormLayer, generator: Generator | None, *, is_keras: bool) -> nn.Sequential:
    """Make the last layer of a ResNet: it maps (regions, 1024, ...) to (regions, 2048, ...).

    The one of Keras has its stride of 2, in its first convolution; that of TF-Slim has none here.
    """
    strides = [2 if is_keras and not number else 1 for number in range(_BLOCKS)]
    with without_memory():
        layer = nn.Sequential(
            *(
                Bottleneck(_SECOND if number else _FIRST, _SECOND // 4, stride, 1, norm, stride_in_1x1=True)
                for number, stride in enumerate(strides)
            )
        )
    give_memory(layer)
    kaiming_fan_out(layer, generator)
    return layer


def _inception_v2(config: FasterRcnnFeatureExtractor, norm: NormLayer, generator: Generator | None) -> _Parts:
    """Its stride is 16, whatever the configuration."""
    net = inception_v2_features(norm_layer=norm)
    draw_weights(net, None, generator)
    draw_own_weights(net, generator)
    return _split(net, "Mixed_4e")


def _inception_resnet_v2(config: FasterRcnnFeatureExtractor, norm: NormLayer, generator: Generator | None) -> _Parts:
    style: Literal["slim", "keras"] = "keras" if config.is_keras else "slim"
    net = inception_resnet_v2_features(output_stride=_output_stride(config), norm_layer=norm, style=style)
    draw_weights(net, None, generator)
    return _split(net, "repeat_1")


def _split(net: nn.Module, last: str) -> _Parts:
    """Part a net after the last layer of the backbone."""
    layers = dict(net.named_children())
    names = [*layers]
    rest = OrderedDict((name, layers[name]) for name in names[names.index(last) + 1 :])
    return IntermediateLayerGetter(net, {last: "0"}), nn.Sequential(rest)


def _of_resnet(depth: Literal[50, 101, 152]) -> RegionFeatures:
    norm = BatchNorm(decay=0.997, epsilon=1e-5, scale=True)
    return RegionFeatures(partial(_resnet, depth), (_FIRST, _SECOND), norm, IMAGENET_MEAN, UNIT)


REGION_FEATURES = {
    "faster_rcnn_resnet50": _of_resnet(50),
    "faster_rcnn_resnet101": _of_resnet(101),
    "faster_rcnn_resnet152": _of_resnet(152),
    "faster_rcnn_inception_v2": RegionFeatures(_inception_v2, (576, 1024), BatchNorm(decay=0.9997, scale=True)),
    "faster_rcnn_inception_resnet_v2": RegionFeatures(_inception_resnet_v2, (1088, 1536), BatchNorm(decay=0.9997)),
}
"""The feature extractors that there are, by the reference's names."""
