"""What the type of each field says is checked, and messages name the field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import pytest

from lockstep.detection.values import SqueezeSsd
from lockstep.errors import RecipeError
from lockstep.optim import SGD, Cosine
from lockstep.optim.schedules import Constant, Schedule
from lockstep.recipes.parts import Monitoring
from lockstep.recipes.recipe import NEW_NAMES, Recipe
from lockstep.recipes.toml import FieldPath, field_hints, field_type, from_toml, kind_name, load, read, to_toml, write
from lockstep.types import Epochs, Hours, Interval, Steps

HERE = FieldPath("mine.toml", "part")

SCHEDULES = (
    '"constant" or "cosine" or "exponential" or "polynomial" or "piecewise_constant" or "one_cycle" or "warmup"'
    ' or "scaled_by_batch"'
)


@dataclass(frozen=True)
class Part:
    number: float
    word: Literal["stop", "skip"] = "stop"
    parts: tuple[Steps, ...] = ()


@pytest.mark.parametrize(
    ("hint", "plain", "value"),
    [
        (int, 12, 12),
        (float, 0.5, 0.5),
        (float, 2, 2),
        (bool, True, True),
        (str, "12", "12"),
        (Literal["raw", "average"], "average", "average"),
        (tuple[int, ...], [1, 2], (1, 2)),
        (Interval, "20 steps", Interval(20)),
        (Steps | Epochs | None, {"kind": "epochs", "count": 1.5, "keep_last": False}, Epochs(1.5)),
        (float | Schedule, 0.1, 0.1),
        (float | Schedule, {"kind": "constant", "value": 0.1}, Constant(0.1)),
        (int | Epochs, 3, 3),
    ],
)
def test_values_are_read_and_written_by_their_type(hint: Any, plain: Any, value: Any) -> None:
    assert read(hint, plain, HERE) == value
    assert write(hint, value, HERE) == plain


@pytest.mark.parametrize(
    ("hint", "plain", "given", "expected"),
    [
        (int, "12", '"12"', "a whole number"),
        (int, 12.0, "12.0", "a whole number"),
        (int, True, "true", "a whole number"),
        (int, None, "none", "a whole number"),
        (int | None, [1], "[1]", "a whole number"),
        (float, "0.1", '"0.1"', "a finite number"),
        (float, float("nan"), "nan", "a finite number"),
        (float, float("inf"), "inf", "a finite number"),
        (float, False, "false", "a finite number"),
        (bool, 1, "1", "true or false"),
        (str, 12, "12", "text"),
        (tuple[int, ...], 1, "1", "a list"),
        (Interval, 2.5, "2.5", 'an interval such as "20 steps"'),
        (Monitoring, "10 steps", '"10 steps"', 'a table of kind "watch"'),
        (float | Schedule, "cosine", '"cosine"', f"a finite number, or a table of kind {SCHEDULES}"),
        (Mapping[str, float], 3, "3", "a table by pattern"),
        (Literal["raw", "average"], {"a": "b"}, '{a = "b"}', 'one of "raw", "average"'),
    ],
)
def test_values_of_another_type_are_refused(hint: Any, plain: Any, given: str, expected: str) -> None:
    with pytest.raises(RecipeError, match=r"^part in mine.toml: this value does not fit.\n") as caught:
        read(hint, plain, HERE)
    assert (caught.value.given, caught.value.expected) == (given, expected)
    assert caught.value.hint == "give such a value (text in quotes, numbers and true or false without)"


def test_a_misspelt_word_is_recognised() -> None:
    with pytest.raises(RecipeError) as caught:
        read(Part, {"number": 1, "word": "skp"}, HERE)
    assert str(caught.value) == (
        "part.word in mine.toml: this value does not fit.\n"
        '  given:    "skp"\n'
        '  expected: one of "stop", "skip"\n'
        '  hint:     did you mean "skip"?'
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [("numbers", 'did you mean "number"?'), ("colour", "remove it; `lockstep explain` lists what there is")],
)
def test_an_unknown_field_is_refused(name: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(Part, {"number": 1, name: 2}, HERE)
    assert str(caught.value) == (
        f"part.{name} in mine.toml: there is no such field.\n"
        f"  given:    {name}\n"
        "  expected: one of number, word, parts\n"
        f"  hint:     {hint}"
    )


def test_the_old_name_of_a_field_is_read_and_the_new_one_logged(
    mnist: Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCKSTEP_OLD_NAMES", "")
    before = to_toml(mnist).replace('on_failure = "restart"', 'on_loss = "continue"')
    recipe = from_toml(before, "mine.toml")
    assert recipe == replace(mnist, watch=replace(mnist.watch, on_failure="continue"))
    assert caplog.messages == ["watch.on_loss in mine.toml is called watch.on_failure now"]
    assert "on_loss" not in to_toml(recipe)


def test_an_unknown_field_of_a_part_without_fields_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"part.hosting.threads in .*\n.*\n  expected: no field: in_turn has none\n"):
        read(field_hints(Recipe)["towers"], {"hosting": {"threads": 2}}, HERE)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(RecipeError) as caught:
        read(Part, {"word": "skip"}, HERE)
    assert str(caught.value) == (
        "part.number in mine.toml: this field is missing.\n"
        '  given:    {word = "skip"}\n'
        "  expected: number, a finite number\n"
        "  hint:     set part.number"
    )


@pytest.mark.parametrize(
    ("table", "what", "given", "hint"),
    [
        ({"kind": "epoch", "count": 1}, "there is no such kind here.", '"epoch"', 'did you mean "epochs"?'),
        ({"kind": "days", "count": 1}, "there is no such kind here.", '"days"', "set part.kind"),
        ({"kind": 3, "count": 1}, "there is no such kind here.", "3", "set part.kind"),
        ({"count": 1}, "the kind is missing.", "{count = 1}", "set part.kind"),
    ],
)
def test_a_kind_is_looked_up_among_those_of_the_field(table: dict[str, Any], what: str, given: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(Steps | Epochs, table, HERE)
    assert str(caught.value) == (
        f'part.kind in mine.toml: {what}\n  given:    {given}\n  expected: one of "steps", "epochs"\n  hint:     {hint}'
    )


def test_what_a_part_refuses_gains_its_place() -> None:
    with pytest.raises(RecipeError) as caught:
        read(Part, {"number": 1, "parts": [{"count": 1}, {"count": 0}]}, HERE)
    assert str(caught.value) == (
        "part.parts.1 in mine.toml: A run of 0 steps has no step to do.\n"
        "  given:    0 steps\n"
        "  expected: a number above 0\n"
        "  hint:     give a positive number of steps, or none at all to train until stopped"
    )


def test_a_wrong_interval_gains_its_place() -> None:
    with pytest.raises(RecipeError, match=r"^part.console in mine.toml: '10 stops' is not an interval.\n"):
        read(Monitoring, {"console": "10 stops"}, HERE)
    with pytest.raises(RecipeError, match=r"^part.console in mine.toml: '10' is not an interval.\n"):
        read(Monitoring, {"console": 10}, HERE)


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(1234567), "1234567 steps"),
        (Interval(0.00001, "epochs"), "0.00001 epochs"),
        (Interval(0, "epochs"), "0 epochs"),
        (Interval(1e22, "seconds"), "10000000000000000000000 s"),
    ],
)
def test_intervals_are_written_with_all_their_digits(interval: Interval, text: str) -> None:
    assert write(Interval, interval, HERE) == text
    assert read(Interval, text, HERE) == interval


def test_an_interval_may_be_switched_off_by_a_number() -> None:
    assert not read(Interval, 0, HERE).amount


def test_a_part_of_ones_own_is_not_written() -> None:
    class Mine:
        def __call__(self, step: int) -> float:
            return 0.1

    with pytest.raises(RecipeError, match=r"^part.lr in mine.toml: this value does not fit.") as caught:
        write(SGD, SGD(Mine()), HERE)
    assert caught.value.expected == f"a finite number, or a table of kind {SCHEDULES}"


def test_the_kind_is_written_where_the_name_does_not_say_it() -> None:
    assert write(SGD, SGD(Constant(0.1)), FieldPath("", "optimizer"))["kind"] == "sgd"
    assert "kind" not in write(Monitoring, Monitoring(), FieldPath("", "watch"))
    assert write(Monitoring, Monitoring(), FieldPath("", "look"))["kind"] == "watch"
    assert read(Monitoring, {"kind": "watch"}, HERE) == Monitoring()
    assert write(Steps | Hours, Steps(1), FieldPath("", "steps"))["kind"] == "steps"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Cosine", "cosine"),
        ("ClipGlobalNorm", "clip_global_norm"),
        ("SGD", "sgd"),
        ("SGDMomentum", "sgd_momentum"),
        ("AdamW", "adamw"),
    ],
)
def test_a_kind_is_the_name_of_the_class_in_snake_case(name: str, kind: str) -> None:
    assert kind_name(type(name, (), {})) == kind


def test_the_count_of_the_towers_is_said_once(mnist: Recipe) -> None:
    assert "count" not in write(Recipe, replace(mnist, num_towers=2), FieldPath(""))["towers"]
    with pytest.raises(RecipeError, match=r"^part.count in mine.toml: there is no such field.") as caught:
        read(field_hints(Recipe)["towers"], {"count": 2}, HERE)
    assert caught.value.hint == "set num_towers instead"


OLD_DETECTOR = """
name = "old"
[model]
kind = "squeeze_ssd"
num_classes = 1
layers = [12]
anchor_sizes = [[80.0]]
aspect_ratios = [0.7, 1, 4.0]
[data]
kind = "detection_data"
[optimizer]
kind = "sgd"
lr = 0.1
"""


def test_an_old_name_is_read_with_its_old_meaning_and_the_log_tells_the_new_one_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_OLD_NAMES", "")
    model = from_toml(OLD_DETECTOR, "old.toml").model
    assert model == SqueezeSsd(1, (12,), anchor_sizes=((80.0,),), anchor_ratios=(1 / 0.7, 1.0, 0.25))
    from_toml(OLD_DETECTOR, "old.toml")
    assert caplog.messages == [
        "model.aspect_ratios in old.toml is called model.anchor_ratios (height over width, not width over height) now"
    ]


@pytest.mark.parametrize("given", ["[0.0]", "[-1]", "[true]", '"wide"'])
def test_a_wrong_value_by_an_old_name_is_refused_by_the_new_one(given: str) -> None:
    with pytest.raises(RecipeError, match="anchor_ratios"):
        from_toml(OLD_DETECTOR.replace("[0.7, 1, 4.0]", given), "old.toml")


def test_an_old_name_beside_the_new_one_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"^model.aspect_ratios in old.toml: there is no such field.") as caught:
        from_toml(OLD_DETECTOR.replace("aspect_ratios", "anchor_ratios = [1.0]\naspect_ratios"), "old.toml")
    assert caught.value.hint == "set anchor_ratios instead"


def test_new_names_are_fields_and_old_ones_are_not() -> None:
    for cls, names in NEW_NAMES.items():
        assert {now.name for now in names.values()} <= field_hints(cls).keys()
        assert names.keys().isdisjoint(field_hints(cls))


def every_field() -> Iterator[tuple[type, str]]:
    waiting: list[type] = [Recipe]
    seen: set[type] = set()
    while waiting:
        cls = waiting.pop()
        if cls not in seen:
            seen.add(cls)
            for name, hint in field_hints(cls).items():
                yield cls, name
                waiting += [*field_type(hint).classes.values(), *field_type(field_type(hint).item).classes.values()]


def test_every_field_can_be_written() -> None:
    for cls, name in every_field():
        takes = field_type(field_hints(cls)[name])
        assert name != "kind", cls
        assert str(takes), f"the type of {cls.__name__}.{name} is none that a recipe can hold"
        if NoneType in takes.scalars:
            (default,) = [field.default for field in fields(cls) if field.name == name]
            why = "None is left out in TOML, so leaving the field out has to mean None"
            assert default is None, f"{cls.__name__}.{name}: {why}"


def test_the_walk_over_all_fields_reaches_the_innermost() -> None:
    assert {(Recipe, "seed"), (Cosine, "initial"), (Epochs, "count"), (Monitoring, "console")} <= set(every_field())


SMALL = """
name = "small"
[model]
kind = "mnist"
[data]
kind = "mnist_data"
augment = [{pixels = 2}]
[optimizer]
kind = "sgd"
lr = {kind = "cosine", initial = 0.1, steps = 100}
[end]
kind = "steps"
count = 100
[checkpoints]
every = "20 steps"
[watch]
console = 0
"""


def test_what_a_file_leaves_out_takes_its_default(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    recipe = load(path)
    assert recipe.end == Steps(100)
    assert recipe.checkpoints.every == Interval(20)
    assert recipe.checkpoints.retention.newest == 5
    assert recipe.batch_size == 128
    assert recipe.average is None
    assert recipe.data.augment[0].field == "image"


def test_the_text_is_complete_and_stable(mnist: Recipe) -> None:
    text = to_toml(mnist)
    assert to_toml(from_toml(text, "text")) == text
    for line in ["batch_size = 128", "[optimizer.lr]", 'kind = "cosine"', 'every = "600 s"', "newest = 5"]:
        assert line in text.splitlines()
    assert "\naverage" not in text


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path / "none.toml")
    assert str(caught.value) == (
        f"{tmp_path / 'none.toml'}: the recipe cannot be read.\n"
        f"  given:    {tmp_path / 'none.toml'} (No such file or directory)\n"
        "  expected: a TOML file\n"
        "  hint:     check the path; `lockstep train mnist --print-recipe` prints a recipe to start from"
    )


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "image.toml"
    path.write_bytes(b"\xff\xd8\xff")
    with pytest.raises(RecipeError, match=r"the recipe cannot be read") as caught:
        load(path)
    assert caught.value.given == f"{path} (it is not text in UTF-8)"


@pytest.mark.parametrize("text", ["batch_size = ", "[model", "a = " + "[" * 100_000])
def test_a_text_that_is_not_toml(text: str) -> None:
    with pytest.raises(RecipeError, match=r"^mine.toml: this is not TOML.\n  given: .*\n  expected: lines such as"):
        from_toml(text, "mine.toml")


def test_a_message_names_file_and_field(tmp_path: Path) -> None:
    path = tmp_path / "typo.toml"
    path.write_text(SMALL.replace("initial", "initia"))
    with pytest.raises(RecipeError) as caught:
        load(path)
    assert str(caught.value) == (
        f"optimizer.lr.initia in {path}: there is no such field.\n"
        "  given:    initia\n"
        "  expected: one of initial, steps, warmup_steps, final, warmup_initial, hold_steps\n"
        '  hint:     did you mean "initial"?'
    )


def test_a_recipe_that_contradicts_itself_names_its_file() -> None:
    with pytest.raises(RecipeError, match=r"^mine.toml: The batch cannot be split evenly over the towers.\n"):
        from_toml("num_towers = 3\n" + SMALL, "mine.toml")
