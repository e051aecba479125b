"""A run whose metrics need all examples: the numbers that they compute are scores like any other."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from own_script import Margin, stripes
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_run_nonfinite import STEPS, make_build, make_recipe
from torch import Tensor, nn

import lockstep as ls
from lockstep.checkpoints.manifest import Manifest
from lockstep.metrics.metric import Metric
from lockstep.recipes.recipe import Recipe
from lockstep.runs import stages
from lockstep.runs.inputs import check_inputs
from lockstep.runs.run import Run
from lockstep.runs.workdir import Result
from lockstep.types import Interval

SCORES = {2: math.nan, 4: 0.25, 6: 0.75, 8: 0.5, STEPS: 0.625, 10: 0.625}


class Precision:
    """A metric that computes the mean of what it was given, and half of it."""

    def reset(self) -> None:
        self.values: list[Tensor] = []

    def update(self, values: Tensor) -> None:
        self.values.append(values)

    def compute(self) -> Any:
        mean = torch.cat(self.values).mean()
        return {"map": mean, "map50": mean / 2, "each_class": [1.0, 2.0]}


class Told(Precision):
    """One that tells the names of its scores."""

    score_names = ("map", "map50")


def start(workdir: Path, *settings: str, best: str = "validation/coco/map50", metric: Metric | None = None) -> Result:
    """A start of the run in this process; its metric computes the score of the step."""

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
        value = torch.full((len(batch["x"]),), SCORES[session.step], dtype=torch.float64)
        return {"top1": value.float() * 0, "coco": (value,)}

    given = make_recipe("stop", f"checkpoints.retention.best={best}", "evaluate.every=2 steps", *settings)
    before, stages.build = stages.build, make_build([], score=score)
    try:
        session = Run(given, workdir, ls.join("cpu"), metrics={"coco": metric or Told()})
        return session.run()
    finally:
        stages.build = before


def test_metrics_choose_the_best_checkpoint_and_are_in_all_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    result = start(tmp_path)
    assert result.best is not None
    assert (result.best.step, result.best.scores["validation/coco/map50"]) == (6, 0.375)
    assert Manifest.read(tmp_path / "checkpoints/step-00000006").best_by == "validation/coco/map50"
    facts = json.loads((tmp_path / "result.json").read_text())
    last = SCORES[STEPS]
    assert facts["evaluations"]["test"]["scores"] == {"top1": 0.0, "coco/map": last, "coco/map50": last / 2}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line["scores"]["coco/map"] for line in lines if "evaluation" in line}
    assert found == {2: "nan", 4: 0.25, 6: 0.75, 8: 0.5}
    assert "step 4: validation top1 0.0000, coco/map 0.2500, coco/map50 0.1250 over 30 examples" in caplog.messages
    events = EventAccumulator(str(tmp_path / "summaries")).Reload().Scalars("evaluation/validation/coco/map")
    assert [event.value for event in events][1:] == [0.25, 0.75, 0.5]


def test_metrics_end_a_run_without_progress_also_after_a_resume(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole", "evaluate.patience=2", "end.count=20")
    assert (whole.step, whole.reason) == (10, "patience")
    start(tmp_path / "resumed", "evaluate.patience=2", "end.count=8")
    resumed = start(tmp_path / "resumed", "evaluate.patience=2", "end.count=20")
    assert (resumed.step, resumed.reason, resumed.best) == (whole.step, whole.reason, whole.best)


@pytest.mark.parametrize("best", ["validation/coco/map75", "validation/coco", "validation/map"])
def test_a_score_that_no_metric_has_is_refused_before_the_run(tmp_path: Path, best: str) -> None:
    given = make_recipe("stop", f"checkpoints.retention.best={best}", "evaluate.every=2 steps")
    with pytest.raises(ls.InputError) as raised:
        check_inputs(given, tmp_path / "run", metrics={"coco": Told(), "f1": Precision()})
    assert str(raised.value) == (
        f"checkpoints.retention.best cannot be '{best}'.\n"
        f"  given:    checkpoints.retention.best='{best}'\n"
        "  expected: 'validation/top1' or 'validation/coco/map' or 'validation/coco/map50' or 'validation/f1'\n"
        "  hint:     give one of these"
    )
    assert not (tmp_path / "run").exists()


def test_one_that_does_not_tell_its_scores_is_believed_until_the_first_evaluation(tmp_path: Path) -> None:
    assert start(tmp_path / "right", metric=Precision()).best is not None
    with pytest.raises(ls.InputError) as raised:
        start(tmp_path / "wrong", best="validation/coco/map75", metric=Precision())
    assert str(raised.value).startswith("checkpoints.retention.best cannot be 'validation/coco/map75'.\n")
    assert raised.value.expected == "'validation/top1' or 'validation/coco/map' or 'validation/coco/map50'"
    with pytest.raises(ls.InputError, match=r"retention\.best cannot be 'validation/f1/map'"):
        start(tmp_path / "unknown", best="validation/f1/map", metric=Precision())
    assert not (tmp_path / "unknown").exists()


# ls.run ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def own() -> Recipe:
    recipe = ls.recipes.find("mnist")
    return replace(
        recipe,
        model=ls.models.LeNet(num_classes=2),
        data=ls.recipes.ImageData(image_size=28, preprocessing=ls.recipes.preprocessing.Lenet()),
        batch_size=8,
        end=ls.Steps(2),
        evaluate=replace(recipe.evaluate, every=Interval(1, "steps")),
        checkpoints=replace(
            recipe.checkpoints, retention=replace(recipe.checkpoints.retention, best="validation/margin")
        ),
    )


def halves(split: str) -> ls.data.Reader | None:
    return stripes("test" if split == "validation" else split)


def test_the_metrics_of_a_script_get_logits_and_labels(own: Recipe, tmp_path: Path) -> None:
    metric = Margin()
    result = ls.run(own, tmp_path, reader=halves, metrics={"margin": metric})
    assert result.evaluation is not None
    assert result.best is not None
    assert result.evaluation["margin"] == metric.least
    assert set(result.best.scores) == {"validation/top1", "validation/margin"}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({}, r"retention\.best cannot be 'validation/margin'\."),
        ({"margin": Margin(), "top1": Margin()}, r"There is a score 'top1' already\."),
        ({"margin": len}, r"metrics\['margin'\] is of the wrong type\."),
        ([Margin()], r"metrics is of the wrong type\.\n.*\n.*metrics by name\n.*\"f1\": metric"),
    ],
)
def test_metrics_that_cannot_be_used_are_refused_before_the_run(
    own: Recipe, tmp_path: Path, metrics: Mapping[str, Metric], said: str
) -> None:
    with pytest.raises(ls.InputError, match=said):
        ls.run(own, tmp_path / "run", reader=halves, metrics=metrics)
    assert not (tmp_path / "run").exists()
