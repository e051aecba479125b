"""`lockstep export` as a user runs it, in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.checkpoints.store import Store
from lockstep.cli.main import main
from lockstep.recipes.settings import with_settings
from lockstep.recipes.shipped import find
from lockstep.runs.workdir import Workdir


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints; its weights are as many ones as the steps, its averages zeros."""
    given = with_settings(find("mnist"), ["average.decay=0.9"])
    (tmp_path / "run").mkdir()
    Workdir(tmp_path / "run").write_recipe(given)
    names = {name: torch.zeros_like(tensor) for name, tensor in given.model.build(0).state_dict().items()}
    for step in (1, 2):
        sections = {"parameters": {name: tensor + step for name, tensor in names.items()}, "average": names}
        Store(tmp_path / "run" / "checkpoints").write(step, sections, {})
    return tmp_path / "run"


def test_the_newest_or_an_earlier_step_raw_or_averaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.parent / "model.safetensors"
    assert main(["export", str(run), "--to", str(path)]) == 0
    assert load_file(path)["conv1.bias"].unique().tolist() == [2]
    assert capsys.readouterr().out == f"{path}: raw weights of step 2 of mnist, 13.1 MB\n"
    assert main(["export", f"{run}@1", "--to", str(path), "--force"]) == 0
    assert load_file(path)["conv1.bias"].unique().tolist() == [1]
    assert main(["export", str(run), "--average", "--to", str(path), "--force"]) == 0
    assert load_file(path)["conv1.bias"].unique().tolist() == [0]
    assert "averaged weights of step 2" in capsys.readouterr().out


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
        (["run@3", "--to", "model.pt2"], "has no checkpoint of step 3."),
        (["there.npz", "--to", "model.pt2"], "there.npz"),
        (["s3://bucket/run", "--to", "model.pt2"], "s3://bucket/run"),
    ],
    ids=["ending", "folder", "overwriting", "step", "no run", "not local"],
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
