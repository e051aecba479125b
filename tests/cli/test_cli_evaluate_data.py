"""`lockstep evaluate` on other data, on data that has moved, from another folder, and with the names of classes."""

from __future__ import annotations

import csv
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from saved_runs import recipe_of_photos, saved
from tiny_images import image_folder, image_shards

import lockstep as ls
from lockstep.cli import evaluate as cli_evaluate
from lockstep.recipes.code import Function
from lockstep.runs.workdir import KnownData, Workdir
from lockstep.workers.rank import leave


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a run of photos was started in, and the current one: its data is named by relative paths."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    image_folder(Path("photos"))
    recipe = recipe_of_photos(train="photos", validation="photos")
    saved(Path("run"), replace(recipe, average=ls.optim.MovingAverage(0.5)))
    KnownData(Path.cwd(), {0: "blue", 1: "green", 2: "red"}).write(Workdir(Path("run")))
    return Path.cwd()


@pytest.fixture
def evaluate(home: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run the command; returns what it has written."""

    def run(*words: str) -> dict[str, Any]:
        leave()
        file = tmp_path / "result.json"
        assert (
            cli_evaluate.evaluate_as_worker(["evaluate", str(home / "run"), "--to", str(file), "--force", *words]) == 0
        )
        result: dict[str, Any] = json.loads(file.read_text())
        return result

    return run


def refused(*words: str) -> str:
    with pytest.raises(ls.InputError) as caught:
        cli_evaluate.plan_evaluate(["evaluate", "run", *words])
    return str(caught.value)


def test_other_data_is_scored_and_named(
    home: Path, evaluate: Callable[..., dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lockstep")
    own = evaluate()
    assert "data" not in own
    image_folder(Path("others"), 3)
    other = evaluate("--data", "others")
    assert (other["data"], other["split"], other["num_examples"]) == ("others", "validation", 9)
    assert evaluate("--set", "data.validation=others") == other
    assert caplog.messages[-2].endswith("step-00000007, on others")
    assert len(list((home / "run/summaries-evaluation").rglob("events*"))) == 1, "TensorBoard shows one kind of data"
    assert evaluate("--data", image_shards(Path("shards"), "v", [0, 1, 2, 0]), "--split", "test")["num_examples"] == 4


def test_settings_say_how_it_is_scored(
    evaluate: Callable[..., dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lockstep")
    settings = ["evaluate.examples=4", "evaluate.top=[1, 2]", "evaluate.weights=average", "evaluate.precision=bf16"]
    found = evaluate(*(word for setting in settings for word in ("--set", setting)))
    assert (found["num_examples"], [*found["scores"]]) == (4, ["top1", "top2"])
    assert (found["weights"], found["precision"]) == ("average", "bf16")
    assert caplog.messages[0].startswith("average weights of step 7 in bf16, from ")
    assert evaluate("--set", "evaluate.weights=average", "--raw")["weights"] == "raw"


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("model.num_classes=4", "model.num_classes: saved 3, given 4"),
        ("batch_size=4", "batch_size: saved 2, given 4"),
        ("seed=4", "seed: saved 0, given 4"),
        ("data.kind=mnist_data", "data"),
        ("evaluate.tpo=[1]", "tpo"),
        ("evaluate.examples=few", "evaluate.examples"),
    ],
)
def test_settings_that_change_what_was_trained_are_refused(home: Path, setting: str, what: str) -> None:
    assert what in refused("--set", setting)


def test_data_that_is_not_there_is_wrong_input_before_a_worker_starts(home: Path) -> None:
    said = refused("--data", "phtos")
    assert "There is no data at phtos." in said
    assert "did you mean photos?" in said
    shutil.rmtree("photos")
    assert "There is no data at photos." in refused()
    assert f"it is read from {home}" in refused()


def test_a_run_of_a_script_is_scored_on_files(home: Path, evaluate: Callable[..., dict[str, Any]]) -> None:
    recipe = recipe_of_photos()
    data = replace(recipe.data, function=Function("", "mine"))
    Workdir(Path("run")).write_recipe(replace(recipe, data=data, average=ls.optim.MovingAverage(0.5)))
    assert "lockstep evaluate RUN --data PATH" in refused()
    assert evaluate("--data", "photos")["num_examples"] == 6


def test_data_is_found_from_another_folder(
    home: Path, tmp_path: Path, evaluate: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = evaluate()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert evaluate() == here
    image_folder(Path("photos"), 1)
    assert evaluate()["num_examples"] == 3, "the current folder comes first"


def test_folders_with_other_classes_are_told(home: Path, evaluate: Callable[..., dict[str, Any]]) -> None:
    image_folder(Path("others"), 1, ("blue", "red"))
    with pytest.raises(ls.DataError, match=r"have other labels(.*\n)*.*label 1 is 'red'; label 1 is 'green'"):
        evaluate("--data", "others")
    leave()
    image_folder(Path("more"), 1, ("blue", "green", "red", "white"))
    with pytest.raises(ls.DataError, match=r"white/0\.jpg is none of the model's classes"):
        evaluate("--data", "more")


def test_a_class_of_another_number_is_refused(home: Path, evaluate: Callable[..., dict[str, Any]]) -> None:
    """The names stand in the same order, but class 0 is the background for the one, and "blue" for the other."""
    with pytest.raises(ls.DataError, match=r"have other labels(.*\n)*.*label 1 is 'blue'; label 1 is 'green'"):
        evaluate("--set", "data.labels_offset=-1")
    leave()
    KnownData(Path.cwd(), {1: "red", 2: "red", 3: "blue"}).write(Workdir(Path("run")))
    with pytest.raises(ls.DataError, match=r"label 0 is 'blue'; 'blue' has label 3 to train on"):
        evaluate()
    leave()
    KnownData(Path.cwd(), {0: "blue", 1: "green", 2: "red", 4: "red"}).write(Workdir(Path("run")))
    assert evaluate()["num_examples"] == 6, "two classes may share a name"


def test_classes_are_called_by_their_names_where_the_data_has_none(
    home: Path, evaluate: Callable[..., dict[str, Any]]
) -> None:
    shards = image_shards(Path("shards"), "v", [0, 1, 2])
    evaluate("--data", shards, "--confusion", "table.csv", "--mistakes", "worst.png")
    header, *rows = csv.reader(Path("table.csv").read_text().splitlines())
    assert header[1:] == [row[0] for row in rows] == ["blue", "green", "red"]
