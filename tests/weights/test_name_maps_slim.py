"""The maps of TF-Slim's nets; that they name every variable is tested with TensorFlow's numbers in tests/golden."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lockstep.weights.name_maps import FASTER_RCNN_NETS, SHIPPED, best_name_map, with_mask_layers
from lockstep.weights.names import Destination, apply_renames

GOLDEN = Path(__file__).parents[1] / "golden" / "slim_nets_golden.npz"


def place(name: str, name_map: str) -> str:
    places, _ = apply_renames({name: [Destination(name)]}, SHIPPED[name_map].renames)
    (only,) = places[name]
    return only.name


@pytest.mark.parametrize(
    ("name_map", "variable", "parameter"),
    [
        ("slim_mobilenet_v1", "MobilenetV1/Conv2d_3_depthwise/depthwise_weights", "Conv2d_3_depthwise.0.weight"),
        ("slim_mobilenet_v1", "MobilenetV1/Conv2d_0/BatchNorm/moving_mean", "Conv2d_0.1.running_mean"),
        ("slim_mobilenet_v2", "MobilenetV2/expanded_conv/project/weights", "1.conv.1.weight"),
        ("slim_mobilenet_v2", "MobilenetV2/expanded_conv_1/project/weights", "2.conv.2.weight"),
        ("slim_mobilenet_v2", "MobilenetV2/expanded_conv_16/project/BatchNorm/beta", "17.conv.3.bias"),
        ("slim_mobilenet_v3_large", "MobilenetV3/expanded_conv_6/project/weights", "7.block.2.0.weight"),
        ("slim_mobilenet_v3_small", "MobilenetV3/expanded_conv/squeeze_excite/Conv_1/biases", "1.block.1.fc2.bias"),
        ("slim_resnet_v1", "resnet_v1_101/block3/unit_23/bottleneck_v1/conv2/BatchNorm/gamma", "layer3.22.bn2.weight"),
        ("slim_resnet_v1", "resnet_v1_50/block1/unit_1/bottleneck_v1/shortcut/weights", "layer1.0.downsample.0.weight"),
        (
            "ssd_mobilenet_v1",
            "FeatureExtractor/MobilenetV1/Conv2d_13_pointwise_2_Conv2d_3_3x3_s2_256/weights",
            "backbone.extra.1.halve.0.weight",
        ),
        (
            "ssd_inception_v3",
            "FeatureExtractor/InceptionV3/Mixed_7c_1_Conv2d_3_1x1_256/weights",
            "backbone.extra.0.reduce.0.weight",
        ),
        ("ssd_mobilenet_v2", "BoxPredictor_5/ClassPredictor/biases", "head.class_predictor.5.predictor.bias"),
        ("faster_rcnn_resnet_v1", "Conv/weights", "rpn.conv.weight"),
        ("faster_rcnn_resnet_v1", "SecondStageBoxPredictor/ClassPredictor/biases", "box_head.class_predictor.bias"),
        (
            "faster_rcnn_resnet_v1",
            "SecondStageFeatureExtractor/resnet_v1_50/block4/unit_3/bottleneck_v1/conv1/weights",
            "second_stage.layer4.2.conv1.weight",
        ),
        (
            "ssd_mobilenet_v2_fpn",
            "FeatureExtractor/MobilenetV2/fpn/projection_1/biases",
            "backbone.extra.projection.0.0.bias",
        ),
    ],
)
def test_a_variable_has_its_place(name_map: str, variable: str, parameter: str) -> None:
    assert place(variable, name_map) == parameter


@pytest.mark.parametrize("scope", ["", "FirstStageFeatureExtractor/", "SecondStageFeatureExtractor/"])
def test_a_faster_rcnn_has_the_last_block_of_a_net_or_of_the_second_stage(scope: str) -> None:
    with np.load(GOLDEN, allow_pickle=False) as file:
        variables = json.loads(str(file["resnet_v1_50/variables"]))
    of_net = {place(name, "slim_resnet_v1") for name in variables}
    found = {place(f"{scope}{name}", "faster_rcnn_resnet_v1") for name in variables}
    backbone = {f"backbone.{name}" for name in of_net if not name.startswith("layer4.")}
    second_stage = {f"second_stage.{name}" for name in of_net if name.startswith("layer4.")}
    if scope.startswith("First"):  # the API's checkpoints have a last block there, too, which nothing uses
        assert found - backbone == {name for name in found if name.startswith(f"{scope}resnet_v1_50/block4/")}
        assert backbone <= found
    else:
        assert found == backbone | second_stage


def test_the_map_of_a_detector_is_told_by_its_variables() -> None:
    variables = [f"FeatureExtractor/MobilenetV2/expanded_conv_{index}/expand/weights" for index in range(1, 17)]
    wanted = {f"backbone.features.{index + 1}.conv.0.0.weight" for index in range(1, 17)}
    assert best_name_map(variables, wanted) == "ssd_mobilenet_v2"


def test_the_layers_of_masks_are_counted_and_the_last_is_the_predictor() -> None:
    variables = {
        "SecondStageBoxPredictor/Conv/weights": "mask_head.layers.0.0.weight",
        "SecondStageBoxPredictor/Conv_1/BatchNorm/gamma": "mask_head.layers.1.1.weight",
        "SecondStageBoxPredictor/Conv_2/biases": "mask_head.predictor.bias",
        "Conv/biases": "rpn.conv.bias",
    }
    for net, name_map in FASTER_RCNN_NETS.items():
        places, _ = with_mask_layers(name_map, 2).apply(variables)
        assert {name: place.name for name, (place,) in places.items()} == variables, net
