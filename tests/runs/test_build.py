"""The loaders of a recipe: of what it trains on, of what is scored, and of a function of one's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_images import image_folder, image_shards
from torch import nn

import lockstep as ls
from lockstep.errors import DataError, InputError
from lockstep.models import Timm
from lockstep.readers.open import open_source
from lockstep.readers.reader import Arrays, Reader
from lockstep.recipes.code import Function
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import with_settings
from lockstep.runs.build import Examples, build, build_state


def make_recipe(*settings: str) -> Recipe:
    usual = ["warm_start=none", "feed.num_processes=0", "batch_size=4", "data.image_size=75"]
    return with_settings(find("flowers"), [*usual, "model.depth_multiplier=0.05", *settings])


@pytest.fixture
def photos(tmp_path: Path) -> Callable[..., Recipe]:
    """A recipe of six photos to train on, twelve to validate and nine to test, in records and folders."""
    train = image_shards(tmp_path / "shards", "train", [1, 2, 3, 1, 2, 3])
    validation = image_folder(tmp_path / "validation", count=4)
    test = image_folder(tmp_path / "test", count=3)
    paths = [f"data.train={train}", f"data.validation={validation}", f"data.test={test}"]
    return lambda *settings: make_recipe(*paths, *settings)


def test_examples_to_train_on_are_shuffled_and_augmented(photos: Callable[..., Recipe]) -> None:
    loader = Examples(photos()).training()
    assert (len(loader.reader), loader.batch_size) == (6, 4)
    assert [type(each).__name__ for each in loader.augment] == ["DistortedCrop", "HorizontalFlip", "ColourDraws"]


@pytest.mark.parametrize(("split", "count"), [("validation", 12), ("test", 9)])
def test_examples_that_are_scored_come_as_they_lie_there(photos: Callable[..., Recipe], split: str, count: int) -> None:
    loader = Examples(photos()).held_out(split)
    assert len(loader.reader) == count
    assert [type(each).__name__ for each in loader.augment] == ["CentralCrop"]
    assert loader.reader.read_batch(np.arange(count))["label"].tolist() == sorted([0, 1, 2] * (count // 3))


def test_the_first_so_many_are_scored(photos: Callable[..., Recipe]) -> None:
    examples = Examples(photos("evaluate.examples=5"))
    reader = examples.held_out("validation").reader
    assert len(reader) == 5
    assert reader.read_batch(np.arange(5))["label"].tolist() == [0, 0, 0, 0, 1]
    assert reader.example_id(4) == examples.reader("validation").example_id(4)
    assert len(examples.training().reader) == 6


def test_where_there_are_fewer_than_are_to_be_scored_all_are(
    photos: Callable[..., Recipe], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    examples = build(photos("evaluate.examples=10", "num_towers=1"), ls.join("cpu")).examples
    assert [len(examples.held_out(split).reader) for split in ("validation", "test", "test")] == [10, 9, 9]
    assert len(examples.held_out("test", most=5).reader) == 5
    said = "all 9 test examples are scored: there are fewer than evaluate.examples=10"
    assert [line for line in caplog.messages if "evaluate.examples" in line] == [said]


def test_a_net_that_takes_other_images_is_refused_when_it_is_built(
    photos: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As timm's transformers, whose size is known by the net alone."""
    net = nn.Linear(1, 1)
    vars(net)["patch_embed"] = SimpleNamespace(img_size=(224, 224), strict_img_size=True)
    monkeypatch.setattr(Timm, "build", lambda self, seed: net)
    given = replace(photos("num_towers=1"), model=Timm("vit_tiny_patch16_224", num_classes=5))
    with pytest.raises(InputError, match=r"takes images of one size.*\n.*image_size=75\n.*224 pixels"):
        build_state(given, ls.join("cpu"))
    build_state(with_settings(given, ["data.image_size=224"]), ls.join("cpu"))


def test_what_is_to_be_scored_and_cannot_be_read_is_refused_at_the_start(
    photos: Callable[..., Recipe], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    given = photos(f"data.test={tmp_path}/empty")
    with pytest.raises(DataError, match="empty is no data that is known"):
        build(given, ls.join("cpu"))


def test_a_run_may_train_on_few_and_score_many(photos: Callable[..., Recipe]) -> None:
    Examples(photos("evaluate.examples=9")).check_held_out()
    swapped = photos("data.split=validation", "evaluate.examples=9")
    Examples(swapped).check_held_out()
    assert len(Examples(swapped).training().reader) == 12


def test_a_folder_without_one_of_the_classes_is_refused(tmp_path: Path) -> None:
    """The others would have the numbers of their neighbours."""
    train = image_folder(tmp_path / "train", classes=("blue", "green", "red"))
    fewer = image_folder(tmp_path / "fewer", classes=("blue", "red"))
    given = [f"data.train={train}", f"data.validation={fewer}"]
    with pytest.raises(DataError) as caught:
        Examples(make_recipe(*given)).check_held_out()
    assert str(caught.value) == (
        "The classes of the validation examples have other labels than those to train on.\n"
        "  given:    label 1 is 'red'; label 1 is 'green' to train on\n"
        "  expected: the same label for each class in both: blue, green, red\n"
        "  hint:     have a folder with at least one image for each class in both; of objects, set data.label_map to "
        "a label map with all classes, or repair the ids of the categories; of folders, and of tables whose labels "
        "are text, set data.labels to the names of all classes, or to a file with one a line"
    )
    first = image_folder(tmp_path / "first", classes=("blue", "green"))
    examples = Examples(make_recipe(given[0], f"data.test={first}"))
    examples.check_held_out()
    assert examples.trained_classes == ("blue", "green", "red")
    shards = image_shards(tmp_path / "shards", "train", [1, 2])
    Examples(make_recipe(given[0], f"data.test={shards}")).check_held_out()


def test_a_path_is_opened_once(photos: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def spy(path: str, **more: Any) -> Reader:
        opened.append(Path(path).name)
        return open_source(path, **more)

    monkeypatch.setattr("lockstep.readers.open.open_source", spy)
    examples = Examples(photos())
    examples.check_held_out()
    for _ in range(2):
        examples.held_out("validation")
        examples.held_out("test")
        examples.training()
    assert sorted(opened) == ["test", "train-*", "validation"]


# A function of one's own ----------------------------------------------------------------------------------------------


def arrays(count: int, largest: int = 5) -> Arrays:
    labels = torch.arange(count) % (largest + 1)
    return Arrays({"image": torch.zeros(count, 3, 8, 8, dtype=torch.uint8), "label": labels})


def test_a_function_gives_the_examples_in_place_of_paths() -> None:
    given: dict[str, Reader | None] = {"train": arrays(7), "validation": arrays(3), "test": None}
    recipe = make_recipe()
    examples = Examples(replace(recipe, data=replace(recipe.data, function=Function.of(given.get))))
    assert [examples.has(split) for split in given] == [True, True, False]
    assert len(examples.training().reader) == 7
    assert len(examples.held_out("validation").reader) == 3
    with pytest.raises(DataError, match="The function of this run gives no test examples"):
        examples.held_out("test")


def test_the_labels_of_a_function_are_checked_and_moved() -> None:
    reader = Examples(make_recipe("data.labels_offset=-1"), lambda split: arrays(6)).reader("train")
    with pytest.raises(DataError, match="The label of 5 is none of the model's classes"):
        reader.read_batch(np.arange(6))
    assert reader.read_batch(np.arange(5))["label"].tolist() == [1, 2, 3, 4, 5]


def test_boxes_of_a_function_may_be_a_tensor() -> None:
    both = Arrays({"image": torch.zeros(2, 1), "label": torch.zeros(2).long(), "boxes": torch.rand(2, 1, 4)})
    by_boxes = make_recipe("data.preprocessing.crop_by_boxes=true")
    reader = Examples(by_boxes, lambda split: both).reader("train", to_train=True)
    assert reader.read_batch(np.arange(2))["boxes"].shape == (2, 1, 4)


def test_without_function_or_path_there_is_nothing() -> None:
    examples = Examples(make_recipe())
    assert not examples.has("train")
    with pytest.raises(InputError, match="This recipe has not been told where its train images are"):
        examples.training()


def test_a_loader_waits_as_long_as_the_recipe_says(photos: Callable[..., Recipe]) -> None:
    examples = Examples(photos("watch.hang_seconds=30"))
    assert examples.training().pool.timeout_seconds == 30.0
    assert examples.held_out("validation").pool.timeout_seconds == 30.0
