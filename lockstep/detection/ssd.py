"""SSD: detections predicted from anchors in one stage (Liu et al., 2016).

The net is made of its parts: a backbone, a head, and `SsdSettings` that say what anchors are, which of them learn
which objects, by which losses, and what becomes of the predictions. So it is torchvision's SSD300 and SSDlite, an SSD
or RetinaNet of the Object Detection API (core/target_assigner.py, meta_architectures/ssd_meta_arch.py there), and a
small one on SqueezeNet. Losses are computed for all images at once, on shapes that do not depend on the objects: the
host waits for nothing, but where hard examples are chosen by non-maximum suppression.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.detection import blocks
from lockstep.detection.anchor_matching import (
    BACKGROUND,
    IGNORED,
    AnyMatcher,
    after_none,
    hard_examples,
    match_images,
    rows_of_objects,
)
from lockstep.detection.anchors import AnyAnchorGenerator, BackboneAnchors, anchors_per_cell, by_anchor, in_order
from lockstep.detection.box_coders import AnyBoxCoder, code_size, decode, encode
from lockstep.detection.boxes import Shape, clip
from lockstep.detection.detector import DetectionModel, Detections, Targets
from lockstep.detection.losses import classification_loss, localization_loss, takes_boxes
from lockstep.detection.nms import NmsLimits, detections_of_all
from lockstep.detection.values import SqueezeSsd, Ssd300, Ssdlite
from lockstep.images.normalisation import normalize
from lockstep.models.initial_weights import check_images, clear_statistics, give_memory, without_memory
from lockstep.models.layers import RELU6, Conv2dNormActivation, NormLayer
from lockstep.models.mobilenet import mobilenet_v3_features
from lockstep.models.squeezenet import Fire, squeezenet_features
from lockstep.models.vgg import vgg16_features
from lockstep.weights.names import NameMap, Rename
from lockstep.weights.timm_maps import TIMM_NETS

Postprocess = Callable[[Tensor, Tensor, tuple[int, int]], Sequence[Detections]]
"""Chooses the detections of each image from boxes (batch, anchors, 4), logits (batch, anchors, classes), and the height
and width of the network's input."""

HARD_NEGATIVES = blocks.HardExampleMiner(0, 1.0, "classification", 3)
"""On the background, the anchors with the largest losses count, three for each that learns an object (Liu et al.)."""
MULTIBOX_LOSS = blocks.Loss(blocks.WeightedSmoothL1(), blocks.WeightedSoftmax(), HARD_NEGATIVES)
"""The loss of the publication, and of torchvision."""
_SCALE = 10.0
_EXTRA_CHANNELS = 256
_VGG_POOL3, _VGG_POOL4 = 16, 23
_LITE_SPLIT = 13  # the inverted residual that goes from stride 16 to 32
_LITE_NORM: NormLayer = partial(nn.BatchNorm2d, eps=0.001, momentum=0.03)
_PADDING = 3
"""Zeros around an image, of which SqueezeNet itself adds none: the cells at the edges see as much of it as the others,
and in the middle of what each sees is its corner at (stride - 4) pixels."""
_CAFFE_MEAN = (123.68, 116.779, 103.939)


@dataclass(frozen=True)
class SsdSettings:
    """An SSD's settings: anchors, matching, losses, post-processing."""

    num_classes: int
    """Number of classes, without the background."""
    anchor_generator: AnyAnchorGenerator
    postprocess: Postprocess
    box_coder: AnyBoxCoder = field(default_factory=blocks.XYBoxCoder)
    matcher: AnyMatcher = field(default_factory=blocks.SsdMatcher)
    similarity: blocks.Similarity = field(default_factory=blocks.IouSimilarity)
    loss: blocks.Loss = MULTIBOX_LOSS
    background: Literal["class", "zeros", "none"] = "class"
    """The background is the first class; or that class is there, and 0 in the targets; or there is no such class."""
    one_label: bool = True
    """An object has one class, its label, and not those that `DetectionTargets` may have merged."""
    negative_class_weight: float = 1.0
    """Weight of the classification loss of the background."""
    normalize_loss_by_num_matches: bool = True
    normalize_loc_loss_by_codesize: bool = False
    pixel_mean: tuple[float, float, float] = (123.675, 116.28, 103.53)
    """Subtracted from red, green and blue."""
    pixel_std: tuple[float, float, float] = (58.395, 57.12, 57.375)
    """They are divided by it then."""
    bgr: bool = False
    """The net takes blue, green, red, as Caffe's do."""
    smallest_image: int = 1
    """Least height and width of its input, in pixels."""


class AnchorTargets(NamedTuple):
    """What each anchor of each image learns."""

    anchors: Tensor
    """(anchors, 4)."""
    matches: Tensor
    """int64 (batch, anchors): as `anchor_matching.match` gives them."""
    boxes: Tensor
    """(batch, anchors, 4): of the object, or the anchor itself where it learns none."""
    classes: Tensor
    """int64 (batch, anchors), or float (batch, anchors, classes)."""
    classification_weights: Tensor
    """(batch, anchors)."""
    localization_weights: Tensor
    """(batch, anchors): 0 where no object is learned."""


class SsdNet(DetectionModel):
    """An SSD, from a backbone, a head and settings.

    Args:
        backbone: maps images (batch, 3, height, width) to feature maps, by name or in order.
        head: maps the feature maps to logits (batch, anchors, classes) and codes (batch, anchors, code size), in the
            order of `anchors`.
    """

    def __init__(self, settings: SsdSettings, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.settings = settings
        self.num_classes = settings.num_classes
        self.backbone = backbone
        self.head = head
        self._anchors = BackboneAnchors(settings.anchor_generator, backbone)

    @property
    def name_maps(self) -> Sequence[NameMap]:
        """The map from a classifier of torchvision or timm whose layers the backbone has in two parts."""
        return _SPLIT_CLASSIFIERS.get(type(self.backbone), ())

    def preprocess(self, images: Tensor) -> Tensor:
        """Normalise images, (batch, 3, height, width) from 0 to 255, red, green and blue."""
        mean, std = (
            tuple(number / 255 for number in numbers) for numbers in (self.settings.pixel_mean, self.settings.pixel_std)
        )
        normal = normalize(images / 255, mean, std)  # in torchvision's order, for its numbers
        return normal.flip(1) if self.settings.bgr else normal

    def anchors(self, shape: Shape, device: torch.device) -> Tensor:
        """Return all anchors on an input of this height and width, (anchors, 4)."""
        return torch.cat(self._anchors(shape, device))

    @torch.no_grad()
    def assign(self, targets: Targets) -> AnchorTargets:
        """Find what each anchor learns: one image after the other where anchors are compared with objects."""
        settings, device = self.settings, targets.boxes[0].device
        anchors = self.anchors(targets.shape, device)
        matches = match_images(settings.matcher, settings.similarity, targets.boxes, anchors, targets.weights)
        is_matched = matches >= 0
        rows = rows_of_objects(targets.boxes, torch.arange(len(targets), device=device)[:, None], matches)
        weights = after_none(targets.weights)[rows]
        of_background = torch.where(matches == IGNORED, 0.0, settings.negative_class_weight)
        return AnchorTargets(
            anchors,
            matches,
            torch.where(is_matched[..., None], after_none(targets.boxes)[rows], anchors),
            self._class_targets(targets)[rows],
            torch.where(is_matched, weights, of_background),
            weights,
        )

    def _class_targets(self, targets: Targets) -> Tensor:
        """Return what an anchor without an object learns, and after it what those of each object do."""
        background, loss = self.settings.background, self.settings.loss.classification_loss
        if self.settings.one_label and background == "class" and isinstance(loss, blocks.WeightedSoftmax):
            return after_none(targets.labels)
        of_objects = after_none(targets.classes)
        if background == "none":
            return of_objects
        is_background = of_objects.new_zeros(len(of_objects), 1)
        is_background[0] = float(background == "class")
        return torch.cat([is_background, of_objects], 1)

    def counts(self, assigned: AnchorTargets) -> Mapping[str, Tensor]:
        """Count the anchors that learn an object, by their weights."""
        if not self.settings.normalize_loss_by_num_matches:
            return {}
        number = assigned.localization_weights.sum()
        codes = code_size(self.settings.box_coder) if self.settings.normalize_loc_loss_by_codesize else 1
        return {"classification": number, "localization": number * codes}

    def forward(self, inputs: Tensor, assigned: AnchorTargets | None = None) -> dict[str, Any]:
        """Predict logits, codes of boxes, and the anchors that they are relative to."""
        check_images(type(self).__name__, inputs, channels=3, smallest=self.settings.smallest_image)
        logits, codes = self.head(in_order(self.backbone(inputs)))
        shape = (inputs.shape[2], inputs.shape[3])
        return {"logits": logits, "codes": codes, "anchors": self.anchors(shape, inputs.device), "shape": shape}

    def losses(self, predictions: Mapping[str, Any], assigned: AnchorTargets) -> dict[str, Tensor]:
        """Compute the sums of the losses of classes and boxes over the anchors that count."""
        loss, coder = self.settings.loss, self.settings.box_coder
        logits, codes = predictions["logits"].float(), predictions["codes"].float()
        of_classes = classification_loss(
            loss.classification_loss, logits, assigned.classes, assigned.classification_weights
        )
        if takes_boxes(loss.localization_loss):
            pair = decode(coder, codes, assigned.anchors), assigned.boxes
        else:
            pair = codes, encode(coder, assigned.boxes, assigned.anchors)
        of_boxes = localization_loss(loss.localization_loss, *pair, assigned.localization_weights)
        if (miner := loss.hard_example_miner) is not None:
            counted = self._hard_examples(miner, of_classes, of_boxes, codes, assigned)
            of_classes, of_boxes = of_classes * counted, of_boxes * counted
        return {
            "classification": loss.classification_weight * of_classes.sum(),
            "localization": loss.localization_weight * of_boxes.sum(),
        }

    @torch.no_grad()
    def _hard_examples(
        self,
        miner: blocks.HardExampleMiner,
        of_classes: Tensor,
        of_boxes: Tensor,
        codes: Tensor,
        assigned: AnchorTargets,
    ) -> Tensor:
        """Choose the anchors that count: bool (batch, anchors)."""
        limit = miner.max_negatives_per_positive
        if limit and miner == replace(HARD_NEGATIVES, max_negatives_per_positive=limit):
            return _hard_negatives(limit, of_classes, assigned.matches)
        loss, losses = self.settings.loss, of_classes
        if miner.loss_type != "classification":
            losses = loss.localization_weight * of_boxes
        if miner.loss_type == "both":
            losses = losses + loss.classification_weight * of_classes
        boxes = decode(self.settings.box_coder, codes, assigned.anchors)[..., :4]
        return hard_examples(miner, losses, boxes, assigned.matches >= 0, assigned.matches == BACKGROUND)

    def postprocess(self, predictions: Mapping[str, Any]) -> Sequence[Detections]:
        """Decode the boxes, and choose those that become detections."""
        logits, codes = predictions["logits"].float(), predictions["codes"].float()
        boxes = decode(self.settings.box_coder, codes, predictions["anchors"])
        return self.settings.postprocess(boxes, logits, predictions["shape"])


def _hard_negatives(per_positive: int, losses: Tensor, matches: Tensor) -> Tensor:
    """Choose all anchors with an object, and for each so many others of its image, those with the largest losses."""
    is_object = matches >= 0
    number = per_positive * is_object.sum(1, keepdim=True)
    order = losses.masked_fill(matches != BACKGROUND, -torch.inf).argsort(dim=1, descending=True, stable=True)
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    ranks = torch.empty_like(order).scatter_(1, order, places)
    return is_object | ((matches == BACKGROUND) & (ranks < number))


def per_class_detections(boxes: Tensor, logits: Tensor, shape: Shape, *, limits: NmsLimits) -> list[Detections]:
    """Choose detections as torchvision's SSD does: the softmax's best ones of each class, then NMS.

    Boxes, (batch, anchors, 4), are clipped to the input first; logits are (batch, anchors, classes), those of the
    background first.
    """
    scores = logits.softmax(-1)[..., 1:]
    return detections_of_all(clip(boxes, shape)[:, :, None], scores, limits)


class SsdHead(nn.Module):
    """For each feature map a predictor of classes and one of codes, numbered as in torchvision.

    Args:
        classification: layers that map a feature map to (batch, anchors of a cell * classes, height, width), for each.
        regression: layers that map it to (batch, anchors of a cell * 4, height, width).
        num_classes: logits of an anchor, those of a background class among them.
    """

    def __init__(self, classification: Sequence[nn.Module], regression: Sequence[nn.Module], num_classes: int) -> None:
        super().__init__()
        self.classification_head = _Predictors(classification, num_classes)
        self.regression_head = _Predictors(regression, 4)

    def forward(self, maps: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits (batch, anchors, classes) and codes (batch, anchors, 4)."""
        return self.classification_head(maps), self.regression_head(maps)


class _Predictors(nn.Module):
    def __init__(self, layers: Sequence[nn.Module], size: int) -> None:
        super().__init__()
        self.module_list = nn.ModuleList(layers)
        self.size = size

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        predicted = [layer(each) for layer, each in zip(self.module_list, maps, strict=True)]
        return torch.cat([by_anchor(each, self.size) for each in predicted], 1)


class SqueezeNetMaps(nn.Module):
    """Maps of SqueezeNet 1.1, and on top of them maps that each have half the height and width of the one before.

    The maps of the trained net have values in the hundreds: without the norms, predictors learn little from few images.

    Args:
        layers: numbers of the features whose outputs are maps, in order. 3 and 4 have a cell for 4 x 4 pixels, 6 and 7
            for 8 x 8, 9 to 12 for 16 x 16. What is above the last one is left out.
        num_extra: maps on top of the last one.
    """

    def __init__(self, layers: Sequence[int], num_extra: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*list(squeezenet_features())[: layers[-1] + 1])
        self._layers = frozenset(layers)
        fires = [self.features[layer] for layer in layers]
        channels = [2 * fire.expand1x1.out_channels for fire in fires if isinstance(fire, Fire)]
        self.out_channels = [*channels, *[_EXTRA_CHANNELS] * num_extra]
        """Channels of each map."""
        self.extra = nn.ModuleList(_extra_layers(*pair) for pair in pairwise(self.out_channels[len(channels) - 1 :]))
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

    The number is `scale` at first.
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
            shrinking = [_extra_layers(1024, 512), _extra_layers(512, 256)]
            shrinking += [_extra_layers(256, 256, halve=False) for _ in range(2)]
        for layers in (dense, *shrinking):
            _xavier(give_memory(layers), generator)
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

    With a reduced tail the last blocks have half the channels.
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
        self.extra = give_memory(extra)
        self.out_channels = (expansion, *channels)
        """Channels of each map."""

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map images (batch, 3, height, width) to feature maps, the finest first."""
        maps, hidden = list[Tensor](), images
        for block in (*self.features, *self.extra):
            hidden = block(hidden)
            maps.append(hidden)
        return maps


_LITE_PARTS = (
    Rename(rf"^features\.{_LITE_SPLIT}\.block\.0\.", f"backbone.features.0.{_LITE_SPLIT}."),
    Rename(rf"^features\.{_LITE_SPLIT}\.block\.", "backbone.features.1.0."),
    *(Rename(rf"^features\.{_LITE_SPLIT + number}\.", f"backbone.features.1.{number}.") for number in range(1, 4)),
    Rename(r"^features\.", "backbone.features.0."),
)
_SPLIT_CLASSIFIERS: Mapping[type[nn.Module], Sequence[NameMap]] = {
    VggMaps: (
        NameMap(
            (
                *(Rename(rf"^features\.{n}\.", f"backbone.extra.0.{n - _VGG_POOL4}.") for n in (24, 26, 28)),
                Rename(r"^features\.", "backbone.features."),
            ),
            system="torch",
        ),
    ),
    MobileNetMaps: (
        NameMap(_LITE_PARTS, system="torch"),
        NameMap(
            (*TIMM_NETS["timm_mobilenet_v3_large"].renames, Rename(r"^(\d+\.)", r"features.\1"), *_LITE_PARTS),
            system="torch",
        ),
    ),
}
"""Maps from classifiers to backbones that have some of their layers elsewhere."""


def _extra_layers(inputs: int, outputs: int, *, halve: bool = True) -> nn.Sequential:
    """Make a 1x1 convolution to half the channels, and one of 3x3, as the extra layers of SSD300.

    The second one has stride 2, or no padding, which takes a row away at each side.
    """
    return nn.Sequential(
        nn.Conv2d(inputs, outputs // 2, 1),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs // 2, outputs, 3, stride=2 if halve else 1, padding=1 if halve else 0),
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
        blocks.DefaultBoxGenerator(
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
    _xavier(give_memory(head), generator)
    return SsdNet(settings, backbone, head)


def ssdlite(value: Ssdlite, generator: Generator) -> SsdNet:
    """Make the net of an `Ssdlite`."""
    settings = SsdSettings(
        value.num_classes,
        blocks.DefaultBoxGenerator(((2.0, 3.0),) * 6, (0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.0)),
        _postprocess(value, candidates_per_class=300),
        pixel_mean=(127.5, 127.5, 127.5),
        pixel_std=(127.5, 127.5, 127.5),
        smallest_image=value.smallest_image,
    )
    backbone = MobileNetMaps(reduced_tail=value.reduced_tail, generator=generator)
    with without_memory():
        head = _head(_lite_predictor, backbone.out_channels, settings)
    net = SsdNet(settings, backbone, give_memory(head))
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
        blocks.AnchorGrid(
            stride,
            stride,
            tuple(size for _ in value.anchor_ratios for size in sizes),
            tuple(1 / ratio for ratio in value.anchor_ratios for _ in sizes),
            min(stride, 16) - 1 - _PADDING,
            min(stride, 16) - 1 - _PADDING,
        )
        for stride, sizes in zip(value.strides, value.anchor_sizes, strict=True)
    ]
    settings = SsdSettings(
        value.num_classes,
        blocks.FlexibleGridAnchorGenerator(tuple(grids)),
        _postprocess(value, candidates_per_class=400),
        matcher=blocks.SsdMatcher(value.matched_threshold),
        pixel_mean=_CAFFE_MEAN,
        pixel_std=(1.0, 1.0, 1.0),
        bgr=True,
        smallest_image=value.smallest_image,
    )
    with without_memory():
        backbone = SqueezeNetMaps(value.layers, value.extra_maps)
        net = SsdNet(settings, backbone, _head(_predictor, backbone.out_channels, settings))
    _xavier(give_memory(net), generator)
    for layer in net.modules():
        if isinstance(layer, L2Norm):
            layer.reset_parameters()
    for layer in backbone.features.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_uniform_(layer.weight, generator=generator)
    return net


def _head(predictor: Callable[[int, int], nn.Module], channels: Sequence[int], settings: SsdSettings) -> SsdHead:
    numbers, num_logits = anchors_per_cell(settings.anchor_generator), settings.num_classes + 1
    classification, regression = (
        [predictor(inputs, number * size) for inputs, number in zip(channels, numbers, strict=True)]
        for size in (num_logits, 4)
    )
    return SsdHead(classification, regression, num_logits)


def _predictor(inputs: int, outputs: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def _lite_predictor(inputs: int, outputs: int) -> nn.Module:
    depthwise = Conv2dNormActivation(inputs, inputs, 3, groups=inputs, norm_layer=_LITE_NORM, activation_layer=RELU6)
    return nn.Sequential(depthwise, nn.Conv2d(inputs, outputs, 1))


def _postprocess(value: Ssd300 | Ssdlite | SqueezeSsd, candidates_per_class: int) -> Postprocess:
    limits = NmsLimits(value.score_threshold, value.iou_threshold, value.max_detections, candidates_per_class)
    return partial(per_class_detections, limits=limits)


def _xavier(layers: nn.Module, generator: Generator | None) -> None:
    for layer in layers.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
