"""What weights seem to be of, by the names of their tensors: for the message that refuses those of another net."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from lockstep.errors import CheckpointError
from lockstep.listing import shorten
from lockstep.weights.source import TensorInfo, WeightSource
from lockstep.weights.warm_start import Target, WarmStartReport

_DETECTORS = {
    r"^model/.*_bifpn_stage/": "an EfficientDet of the Object Detection API",
    r"^model/.*/hourglass_network/": "a CenterNet of the Object Detection API, on an hourglass",
    r"^model/_prediction_head_dict/": "a CenterNet of the Object Detection API",
    r"^model/_first_stage_box_predictor": "a Faster R-CNN of the Object Detection API",
    r"^model/.*_fpn_features_generator/": "an SSD or RetinaNet of the Object Detection API, with a pyramid",
    r"^model/.*feature_map_generator/": "an SSD of the Object Detection API",
    r"^FirstStageFeatureExtractor/(\w+)/": r"a Faster R-CNN of the Object Detection API, on \1",
    r"^FeatureExtractor/(\w+)/fpn/": r"an SSD or RetinaNet of the Object Detection API, on \1 with a pyramid",
    r"^FeatureExtractor/(\w+)/": r"an SSD of the Object Detection API, on \1",
    r"(^|\.)roi_heads\.mask_predictor\.": "a Mask R-CNN with torchvision's names",
    r"(^|\.)roi_heads\.": "a Faster R-CNN with torchvision's names",
    r"(^|\.)head\.regression_head\.bbox_ctrness\.": "an FCOS with torchvision's names",
    r"(^|\.)head\.classification_head\.cls_logits\.": "a RetinaNet with torchvision's names",
    r"(^|\.)head\.classification_head\.module_list\.": "an SSD with torchvision's names",
    r"(^|\.)backbone\.extra\.": "an SSD",
    r"(^|\.)(backbone|rpn|second_stage)\.": "a detector",
}
_NETS = {
    r"^(\w+/)*((?:Mobilenet|Inception|resnet_v|vgg_)\w+)/": r"\2 of TF-Slim",
    r"layer_with_weights-\d+/": "a net of Keras",
    r"(^|\.)blocks\.\d+\.\d+\.(conv_|bn|se\.)": "a MobileNet or EfficientNet of timm",
    r"(^|\.)features\.\d+\.squeeze\.": "a SqueezeNet",
    r"(^|\.)features\.\d+\.block\.": "a MobileNetV3 or EfficientNet",
    r"(^|\.)(features\.)?\d+\.conv\.\d+\.": "a MobileNetV2",
    r"(^|\.)layer[1-4]\.\d+\.": "a ResNet",
    r"(^|\.)Mixed_\d\w\.": "an Inception net",
    r"(^|\.)features\.\d+\.(weight|bias)$": "a VGG",
}
_UNIT = re.compile(r"(?:layer|block)(\d)[./](?:unit_)?(\d+)[./]")
_DEPTHS: Mapping[tuple[int, ...], int] = {(3, 4, 6, 3): 50, (3, 4, 23, 3): 101, (3, 8, 36, 3): 152, (2, 2, 2, 2): 18}
"""The depths of ResNets by the numbers of blocks of their four layers; 34 has those of 50."""


def seems_to_be(tensors: Mapping[str, TensorInfo]) -> str:
    """Say in words what tensors seem to be of, such as "a ResNet (50 layers), 25.6 million values"."""
    found = _first(_DETECTORS, tensors) or _first(_NETS, tensors) or "a net of which nothing is known"
    count = sum(math.prod(info.shape) for info in tensors.values())
    return f"{found}{_depth(tensors)}, {count / 1e6:.1f} million values"


def _first(known: Mapping[str, str], names: Iterable[str]) -> str:
    """Return the words of the first pattern that is found in a name; "" if none is."""
    for pattern, words in known.items():
        for name in names:
            if found := re.search(pattern, name):
                return found.expand(words)
    return ""


def _depth(names: Iterable[str]) -> str:
    """Say the depth of a ResNet, by the numbers of its blocks."""
    units = {(int(found[1]), int(found[2])) for name in names for found in [_UNIT.search(name)] if found}
    counts = tuple(len({unit for layer, unit in units if layer == number}) for number in (1, 2, 3, 4))
    depth = _DEPTHS.get(counts)
    return f" ({depth} layers)" if depth else ""


LEAST_FIT = 0.75
"""The share of a backbone's parameters that weights have to fit, of those in the parts that they fit at all."""


def check_architecture(
    source: WeightSource,
    targets: Mapping[str, Target],
    report: WarmStartReport,
    prefixes: Sequence[str],
    *,
    is_numbered: bool,
) -> None:
    """Refuse weights of another net, of which some layers have the names or the numbers of the backbone's by chance.

    `targets` are the parameters and buffers of the detector, `prefixes` the beginnings of the names of the backbone.
    Where layers are told by their numbers alone, all have to fit.

    Raises:
        CheckpointError: less of the backbone's parameters fit, or it is a ResNet of another depth; it says what the
            weights seem to be.
    """
    part_of = {
        name: name[: name.find(".", len(prefix)) + 1] or name
        for name, target in targets.items()
        for prefix in prefixes
        if name.startswith(prefix) and target.kind == "parameter"
    }
    fits = Counter(part_of[each.target] for each in report.loaded if each.target in part_of)
    others = (*report.missing, *(each.target for each in report.mismatched))
    lacking = [name for name in others if name in part_of and fits[part_of[name]]]
    lacks = Counter(part_of[name] for name in lacking)
    # Of a classifier a part may have a few layers, and most are new.
    counted = [part for part in fits if is_numbered or fits[part] > lacks[part]]
    num_fit, num_lacking = (sum(counts[part] for part in counted) for counts in (fits, lacks))
    depths = [_depth(source.tensors), _depth(targets)]
    is_of_depth = not all(depths) or depths[0] == depths[1]
    least = 1.0 if is_numbered else LEAST_FIT
    if num_fit and is_of_depth and num_fit >= least * (num_fit + num_lacking):
        return
    wanted = f"the backbone of the model{depths[1]}, {len(part_of)} parameters"
    lack = f"; without: {shorten(lacking)}" if lacking else ""
    raise CheckpointError(
        f"The weights of {source.path} are of another net than the backbone.",
        given=f"they seem to be of {seems_to_be(source.tensors)}; {sum(fits.values())} tensors fit it{lack}",
        expected=f"weights of {wanted}",
        hint="take weights of that net, or another model; "
        f"--set warm_start.mapping.require_loaded={report.share:.2g} loads what fits by its name all the same",
    )
