"""Learning rates that end before or after their run; the stages themselves are in tests/laws/test_stages_law.py."""

from __future__ import annotations

from dataclasses import replace

from lockstep.optim import SGD, ByName, LayerDecay, OneCycle
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.runs.stages import _schedule_mismatches
from lockstep.types import Steps


def mismatches(recipe: Recipe, num_steps: int) -> list[str]:
    return list(_schedule_mismatches(replace(recipe, end=Steps(num_steps)), 150, "the run"))


def test_a_rate_that_is_cut_is_named_for_each_pattern() -> None:
    assert mismatches(find("flowers_small"), 12) == [
        f"the learning rate of '^{name}\\\\.' ends at step 150, the run at step 12: it is still on its way (lr.steps)"
        for name in ("features", "classifier")
    ]
    assert mismatches(find("flowers_small"), 150) == []


def test_only_the_pattern_that_ends_elsewhere_is_named() -> None:
    both = ByName({"bias$": SGD(OneCycle(1.0, 10)), "weight$": SGD(OneCycle(1.0, 20)), "rest": SGD(0.1)})
    (line,) = mismatches(replace(find("flowers_small"), optimizer=both), 20)
    assert line.startswith("the learning rate of 'bias$' ends at step 10, the run at step 20: it stays at 4e-06")


def test_rates_of_the_rest_and_of_layers_are_looked_at_too() -> None:
    recipe = find("flowers_small")
    rest = ByName({"bias$": SGD(0.1)}, rest=SGD(OneCycle(1.0, 10)))
    (line,) = mismatches(replace(recipe, optimizer=rest), 20)
    assert line.startswith("the learning rate of 'rest' ends at step 10, the run at step 20")
    (line,) = mismatches(replace(recipe, optimizer=LayerDecay(SGD(OneCycle(1.0, 10)))), 20)
    assert line.startswith("the learning rate ends at step 10, the run at step 20")
    assert line.endswith("(optimizer.optimizer.lr.steps)")
    both = ByName({"bias$": SGD(0.1)}, rest=LayerDecay(SGD(OneCycle(1.0, 10))))
    (line,) = mismatches(replace(recipe, optimizer=both), 20)
    assert line.startswith("the learning rate of 'rest' ends at step 10")
