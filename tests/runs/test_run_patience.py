"""A run that ends early: patience is counted in evaluations that bring no better checkpoint, over all its starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_run_nonfinite import BATCH_SIZE, STEPS, history, make_build, make_recipe
from torch import nn

import lockstep as ls
from lockstep.checkpoints.retention import Retention
from lockstep.checkpoints.store import Store
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import with_settings
from lockstep.runs import stages
from lockstep.runs.run import Run
from lockstep.runs.validation import num_without_improvement
from lockstep.runs.workdir import Result
from lockstep.workers.rank import leave

SCORES = {2: 0.5, 4: 0.75, 6: 0.75, 8: 0.625, 10: 0.875, 12: 0.5, 14: 0.5, 16: 0.5}
"""By step; with a patience of 2 the run ends at step 8, with 3 at step 16."""


class KilledError(Exception):
    """The end of a start that was killed."""


def patient(count: int, *more: str) -> Recipe:
    best = ["checkpoints.retention.best=validation/top1", f"evaluate.patience={count}", "evaluate.every=2 steps"]
    return make_recipe("stop", *best, "checkpoints.every=3 steps", "end.count=20", *more)


def start(
    workdir: Path | None,
    given: Recipe,
    scores: Mapping[int, float] = SCORES,
    kill_at: int | None = None,
    stop_at: tuple[str, int] = ("", 0),
) -> Result:
    """A start of the run in this process: killed in an attempt, or stopped in an attempt or a scoring."""
    worker = ls.join("cpu")
    worker.pulse.stop_requested = None

    def pass_by(*place: Any) -> None:
        if place == stop_at:
            worker.pulse.stop_requested = "SIGUSR1"

    def attempted(position: int) -> None:
        if position == kill_at:
            raise KilledError
        pass_by("step", position)

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
        pass_by("scoring", session.step)
        return {"top1": torch.full((len(batch["x"]),), scores.get(session.step, 0.0))}

    before, stages.build = stages.build, make_build([], attempted=attempted, score=score)
    try:
        session = Run(given, workdir, worker)
        return session.run()
    finally:
        stages.build = before


@pytest.mark.parametrize(("patience", "ends_at"), [(1, 6), (2, 8), (3, 16)])
def test_a_run_ends_after_patience_evaluations_without_progress(
    tmp_path: Path, patience: int, ends_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    result = start(tmp_path, patient(patience))
    assert (result.step, result.reason) == (ends_at, "patience")
    assert result.best is not None
    assert result.best.scores == {"validation/top1": 0.875 if patience == 3 else 0.75}
    assert Store(tmp_path / "checkpoints").newest() == ends_at
    last = history(tmp_path)[-1]
    assert (last["event"], last["step"], last["reason"]) == ("end", ends_at, "patience")
    evaluations = f"{patience} evaluation{'s' if patience > 1 else ''}"
    assert f"the run ends at step {ends_at}: no better validation/top1 in {evaluations} (evaluate.patience)" in (
        caplog.messages
    )


def test_a_run_whose_patience_lasts_goes_to_its_end(tmp_path: Path) -> None:
    result = start(tmp_path, patient(6))
    assert (result.step, result.reason) == (20, "end")


def test_patience_needs_no_workdir() -> None:
    off = ["checkpoints.every=0", "watch.summaries=0", "watch.metrics=0"]
    assert start(None, patient(2, *off)).step == 8


def test_patience_counts_over_stages_without_a_workdir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "build_state", lambda recipe, worker: None)
    off = ["checkpoints.every=0", "watch.summaries=0", "watch.metrics=0"]
    given = replace(patient(2, *off), stages=tuple(ls.recipes.Stage(ls.Steps(count)) for count in (5, 2, 9)))
    assert start(None, given).step == 8


def contents(workdir: Path, step: int) -> dict[str, bytes]:
    result = json.loads((workdir / "result.json").read_text())
    del result["times"]
    newest = workdir / f"checkpoints/step-{step:08d}"
    files = [path for path in newest.iterdir() if path.name != "manifest.json"]
    found = {path.name: path.read_bytes() for path in [*files, workdir / "metrics.jsonl"]}
    return {**found, "result.json": json.dumps(result).encode()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    torch.set_num_threads(1)
    leave()
    workdir = tmp_path_factory.mktemp("undisturbed")
    start(workdir, patient(2))
    return contents(workdir, 8)


@pytest.mark.parametrize("step", range(1, 9))
def test_a_kill_costs_no_patience(tmp_path: Path, undisturbed: dict[str, bytes], step: int) -> None:
    with pytest.raises(KilledError):
        start(tmp_path, patient(2), kill_at=(step - 1) * BATCH_SIZE)
    start(tmp_path, patient(2))
    assert contents(tmp_path, 8) == undisturbed


@pytest.mark.parametrize("place", [("step", 16), ("step", 24), ("scoring", 4), ("scoring", 6), ("scoring", 8)])
def test_a_stop_costs_no_patience(tmp_path: Path, undisturbed: dict[str, bytes], place: tuple[str, int]) -> None:
    assert start(tmp_path, patient(2), stop_at=place).reason == "stopped"
    assert start(tmp_path, patient(2)).reason == "patience"
    assert contents(tmp_path, 8) == undisturbed


def test_a_kill_between_the_evaluation_and_the_last_checkpoint(
    tmp_path: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Store.write

    def die(store: Store, step: int, *rest: Any, **more: Any) -> Path:
        if step == 8:
            raise KilledError
        return write(store, step, *rest, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "write", die)
        with pytest.raises(KilledError):
            start(tmp_path, patient(2))
    assert not (tmp_path / "result.json").exists()
    start(tmp_path, patient(2))
    assert contents(tmp_path, 8) == undisturbed


def test_a_run_that_has_ended_so_makes_no_further_step(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    start(tmp_path, patient(2))
    again = start(tmp_path, patient(2))
    assert (again.step, again.reason, again.examples_per_second) == (8, "patience", 0.0)
    assert contents(tmp_path, 8) == undisturbed


def test_more_patience_goes_on(tmp_path: Path) -> None:
    start(tmp_path, patient(2))
    assert start(tmp_path, patient(3)).step == 16


def test_patience_that_has_lost_evaluations_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path, patient(2), stop_at=("step", 24))
    metrics = tmp_path / "metrics.jsonl"
    whole = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(whole[0])
    start(tmp_path, patient(2))
    warned = [message for message in caplog.messages if message.startswith("metrics.jsonl has 1 of the ")]
    assert len(warned) == 1
    assert warned[0].endswith(
        "; the run goes on without the others, and evaluate.patience counts no evaluation among them"
    )


def on_two_workers(workdir: Path) -> list[Any]:
    first = start(workdir, patient(2), stop_at=("step", 20))
    second = start(workdir, patient(2))
    return [first.reason, second.reason, second.step]


@pytest.mark.process
def test_all_workers_end_together(
    tmp_path: Path, undisturbed: dict[str, bytes], run_workers: Callable[..., list[Any]]
) -> None:
    assert run_workers(on_two_workers, 2, tmp_path) == [["stopped", "patience", 8]] * 2
    assert contents(tmp_path, 8) == undisturbed


@pytest.mark.parametrize(
    ("scores", "retention", "count"),
    [
        ([], Retention(best="a"), 0),
        ([0.5], Retention(best="a"), 0),
        ([0.5, 0.5, 0.4], Retention(best="a"), 2),
        ([0.5, 0.4, 0.3], Retention(best="a", better="lower"), 0),
        ([0.5, 0.55, 0.59], Retention(best="a", min_improvement=0.1), 2),
        ([0.5, 0.55, 0.61], Retention(best="a", min_improvement=0.1), 0),
        ([0.5, 0.4, 0.45, 0.3], Retention(best="a", keep_best=2), 1),
        ([0.5, float("nan"), float("inf")], Retention(best="a"), 2),
    ],
)
def test_evaluations_without_improvement_are_counted(scores: list[float], retention: Retention, count: int) -> None:
    assert num_without_improvement(scores, retention) == count


def test_patience_alone_keeps_the_best_by_the_first_accuracy(mnist: Recipe) -> None:
    assert with_settings(mnist, ["evaluate.patience=3"]).checkpoints.retention.best == "validation/top1"
    of_five = with_settings(mnist, ["evaluate.patience=3", "evaluate.top=[5, 1]"])
    assert of_five.checkpoints.retention.best == "validation/top5"
    named = with_settings(of_five, ["checkpoints.retention.best=validation/top1"])
    assert named.checkpoints.retention.best == "validation/top1"
    with pytest.raises(ls.RecipeError, match="By this score no checkpoint can be kept"):
        with_settings(mnist, ["evaluate.patience=3", "evaluate.every=0"])


def test_the_end_of_the_run_comes_first(tmp_path: Path) -> None:
    assert start(tmp_path, patient(4, f"end.count={STEPS}")).reason == "end"
