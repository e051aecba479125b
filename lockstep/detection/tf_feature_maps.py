"""The feature maps of the Object Detection API's SSDs: some of a backbone's, and smaller ones made of the last.

After models/feature_map_generators.py and models/ssd_*_feature_extractor.py of tensorflow/models (Apache 2.0).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.detection.tf_configs import (
    BatchNorm,
    BidirectionalFeaturePyramidNetworks,
    FeaturePyramidNetworks,
    Hyperparams,
    L2Regularizer,
    SsdFeatureExtractor,
    TruncatedNormalInitializer,
    VarianceScalingInitializer,
)
from lockstep.detection.tf_layers import activation_layer, draw_weights, norm_layer
from lockstep.models.efficientnet import Size, efficientnet_features
from lockstep.models.inception_v2 import draw_own_weights, inception_v2_features
from lockstep.models.inception_v3 import InceptionV3Net, Layers
from lockstep.models.initial_weights import give_memory, without_memory
from lockstep.models.layers import (
    RELU,
    RELU6,
    ActivationLayer,
    Conv2dNormActivation,
    IntermediateLayerGetter,
    MaxPool2dSame,
    NormLayer,
    Padding,
    conv2d,
)
from lockstep.models.mobilenet import mobilenet_v1_features, mobilenet_v2_features, mobilenet_v3_features
from lockstep.models.resnet import ResNet
from lockstep.models.values import InceptionV3

SLIM = Hyperparams(
    regularizer=L2Regularizer(4e-5),
    initializer=TruncatedNormalInitializer(stddev=0.09),
    activation="relu_6",
    batch_norm=BatchNorm(decay=0.9997, scale=True),
)
"""The layers of TF-Slim's MobileNets, where a configuration does not override them."""

_LEAST_SHARE = 0.0001
"""Added to the sum of the shares of maps, as in the reference."""
_FIRST_LEVEL = 2
"""The finest level that a pyramid can be made of, of stride 4."""


class SsdFeatures(nn.Module):
    """Base of the feature maps of SSDs: a backbone whose type is in `EXTRACTORS`, and what is on top of it.

    A frozen batch norm normalises with the moving statistics in training too.
    """

    def __init__(
        self, config: SsdFeatureExtractor, *, freeze_batchnorm: bool = False, generator: Generator | None = None
    ) -> None:
        super().__init__()
        extractor = EXTRACTORS[config.net]
        self.on_top = config.conv_hyperparams or Hyperparams()
        """The hyperparameters of the layers on top of the backbone."""
        own = extractor.keras_hyperparams if config.is_keras else extractor.hyperparams
        self.of_backbone = self.on_top if config.override_base_feature_extractor_hyperparams else own
        self.mean, self.std, self.least_side = extractor.mean, extractor.std, extractor.least_side
        style = _Style(config, self.of_backbone, freeze_batchnorm, generator)
        layers = self._layers_of(config, extractor)
        self.features = IntermediateLayerGetter(extractor.make(style), {name: name for name in layers})
        self.out_channels = _channels_of(self.features)
        """Channels of each map."""
        self._pad_to_multiple = config.pad_to_multiple
        self._smooths_on = config.is_keras
        made = partial(
            Conv2dNormActivation,
            norm_layer=norm_layer(self.on_top, freeze_batchnorm=freeze_batchnorm),
            activation_layer=activation_layer(self.on_top),
            padding=style.padding,
        )
        with without_memory():
            self.extra = self._on_top(style, made, extractor)
        give_memory(self.extra)
        draw_weights(self.features, self.of_backbone.initializer, generator)
        if extractor.draw_own_weights is not None:
            extractor.draw_own_weights(self.features, generator)
        draw_weights(self.extra, self.on_top.initializer, generator)
        for module in self.extra.modules():
            if isinstance(module, PyramidNode):
                module.reset_parameters()

    def _layers_of(self, config: SsdFeatureExtractor, extractor: _Extractor) -> Sequence[str]:
        """Return the layers of the backbone whose maps are taken."""
        raise NotImplementedError

    def _on_top(self, style: _Style, made: Callable[..., nn.Module], extractor: _Extractor) -> nn.Module:
        """Make the layers on top, and set the channels of all maps."""
        raise NotImplementedError

    def _maps(self, images: Tensor) -> list[Tensor]:
        height, width = images.shape[2:]
        bottom, right = -height % self._pad_to_multiple, -width % self._pad_to_multiple
        padded = F.pad(images, (0, right, 0, bottom)) if bottom or right else images
        return [*self.features(padded).values()]


class MultiResolutionFeatureMaps(SsdFeatures):
    """Maps images to maps of the backbone and, on top of them, maps that each have half the size of the one before."""

    def _layers_of(self, config: SsdFeatureExtractor, extractor: _Extractor) -> Sequence[str]:
        return extractor.layers[: config.num_layers]

    def _on_top(self, style: _Style, made: Callable[..., nn.Module], extractor: _Extractor) -> nn.ModuleList:
        layers = nn.ModuleList()
        for nominal in extractor.depths[: style.config.num_layers - len(self.out_channels)]:
            inputs, half, outputs = self.out_channels[-1], style.depth(nominal / 2), style.depth(nominal)
            layer = nn.Sequential(OrderedDict(reduce=made(inputs, half, 1)))
            if style.config.use_depthwise:
                layer.add_module("depthwise", made(half, half, 3, 2, groups=half))
            layer.add_module("halve", made(half, outputs, *((1,) if style.config.use_depthwise else (3, 2))))
            layers.append(layer)
            self.out_channels.append(outputs)
        return layers

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map images of shape (batch, 3, height, width), from -1 to 1, to feature maps, the largest first."""
        maps = self._maps(images)
        for layer in self.extra.children():
            maps.append(layer(maps[-1]))
        return maps


class TopDownFeatureMaps(SsdFeatures):
    """Maps images to a feature pyramid: all maps have one number of channels, and see what coarser ones saw."""

    def _layers_of(self, config: SsdFeatureExtractor, extractor: _Extractor) -> Sequence[str]:
        pyramid = config.fpn or FeaturePyramidNetworks()
        return extractor.layers[pyramid.min_level - _FIRST_LEVEL : pyramid.max_level - _FIRST_LEVEL + 1]

    def _on_top(self, style: _Style, made: Callable[..., nn.Module], extractor: _Extractor) -> nn.ModuleDict:
        pyramid = style.config.fpn or FeaturePyramidNetworks()
        depth, count = style.depth(pyramid.additional_layer_depth), len(self.out_channels)
        num_levels = pyramid.max_level - pyramid.min_level + 1

        def layer(stride: int) -> nn.Module:
            if not style.config.use_depthwise:
                return nn.Sequential(OrderedDict(convolution=made(depth, depth, 3, stride)))
            depthwise = conv2d(depth, depth, 3, stride, groups=depth, bias=False, padding=style.padding)
            return nn.Sequential(OrderedDict(depthwise=depthwise, convolution=made(depth, depth, 1)))

        layers: dict[str, list[nn.Module]] = {
            "projection": [
                Conv2dNormActivation(channels, depth, 1, norm_layer=None, activation_layer=None)
                for channels in self.out_channels
            ],
            "smoothing": [layer(1) for _ in range(count - 1)],
            "bottom_up": [layer(2) for _ in range(num_levels - count)],
        }
        self.out_channels = [depth] * num_levels
        return nn.ModuleDict({name: nn.ModuleList(each) for name, each in layers.items()})

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map images of shape (batch, 3, height, width), from -1 to 1, to feature maps, the largest first."""
        projection, smoothing, bottom_up = cast(Iterable[nn.ModuleList], self.extra.children())
        laterals = [layer(each) for layer, each in zip(projection, self._maps(images), strict=True)]
        summed = laterals.pop()
        levels = [summed]
        for lateral, layer in zip(reversed(laterals), reversed(smoothing), strict=True):
            height, width = lateral.shape[2:]
            summed = F.interpolate(summed, scale_factor=2.0)[..., :height, :width] + lateral
            levels.insert(0, layer(summed))
            # What goes on to the next finer level is smoothed in the reference's layers of Keras, not in TF-Slim's.
            summed = levels[0] if self._smooths_on else summed
        for layer in bottom_up:
            levels.append(layer(levels[-1]))
        return levels


class BidirectionalFeatureMaps(SsdFeatures):
    """Maps images to a pyramid that is gone down and up again and again: all maps have one number of channels.

    Each step is a node, which adds up maps of its level and of the one beside it.
    """

    def _layers_of(self, config: SsdFeatureExtractor, extractor: _Extractor) -> Sequence[str]:
        pyramid = _bidirectional(config)
        return extractor.layers[pyramid.min_level - _FIRST_LEVEL : pyramid.max_level - _FIRST_LEVEL + 1]

    def _on_top(self, style: _Style, made: Callable[..., nn.Module], extractor: _Extractor) -> nn.ModuleList:
        pyramid = _bidirectional(style.config)
        low, high, depth = pyramid.min_level, pyramid.max_level, max(pyramid.num_filters, style.config.min_depth)
        levels = [low + index for index in range(len(self.out_channels))]
        channels: list[int | None] = [*self.out_channels]
        self._inputs, nodes = list[tuple[int, ...]](), nn.ModuleList()

        def node(level: int, *inputs: int) -> int:
            of_inputs = [(channels[index], levels[index] - level) for index in inputs]
            nodes.append(PyramidNode(of_inputs, depth, made, activation_layer(self.on_top)))
            self._inputs.append(inputs)
            levels.append(level)
            channels.append(None)
            return len(levels) - 1

        newest = {level: index for index, level in enumerate(levels)}
        for level in range(low + len(newest), high + 1):
            newest[level] = node(level, newest[level - 1])
        for _ in range(pyramid.num_iterations):
            before = dict(newest)
            for level in reversed(range(low, high)):
                newest[level] = node(level, before[level], newest[level + 1])
            for level in range(low + 1, high + 1):
                down = (newest[level],) if level < high else ()
                newest[level] = node(level, before[level], *down, newest[level - 1])
        self._outputs = [newest[level] for level in range(low, high + 1)]
        self.out_channels = [depth] * len(self._outputs)
        return nodes

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map images of shape (batch, 3, height, width) to feature maps, the largest first."""
        maps = self._maps(images)
        for inputs, node in zip(self._inputs, cast(nn.ModuleList, self.extra), strict=True):
            maps.append(node([maps[index] for index in inputs]))
        return [maps[index] for index in self._outputs]


class PyramidNode(nn.Module):
    """Adds up maps by shares that are learned, once they have one size; of one map it changes size and channels alone.

    Args:
        inputs: of each map the channels, None where they are `depth`, and how many levels it is above the node's: 1 for
            half its height and width, -1 for twice, 0 for the same.
        activation: makes what is before the convolution of the sum.
    """

    def __init__(
        self,
        inputs: Sequence[tuple[int | None, int]],
        depth: int,
        made: Callable[..., nn.Module],
        activation: ActivationLayer | None,
    ) -> None:
        super().__init__()
        self.project = nn.ModuleList(
            nn.Identity() if channels is None else made(channels, depth, 1, activation_layer=None)
            for channels, _ in inputs
        )
        self._above = [above for _, above in inputs]
        self.pool = MaxPool2dSame(3, 2)
        if len(inputs) > 1:
            self.shares = nn.Parameter(torch.ones(len(inputs)))
            self.activation = nn.Identity() if activation is None else activation()
            self.depthwise = conv2d(depth, depth, 3, groups=depth, bias=False)
            self.pointwise = made(depth, depth, 1, activation_layer=None)

    def reset_parameters(self) -> None:
        """Give all maps the same share."""
        if len(self._above) > 1:
            nn.init.ones_(self.shares)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Map maps (batch, channels, height, width) to one of the node's level."""
        height, width = maps[0].shape[2:]  # those of the node, where there are several
        alike = list[Tensor]()
        for project, each, above in zip(self.project, maps, self._above, strict=True):
            hidden = project(each)
            if above == -1:
                hidden = self.pool(hidden)
            elif above == 1:
                hidden = F.interpolate(hidden, scale_factor=2.0)[..., :height, :width]
            alike.append(hidden)
        if len(alike) == 1:
            return alike[0]
        shares = self.shares.relu()
        shares = shares / (shares.sum() + _LEAST_SHARE)
        summed = torch.stack([share * each for share, each in zip(shares, alike, strict=True)]).sum(0)
        found: Tensor = self.pointwise(self.depthwise(self.activation(summed)))
        return found


def _bidirectional(config: SsdFeatureExtractor) -> BidirectionalFeaturePyramidNetworks:
    assert config.bifpn is not None, "others are refused"
    return config.bifpn


@dataclass(frozen=True)
class _Style:
    """What the layers of a backbone are made of."""

    config: SsdFeatureExtractor
    hyperparams: Hyperparams
    freeze_batchnorm: bool
    generator: Generator | None

    @property
    def padding(self) -> Padding:
        return "symmetric" if self.config.use_explicit_padding else "same"

    @property
    def norm_layer(self) -> NormLayer:
        # Backbones without norms are refused: see `check_supported`.
        made = norm_layer(self.hyperparams, freeze_batchnorm=self.freeze_batchnorm)
        assert made is not None, "a backbone has norms"
        return made

    @property
    def is_narrow(self) -> bool:
        """Whether the last layers of a MobileNet have fewer channels: those of a pyramid of depthwise layers."""
        return self.config.use_depthwise and self.config.net.endswith("_fpn")

    def depth(self, channels: float) -> int:
        return max(int(channels * self.config.depth_multiplier), self.config.min_depth)


def _channels_of(features: IntermediateLayerGetter) -> list[int]:
    """Run a copy without memory on an image, and look."""
    maps = copy.deepcopy(features).to("meta").eval()(torch.empty(1, 3, 96, 96, device="meta"))
    return [each.shape[1] for each in maps.values()]


def _mobilenet_v1(style: _Style) -> nn.Module:
    return mobilenet_v1_features(
        depth_multiplier=style.config.depth_multiplier,
        min_depth=style.config.min_depth,
        last_channels=(512, 256) if style.is_narrow else (1024, 1024),
        norm_layer=style.norm_layer,
        activation_layer=activation_layer(style.hyperparams),
        padding=style.padding,
        generator=style.generator,
    )


def _mobilenet_v2(style: _Style) -> nn.Module:
    """Its activations are its own in TF-Slim, whatever the configuration; in Keras its last layer is never narrow."""
    is_keras = style.config.is_keras
    return mobilenet_v2_features(
        width_mult=style.config.depth_multiplier,
        min_depth=style.config.min_depth,
        last_channels=256 if style.is_narrow and not is_keras else 1280,
        wide_last=False,
        norm_layer=style.norm_layer,
        activation_layer=activation_layer(style.hyperparams) if is_keras else RELU6,
        padding=style.padding,
        generator=style.generator,
    )


def _mobilenet_v3(size: Literal["large", "small"], style: _Style) -> nn.Module:
    """Its activations are its own, whatever the configuration."""
    return mobilenet_v3_features(
        size,
        width_mult=style.config.depth_multiplier,
        reduced_tail=True,
        norm_layer=style.norm_layer,
        padding=style.padding,
        generator=style.generator,
    )


def _resnet(depth: Literal[50, 101, 152], style: _Style) -> nn.Module:
    """A ReLU ends each block in TF-Slim, whose norms are its own, whatever the configuration; not so in Keras."""
    active, is_keras, norm = activation_layer(style.hyperparams), style.config.is_keras, style.hyperparams.batch_norm
    if norm is not None and not is_keras:
        norm = replace(norm, decay=0.997, epsilon=1e-5, scale=True)
    return ResNet(
        depth,
        style="keras",
        norm_layer=replace(style, hyperparams=replace(style.hyperparams, batch_norm=norm)).norm_layer,
        activation_layer=active,
        sum_activation=active if is_keras else RELU,
        generator=style.generator,
    )


def _efficientnet(size: Size, style: _Style) -> nn.Module:
    return efficientnet_features(size, norm_layer=style.norm_layer, padding="same", generator=style.generator)


def _inception_v2(style: _Style) -> nn.Module:
    return inception_v2_features(
        depth=style.depth, norm_layer=style.norm_layer, activation_layer=activation_layer(style.hyperparams)
    )


def _inception_v3(style: _Style) -> nn.Module:
    settings = InceptionV3(auxiliary=False)
    return InceptionV3Net(settings, generator=style.generator, layers=_InceptionLayers(settings, style))


class _InceptionLayers(Layers):
    """The layers of Inception-v3 as a configuration has them."""

    def __init__(self, settings: InceptionV3, style: _Style) -> None:
        super().__init__(settings)
        self._style = style
        made = activation_layer(style.hyperparams)
        self.activate = nn.Identity() if made is None else made()

    def depth(self, channels: int) -> int:
        return self._style.depth(channels)

    def batch_norm(self, channels: int) -> nn.Module:
        return self._style.norm_layer(channels)


@dataclass(frozen=True)
class _Extractor:
    """A backbone of the reference: how it is made, which of its maps are taken, the depths of those on top."""

    make: Callable[[_Style], nn.Module]
    layers: tuple[str, ...]
    depths: tuple[int, ...] = (512, 256, 256, 128)
    """Channels of the layers that halve, at depth multiplier 1."""
    hyperparams: Hyperparams = SLIM
    """The hyperparameters of the backbone, where a configuration does not override them."""
    keras_hyperparams: Hyperparams = SLIM
    """The same of the backbone of Keras's layers."""
    mean: tuple[float, float, float] | None = None
    """Subtracted from red, green and blue of 0 to 255; None: they go from -1 to 1."""
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """What red, green and blue are divided by, once the mean is subtracted."""
    least_side: int = 33
    """The least height and width of images, in pixels, as in the reference."""
    maps: type[SsdFeatures] = MultiResolutionFeatureMaps
    draw_own_weights: Callable[[nn.Module, Generator | None], None] | None = None
    """Draws the first weights that are those of the backbone, whatever its hyperparameters."""


HALF = (127.5, 127.5, 127.5)
"""Subtracted from red, green and blue, which are divided by it then: they go from -1 to 1."""
IMAGENET_MEAN, UNIT = (123.68, 116.779, 103.939), (1.0, 1.0, 1.0)
"""Subtracted from red, green and blue by the ResNets of the reference, and what they are divided by."""
_V1 = replace(SLIM, regularize_depthwise=True)
_RESNET = Hyperparams(
    regularizer=L2Regularizer(1e-4),
    initializer=VarianceScalingInitializer(),
    batch_norm=BatchNorm(decay=0.997, scale=True, epsilon=1e-5),
)


def _retinanet(depth: Literal[50, 101, 152]) -> _Extractor:
    return _Extractor(
        partial(_resnet, depth),
        ("layer1", "layer2", "layer3", "layer4"),
        hyperparams=_RESNET,
        # Keras's penalty is twice that of TF-Slim with the same factor, and its variance is half as large.
        keras_hyperparams=replace(
            _RESNET, regularizer=L2Regularizer(2e-4), initializer=VarianceScalingInitializer(factor=1.0)
        ),
        mean=IMAGENET_MEAN,
        least_side=129,
        maps=TopDownFeatureMaps,
    )


_EFFICIENTNET = Hyperparams(
    regularizer=L2Regularizer(1e-5),
    initializer=VarianceScalingInitializer(mode="fan_out"),
    activation="swish",
    batch_norm=BatchNorm(decay=0.99, scale=True),
)


def _efficientdet(size: Size) -> _Extractor:
    return _Extractor(
        partial(_efficientnet, size),
        ("2_1", "3_1", "5_2", "7_0"),  # of the reference, which are the last of their stages in B0 alone
        keras_hyperparams=_EFFICIENTNET,
        mean=(123.675, 116.28, 103.53),
        std=(58.395, 57.12, 57.375),
        least_side=129,
        maps=BidirectionalFeatureMaps,
    )


EXTRACTORS = {
    "ssd_mobilenet_v1": _Extractor(_mobilenet_v1, ("Conv2d_11_pointwise", "Conv2d_13_pointwise"), hyperparams=_V1),
    "ssd_mobilenet_v1_fpn": _Extractor(
        _mobilenet_v1,
        ("Conv2d_3_pointwise", "Conv2d_5_pointwise", "Conv2d_11_pointwise", "Conv2d_13_pointwise"),
        hyperparams=_V1,
        maps=TopDownFeatureMaps,
    ),
    "ssd_mobilenet_v2": _Extractor(_mobilenet_v2, ("14.expansion", "18")),
    "ssd_mobilenet_v2_fpn": _Extractor(_mobilenet_v2, ("3", "6", "13", "18"), maps=TopDownFeatureMaps),
    "ssd_mobilenet_v3_small": _Extractor(partial(_mobilenet_v3, "small"), ("9.expansion", "12")),
    "ssd_mobilenet_v3_large": _Extractor(partial(_mobilenet_v3, "large"), ("13.expansion", "16")),
    "ssd_resnet50_v1_fpn": _retinanet(50),
    "ssd_resnet101_v1_fpn": _retinanet(101),
    "ssd_resnet152_v1_fpn": _retinanet(152),
    **{f"ssd_efficientnet-b{size}_bifpn": _efficientdet(size) for size in get_args(Size)},
    "ssd_inception_v2": _Extractor(_inception_v2, ("Mixed_4c", "Mixed_5c"), draw_own_weights=draw_own_weights),
    "ssd_inception_v3": _Extractor(_inception_v3, ("Mixed_5d", "Mixed_6e", "Mixed_7c"), (512, 256, 128)),
}
"""The feature extractors that there are, by the reference's names."""


def feature_maps(
    config: SsdFeatureExtractor, *, freeze_batchnorm: bool = False, generator: Generator | None = None
) -> SsdFeatures:
    """Make the feature maps of a configuration."""
    return EXTRACTORS[config.net].maps(config, freeze_batchnorm=freeze_batchnorm, generator=generator)
