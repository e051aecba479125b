from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.losses import L2
from lockstep.training.attempt import Attempt
from lockstep.training.state import before_change


def make_state(**options: object) -> ls.TrainState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return ls.TrainState(model, ls.optim.SGD(0.1, momentum=0.9), **options)  # type: ignore[arg-type]


def everything(state: ls.TrainState) -> dict[str, torch.Tensor]:
    return {f"{s}/{n}": t.clone() for s, members in state.sections().items() for n, t in members.items()}


def attempt(state: ls.TrainState, *, gradient: float = 1.0, loss: float = 0.5, statistics: float = 2.0) -> Attempt:
    return Attempt(
        [torch.full_like(p, gradient) for p in state.parameters.values()],
        [torch.full_like(b, statistics) for b in state.model.buffers()],
        {"loss": loss},
    )


def test_apply_changes_everything_together() -> None:
    state = make_state(average=ls.optim.MovingAverage(0.9, dynamic=False))
    before = everything(state)
    outcome = state.apply(attempt(state))
    assert not outcome.skipped
    assert state.step == 1
    after = everything(state)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    weight = "parameters/0.weight"
    torch.testing.assert_close(after[weight], before[weight] - 0.1)
    torch.testing.assert_close(after["average/0.weight"], before[weight] * 0.9 + after[weight] * 0.1)
    assert math.isclose(
        outcome.gradient_norm, math.sqrt(sum(p.numel() for p in state.parameters.values())), rel_tol=1e-6
    )


@pytest.mark.parametrize("bad", [{"gradient": math.nan}, {"gradient": math.inf}, {"loss": math.nan}])
def test_an_attempt_that_is_not_finite_changes_nothing(bad: dict[str, float]) -> None:
    state = make_state(
        nonfinite="skip", average=ls.optim.MovingAverage(0.9), gradient_transforms=[ls.optim.ClipGlobalNorm(1)]
    )
    state.apply(attempt(state))
    before, values = everything(state), state.values()
    assert state.apply(attempt(state, **bad)).skipped
    assert state.values() == {**values, "num_refused": 1}
    after = everything(state)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_not_finite_is_named() -> None:
    state = make_state()
    bad = attempt(state, loss=math.nan)
    bad.gradients[2][0] = math.inf  # type: ignore[index]
    assert state.apply(bad).nonfinite == ("loss 'loss' is nan", "gradient of '1.weight'")
    assert state.step == 0


def test_a_parameter_without_gradient_stays_untouched() -> None:
    state = make_state(average=ls.optim.MovingAverage(0.5, dynamic=False))
    state.apply(attempt(state))
    before = everything(state)
    partial = attempt(state)
    state.apply(Attempt([None, *partial.gradients[1:]], partial.statistics, partial.losses))
    after = everything(state)
    for name in ("parameters/0.weight", "slots/momentum_buffer/0.weight"):
        assert torch.equal(before[name], after[name])
    assert not torch.equal(before["parameters/0.bias"], after["parameters/0.bias"])


def test_frozen_parameters_are_saved_and_not_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    state = ls.TrainState(model, ls.optim.SGD(0.1))
    assert list(state.parameters) == ["1.weight", "1.bias"]
    assert "0.weight" in state.sections()["parameters"]


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ls.InputError, match=r"no parameter to train.*\n.*Identity with 0 parameters"):
        ls.TrainState(nn.Identity(), ls.optim.SGD(0.1))


def test_load_takes_over_everything() -> None:
    one, two = make_state(average=ls.optim.MovingAverage(0.9)), make_state(average=ls.optim.MovingAverage(0.9))
    one.apply(attempt(one))
    two.load(one.sections(), one.values())
    assert two.values() == one.values()
    for name, tensor in everything(one).items():
        assert torch.equal(everything(two)[name], tensor)


def test_a_checkpoint_of_another_model_is_refused_before_anything_changes() -> None:
    state, other = make_state(), ls.TrainState(nn.Linear(3, 5), ls.optim.SGD(0.1))
    before = everything(state)
    with pytest.raises(ls.CheckpointError, match=r"does not fit.*\n.*parameters: '0.bias' is missing"):
        state.load(other.sections(), other.values())
    assert all(torch.equal(before[name], tensor) for name, tensor in everything(state).items())


def test_a_checkpoint_of_another_shape_names_both() -> None:
    state, other = ls.TrainState(nn.Linear(3, 4), ls.optim.SGD(0.1)), ls.TrainState(nn.Linear(3, 5), ls.optim.SGD(0.1))
    with pytest.raises(ls.CheckpointError, match=r"'weight' is \(5, 3\) torch.float32, not \(4, 3\) torch.float32"):
        state.load(other.sections(), other.values())


def test_each_way_to_change_a_state_is_announced_before() -> None:
    state, other = make_state(average=ls.optim.MovingAverage(0.9)), make_state(average=ls.optim.MovingAverage(0.9))
    other.apply(attempt(other))
    fresh = make_state(average=ls.optim.MovingAverage(0.9))
    changes = [
        lambda: ls.warm_start(state, {name: t + 1 for name, t in fresh.model.state_dict().items()}),
        lambda: state.apply(attempt(state)),
        lambda: state.load(other.sections(), other.values()),
        lambda: state.adopt(zip(state.published(), [t + 1 for t in other.published()], strict=True), step=7),
        lambda: state.continue_from(other),
    ]
    for change in changes:
        before, seen = everything(state), []

        def look(before: dict[str, torch.Tensor] = before, seen: list[bool] = seen) -> None:
            now = everything(state)
            seen.append(all(torch.equal(before[name], now[name]) for name in before))

        before_change.append(look)
        try:
            change()
        finally:
            before_change.remove(look)
        assert seen == [True], "announced once, before the first tensor changed"
        assert any(not torch.equal(before[name], tensor) for name, tensor in everything(state).items())
    assert state.step == other.step == 1


def test_an_average_is_asked_of_a_state_without_one() -> None:
    with pytest.raises(ls.InputError, match="keeps no moving average"):
        make_state().averaged()


def test_channels_last_moves_weights_and_all_that_is_kept_for_them() -> None:
    model = nn.Conv2d(4, 8, 3)
    state = ls.TrainState(model, ls.optim.SGD(0.1, momentum=0.9), average=ls.optim.MovingAverage(0.9))
    state.to_channels_last()
    kept = [t for members in state.sections().values() for t in members.values() if t.ndim == 4]
    assert len(kept) == 3
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in kept)


@pytest.mark.parametrize("kernel_size", [1, 3])
@pytest.mark.parametrize("groups", [1, 4], ids=["dense", "depthwise"])
def test_in_channels_last_a_gradient_has_the_strides_of_its_parameter(kernel_size: int, groups: int) -> None:
    """It is copied else, once a step and tower."""
    model = nn.Conv2d(4, 8, kernel_size, groups=groups)
    state = ls.TrainState(model, ls.optim.SGD(0.1, momentum=0.9), average=ls.optim.MovingAverage(0.9))
    state.to_channels_last()
    images = torch.rand(2, 4, 8, 8).to(memory_format=torch.channels_last)
    (gradient,) = torch.autograd.grad(model(images).square().sum(), model.weight)
    kept = [t for members in state.sections().values() for t in members.values() if t.ndim == 4]
    assert {t.stride() for t in (gradient, *kept)} == {model.weight.stride()}


def test_statistics_that_are_not_finite_are_not_committed() -> None:
    state = make_state(nonfinite="skip")
    before = everything(state)
    outcome = state.apply(dataclasses.replace(attempt(state), statistics_check=math.nan))
    assert outcome.nonfinite == ("the batch-norm statistics",)
    assert all(torch.equal(before[name], tensor) for name, tensor in everything(state).items())


def test_a_penalty_that_is_not_finite_ends_the_run_whatever_the_policy() -> None:
    state = make_state(nonfinite="skip", regularization=[L2(1e-4)])
    state.model.get_parameter("2.weight").data[0, 0] = math.nan
    with pytest.raises(ls.NonFiniteError, match=r"penalty on the parameters is not finite.*\n.*2.weight"):
        state.apply(attempt(state))
    assert state.step == 0


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ls.InputError, match="nonfinite_budget is out of range"):
        make_state(nonfinite_budget=-1)
