"""What weights seem to be, and which are refused as those of another net."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from lockstep.errors import CheckpointError
from lockstep.weights.architectures import check_architecture, seems_to_be
from lockstep.weights.assignment import assign_tensors
from lockstep.weights.source import MemorySource
from lockstep.weights.warm_start import Target, WarmStart

RESNETS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def resnet(depth: int, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """The names of a ResNet's first convolutions of each block, all of one shape."""
    blocks = {f"layer{layer}.{n}.conv1.weight" for layer, count in enumerate(RESNETS[depth], 1) for n in range(count)}
    return dict.fromkeys((f"{prefix}{name}" for name in sorted(blocks)), (4, 4, 1, 1))


def source(shapes: Mapping[str, tuple[int, ...]]) -> MemorySource:
    return MemorySource({name: torch.zeros(shape) for name, shape in shapes.items()})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model/_feature_extractor/_bifpn_stage/node_input_blocks/0/0/1/0/kernel", "an EfficientDet of the Object"),
        ("model/_prediction_head_dict/object_center/0/layer_with_weights-0/bias", "a CenterNet of the Object"),
        (
            "FeatureExtractor/MobilenetV2/fpn/projection_1/weights",
            "an SSD or RetinaNet of the Object Detection API, on M",
        ),
        (
            "FirstStageFeatureExtractor/resnet_v1_101/conv1/weights",
            "a Faster R-CNN of the Object Detection API, on resn",
        ),
        ("MobilenetV1/Conv2d_0/weights", "MobilenetV1 of TF-Slim"),
        ("feature_extractor/layer_with_weights-0/kernel", "a net of Keras"),
        ("roi_heads.box_head.fc6.weight", "a Faster R-CNN with torchvision's names"),
        ("features.3.squeeze.weight", "a SqueezeNet"),
        ("weight", "a net of which nothing is known"),
    ],
)
def test_a_name_tells_what_weights_are_of(name: str, words: str) -> None:
    assert seems_to_be(source({name: (1000, 500)}).tensors).startswith(words)


def test_the_blocks_tell_the_depth_of_a_resnet() -> None:
    assert seems_to_be(source(resnet(101, "module.")).tensors) == "a ResNet (101 layers), 0.0 million values"
    slim = {
        f"resnet_v1_50/block{n}/unit_{k}/conv1": (1,) for n, m in enumerate(RESNETS[50], 1) for k in range(1, m + 1)
    }
    assert seems_to_be(source(slim).tensors).startswith("resnet_v1_50 of TF-Slim (50 layers)")


@pytest.mark.parametrize(
    ("given", "is_numbered", "refused"),
    [
        (resnet(50), False, ""),
        (resnet(101), False, "a detector (101 layers)"),
        (dict([*resnet(50).items()][:-2]), False, ""),
        (dict([*resnet(50).items()][:-2]), True, "of another net than the backbone"),
        (dict([*resnet(50).items()][:10]), False, "of another net than the backbone"),
        ({"head.weight": (4, 4, 1, 1)}, False, "of another net than the backbone"),
    ],
)
def test_weights_of_another_net_are_refused(given: dict[str, tuple[int, ...]], is_numbered: bool, refused: str) -> None:
    targets = {
        name: Target(shape, "float32", role="kernel")
        for name, shape in {
            **resnet(50, "backbone.body."),
            "backbone.fpn.weight": (4,),
            "head.weight": (4, 4, 1, 1),
        }.items()
    }
    weights = source({name if name in targets else f"backbone.body.{name}": shape for name, shape in given.items()})
    report = assign_tensors(weights, targets, WarmStart(ignore_missing=True)).report
    if not refused:
        check_architecture(weights, targets, report, ["backbone."], is_numbered=is_numbered)
        return
    with pytest.raises(CheckpointError) as caught:
        check_architecture(weights, targets, report, ["backbone."], is_numbered=is_numbered)
    assert refused in str(caught.value)
    assert "require_loaded" in caught.value.hint
