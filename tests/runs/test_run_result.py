"""What a run says of itself once it has reached its end, and how fast it says that it was."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_run_nonfinite import BATCH_SIZE, STEPS, make_build, make_recipe
from torch import nn

import lockstep as ls
from lockstep.cli import training
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import with_settings
from lockstep.runs import stages
from lockstep.runs.build import Parts
from lockstep.runs.inputs import check_inputs
from lockstep.runs.run import Run
from lockstep.runs.workdir import Result
from lockstep.version import __version__
from lockstep.workers.rank import Worker

BEST = ["checkpoints.retention.best=validation/top1", "evaluate.every=2 steps"]


def start(
    workdir: Path | None,
    given: Recipe,
    splits: tuple[str, ...] = ("validation", "test"),
    attempted: Any = None,
    scored: Any = None,
    value: float | None = None,
) -> Result:
    """A start of the run in this process; an example scores a sixteenth a step, or that value."""

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
        if scored:
            scored(session.step)
        return {"top1": torch.full((len(batch["x"]),), session.step / 16 if value is None else value)}

    def build(recipe: Recipe, worker: Worker, *_: object, **__: object) -> Parts:
        parts = make_build([], attempted=attempted, score=score)(recipe, worker)
        parts.examples.has = splits.__contains__  # type: ignore[method-assign]
        return parts

    before, stages.build = stages.build, build
    try:
        session = Run(given, workdir, ls.join("cpu"))
        return session.run()
    finally:
        stages.build = before


def written(workdir: Path) -> Any:
    return json.loads((workdir / "result.json").read_text())


def test_result_json_has_the_facts_of_the_run(tmp_path: Path) -> None:
    start(tmp_path, make_recipe("stop", *BEST))
    found = written(tmp_path)
    times = found.pop("times")
    assert found == {
        "recipe": "mnist",
        "lockstep": __version__,
        "torch": torch.__version__,
        "step": STEPS,
        "epochs": STEPS * BATCH_SIZE / 30,
        "reason": "end",
        "evaluations": {
            "test": {
                **{"weights": "raw", "precision": "fp32", "num_examples": 30, "num_bad_examples": 0},
                "scores": {"top1": STEPS / 16},
            }
        },
        "best": {"step": 8, "scores": {"validation/top1": 0.5}},
    }
    assert sorted(times) == ["examples_per_second", "seconds"]
    assert all(value > 0 for value in times.values())


def test_a_run_is_scored_in_the_precision_of_its_towers_unless_told_otherwise(tmp_path: Path) -> None:
    for workdir, *settings in (
        ("half", "towers.precision=bf16"),
        ("full", "towers.precision=bf16", "evaluate.precision=fp32"),
    ):
        start(tmp_path / workdir, make_recipe("stop", "end.count=1", *settings))
    precisions = [written(tmp_path / workdir)["evaluations"]["test"]["precision"] for workdir in ("half", "full")]
    assert precisions == ["bf16", "fp32"]


def test_scores_that_are_no_numbers_are_json(tmp_path: Path) -> None:
    result = start(tmp_path, make_recipe("stop", "end.count=1"), value=math.nan)
    assert result.evaluation is not None
    assert math.isnan(result.evaluation["top1"])

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)
    assert found["evaluations"]["test"]["scores"] == {"top1": "nan"}


def test_without_test_examples_those_to_validate_are_scored_once(tmp_path: Path) -> None:
    steps: list[int] = []
    given = make_recipe("stop", "evaluate.every=3 steps")
    result = start(tmp_path, given, splits=("validation",), scored=steps.append)
    assert result.split == "validation"
    assert written(tmp_path)["evaluations"]["validation"]["scores"] == {"top1": STEPS / 16}
    assert steps.count(STEPS) == 4, "in four micro-batches, once"
    start(tmp_path, given, splits=("validation",), scored=steps.append)
    assert steps.count(STEPS) == 8, "another start does it again"


def test_without_either_nothing_is_scored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    result = start(tmp_path, make_recipe("stop"), splits=())
    assert (result.split, result.evaluation, written(tmp_path)["evaluations"]) == (None, None, {})
    training._log_result(result)
    assert caplog.messages[-1] == "nothing was scored: the recipe names neither test nor validation examples"


def test_an_earlier_result_is_gone_while_the_run_goes_on(tmp_path: Path) -> None:
    start(tmp_path, make_recipe("stop", "end.count=4"))
    assert written(tmp_path)["step"] == 4
    there: list[bool] = []
    start(tmp_path, make_recipe("stop"), attempted=lambda _: there.append((tmp_path / "result.json").exists()))
    assert there == [False] * (STEPS - 4)
    assert written(tmp_path)["step"] == STEPS


def test_a_start_that_is_refused_leaves_the_result(tmp_path: Path) -> None:
    start(tmp_path, make_recipe("stop"))
    with pytest.raises(ls.WorkdirError, match="has another recipe"):
        start(tmp_path, make_recipe("stop", "seed=3"))
    assert written(tmp_path)["step"] == STEPS


def test_without_a_workdir_it_is_returned(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    result = start(None, make_recipe("stop"))
    assert "without a workdir nothing is written: no checkpoints, metrics or summaries" in caplog.messages
    assert result.evaluation is not None
    assert (result.step, result.best, result.evaluation["top1"]) == (STEPS, None, STEPS / 16)


def test_a_result_names_the_weights_that_were_scored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    given = with_settings(find("mnist"), ["average.decay=0.9", "evaluate.weights=average", "evaluate.examples=8",
                                          "evaluate.every=1 steps", "batch_size=4", "num_towers=1",
                                          "end.kind=steps", "end.count=1"])  # fmt: skip
    result = Run(given, tmp_path, ls.join("cpu")).run()
    assert result.evaluation is not None
    assert written(tmp_path)["evaluations"]["test"]["weights"] == "average"
    assert f"step 1: validation top1 {written_top1(tmp_path):.4f} over 8 examples with averaged weights" in (
        caplog.messages
    )


def written_top1(workdir: Path) -> float:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    found: float = next(line["scores"]["top1"] for line in lines if "evaluation" in line)
    return found


# Throughput -----------------------------------------------------------------------------------------------------------


def test_evaluations_and_saving_are_no_training_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An attempt takes a second, an evaluation and a checkpoint a thousand."""
    caplog.set_level(logging.INFO)
    clock = SimpleNamespace(now=0.0)
    for module in ("training.step", "data.loader", "runs.run"):
        monkeypatch.setattr(f"lockstep.{module}.time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr("lockstep.runs.segment.Saver.save", lambda *_, **__: pass_time(1000.0))

    def pass_time(seconds: float) -> None:
        clock.now += seconds

    given = make_recipe("stop", "evaluate.every=2 steps", "checkpoints.every=2 steps", "watch.console=3 steps")
    result = start(
        tmp_path,
        given,
        attempted=lambda _: pass_time(1.0),
        scored=lambda _: pass_time(250.0),
    )
    assert result.examples_per_second == BATCH_SIZE
    assert result.seconds > 9 * 1000
    lines = [line for line in caplog.messages if line.startswith("step ") and "examples/s" in line]
    assert len(lines) == 3
    assert all(f"| {BATCH_SIZE} examples/s | data wait 0 %" in line for line in lines)
    assert any(line.startswith(f"waited for data 0 % of {STEPS} s") for line in caplog.messages)
    scalars = EventAccumulator(str(tmp_path / "summaries")).Reload().Scalars("examples_per_second")
    assert [scalar.value for scalar in scalars] == [BATCH_SIZE] * STEPS


# What cannot be scored ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [[], ["data.test={train}"]])
def test_the_best_of_nothing_is_refused_before_the_run(tmp_path: Path, data: list[str]) -> None:
    (tmp_path / "roses").mkdir()
    settings = [f"data.train={tmp_path}", *[each.format(train=tmp_path) for each in data]]
    with pytest.raises(ls.InputError) as raised:
        check_inputs(with_settings(find("inception_v3"), settings), None)
    assert str(raised.value) == (
        "Nothing would say which checkpoints are the best: there are no validation examples.\n"
        "  given:    checkpoints.retention.best='validation/top1', and no validation examples\n"
        "  expected: validation examples, or a run without best checkpoints\n"
        "  hint:     --set data.validation=PATH; or --set checkpoints.retention.best=none"
    )
    check_inputs(with_settings(find("inception_v3"), [*settings, "checkpoints.retention.best=none"]), None)
