"""RetinaNets and FPNLite of TF-Slim's layers and of Keras's give the numbers of the Object Detection API's own code."""

from __future__ import annotations

import json

import numpy as np
import pytest
import retinanet_inputs as inputs
import torch
from slim_nets_inputs import weights

import lockstep as ls
from lockstep.detection.detector import Targets
from lockstep.detection.tf_configs import Ssd
from lockstep.detection.tf_ssd import TfSsd
from lockstep.recipes.pipeline_config import import_pipeline

TOLERANCE = 1e-4
"""Of the largest value: the kernels of both systems add up in float32, in an order of their own."""
TRAIN = "train_config { optimizer { momentum_optimizer { learning_rate { constant_learning_rate { } } } } }"
NAME_MAPS = {"ssd_resnet50_v1_fpn": "ssd_resnet_v1_fpn", "ssd_mobilenet_v2_fpn": "ssd_mobilenet_v2_fpn"}


@pytest.mark.parametrize("name", inputs.CONFIGS)
@torch.no_grad()
def test_a_pyramid_of_the_reference_predicts_and_learns_the_same(name: str) -> None:
    with np.load(inputs.PATH, allow_pickle=False) as file:
        recorded = {key.removeprefix(f"{name}/"): file[key] for key in file.files if key.startswith(f"{name}/")}
    config = import_pipeline(f"model {{ {inputs.CONFIGS[name]} }} {TRAIN}", name, "a").recipe.model
    assert isinstance(config, Ssd)
    model = TfSsd(config)
    values = {each: weights(each, shape) for each, shape in json.loads(str(recorded["variables"])).items()}
    state = ls.TrainState(model, ls.optim.SGD(lr=0.1))
    report = ls.warm_start(state, values, ls.weights.WarmStart(name_map=NAME_MAPS[config.feature_extractor.net]))
    assert not report.unexpected
    assert report.share == 1.0
    model.eval()
    predicted = model(model.preprocess(torch.from_numpy(inputs.images()).permute(0, 3, 1, 2)))
    assigned = model.assign(targets())
    losses, counts = model.losses(predicted, assigned), model.counts(assigned)
    found = {
        "codes": predicted["codes"],
        "logits": predicted["logits"],
        "anchors": predicted["anchors"] / torch.tensor(2 * inputs.SIDES),
        **{kind: losses[kind] / counts[kind] for kind in counts},
    }
    assert {"variables", *found} == recorded.keys()
    for key, ours in found.items():
        sample, expected = inputs.sample(ours.numpy()), recorded[key]
        np.testing.assert_allclose(sample, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(), err_msg=key)


def targets() -> Targets:
    boxes, classes = ([torch.from_numpy(each) for each in kind] for kind in inputs.objects())
    return Targets(
        boxes=[each * torch.tensor(2 * inputs.SIDES) for each in boxes],
        labels=[each.argmax(1) + 1 for each in classes],
        classes=classes,
        weights=[torch.ones(len(each)) for each in boxes],
        is_crowd=[torch.zeros(len(each), dtype=torch.bool) for each in boxes],
        shape=inputs.SIDES,
    )
