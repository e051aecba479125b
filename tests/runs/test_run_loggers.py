"""The loggers of a run by a recipe: what they get, over resumes, kills and rollbacks."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from own_script import stripes
from parts_by_hand import parts_by_hand
from torch import Tensor, nn

import lockstep as ls
from lockstep.cli import train
from lockstep.loggers import logger as logger_module
from lockstep.loggers import loggers as loggers_module
from lockstep.metrics.metric import NO_METRICS, Metric
from lockstep.recipes.recipe import Recipe, is_harmless, recipe_changes
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import from_toml, to_toml, with_settings
from lockstep.runs import stages
from lockstep.runs.build import Parts
from lockstep.runs.run import Run
from lockstep.runs.workdir import Result
from lockstep.workers.rank import Worker


class KilledError(Exception):
    """The end of a start that was killed."""


class Kept:
    """A logger of a user's own."""

    def __init__(self) -> None:
        self.begun: list[ls.loggers.LoggedRun] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.artifacts: list[str] = []
        self.reasons: list[str] = []

    def begin(self, run: ls.loggers.LoggedRun) -> None:
        self.begun.append(run)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self.logged.append((step, dict(scalars)))

    def log_artifact(self, path: Path) -> None:
        self.artifacts.append(path.name)

    def end(self, reason: str) -> None:
        self.reasons.append(reason)

    @property
    def steps(self) -> list[int]:
        """Steps with losses."""
        return [step for step, scalars in self.logged if "losses/total" in scalars]


def make_build(bad: Sequence[int] = (), skipped: Sequence[int] = (), attempted: Any = None) -> Any:
    """A `build` of a tiny run; `attempted(position)` is called in each attempt."""

    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        if attempted:
            attempted(batch.position)
        return {"square": model(batch["x"]).square().mean() * (math.nan if batch.position in bad else 1.0)}

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"size": model(batch["x"]).flatten()}

    def build(
        recipe: Recipe, worker: Worker, reader: object = None, metrics: Mapping[str, Metric] = NO_METRICS, **_: object
    ) -> Parts:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        state = ls.TrainState(model, ls.optim.SGD(0.1), nonfinite=recipe.nonfinite)
        reader = ls.data.Arrays({"x": torch.randn(30, 2)})
        loader = ls.data.Loader(reader, batch_size=recipe.batch_size, order="sequential")
        for position in skipped:
            loader.skip(position)
        held_out = ls.data.Loader(reader, batch_size=8, order="sequential")
        return parts_by_hand(state, loader, recipe.towers_for(worker.num_workers), losses, score, held_out)

    return build


def make_recipe(*more: str) -> Recipe:
    return with_settings(
        find("mnist"),
        [
            "nonfinite=rollback", "batch_size=4", "num_towers=1", "evaluate.every=4 steps", "watch.metrics=1 steps",
            "watch.summaries=0", "checkpoints.every=3 steps", "exchange.exact=true", "end.kind=steps", "end.count=9",
            'loggers=[{kind = "csv"}]', *more,
        ],
    )  # fmt: skip


Start = Callable[..., Result]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """One start of a run on this worker."""
    torch.set_num_threads(1)

    def started(workdir: Path, build: Any, loggers: Sequence[Any] = (), recipe: Recipe | None = None) -> Result:
        monkeypatch.setattr(stages, "build", build)
        return Run(recipe or make_recipe(), workdir, ls.join("cpu"), loggers=loggers).run()

    return started


def table(workdir: Path) -> list[dict[str, str]]:
    """The rows of the table, without what depends on the clock."""
    with (workdir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(row.pop("examples_per_second") is not None for row in rows)
    return rows


def die_at(position: int) -> Callable[[int], None]:
    def die(now: int) -> None:
        if now == position:
            raise KilledError

    return die


def test_a_run_logs_its_steps_scores_and_files(tmp_path: Path, start: Start) -> None:
    logger = Kept()
    result = start(tmp_path, make_build(), [logger])
    assert logger.steps == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    scores = [(step, scalars) for step, scalars in logger.logged if "losses/total" not in scalars]
    assert [(step, list(scalars)) for step, scalars in scores] == [
        (4, ["evaluation/validation/size"]), (8, ["evaluation/validation/size"]), (9, ["evaluation/test/size"]),
    ]  # fmt: skip
    assert result.evaluation is not None
    assert scores[-1][1]["evaluation/test/size"] == result.evaluation["size"]
    assert logger.artifacts == ["recipe.toml", "result.json"]
    assert logger.reasons == ["end"]
    (run,) = logger.begun
    assert (run.name, run.workdir, run.step) == ("mnist", tmp_path, 0)
    assert run.config["optimizer"] == {"kind": "sgd", **run.config["optimizer"]}
    assert run.environment["device"] == "cpu"


def test_a_table_by_the_recipe_has_what_the_metrics_have(tmp_path: Path, start: Start) -> None:
    start(tmp_path, make_build())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    totals = [(line["step"], line["total"]) for line in lines if "total" in line]
    assert [(int(row["step"]), float(row["losses/total"])) for row in table(tmp_path)] == totals


@pytest.mark.parametrize("kill_at", [0, 16, 28])
def test_a_run_that_was_killed_goes_on_in_its_table(tmp_path: Path, start: Start, kill_at: int) -> None:
    start(tmp_path / "whole", make_build())
    first, second = Kept(), Kept()
    with pytest.raises(KilledError):
        start(tmp_path / "killed", make_build(attempted=die_at(kill_at)), [first])
    start(tmp_path / "killed", make_build(), [second])
    assert table(tmp_path / "killed") == table(tmp_path / "whole")
    assert first.steps + second.steps == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert first.reasons == ["failed"]
    assert {run.id for run in [*first.begun, *second.begun]} == {first.begun[0].id}


def test_what_was_still_in_the_queue_of_a_killed_start_is_logged_by_the_next(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path / "whole", make_build())
    monkeypatch.setattr(loggers_module, "MOST_QUEUED", 0)  # no number ever gets to a logger
    with pytest.raises(KilledError):
        start(tmp_path / "killed", make_build(attempted=die_at(28)), [Kept()])
    monkeypatch.setattr(loggers_module, "MOST_QUEUED", 1000)
    logger = Kept()
    start(tmp_path / "killed", make_build(), [logger])
    assert table(tmp_path / "killed") == table(tmp_path / "whole")
    assert logger.steps == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_rollback_is_in_the_table_as_if_it_had_not_been(tmp_path: Path, start: Start) -> None:
    bad = [16, 28]
    start(tmp_path / "told", make_build(skipped=bad))
    logger = Kept()
    start(tmp_path / "bad", make_build(bad), [logger])
    assert table(tmp_path / "bad") == table(tmp_path / "told")
    assert logger.steps == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert len(logger.begun) == 1


def test_a_script_logs_by_a_logger_of_its_own(tmp_path: Path) -> None:
    logger = Kept()
    recipe = replace(
        find("mnist"),
        model=ls.models.LeNet(num_classes=2),
        data=ls.recipes.ImageData(image_size=28, preprocessing=ls.recipes.preprocessing.Lenet()),
        optimizer=ls.optim.SGD(0.01),
        batch_size=8,
        num_towers=1,
        end=ls.Steps(2),
        device="cpu",
        watch=replace(find("mnist").watch, metrics=ls.Interval(1)),
    )
    ls.run(recipe, tmp_path, reader=stripes, loggers=[logger])
    assert logger.steps == [1, 2]
    with pytest.raises(ls.WorkdirError, match="Without a workdir a run cannot be logged"):
        ls.run(recipe, None, reader=stripes, loggers=[logger])
    with pytest.raises(ls.InputError, match=r"loggers\[0\] is of the wrong type"):
        ls.run(recipe, tmp_path / "other", reader=stripes, loggers=["wandb"])  # type: ignore[list-item]
    assert not (tmp_path / "other").exists()


def test_a_recipe_names_loggers_of_its_kinds_alone() -> None:
    recipe = make_recipe('loggers=[{kind = "wandb", project = "mine", tags = ["a"]}, {kind = "mlflow"}]')
    assert recipe.loggers == (ls.loggers.Wandb(project="mine", tags=("a",)), ls.loggers.Mlflow())
    assert from_toml(to_toml(recipe), "it").loggers == recipe.loggers
    assert all(map(is_harmless, recipe_changes(make_recipe(), recipe)))
    with pytest.raises(ls.RecipeError, match="there is no such kind here"):
        make_recipe('loggers=[{kind = "comet"}]')


def test_a_recipe_with_a_logger_whose_library_is_missing_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger_module, "find_spec", lambda library: None)
    arguments = ["train", "mnist", "--set", 'loggers=[{kind = "wandb"}]', "--workdir", str(tmp_path / "run")]
    with pytest.raises(ls.InputError, match="This logger needs wandb, which is not installed") as caught:
        train.train_as_worker(arguments)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()
