"""Detectors on Inception nets, and R-FCN, give the numbers of the Object Detection API's own code."""

from __future__ import annotations

import json
import re
from typing import Any

import detectors_inputs as inputs
import numpy as np
import pytest
import torch
from retinanet_inputs import objects
from slim_nets_inputs import weights

import lockstep as ls
from lockstep.detection.detector import Targets
from lockstep.detection.tf_configs import FasterRcnn, Ssd
from lockstep.recipes.pipeline_config import import_pipeline

TOLERANCE = 2e-4
"""Of the largest value: the kernels of both systems add up in float32, in an order of their own."""
TRAIN = "train_config { optimizer { momentum_optimizer { learning_rate { constant_learning_rate { } } } } }"
NAME_MAPS = {name: name for name in inputs.CONFIGS} | {"rfcn": "faster_rcnn_resnet_v1"}
LOSSES = {
    "localization": "Loss/localization_loss",
    "classification": "Loss/classification_loss",
}
TWO_STAGE_LOSSES = {
    "rpn_localization": "Loss/RPNLoss/localization_loss",
    "rpn_classification": "Loss/RPNLoss/objectness_loss",
    "localization": "Loss/BoxClassifierLoss/localization_loss",
    "classification": "Loss/BoxClassifierLoss/classification_loss",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", inputs.CONFIGS)
@torch.no_grad()
def test_a_detector_of_the_reference_predicts_and_learns_the_same(name: str) -> None:
    with np.load(inputs.PATH, allow_pickle=False) as file:
        recorded = {key.removeprefix(f"{name}/"): file[key] for key in file.files if key.startswith(f"{name}/")}
    config = import_pipeline(f"model {{ {inputs.CONFIGS[name]} }} {TRAIN}", name, "a").recipe.model
    assert isinstance(config, Ssd | FasterRcnn)
    model = config.build(0)
    load(model, json.loads(str(recorded.pop("variables"))), NAME_MAPS[name])
    images = model.preprocess(torch.from_numpy(inputs.images()).permute(0, 3, 1, 2))
    predicted = model.eval()(images)
    found = {key: predicted[key] for key in ("objectness", "anchor_codes", "logits", "codes") if key in predicted}
    if isinstance(config, FasterRcnn):
        found["regions"] = predicted["regions"].boxes
        model.train()
        assigned = model.assign(targets())
        losses = model.losses(model(images, assigned), assigned)
        found |= {theirs: losses[ours] for ours, theirs in TWO_STAGE_LOSSES.items()}
    else:
        assigned = model.assign(targets())
        losses, counts = model.losses(predicted, assigned), model.counts(assigned)
        found |= {theirs: losses[ours] / counts[ours] for ours, theirs in LOSSES.items()}
    assert found.keys() == recorded.keys()
    for key, ours in found.items():
        values, expected = inputs.few(ours.numpy()), recorded[key]
        np.testing.assert_allclose(values, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(), err_msg=key)


def load(model: Any, variables: dict[str, list[int]], name_map: str) -> None:
    """Give the weights by their names: all are used but those of masks, which have no names here, and of no use."""
    values = {each: weights(each, shape) for each, shape in variables.items()}
    state = ls.TrainState(model, ls.optim.SGD(lr=0.1))
    report = ls.warm_start(state, values, ls.weights.WarmStart(name_map=name_map, ignore_missing=True))
    unused = r"SecondStageBoxPredictor/MaskPredictor|FirstStageFeatureExtractor/resnet_v1_50/block4/"
    assert all(re.match(unused, each) for each in report.unexpected)
    assert all(each.startswith("mask_head.") for each in report.missing if not each.endswith("num_batches_tracked"))


def targets() -> Targets:
    boxes, classes = ([torch.from_numpy(each) for each in kind] for kind in objects())
    return Targets(
        boxes=[each * torch.tensor(2 * inputs.SIDES) for each in boxes],
        labels=[each.argmax(1) + 1 for each in classes],
        classes=classes,
        weights=[torch.ones(len(each)) for each in boxes],
        is_crowd=[torch.zeros(len(each), dtype=torch.bool) for each in boxes],
        shape=inputs.SIDES,
        masks=[torch.ones(len(each), *inputs.SIDES, dtype=torch.uint8) for each in boxes],
    )
