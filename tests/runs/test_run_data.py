"""Runs of a recipe whose data changes between two starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_images import image_folder

import lockstep as ls
from lockstep.cli import train
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import to_toml
from lockstep.workers.rank import leave

pytestmark = pytest.mark.process


def small(photos: Path, steps: int = 2) -> Recipe:
    return replace(
        ls.recipes.find("mnist"),
        model=ls.models.LeNet(num_classes=3, channels=3),
        data=ls.recipes.ImageData(train=str(photos), image_size=28, preprocessing=ls.recipes.preprocessing.Lenet()),
        batch_size=4,
        num_towers=1,
        end=ls.Steps(steps),
    )


def history(workdir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "history.jsonl").read_text().splitlines()]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return image_folder(tmp_path / "photos")


def move_one(photos: Path) -> None:
    (photos / "red" / "0.jpg").rename(photos / "green" / "7.jpg")


def test_an_image_in_another_class_ends_a_resume_and_may_be_accepted(photos: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    ls.run(small(photos), workdir)
    ls.run(small(photos, 3), workdir)
    move_one(photos)
    with pytest.raises(ls.InputError) as caught:
        ls.run(small(photos, 4), workdir)
    assert caught.value.what == "The training data is not what it was when the run was saved."
    lines = str(caught.value.given).split("; ")
    assert [line.split(" was ")[0] for line in lines] == ["green", "red"]
    assert [line["event"] for line in history(workdir)] == ["start", "end", "resume", "end"]
    assert ls.run(small(photos, 4), workdir, accept_data_change=True).step == 4
    resumed = history(workdir)[-2]
    assert (resumed["event"], resumed["step"], resumed["data_changed"]) == ("resume", 3, lines)
    assert ls.run(small(photos, 5), workdir).step == 5, "what was accepted is the data of the run"
    assert "data_changed" not in history(workdir)[-2]


def test_data_may_be_moved_and_is_still_compared(photos: Path, tmp_path: Path) -> None:
    workdir, moved = tmp_path / "run", tmp_path / "elsewhere"
    ls.run(small(photos), workdir)
    photos.rename(moved)
    assert ls.run(small(moved, 3), workdir).step == 3
    assert f"data.train: saved '{photos}', given '{moved}'" in history(workdir)[-2]["changed"]
    other = image_folder(tmp_path / "other")
    move_one(other)
    with pytest.raises(ls.InputError, match="The training data is not what it was"):
        ls.run(small(other, 4), workdir)
    assert ls.run(small(moved, 4), workdir).step == 4


def test_a_fork_of_other_data_is_refused_too(photos: Path, tmp_path: Path) -> None:
    ls.run(small(photos), tmp_path / "run")
    move_one(photos)
    with pytest.raises(ls.InputError, match="The training data is not what it was"):
        ls.run(small(photos, 3), tmp_path / "fork", fork_from=str(tmp_path / "run"))
    forked = ls.run(small(photos, 3), tmp_path / "fork", fork_from=str(tmp_path / "run"), accept_data_change=True)
    assert forked.step == 3
    assert len(history(tmp_path / "fork")[0]["data_changed"]) == 2


def test_a_checkpoint_of_an_earlier_version_says_nothing_of_its_data(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = ls.data.Loader.state
    with monkeypatch.context() as patch:
        patch.setattr(
            ls.data.Loader, "state", lambda self: {name: it for name, it in state(self).items() if name != "data"}
        )
        ls.run(small(photos), tmp_path / "run")
    move_one(photos)
    assert ls.run(small(photos, 3), tmp_path / "run").step == 3


def test_a_run_of_two_stages_goes_on_with_its_data(photos: Path, tmp_path: Path) -> None:
    stages = tuple(ls.recipes.Stage(ls.Steps(2)) for _ in range(2))
    recipe = replace(small(photos), end=None, stages=stages)
    assert ls.run(recipe, tmp_path / "run").step == 4


def test_the_command_takes_the_flag(photos: Path, tmp_path: Path) -> None:
    file, workdir = tmp_path / "recipe.toml", tmp_path / "run"
    file.write_text(to_toml(small(photos)))
    argv = ["train", str(file), "--workdir", str(workdir), "--workers", "1", "--device", "cpu"]
    assert train.train_as_worker(argv) == 0
    leave()
    move_one(photos)
    with pytest.raises(ls.InputError, match="--accept-data-change"):
        train.train_as_worker([*argv, "--steps", "3"])
    leave()
    assert train.train_as_worker([*argv, "--steps", "3", "--accept-data-change"]) == 0
    leave()
    assert len(history(workdir)[-2]["data_changed"]) == 2
