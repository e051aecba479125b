"""`lockstep export` as a user runs it, in this process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from saved_runs import saved
from tiny_detector import tiny_recipe, write_coco

from lockstep.checkpoints.store import Store
from lockstep.cli.main import main
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import with_settings
from lockstep.runs.workdir import Workdir

BEST = "validation/top1"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints; its weights are as many ones as the steps, its averages zeros."""
    return made(tmp_path / "run", "raw")


def made(folder: Path, scored: str) -> Path:
    settings = ["average.decay=0.9", f"evaluate.weights={scored}", "checkpoints.retention.best=validation/top1"]
    given = with_settings(find("mnist"), settings)
    folder.mkdir()
    Workdir(folder).write_recipe(given)
    names = {name: torch.zeros_like(tensor) for name, tensor in given.model.build(0).state_dict().items()}
    for step in (1, 2):
        sections = {"parameters": {name: tensor + step for name, tensor in names.items()}, "average": names}
        Store(folder / "checkpoints", given.checkpoints.retention).write(step, sections, {}, scores={BEST: 1 / step})
    return folder


def test_the_newest_or_an_earlier_step_raw_or_averaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.parent / "model.safetensors"
    assert main(["export", str(run), "--to", str(path)]) == 0
    assert load_file(path)["conv1.bias"].unique().tolist() == [2]
    assert capsys.readouterr().out == f"{path}: raw weights of step 2 of mnist, 13.1 MB\n"
    assert main(["export", f"{run}@1", "--to", str(path), "--force"]) == 0
    assert load_file(path)["conv1.bias"].unique().tolist() == [1]
    assert main(["export", str(run), "--average", "--to", str(path), "--force"]) == 0
    assert load_file(path)["conv1.bias"].unique().tolist() == [0]
    assert "average weights of step 2" in capsys.readouterr().out


def test_the_weights_are_those_that_the_recipe_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, path = made(tmp_path / "run", "average"), tmp_path / "model.safetensors"
    words = ([], ["--raw"], ["--raw", "--step", "1"], ["--raw", "--best"], ["--best"])
    for flags, value in zip(words, (0, 2, 1, 1, 0), strict=True):
        assert main(["export", str(run), *flags, "--to", str(path), "--force"]) == 0
        assert load_file(path)["conv1.bias"].unique().tolist() == [value], flags
    said = [line.removeprefix(f"{path}: ").partition(" of mnist")[0] for line in capsys.readouterr().out.splitlines()]
    steps = ["average weights of step 2", "raw weights of step 2", "raw weights of step 1", "raw weights of step 1"]
    assert said == [*steps, "average weights of step 1"]


@pytest.mark.parametrize(
    "flags", [[], *(pytest.param([flag], marks=pytest.mark.slow) for flag in ("--raw", "--average"))], ids=" ".join
)
def test_a_detector_is_the_one_that_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    given = tiny_recipe(write_coco(tmp_path, 3, (32, 48)))
    saved(tmp_path / "run", replace(given, evaluate=replace(given.evaluate, weights="average")))
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "1.png"), "--to", str(tmp_path / "out"), *flags]) == 0
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "model.pt2"), *flags]) == 0
    pixels = torch.from_numpy(np.array(Image.open(tmp_path / "1.png"))).permute(2, 0, 1)
    program = torch.export.load(tmp_path / "model.pt2").module()
    boxes, scores, _, number = (each.numpy() for each in program(pixels))
    (image,) = json.loads((tmp_path / "out/predictions.json").read_text())["predictions"]
    assert len(image["objects"]) == number > 0
    for each, (top, left, bottom, right), score in zip(image["objects"], boxes, scores, strict=False):
        np.testing.assert_allclose(each["bbox"], [left, top, right - left, bottom - top], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(each["score"], score, rtol=1e-4)


def test_a_program(run: Path) -> None:
    path = run.parent / "model.pt2"
    assert main(["export", str(run), "--to", str(path)]) == 0
    assert torch.export.load(path).module()(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["run", "--to", "model.pth"], "A model is exported as .safetensors"),
        (["run", "--to", "gone/model.pt2"], "There is no folder gone to write to."),
        (["run", "--to", "there.pt2"], "There is a file there.pt2 already."),
        (["run@3", "--to", "model.pt2"], "There is no such checkpoint"),
        (["there.npz", "--to", "model.pt2"], "There is no run in there.npz"),
        (["ftp://host/run", "--to", "model.pt2"], "ftp://host/run"),
        (["run", "--to", "model.pt2", "--batch"], "Only of the graph of a detector it is said what images it takes."),
        (["run", "--to", "model.pt2", "--raw-images", "480"], "hint:     --raw-images 480x640"),
    ],
    ids=["ending", "folder", "overwriting", "step", "no run", "not local", "no detector", "no size"],
)
def test_what_cannot_be_exported(
    run: Path,
    words: list[str],
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(run.parent)
    for name in ("there.pt2", "there.npz"):
        Path(name).write_text("mine")
    assert main(["export", *words]) == 2
    assert what in capsys.readouterr().err
    assert {path.name: path.read_text() for path in run.parent.glob("*.*")} == {
        "there.pt2": "mine",
        "there.npz": "mine",
    }
