"""Keypoints of a CenterNet: what a config says of them, and what is learned; numbers are in tests/golden."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_calls import accelerator, counted
from torch import Generator

from lockstep.detection.detector import Targets
from lockstep.detection.tf_center_net import TfCenterNet
from lockstep.detection.tf_center_net_configs import CenterNet
from lockstep.detection.tf_supported import check_supported
from lockstep.errors import DataError, InputError
from lockstep.recipes.pipeline_config import Imported, import_pipeline
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import from_toml, to_toml

LABEL_MAP = """
item { name: "tree" id: 1 }
item { name: "/m/person" id: 2 display_name: "person"
  keypoints { id: 0 label: "nose" } keypoints { id: 2 label: "foot" } keypoints { id: 1 label: "hand" } }
"""
CONFIG = """model {{ center_net {{ num_classes: 2 feature_extractor {{ type: "mobilenet_v2_fpn" }}
  image_resizer {{ fixed_shape_resizer {{ height: 64 width: 64 }} }}
  object_detection_task {{ localization_loss {{ l1_localization_loss {{ }} }} }}
  object_center_params {{ classification_loss {{ penalty_reduced_logistic_focal_loss {{ alpha: 2 beta: 4 }} }} }}
  keypoint_label_map_path: "{path}"
  keypoint_estimation_task {{ task_name: "pose" keypoint_class_name: "{name}" per_keypoint_offset: true
    predict_depth: true keypoint_label_to_std {{ key: "foot" value: 0.5 }} offset_peak_radius: 1
    loss {{ classification_loss {{ penalty_reduced_logistic_focal_loss {{ alpha: 2 beta: 4 }} }}
      localization_loss {{ l1_localization_loss {{ }} }} classification_weight: 3 }} }}
  {more} }} }}
train_config {{ optimizer {{ adam_optimizer {{ learning_rate {{ constant_learning_rate {{ }} }} }} }} }}
train_input_reader {{ num_keypoints: 3 }}
eval_config {{ metrics_set: "coco_detection_metrics" keypoint_edge {{ start: 0 end: 1 }}
  parameterized_metric {{ coco_keypoint_metrics {{ class_label: "person"
    keypoint_label_to_sigmas {{ key: "hand" value: 0.1 }} keypoint_label_to_sigmas {{ key: "nose" value: 0.2 }} }} }} }}
"""
TASK = "model.center_net.keypoint_estimation_task"


def imported(folder: Path, name: str = "/m/person", label_map: str | None = LABEL_MAP, more: str = "") -> Imported:
    path = folder / "labels.pbtxt"
    if label_map is not None:
        path.write_text(label_map)
    return import_pipeline(CONFIG.format(path=path, name=name, more=more), "pipeline.config", "a")


def fate(made: Imported, field: str) -> list[str]:
    return [row.outcome.fate for row in made.rows if row.field == field]


def test_a_recipe_has_the_keypoints_of_the_label_map_and_needs_it_no_more(tmp_path: Path) -> None:
    made = imported(tmp_path)
    (tmp_path / "labels.pbtxt").unlink()
    assert made.refusal is None
    recipe = from_toml(to_toml(made.recipe), "a.toml")
    assert recipe == made.recipe
    assert isinstance(recipe, Recipe)
    assert isinstance(recipe.model, CenterNet)
    (task,) = recipe.model.keypoint_estimation_task
    assert (task.label, task.keypoint_labels, task.ids) == (2, ("nose", "foot", "hand"), (0, 2, 1))
    assert task.spreads == (1.0, 0.5, 1.0)
    assert recipe.model.num_keypoints == 3
    told = recipe.evaluate.detection
    assert told.metrics == ("coco_detection_metrics", "coco_keypoint_metrics")
    assert told.keypoint_sigmas == (0.2, 0.1, 0.05)
    assert fate(made, f"{TASK}.predict_depth") == ["not mapped"]
    assert fate(made, f"{TASK}.loss.classification_weight") == ["no effect"]
    assert fate(made, "eval_config.keypoint_edge.start") == ["no effect"]
    assert fate(made, "model.center_net.keypoint_label_map_path") == ["mapped"]


@pytest.mark.parametrize(
    ("label_map", "name", "field"),
    [
        (None, "/m/person", "model.center_net.keypoint_label_map_path"),
        ('item { name: "/m/person" id: 1 keypoints: 4 }', "/m/person", "model.center_net.keypoint_label_map_path"),
        (LABEL_MAP, "person", f"{TASK}.keypoint_class_name"),
    ],
)
def test_keypoints_without_names_are_refused_with_what_to_do(
    tmp_path: Path, label_map: str | None, name: str, field: str
) -> None:
    made = imported(tmp_path, name, label_map)
    assert fate(made, field) == ["not mapped"]
    assert isinstance(made.refusal, InputError)
    assert made.refusal.given == 'model.keypoint_estimation_task.0.keypoint_labels=[] of "pose"'
    assert "keypoint_label_map_path" in made.refusal.hint
    assert isinstance(made.recipe.model, CenterNet)
    check_supported(replace(made.recipe.model, keypoint_estimation_task=()))


def test_sigmas_of_another_class_are_reported(tmp_path: Path) -> None:
    made = imported(tmp_path, label_map=LABEL_MAP.replace('"person"', '"people"'))
    assert made.recipe.evaluate.detection.metrics == ("coco_detection_metrics",)
    path = "eval_config.parameterized_metric.coco_keypoint_metrics"
    assert fate(made, f"{path}.class_label") + fate(made, f"{path}.keypoint_label_to_sigmas.key") == ["not mapped"] * 3


def test_tasks_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    model: Any = imported(tmp_path).recipe.model
    (task,) = model.keypoint_estimation_task
    for other in (replace(task, task_name="face"), replace(task, label=1), replace(task, task_name="face", label=3)):
        with pytest.raises(InputError, match="one task of keypoints at most"):
            replace(model, keypoint_estimation_task=(task, other))
    for ids in ((0, 1, 1), (0, 1, 2, 2)):
        with pytest.raises(InputError, match="a place of its own"):
            replace(task, keypoint_ids=ids)


def given(points: list[torch.Tensor] | None) -> Targets:
    """Two persons, of whom one has no keypoints, and a tree on the first of two images."""
    boxes = [torch.tensor([[8.0, 8.0, 40.0, 24.0], [30.0, 30.0, 60.0, 62.0], [2, 40, 20, 62]]), torch.zeros(0, 4)]
    classes = [torch.eye(2)[[1, 1, 0]], torch.zeros(0, 2)]
    return Targets(
        boxes=boxes,
        labels=[torch.tensor([2, 2, 1]), torch.zeros(0, dtype=torch.int64)],
        classes=classes,
        weights=[torch.ones(3), torch.zeros(0)],
        is_crowd=[torch.zeros(len(each), dtype=torch.bool) for each in boxes],
        shape=(64, 64),
        keypoints=points,
    )


def test_a_center_net_learns_keypoints_and_finds_them(tmp_path: Path) -> None:
    model: Any = imported(tmp_path).recipe.model.build(0)
    assert isinstance(model, TfCenterNet)
    points = torch.zeros(3, 3, 3)
    points[0] = torch.tensor([[10.0, 11, 1], [33, 20, 1], [0, 0, 0]])
    inputs = model.preprocess(torch.rand(2, 3, 64, 64, generator=Generator().manual_seed(0)) * 255)
    objects = given([points, torch.zeros(0, 3, 3)])
    with accelerator(), counted() as calls:
        assigned = model.assign(objects)
        model.losses(model(inputs, assigned), assigned)
    assert len(calls.waits) == 2, "how many places of the heat maps are drawn, and how many keypoints"
    counts = model.counts(assigned)
    assert [int(count) for count in counts.values()] == [3, 3, 3, 2, 10, 10], "a point and the four cells around it"
    optimizer, sums = torch.optim.Adam(model.parameters(), lr=0.003), list[float]()
    for _ in range(80):
        losses = model.losses(model(inputs, assigned), assigned)
        total = torch.stack([losses[name] / counts[name] for name in counts]).sum()
        optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        sums.append(total.item())
    assert sums[-1] < 0.1 * sums[0]
    with torch.no_grad():
        found, empty = model.postprocess(model(inputs))
    assert {found.keypoints.shape[1:], empty.keypoints.shape[1:]} == {(3, 3)}
    person = (found.boxes - torch.tensor([8.0, 8, 40, 24])).abs().sum(1).argmin()
    assert (found.keypoints[person, :2, :2] - points[0, :2, :2]).abs().max() < 4
    assert found.keypoints[person, :2, 2].min() > 0.5
    assert not found.keypoints[found.labels == 1].any(), "a tree has none"


def test_objects_without_their_keypoints_are_refused(tmp_path: Path) -> None:
    model: Any = imported(tmp_path).recipe.model.build(0)
    for points in (None, [torch.zeros(3, 2, 3), torch.zeros(0, 2, 3)]):
        with pytest.raises(DataError, match="have not the keypoints"):
            model.assign(given(points))
