"""What is said of the fields of recipes: a meaning for each, examples that hold, recipes that explain themselves."""

from __future__ import annotations

import shlex

import pytest

from lockstep.errors import RecipeError
from lockstep.recipes.fields import all_fields, explained_toml, fields_at, fields_of, set_by, what_it_is
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find, names, summary_of
from lockstep.recipes.toml import FieldPath, from_toml, read, value_of_setting, with_settings


def test_every_field_and_part_says_what_it_means() -> None:
    every = {field for found in all_fields().values() for field in found}
    parts = {part for field in every for part in field.parts}
    assert len(every) > 800
    assert {(field.cls.__name__, field.name) for field in every if not field.meaning} == set()
    assert every == {field for part in [Recipe, *parts] for field in fields_of(part)}
    assert {part.__name__ for part in parts if not what_it_is(part)} == set()
    assert all(summary_of(name) for name in names())


def test_each_example_is_a_value_that_its_field_takes() -> None:
    seen = 0
    for path, found in all_fields().items():
        for field in found:
            option, setting = shlex.split(field.example(path))
            assert option == "--set"
            name, _, text = setting.partition("=")
            if name == path:
                value = value_of_setting(text)
                read(field.hint, value, FieldPath("example", path))
                seen += 1
            else:
                assert name == f"{path}.kind"
    assert seen > 600


def test_the_example_of_a_pattern_is_a_setting() -> None:
    found = fields_at("optimizer.weight_decay.'.*bias'")
    option, setting = shlex.split(found.fields[0].example(found.path))
    assert (option, setting) == ("--set", 'optimizer.weight_decay.".*bias"=0.0')


@pytest.mark.parametrize("name", names())
def test_a_recipe_that_explains_itself_reads_back_as_the_same(name: str) -> None:
    recipe = find(name)
    brief, whole = explained_toml(recipe), explained_toml(recipe, everything=True)
    assert from_toml(brief, name) == from_toml(whole, name) == recipe
    assert len(brief) < len(whole)
    assert explained_toml(from_toml(brief, name)) == brief


def test_tables_by_pattern_and_lists_of_parts_are_explained() -> None:
    settings = [
        "optimizer.kind=by_name",
        "optimizer.optimizers.'^a\\.b'.kind=sgd",
        "optimizer.optimizers.'^a\\.b'.lr=0.5",
        "hooks.0.function=a:b",
        "hooks.0.arguments.x=1",
        "hooks.0.arguments.y=\x1b",
    ]
    recipe = with_settings(find("flowers_two_stages"), settings)
    text = explained_toml(recipe)
    assert from_toml(text, "text") == recipe
    assert '[optimizer.optimizers."^a\\\\.b"]' in text
    assert text.count("[[stages]]") == 2
    assert "\x1b" not in text


def test_what_is_said_of_a_field() -> None:
    (momentum,) = fields_at("optimizer.sgd.momentum").fields
    assert momentum.takes == "a finite number (0 or more, below 1)"
    assert momentum.shown_default == "0.0"
    (nonfinite,) = fields_at("nonfinite").fields
    assert nonfinite.takes == 'one of "stop", "skip", "rollback", "off"'
    (resize,) = fields_at("data.preprocessing.resize").fields
    assert '"bicubic"' in resize.takes
    (device,) = fields_at("device").fields
    assert device.takes == "text, or left out"
    found = fields_at("stages.0.optimizer.adam.eps")
    assert found == (("stages.0.optimizer.eps"), fields_at("optimizer.adam.eps").fields, [])
    assert fields_at("optimizer.optimizers.'a.b'.layer_decay.decay").fields[0].name == "decay"
    assert set_by("stages.1.length.count") == {"flowers_two_stages": "500"}
    assert set_by("optimizer.alpha") == {}
    assert set_by("optimizer.momentum")["raccoon"] == "0.9"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("lr", "did you mean optimizer.lr?"),
        ("optimizer.momentun", 'did you mean "momentum"?'),
        ("batch_size.x", "`lockstep explain` lists the parts"),
        ("batch_size.5", "`lockstep explain` lists the parts"),
        ("stages.0.length.0", "`lockstep explain` lists the parts"),
        ("sgd", "`lockstep explain` lists the parts"),
        ("", "`lockstep explain` lists the parts"),
    ],
)
def test_a_field_that_is_not_there_is_refused(path: str, hint: str) -> None:
    with pytest.raises(RecipeError, match="there is no such field in a recipe") as refused:
        fields_at(path)
    assert refused.value.hint == hint
