from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import RecipeError
from lockstep.progress import Interval, Steps
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import from_toml, load, to_toml

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
