"""The evaluations of a detector in its run: scores under their reference's names, files, pictures, and how many."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_detector import tiny_recipe, write_coco

import lockstep as ls
from lockstep.checkpoints.retention import Retention
from lockstep.cli.main import main
from lockstep.recipes.parts import Checkpoints, DataLoading, Pictures
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import load
from lockstep.runs.run import Run
from lockstep.workers.rank import leave

MAP, COCO_MAP = "PascalBoxes_Precision/mAP@0.5IOU", "DetectionBoxes_Precision/mAP"


@pytest.fixture
def annotations(tmp_path: Path) -> Path:
    return write_coco(tmp_path, 6)


def train(recipe: Recipe, workdir: Path | None) -> Any:
    leave()
    return Run(recipe, workdir, ls.join("cpu")).run()


def evaluations(workdir: Path) -> dict[int, dict[str, float]]:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["scores"] for line in lines if "evaluation" in line}


def test_scores_and_pictures_are_where_those_of_the_reference_are(annotations: Path, tmp_path: Path) -> None:
    pictures = Pictures(count=2, min_score=0.0, ground_truth=True, folder=str(tmp_path / "pictures"))
    metrics = ("coco_detection_metrics", "pascal_voc_detection_metrics")
    export = tmp_path / "detections.json"
    how = {"metrics": metrics, "per_category": True, "export_path": str(export), "pictures": pictures}
    result = train(tiny_recipe(annotations, **how), tmp_path / "run")
    found = evaluations(tmp_path / "run")
    assert sorted(found) == [2, 4]
    assert next(iter(found[4])) == COCO_MAP
    assert {MAP, "PascalBoxes_PerformanceByCategory/AP@0.5IOU/red"} < set(found[4])
    assert result.evaluation.scores == found[4]
    concluded = json.loads((tmp_path / "run/result.json").read_text())
    assert concluded["evaluations"]["validation"]["scores"] == found[4]
    events = EventAccumulator(str(tmp_path / "run/summaries")).Reload()
    assert f"evaluation/validation/{COCO_MAP}" in events.Tags()["scalars"]
    assert [event.step for event in events.Images("image-0")] == [2, 4]
    assert events.Tags()["images"] == ["image-0", "image-1"]
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == [
        "export-image-0.png",
        "export-image-1.png",
    ]
    written = json.loads(export.read_text())
    assert {entry["image_id"] for entry in written} == {7 * number for number in range(1, 7)}
    assert {entry["category_id"] for entry in written} <= {3, 90}


def test_the_first_metric_says_which_checkpoint_is_the_best(annotations: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(annotations, metrics=("coco_detection_metrics", "pascal_voc_detection_metrics"))
    patient = replace(recipe, evaluate=replace(recipe.evaluate, patience=5))
    assert patient.checkpoints.retention.best == f"validation/{COCO_MAP}"
    kept = replace(recipe, checkpoints=Checkpoints(retention=Retention(best=f"validation/{MAP}")))
    assert f"validation/{MAP}" in train(kept, tmp_path / "run").best.scores
    wrong = replace(recipe, checkpoints=Checkpoints(retention=Retention(best="validation/top1")))
    with pytest.raises(ls.InputError, match=COCO_MAP):
        train(wrong, None)


def test_no_more_evaluations_are_made_than_the_recipe_allows_and_none_ends_the_run(
    annotations: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lockstep")
    (tmp_path / "file").touch()
    recipe = tiny_recipe(annotations, max_evaluations=1, export_path=str(tmp_path / "file/detections.json"))
    train(replace(recipe, end=ls.Steps(3)), tmp_path / "run")
    assert sorted(evaluations(tmp_path / "run")) == [2]
    assert "the detections are not written down" in caplog.text
    left_off = "validation is left off from now on, by evaluate.detection.max_evaluations=1"
    assert left_off not in caplog.text, "none was due"
    train(replace(recipe, end=ls.Steps(6)), tmp_path / "run")
    assert sorted(evaluations(tmp_path / "run")) == [2], "those of the run before count"
    assert [line for line in caplog.messages if left_off in line] == [f"step 4: {left_off}"]


def test_without_ground_truth_detections_are_written_once(annotations: Path, tmp_path: Path) -> None:
    export = tmp_path / "detections.json"
    result = train(tiny_recipe(annotations, ignore_ground_truth=True, export_path=str(export)), tmp_path / "run")
    assert evaluations(tmp_path / "run") == {2: {}}
    assert result.evaluation.scores == {}
    assert json.loads(export.read_text())


@pytest.mark.parametrize(
    ("how", "given"),
    [
        ({"ignore_ground_truth": True}, "ignore_ground_truth"),
        ({"metrics": ()}, r"metrics=\[\]"),
        ({"metrics": ("coco_detection",)}, "coco_detection"),
    ],
)
def test_an_evaluation_that_says_nothing_is_refused(annotations: Path, how: Any, given: str) -> None:
    with pytest.raises(ls.InputError, match=given):
        tiny_recipe(annotations, **how)


def test_patience_needs_scores(annotations: Path) -> None:
    recipe = tiny_recipe(annotations, ignore_ground_truth=True, export_path="detections.json")
    with pytest.raises(ls.InputError, match="no checkpoint is better"):
        replace(recipe, evaluate=replace(recipe.evaluate, patience=1))


NAMES = [f"point {number}" for number in range(17)]
OF_KEYPOINTS = """model {{ center_net {{ num_classes: 1 feature_extractor {{ type: "mobilenet_v2_fpn" }}
  image_resizer {{ keep_aspect_ratio_resizer {{ min_dimension: 64 max_dimension: 64 pad_to_max_dimension: true }} }}
  object_detection_task {{ localization_loss {{ l1_localization_loss {{ }} }} }}
  object_center_params {{ classification_loss {{ {focal} }} }}
  keypoint_label_map_path: "{label_map}"
  keypoint_estimation_task {{ task_name: "pose" keypoint_class_name: "person" offset_peak_radius: 3
    per_keypoint_offset: true loss {{ localization_loss {{ l1_localization_loss {{ }} }}
    classification_loss {{ {focal} }} }} }} }} }}
train_config {{ batch_size: 2 num_steps: 3
  data_augmentation_options {{ random_horizontal_flip {{ keypoint_flip_permutation: {order} }} }}
  data_augmentation_options {{ random_absolute_pad_image {{ max_height_padding: 20 max_width_padding: 20 }} }}
  optimizer {{ use_moving_average: false adam_optimizer {{ learning_rate {{ constant_learning_rate {{ }} }} }} }} }}
train_input_reader {{ num_keypoints: 17 label_map_path: "{label_map}"
  tf_record_input_reader {{ input_path: "{data}" }} }}
eval_config {{ metrics_set: "coco_detection_metrics" batch_size: 1
  parameterized_metric {{ coco_keypoint_metrics {{ class_label: "person" }} }} }}
eval_input_reader {{ tf_record_input_reader {{ input_path: "{data}" }} }}"""


@pytest.mark.slow
def test_a_config_of_keypoints_trains_resumes_is_scored_and_predicts(tmp_path: Path) -> None:
    coco, label_map = Path(__file__).parents[1] / "fixtures/coco", tmp_path / "labels.pbtxt"
    points = " ".join(f'keypoints {{ id: {number} label: "{name}" }}' for number, name in enumerate(NAMES))
    label_map.write_text(f'item {{ id: 1 name: "person" {points} }}')
    text = OF_KEYPOINTS.format(
        label_map=label_map,
        data=f"{coco}/person_keypoints.json:{coco}/images",
        focal="penalty_reduced_logistic_focal_loss { alpha: 2 beta: 4 }",
        order=list(range(17)),
    )
    (tmp_path / "pose.config").write_text(text)
    assert main(["import", "pipeline", str(tmp_path / "pose.config"), "--to", str(tmp_path / "pose.toml")]) == 0
    label_map.write_text('item { id: 1 name: "person" }')
    recipe = replace(load(tmp_path / "pose.toml"), device="cpu", feed=DataLoading(num_processes=0))
    scores = train(recipe, tmp_path / "whole").evaluation.scores
    assert {COCO_MAP, "Keypoints_Precision/mAP"} <= scores.keys()
    train(replace(recipe, end=ls.Steps(2)), tmp_path / "resumed")
    train(recipe, tmp_path / "resumed")
    for name in ("parameters", "buffers"):
        parts = [tmp_path / run / f"checkpoints/step-00000003/{name}.safetensors" for run in ("whole", "resumed")]
        assert len({part.read_bytes() for part in parts}) == 1
    leave()
    words = [str(tmp_path / "whole"), str(coco / "images"), "--to", str(tmp_path / "out"), "--device", "cpu"]
    assert main(["predict", *words, "--min-score", "0"]) == 0
    found = json.loads((tmp_path / "out/predictions.json").read_text())["predictions"]
    assert {len(each["keypoints"]) for image in found for each in image["objects"]} == {3 * 17}
