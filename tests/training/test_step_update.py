"""The update as a whole: losses that are counted, transforms, frozen parameters, sparse gradients, loss scale."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.data.loader import Loader
from lockstep.losses import L1, L2
from lockstep.optim.schedules import Constant
from lockstep.readers.reader import Arrays
from lockstep.training.attempt import LossAverage

BATCH_SIZE = 32


def make_loader(batch_size: int = BATCH_SIZE) -> Loader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 6, generator=generator, dtype=torch.float64)
    things = torch.randint(0, 4, (64,), generator=generator)
    return Loader(Arrays({"x": x, "things": things}), batch_size=batch_size, seed=5)


def make_model() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def values_of(state: ls.TrainState) -> list[float]:
    return torch.cat([p.detach().flatten() for p in state.model.parameters()]).tolist()


def squares(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["x"]).square().mean()}


def train(state: ls.TrainState, towers: ls.Towers | None = None, steps: int = 3, **options: Any) -> ls.StepReport:
    last = ls.train(state, squares, make_loader(), towers, until=ls.Steps(steps), **options)
    assert last is not None
    return last


# -- losses that are sums over what is counted ------------------------------------------------------------------------


def per_thing(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    """A sum over things, of which an example has none to three, and a mean over examples."""
    output = model(batch["x"])[:, 0]
    return {"things": (output.square() * batch["things"]).sum(), "size": output.abs().mean()}


def num_things(batch: ls.Batch) -> dict[str, Tensor]:
    return {"things": batch["things"].sum()}


def trained_by_count(num_towers: int) -> tuple[list[float], dict[str, float]]:
    state = ls.TrainState(make_model(), ls.optim.SGD(0.1, momentum=0.9))
    last = ls.train(state, per_thing, make_loader(), ls.Towers(num_towers), counts=num_things, until=ls.Steps(4))
    assert last is not None
    return values_of(state), dict(last.losses)


@pytest.mark.process
def test_a_counted_loss_weighs_each_thing_alike_however_the_batch_is_cut(run_workers: Callable[..., list[Any]]) -> None:
    joined, losses = trained_by_count(1)
    for values, reported in [
        trained_by_count(4),
        *run_workers(trained_by_count, 2, 4),
        *run_workers(trained_by_count, 2, 2),
    ]:
        torch.testing.assert_close(values, joined, rtol=1e-12, atol=1e-14)
        assert reported == pytest.approx(losses, rel=1e-12)


def test_a_counted_loss_is_that_of_the_whole_batch() -> None:
    model, loader = make_model(), make_loader()
    batch = next(loader.batches(range(4), 4))
    output = model(batch["x"])[:, 0]
    wanted = ((output.square() * batch["things"]).sum() / batch["things"].sum()).item()
    state = ls.TrainState(model, ls.optim.SGD(0.1))
    report = ls.train_step(state, per_thing, batch, ls.Towers(4), counts=num_things)
    assert report.losses["things"] == pytest.approx(wanted, rel=1e-12)


def test_nothing_to_count_is_a_loss_of_zero() -> None:
    state = ls.TrainState(make_model(), ls.optim.SGD(0.1))
    batch = next(make_loader().batches(range(2), 2))
    batch["things"] = torch.zeros_like(batch["things"])
    report = ls.train_step(state, per_thing, batch, ls.Towers(2), counts=num_things)
    assert report.losses["things"] == 0
    assert math.isfinite(report.gradient_norm)


def test_counting_what_is_no_loss_is_refused() -> None:
    state = ls.TrainState(make_model(), ls.optim.SGD(0.1))
    batch = next(make_loader().batches(range(1), 1))
    with pytest.raises(ls.InputError, match=r"counted that is no loss.*\n.*counts of boxes; losses \('square',\)"):
        ls.train_step(state, squares, batch, counts=lambda b: {"boxes": 3})


# -- transforms, on the towers and on their mean ----------------------------------------------------------------------


def test_transforms_of_towers_see_each_towers_own_gradients() -> None:
    """Two towers whose gradients are each clipped to norm 1, then averaged: what SyncReplicas did."""
    loader, model = make_loader(), make_model()
    batch = next(loader.batches(range(2), 2))
    parameters = list(model.parameters())
    mean = [torch.zeros_like(p) for p in parameters]
    for rows in (batch["x"][:16], batch["x"][16:]):
        gradients = torch.autograd.grad((100 * model(rows)).square().mean(), parameters)
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        assert norm > 1
        for total, gradient in zip(mean, gradients, strict=True):
            total += gradient / norm / 2
    wanted = [p.detach() - 0.1 * g for p, g in zip(parameters, mean, strict=True)]
    state = ls.TrainState(model, ls.optim.SGD(0.1), tower_gradient_transforms=[ls.optim.ClipGlobalNorm(1.0)])
    ls.train_step(state, lambda m, b: {"a": (100 * m(b["x"])).square().mean()}, batch, ls.Towers(2))
    for found, expected in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=1e-14)


def train_with_tower_clip(num_towers: int) -> list[float]:
    state = ls.TrainState(
        make_model(), ls.optim.SGD(0.1, momentum=0.9), tower_gradient_transforms=[ls.optim.ClipNorm(0.01)]
    )
    train(state, ls.Towers(num_towers))
    return values_of(state)


@pytest.mark.process
def test_transforms_of_towers_give_the_same_bits_on_any_number_of_workers(
    run_workers: Callable[..., list[Any]],
) -> None:
    assert run_workers(train_with_tower_clip, 2, 4) == [train_with_tower_clip(4)] * 2


def test_a_transform_of_towers_cannot_hide_what_is_not_finite() -> None:
    state = ls.TrainState(
        make_model(), ls.optim.SGD(0.1), tower_gradient_transforms=[ls.optim.ClipValue(1.0)], nonfinite="skip"
    )
    batch = next(make_loader().batches(range(2), 2))
    batch["x"][3] = math.inf
    assert ls.train_step(state, squares, batch, ls.Towers(2)).skipped


def test_a_transform_of_ones_own_is_a_function() -> None:
    seen: list[tuple[int, float]] = []
    state = ls.TrainState(
        make_model(), ls.optim.SGD(0.1), gradient_transforms=[lambda g, step: seen.append((step, g.norm))]
    )
    last = train(state, steps=2)
    assert [step for step, _ in seen] == [0, 1]
    assert seen[1][1] == last.gradient_norm


def test_joined_towers_have_no_gradients_of_their_own() -> None:
    state = ls.TrainState(make_model(), ls.optim.SGD(0.1), tower_gradient_transforms=[ls.optim.ClipNorm(1.0)])
    with pytest.raises(ls.InputError, match=r"no gradients of their own.*\n.*sync"):
        train(state, ls.Towers(2, batch_norm="sync"))


def test_synchronised_batch_norm_cannot_be_exact() -> None:
    state = ls.TrainState(make_model(), ls.optim.SGD(0.1))
    with pytest.raises(ls.InputError, match=r"Synchronised batch norm cannot be exact.*\n.*exact=True"):
        ls.train(
            state, squares, make_loader(), ls.Towers(2, batch_norm="sync"), ls.AllReduce(exact=True), until=ls.Steps(1)
        )


# -- what is trained --------------------------------------------------------------------------------------------------


def test_what_is_frozen_has_no_slot_no_average_and_no_part_in_the_norm() -> None:
    state = ls.TrainState(
        make_model(), ls.optim.SGD(0.1, momentum=0.9), frozen=r"^0\.", average=ls.optim.MovingAverage(0.9)
    )
    before = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    train(state)
    assert list(state.parameters) == ["2.weight", "2.bias"]
    assert not state.model.get_parameter("0.weight").requires_grad
    assert list(state.sections()["slots"]) == ["momentum_buffer/2.weight", "momentum_buffer/2.bias"]
    assert list(state.averaged()) == ["2.weight", "2.bias"]
    assert torch.equal(before["0.weight"], state.model.get_parameter("0.weight"))
    assert not torch.equal(before["2.weight"], state.model.get_parameter("2.weight"))


def test_train_only_leaves_the_rest_alone() -> None:
    state = ls.TrainState(make_model(), ls.optim.SGD(0.1), train_only=["bias$"], frozen="2.bias")
    assert list(state.parameters) == ["0.bias"]
    assert state.frozen.parameters == ["0.weight", "2.weight", "2.bias"]


@pytest.mark.parametrize("freeze_statistics", [False, True])
def test_the_statistics_of_frozen_batch_norm_move_unless_told_otherwise(freeze_statistics: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    state = ls.TrainState(model, ls.optim.SGD(0.1), frozen=["^1", "^0"], freeze_statistics=freeze_statistics)
    train(state)
    assert torch.equal(model[1].running_mean, torch.zeros(4, dtype=torch.float64)) == freeze_statistics
    assert model[1].training != freeze_statistics


@pytest.mark.parametrize("field", ["frozen", "train_only"])
def test_a_pattern_that_matches_nothing_is_refused(field: str) -> None:
    with pytest.raises(ls.InputError, match=rf"pattern of {field} matches no parameter.*\n.*'conv'.*\n.*'0.weight'"):
        ls.TrainState(make_model(), ls.optim.SGD(0.1), **{field: "conv"})


def test_freezing_everything_is_refused() -> None:
    with pytest.raises(ls.InputError, match="no parameter to train"):
        ls.TrainState(make_model(), ls.optim.SGD(0.1), frozen=".")


def test_optimizers_by_name_have_rates_of_their_own() -> None:
    optimizer = {r"^0\.": ls.optim.SGD(Constant(0.5)), r"^2\.": ls.optim.Adam(0.25)}
    last = train(ls.TrainState(make_model(), optimizer), steps=1)
    assert last.learning_rates == {r"^0\.": 0.5, r"^2\.": 0.25}
    assert last.learning_rate == 0.5


def test_the_log_says_what_the_patterns_have_matched(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lockstep")
    state = ls.TrainState(
        make_model(),
        {"weight$": ls.optim.SGD(0.1, weight_decay={"2.weight": 1e-4}), "bias$": ls.optim.SGD(0.2)},
        frozen="0.bias",
        gradient_transforms=[ls.optim.ScaleGradients({"bias$": 2.0})],
        regularization=[L2(1e-4, "0.weight")],
    )
    train(state, steps=1)
    said = caplog.text
    assert "trained: 3 parameters, 57 numbers" in said
    assert "frozen: 1 parameter (0.bias)" in said
    assert "optimizer 'bias$' = {kind = \"sgd\", lr = 0.2}: 1 parameter (2.bias)" in said
    assert "SGD weight_decay '2.weight' = 0.0001: 1 parameter (2.weight)" in said
    assert "ScaleGradients multipliers 'bias$' = 2.0: 1 parameter (2.bias)" in said
    assert "L2 0.0001: 1 parameter (0.weight)" in said


def test_the_log_says_what_epochs_mean(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lockstep")
    schedule = ls.optim.ScaledByBatch(ls.optim.Cosine(0.1, ls.Epochs(4)), base_batch_size=16)
    last = train(ls.TrainState(make_model(), ls.optim.SGD(schedule)), steps=1)
    assert last.learning_rate == pytest.approx(0.2)
    assert "8 steps" in caplog.text
    assert "multiplied by 2 for batches of 32" in caplog.text


# -- penalties and updates of one's own -------------------------------------------------------------------------------


def test_a_penalty_is_counted_once_and_is_part_of_the_total() -> None:
    def one_step(num_towers: int, penalty: bool) -> tuple[list[float], ls.StepReport]:
        state = ls.TrainState(make_model(), ls.optim.SGD(0.1), regularization=[L2(0.5), L1(0.01)] if penalty else [])
        batch = next(make_loader().batches(range(num_towers), num_towers))
        return values_of(state), ls.train_step(state, squares, batch, ls.Towers(num_towers))

    weights = [p for p in make_model().parameters() if p.ndim == 2]
    l2 = 0.25 * sum(w.square().sum().item() for w in weights)
    for num_towers in (1, 4):
        _, report = one_step(num_towers, penalty=True)
        assert report.losses["l2"] == pytest.approx(l2, rel=1e-12)
        assert report.total == pytest.approx(sum(report.losses.values()))
    assert one_step(4, penalty=False)[1].gradient_norm != report.gradient_norm


def test_a_penalty_before_clipping_is_not_an_optimizers_weight_decay() -> None:
    clip = [ls.optim.ClipGlobalNorm(1e-6)]
    as_loss = ls.TrainState(make_model(), ls.optim.SGD(0.1), gradient_transforms=clip, regularization=[L2(0.5, ".")])
    as_decay = ls.TrainState(make_model(), ls.optim.SGD(0.1, weight_decay=0.5), gradient_transforms=clip)
    start = torch.tensor(values_of(as_loss), dtype=torch.float64)
    losses = train(as_loss, steps=1).losses, train(as_decay, steps=1).losses
    assert (torch.tensor(values_of(as_loss), dtype=torch.float64) - start).norm() == pytest.approx(1e-7, rel=1e-3)
    torch.testing.assert_close(
        torch.tensor(values_of(as_decay), dtype=torch.float64), start * 0.95, rtol=1e-4, atol=1e-5
    )
    assert [set(each) for each in losses] == [{"square", "l2"}, {"square"}]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1).double()
        self.register_buffer("target", torch.zeros(1, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def follow(model: nn.Module, step: int) -> dict[str, Tensor]:
    return {"target": model.get_buffer("target") + model.get_parameter("linear.weight") + step}


def test_updates_of_ones_own_are_committed_with_the_rest() -> None:
    model = Counting()
    state = ls.TrainState(model, ls.optim.SGD(0.1), updates=[follow], nonfinite="skip")
    first = model.linear.weight.detach().clone()
    batch = next(make_loader().batches(range(1), 1))
    ls.train_step(state, squares, batch)
    assert torch.equal(model.get_buffer("target"), first)
    batch["x"][0] = math.nan
    assert ls.train_step(state, squares, batch).skipped
    assert torch.equal(model.get_buffer("target"), first)


@pytest.mark.parametrize(
    "change", [{"nothing": torch.zeros(1)}, {"target": torch.zeros(3)}, {"linear.weight": torch.zeros(1, 6)}]
)
def test_an_update_of_what_is_no_buffer_is_refused_before_anything_changes(change: dict[str, Tensor]) -> None:
    state = ls.TrainState(Counting(), ls.optim.SGD(0.1), updates=[lambda model, step: change])
    before = values_of(state)
    with pytest.raises(ls.InputError, match=r"update of your own cannot change.*\n.*\n.*'target' \(1, 6\)"):
        train(state, steps=1)
    assert values_of(state) == before


# -- sparse gradients -------------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.table = nn.Embedding(10, 3, sparse=sparse).double()
            self.out = nn.Linear(3, 1).double()

    def forward(self, things: Tensor) -> Tensor:
        return self.out(self.table(things))


def about_words(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": (model(batch["things"]) - 1).square().mean()}


def train_words(sparse: bool, optimizer: Any, num_towers: int) -> list[float]:
    state = ls.TrainState(
        Words(sparse),
        optimizer,
        gradient_transforms=[
            ls.optim.ScaleGradients({"table": 3.0}),
            ls.optim.ClipNorm(0.1),
            ls.optim.ClipGlobalNorm(0.1),
        ],
    )
    ls.train(state, about_words, make_loader(), ls.Towers(num_towers), until=ls.Steps(4))
    return values_of(state)


@pytest.mark.process
@pytest.mark.parametrize("optimizer", [ls.optim.SGD(0.1), ls.optim.Adagrad(0.1)])
def test_sparse_gradients_update_as_dense_ones_do(optimizer: Any, run_workers: Callable[..., list[Any]]) -> None:
    dense = train_words(False, optimizer, 4)
    alone = train_words(True, optimizer, 4)
    torch.testing.assert_close(alone, dense, rtol=1e-12, atol=1e-14)
    if isinstance(optimizer, ls.optim.SGD):
        assert run_workers(train_words, 2, True, optimizer, 4) == [alone] * 2


def test_an_optimizer_that_cannot_take_sparse_gradients_says_so() -> None:
    with pytest.raises(
        ls.InputError, match=r"Adam cannot update 'table.weight' from a sparse gradient.*\n.*\n.*Adagrad"
    ):
        train_words(True, ls.optim.Adam(0.1), 1)


def test_a_penalty_on_a_parameter_with_sparse_gradients_is_refused() -> None:
    state = ls.TrainState(Words(True), ls.optim.SGD(0.1), regularization=[L2(0.1)])
    batch = next(make_loader().batches(range(1), 1))
    with pytest.raises(ls.InputError, match=r"sparse.*\n.*table.weight"):
        ls.train_step(state, about_words, batch)


# -- precision, accumulation, compilation -----------------------------------------------------------------------------


def test_towers_on_one_worker_are_gradient_accumulation() -> None:
    """Four towers of 8 examples, one after the other, make the update of one of 32."""
    states = [ls.TrainState(make_model(), ls.optim.SGD(0.1, momentum=0.9)) for _ in range(2)]
    for state, num_towers in zip(states, (1, 4), strict=True):
        train(state, ls.Towers(num_towers))
    torch.testing.assert_close(values_of(states[0]), values_of(states[1]), rtol=1e-12, atol=1e-14)


class Steep(torch.autograd.Function):
    """The identity, with gradients that overflow fp16's range at a large loss scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return (gradients[0] * 64).half().float()


def test_fp16_overflow_is_counted_and_halves_the_scale() -> None:
    model = nn.Linear(6, 1, bias=False)
    state = ls.TrainState(model, ls.optim.SGD(0.1))
    batch = next(make_loader().batches(range(2), 2))
    batch["x"] = batch["x"].float()

    def steep(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"a": Steep.apply(model.weight).sum()}  # type: ignore[no-untyped-call]

    before = model.weight.detach().clone()
    reports = [ls.train_step(state, steep, batch, ls.Towers(2, precision="fp16")) for _ in range(12)]
    skipped = [report.skipped for report in reports]
    assert skipped == sorted(skipped, reverse=True)
    assert 0 < sum(skipped) < 12
    assert state.loss_scale.value == 2.0 ** (16 - sum(skipped))
    assert state.num_skipped == 0
    assert state.step == 12 - sum(skipped)
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * 64 * state.step)


def test_fp16_trains_as_fp32_does_within_its_precision() -> None:
    def trained(precision: Any) -> Tensor:
        model = make_model().float()
        state = ls.TrainState(
            model, ls.optim.SGD(0.1, momentum=0.9), gradient_transforms=[ls.optim.ClipGlobalNorm(0.1)]
        )
        loader = make_loader()
        for batch in ls.batches(loader, ls.Towers(2, precision=precision), until=ls.Steps(5)):
            batch["x"] = batch["x"].float()
            ls.train_step(state, squares, batch, ls.Towers(2, precision=precision))
        assert state.step == 5
        return torch.tensor(values_of(state))

    torch.testing.assert_close(trained("fp16"), trained("fp32"), rtol=2e-2, atol=2e-3)


def test_the_scale_grows_after_many_good_updates_and_is_saved() -> None:
    state = ls.TrainState(nn.Linear(6, 1), ls.optim.SGD(0.1))
    for _ in range(2000):
        state.loss_scale.grow()
    assert state.loss_scale.value == 2.0**17
    other = ls.TrainState(nn.Linear(6, 1), ls.optim.SGD(0.1))
    other.load(state.sections(), state.values())
    assert other.values() == state.values()


# -- averages of losses -----------------------------------------------------------------------------------------------


def test_smoothed_losses_with_and_without_correction() -> None:
    corrected = ls.TrainState(make_model(), ls.optim.SGD(0.1))
    plain = ls.TrainState(make_model(), ls.optim.SGD(0.1), loss_average=LossAverage(0.9, bias_correction=False))
    first, second = train(corrected, steps=1), train(plain, steps=1)
    assert first.smoothed["square"] == pytest.approx(first.total)
    assert second.smoothed["total"] == pytest.approx(0.1 * second.total)
