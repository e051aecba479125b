"""What the test suites of the reference systems assert of their updates, said of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from toy import NUM_ROWS, Logistic, loss_after, losses, make_loader

import lockstep as ls
from lockstep.optim.schedules import Constant
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import with_settings

WEIGHTS, BIASES = "weight$", "bias$"


def make_state(model: Logistic | None = None, lr: float = 1.0, **options: Any) -> ls.TrainState:
    torch.manual_seed(0)
    return ls.TrainState(model or Logistic(), ls.optim.SGD(lr=lr), **options)


def parameters_of(state: ls.TrainState) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in state.model.named_parameters()}


def unfrozen(model: Logistic) -> Logistic:
    return model.requires_grad_(True)


# What is trained -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("trained", "other"), [(WEIGHTS, "linear.bias"), (BIASES, "linear.weight")])
def test_only_what_is_chosen_changes(trained: str, other: str) -> None:
    state = make_state(train_only=trained)
    before = parameters_of(state)
    loss_after(1, state)
    changed = {name for name, value in parameters_of(state).items() if not torch.equal(value, before[name])}
    assert changed == set(before) - {other}


def test_everything_changes_where_nothing_is_chosen() -> None:
    state = make_state()
    before = parameters_of(state)
    assert before["linear.bias"].norm() == 0
    loss_after(1, state)
    assert all(not torch.equal(value, before[name]) for name, value in parameters_of(state).items())


def test_training_by_parts_gets_as_far_as_training_at_once() -> None:
    """Weights alone reach their limit, biases alone change little more, and all together go on from there."""
    model = Logistic()
    weights = loss_after(200, make_state(model, train_only=WEIGHTS))
    biases = loss_after(100, make_state(unfrozen(model), train_only=BIASES))
    both = loss_after(400, make_state(unfrozen(model)))
    assert 0.015 < biases <= weights < 0.05
    assert both < 0.015


# Multipliers ---------------------------------------------------------------------------------------------------------


def test_a_thousandfold_gradient_learns_in_ten_steps_what_a_single_one_does_not() -> None:
    def after_ten_steps(multiplier: float) -> float:
        transforms = [ls.optim.ScaleGradients({".": multiplier})]
        return loss_after(10, make_state(lr=0.001, gradient_transforms=transforms))

    assert after_ten_steps(1000.0) < 0.5 < after_ten_steps(1.0)


def test_a_multiplier_of_zero_is_not_freezing() -> None:
    """The reference's biases got zeros, and so kept their momentum's way; frozen ones have no slot at all."""
    state = make_state(gradient_transforms=[ls.optim.ScaleGradients({BIASES: 0.0})])
    before = parameters_of(state)
    loss_after(3, state)
    after = parameters_of(state)
    assert torch.equal(after["linear.bias"], before["linear.bias"])
    assert not torch.equal(after["linear.weight"], before["linear.weight"])
    assert "linear.bias" in state.parameters
    assert "linear.bias" not in make_state(frozen=BIASES).parameters


# Steps ---------------------------------------------------------------------------------------------------------------


def test_a_step_is_an_update_however_many_towers_made_it() -> None:
    state, loader = make_state(), make_loader(batch_size=NUM_ROWS)
    report = ls.train(state, losses, loader, ls.Towers(4), until=ls.Steps(10))
    assert report is not None
    assert report.step == state.step == 10
    assert loader.position == 10 * NUM_ROWS


def test_the_losses_of_a_report_are_those_before_its_update() -> None:
    state = make_state(lr=0.5)
    batch = next(make_loader().batches(range(1), 1))
    with torch.no_grad():
        before = losses(state.model, batch)["log_loss"].item()
    report = ls.train_step(state, losses, batch)
    assert report.total == pytest.approx(before, rel=1e-6)
    with torch.no_grad():
        assert losses(state.model, batch)["log_loss"].item() < before


# Optimizers and rates as a recipe says them --------------------------------------------------------------------------


RATES: Mapping[str, tuple[str, Any]] = {
    "constant": ('optimizer.lr={kind="constant", value=0.004}', Constant(0.004)),
    "exponential": (
        'optimizer.lr={kind="exponential", initial=0.004, decay_steps=99999, factor=0.85, staircase=false}',
        ls.optim.Exponential(0.004, 99999, 0.85, staircase=False),
    ),
    "manual steps with a warm-up": (
        'optimizer.lr={kind="piecewise_constant", boundaries=[9, 42], values=[0.001, 0.006, 0.00006], warmup=true}',
        ls.optim.PiecewiseConstant((9, 42), (0.001, 0.006, 0.00006), warmup=True),
    ),
    "cosine held to its end": (
        'optimizer.lr={kind="cosine", initial=0.002, steps=99, warmup_initial=0.00006, warmup_steps=9, hold_steps=90}',
        ls.optim.Cosine(0.002, 99, warmup_steps=9, warmup_initial=0.00006, hold_steps=90),
    ),
}


@pytest.mark.parametrize(("setting", "schedule"), RATES.values(), ids=RATES)
def test_every_configured_rate_builds(setting: str, schedule: Any) -> None:
    assert configured(setting).optimizer.lr == schedule  # type: ignore[attr-defined]
    assert schedule(0) >= 0


@pytest.mark.parametrize(
    "setting",
    [
        'optimizer={kind="rmsprop", lr=0.002, momentum=0.9, alpha=0.9, eps=1.0}',
        'optimizer={kind="sgd", lr=0.002, momentum=0.9}',
        'optimizer={kind="adam", lr=0.002, epsilon_hat=true}',
    ],
)
@pytest.mark.parametrize("decay", [None, 0.2])
def test_every_configured_optimizer_builds_plain_or_averaged(setting: str, decay: float | None) -> None:
    made = configured(setting, *([f"average.decay={decay}"] if decay else []))
    assert made.average == (ls.optim.MovingAverage(decay) if decay else None)
    state = ls.TrainState(Logistic(), made.optimizer, average=made.average)
    loss_after(2, state)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "optimizer.kind=adagrat",
            'there is no such kind here.*\n.*"adagrat".*\n.*"rmsprop".*\n.*did you mean "adagrad"',
        ),
        ("optimizer={}", r"optimizer.kind in --set: the kind is missing"),
        ("optimizer.lr={}", r"optimizer.lr.kind in --set: the kind is missing"),
        ("optimizer.kind=sam", r"no such kind here.*\n.*sam.*\n.*\n.*gradients once.*coming-from.md shows \(SAM\)"),
        ("optimizer.kind=lbfgs", r"no such kind here.*\n.*lbfgs.*\n.*\n.*gradients once"),
        ("optimizer.lr.kind=reduce_on_plateau", r"no such kind here.*\n.*\n.*\n.*step alone.*\(ReduceLROnPlateau\)"),
        ('optimizer.lr={ kind = "reduce_lr_on_plateau" }', r"no such kind here.*\n.*\n.*\n.*\(ReduceLROnPlateau\)"),
        ("optimizer.lr.kind=stairs", r"there is no such kind here.*\n.*stairs.*\n.*exponential"),
    ],
)
def test_an_optimizer_or_rate_that_is_not_there_is_an_error(setting: str, message: str) -> None:
    with pytest.raises(ls.RecipeError, match=message):
        configured(setting)


def configured(*settings: str) -> Recipe:
    return with_settings(find("mnist"), settings)
