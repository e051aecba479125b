"""Detectors of TensorFlow 2 give the numbers of the Object Detection API's own code."""

from __future__ import annotations

from typing import Any

import keras_detectors_inputs as inputs
import numpy as np
import pytest
import torch

from lockstep.detection.detector import Targets
from lockstep.detection.tf_configs import FasterRcnnFeatureExtractor
from lockstep.detection.tf_region_features import REGION_FEATURES
from lockstep.recipes.pipeline_config import import_pipeline

TOLERANCE = 1e-4
"""Of the largest value: the kernels of both systems add up in float32, in an order of their own."""
TRAIN = "train_config { optimizer { momentum_optimizer { learning_rate { constant_learning_rate { } } } } }"
BIG = ("hourglass",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in BIG else name for name in inputs.CONFIGS]
)
@torch.no_grad()
def test_a_detector_of_the_reference_predicts_learns_and_detects_the_same(name: str) -> None:
    with np.load(inputs.PATH, allow_pickle=False) as file:
        recorded = {key.removeprefix(f"{name}/"): file[key] for key in file.files if key.startswith(f"{name}/")}
    model: Any = import_pipeline(f"model {{ {inputs.CONFIGS[name]} }} {TRAIN}", name, "a").recipe.model.build(0)
    for key, value in model.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            value.copy_(torch.from_numpy(inputs.weights(key, value.shape, inputs.GAINS[name])))
    model.eval()
    predicted = model(model.preprocess(torch.from_numpy(inputs.images(name)).permute(0, 3, 1, 2)))
    assigned = model.assign(targets(inputs.sides(name)))
    losses, counts = model.losses(predicted, assigned), model.counts(assigned)
    detections = model.postprocess(predicted)
    found = {
        **{key: value[-1] if isinstance(value, list) else value for key, value in predicted.items() if key in recorded},
        **{kind: losses[kind] / counts[kind] for kind in counts},
        **{key: torch.stack([getattr(each, key) for each in detections]) for key in ("scores", "labels")},
        "boxes": torch.stack([each.boxes for each in detections]) / torch.tensor(2 * inputs.sides(name)),
    }
    assert {"logits", *counts} <= recorded.keys()
    for key, expected in recorded.items():
        sample = inputs.sample(found[key].float().numpy())
        np.testing.assert_allclose(sample, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(), err_msg=key)


@pytest.mark.slow
@torch.no_grad()
def test_both_stages_of_inception_resnet_v2_have_the_maps_of_the_reference() -> None:
    config = FasterRcnnFeatureExtractor("faster_rcnn_inception_resnet_v2_keras")
    extractor = REGION_FEATURES[config.net]
    first, second = (part.eval() for part in extractor.parts(config))
    for key, value in {**first.state_dict(), **second.state_dict()}.items():
        if not key.endswith("num_batches_tracked"):
            value.copy_(torch.from_numpy(inputs.weights(key, value.shape, inputs.REGION_GAINS)))
    drawn = np.random.default_rng(0).uniform(0, 255, (1, *inputs.REGION_SIDES, 3)).astype(np.float32)
    mean, std = (torch.tensor(each)[:, None, None] for each in (extractor.mean, extractor.std))
    maps = first((torch.from_numpy(drawn).permute(0, 3, 1, 2) - mean) / std)["0"]
    with np.load(inputs.PATH, allow_pickle=False) as file:
        for key, found in {"maps": maps, "regions": second(maps)}.items():
            expected = file[f"{inputs.REGIONS}/{key}"]
            sample = inputs.sample(found.permute(0, 2, 3, 1).numpy())
            np.testing.assert_allclose(sample, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(), err_msg=key)


def targets(sides: tuple[int, int]) -> Targets:
    boxes, classes = ([torch.from_numpy(each) for each in kind] for kind in inputs.objects())
    return Targets(
        boxes=[each * torch.tensor(2 * sides) for each in boxes],
        labels=[each.argmax(1) + 1 for each in classes],
        classes=classes,
        weights=[torch.ones(len(each)) for each in boxes],
        is_crowd=[torch.zeros(len(each), dtype=torch.bool) for each in boxes],
        shape=sides,
    )
