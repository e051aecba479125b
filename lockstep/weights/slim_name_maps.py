"""Which variables of TF-Slim's MobileNets and ResNets, and of the SSDs made of them, are which parameters of ours.

The nets have torchvision's names, MobileNet v1 those of TF-Slim; the SSDs of the Object Detection API hold them in
"backbone.features", the layers on top in "backbone.extra", and the box predictors in "head".
"""

from __future__ import annotations

from collections.abc import Collection

from lockstep.weights.layouts import CONVOLUTION, DENSE, DEPTHWISE, Layout
from lockstep.weights.names import NameMap, Rename

NORM = (
    Rename("/gamma$", ".weight"),
    Rename("/beta$", ".bias"),
    Rename("/moving_mean$", ".running_mean"),
    Rename("/moving_variance$", ".running_var"),
)
"""What batch norm consists of, once its scope has its module's name."""
_NO_SCALE = (r"\.1\.weight$",)
_LARGE, _SMALL = frozenset({3, 4, 5, 10, 11, 12, 13, 14}), frozenset({0, *range(3, 11)})
"""Which blocks of MobileNetV3 have squeeze and excitation."""


def _block(start: str = "") -> list[Rename]:
    """What a numbered block of convolution, norm and activation consists of, once its scope has its module's name."""
    return [
        Rename(f"^({start}.*)/weights$", r"\1.0.weight", CONVOLUTION),
        Rename(f"^({start}.*)/depthwise_weights$", r"\1.0.weight", DEPTHWISE),
        Rename(f"^({start}.*)/biases$", r"\1.0.bias"),
        Rename(f"^({start}.*)/BatchNorm/", r"\1.1/"),
    ]


def _mobilenet_v1(scope: str = "", to: str = "") -> list[Rename]:
    return [Rename(rf"^{scope}MobilenetV1/(Conv2d_\d+(?:_depthwise|_pointwise)?)/", rf"{to}\1/")]


def _mobilenet_v2(scope: str = "", to: str = "") -> list[Rename]:
    blocks = []
    for index in range(17):
        block, inside = _expanded_conv(f"{scope}MobilenetV2", index), f"{to}{index + 1}.conv"
        first = int(index > 0)  # the first block expands nothing
        blocks += [
            Rename(f"{block}/expand/", f"{inside}.0/"),
            Rename(f"{block}/depthwise/", f"{inside}.{first}/"),
            Rename(f"{block}/project/weights$", f"{inside}.{first + 1}.weight", CONVOLUTION),
            Rename(f"{block}/project/BatchNorm/", f"{inside}.{first + 2}/"),
        ]
    return [
        Rename(f"^{scope}MobilenetV2/Conv/", f"{to}0/"),
        Rename(f"^{scope}MobilenetV2/Conv_1/", f"{to}18/"),
        *blocks,
    ]


def _mobilenet_v3(num_blocks: int, excited: Collection[int], scope: str = "", to: str = "") -> list[Rename]:
    blocks = []
    for index in range(num_blocks):
        block, inside = _expanded_conv(f"{scope}MobilenetV3", index), f"{to}{index + 1}.block"
        first = int(index > 0)
        excite = f"{block}/squeeze_excite"
        blocks += [
            Rename(f"{block}/expand/", f"{inside}.0/"),
            Rename(f"{block}/depthwise/", f"{inside}.{first}/"),
            Rename(f"{excite}/Conv/weights$", f"{inside}.{first + 1}.fc1.weight", CONVOLUTION),
            Rename(f"{excite}/Conv/biases$", f"{inside}.{first + 1}.fc1.bias"),
            Rename(f"{excite}/Conv_1/weights$", f"{inside}.{first + 1}.fc2.weight", CONVOLUTION),
            Rename(f"{excite}/Conv_1/biases$", f"{inside}.{first + 1}.fc2.bias"),
            Rename(f"{block}/project/", f"{inside}.{first + 1 + (index in excited)}/"),
        ]
    return [
        Rename(f"^{scope}MobilenetV3/Conv/", f"{to}0/"),
        Rename(f"^{scope}MobilenetV3/Conv_1/", f"{to}{num_blocks + 1}/"),
        *blocks,
    ]


def _expanded_conv(net: str, index: int) -> str:
    """Return the pattern of a block's scope: TensorFlow counts from 0 and leaves the 0 out."""
    return f"^{net}/expanded_conv{f'_{index}' if index else ''}"


def resnet_v1(scope: str = "", to: str = "") -> list[Rename]:
    """Return the renames of TF-Slim's ResNet v1 of any depth, in a scope, to a module whose name ends with a dot."""
    stem = rf"^{scope}resnet_v1_\d+/conv1"
    units = [
        Rename(rf"^{scope}resnet_v1_\d+/block(\d)/unit_{unit}/bottleneck_v1/", rf"{to}layer\1.{unit - 1}/")
        for unit in range(1, 37)  # as many as ResNet-152 has
    ]
    return [
        Rename(f"{stem}/weights$", f"{to}conv1.weight", CONVOLUTION),
        Rename(f"{stem}/BatchNorm/", f"{to}bn1/"),
        *units,
        Rename(r"(layer\d\.\d+)/shortcut/weights$", r"\1.downsample.0.weight", CONVOLUTION),
        Rename(r"(layer\d\.\d+)/shortcut/BatchNorm/", r"\1.downsample.1/"),
        Rename(r"(layer\d\.\d+)/conv(\d)/weights$", r"\1.conv\2.weight", CONVOLUTION),
        Rename(r"(layer\d\.\d+)/conv(\d)/BatchNorm/", r"\1.bn\2/"),
        *NORM,
    ]


def _net(renames: list[Rename]) -> NameMap:
    return NameMap((*renames, *_block(), *NORM), may_lack=_NO_SCALE)


SLIM_NETS = {
    "slim_mobilenet_v1": _net(_mobilenet_v1()),
    "slim_mobilenet_v2": _net(_mobilenet_v2()),
    "slim_mobilenet_v3_large": _net(_mobilenet_v3(15, _LARGE)),
    "slim_mobilenet_v3_small": _net(_mobilenet_v3(11, _SMALL)),
    "slim_resnet_v1": NameMap(tuple(resnet_v1())),
}
"""The nets of TF-Slim; for one inside of another net, strip what stands before "MobilenetV1/"."""

_SCOPE, _FEATURES = "FeatureExtractor/", "backbone.features."


def ssd_layers(num_maps: int) -> list[Rename]:
    """The layers on top of a backbone of which so many maps are taken, and the box predictors of all maps."""
    layers = []
    for index in range(6):
        scope, to = rf"^{_SCOPE}\w+/\w+", f"backbone.extra.{index}"
        number = num_maps + index
        layers += [
            Rename(rf"{scope}_1_Conv2d_{number}_1x1_\d+/", f"{to}.reduce/"),
            Rename(rf"{scope}_2_Conv2d_{number}_3x3_s2_\d+_depthwise/", f"{to}.depthwise/"),
            Rename(rf"{scope}_2_Conv2d_{number}_3x3_s2_\d+/", f"{to}.halve/"),
        ]
    predictors = []
    for head, name in (("BoxEncodingPredictor", "box_predictor"), ("ClassPredictor", "class_predictor")):
        to = rf"head.{name}.\1"
        predictors += [
            Rename(rf"^BoxPredictor_(\d+)/{head}_depthwise/", rf"{to}.depthwise/"),
            Rename(rf"^BoxPredictor_(\d+)/{head}/weights$", rf"{to}.predictor.weight", CONVOLUTION),
            Rename(rf"^BoxPredictor_(\d+)/{head}/biases$", rf"{to}.predictor.bias"),
        ]
    shared = Rename(r"^BoxPredictor_(\d+)/Conv2d_(\d+)_1x1_\d+/", r"head.layers.\1.\2/")
    return [*layers, *predictors, shared, *_block(r"(?:backbone\.extra|head)\.")]


def _pyramid(bottom_up: int) -> list[Rename]:
    """The layers of a pyramid on top of a backbone, whose halving layers count from here, and the predictor they share.

    Layers that are depthwise have a second kernel, "pointwise_weights", in the place of the only one.
    """
    levels = [
        rename
        for level in range(1, 8)
        for rename in (
            Rename(rf"^{_SCOPE}\w+/fpn/projection_{level}/", f"backbone.extra.projection.{level - 1}/"),
            Rename(rf"^{_SCOPE}\w+/fpn/smoothing_{level}/", f"backbone.extra.smoothing.{level - 1}.convolution/"),
            Rename(
                rf"^{_SCOPE}\w+/fpn/bottom_up_Conv2d_{bottom_up + level - 1}/",
                f"backbone.extra.bottom_up.{level - 1}.convolution/",
            ),
        )
    ]
    head = "^WeightSharedConvolutionalBoxPredictor"
    towers = [
        rename
        for scope, tower in (("(?:Box)?PredictionTower", "box_tower"), ("ClassPredictionTower", "class_tower"))
        for rename in (
            Rename(rf"{head}/{scope}/conv2d_(\d+)/BatchNorm/feature_(\d+)/", rf"head.{tower}.norms.\1.\2/"),
            Rename(rf"{head}/{scope}/conv2d_(\d+)/", rf"head.{tower}.convolutions.\1/"),
        )
    ]
    shared = r"^(head\.(?:\w+_tower\.convolutions\.\d+|\w+_predictor))"
    return [
        *levels,
        Rename(r"\.convolution/depthwise_weights$", ".depthwise.weight", DEPTHWISE),
        Rename(r"\.convolution/pointwise_weights$", ".convolution.0.weight", CONVOLUTION),
        *towers,
        Rename(rf"{head}/BoxPredictor/", "head.box_predictor/"),
        Rename(rf"{head}/ClassPredictor/", "head.class_predictor/"),
        Rename(rf"{head}/ProjectionLayer/conv2d_(\d+)/", r"head.projection.\1/"),
        Rename(rf"{shared}/depthwise_weights$", r"\1.depthwise.weight", DEPTHWISE),
        Rename(rf"{shared}/(?:pointwise_)?weights$", r"\1.convolution.weight", CONVOLUTION),
        Rename(rf"{shared}/biases$", r"\1.convolution.bias"),
    ]


SSD_NETS = {
    "ssd_mobilenet_v1": _net([*ssd_layers(2), *_mobilenet_v1(_SCOPE, _FEATURES)]),
    "ssd_mobilenet_v2": _net([*ssd_layers(2), *_mobilenet_v2(_SCOPE, _FEATURES)]),
    "ssd_mobilenet_v1_fpn": _net([*_pyramid(14), *_mobilenet_v1(_SCOPE, _FEATURES)]),
    "ssd_mobilenet_v2_fpn": _net([*_pyramid(20), *_mobilenet_v2(_SCOPE, _FEATURES)]),
    "ssd_mobilenet_v3_large": _net([*ssd_layers(2), *_mobilenet_v3(15, _LARGE, _SCOPE, _FEATURES)]),
    "ssd_mobilenet_v3_small": _net([*ssd_layers(2), *_mobilenet_v3(11, _SMALL, _SCOPE, _FEATURES)]),
}
"""The SSDs of the Object Detection API, by the names of their feature extractors."""


def _predictor(scope: str, to: str, layout: Layout) -> list[Rename]:
    """The layers of boxes and of classes."""
    names = {"BoxEncodingPredictor": "box_predictor", "ClassPredictor": "class_predictor"}
    weights = [Rename(f"^{scope}/{name}/weights$", f"{to}.{ours}.weight", layout) for name, ours in names.items()]
    return [*weights, *(Rename(f"^{scope}/{name}/biases$", f"{to}.{ours}.bias") for name, ours in names.items())]


FASTER_RCNN_RESNET_V1 = NameMap(
    (
        *resnet_v1("(?:(?:First|Second)StageFeatureExtractor/)?", "backbone."),
        Rename(r"^backbone\.layer4\.", "second_stage.layer4."),
        Rename("^Conv/weights$", "rpn.conv.weight", CONVOLUTION),
        Rename("^Conv/biases$", "rpn.conv.bias"),
        *_predictor("FirstStageBoxPredictor", "rpn", CONVOLUTION),
        *_predictor("SecondStageBoxPredictor", "box_head", DENSE),
    )
)
"""Faster R-CNNs of the Object Detection API, all but the layers of masks; and a ResNet of TF-Slim that becomes one."""
