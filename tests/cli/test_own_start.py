"""`lockstep train photos/`: one command on data of one's own."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.cli.main import main
from lockstep.cli.own_data import names_data, own_run, remark_on_name
from lockstep.optim import AdamW, ByName
from lockstep.recipes.data import ImageData
from lockstep.recipes.parts import DataLoading
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import load
from lockstep.runs import chosen_recipe
from lockstep.runs.build import Examples
from lockstep.runs.chosen_recipe import find_weights
from lockstep.runs.data_sets import DataSets, find_data_sets
from lockstep.runs.inputs import check_inputs
from lockstep.types import Epochs

SHARED = Path(__file__).parents[3] / "shared" / "data" / "flowers5"


def images_of(folder: Path, count: int, colour: int, side: int = 64) -> None:
    """Write images of one colour and noise: a class that is easily told."""
    folder.mkdir(parents=True)
    draws = np.random.default_rng(colour)
    for number in range(count):
        pixels = draws.integers(0, 60, (side + number, side, 3), dtype=np.uint8)
        pixels[..., colour] += 180
        Image.fromarray(pixels).save(folder / f"{number}.jpg")


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for colour, name in enumerate(("red", "green")):
        images_of(tmp_path / "my photos" / name, 12, colour)
    return tmp_path / "my photos"


def test_a_dry_run_says_what_it_found_and_prints_the_recipe(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "red" / "0.jpg").write_bytes((photos / "red" / "0.jpg").read_bytes()[:400])
    assert main(["train", "my photos", "--dry-run", "--set", "seed=7"]) == 0
    out, said = capsys.readouterr()
    assert not Path("runs").exists()
    for expected in ("green 12, red 12", "1: red/0.jpg", "classifier", "held out"):
        assert expected in said, said
    Path("mine.toml").write_text(out)
    recipe = load(Path("mine.toml"))
    assert (recipe.model.num_classes, recipe.seed, recipe.feed.bad_examples) == (2, 7, "skip")
    assert isinstance(recipe.data, ImageData)
    assert recipe.data.validation == "20 %"
    assert recipe.data.image_size == 64
    assert "# held out of " in out
    assert recipe.name == "my_photos"


def test_a_line_break_in_the_name_of_a_class_writes_no_line_of_the_recipe(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = photos / "red\nseed = 99\n# \u2028and"
    (photos / "red").rename(named)
    assert main(["train", "my photos", "--dry-run"]) == 0
    out, said = capsys.readouterr()
    Path("mine.toml").write_text(out)
    assert load(Path("mine.toml")).seed == 0
    assert "red\\nseed = 99\\n# \\u2028and 12" in said
    assert "\nseed = 99" not in out + said


def test_without_weights_it_says_where_they_belong_and_trains_for_longer(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dry_run() -> tuple[Recipe, str]:
        assert main(["train", "my photos", "--dry-run"]) == 0
        out, said = capsys.readouterr()
        Path("mine.toml").write_text(out)
        return load(Path("mine.toml")), said

    given = find_weights()
    assert given
    with_them, _ = dry_run()
    monkeypatch.setenv("XDG_CACHE_HOME", str(photos.parent / "cache"))
    monkeypatch.setattr(chosen_recipe, "__file__", str(photos.parent / "elsewhere" / "runs" / "chosen_recipe.py"))
    without, said = dry_run()
    assert (without.warm_start, without.frozen) == (None, ())
    assert isinstance(without.end, Epochs)
    assert isinstance(with_them.end, Epochs)
    assert without.end.count > 3 * with_them.end.count
    assert isinstance(with_them.optimizer, ByName)
    assert isinstance(without.optimizer, AdamW)
    assert first_loss(without) < 2
    assert "learn from your images alone" in said
    assert f"looked for: {', '.join(map(str, chosen_recipe.places_of_weights()))}" in said

    told = Path(said.partition("copy the file to ")[2].partition("\n")[0])
    told.parent.mkdir(parents=True)
    shutil.copy(given, told)
    found, said = dry_run()
    assert found.warm_start
    assert (found.warm_start.path, found.end) == (str(told), with_them.end)
    assert f"{told} (SqueezeNet 1.1 trained on ImageNet, MIT licence)" in said


def first_loss(recipe: Recipe) -> float:
    """The loss of drawn weights: about ln(classes), unless values grow from layer to layer."""
    torch.manual_seed(0)
    model, task = recipe.model.build(recipe.seed).train(), recipe.chosen_task
    recipe = replace(recipe, feed=DataLoading(num_processes=0))
    with closing(Examples(recipe).training().batches(range(1), 1, torch.device("cpu"))) as batches:
        assert task.losses
        found: Any = task.losses(model, next(batches))
    losses = found[0] if isinstance(found, tuple) else found
    return sum(loss.item() for loss in losses.values())


def test_classes_are_named_where_the_folders_of_the_sets_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for colour, name in enumerate(("blue", "green", "red")):
        images_of(Path("data/train", name), 5, colour)
    images_of(Path("data/val/red"), 2, 2)
    Path("data/train/none").mkdir()
    assert main(["train", "data", "--dry-run", "--steps", "30"]) == 0
    out, said = capsys.readouterr()
    assert "none: without an image" in said
    assert "30 steps; the rate falls to 0 as a cosine\n" in said
    Path("mine.toml").write_text(out)
    recipe = load(Path("mine.toml"))
    assert isinstance(recipe.data, ImageData)
    assert recipe.data.labels == ("blue", "green", "red")
    check_inputs(recipe, None)
    scored = recipe.data.reader("validation", 3)
    assert scored.read_batch(np.arange(2))["label"].tolist() == [2, 2]
    assert isinstance(recipe.optimizer, ByName)
    assert {each.lr(30) for each in recipe.optimizer.optimizers.values()} == {0.0}


@pytest.mark.parametrize(
    ("layout", "hint"),
    [
        ({"a.jpg": 1}, "labels.csv"),
        ({"train/a.jpg": 1, "test/b.jpg": 1}, "data/train/labels.csv"),
        ({"one/a.jpg": 1}, "other"),
        ({"all/red/a.jpg": 1, "all/green/b.jpg": 1}, "lockstep train data/all"),
        ({"red/a.heic": 0, "green/b.heic": 0}, "mogrify -format jpg"),
        ({"red/a.jpg": 1, "green/b.jpg": 1}, "add images"),
        ({"red/a.txt": 0}, "name the folder"),
    ],
)
def test_what_cannot_be_learned_from_is_answered_before_anything_is_written(
    layout: dict[str, int],
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for name, is_image in layout.items():
        (path := Path("data", name)).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path) if is_image else path.touch()
    assert main(["train", "data"]) == 2
    assert hint in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_an_archive_and_an_unquoted_name_are_answered_with_the_command_that_was_meant(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.make_archive("photos", "zip", photos)
    assert main(["train", "photos.zip"]) == 2
    assert "unzip photos.zip -d photos; then lockstep train photos" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "my", "photos"])
    assert "lockstep train 'my photos'" in capsys.readouterr().err


def test_sets_are_told_from_classes_of_their_names(tmp_path: Path) -> None:
    for name in ("bus", "train", "sets/train/a", "sets/train/b", "sets/test"):
        images_of(tmp_path / name, 6, 0, 8)
    coco = tmp_path / "coco"
    for name in ("train", "valid"):
        images_of(coco / name, 1, 0, 8)
        (coco / name / "_annotations.coco.json").write_text("{}")
    sets = tmp_path / "sets"
    assert find_data_sets(str(sets)) == DataSets(str(sets / "train"))
    files = [str(coco / name / "_annotations.coco.json") for name in ("train", "valid")]
    assert find_data_sets(str(coco)) == DataSets(*files)
    shutil.rmtree(sets), shutil.rmtree(coco)
    assert find_data_sets(str(tmp_path)) == DataSets(str(tmp_path))


def test_a_run_on_data_is_known_from_another_folder_and_beside_a_recipe(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "my photos", "--print-recipe"]) == 0
    run = photos.parent / "runs" / "my_photos"
    run.mkdir(parents=True)
    for folder in (run, photos.parent):
        (folder / "recipe.toml").write_text(capsys.readouterr().out or (run / "recipe.toml").read_text())
    assert names_data("my photos")
    (run / "data.json").write_text(json.dumps({"folder": str(photos.parent), "classes": {}}))
    monkeypatch.chdir(run)
    begun = own_run(argparse.Namespace(recipe=str(photos), workdir=str(run)))
    assert begun is not None
    assert begun.recipe == str(run)
    monkeypatch.chdir(photos.parent)
    photos.rename("flowers")
    remark_on_name("flowers")
    assert "lockstep train ./flowers" in capsys.readouterr().err


def lockstep(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lockstep", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.process
@pytest.mark.slow
def test_the_command_trains_goes_on_and_keeps_an_edited_recipe(photos: Path) -> None:
    first = lockstep("train", "my photos", "--set", "end.count=2", "--set", "num_threads=1")
    assert first.returncode == 0, first.stderr
    for expected in ("  time ", "validation accuracy", "mistakes.png", "lockstep predict runs/my_photos IMAGES"):
        assert expected in first.stderr
    recipe, mistakes = Path("runs/my_photos/recipe.toml"), Path("runs/my_photos/mistakes.png")
    assert mistakes.is_file()
    assert "# Made by `lockstep train 'my photos'`" in recipe.read_text()
    recipe.write_text(recipe.read_text().replace("count = 2\n", "count = 3\n"))
    again = lockstep("train", "my photos")
    assert again.returncode == 0
    assert "resumed at step" in again.stderr
    assert "what is trained" not in again.stderr
    images_of(Path("others/red"), 6, 0), images_of(Path("others/blue"), 6, 2)
    other = lockstep("train", "others", "--workdir", "runs/my_photos")
    assert other.returncode == 2
    assert "has other data" in other.stderr


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the photographs of flowers beside the checkout")
def test_three_classes_of_thirty_photographs_are_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("daisy", "dandelion", "roses"):
        for split, folder, count in (("train", "photos", 30), ("val", "others", 20)):
            Path(folder, name).mkdir(parents=True)
            for path in sorted((SHARED / split / name).iterdir())[:count]:
                shutil.copy(path, Path(folder, name))
    trained = lockstep("train", "photos")
    assert trained.returncode == 0, trained.stderr
    scored = lockstep("evaluate", "runs/photos", "--data", "others", "--to", "score.json")
    assert scored.returncode == 0, scored.stderr
    accuracy = float(scored.stderr.split("validation accuracy ")[1].split()[0])
    assert accuracy >= 88
