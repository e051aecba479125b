"""Where the variables of checkpoints of TensorFlow 2 go: they are named by their places in a graph of objects.

A detector of the Object Detection API is saved as "model", and the layers of a net of Keras as "layer_with_weights-0"
and so on, in the order of their depth. The paths of the API's objects are those of its zoo's checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

from torch import nn

from lockstep.weights.layouts import CONVOLUTION, DENSE, DEPTHWISE, Layout
from lockstep.weights.names import Destination, NameMap, NameTable, Rename

_SUFFIX = Rename(r"/\.ATTRIBUTES/VARIABLE_VALUE$", "")
_ROOT = Rename(r"^[a-z]\w*/(?=_)", "")
"""A checkpoint has the detector as "model", and its attributes begin with an underscore."""
_BACKBONE = Rename(
    r"^(?:feature_extractor/|_feature_extractor_for_proposal_features/|_feature_extractor/(?:classification_backbone/"
    r"|_efficientnet/|_base_model/|(?:_network|_feature_extractor_model)/layer_with_weights-0/))?"
    r"(?=layer_with_weights-\d+/)",
    "backbone/",
)
"""The net that a classifier's checkpoint has as "feature_extractor", or by itself, and a detector's in several ways."""
_MAPS = Rename("^_feature_extractor/feature_map_generator/", "_feature_extractor/_feature_map_generator/")
_KINDS = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}
_BOX, _CLASS = "box_encodings", "class_predictions_with_background"
_LAYERS_OF = {_BOX: "_box_encoder_layers", _CLASS: "_class_predictor_layers"}
_HEADS = {_BOX: "box", _CLASS: "class"}
_BLOCK = re.compile(r".*\blayer\d\.\d+\.")
"""The names in one block of a ResNet begin so."""


class ObjectPaths:
    """The places of a detector's parameters in the checkpoints of another one, collected layer by layer.

    The layers of its model say which variables they have.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._places: dict[str, list[Destination]] = {}
        leaves = [name for name, module in self._modules.items() if _is_layer(module)]
        self._norms = {
            name: (after,)
            for name, after in pairwise(leaves)
            if self._lacks_bias(name) and _is_norm(self._modules[after])
        }

    def name_map(self) -> NameMap:
        """Return the map, once all layers are there."""
        return NameTable((_SUFFIX, _ROOT, _BACKBONE, _MAPS), places=self._places)

    def layers(self, start: str) -> list[str]:
        """Return the names of the layers with parameters whose names begin so, in the order that Keras has them in.

        That is the order of the modules here but for a shortcut, whose layers are beside the last ones of its block.
        """
        names = [name for name, module in self._modules.items() if name.startswith(start) and _is_layer(module)]
        return [name for _, block in groupby(names, _block_of) for name in _shortcut_last(list(block))]

    def add(self, path: str, name: str, norms: Sequence[str] = ()) -> None:
        """Say the path of a layer: its variables go to the parameters and buffers of the module of that name.

        Args:
            path: in the graph of objects.
            name: of a convolution, a linear layer or a norm; another module is left out.
            norms: behind a convolution that has no bias here, if they are not the next module: a bias in the file is
                subtracted from their means, which is the same.
        """
        module: Any = self._modules.get(name)
        if _is_norm(module):
            for kind, ours in _KINDS.items():
                self._put(f"{path}/{kind}", Destination(f"{name}.{ours}"))
        elif _is_layer(module):
            is_depthwise = getattr(module, "groups", 1) > 1
            layout = DEPTHWISE if is_depthwise else DENSE if isinstance(module, nn.Linear) else CONVOLUTION
            kernel = "depthwise_kernel" if is_depthwise else "kernel"
            self._put(f"{path}/{kernel}", Destination(f"{name}.weight", layout))
            self._add_bias(path, name, norms)

    def add_separable(self, path: str, depthwise: str, pointwise: str, norms: Sequence[str] = ()) -> None:
        """Say the path of a separable layer, which is two convolutions here."""
        self._put(f"{path}/depthwise_kernel", Destination(f"{depthwise}.weight", DEPTHWISE))
        self._put(f"{path}/pointwise_kernel", Destination(f"{pointwise}.weight", CONVOLUTION))
        self._add_bias(path, pointwise, norms)

    def add_either(self, path: str, start: str, norms: Sequence[str] = ()) -> None:
        """Say the path of a convolution that may be separable: its one or two kernels are below `start`."""
        depthwise = f"{start}.depthwise"
        (name,) = (each for each in self.layers(f"{start}.") if each != depthwise and not self._is_norm(each))
        if depthwise in self._modules:
            self.add_separable(path, depthwise, name, norms)
        else:
            self.add(path, name, norms)

    def add_net(self, path: str, names: Sequence[str], first: int = 0) -> None:
        """Say the path of a net of Keras, by its layers with weights, in order, and the number of the first one."""
        for number, name in enumerate(names, first):
            self.add(f"{path}layer_with_weights-{number}", name)

    def add_list(self, path: str, names: Sequence[str], step: int = 3, first: int = 0) -> None:
        """Say the path of a list of layers, of which a convolution, its norm and its activation are each `step`."""
        number = first
        for name in names:
            if self._is_norm(name):
                self.add(f"{path}/{number - step + 1}", name)
            else:
                self.add(f"{path}/{number}", name)
                number += step

    def add_parameter(self, path: str, name: str, layout: Layout) -> None:
        """Say the path of a parameter that is in no layer."""
        self._put(path, Destination(name, layout))

    def number_of(self, start: str) -> int:
        """Count the children of a module."""
        return len(list(self._modules[start].children()))

    def has(self, name: str) -> bool:
        """Say whether there is such a module."""
        return name in self._modules

    def norms_in(self, start: str) -> Iterator[str]:
        """Name the norms whose names begin so."""
        return (name for name, module in self._modules.items() if name.startswith(start) and _is_norm(module))

    def _add_bias(self, path: str, name: str, norms: Sequence[str]) -> None:
        if not self._lacks_bias(name):
            self._put(f"{path}/bias", Destination(f"{name}.bias"))
            return
        for norm in norms or self._norms.get(name, ()):
            self._put(f"{path}/bias", Destination(f"{norm}.running_mean", is_subtracted=True))

    def _put(self, path: str, place: Destination) -> None:
        self._places.setdefault(path, []).append(place)

    def _is_norm(self, name: str) -> bool:
        return _is_norm(self._modules[name])

    def _lacks_bias(self, name: str) -> bool:
        module: Any = self._modules[name]
        return not _is_norm(module) and module.bias is None


def _is_norm(module: Any) -> bool:
    return getattr(module, "running_mean", None) is not None


def _is_layer(module: Any) -> bool:
    return _is_norm(module) or isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear)


def _block_of(name: str) -> str:
    found = _BLOCK.match(name)
    return found[0] if found else ""


def _shortcut_last(block: Sequence[str]) -> Sequence[str]:
    """Order the layers of a block: the convolution of a shortcut is before the last one, its norm before the last."""
    shortcut = [name for name in block if ".downsample" in name]
    own = [name for name in block if name not in shortcut]
    match len(shortcut):
        case 1:
            return [*own[:-1], *shortcut, own[-1]]
        case 2:
            return [*own[:-2], shortcut[0], own[-2], shortcut[1], own[-1]]
    return own


# SSD, RetinaNet and EfficientDet --------------------------------------------------------------------------------------


def ssd_name_map(model: nn.Module) -> NameMap:
    """Return the map for checkpoints of the API's SSD, RetinaNet or EfficientDet of a `TfSsd`'s configuration."""
    paths = ObjectPaths(model)
    paths.add_net("backbone/", paths.layers("backbone.features."))
    if paths.has("backbone.extra.projection"):
        _add_pyramid(paths)
    elif any(paths.has(f"backbone.extra.{number}.project") for number in range(1)):
        _add_bidirectional(paths)
    else:
        _add_halving(paths, model)
    if paths.has("head.box_tower"):
        _add_shared_head(paths)
    else:
        _add_convolutional_head(paths)
    return paths.name_map()


def _add_halving(paths: ObjectPaths, model: Any) -> None:
    """Layers that halve; with explicit padding, this has a place in their list, too."""
    path, first = "_feature_extractor/_feature_map_generator/convolutions", model.backbone
    num_taken = len(first.out_channels) - len(first.extra)
    for number in range(len(first.extra)):
        reduce, *others = (
            paths.layers(f"backbone.extra.{number}.{part}.") for part in ("reduce", "depthwise", "halve")
        )
        of_map = f"{path}/{num_taken + number}"
        paths.add_list(of_map, reduce)
        for padding in (0, 1):
            paths.add_list(of_map, [name for each in others for name in each], first=3 + padding)


def _add_pyramid(paths: ObjectPaths) -> None:
    start, extra = "_feature_extractor", "backbone.extra"
    top = paths.number_of(f"{extra}.projection") - 1
    generator = f"{start}/_fpn_features_generator"
    paths.add(f"{generator}/top_layers/0", f"{extra}.projection.{top}.0")
    for number in range(top):
        paths.add(f"{generator}/residual_blocks/{number}/0", f"{extra}.projection.{top - 1 - number}.0")
        _add_smooth(paths, f"{generator}/conv_layers/{number}", f"{extra}.smoothing.{top - 1 - number}")
    for number in range(paths.number_of(f"{extra}.bottom_up")):
        _add_smooth(paths, f"{start}/_coarse_feature_layers/{number}", f"{extra}.bottom_up.{number}")


def _add_smooth(paths: ObjectPaths, path: str, start: str) -> None:
    for padding in (0, 1):
        paths.add_either(f"{path}/{padding}", start)
        for norm in paths.norms_in(f"{start}."):
            paths.add(f"{path}/{padding + 1}", norm)


def _add_bidirectional(paths: ObjectPaths) -> None:
    start = "_feature_extractor/_bifpn_stage"
    for number in range(paths.number_of("backbone.extra")):
        node = f"backbone.extra.{number}"
        for index in range(paths.number_of(f"{node}.project")):
            paths.add_list(f"{start}/node_input_blocks/{number}/{index}/1", paths.layers(f"{node}.project.{index}."))
        if paths.has(f"{node}.depthwise"):
            paths.add_parameter(
                f"{start}/node_combine_op/{number}/bifpn_combine_weights", f"{node}.shares", Layout("n 1 -> n")
            )
            block = f"{start}/node_post_combine_block/{number}"
            paths.add_separable(f"{block}/1", f"{node}.depthwise", f"{node}.pointwise.0")
            paths.add(f"{block}/2", f"{node}.pointwise.1")


def _add_convolutional_head(paths: ObjectPaths) -> None:
    for theirs, ours in _HEADS.items():
        for number in range(paths.number_of(f"head.{ours}_predictor")):
            for dropout in (0, 1):
                path = f"_box_predictor/_prediction_heads/{theirs}/{number}/{_LAYERS_OF[theirs]}"
                paths.add_list(path, paths.layers(f"head.{ours}_predictor.{number}."), first=dropout)
    for number in range(paths.number_of("head.layers")):
        paths.add_list(f"_box_predictor/_shared_nets/{number}", paths.layers(f"head.layers.{number}."))


def _add_shared_head(paths: ObjectPaths) -> None:
    start, is_shared = "_box_predictor", not paths.has("head.class_tower")
    for theirs, ours in _HEADS.items():
        if theirs == _CLASS and is_shared:
            break
        scope = "PredictionTower" if is_shared else f"{ours.title()}PredictionTower"
        tower = f"head.{ours}_tower"
        for index in range(paths.number_of(f"{tower}.convolutions")):
            norms = [*paths.norms_in(f"{tower}.norms.{index}.")]
            paths.add_either(f"{start}/_head_scope_conv_layers/{scope}/{index}", f"{tower}.convolutions.{index}", norms)
            for level, norm in enumerate(norms):
                paths.add(f"{start}/_base_tower_layers_for_heads/{theirs}/{level}/{3 * index + 1}", norm)
    paths.add_either(f"{start}/_box_prediction_head/{_LAYERS_OF[_BOX]}/0", "head.box_predictor")
    for dropout in (0, 1):
        paths.add_either(f"{start}/_prediction_heads/{_CLASS}/{_LAYERS_OF[_CLASS]}/{dropout}", "head.class_predictor")
    for number in range(paths.number_of("head.projection")):
        paths.add_list(f"{start}/_additional_projection_layers/{number}", paths.layers(f"head.projection.{number}."))


# Faster R-CNN ---------------------------------------------------------------------------------------------------------


def faster_rcnn_name_map(model: nn.Module) -> NameMap:
    """Return the map for checkpoints of the API's Faster R-CNN or Mask R-CNN of a `TfFasterRcnn`'s configuration."""
    paths = ObjectPaths(model)
    first, second = paths.layers("backbone."), paths.layers("second_stage.")
    paths.add_net("backbone/", [*first, *second])  # those of a classifier are one net
    paths.add_net("_feature_extractor_for_box_classifier_features/", second)
    paths.add_net("_first_stage_box_predictor_first_conv/", ["rpn.conv"])
    for theirs, ours in _HEADS.items():
        path = f"_first_stage_box_predictor/_prediction_heads/{theirs}/0/{_LAYERS_OF[theirs]}/0"
        paths.add(path, f"rpn.{ours}_predictor")
        for number in (1, 2):  # behind a flattening, and perhaps dropout
            path = f"_mask_rcnn_box_predictor/_{ours}_prediction_head/{_LAYERS_OF[theirs]}/{number}"
            paths.add(path, f"box_head.{ours}_predictor")
    paths.add_list(
        "_mask_rcnn_box_predictor/_third_stage_heads/mask_predictions/_mask_predictor_layers",
        paths.layers("mask_head."),
    )
    return paths.name_map()


# CenterNet ------------------------------------------------------------------------------------------------------------

_CENTER_NET_HEADS = {"object_center": "logits", "box.Sscale": "sizes", "box.Soffset": "offsets"}
"""The heads, whose names have a dot and an S for a slash."""
_KEYPOINT_HEADS = {"heatmap": "heat_maps", "offset": "offsets", "regression": "regressions"}
"""Heads of a task of keypoints, behind its name."""


def center_net_name_map(model: Any) -> NameMap:
    """Return the map for checkpoints of the API's CenterNet of a `TfCenterNet`'s configuration."""
    paths = ObjectPaths(model)
    paths.add_net("backbone/", paths.layers("backbone.features."))
    if paths.has("backbone.hourglasses"):
        _add_hourglass(paths)
    else:
        on_top = paths.layers("backbone.doubling.") or [*_pyramid_layers(paths)]
        for net in ("_network", "_feature_extractor_model"):  # whose first layer is the backbone
            paths.add_net(f"_feature_extractor/{net}/", on_top, first=1)
    heads = dict(_CENTER_NET_HEADS)
    for task in model.config.keypoint_estimation_task:
        start = task.task_name.replace(".", "..").replace("/", ".S")
        for theirs, ours in _KEYPOINT_HEADS.items():
            heads[f"{start}.Skeypoint.S{theirs}"] = f"{task.name}_{ours}"
    for theirs, ours in heads.items():
        for number in range(paths.number_of(f"head.{ours}")):
            paths.add_net(f"_prediction_head_dict/{theirs}/{number}/", paths.layers(f"head.{ours}.{number}."))
    return paths.name_map()


def _pyramid_layers(paths: ObjectPaths) -> Iterator[str]:
    """Name the layers that a pyramid has on top of a backbone, in the order that they are used in."""
    top = paths.number_of("backbone.smoothing")
    yield f"backbone.lateral.{top}"
    for level in reversed(range(top)):
        yield from (f"backbone.lateral.{level}", f"backbone.smoothing.{level}.0", f"backbone.smoothing.{level}.1")


_HOURGLASS = {
    r"^stem\.0\.": "downsample_input.conv_block.",
    r"^stem\.1\.": "downsample_input.residual_block.",
    r"^hourglasses\.": "hourglass_network.",
    r"^outputs\.": "output_conv.",
    r"^of_input\.": "intermediate_conv1.",
    r"^of_output\.": "intermediate_conv2.",
    r"^merged\.": "intermediate_residual.",
    r"\.inside\.(?=\d)": ".inner_block.",
    r"\.inside(?=\.)": ".inner_block.0",
    r"\.skip\.": ".encoder_block1.",
    r"\.down\.": ".encoder_block2.",
    r"\.up\.": ".decoder_block.",
    r"\.conv1\.": ".conv_block.",
    r"\.conv2\.": ".",
    r"\.shortcut\.": ".skip.",
    r"\.0$": ".conv",
    r"\.1$": ".norm",
}
"""The names of an hourglass's parts there, in order, by patterns of those here."""


def _add_hourglass(paths: ObjectPaths) -> None:
    for name in paths.layers("backbone."):
        path = name.removeprefix("backbone.")
        for pattern, theirs in _HOURGLASS.items():
            path = re.sub(pattern, theirs, path)
        paths.add(f"_feature_extractor/_network/{path.replace('.', '/')}", name)
