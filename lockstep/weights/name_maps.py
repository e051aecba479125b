"""Maps from the variables of the TensorFlow reference trainers to our parameters; some variables are none.

Those of timm's nets are in `timm_maps`.

Our nets have torchvision's names, MobileNet v1 those of TF-Slim, the MNIST net those of `lockstep.models.mnist`. The
SSDs of the Object Detection API hold them in "backbone.features", the layers on top in "backbone.extra", and the box
predictors in "head".
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from lockstep.errors import InputError
from lockstep.weights.layouts import CONVOLUTION, CONVOLUTION_AS_DENSE, DENSE, DEPTHWISE, Layout
from lockstep.weights.names import Destination, NameMap, Rename, apply_renames
from lockstep.weights.timm_maps import EXCITED_LARGE, EXCITED_SMALL, TIMM_NETS

NORM = (
    Rename("/gamma$", ".weight"),
    Rename("/beta$", ".bias"),
    Rename("/moving_mean$", ".running_mean"),
    Rename("/moving_variance$", ".running_var"),
)
"""What batch norm consists of, once its scope has its module's name."""
_NO_SCALE = (r"\.1\.weight$",)
# What a convolution with batch norm consists of, once its scope has the name of its module.
_CONVOLUTION = (Rename("/weights$", ".conv.weight", CONVOLUTION), Rename("/BatchNorm/", ".bn/"), *NORM)
# The reference trainers give batch norm no scale: a factor of 1, with which torch's begins.
_SCALE = (r"\.bn\.weight$",)


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


def _inception_v2(scope: str, to: str) -> list[Rename]:
    return [
        Rename(
            rf"^{scope}InceptionV2/Conv2d_1a_7x7/depthwise_weights$", f"{to}Conv2d_1a_7x7.depthwise.weight", DEPTHWISE
        ),
        Rename(
            rf"^{scope}InceptionV2/Conv2d_1a_7x7/pointwise_weights$",
            f"{to}Conv2d_1a_7x7.pointwise.0.weight",
            CONVOLUTION,
        ),
        Rename(rf"^{scope}InceptionV2/Conv2d_1a_7x7/", f"{to}Conv2d_1a_7x7.pointwise/"),
        Rename(rf"^{scope}InceptionV2/(Conv2d_2[bc]_\dx\d)/", rf"{to}\1/"),
        Rename(rf"^{scope}InceptionV2/(Mixed_\d\w)/(Branch_\d)/(Conv2d_\d\w_\dx\d)/", rf"{to}\1.\2.\3/"),
    ]


def _net(renames: list[Rename]) -> NameMap:
    return NameMap((*renames, *_block(), *NORM), may_lack=_NO_SCALE)


SLIM_NETS = {
    "slim_mobilenet_v1": _net(_mobilenet_v1()),
    "slim_mobilenet_v2": _net(_mobilenet_v2()),
    "slim_mobilenet_v3_large": _net(_mobilenet_v3(15, EXCITED_LARGE)),
    "slim_mobilenet_v3_small": _net(_mobilenet_v3(11, EXCITED_SMALL)),
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


def _pyramid(bottom_up: str, first: int) -> list[Rename]:
    """The layers of a pyramid on a backbone, whose halving layers are called so and count from here, and the predictor.

    Layers that are depthwise have a second kernel, "pointwise_weights", in the place of the only one.
    """
    levels = [
        rename
        for level in range(1, 8)
        for rename in (
            Rename(rf"^{_SCOPE}\w+/fpn/projection_{level}/", f"backbone.extra.projection.{level - 1}/"),
            Rename(rf"^{_SCOPE}\w+/fpn/smoothing_{level}/", f"backbone.extra.smoothing.{level - 1}.convolution/"),
            Rename(
                rf"^{_SCOPE}\w+/fpn/{bottom_up}{first + level - 1}/",
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
    "ssd_mobilenet_v1_fpn": _net([*_pyramid("bottom_up_Conv2d_", 14), *_mobilenet_v1(_SCOPE, _FEATURES)]),
    "ssd_mobilenet_v2_fpn": _net([*_pyramid("bottom_up_Conv2d_", 20), *_mobilenet_v2(_SCOPE, _FEATURES)]),
    "ssd_resnet_v1_fpn": NameMap(
        (*_pyramid("bottom_up_block", 5), *_block(r"(?:backbone\.extra|head)\."), *resnet_v1(_SCOPE, _FEATURES)),
        may_lack=_NO_SCALE,
    ),
    "ssd_inception_v2": _net([*ssd_layers(2), *_inception_v2(f"(?:{_SCOPE})?", _FEATURES)]),
    "ssd_mobilenet_v3_large": _net([*ssd_layers(2), *_mobilenet_v3(15, EXCITED_LARGE, _SCOPE, _FEATURES)]),
    "ssd_mobilenet_v3_small": _net([*ssd_layers(2), *_mobilenet_v3(11, EXCITED_SMALL, _SCOPE, _FEATURES)]),
}
"""The SSDs of the Object Detection API, by the names of their feature extractors."""


def _predictor(scope: str, to: str, layout: Layout) -> list[Rename]:
    """The layers of boxes and of classes."""
    names = {"BoxEncodingPredictor": "box_predictor", "ClassPredictor": "class_predictor"}
    weights = [Rename(f"^{scope}/{name}/weights$", f"{to}.{ours}.weight", layout) for name, ours in names.items()]
    return [*weights, *(Rename(f"^{scope}/{name}/biases$", f"{to}.{ours}.bias") for name, ours in names.items())]


_STAGES = "(?:(?:First|Second)StageFeatureExtractor/)?"
_RESNET_STAGES = r"(?:SecondStageFeatureExtractor/|FirstStageFeatureExtractor/(?!resnet_v1_\d+/block4/))?"
"""A checkpoint of the API has a last block in the first stage, too, which nothing uses."""
_TWO_STAGES = (
    Rename("^Conv/weights$", "rpn.conv.weight", CONVOLUTION),
    Rename("^Conv/biases$", "rpn.conv.bias"),
    *_predictor("FirstStageBoxPredictor", "rpn", CONVOLUTION),
    *_predictor("SecondStageBoxPredictor", "box_head", DENSE),
    Rename(
        r"^SecondStageBoxPredictor/(reduce_depth|refined_locations|class_predictions)/weights$",
        r"box_head.\1.weight",
        CONVOLUTION,
    ),
    Rename(r"^SecondStageBoxPredictor/(reduce_depth|refined_locations|class_predictions)/biases$", r"box_head.\1.bias"),
)
"""All but the feature extractor and the layers of masks."""


def _inception_resnet_v2() -> list[Rename]:
    """TF-Slim's net in a detector, whose second stage counts its blocks as the first one does."""
    net = f"^{_STAGES}InceptionResnetV2"
    repeats = {"block35": "repeat", "block17": "repeat_1", "block8": "repeat_2"}
    return [
        Rename(rf"{net}/Conv2d_(\d[ab])_\dx\d/", r"backbone.conv2d_\1/"),
        Rename(rf"{net}/Mixed_(\d[ab])/", r"backbone.mixed_\1/"),
        *(
            Rename(rf"{net}/Repeat(?:_\d)?/{block}_{number}/", f"backbone.{repeat}.{number - 1}/")
            for block, repeat in repeats.items()
            for number in range(1, 21)
        ),
        Rename(f"{net}/Block8/", "backbone.block8/"),
        Rename(r"^(backbone\.(?:repeat\w*\.\d+|block8))/Conv2d_1x1/weights$", r"\1.conv2d.weight", CONVOLUTION),
        Rename(r"^(backbone\.(?:repeat\w*\.\d+|block8))/Conv2d_1x1/biases$", r"\1.conv2d.bias"),
        Rename(r"^(backbone\..*)/Branch_(\d)/", r"\1.branch\2/"),
        # Branches of one convolution, then the convolutions of those of several.
        Rename(r"\.branch0/Conv2d_1x1/", ".branch0/"),
        Rename(r"\.mixed_6a\.branch0/Conv2d_1a_3x3/", ".mixed_6a.branch0/"),
        Rename(r"(\.mixed_6a\.branch1|\.mixed_7a\.branch2)/Conv2d_1a_3x3/", r"\1.2/"),
        Rename(r"(\.branch\d)/Conv2d_0a_\dx\d/", r"\1.0/"),
        Rename(r"(\.branch\d)/Conv2d_(?:0b|1a)_\dx\d/", r"\1.1/"),
        Rename(r"(\.branch\d)/Conv2d_0c_\dx\d/", r"\1.2/"),
        Rename(r"^backbone\.(mixed_7a|repeat_2|block8|conv2d_7b)", r"second_stage.\1"),
        *_CONVOLUTION,
    ]


FASTER_RCNN_NETS = {
    "faster_rcnn_resnet_v1": NameMap(
        (*resnet_v1(_RESNET_STAGES, "backbone."), Rename(r"^backbone\.layer4\.", "second_stage.layer4."), *_TWO_STAGES)
    ),
    "faster_rcnn_inception_v2": _net(
        [*_TWO_STAGES, *_inception_v2(_STAGES, "backbone."), Rename(r"^backbone\.Mixed_5", "second_stage.Mixed_5")]
    ),
    "faster_rcnn_inception_resnet_v2": NameMap((*_TWO_STAGES, *_inception_resnet_v2()), may_lack=_SCALE),
}
"""The Faster R-CNNs of the Object Detection API, all but the layers of masks; and a net of TF-Slim that becomes one."""


def with_mask_layers(name_map: NameMap, num_layers: int) -> NameMap:
    """Return a map of a Faster R-CNN with the layers of masks, so many before the last one, which are only counted."""
    scope, renames = "^SecondStageBoxPredictor/Conv", list[Rename]()
    for number in range(num_layers + 1):
        count = f"_{number}" if number else ""
        module = f"mask_head.layers.{number}.0" if number < num_layers else "mask_head.predictor"
        renames += [
            Rename(f"{scope}{count}/weights$", f"{module}.weight", CONVOLUTION),
            Rename(f"{scope}{count}/biases$", f"{module}.bias"),
            Rename(f"{scope}{count}/BatchNorm/", f"mask_head.layers.{number}.1/"),
        ]
    return replace(name_map, renames=(*renames, *name_map.renames))


AVERAGE = "/ExponentialMovingAverage"
"""What TensorFlow adds to the name of a variable for its moving average, the shadow."""

AVERAGED_PARTS = ("ema", "ema_state_dict", "state_dict_ema", "model_ema", "ema_model", "averaged_model")
"""What training scripts call the averaged model, in a dict that they save or as a module of theirs."""


def _branches(blocks: Mapping[str, str], places: Mapping[str, str]) -> list[Rename]:
    """The convolutions in the branches of blocks; both mappings are from a pattern of the scope to the module."""
    return [
        Rename(f"^{scope}/{branch}/", f"{block}.{module}/")
        for scope, block in blocks.items()
        for branch, module in places.items()
    ]


# Both cut the kernel of the auxiliary head to the size of the map, where images are smaller than 299 pixels.
_CUT = (r"(^|\.)AuxLogits\.conv1\.conv\.weight$",)

_SLIM = "InceptionV3/"
SLIM_INCEPTION_V3 = NameMap(
    (
        Rename(f"^{_SLIM}Logits/Conv2d_1c_1x1/weights$", "fc.weight", CONVOLUTION_AS_DENSE),
        Rename(f"^{_SLIM}Logits/Conv2d_1c_1x1/biases$", "fc.bias"),
        Rename(f"^{_SLIM}AuxLogits/Conv2d_2b_1x1/weights$", "AuxLogits.fc.weight", CONVOLUTION_AS_DENSE),
        Rename(f"^{_SLIM}AuxLogits/Conv2d_2b_1x1/biases$", "AuxLogits.fc.bias"),
        Rename(f"^{_SLIM}AuxLogits/Conv2d_1b_1x1/", "AuxLogits.conv0/"),
        Rename(f"^{_SLIM}AuxLogits/Conv2d_2a_[0-9]+x[0-9]+/", "AuxLogits.conv1/"),
        Rename(f"^{_SLIM}(Conv2d_[1-4][ab]_[13]x[13])/", r"\1/"),
        *_branches(
            {f"{_SLIM}(Mixed_5[bcd])": r"\1"},
            {
                "Branch_0/Conv2d_0a_1x1": "branch1x1",
                # The second block names these two in a way of its own.
                "Branch_1/Conv2d_0[ab]_1x1": "branch5x5_1",
                "Branch_1/Conv(?:2d_0b|_1_0c)_5x5": "branch5x5_2",
                "Branch_2/Conv2d_0a_1x1": "branch3x3dbl_1",
                "Branch_2/Conv2d_0b_3x3": "branch3x3dbl_2",
                "Branch_2/Conv2d_0c_3x3": "branch3x3dbl_3",
                "Branch_3/Conv2d_0b_1x1": "branch_pool",
            },
        ),
        *_branches(
            {f"{_SLIM}(Mixed_6a)": r"\1"},
            {
                # Named 1x1 there, although they are 3x3.
                "Branch_0/Conv2d_1a_1x1": "branch3x3",
                "Branch_1/Conv2d_0a_1x1": "branch3x3dbl_1",
                "Branch_1/Conv2d_0b_3x3": "branch3x3dbl_2",
                "Branch_1/Conv2d_1a_1x1": "branch3x3dbl_3",
            },
        ),
        *_branches(
            {f"{_SLIM}(Mixed_6[bcde])": r"\1"},
            {
                "Branch_0/Conv2d_0a_1x1": "branch1x1",
                "Branch_1/Conv2d_0a_1x1": "branch7x7_1",
                "Branch_1/Conv2d_0b_1x7": "branch7x7_2",
                "Branch_1/Conv2d_0c_7x1": "branch7x7_3",
                "Branch_2/Conv2d_0a_1x1": "branch7x7dbl_1",
                "Branch_2/Conv2d_0b_7x1": "branch7x7dbl_2",
                "Branch_2/Conv2d_0c_1x7": "branch7x7dbl_3",
                "Branch_2/Conv2d_0d_7x1": "branch7x7dbl_4",
                "Branch_2/Conv2d_0e_1x7": "branch7x7dbl_5",
                "Branch_3/Conv2d_0b_1x1": "branch_pool",
            },
        ),
        *_branches(
            {f"{_SLIM}(Mixed_7a)": r"\1"},
            {
                "Branch_0/Conv2d_0a_1x1": "branch3x3_1",
                "Branch_0/Conv2d_1a_3x3": "branch3x3_2",
                "Branch_1/Conv2d_0a_1x1": "branch7x7x3_1",
                "Branch_1/Conv2d_0b_1x7": "branch7x7x3_2",
                "Branch_1/Conv2d_0c_7x1": "branch7x7x3_3",
                "Branch_1/Conv2d_1a_3x3": "branch7x7x3_4",
            },
        ),
        *_branches(
            {f"{_SLIM}(Mixed_7[bc])": r"\1"},
            {
                "Branch_0/Conv2d_0a_1x1": "branch1x1",
                "Branch_1/Conv2d_0a_1x1": "branch3x3_1",
                "Branch_1/Conv2d_0b_1x3": "branch3x3_2a",
                "Branch_1/Conv2d_0[bc]_3x1": "branch3x3_2b",
                "Branch_2/Conv2d_0a_1x1": "branch3x3dbl_1",
                "Branch_2/Conv2d_0b_3x3": "branch3x3dbl_2",
                "Branch_2/Conv2d_0c_1x3": "branch3x3dbl_3a",
                "Branch_2/Conv2d_0d_3x1": "branch3x3dbl_3b",
                "Branch_3/Conv2d_0b_1x1": "branch_pool",
            },
        ),
        *_CONVOLUTION,
    ),
    may_lack=_SCALE,
    may_be_cut=_CUT,
)
"""Inception-v3 of the TF-Slim nets; for one inside of another net, strip what stands before "InceptionV3/"."""

SSD_INCEPTION_V3 = NameMap(
    (
        *ssd_layers(3),
        Rename(f"^FeatureExtractor/{_SLIM}", _SLIM),
        *SLIM_INCEPTION_V3.renames,
        Rename("^(Conv2d|Mixed)_", r"backbone.features.\1_"),
    ),
    may_lack=_SCALE,
)
"""The SSD of the Object Detection API on Inception-v3."""

INCEPTION_SLIM = NameMap(
    (
        Rename("^logits/logits/weights$", "fc.weight", DENSE),
        Rename("^logits/logits/biases$", "fc.bias"),
        Rename("^aux_logits/FC/weights$", "AuxLogits.fc.weight", DENSE),
        Rename("^aux_logits/FC/biases$", "AuxLogits.fc.bias"),
        Rename("^aux_logits/proj/", "AuxLogits.conv0/"),
        Rename("^aux_logits/Conv/", "AuxLogits.conv1/"),
        Rename("^conv0/", "Conv2d_1a_3x3/"),
        Rename("^conv1/", "Conv2d_2a_3x3/"),
        Rename("^conv2/", "Conv2d_2b_3x3/"),
        Rename("^conv3/", "Conv2d_3b_1x1/"),
        Rename("^conv4/", "Conv2d_4a_3x3/"),
        *_branches(
            {"mixed_8x8x2048a": "Mixed_7b", "mixed_8x8x2048b": "Mixed_7c"},
            {
                "branch3x3/Conv": "branch3x3_1",
                "branch3x3/Conv_1": "branch3x3_2a",
                "branch3x3/Conv_2": "branch3x3_2b",
                "branch3x3dbl/Conv": "branch3x3dbl_1",
                "branch3x3dbl/Conv_1": "branch3x3dbl_2",
                "branch3x3dbl/Conv_2": "branch3x3dbl_3a",
                "branch3x3dbl/Conv_3": "branch3x3dbl_3b",
            },
        ),
        *_branches({"mixed_17x17x768a": "Mixed_6a"}, {"branch3x3/Conv": "branch3x3"}),
        Rename("^mixed_35x35x256a/", "Mixed_5b."),
        Rename("^mixed_35x35x288a/", "Mixed_5c."),
        Rename("^mixed_35x35x288b/", "Mixed_5d."),
        Rename("^mixed_17x17x768a/", "Mixed_6a."),
        Rename("^mixed_17x17x768b/", "Mixed_6b."),
        Rename("^mixed_17x17x768c/", "Mixed_6c."),
        Rename("^mixed_17x17x768d/", "Mixed_6d."),
        Rename("^mixed_17x17x768e/", "Mixed_6e."),
        Rename("^mixed_17x17x1280a/", "Mixed_7a."),
        Rename("^mixed_8x8x2048a/", "Mixed_7b."),
        Rename("^mixed_8x8x2048b/", "Mixed_7c."),
        # Branches of one convolution, then those of several: TensorFlow counts these from 0 and leaves the 0 out.
        Rename(r"\.(branch1x1|branch_pool)/Conv/", r".\1/"),
        Rename(r"\.(branch\w+)/Conv/", r".\1_1/"),
        *(Rename(rf"\.(branch\w+)/Conv_{index}/", rf".\1_{index + 1}/") for index in range(1, 5)),
        *_CONVOLUTION,
    ),
    may_lack=_SCALE,
    may_be_cut=_CUT,
)
"""Inception-v3 of the ImageNet trainer in tensorflow/models, package inception.slim."""

MNIST = NameMap(
    (
        # Its dense layers have "weights" in some versions, and "weight" in others.
        Rename("^(conv1|conv2)/weights?$", r"\1.weight", CONVOLUTION),
        Rename("^local3/weights?$", "local3.weight", Layout("(h=7 w=7 i) o -> o (i h w)")),
        Rename("^(local4|softmax_linear)/weights?$", r"\1.weight", DENSE),
        Rename("^(conv1|conv2|local3|local4|softmax_linear)/biases$", r"\1.bias"),
    )
)
"""The net of the MNIST trainer with several GPUs."""

TENSORFLOW = NameMap(
    (
        Rename("/BatchNorm/", "/bn/"),
        Rename("/(weights|depthwise_weights|kernel|depthwise_kernel|gamma)$", ".weight"),
        Rename("/(biases|bias|beta)$", ".bias"),
        Rename("/moving_mean$", ".running_mean"),
        Rename("/moving_variance$", ".running_var"),
        Rename("/", "."),
    ),
    may_lack=_SCALE,
)
"""Any other net: dots for slashes, and what torch calls weights, biases and statistics, with the layouts by shape."""

SHIPPED = {
    "slim_inception_v3": SLIM_INCEPTION_V3,
    "inception_slim": INCEPTION_SLIM,
    "mnist": MNIST,
    **SLIM_NETS,
    **SSD_NETS,
    "ssd_inception_v3": SSD_INCEPTION_V3,
    **FASTER_RCNN_NETS,
    **TIMM_NETS,
    "tensorflow": TENSORFLOW,
}
"""The maps by the name that a recipe gives them."""


def get_name_map(name: str) -> NameMap:
    """The map of that name."""
    if name not in SHIPPED:
        close = difflib.get_close_matches(str(name), SHIPPED, n=1)
        raise InputError(
            f"There is no name map {name!r}.",
            given=f"name_map={name!r}",
            expected=" or ".join(map(repr, SHIPPED)),
            hint=f"did you mean {close[0]!r}?" if close else "give one of these, or a NameMap of your own",
        )
    return SHIPPED[name]


def best_name_map(variables: Iterable[str], wanted: Collection[str]) -> str | None:
    """The shipped map by which the most of these variables get wanted names, if that is at least half of the wanted."""

    def found(name_map: NameMap) -> int:
        places, _ = apply_renames({name: [Destination(name)] for name in variables}, name_map.renames)
        return len({place.name for name, each in places.items() for place in each if place.name != name} & {*wanted})

    counts = {name: found(SHIPPED[name]) for name in SHIPPED}
    best = max(counts, key=lambda name: counts[name])
    return best if 2 * counts[best] >= max(1, len(wanted)) else None


# What a TensorFlow checkpoint keeps beside the weights, by the name that it ends with, and what it is.
_BOOKKEEPING = {
    r"/(Momentum|RMSProp|Adam|AdaMax|Adagrad|Adadelta|Ftrl)(_\d+)?$": "slot of an optimizer",
    r"(^|/)(beta[12]_power(_\d+)?$|optimizer/.*/\.ATTRIBUTES/|.*/\.OPTIMIZER_SLOT/)": "state of an optimizer",
    r"(^|/)(global_step|local_step|sync_rep_local_step|save_counter)(_\d+)?(/\.ATTRIBUTES/.*)?$": "count of steps",
    r"^step/\.ATTRIBUTES/": "count of steps",
    r"/(moving_mean|moving_variance|ExponentialMovingAverage)/biased$": "sum behind a moving average",
    r"^_CHECKPOINTABLE_OBJECT_GRAPH$": "description of objects",
}


def bookkeeping(names: Iterable[str]) -> dict[str, str]:
    """The names of tensors that are no weights but the trainer's own, with what they are: never to be loaded."""
    found = {}
    for name in names:
        reasons = [reason for pattern, reason in _BOOKKEEPING.items() if re.search(pattern, name)]
        if reasons:
            found[name] = reasons[0]
    return found
