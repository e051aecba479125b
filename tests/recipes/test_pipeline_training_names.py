"""Variables of the Object Detection API and the parameters of our detectors: which is which, part by part."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lockstep.recipes.pipeline_training import as_patterns, variables_of
from lockstep.selection import selected

PARTS_OF_TWO_STAGES = [
    ("backbone", "layer3"),
    ("second_stage", "layer4"),
    ("rpn", "conv"),
    ("box_head", "box_predictor"),
    ("mask_head", "predictor"),
]


class Net(nn.Module):
    """An SSD's parts, as its modules are called."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict(
            {"features": nn.Sequential(nn.Conv2d(3, 3, 3, groups=3, bias=False), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1))}
        )
        predictors = {name: nn.ModuleList([nn.Conv2d(4, 4, 1)]) for name in ("box_predictor", "class_predictor")}
        self.head = nn.ModuleDict({**predictors, "layers": nn.ModuleList([nn.Conv2d(4, 4, 1)])})


def test_each_parameter_has_the_part_and_kind_of_its_variable() -> None:
    assert variables_of(Net(), "ssd_mobilenet_v1") == {
        "backbone.features.0.weight": "FeatureExtractor/MobilenetV1/*/depthwise_weights",
        "backbone.features.1.weight": "FeatureExtractor/MobilenetV1/*/BatchNorm/gamma",
        "backbone.features.1.bias": "FeatureExtractor/MobilenetV1/*/BatchNorm/beta",
        "backbone.features.2.weight": "FeatureExtractor/MobilenetV1/*/weights",
        "backbone.features.2.bias": "FeatureExtractor/MobilenetV1/*/biases",
        "head.box_predictor.0.weight": "BoxPredictor_0/BoxEncodingPredictor/*/weights",
        "head.box_predictor.0.bias": "BoxPredictor_0/BoxEncodingPredictor/*/biases",
        "head.class_predictor.0.weight": "BoxPredictor_0/ClassPredictor/*/weights",
        "head.class_predictor.0.bias": "BoxPredictor_0/ClassPredictor/*/biases",
        "head.layers.0.weight": "BoxPredictor_0/*/weights",
        "head.layers.0.bias": "BoxPredictor_0/*/biases",
    }


def test_a_detector_of_two_stages_has_other_parts() -> None:
    layers = {name: nn.ModuleDict({part: nn.Linear(1, 1)}) for name, part in PARTS_OF_TWO_STAGES}
    variables = variables_of(nn.ModuleDict(layers), "faster_rcnn_resnet50")
    assert [name for kind, name in variables.items() if kind.endswith("bias")] == [
        "FirstStageFeatureExtractor/resnet_v1_50/*/biases",
        "SecondStageFeatureExtractor/resnet_v1_50/*/biases",
        "Conv/*/biases",
        "SecondStageBoxPredictor/BoxEncodingPredictor/*/biases",
        "SecondStageBoxPredictor/*/biases",
    ]


def test_the_net_is_that_of_the_feature_extractor() -> None:
    assert variables_of(Net(), "ssd_mobilenet_v3_small")["backbone.features.2.bias"].split("/")[1] == "MobilenetV3"
    assert variables_of(Net(), "unknown")["backbone.features.2.bias"].split("/")[1] == "*"


NAMES = [
    "a.b.weight",
    "a.b.bias",
    "a.b2.weight",
    "a.c.0.weight",
    "a.c.0.bias",
    "ab.weight",
    "d",
    "d2.weight",
]


@given(st.sets(st.sampled_from(NAMES)))
def test_patterns_match_what_is_chosen_and_nothing_else(chosen: set[str]) -> None:
    patterns = as_patterns(chosen, NAMES)
    found = selected("frozen", patterns, NAMES) if patterns else []
    assert set(found) == chosen
    assert len(patterns) <= len(chosen)


def test_a_part_that_is_chosen_as_a_whole_is_one_pattern() -> None:
    below = [name for name in NAMES if name.startswith("a.")]
    assert as_patterns(below, NAMES) == (r"^a\.",)
    assert all(re.match(r"^a\.", name) for name in below)
