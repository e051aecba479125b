from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.checkpoints.retention import Retention
from lockstep.errors import InputError
from lockstep.exchange.exchange import Alone
from lockstep.optim import ClipGlobalNorm, Cosine, MovingAverage
from lockstep.recipes.parts import Checkpoints, Evaluate, Monitoring, Quantization, Stage, Verification
from lockstep.recipes.recipe import Recipe, is_harmless, recipe_changes
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import with_settings
from lockstep.towers.towers import Towers
from lockstep.types import Epochs, Hours, Interval, Steps


def test_towers_not_given_are_as_many_as_the_workers(mnist: Recipe) -> None:
    recipe = replace(mnist, num_towers=None, towers=Towers(precision="bf16"))
    assert recipe.towers_for(3) == Towers(3, precision="bf16")
    assert replace(recipe, num_towers=8).towers_for(3) == Towers(8, precision="bf16")


@pytest.mark.parametrize(
    ("changes", "what", "given", "expected"),
    [
        ({"batch_size": 0}, "batch_size is out of range.", "batch_size=0", "1 or more, below 2**63"),
        ({"seed": -1}, "seed is out of range.", "seed=-1", "0 or more, below 2**63"),
        ({"seed": 2**63}, "seed is out of range.", f"seed={2**63}", "0 or more, below 2**63"),
        ({"num_towers": 0}, "num_towers is out of range.", "num_towers=0", "1 or more, below 2**63"),
        ({"num_workers": 0}, "num_workers is out of range.", "num_workers=0", "1 or more, below 2**63"),
        (
            {"num_towers": 3},
            "The batch cannot be split evenly over the towers.",
            "batch_size=128 over 3 towers",
            "a batch size that 3 divides",
        ),
        (
            {"num_towers": 2, "num_workers": 4},
            "Some workers would have no tower to run.",
            "4 workers, 2 towers",
            "at least as many towers as workers",
        ),
        (
            {"towers": Towers(8)},
            "How many towers there are is said in num_towers alone.",
            "towers.count=8",
            "towers that leave their count out",
        ),
        (
            {"evaluate": Evaluate(weights="average")},
            "The averaged weights cannot be scored: this run keeps no average.",
            'evaluate.weights="average", and no average',
            "an average, or the raw weights",
        ),
        (
            {"name": "../elsewhere"},
            "This name cannot be that of a folder.",
            "name='../elsewhere'",
            "letters, digits and _, after the first one also . + -",
        ),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(
    mnist: Recipe, changes: dict[str, Any], what: str, given: str, expected: str
) -> None:
    with pytest.raises(InputError) as caught:
        replace(mnist, **changes)
    assert (caught.value.what, caught.value.given, caught.value.expected) == (what, given, expected)


def test_parts_refuse_counts_out_of_range() -> None:
    with pytest.raises(InputError, match=r"images is out of range.\n  given:    images=-1"):
        Monitoring(images=-1)
    with pytest.raises(InputError, match=r"micro_batch is out of range.\n  given:    micro_batch=0"):
        Evaluate(micro_batch=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "again"},
        {"num_workers": 1},
        {"device": "cpu"},
        {"end": Hours(2)},
        {"end": None},
        {"checkpoints": Checkpoints(Interval(20), Retention(newest=2))},
        {"watch": Monitoring(console=Interval(0))},
        {"verify": Verification(every=10, replay=100)},
        {"evaluate": Evaluate(every=Interval(100))},
    ],
)
def test_what_may_differ_on_resume(mnist: Recipe, changes: dict[str, Any]) -> None:
    found = recipe_changes(mnist, replace(mnist, **changes))
    assert found
    assert all(map(is_harmless, found))


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 64},
        {"seed": 1},
        {"average": MovingAverage()},
        {"gradient_transforms": (ClipGlobalNorm(1.0),)},
        {"exchange": Alone()},
        {"towers": Towers(precision="bf16")},
        {"num_towers": 4},
        {"evaluate": Evaluate(micro_batch=10)},
        {"nonfinite": "skip"},
    ],
)
def test_what_may_not_differ_on_resume(mnist: Recipe, changes: dict[str, Any]) -> None:
    (found,) = recipe_changes(replace(mnist, towers=Towers()), replace(mnist, **{"towers": Towers(), **changes}))
    assert not is_harmless(found)


def test_differences_name_the_innermost_field(mnist: Recipe) -> None:
    assert recipe_changes(mnist, mnist) == []
    slower = replace(mnist, optimizer=replace(mnist.optimizer, lr=Cosine(0.01, Epochs(4))))
    rarer = replace(slower, checkpoints=Checkpoints(every=Interval(20)))
    assert [(str(change), is_harmless(change)) for change in recipe_changes(mnist, rarer)] == [
        ("optimizer.lr.initial: saved 0.05, given 0.01", False),
        ("checkpoints.every.amount: saved 600, given 20", True),
        ("checkpoints.every.unit: saved 'seconds', given 'steps'", True),
    ]


def test_a_part_of_another_class_differs_as_a_whole(mnist: Recipe) -> None:
    (found,) = recipe_changes(mnist, replace(mnist, end=Steps(4)))
    assert str(found) == "end: saved Epochs(count=4, keep_last=False), given Steps(count=4)"


def test_towers_left_open_agree_with_those_of_the_first_start(mnist: Recipe) -> None:
    saved = replace(mnist, num_towers=2)
    assert recipe_changes(saved, mnist) == []
    assert [str(each) for each in recipe_changes(saved, replace(mnist, num_towers=4))] == [
        "num_towers: saved 2, given 4"
    ]


def test_one_image_a_tower_is_too_few_for_the_auxiliary_head() -> None:
    inception = find("inception_v3")
    with pytest.raises(InputError) as raised:
        replace(inception, batch_size=8)
    assert str(raised.value) == (
        "With one image a tower the batch norm of the auxiliary head has nothing to normalise with.\n"
        "  given:    batch_size=8 over 8 towers\n"
        "  expected: two images or more a tower\n"
        '  hint:     lower num_towers, raise batch_size, or set towers.batch_norm="sync" or model.auxiliary=false'
    )
    for batch_norm in ("sync", "frozen"):
        replace(inception, batch_size=8, towers=replace(inception.towers, batch_norm=batch_norm))
    replace(inception, batch_size=8, model=replace(inception.model, auxiliary=False))


SAVED = find("flowers_two_stages")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("stages.1.length.count=501", "stages.1.length.count: saved 500, given 501"),
        ("stages.0.optimizer.momentum=0.5", "stages.0.optimizer.momentum: saved 0.9, given 0.5"),
        ("stages.1.image_size=320", "stages.1.image_size: saved None, given 320"),
        ("data.image_size=320", "data.image_size: saved 299, given 320"),
        ("data.train=photos", "data.train: saved None, given 'photos'"),
        ("data.preprocessing.fast=true", "data.preprocessing.fast: saved False, given True"),
        ("loss.label_smoothing=0.1", "loss.label_smoothing: saved 0.0, given 0.1"),
        ("evaluate.top.1=3", "evaluate.top.1: saved 5, given 3"),
    ],
)
def test_what_changes_the_training_is_grave(setting: str, said: str) -> None:
    (found,) = recipe_changes(SAVED, with_settings(SAVED, [setting]))
    assert (str(found), is_harmless(found)) == (said, False)


def test_lists_of_another_length_differ_as_a_whole() -> None:
    longer = replace(SAVED, stages=(*SAVED.stages, Stage(Steps(1))))
    (found,) = recipe_changes(SAVED, longer)
    assert found.path == "stages"
    (found,) = recipe_changes(SAVED, with_settings(SAVED, ["evaluate.top=[1]"]))
    assert str(found) == "evaluate.top: saved [1, 5], given [1]"


@pytest.mark.parametrize("setting", ["evaluate.patience=3", "end.kind=steps", "feed.num_threads=1", "name=mine"])
def test_settings_that_change_no_number_are_harmless(setting: str) -> None:
    more = ["end.count=10"] if setting.startswith("end") else []
    found = recipe_changes(SAVED, with_settings(SAVED, [setting, *more]))
    assert [is_harmless(each) for each in found] == [True]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_one_path_for_another_is_harmless(split: str) -> None:
    saved = with_settings(SAVED, [f"data.{split}=here"])
    (found,) = recipe_changes(saved, with_settings(saved, [f"data.{split}=there"]))
    assert (str(found), is_harmless(found)) == (f"data.{split}: saved 'here', given 'there'", True)
    (found,) = recipe_changes(saved, with_settings(saved, [f"data.{split}=none"]))
    assert not is_harmless(found)


@pytest.mark.parametrize("setting", ["data.cache=elsewhere", "data.cache_gb=3"])
def test_another_cache_is_harmless(setting: str) -> None:
    (found,) = recipe_changes(SAVED, with_settings(SAVED, [setting]))
    assert is_harmless(found)


def test_mnist_may_lie_in_another_folder() -> None:
    mnist = find("mnist")
    for moved in ("data.folder=there", "data.cache=elsewhere"):
        assert [is_harmless(each) for each in recipe_changes(mnist, with_settings(mnist, [moved]))] == [True]
    assert [is_harmless(each) for each in recipe_changes(mnist, with_settings(mnist, ["data.scale=one"]))] == [False]


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"towers": Towers(precision="bf16")}, 'towers.precision="bf16"'),
        ({"evaluate": Evaluate(precision="fp16")}, 'evaluate.precision="fp16"'),
        ({"towers": Towers(batch_norm="sync")}, 'towers.batch_norm="sync"'),
        (
            {"towers": Towers(batch_norm="none", compile=True)},
            'towers.batch_norm="none", towers.compile=true',
        ),
        ({"towers": Towers(activation_checkpointing=("conv",))}, "towers.activation_checkpointing"),
    ],
)
def test_what_would_compute_past_the_quantization_is_refused(fields: dict[str, Any], given: str) -> None:
    with pytest.raises(InputError, match="Quantization-aware training is not done with this") as caught:
        replace(find("mnist"), quantization=Quantization(5), **fields)
    assert caught.value.given == given
