"""Paths that lead nowhere, through all commands that start no workers: exit code 2, one message, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.recipes.shipped import find
from lockstep.runs.workdir import Workdir


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: with a run without checkpoints, an empty folder, a file, and a folder of photos in sets."""
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/mnist/checkpoints/step-00000005", "empty", "photos/train/roses"):
        Path(folder).mkdir(parents=True)
    Path("text.txt").write_text("some text")
    Workdir(Path("runs/mnist")).write_recipe(find("mnist"))
    return tmp_path


@pytest.mark.parametrize(
    ("command", "what", "hint"),
    [
        ("inspect runs/mnits", "There are no weights called runs/mnits.", "did you mean runs/mnist?"),
        ("inspect mnist", "There are no weights called mnist.", "did you mean runs/mnist?"),
        ("inspect runs/mnist@7", "has no checkpoint of step 7.", "name one of these"),
        ("inspect shards/train-*", "No file is named like shards/train-*", "check the pattern"),
        ("inspect text.txt", "text.txt holds no weights that are known.", "check the path"),
        ("convert images nothere --to out", "There is no folder nothere.", "it is read from {}"),
        ("convert images text.txt --to out", "There is no folder text.txt.", ""),
        ("convert images phtos --to out --validation-share 0.1", "There is no folder phtos.", "did you mean photos?"),
        ("convert imagenet nothere --to out --labels a --metadata b", "There is no folder nothere.", "check the path"),
        ("convert imagenet-validation nothere --to out --labels a", "There is no folder nothere.", "check the path"),
        ("convert boxes nothere --to out.csv", "There is no folder nothere.", "check the path"),
        ("convert voc --data-dir nothere --to out", "nothere", ""),
        ("convert coco --annotations no.json --images nothere --to out", "no.json cannot be read.", "check the path"),
        ("convert prepare nothere-* --to out", "No file is named like nothere-*", "check the pattern"),
        ("show phtos --to page.html", "There is neither a recipe nor data called phtos.", ""),
        ("show photos --to page.html", "photos holds sets of images", "name one of them: photos/train"),
        ("show empty --to page.html", "empty is no data that is known.", "lockstep convert"),
        ("benchmark input nothere", "There is neither a recipe nor data called nothere.", "check the path"),
        ("import checkpoint nothere --to net.safetensors", "There are no weights called nothere.", "check the path"),
        ("export nothere --to model.pt2", "There is no run in nothere.", "check the path, or train first"),
        ("export runs/mnist@7 --to model.pt2", "There is no such checkpoint in runs/mnist", "name one of these"),
        ("predict mnist photo.jpg --to out", "There is no run in mnist.", "did you mean runs/mnist?"),
        ("predict nothere photo.jpg --to out", "There is no run in nothere.", "lockstep train mnist --workdir nothere"),
        ("train nothere.toml --print-recipe", "nothere.toml: the recipe cannot be read.", "check the path"),
        ("train nowhere/run --print-recipe", "nowhere/run is neither data, nor a recipe", ""),
        ("train empty --print-recipe", "empty is neither data, nor a recipe", "put a folder of images"),
    ],
)  # fmt: skip
def test_a_wrong_path_is_one_error_and_nothing_is_written(
    here: Path, capsys: pytest.CaptureFixture[str], command: str, what: str, hint: str
) -> None:
    before = sorted(here.rglob("*"))
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 1
    first, *others = said[said.index("error: ") :].splitlines()
    assert what in first
    assert [line.split(":")[0] for line in others] == ["  given", "  expected", "  hint"]
    assert hint.format(here) in others[-1]
    assert sorted(here.rglob("*")) == before
