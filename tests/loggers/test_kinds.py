"""The loggers of recipes; those of services with the service's own library, where it is installed."""

from __future__ import annotations

import importlib.util
import math
import sqlite3
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import lockstep as ls
from lockstep.loggers.logger import LoggedRun, Logger


def begun(value: Any, workdir: Path, step: int = 0, run_id: str = "0123456789abcdef") -> Logger:
    logger: Logger = value.open()
    config = {"name": "mine", "optimizer": {"kind": "sgd", "lr": 0.1}, "frozen": []}
    logger.begin(LoggedRun("mine", run_id, workdir, step, config, {"torch": "2.11"}))
    return logger


def table(workdir: Path) -> list[str]:
    return (workdir / "metrics.csv").read_text().splitlines()


def test_a_table_has_a_row_for_each_step(tmp_path: Path) -> None:
    logger = begun(ls.loggers.Csv(), tmp_path)
    logger.log({"loss": 0.5, "rate": 1e-3}, 10)
    logger.log({"loss": math.nan, "rate": 1e-3}, 20)
    logger.end("end")
    assert table(tmp_path) == ["step,loss,rate", "10,0.5,0.001", "20,nan,0.001"]


def test_more_numbers_of_a_step_are_in_its_row(tmp_path: Path) -> None:
    logger = begun(ls.loggers.Csv(), tmp_path)
    logger.log({"loss": 0.5}, 10)
    logger.log({"validation/top1": 0.75}, 10)
    logger.log({"loss": 0.25}, 20)
    logger.log({"loss": 0.125}, 30)
    logger.log({"validation/top1": 0.875}, 30)
    logger.log({'a "name", with a comma': 1.0}, 30)
    assert table(tmp_path) == [
        'step,loss,validation/top1,"a ""name"", with a comma"', "10,0.5,0.75,", "20,0.25,,", "30,0.125,0.875,1.0",
    ]  # fmt: skip


def test_a_table_is_cut_where_the_run_goes_on(tmp_path: Path) -> None:
    logger = begun(ls.loggers.Csv(), tmp_path)
    for step in (10, 20, 30):
        logger.log({"loss": step / 10}, step)
    again = begun(ls.loggers.Csv(), tmp_path, step=20)
    assert table(tmp_path) == ["step,loss", "10,1.0", "20,2.0"]
    again.log({"score": 0.5}, 20)
    again.log({"loss": 9.0}, 30)
    assert table(tmp_path) == ["step,loss,score", "10,1.0,", "20,2.0,0.5", "30,9.0,"]
    again.begin(LoggedRun("mine", "", tmp_path, 10, {}, {}))  # rolled back
    assert table(tmp_path) == ["step,loss,score", "10,1.0,"]


def test_a_table_goes_where_it_is_told(tmp_path: Path) -> None:
    logger = begun(ls.loggers.Csv(path="tables/mine.csv"), tmp_path)
    logger.log({"loss": 0.5}, 1)
    assert (tmp_path / "tables/mine.csv").read_text() == "step,loss\n1,0.5\n"


def test_a_file_that_is_no_table_of_a_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("name,age\nAda,36\n")
    with pytest.raises(ls.WorkdirError, match="is no table of a run"):
        begun(ls.loggers.Csv(), tmp_path)
    assert table(tmp_path) == ["name,age", "Ada,36"]


def test_wandb_is_not_asked_for_a_key_at_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    settings = SimpleNamespace(mode="online")
    vars(wandb).update(setup=lambda: SimpleNamespace(settings=settings), login=lambda prompt: prompt)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(ls.InputError, match="wandb knows no key of an account"):
        begun(ls.loggers.Wandb(), tmp_path)


def needs(library: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"{library} is not installed")


def logged_in_two_starts(value: Any, workdir: Path) -> None:
    """Begin, log and end; and once more, as a resumed run does."""
    file = workdir / "recipe.toml"
    file.write_text('name = "mine"')
    first = begun(value, workdir)
    first.log({"loss": 0.5, "learning_rate/^conv1": 0.1}, 10)
    first.log({"validation/top1": 0.75}, 10)
    first.log_artifact(file)
    first.end("stopped")
    second = begun(value, workdir, step=10)
    second.log({"loss": math.nan}, 20)
    second.log_artifact(workdir)
    second.end("end")


@needs("wandb")
@pytest.mark.process
@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "run").mkdir()
    logged_in_two_starts(ls.loggers.Wandb(mode="offline", tags=("a",)), tmp_path / "run")
    folders = sorted((tmp_path / "run/wandb").glob("offline-run-*"))
    assert {folder.name.rpartition("-")[2] for folder in folders} == {"0123456789abcdef"}
    content = b"".join(path.read_bytes() for folder in folders for path in folder.glob("*.wandb"))
    assert all(text in content for text in (b"learning_rate/^conv1", b"validation/top1", b"recipe.toml", b"NaN"))


@needs("mlflow")
@pytest.mark.process
@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    (tmp_path / "run").mkdir()
    logged_in_two_starts(ls.loggers.Mlflow(experiment="mine", tracking_uri=uri), tmp_path / "run")
    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params["optimizer.lr"] == "0.1"
    assert run.data.params["environment.torch"] == "2.11"
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")] == [10, 20]
    assert run.data.metrics["learning_rate/_conv1"] == 0.1
    assert sorted(file.path for file in client.list_artifacts(run.info.run_id)) == ["recipe.toml", "run"]


@needs("trackio")
@pytest.mark.process
@pytest.mark.filterwarnings("ignore")
def test_trackio_keeps_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    (tmp_path / "run").mkdir()
    logged_in_two_starts(ls.loggers.Trackio(project="mine"), tmp_path / "run")
    with sqlite3.connect(tmp_path / "trackio/mine.db") as database:
        rows = database.execute("select run_name, step from metrics order by id").fetchall()
    assert rows == [("mine-0123456789abcdef", step) for step in (10, 10, 20)]
