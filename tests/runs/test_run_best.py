"""A run that keeps its best checkpoints: it saves where a score is one of the best, and only there."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from test_run_nonfinite import STEPS, make_build, make_recipe
from torch import nn

import lockstep as ls
from lockstep.checkpoints import Store
from lockstep.checkpoints.manifest import Manifest
from lockstep.cli import evaluate
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import with_settings
from lockstep.runs import stages
from lockstep.runs.build import build
from lockstep.runs.run import Run
from lockstep.runs.workdir import Workdir
from lockstep.workers.rank import leave

SCORES = {2: 0.25, 4: 0.75, 6: 0.5, 8: 0.625}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of all checkpoints that are written."""
    steps: list[int] = []
    write = Store.write

    def spy(store: Store, step: int, *rest: object, **more: object) -> Path:
        steps.append(step)
        return write(store, step, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "write", spy)
    return steps


def start(
    monkeypatch: pytest.MonkeyPatch,
    workdir: Path,
    *settings: str,
    scores: Mapping[int, float] = SCORES,
    stop_at: int | None = None,
) -> None:
    leave()
    worker = ls.join("cpu")

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
        if started.step == stop_at:
            worker.pulse.stop_requested = "SIGUSR1"
        return {"top1": torch.full((len(batch["x"]),), scores[started.step])}

    monkeypatch.setattr(stages, "build", make_build([], score=score))
    best = ["checkpoints.retention.best=validation/top1", "checkpoints.retention.newest=1", "evaluate.every=2 steps"]
    started = Run(make_recipe("stop", *best, "checkpoints.every=0", *settings), workdir, worker)
    started.run(conclude=False)


def kept(workdir: Path) -> list[int]:
    return Store(workdir / "checkpoints").steps()


def test_a_checkpoint_is_saved_at_the_best_score(
    monkeypatch: pytest.MonkeyPatch, written: list[int], tmp_path: Path
) -> None:
    start(monkeypatch, tmp_path)
    assert written == [0, 2, 4, STEPS]
    assert kept(tmp_path) == [4, STEPS]
    assert Manifest.read(tmp_path / "checkpoints/step-00000004").scores == {"validation/top1": 0.75}


def test_a_checkpoint_that_is_due_at_the_same_step_is_the_same(
    monkeypatch: pytest.MonkeyPatch, written: list[int], tmp_path: Path
) -> None:
    start(monkeypatch, tmp_path, "checkpoints.every=2 steps", "checkpoints.retention.better=lower")
    assert written == [0, 2, 4, 6, 8, STEPS]
    assert kept(tmp_path) == [2, STEPS]


def test_a_score_that_a_stop_has_put_off_counts_after_it(
    monkeypatch: pytest.MonkeyPatch, written: list[int], tmp_path: Path
) -> None:
    start(monkeypatch, tmp_path, stop_at=4)
    assert written == [0, 2, 4]
    assert kept(tmp_path) == [2, 4]
    start(monkeypatch, tmp_path)
    assert written == [0, 2, 4, 4, STEPS]
    assert kept(tmp_path) == [4, STEPS]


def test_a_score_that_no_evaluation_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ls.InputError) as raised:
        start(monkeypatch, tmp_path, "checkpoints.retention.best=validation/top5")
    assert str(raised.value) == (
        "checkpoints.retention.best cannot be 'validation/top5'.\n"
        "  given:    checkpoints.retention.best='validation/top5'\n"
        "  expected: 'validation/top1'\n"
        "  hint:     give one of these"
    )


@pytest.mark.parametrize("settings", [["checkpoints.retention.best=loss"], ["evaluate.every=0"]])
def test_a_recipe_by_whose_score_nothing_can_be_kept(mnist: Recipe, settings: list[str]) -> None:
    with pytest.raises(ls.RecipeError, match="By this score no checkpoint can be kept"):
        with_settings(mnist, ["checkpoints.retention.best=validation/top1", *settings])


# lockstep evaluate --best ---------------------------------------------------------------------------------------------


@pytest.fixture
def run(mnist: Recipe, tmp_path: Path) -> Path:
    """A run with a checkpoint, and no score."""
    recipe = with_settings(
        mnist, ["checkpoints.retention.best=validation/top1", "evaluate.examples=20", "num_towers=1"]
    )
    Workdir(tmp_path).write_recipe(recipe)
    parts = build(recipe, ls.join("cpu"))
    store = Store(tmp_path / "checkpoints", recipe.checkpoints.retention)
    for step, top1 in enumerate([0.5, 0.75, 0.25]):
        parts.state.step = step
        ls.save(parts.state, parts.loader, store, scores={"validation/top1": top1})
    return tmp_path


def test_the_best_checkpoint_is_scored(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert evaluate.evaluate_as_worker(["evaluate", str(run), "--best", "--device", "cpu"]) == 0
    assert f"raw weights of step 1, from {run / 'checkpoints/step-00000001'}" in caplog.messages


def test_where_none_is_known_to_be_the_best_none_is_scored(run: Path) -> None:
    recipe = Workdir(run).recipe()
    assert recipe is not None
    argv = ["evaluate", str(run), "--best"]
    Workdir(run).write_recipe(with_settings(recipe, ["checkpoints.retention.best=validation/other"]))
    with pytest.raises(ls.InputError) as raised:
        evaluate.plan_evaluate(argv)
    assert str(raised.value) == (
        f"None of the checkpoints in {run / 'checkpoints'} is known to be the best.\n"
        "  given:    checkpoints without a score 'validation/other'\n"
        "  expected: one that was saved after an evaluation\n"
        "  hint:     leave --best out, or let the run train until it has been scored"
    )
    Workdir(run).write_recipe(with_settings(recipe, ["checkpoints.retention.best=none"]))
    with pytest.raises(ls.InputError) as raised:
        evaluate.plan_evaluate(argv)
    assert str(raised.value) == (
        f"The run in {run} does not say which checkpoint is the best.\n"
        "  given:    --best\n"
        "  expected: a run whose recipe keeps the best checkpoints by some score\n"
        "  hint:     leave --best out, or train with one: --set checkpoints.retention.best=validation/top1"
    )
