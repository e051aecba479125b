from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import RecipeError
from lockstep.optim import SGD, Cosine
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find, names
from lockstep.recipes.toml import to_toml
from lockstep.types import Epochs, Interval


def test_mnist_falls_from_a_safe_rate(mnist: Recipe) -> None:
    assert mnist.optimizer == SGD(Cosine(0.05, Epochs(4)), momentum=0.9, nesterov=True)
    assert (mnist.batch_size, mnist.end, mnist.num_towers) == (128, Epochs(4), 2)


def test_mnist_reference_keeps_the_rate_of_the_reference() -> None:
    assert find("mnist_reference").optimizer == SGD(0.1, momentum=0.9, nesterov=True)


def test_every_recipe_goes_by_its_name() -> None:
    assert names()[:2] == ["mnist", "mnist_reference"]
    assert [find(name).name for name in names()] == names()


def test_a_recipe_of_ones_own_is_named_by_its_file(mnist: Recipe, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(mnist))
    assert find(str(path)) == mnist


@pytest.mark.parametrize(
    ("name", "hint"), [("mnits", 'did you mean "mnist"?'), ("vgg", "give one of these"), ("", "give one of these")]
)
def test_an_unknown_name_is_refused(name: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        find(name)
    assert str(caught.value) == (
        f"{name}: there is no such recipe.\n"
        f"  given:    {name}\n"
        f"  expected: {', '.join(names())}, or a file that ends in .toml\n"
        f"  hint:     {hint}"
    )


def test_checkpoints_are_written_every_ten_minutes_and_the_newest_five_stay(mnist: Recipe) -> None:
    assert mnist.checkpoints.every == Interval(600, "seconds")
    assert mnist.checkpoints.retention.newest == 5
