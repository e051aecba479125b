"""Runs whose network, task, examples, optimizer and hooks are the user's own: from scripts and from recipes."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import own_parts
import pytest
import torch
from own_parts import SIZES, Furthest, Net, Pixels, Regression, losses, reader, score
from tiny_detector import tiny_recipe, write_coco
from tiny_images import image_folder
from torch import Tensor, nn

import lockstep as ls
from lockstep.cli.main import main
from lockstep.cli.train import train_as_worker
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import from_toml, to_toml
from lockstep.runs.trained import trained_model
from lockstep.runs.workdir import Workdir
from lockstep.workers.rank import leave

STEPS = 6
TOML = """
name = "mine"
batch_size = 8
num_towers = 2
frozen = ['^frozen\\.']
end = {kind = "steps", count = 6}
exchange = {kind = "all_reduce", exact = true}
watch = {metrics = "1 steps", summaries = "0", console = "0"}
evaluate = {every = "3 steps"}
device = "cpu"
[model]
kind = "python"
function = "my_parts:Net"
arguments = {width = 6}
[task]
function = "my_parts:Regression"
[data]
kind = "python"
function = "my_parts:reader"
arguments = {scale = 1.0}
[optimizer]
kind = "adamw"
lr = 0.01
[[hooks]]
function = "my_parts:hook"
arguments = {every = 2}
"""


def recipe(**more: Any) -> Recipe:
    given: dict[str, Any] = {
        "batch_size": 8,
        "num_towers": 2,
        "frozen": (r"^frozen\.",),
        "end": ls.Steps(STEPS),
        "exchange": ls.AllReduce(exact=True),
        "device": "cpu",
        "watch": ls.recipes.Monitoring(metrics=ls.Interval(1), summaries=ls.Interval(0), console=ls.Interval(0)),
        "evaluate": ls.recipes.Evaluate(ls.Interval(3)),
        "optimizer": ls.optim.AdamW(0.01),
        "task": Regression(),
    }
    own = given | more
    return Recipe.of(own.pop("model", Net), own.pop("reader", reader), own.pop("losses", None), **own)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a recipe beside the module that it names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    shutil.copy(own_parts.__file__, "my_parts.py")
    Path("mine.toml").write_text(TOML)
    return tmp_path


def learned(workdir: Path) -> dict[str, bytes]:
    newest = max((workdir / "checkpoints").iterdir())
    files = [path for path in newest.iterdir() if path.name != "manifest.json"]
    return {path.name: path.read_bytes() for path in [*files, workdir / "metrics.jsonl"]}


# Scripts --------------------------------------------------------------------------------------------------------------


def test_a_run_of_own_parts_has_all_that_one_of_shipped_parts_has(tmp_path: Path) -> None:
    best = ls.recipes.Checkpoints(ls.Interval(2), ls.recipes.Retention(best="validation/mae", better="lower"))
    own_parts.seen.clear()
    result = ls.run(recipe(checkpoints=best, average=ls.optim.MovingAverage(0.9)), tmp_path, hooks=[own_parts.hook])
    assert (result.step, result.reason, result.split) == (STEPS, "end", "test")
    assert result.evaluation is not None
    assert {*result.evaluation.scores} == {"mae", "furthest"}
    assert result.best is not None
    assert "validation/mae" in result.best.scores
    assert own_parts.seen == [*range(1, STEPS + 1)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum("validation" in str(line) for line in lines) == 2
    net = trained_model(str(tmp_path)).model
    assert isinstance(net, Net)
    assert torch.equal(net.frozen.weight, recipe().model.build(0).frozen.weight)


@pytest.mark.process
def test_workers_that_are_started_for_a_run_learn_what_one_in_this_process_learns(tmp_path: Path) -> None:
    here = ls.run(recipe(task=Regression), tmp_path / "here")
    there = ls.run(recipe(task=Regression), tmp_path / "there", workers=2)
    assert learned(tmp_path / "there") == learned(tmp_path / "here")
    assert there.facts == here.facts
    assert '"workers": 2' in (tmp_path / "there" / "history.jsonl").read_text()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"metrics": {"furthest": Furthest()}}, "get no metrics beside its recipe"),
        ({"loggers": [ls.loggers.Csv()]}, "get no loggers beside its recipe"),
        ({"hooks": [lambda report: None]}, "is not in a module"),
        ({"hooks": [partial(own_parts.hook, every=object())]}, r"hook\(...\) is an object, and not sent"),
        ({"task": Regression()}, r"Regression\(...\) is an object, and not sent"),
        ({"workers": 0}, "workers is out of range"),
    ],
)
def test_what_workers_cannot_import_is_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ls.InputError, match=said):
        ls.run(recipe(task=Regression), tmp_path / "run", **{"workers": 2, **given})
    assert not (tmp_path / "run").exists()


def test_the_weights_are_drawn_from_the_seed_and_no_stream_is_touched() -> None:
    before = torch.get_rng_state()
    first, same, other = (recipe().model.build(seed).last.weight for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_functions_are_a_task_as_an_object_is(tmp_path: Path) -> None:
    ls.run(recipe(), tmp_path / "object")
    leave()
    ls.run(recipe(task=None, losses=losses, score=score), tmp_path / "functions", metrics={"furthest": Furthest()})
    assert learned(tmp_path / "functions") == learned(tmp_path / "object")


@pytest.mark.parametrize("optimizer", [ls.optim.FromTorch(torch.optim.NAdam, lr=0.01), ls.optim.SGD(0.1)])
def test_parts_take_the_place_of_those_of_a_recipe(tmp_path: Path, optimizer: Any) -> None:
    shipped = replace(ls.recipes.find("mnist"), batch_size=8, end=ls.Steps(2), device="cpu")
    result = ls.run(
        shipped, tmp_path, model=partial(Net, width=3), losses=losses, score=score, reader=reader, optimizer=optimizer,
        metrics={"furthest": Furthest()},
    )  # fmt: skip
    assert result.evaluation is not None
    assert result.evaluation.num_examples == SIZES["test"]
    saved = (tmp_path / "recipe.toml").read_text()
    assert "width = 3" in saved
    assert 'losses = "own_parts:losses in ' in saved


@pytest.mark.process
def test_a_network_of_ones_own_is_a_classifier_of_lockstep(tmp_path: Path) -> None:
    given = replace(ls.recipes.find("mnist"), batch_size=4, end=ls.Steps(1), device="cpu")
    image_folder(tmp_path / "photos", 2, ("red", "green", "blue"))
    photos = ls.recipes.ImageData(
        f"{tmp_path}/photos", image_size=24, preprocessing=ls.recipes.preprocessing.Cifarnet()
    )
    result = ls.run(
        replace(given, model=ls.models.LeNet(3), data=replace(photos, image_size=28), num_towers=1),
        tmp_path / "run",
        model=Pixels,
    )
    assert result.step == 1
    assert "num_classes = 3" in (tmp_path / "run/recipe.toml").read_text()
    found = ls.predict(tmp_path / "run", tmp_path / "photos", top=1)
    assert (len(found), len(found.classes(0))) == (6, 1)


@dataclass
class Words:
    scale: float = 1.0

    def __call__(self, split: str) -> dict[str, Tensor] | None:
        return reader(split, self.scale)


def test_an_object_that_can_be_called_is_a_function(tmp_path: Path) -> None:
    ls.run(recipe(), tmp_path / "function")
    leave()
    ls.run(recipe(reader=Words()), tmp_path / "object")
    assert learned(tmp_path / "object") == learned(tmp_path / "function")


def test_a_task_that_is_said_twice_is_refused() -> None:
    function = ls.recipes.Function.of(losses)
    with pytest.raises(ls.InputError, match=r"leave task\.function out \(task\.function=none\)"):
        ls.recipes.PythonTask(function, losses=function)


def test_a_task_says_by_which_score_and_whether_by_its_lowest_a_checkpoint_is_the_best() -> None:
    retention = recipe(evaluate=ls.recipes.Evaluate(ls.Interval(3), patience=2)).checkpoints.retention
    assert (retention.best, retention.better) == ("validation/mae", "lower")


def test_a_run_by_other_code_is_told(tmp_path: Path) -> None:
    ls.run(recipe(), tmp_path)

    def wider(width: int = 6) -> nn.Module:
        return Net(width)

    with pytest.raises(ls.WorkdirError, match=r"function\.name: saved 'Net', given .*wider'; model\.function\.source"):
        ls.run(recipe(model=wider), tmp_path)
    assert ls.run(recipe(model=wider), tmp_path, accept_changes=True).step == STEPS


SPARSE: dict[str, Any] = {"model": partial(Net, sparse=True), "optimizer": ls.optim.SGD(0.1)}
odd_networks = pytest.mark.parametrize("parts", [{}, SPARSE], ids=["dense", "sparse"])


@odd_networks
def test_a_resumed_run_has_the_bytes_of_one_that_was_not(tmp_path: Path, parts: dict[str, Any]) -> None:
    ls.run(recipe(**parts), tmp_path / "whole")
    leave()
    ls.run(recipe(end=ls.Steps(2), **parts), tmp_path / "resumed")
    leave()
    ls.run(recipe(**parts), tmp_path / "resumed")
    assert learned(tmp_path / "resumed") == learned(tmp_path / "whole")


def on_workers(workdir: Path, parts: dict[str, Any]) -> None:
    ls.run(recipe(**parts), workdir)


@pytest.mark.process
@pytest.mark.parametrize("parts", [pytest.param({}, marks=pytest.mark.slow), SPARSE], ids=["dense", "sparse"])
def test_two_workers_have_the_bytes_of_one(
    tmp_path: Path, run_workers: Callable[..., list[Any]], parts: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    ls.run(recipe(**parts), tmp_path / "one")
    run_workers(on_workers, 2, tmp_path / "two", parts)
    assert learned(tmp_path / "two") == learned(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.process
def test_backup_workers_have_the_bytes_of_one(tmp_path: Path, run_workers: Callable[..., list[Any]]) -> None:
    torch.set_num_threads(1)
    ls.run(recipe(), tmp_path / "one")
    run_workers(on_workers, 3, tmp_path / "served", {"exchange": ls.Backups()})
    tensors = ("parameters.safetensors", "buffers.safetensors")
    assert [learned(tmp_path / "served")[name] for name in tensors] == [
        learned(tmp_path / "one")[name] for name in tensors
    ]


# What is refused, before anything is written --------------------------------------------------------------------------


@dataclass
class NoLosses:
    weight: float = 1.0


class NoWord(Regression):
    better = None


def mean_score(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"mae": score(model, batch)["mae"].mean()}


def unknown_field(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"mse": model(batch["word"]).mean()}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": lambda: 3}, "what .* returns is no torch.nn.Module|given: +.*int"),
        ({"model": Net()}, "A run makes its network itself"),
        ({"model": "own_parts:Net"}, "model is of the wrong type"),
        ({"reader": reader("train")}, "reader is of the wrong type(.|\\n)*a function of the split"),
        ({"model": partial(Net, depth=3)}, "takes other arguments: got an unexpected keyword argument 'depth'"),
        ({"task": NoLosses()}, "makes no task: it has no losses"),
        ({"task": Regression(), "losses": losses}, "A task has its losses and scores"),
        ({"task": None, "losses": unknown_field}, "word"),
        ({"task": None, "losses": losses, "score": mean_score}, "mae"),
        ({"task": None, "losses": 3}, "a function of the model and the batch"),
        ({"task": None}, "How many classes the network has is not said"),
        ({"task": None, "losses": lambda model: {}}, "losses of .* takes other arguments: too many positional"),
        ({"task": None, "losses": losses, "score": lambda batch: {}}, "score of .* takes other arguments"),
        ({"hooks": [3]}, "a function of the report of an attempt"),
        ({"hooks": [lambda report, every: None]}, "takes other arguments: missing a required argument: 'every'"),
        ({"reader": lambda split: None}, "gives no train examples"),
        ({"reader": ls.recipes.PythonData(ls.recipes.Function.of(reader), augment=ls.recipes.Function.of(lambda: 3))},
         "what .* returns is int\\n *expected: a list of augmentations"),
        ({"evaluate": ls.recipes.Evaluate(ls.Interval(3), patience=2), "task": None, "losses": losses, "score": score},
         "Early stopping has to know which checkpoint is the best"),
        ({"evaluate": ls.recipes.Evaluate(ls.Interval(3), patience=2), "task": NoWord()},
         "main_score='mae', better=None"),
        ({"checkpoints": ls.recipes.Checkpoints(retention=ls.recipes.Retention(best="validation/mae")), "task": None,
          "losses": losses}, "Nothing says which checkpoints are the best: this task has no score"),
        ({"checkpoints": ls.recipes.Checkpoints(retention=ls.recipes.Retention(best="validation/f1"))}, "f1"),
    ],
)  # fmt: skip
def test_wrong_parts_are_refused_and_nothing_is_written(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ls.LockstepError, match=said):
        ls.run(recipe(**wrong), tmp_path / "run")
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").glob("[!.]*"))


class Named(Pixels):
    def forward(self, images: Tensor) -> Any:
        return {"logits": super().forward(images)}


@pytest.mark.parametrize(
    ("model", "said"),
    [(partial(Pixels, 2), "A label is not the number of a class"), (Named, "A classifier returns something else")],
)
def test_a_network_that_is_no_classifier_is_refused_and_nothing_is_written(
    tmp_path: Path, model: Any, said: str
) -> None:
    photos = {"image": torch.zeros(3, 3, 28, 28, dtype=torch.uint8), "label": torch.arange(3)}
    data = ls.recipes.ImageData(image_size=28, preprocessing=ls.recipes.preprocessing.Cifarnet())
    given = replace(ls.recipes.find("mnist"), data=data, batch_size=3, num_towers=1, end=ls.Steps(1), device="cpu")
    with pytest.raises(ls.InputError, match=said):
        ls.run(given, tmp_path / "run", model=model, reader=lambda split: photos)
    assert not any((tmp_path / "run").glob("[!.]*"))


def test_a_recipe_takes_no_network_itself() -> None:
    with pytest.raises(ls.InputError, match="of a network of your own give the class"):
        replace(ls.recipes.find("mnist"), model=Net())  # type: ignore[arg-type]


# The command line -----------------------------------------------------------------------------------------------------


def test_a_recipe_that_names_own_parts_has_the_bytes_of_a_script(home: Path) -> None:
    assert train_as_worker(["train", "mine.toml"]) == 0
    leave()
    ls.run(recipe(model=partial(Net, width=6), reader=partial(reader, scale=1.0)), home / "script")
    assert learned(home / "runs/mine") == learned(home / "script")


@pytest.mark.slow
@pytest.mark.process
def test_a_recipe_of_own_parts_by_the_commands(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "mine.toml", "--dry-run"]) == 0
    assert not Path("runs").exists()
    assert main(["train", "mine.toml", "--workers", "2"]) == 0
    ls.run(recipe(model=partial(Net, width=6), reader=partial(reader, scale=1.0)), home / "script")
    leave()
    assert learned(home / "runs/mine") == learned(home / "script")
    assert main(["evaluate", "runs/mine", "--to", "scores.json"]) == 0
    assert json.loads(Path("scores.json").read_text())["split"] == "test"
    assert main(["export", "runs/mine", "--to", "net.safetensors"]) == 0
    capsys.readouterr()
    assert main(["export", "runs/mine", "--to", "net.pt2"]) == 2
    assert "Nothing says what of a batch the network is called with." in capsys.readouterr().err
    assert main(["train", "runs/mine", "--steps", "7"]) == 0
    assert main(["train", "mine.toml", "--rehearse"]) == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["mine"]


@pytest.mark.process
def test_code_that_has_changed_since_is_told(
    home: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "mine.toml", "--workers", "1"]) == 0
    module = Path("my_parts.py")
    module.write_text(module.read_text().replace(".tanh()", ".sigmoid()"))
    capsys.readouterr()
    for word in ("mine.toml", "runs/mine"):
        assert main(["train", word, "--steps", "9"]) == 2
        assert re.search(r"model\.function\.source: saved '\w{16}', given '\w{16}'", capsys.readouterr().err)
    trained_model("runs/mine")
    assert "my_parts:Net has changed since runs/mine began" in caplog.text


def test_code_of_a_run_that_others_may_write_is_not_called(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = from_toml(TOML, "mine.toml")
    Path("run").mkdir()
    ls.run(recipe(), "run")
    leave()
    text = to_toml(given)
    Workdir(Path("run")).write("recipe.toml", text)
    trained_model("run")
    Path("run").chmod(0o777)
    with pytest.raises(ls.InputError, match="others may have written the run that names it"):
        trained_model("run")
    assert main(["export", "run", "--to", "net.safetensors"]) == 2
    assert "--allow-code" in capsys.readouterr().err
    assert main(["export", "run", "--to", "net.safetensors", "--allow-code"]) == 0
    trained_model("run", allow_code=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_code_of_another_users_run_is_not_called(home: Path) -> None:
    ls.run(recipe(), "run")
    leave()
    os.chown("run/recipe.toml", 12345, -1)
    with pytest.raises(ls.InputError, match="others may have written the run that names it"):
        trained_model("run")


@pytest.mark.process
def test_a_task_of_ones_own_predicts(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image_folder(Path("photos"), 2, ("red", "green"))
    recipe = ls.recipes.find("mnist")
    photos = ls.recipes.ImageData("photos", image_size=28, preprocessing=ls.recipes.preprocessing.Cifarnet())
    task = ls.recipes.PythonTask(
        losses=ls.recipes.Function.of(own_parts.brightness_losses), predict=ls.recipes.Function.of(own_parts.brightness)
    )
    own = replace(recipe, data=photos, batch_size=2, num_towers=1, end=ls.Steps(1), device="cpu", task=task)
    assert ls.run(own, "run", model=Pixels).evaluation is None, "it has no score"
    leave()
    assert main(["predict", "run", "photos", "--to", "out"]) == 0
    found = json.loads(Path("out/predictions.json").read_text())["predictions"]
    assert [each["file"] for each in found] == ["green/0.jpg", "green/1.jpg", "red/0.jpg", "red/1.jpg"]
    assert found[0]["brightness"] == pytest.approx(ls.outputs("run", "photos").values["brightness"][0].item())
    with pytest.raises(ls.InputError, match=r"ls.outputs\(run, images\)"):
        ls.predict("run", "photos")
    capsys.readouterr()
    assert main(["evaluate", "run", "--data", "photos"]) == 2
    assert "This task has no score." in capsys.readouterr().err


@pytest.mark.process
def test_a_function_that_is_not_there_is_refused_before_workers_start(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.toml").write_text(TOML.replace("my_parts:Net", "my_parts:Nte"))
    assert main(["train", "mine.toml"]) == 2
    assert 'did you mean "Net"' in capsys.readouterr().err
    assert not Path("runs").exists()
    assert str(home) not in sys.path


def test_a_network_that_is_no_detector_is_told(tmp_path: Path) -> None:
    given = tiny_recipe(write_coco(tmp_path, 6))
    with pytest.raises(ls.InputError, match="This network of your own is no detector"):
        ls.run(given, tmp_path / "run", model=Pixels)
