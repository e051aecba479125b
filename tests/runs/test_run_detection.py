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
from lockstep.recipes.parts import Checkpoints, Pictures
from lockstep.recipes.recipe import Recipe
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
