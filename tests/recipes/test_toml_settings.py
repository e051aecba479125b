from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.augmentations.turns import RandomShift
from lockstep.detection.tf_configs import Ssd
from lockstep.detection.values import Detector, FasterRcnnFpn, MaskRcnnFpn, SqueezeSsd
from lockstep.errors import RecipeError
from lockstep.exchange.exchange import Alone
from lockstep.optim import SGD, AdamW, ByName, ClipGlobalNorm, Cosine, MovingAverage
from lockstep.optim.schedules import Constant
from lockstep.recipes.pipeline_config import import_pipeline
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import with_settings
from lockstep.types import Epochs, Interval, Steps

FIXTURES = Path(__file__).parents[1] / "fixtures" / "odapi_configs"


@pytest.mark.parametrize(
    ("settings", "path", "value"),
    [
        (["batch_size=64"], "batch_size", 64),
        (["batch_size = 64"], "batch_size", 64),
        (["batch_size=64", "batch_size=32"], "batch_size", 32),
        (["name=again"], "name", "again"),
        (['name="12"'], "name", "12"),
        (["optimizer.nesterov=false"], "optimizer.nesterov", False),
        (["optimizer.lr.initial=0.1"], "optimizer.lr", Cosine(0.1, Epochs(4))),
        (["optimizer.lr.initial=1e-2"], "optimizer.lr.initial", 0.01),
        (["optimizer.lr=0.1"], "optimizer.lr", 0.1),
        (["optimizer.lr.steps=100"], "optimizer.lr.steps", 100),
        (["optimizer.lr.value=0.1", "optimizer.lr.kind=constant"], "optimizer.lr", Constant(0.1)),
        (["optimizer.lr.kind=cosine"], "optimizer.lr", Cosine(0.05, Epochs(4))),
        (
            ["optimizer.lr.steps=9", "optimizer.lr.initial=1", "optimizer.lr.kind=cosine", "optimizer.lr=0.1"],
            "optimizer.lr",
            Cosine(1, 9),
        ),
        (["optimizer.kind=adamw"], "optimizer", AdamW(Cosine(0.05, Epochs(4)))),
        (["optimizer.lr.initial=0.001", "optimizer.kind=adamw"], "optimizer", AdamW(Cosine(0.001, Epochs(4)))),
        (["optimizer.kind=adamw", "optimizer.lr=0.1"], "optimizer", AdamW(0.1)),
        (["end=none"], "end", None),
        (["end.count=9", "end.kind=steps"], "end", Steps(9)),
        (['end={kind = "steps", count = 9}'], "end", Steps(9)),
        (["average.decay=0.99"], "average", MovingAverage(0.99)),
        (["average={}"], "average", MovingAverage()),
        (["exchange.kind=alone"], "exchange", Alone()),
        (["checkpoints.every=20 steps"], "checkpoints.every", Interval(20)),
        (["watch.console=0"], "watch.console.amount", 0),
        (["device=cpu", "device=none"], "device", None),
        (["data.folder=/data/x=y"], "data.folder", "/data/x=y"),
        (
            ["gradient_transforms.0.max_norm=5", "gradient_transforms.0.kind=clip_global_norm"],
            "gradient_transforms",
            (ClipGlobalNorm(5),),
        ),
        (['optimizer.weight_decay={"weight$" = 1e-4}'], "optimizer.weight_decay", {"weight$": 1e-4}),
        (
            ["data.augment=[{pixels=1}, {pixels=2}]", "data.augment.1.pixels=3"],
            "data.augment",
            (RandomShift(1), RandomShift(3)),
        ),
    ],
)
def test_settings_set_one_field_each(mnist: Recipe, settings: list[str], path: str, value: Any) -> None:
    found: Any = with_settings(mnist, settings)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize(
    ("settings", "model"),
    [
        (["model.aspect_ratios=[2.0]"], SqueezeSsd(1, anchor_ratios=(0.5,))),
        (["model.aspect_ratios.0=4"], SqueezeSsd(1, anchor_ratios=(0.25,))),
        (["model.kind=squeeze_ssd", "model.aspect_ratios=[2.0]"], SqueezeSsd(1, anchor_ratios=(0.5,))),
        (
            ["model.box_nms_thresh=0.3", "model.kind=mask_rcnn_fpn", "model.num_classes=2"],
            MaskRcnnFpn(2, iou_threshold=0.3),
        ),
        (
            ['model={kind = "faster_rcnn_fpn", num_classes = 2, box_score_thresh = 0.3}'],
            FasterRcnnFpn(2, score_threshold=0.3),
        ),
    ],
)
def test_a_field_is_set_by_its_old_name(settings: list[str], model: Detector) -> None:
    recipe = replace(find("bccd"), model=SqueezeSsd(1))
    assert with_settings(recipe, settings).model == model


@pytest.mark.parametrize(
    ("setting", "left"), [("quantization=none", ()), ("quantization={delay = 5}", ("quantization",))]
)
def test_quantization_is_an_untrained_part_by_its_old_name(setting: str, left: tuple[str, ...]) -> None:
    path = next(FIXTURES.glob("facessd*.config"))
    recipe = import_pipeline(path.read_text(), path.name, "faces").recipe
    changed = with_settings(recipe, [f"model.{setting}"]).model
    assert isinstance(changed, Ssd)
    assert changed.untrained_parts == left


def test_nothing_else_changes(mnist: Recipe) -> None:
    assert with_settings(mnist, []) == mnist
    changed = with_settings(mnist, ["average.decay=0.99", "seed=3"])
    assert changed != mnist
    assert with_settings(changed, ["average=none", "seed=0"]) == mnist


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (
            "optimizer.lr.initia=0.1",
            "optimizer.lr.initia in --set: there is no such field.\n"
            "  given:    initia\n"
            "  expected: one of initial, steps, warmup_steps, final, warmup_initial, hold_steps\n"
            '  hint:     did you mean "initial"?',
        ),
        (
            "batch_size=many",
            "batch_size in --set: this value does not fit.\n"
            '  given:    "many"\n'
            "  expected: a whole number\n"
            "  hint:     give such a value (text in quotes, numbers and true or false without)",
        ),
        (
            "batch_size=none",
            "batch_size in --set: this value does not fit.\n"
            "  given:    none\n"
            "  expected: a whole number\n"
            "  hint:     give such a value (text in quotes, numbers and true or false without)",
        ),
        (
            "optimizer.lr.kind=cosinus",
            "optimizer.lr.kind in --set: there is no such kind here.\n"
            '  given:    "cosinus"\n'
            '  expected: one of "constant", "cosine", "exponential", "polynomial", "piecewise_constant", "one_cycle", '
            '"warmup", "scaled_by_batch"\n'
            '  hint:     did you mean "cosine"?',
        ),
        (
            "end.kind=steps",
            "end.count in --set: this field is missing.\n"
            '  given:    {kind = "steps"}\n'
            "  expected: count, a whole number\n"
            "  hint:     set end.count",
        ),
        (
            "gradient_transforms.1.max_norm=5",
            "gradient_transforms.1 in --set: there is no such item.\n"
            "  given:    1\n"
            "  expected: a number from 0 to 0\n"
            "  hint:     count the items from 0; one past the last adds an item",
        ),
        (
            "data.augment.first.pixels=5",
            "data.augment.first in --set: there is no such item.\n"
            "  given:    first\n"
            "  expected: a number from 0 to 0\n"
            "  hint:     count the items from 0; one past the last adds an item",
        ),
        (
            "average.decay=2",
            "average in --set: decay is out of range.\n"
            "  given:    decay=2\n"
            "  expected: above 0, below 1\n"
            "  hint:     give a decay such as 0.999 or 0.9999",
        ),
        (
            "batch_size.of=3",
            "batch_size in --set: this value does not fit.\n"
            "  given:    {of = 3}\n"
            "  expected: a whole number\n"
            "  hint:     give such a value (text in quotes, numbers and true or false without)",
        ),
        (
            "batch_size",
            "--set batch_size: this sets nothing.\n"
            "  given:    batch_size\n"
            "  expected: path.to.field=value, such as optimizer.lr.initial=0.1\n"
            "  hint:     name the field, and give its value after =",
        ),
        (
            "=3",
            "--set =3: this sets nothing.\n"
            "  given:    =3\n"
            "  expected: path.to.field=value, such as optimizer.lr.initial=0.1\n"
            "  hint:     name the field, and give its value after =",
        ),
    ],
)
def test_a_wrong_setting_is_named(mnist: Recipe, setting: str, text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        with_settings(mnist, [setting])
    assert str(caught.value) == text


def test_a_long_text_that_sets_nothing_is_refused_in_linear_time(mnist: Recipe) -> None:
    with pytest.raises(RecipeError, match="this sets nothing"):
        with_settings(mnist, ["batch_size" + " " * 300_000 + "x"])


@pytest.mark.parametrize("key", [r'"^conv1\\."', r"'^conv1\.'"])
def test_a_pattern_in_quotes_is_one_key(key: str) -> None:
    settings = [
        "optimizer.kind=by_name",
        f'optimizer.optimizers.{key}.kind="sgd"',
        f"optimizer.optimizers.{key}.lr=0.2",
    ]
    assert with_settings(find("mnist"), settings).optimizer == ByName({r"^conv1\.": SGD(0.2)})


def test_a_setting_may_have_the_old_name_of_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_OLD_NAMES", "")
    by_field = with_settings(find("mnist"), ["watch.on_loss=continue"])
    assert by_field.watch.on_failure == "continue"
    assert with_settings(find("mnist"), ['watch={on_loss="continue"}']) == by_field
    assert with_settings(find("mnist"), ["watch.on_loss=continue", "watch.on_failure=restart"]) == find("mnist")
