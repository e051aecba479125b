"""Patterns of the Object Detection API's variables as patterns of a detector's parameters.

The API names a variable after the part that it is in, its layer, and what it is: "FeatureExtractor/MobilenetV1/
Conv2d_0/BatchNorm/beta". Parts and kinds of variables have their counterparts in any detector, layers have other names:
a pattern that asks for them matches nothing, and the report of the import says so.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_NETS = {
    "ssd_mobilenet_v1": "MobilenetV1",
    "ssd_mobilenet_v2": "MobilenetV2",
    "ssd_mobilenet_v3": "MobilenetV3",
    "ssd_inception_v3": "InceptionV3",
    "faster_rcnn_resnet50": "resnet_v1_50",
    "faster_rcnn_resnet101": "resnet_v1_101",
}
"""The API's name of a backbone, by the beginning of its feature extractor's."""
_SSD = {
    r"backbone\.": "FeatureExtractor/{net}",
    r"head\.box_predictor\.(\d+)\.": r"BoxPredictor_\1/BoxEncodingPredictor",
    r"head\.class_predictor\.(\d+)\.": r"BoxPredictor_\1/ClassPredictor",
    r"head\.layers\.(\d+)\.": r"BoxPredictor_\1",
    r"head\.": "WeightSharedConvolutionalBoxPredictor",
}
_FASTER_RCNN = {
    r"backbone\.": "FirstStageFeatureExtractor/{net}",
    r"second_stage\.": "SecondStageFeatureExtractor/{net}",
    r"rpn\.conv\.": "Conv",
    r"rpn\.box_predictor\.": "FirstStageBoxPredictor/BoxEncodingPredictor",
    r"rpn\.class_predictor\.": "FirstStageBoxPredictor/ClassPredictor",
    r"box_head\.box_predictor\.": "SecondStageBoxPredictor/BoxEncodingPredictor",
    r"box_head\.class_predictor\.": "SecondStageBoxPredictor/ClassPredictor",
    r"mask_head\.": "SecondStageBoxPredictor",
}
"""The API's name of a part of a detector, by a pattern of how the names of its parameters begin."""
_LAYER = "*"
"""Stands for the layer in the name of a variable; no pattern that spells a layer out matches it."""


def variables_of(model: nn.Module, extractor: str) -> dict[str, str]:
    """Return the API's name of each parameter of a detector, with a "*" in the place of its layer.

    Args:
        model: the detector.
        extractor: the type of its feature extractor.
    """
    net = next((name for start, name in _NETS.items() if extractor.startswith(start)), _LAYER)
    parts = _FASTER_RCNN if extractor.startswith("faster_rcnn") else _SSD
    return {
        name: f"{_part_of(name, parts, net)}/{_LAYER}/{_kind_of(model, name)}" for name, _ in model.named_parameters()
    }


def _part_of(name: str, parts: Mapping[str, str], net: str) -> str:
    for start, part in parts.items():
        if found := re.match(start, name):
            return found.expand(part).format(net=net)
    return _LAYER


def _kind_of(model: nn.Module, name: str) -> str:
    from torch import nn

    path, _, kind = name.rpartition(".")
    layer = model.get_submodule(path)
    if not isinstance(layer, nn.Conv2d | nn.Linear):
        return {"weight": "BatchNorm/gamma", "bias": "BatchNorm/beta"}.get(kind, kind)
    if kind == "bias":
        return "biases"
    return "depthwise_weights" if isinstance(layer, nn.Conv2d) and layer.groups > 1 else "weights"


def as_patterns(chosen: Collection[str], names: Sequence[str]) -> tuple[str, ...]:
    r"""Return patterns of the chosen ones of all names, and of no others: "^head\." where all below it are chosen."""
    return tuple(_patterns_below("", {*chosen}, names))


def _patterns_below(prefix: str, chosen: set[str], names: Sequence[str]) -> list[str]:
    inside = [name for name in names if name.startswith(prefix)]
    if prefix and len(inside) > 1 and chosen.issuperset(inside):
        return [f"^{re.escape(prefix)}"]
    if chosen.isdisjoint(inside):
        return []
    patterns = list[str]()
    for part in dict.fromkeys(name.removeprefix(prefix).partition(".")[0] for name in inside):
        name = prefix + part
        if name in chosen:
            patterns.append(name)
        elif name not in names:
            patterns += _patterns_below(f"{name}.", chosen, names)
    return patterns
