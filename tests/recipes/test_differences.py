"""Two recipes of one run: every difference is named by its place, down to the field of one of its stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.progress import Steps
from lockstep.recipes.differences import differences
from lockstep.recipes.parts import Stage
from lockstep.recipes.settings import with_settings
from lockstep.recipes.shipped import recipe

SAVED = recipe("flowers_two_stages")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("stages.1.length.count=501", "stages.1.length.count: saved 500, given 501"),
        ("stages.0.optimizer.momentum=0.5", "stages.0.optimizer.momentum: saved 0.9, given 0.5"),
        ("stages.1.image_size=320", "stages.1.image_size: saved None, given 320"),
        ("data.image_size=320", "data.image_size: saved 299, given 320"),
        ("data.train=photos", "data.train: saved None, given photos"),
        ("data.preprocessing.fast=true", "data.preprocessing.fast: saved False, given True"),
        ("loss.label_smoothing=0.1", "loss.label_smoothing: saved 0.0, given 0.1"),
        ("evaluate.top.1=3", "evaluate.top.1: saved 5, given 3"),
    ],
)
def test_what_changes_the_training_is_grave(setting: str, said: str) -> None:
    (found,) = differences(SAVED, with_settings(SAVED, [setting]))
    assert (str(found), found.harmless) == (said, False)


def test_lists_of_another_length_differ_as_a_whole() -> None:
    longer = replace(SAVED, stages=(*SAVED.stages, Stage(Steps(1))))
    (found,) = differences(SAVED, longer)
    assert found.path == "stages"
    (found,) = differences(SAVED, with_settings(SAVED, ["evaluate.top=[1]"]))
    assert str(found) == "evaluate.top: saved (1, 5), given (1,)"


@pytest.mark.parametrize("setting", ["evaluate.patience=3", "end.kind=steps", "feed.num_threads=1", "name=mine"])
def test_what_changes_nothing_is_harmless(setting: str) -> None:
    more = ["end.count=10"] if setting.startswith("end") else []
    found = differences(SAVED, with_settings(SAVED, [setting, *more]))
    assert [each.harmless for each in found] == [True]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_one_path_for_another_is_harmless(split: str) -> None:
    saved = with_settings(SAVED, [f"data.{split}=here"])
    (found,) = differences(saved, with_settings(saved, [f"data.{split}=there"]))
    assert (str(found), found.harmless) == (f"data.{split}: saved here, given there", True)
    (found,) = differences(saved, with_settings(saved, [f"data.{split}=none"]))
    assert not found.harmless


def test_mnist_may_lie_in_another_folder() -> None:
    mnist = recipe("mnist")
    assert [each.harmless for each in differences(mnist, with_settings(mnist, ["data.folder=there"]))] == [True]
    assert [each.harmless for each in differences(mnist, with_settings(mnist, ["data.scale=one"]))] == [False]
