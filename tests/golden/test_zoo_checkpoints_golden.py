"""Checkpoints of TensorFlow 2, as the API's zoo has them, give our detectors the numbers of the API's own code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import zoo_checkpoints_inputs as inputs

import lockstep as ls
from lockstep.recipes.pipeline_config import import_pipeline

TOLERANCE = 1e-4
"""Of the largest value: the kernels of both systems add up in float32, in an order of their own."""
TRAIN = "train_config { optimizer { momentum_optimizer { learning_rate { constant_learning_rate { } } } } }"
QUICK = ("efficientdet",)
UNUSED = {"efficientdet": 7, "centernet resnet v2": 4}
"""Number of variables that the API's detectors have and do not use: the top of a classifier, the last norm of a net."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in inputs.CONFIGS]
)
@torch.no_grad()
def test_a_detector_predicts_what_the_reference_does_with_the_weights_of_its_checkpoint(name: str) -> None:
    recorded = inputs.read()[name]
    values = {key: inputs.weights(key, shape) for key, shape in recorded.pop("variables").items()}
    model: Any = import_pipeline(f"model {{ {inputs.CONFIGS[name]} }} {TRAIN}", name, "a").recipe.model.build(0)
    report = ls.warm_start(ls.TrainState(model, ls.optim.SGD(lr=0.1)), values, takes="detector")
    assert report.share == 1.0
    assert not report.mismatched
    assert len(report.unexpected) == UNUSED.get(name, 0)
    images = torch.from_numpy(inputs.images(name)).permute(0, 3, 1, 2)
    predicted = model.eval()(model.preprocess(images))
    assert recorded.keys() <= predicted.keys()
    for key, expected in recorded.items():
        ours = predicted[key][-1] if isinstance(predicted[key], list) else predicted[key]
        sample = inputs.sample(ours.float().numpy())
        np.testing.assert_allclose(sample, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(), err_msg=key)
