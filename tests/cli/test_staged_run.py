"""A run of two stages on the command line: it trains, and its checkpoints of any stage are scored and exported."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

import lockstep as ls
from lockstep.cli import evaluate, train
from lockstep.cli.main import main
from lockstep.recipes.parts import Checkpoints, Evaluate, Monitoring, Stage
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import to_toml


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of the last layer, then two of all."""
    folder = tmp_path_factory.mktemp("staged")
    given = replace(
        find("mnist"),
        name="staged",
        optimizer=ls.optim.SGD(0.01, momentum=0.9),
        average=ls.optim.MovingAverage(0.9),
        batch_size=4,
        num_towers=1,
        end=None,
        stages=(Stage(ls.Steps(2), train_only=("^softmax_linear",)), Stage(ls.Steps(2))),
        checkpoints=Checkpoints(ls.Interval(1)),
        watch=Monitoring(summaries=ls.Interval(0)),
        evaluate=Evaluate(ls.Interval(0), weights="average", examples=20, top=(1, 5)),
        device="cpu",
    )
    (folder / "staged.toml").write_text(to_toml(given))
    return folder


@pytest.fixture
def trained(run: Path) -> Path:
    workdir = run / "run"
    if not workdir.exists():
        assert train.train_as_worker(["train", str(run / "staged.toml"), "--workdir", str(workdir)]) == 0
    return workdir


def test_its_last_lines_say_how_good_it_is(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    workdir = run / "said"
    assert train.plan_train(["train", str(run / "staged.toml"), "--workdir", str(workdir)])["workers"] == 1
    assert train.train_as_worker(["train", str(run / "staged.toml"), "--workdir", str(workdir)]) == 0
    scores = json.loads((workdir / "result.json").read_text())["evaluations"]["test"]["scores"]
    said = [line for line in caplog.messages if "accuracy" in line or "precision" in line]
    assert said == [
        f"test accuracy {100 * scores['top1']:.2f} % ({20 * scores['top1']:.0f} of 20)",
        f"precision @ 1 = {scores['top1']:.4f} recall @ 5 = {scores['top5']:.4f} [20 examples]",
    ]


@pytest.mark.parametrize(
    ("step", "weights"),
    [(0, "--average"), (1, "--raw"), (2, "--average"), (3, "--raw"), (4, "--average"), (4, "--raw")],
)
def test_a_checkpoint_of_any_stage_is_scored(trained: Path, tmp_path: Path, step: int, weights: str) -> None:
    file = tmp_path / "scores.json"
    argv = ["evaluate", str(trained), "--step", str(step), weights, "--to", str(file), "--device", "cpu"]
    assert evaluate.evaluate_as_worker(argv) == 0
    found = json.loads(file.read_text())
    assert (found["step"], found["num_examples"]) == (step, 20)
    if (step, weights) == (4, "--average"):
        result = json.loads((trained / "result.json").read_text())
        assert found["scores"] == result["evaluations"]["test"]["scores"]


@pytest.mark.parametrize("step", [2, 3])
def test_a_checkpoint_of_any_stage_is_exported(trained: Path, tmp_path: Path, step: int) -> None:
    file = tmp_path / "model.safetensors"
    assert main(["export", f"{trained}@{step}", "--to", str(file), "--average"]) == 0
    assert file.stat().st_size > 1 << 20


def test_what_no_stage_takes_over_of_the_run_is_not_built(tmp_path: Path) -> None:
    """The patterns of the run fit nothing, and each stage has its own."""
    shorten = replace(
        find("mnist"),
        frozen=("^no such layer",),
        batch_size=4,
        end=None,
        stages=(Stage(ls.Steps(1), frozen=("^conv",)), Stage(ls.Steps(1), frozen=())),
        evaluate=Evaluate(ls.Interval(0), examples=4),
    )
    (tmp_path / "few.toml").write_text(to_toml(shorten))
    run = str(tmp_path / "run")
    assert train.train_as_worker(["train", str(tmp_path / "few.toml"), "--workdir", run, "--device", "cpu"]) == 0
    for step in ("1", "2"):
        assert evaluate.evaluate_as_worker(["evaluate", run, "--step", step, "--device", "cpu"]) == 0


def test_rehearse_runs_a_staged_recipe_for_two_steps(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    logged = ["--set", f'loggers=[{{kind = "csv", path = "{tmp_path}/metrics.csv"}}]']
    assert train.train_as_worker(["train", str(run / "staged.toml"), "--rehearse", *logged]) == 0
    assert not (tmp_path / "metrics.csv").exists()
    assert caplog.messages[-1].startswith("rehearsed: two steps, saved, resumed, step 3, evaluated")
    assert sum(line.startswith("test accuracy") for line in caplog.messages) == 1
