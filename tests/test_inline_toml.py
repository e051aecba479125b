from __future__ import annotations

import tomllib
from typing import Any

import pytest

from lockstep.cli.train import SHIPPED_RECIPES
from lockstep.inline_toml import inline_toml
from lockstep.optim import SGD, ByName, Cosine, PiecewiseConstant
from lockstep.recipes.shipped import find
from lockstep.types import Epochs


def test_what_is_as_by_default_is_left_out() -> None:
    assert inline_toml(SGD(0.1)) == '{kind = "sgd", lr = 0.1}'
    schedule = '{kind = "cosine", initial = 0.0005, steps = {kind = "epochs", count = 30}}'
    assert inline_toml(Cosine(0.0005, Epochs(30))) == schedule
    assert inline_toml(SGD(Cosine(0.0005, Epochs(30)), 0.9)) == f'{{kind = "sgd", lr = {schedule}, momentum = 0.9}}'
    assert inline_toml(PiecewiseConstant((1, 2), (0.1, 0.2, 0.3), warmup=True)) == (
        '{kind = "piecewise_constant", boundaries = [1, 2], values = [0.1, 0.2, 0.3], warmup = true}'
    )


def test_patterns_are_quoted_and_functions_named() -> None:
    def slowly(step: int) -> float:
        return 0.1

    shown = inline_toml(ByName({r"\.bias$": SGD(slowly)}))
    assert shown.startswith(r'{kind = "by_name", optimizers = {"\\.bias$" = {kind = "sgd", lr = ')
    assert "slowly}" in shown
    assert "0x" not in shown


@pytest.mark.parametrize("name", SHIPPED_RECIPES)
def test_the_optimizers_of_shipped_recipes_are_toml(name: str) -> None:
    optimizer: Any = find(name).optimizer
    read = tomllib.loads(f"optimizer = {inline_toml(optimizer)}")["optimizer"]
    assert read["kind"]
