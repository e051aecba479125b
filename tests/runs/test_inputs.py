"""What a run needs to begin: what is missing or wrong is told together, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_detector import tiny_recipe

import lockstep as ls
from lockstep.augmentations.turns import HorizontalFlip
from lockstep.errors import InputErrors
from lockstep.models import torchvision_models
from lockstep.recipes.code import Function
from lockstep.recipes.data import DetectionData
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import with_settings
from lockstep.runs.inputs import check_inputs, unused_classes
from lockstep.runs.workdir import Workdir


def photos(folder: Path, *classes: str) -> Path:
    for name in classes:
        (folder / name).mkdir(parents=True)
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Recipe]:
    """Make a recipe of photos, of two classes unless told otherwise, with settings."""
    folder = photos(tmp_path / "photos/train", "daisy", "rose")

    def make(*settings: str) -> Recipe:
        told = [f"data.train={folder}", "warm_start=none", "checkpoints.retention.best=none", "evaluate.top=[1]"]
        return with_settings(find("flowers"), [*told, "model.num_classes=2", *settings])

    return make


def refused(recipe: Recipe, path: Path | None = None, **options: object) -> str:
    with pytest.raises(ls.InputError) as caught:
        check_inputs(recipe, path, **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_classifier_does_not_learn_from_objects(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    of_objects = replace(recipe(), data=DetectionData(train=str(tmp_path)))
    assert "learns one class for each image" in refused(of_objects, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_wrong_is_told_together_and_nothing_is_written(
    recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchvision_models, "find_spec", lambda name: None)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/thesis.tex").touch()
    before = sorted(tmp_path.rglob("*"))
    wrong = recipe(
        f"data.train={tmp_path}/phtos", f"data.validation={tmp_path}/phtos", f"data.test={tmp_path}/nowhere",
        f"warm_start.path={tmp_path}/net.pt", "checkpoints.retention.best=validation/top5",
        "model.kind=torchvision", "model.name=resnet18", "model.num_classes=2",
    )  # fmt: skip
    with pytest.raises(InputErrors) as caught:
        check_inputs(wrong, tmp_path / "thesis", fork_from="nowhere@3")
    assert [error.what for error in caught.value.errors] == [
        "This model needs torchvision, which cannot be imported.",
        f"There is no data at {tmp_path}/phtos.",
        f"There is no data at {tmp_path}/nowhere.",
        "checkpoints.retention.best cannot be 'validation/top5'.",
        f"{tmp_path}/thesis holds something that is not a run.",
        f"There are no first weights at {tmp_path}/net.pt.",
        "There is no run nowhere@3 to fork from.",
    ]
    assert str(caught.value).startswith("7 things cannot be used as given.\n1. This model needs torchvision")
    assert "pip install 'lockstep-train[torchvision]'" in caught.value.errors[0].hint
    assert caught.value.errors[1].hint == f"did you mean {tmp_path}/photos?"
    assert sorted(tmp_path.rglob("*")) == before


def test_complete_inputs_pass_and_nothing_is_written(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    check_inputs(recipe(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Folders of images ----------------------------------------------------------------------------------------------------


def test_more_classes_than_the_model_has(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    many = photos(tmp_path / "many", "daisy", "rose", "tulip")
    assert refused(recipe(f"data.train={many}")) == (
        "The train examples have more classes than the model.\n"
        f"  given:    3 folders in {many}, and model.num_classes=2\n"
        "  expected: a model with 3 classes or more\n"
        "  hint:     --set model.num_classes=3"
    )
    assert "--set model.num_classes=3" in refused(recipe("data.labels_offset=-1"))
    check_inputs(recipe("data.labels_offset=-1", "model.num_classes=3"), None)


def test_classes_that_differ(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    other = photos(tmp_path / "photos/val", "daisy", "tulip")
    said = refused(recipe(f"data.validation={other}"))
    assert said.startswith("The classes of the validation examples have other labels than those to train on.\n")
    assert "label 1 is 'tulip'; label 1 is 'rose' to train on" in said


def test_images_without_folders_of_classes(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    for name in ("a.jpg", "b.JPG", "c.png"):
        (tmp_path / "flat" / name).touch()
    assert refused(recipe(f"data.train={tmp_path}/flat")) == (
        f"The images in {tmp_path}/flat are not in folders of their classes.\n"
        "  given:    3 images (a.jpg, b.JPG and 1 more) and no folders\n"
        "  expected: a folder of images for each class\n"
        f"  hint:     move the images of each class into a folder with its name, such as {tmp_path}/flat/CLASS/a.jpg"
        f"; or put one table beside them, {tmp_path}/flat/labels.csv, with the columns filename,label"
    )


def test_the_folder_above_those_of_the_sets(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    (tmp_path / "photos/val").mkdir()
    said = refused(recipe(f"data.train={tmp_path}/photos"))
    assert said.startswith(f"{tmp_path}/photos holds sets of images, each with folders of classes.\n")
    assert said.endswith(f"hint:     name one of them: {tmp_path}/photos/train or {tmp_path}/photos/val")


@pytest.mark.parametrize(
    ("num_classes", "offset", "said"),
    [
        (10, 0, "the model has 10 classes, the data 5 (model.num_classes=5; 6 with data.labels_offset=-1 keeps class 0 "
                "for a background)"),
        (5, 0, ""),
        (6, -1, ""),
    ],
)  # fmt: skip
def test_classes_without_examples_are_told(num_classes: int, offset: int, said: str) -> None:
    given = with_settings(find("flowers"), [f"model.num_classes={num_classes}", f"data.labels_offset={offset}"])
    assert unused_classes(given, [*"abcde"]) == said
    assert unused_classes(given, ()) == "", "records do not name their classes"


# The workdir, and what a run begins with ------------------------------------------------------------------------------


def test_a_run_with_a_checkpoint_needs_nothing_to_begin_with(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    given, path = recipe(f"warm_start.path={tmp_path}/gone.pt"), tmp_path / "run"
    path.mkdir()
    Workdir(path).write_recipe(given)
    assert "no first weights" in refused(given, path)
    (path / "checkpoints/step-00000002").mkdir(parents=True)
    check_inputs(given, path, fork_from="gone")


@pytest.mark.parametrize("name", ["net.pt", "model.ckpt-7", "old.ckpt-?????-of-00001", "run", "run@7"])
def test_weights_may_be_named_in_any_way(recipe: Callable[..., Recipe], tmp_path: Path, name: str) -> None:
    for file in ("net.pt", "model.ckpt-7.index", "old.ckpt-00000-of-00001"):
        (tmp_path / file).touch()
    (tmp_path / "run").mkdir()
    check_inputs(recipe(f"warm_start.path={tmp_path}/{name}"), None)


@pytest.mark.parametrize("long", ["x" * 256, "x/" * 2048 + "x"])
def test_names_that_no_system_takes(recipe: Callable[..., Recipe], long: str) -> None:
    wrong = recipe(f"data.train={long}", f"data.validation={long}/val")
    assert "cannot be the path of a file" in refused(wrong)
    assert "cannot be the path of a file" in refused(recipe(f"warm_start.path={long}"))
    assert "cannot be the path of a file" in refused(recipe(), fork_from=long)


def test_a_function_gives_the_examples(recipe: Callable[..., Recipe]) -> None:
    given = recipe()
    without = replace(given, data=replace(given.data, train=None))
    assert "has not been told where its train images are" in refused(without)
    check_inputs(replace(without, data=replace(without.data, function=Function.of(lambda split: None))), None)
    named = replace(without, data=replace(without.data, function=Function.parse("reader")))
    assert "reader is a part of the script of this run, which alone can call it." in refused(named)


def test_a_classifier_takes_no_part_of_a_detectors_weights(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    (tmp_path / "net.pt").touch()
    given = recipe(f"warm_start.path={tmp_path}/net.pt", "warm_start.takes=features")
    assert "Only a detector takes a part of the weights." in refused(given)
    check_inputs(recipe(f"warm_start.path={tmp_path}/net.pt"), None)


@pytest.mark.parametrize("given", [(), (1, 0), (0, 0, 1)])
def test_a_wrong_order_of_mirrored_keypoints_is_told_before_anything_is_read(tmp_path: Path, given: Any) -> None:
    recipe = tiny_recipe(tmp_path)
    flip = HorizontalFlip(keypoint_flip_permutation=given)
    keypoints = replace(recipe, data=replace(recipe.data, num_keypoints=3, augment=(flip,)))  # type: ignore[type-var]
    said = refused(keypoints, tmp_path / "run")
    assert f"keypoint_flip_permutation={given}, for 3 keypoints" in said
    right = HorizontalFlip(keypoint_flip_permutation=(1, 0, 2))
    check_inputs(replace(keypoints, data=replace(keypoints.data, augment=(right,))), tmp_path / "run")  # type: ignore[type-var]
