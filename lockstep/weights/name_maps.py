"""Which variables of the TensorFlow reference trainers are which parameters of ours, and which are none.

Inception-v3 has the names of torchvision's, with our MNIST net the names are those of `lockstep.models.mnist`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping

from lockstep.errors import InputError
from lockstep.weights.layouts import CONVOLUTION, CONVOLUTION_AS_DENSE, DENSE, Layout
from lockstep.weights.names import Destination, NameMap, Rename, apply_renames
from lockstep.weights.slim_name_maps import FASTER_RCNN_RESNET_V1, NORM, SLIM_NETS, SSD_NETS, ssd_layers

AVERAGE = "/ExponentialMovingAverage"
"""What TensorFlow adds to the name of a variable for its moving average, the shadow."""

AVERAGED_PARTS = ("ema", "ema_state_dict", "state_dict_ema", "model_ema", "ema_model", "averaged_model")
"""What training scripts call the averaged model, in a dict that they save or as a module of theirs."""


def _branches(block: str, places: Mapping[str, str]) -> list[Rename]:
    """The convolutions in the branches of the blocks that a pattern matches; its first group is a block's name."""
    return [Rename(f"^{block}/{scope}/", rf"\1.{module}/") for scope, module in places.items()]


def _blocks(names: Mapping[str, str], places: Mapping[str, str]) -> list[Rename]:
    """The same for blocks that change their names."""
    return [
        Rename(f"^{scope}/{branch}/", f"{block}.{module}/")
        for scope, block in names.items()
        for branch, module in places.items()
    ]


# What a convolution with batch norm consists of, once its scope has the name of its module.
_CONVOLUTION = (
    Rename("/weights$", ".conv.weight", CONVOLUTION),
    Rename("/BatchNorm/gamma$", ".bn.weight"),
    Rename("/BatchNorm/beta$", ".bn.bias"),
    Rename("/BatchNorm/moving_mean$", ".bn.running_mean"),
    Rename("/BatchNorm/moving_variance$", ".bn.running_var"),
)
# The reference trainers give batch norm no scale: a factor of 1, with which torch's begins.
_SCALE = (r"\.bn\.weight$",)

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
            f"{_SLIM}(Mixed_5[bcd])",
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
            f"{_SLIM}(Mixed_6a)",
            {
                # Named 1x1 there, although they are 3x3.
                "Branch_0/Conv2d_1a_1x1": "branch3x3",
                "Branch_1/Conv2d_0a_1x1": "branch3x3dbl_1",
                "Branch_1/Conv2d_0b_3x3": "branch3x3dbl_2",
                "Branch_1/Conv2d_1a_1x1": "branch3x3dbl_3",
            },
        ),
        *_branches(
            f"{_SLIM}(Mixed_6[bcde])",
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
            f"{_SLIM}(Mixed_7a)",
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
            f"{_SLIM}(Mixed_7[bc])",
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
        *NORM,
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
        *_blocks(
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
        *_blocks({"mixed_17x17x768a": "Mixed_6a"}, {"branch3x3/Conv": "branch3x3"}),
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
    "faster_rcnn_resnet_v1": FASTER_RCNN_RESNET_V1,
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
