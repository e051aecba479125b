"""What a run knows of its data: where it was read, so that it is found from another folder, and its classes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from saved_runs import recipe_of_photos
from tiny_images import image_folder, image_shards

import lockstep as ls
from lockstep.errors import WorkdirError
from lockstep.recipes.data import MnistData
from lockstep.recipes.parts import Evaluate
from lockstep.recipes.recipe import Recipe
from lockstep.run_files import DATA, RECIPE
from lockstep.runs.workdir import KnownData, Workdir, class_names, located
from lockstep.types import Interval


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with photos."""
    (tmp_path / "home").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    image_folder(Path("photos"))
    return tmp_path / "home"


def recipe(steps: int, **data: Any) -> Recipe:
    end, never = ls.Steps(steps), Evaluate(every=Interval(0, "steps"))
    return replace(recipe_of_photos(**data), end=end, num_towers=1, evaluate=never, device="cpu")


def test_a_run_goes_on_from_another_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lockstep")
    ls.run(recipe(1, train="photos"), "run")
    known = KnownData.of(Workdir(home / "run"))
    assert known == KnownData(home, {0: "blue", 1: "green", 2: "red"})
    monkeypatch.chdir(home.parent / "elsewhere")
    assert ls.run(recipe(2, train="photos"), home / "run").step == 2
    assert f"the data is not in {home.parent}/elsewhere: it is read where the run has read it before" in caplog.messages
    assert 'train = "photos"' in (home / "run" / RECIPE).read_text(), "it may still be moved with its folder"
    assert KnownData.of(Workdir(home / "run")) == known
    monkeypatch.chdir(home)
    (home / "photos").rename(home / "gone")
    with pytest.raises(ls.DataError, match=f"(?s)There is no data at photos.*it is read from {home}"):
        ls.run(recipe(3, train="photos"), "run")


def test_each_path_is_looked_for_by_itself(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = image_shards(Path("shards"), "train", [0, 1])
    KnownData(home, {}).write(Workdir(home))
    given = recipe(1, train=shards, validation="photos", test=str(home / "photos"))
    assert located(given, home) is given
    monkeypatch.chdir(home.parent / "elsewhere")
    image_folder(Path("photos"))
    data: Any = located(given, home).data
    assert (data.train, data.validation, data.test) == (f"{home}/{shards}", "photos", f"{home}/photos")
    assert located(given, None) is given


def test_annotations_are_found_with_their_images(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "boxes.json").touch()
    KnownData(home, {}).write(Workdir(home))
    monkeypatch.chdir(home.parent)
    data: Any = located(recipe(1, train="boxes.json:photos"), home).data
    assert data.train == f"{home}/boxes.json:{home}/photos"


def test_the_files_of_mnist_are_found(home: Path, mnist: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    KnownData(home, {}).write(Workdir(home))
    monkeypatch.chdir(home.parent)
    assert located(mnist, home) is mnist, "there are none: they are those of the cache"
    (home / "data/mnist").mkdir(parents=True)
    assert located(mnist, home).data == MnistData(folder=f"{home}/data/mnist")
    (home / "digits").mkdir()
    assert located(replace(mnist, data=MnistData("digits")), home).data == MnistData(f"{home}/digits")


@pytest.mark.parametrize(
    ("classes", "offset", "expected"),
    [
        (("blue", "red"), 0, {0: "blue", 1: "red"}),
        (("blue", "red"), -1, {1: "blue", 2: "red"}),
        (("background", "blue"), 1, {0: "blue"}),
        ({3: "blue", 1: "red"}, 1, {2: "blue", 0: "red"}),
        ((), 0, {}),
    ],
)
def test_classes_are_numbered_as_the_model_numbers_them(classes: Any, offset: int, expected: dict[int, str]) -> None:
    reader: Any = SimpleNamespace(classes=classes, offset=offset)
    assert class_names(reader) == expected


def test_names_are_kept_that_later_data_does_not_have(home: Path) -> None:
    shards = image_shards(Path("shards"), "train", [0, 1, 2, 0, 1, 2])
    ls.run(recipe(1, train="photos"), "run")
    ls.run(recipe(2, train=shards), "run", accept_changes=True, accept_data_change=True)
    assert KnownData.of(Workdir(Path("run"))).class_names == {0: "blue", 1: "green", 2: "red"}


def test_where_crops_are_resized_belongs_to_the_recipe(home: Path) -> None:
    assert ls.run(recipe(1, train="photos", preprocess_on="device"), "run").step == 1
    with pytest.raises(WorkdirError, match=r"data\.preprocess_on: saved 'device', given 'host'"):
        ls.run(recipe(2, train="photos"), "run")


def test_odd_names_come_back(tmp_path: Path) -> None:
    names = {0: "\udcff\n\x1b[2J", 7: "ü"}
    KnownData(tmp_path, names).write(Workdir(tmp_path))
    assert KnownData.of(Workdir(tmp_path)) == KnownData(tmp_path, names)


@pytest.mark.parametrize("text", ["", "[]", '{"folder": 1, "classes": {}}', '{"folder": "a", "classes": {"x": "y"}}'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / DATA).write_text(text)
    with pytest.raises(WorkdirError, match=r"data\.json cannot be read"):
        KnownData.of(Workdir(tmp_path))


def test_an_earlier_run_has_no_such_file(tmp_path: Path) -> None:
    assert KnownData.of(Workdir(tmp_path)) == KnownData()
