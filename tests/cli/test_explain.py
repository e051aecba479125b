"""`lockstep explain` and `lockstep recipes`, as lines and as JSON; and `--print-recipe`, which explains."""

from __future__ import annotations

import json

import pytest

from lockstep.cli.main import main
from lockstep.recipes.fields import fields_at
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find, names
from lockstep.recipes.toml import field_hints, from_toml

Capture = pytest.CaptureFixture[str]


def said(capsys: Capture, *words: str, code: int = 0) -> str:
    assert main([*words]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_a_field_has_a_page(capsys: Capture) -> None:
    assert said(capsys, "explain", "evaluate.patience").splitlines() == [
        "evaluate.patience",
        f"  {fields_at('evaluate.patience').fields[0].meaning}",
        "  takes:    a whole number (1 or more, below 2**63), or left out",
        "  default:  left out",
        "  field of: evaluate",
        "  example:  --set evaluate.patience=1",
        "",
    ]
    rates = said(capsys, "explain", "optimizer.lr")
    assert "lenet (0.01)" in rates
    assert "\n  cosine " in rates
    page = json.loads(said(capsys, "explain", "optimizer.adam.betas", "--json"))["pages"][0]
    assert page["field"] == "optimizer.betas"
    assert page["of"] == ["adam"]
    assert page["default"] == "[0.9, 0.999]"


def test_without_a_field_all_parts_are_listed(capsys: Capture) -> None:
    listed = [line.split()[0] for line in said(capsys, "explain").splitlines()[1:]]
    assert listed == [*field_hints(Recipe)]
    of_adam = said(capsys, "explain", "optimizer.adam")
    assert "optimizer.adam.epsilon_hat" in of_adam
    assert "takes:" not in of_adam
    assert 'hint:     did you mean "adamw"?' not in said(capsys, "explain", "nothing", code=2)


@pytest.mark.parametrize("path", ["optimizer..lr", ".optimizer.lr", "optimizer.lr."])
def test_an_empty_word_is_no_field(path: str, capsys: Capture) -> None:
    assert "hint:     lockstep explain optimizer.lr" in said(capsys, "explain", path, code=2)


def test_the_shipped_recipes_have_a_line_each(capsys: Capture) -> None:
    lines = said(capsys, "recipes").splitlines()
    assert [line for line in lines if not line.startswith(" ")] == names()
    listed = {each["name"]: each for each in json.loads(said(capsys, "recipes", "--json"))["recipes"]}
    assert listed["raccoon"]["data"] == "data/raccoon, with the project"
    assert listed["raccoon"]["length"] == "60 epochs, 6 images an update"
    assert listed["flowers_two_stages"]["length"] == "1000 steps and 500 steps, 32 images an update"
    assert "$defs" in json.loads(said(capsys, "recipes", "--schema"))
    with pytest.raises(SystemExit):
        main(["recipes", "--json", "--schema"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_a_printed_recipe_is_short_and_explained(capsys: Capture) -> None:
    brief = said(capsys, "train", "mnist", "--print-recipe", "--set", "batch_size=64")
    assert "# Examples an update, over all towers. Takes a whole number" in brief
    assert "\nbatch_size = 64\n" in brief
    assert "\nseed = " not in brief
    whole = said(capsys, "train", "mnist", "--print-recipe", "--all")
    assert "\nseed = 0\n" in whole
    assert "# patience is left out" in whole
    assert from_toml(whole, "whole") == find("mnist")
    assert "--all says how much of a recipe is printed." in said(capsys, "train", "mnist", "--all", code=2)
