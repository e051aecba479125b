"""CenterNets learn and find keypoints as the Object Detection API's own code does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import center_net_keypoints_inputs as inputs
import numpy as np
import pytest
import torch

from lockstep.detection.detector import Targets
from lockstep.detection.tf_center_net import TfCenterNet
from lockstep.recipes.pipeline_config import import_pipeline

TRAIN = "train_config { optimizer { adam_optimizer { learning_rate { constant_learning_rate { } } } } }"
PARTS = {
    "object_center": ("logits", "classification"),
    "box/scale": ("sizes", "scale"),
    "box/offset": ("offsets", "offset"),
    "keypoint/heatmap": ("heat_maps", "heat_map"),
    "keypoint/offset": ("offsets", "offset"),
    "keypoint/regression": ("regressions", "regression"),
}
"""The names of our predictions and losses by those of the reference; of keypoints, behind the name of their task."""


def ours(key: str, kind: int) -> str:
    task, _, part = key.partition("/keypoint/")
    return f"{task.replace(' ', '_')}_{PARTS[f'keypoint/{part}'][kind]}" if part else PARTS[key][kind]


@pytest.mark.parametrize("name", inputs.CONFIGS)
def test_a_center_net_learns_and_finds_the_keypoints_that_the_reference_does(name: str, tmp_path: Path) -> None:
    recorded = json.loads(inputs.PATH.read_text())[name]
    model, predicted = net(name, tmp_path), dict[str, Any]()
    for key in recorded["gradients"]:
        (layer, *_) = model.head.get_submodule(ours(key, 0)).children()
        channels = layer.get_parameter("predictor.bias").shape[0]
        predicted[ours(key, 0)] = [
            torch.from_numpy(each).flatten(1, 2).requires_grad_() for each in inputs.predictions(key, channels)
        ]
    assigned = model.assign(targets(name))
    losses, counts = model.losses(predicted, assigned), model.counts(assigned)
    assert losses.keys() == counts.keys()
    means = {kind: loss / counts[kind] for kind, loss in losses.items()}
    assert {kind: loss.item() for kind, loss in means.items()} == {
        ours(key, 1): pytest.approx(loss, rel=1e-5) for key, loss in recorded["losses"].items()
    }
    torch.stack([*means.values()]).sum().backward()  # type: ignore[no-untyped-call]
    for key, expected in recorded["gradients"].items():
        for each, sample in zip(predicted[ours(key, 0)], expected, strict=True):
            found = inputs.sample(each.grad.numpy())
            np.testing.assert_allclose(found, sample, rtol=1e-4, atol=1e-5, err_msg=key)
    check_detections(model, predicted, recorded)


@torch.no_grad()
def check_detections(model: TfCenterNet, predicted: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    detections = model.postprocess({**predicted, "shape": inputs.CELLS})
    for row, found in enumerate(detections):
        assert found.labels.tolist() == recorded["labels"][row]
        np.testing.assert_allclose(found.scores, recorded["scores"][row], atol=1e-5)
        assert found.keypoints is not None
        points, scores = found.keypoints[..., :2], found.keypoints[..., 2]
        expected = [np.array(recorded[key][row]) for key in ("keypoints", "keypoint_scores")]
        if model.num_classes == 1:  # then the reference leaves them in the order of the label map
            expected = [each[:, np.argsort([0, 2, 1])] for each in expected]
        np.testing.assert_allclose(points, expected[0], atol=1e-3)
        np.testing.assert_allclose(scores, expected[1], atol=1e-5)


def net(name: str, folder: Path) -> TfCenterNet:
    path = folder / "label_map.pbtxt"
    path.write_text(inputs.label_map(name))
    text = f"model {{ {inputs.CONFIGS[name].replace('LABEL_MAP', str(path))} }} {TRAIN}"
    imported = import_pipeline(text, name, "a")
    assert imported.refusal is None
    model: Any = imported.recipe.model.build(0)
    assert isinstance(model, TfCenterNet)
    return model


def targets(name: str) -> Targets:
    given = {key: [torch.from_numpy(each) for each in own] for key, own in inputs.objects(name).items()}
    labelled = [torch.isfinite(each).all(-1, keepdim=True).float() for each in given["keypoints"]]
    points = [(each * torch.tensor(inputs.SIDES)).nan_to_num(0) for each in given["keypoints"]]
    return Targets(
        boxes=[each * torch.tensor(2 * inputs.SIDES) for each in given["boxes"]],
        labels=[each.argmax(1) + 1 for each in given["classes"]],
        classes=given["classes"],
        weights=given["weights"],
        is_crowd=[torch.zeros(len(each), dtype=torch.bool) for each in given["boxes"]],
        shape=inputs.SIDES,
        keypoints=[torch.cat(each, -1) for each in zip(points, labelled, strict=True)],
    )
