"""What must not happen silently: tensors of others changed, parts that contradict each other, slips of the hand."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.data.loader import Loader
from lockstep.readers.reader import Arrays


def make_loader(batch_size: int = 4) -> Loader:
    return Loader(Arrays({"x": torch.arange(48.0).view(16, 3) / 24 - 1}), batch_size=batch_size)


def make_batch(num_towers: int = 1) -> ls.Batch:
    return next(make_loader().batches(range(num_towers), num_towers))


def make_state(model: nn.Module | None = None, **options: Any) -> ls.TrainState:
    torch.manual_seed(0)
    return ls.TrainState(model or nn.Linear(3, 1), options.pop("optimizer", ls.optim.SGD(0.1)), **options)


def squares(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["x"]).square().mean()}


@pytest.fixture(autouse=True)
def small_models_own_their_gradients_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.towers.hosting.OWNING_PAYS_FROM_ELEMENTS", 0)


# -- tensors that belong to others ------------------------------------------------------------------------------------


class Given(torch.autograd.Function):
    """A scalar whose gradient is a tensor of the caller's own."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return weight.sum() * 0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


class Parts(nn.Module):
    """A vector, two that share one gradient, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.left, self.right = (nn.Parameter(torch.ones(3)) for _ in range(3))
        self.bias = nn.Parameter(torch.tensor(1.0))
        self.constant = torch.full((3,), 4.0)

    def forward(self, x: Tensor) -> Tensor:
        given: Tensor = Given.apply(self.given, self.constant)  # type: ignore[no-untyped-call]
        return given + 2 * (self.left + self.right).sum() + self.bias


@pytest.mark.parametrize("num_towers", [1, 2])
def test_clipping_changes_no_tensor_that_is_held_elsewhere(num_towers: int) -> None:
    model = Parts()
    state = make_state(model, gradient_transforms=[ls.optim.ClipGlobalNorm(0.5)])
    for _ in range(3):
        report = ls.train_step(state, lambda m, b: {"a": m(b["x"])}, make_batch(num_towers), ls.Towers(num_towers))
        share = 1 if num_towers == 1 else 2  # the constant is every tower's whole gradient, not its share
        norm = math.sqrt(3 * (4 * share) ** 2 + 6 * 4 + 1)
        assert report.gradient_norm == pytest.approx(norm, rel=1e-6)
        assert torch.equal(model.constant, torch.full((3,), 4.0))
        assert torch.equal(model.left, model.right)


class Views(nn.Module):
    """Two parameters whose gradients are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.row, self.table = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.row.squeeze(0) + self.table.view(-1)) * x.sum()


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_transforms": [ls.optim.ClipGlobalNorm(0.1)]},
        {"regularization": [ls.losses.L2(0.1), ls.losses.L1(0.1)]},
    ],
)
@pytest.mark.parametrize("optimizer", [ls.optim.SGD(0.1, momentum=0.9), ls.optim.AdamW(0.1), ls.optim.RMSProp(0.1)])
def test_gradients_that_are_views_of_one_tensor_are_used_up_one_by_one(optimizer: Any, options: dict[str, Any]) -> None:
    trained = []
    for num_towers in (1, 2):
        state = make_state(Views(), optimizer=optimizer, **options)
        for _ in range(3):
            ls.train_step(
                state,
                lambda m, b: {"a": m(torch.ones(1)).square().mean()},
                make_batch(num_towers),
                ls.Towers(num_towers),
            )
        trained.append(torch.cat([p.detach().flatten() for p in state.model.parameters()]))
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_towers", [1, 2])
def test_gradients_that_a_hook_keeps_stay_as_they_were(num_towers: int) -> None:
    state = make_state(gradient_transforms=[ls.optim.ClipGlobalNorm(0.01)])
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(gradient: Tensor) -> None:
        kept.append((gradient.detach(), gradient.clone()))

    state.model.weight.register_hook(keep)
    ls.train_step(state, squares, make_batch(num_towers), ls.Towers(num_towers))
    assert all(torch.equal(seen, copy) for seen, copy in kept)


@pytest.mark.parametrize("num_towers", [1, 2])
def test_gradients_of_the_users_own_are_left_where_they_are(num_towers: int) -> None:
    state = make_state()
    state.model.weight.grad = torch.ones(1, 3)
    ls.train_step(state, squares, make_batch(num_towers), ls.Towers(num_towers))
    assert torch.equal(state.model.weight.grad, torch.ones(1, 3))
    assert state.model.bias.grad is None


def test_hooks_after_accumulation_are_not_called() -> None:
    state, called = make_state(), []
    state.model.weight.register_post_accumulate_grad_hook(called.append)
    ls.train_step(state, squares, make_batch())
    assert not called


# -- parts that contradict each other ---------------------------------------------------------------------------------


def test_fp16_overflow_is_refused_whatever_is_done_about_what_is_not_finite() -> None:
    state = make_state(nonfinite="off")

    def steep(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"a": (model(batch["x"]).float() * 1e35).mean()}

    before = state.model.weight.detach().clone()
    report = ls.train_step(state, steep, make_batch(), ls.Towers(1, precision="fp16"))
    assert report.skipped
    assert torch.equal(state.model.weight.detach(), before)
    assert state.loss_scale.value == 2.0**15


def test_a_loss_scale_of_one_grows_again() -> None:
    state = make_state()
    state.loss_scale.value = 1.0
    for _ in range(2000):
        state.loss_scale.grow()
    assert state.loss_scale.value == 2.0
    ls.train_step(state, squares, make_batch(), ls.Towers(1, precision="fp16"))
    assert state.loss_scale.values()["good_steps"] == 1


def test_an_embedding_that_changes_its_own_weight_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0), nn.Linear(2, 1))
    with pytest.raises(ls.InputError, match=r"max_norm changes its weight.*\n.*given: +0\n"):
        ls.train_step(make_state(model), lambda m, b: {"a": m(torch.tensor([1])).sum()}, make_batch())


@pytest.mark.parametrize("optimizer", [ls.optim.SGD(0.1, momentum=0.9), ls.optim.SGD(0.1, weight_decay=0.1)])
def test_sparse_gradients_that_cannot_be_used_are_refused_before_anything_changes(optimizer: Any) -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    state = make_state(model, optimizer=optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ls.InputError, match=r"0\.weight.*sparse gradient"):
        ls.train_step(state, lambda m, b: {"a": m(torch.tensor([1])).sum()}, make_batch())
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_another_memory_format_after_the_first_step_is_refused() -> None:
    model = nn.Conv2d(3, 4, 3)
    state = make_state(model, optimizer=ls.optim.SGD(0.1, momentum=0.9))
    loader = Loader(Arrays({"x": torch.ones(8, 3, 5, 5)}), batch_size=4)
    ls.train(state, squares, loader, until=ls.Steps(1))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with pytest.raises(ls.InputError, match=r"another memory format.*\n.*weight"):
        ls.train(state, squares, loader, until=ls.Steps(2))


# -- names between workers --------------------------------------------------------------------------------------------


def train_with_names_of_its_own() -> str:
    names = ["a", "b"] if ls.join().is_chief else ["b", "a"]
    state = make_state()
    try:
        ls.train_step(state, lambda m, b: {n: m(b["x"]).mean() for n in names}, batch_of_mine(), ls.Towers(2))
    except ls.LockstepError as error:
        return str(error)
    return ""


def batch_of_mine() -> ls.Batch:
    rank = ls.join().rank
    return next(make_loader().batches(range(rank, rank + 1), 2))


@pytest.mark.process
def test_workers_whose_losses_have_other_names_are_told(run_workers: Callable[..., list[Any]]) -> None:
    for said in run_workers(train_with_names_of_its_own, 2):
        assert "the names of losses and metrics" in said


# -- what loss functions return later ---------------------------------------------------------------------------------


def changing(*returns: Any) -> Callable[[nn.Module, ls.Batch], Any]:
    """A loss function that returns something else each time."""
    answers = iter(returns)

    def losses(model: nn.Module, batch: ls.Batch) -> Any:
        square = squares(model, batch)["square"]
        return next(answers)(square)

    return losses


def test_a_plain_number_may_stand_for_a_loss_that_does_not_apply() -> None:
    state = make_state()
    losses = changing(lambda s: {"a": s, "b": s}, lambda s: {"a": s, "b": 0.0})
    ls.train_step(state, losses, make_batch())
    assert ls.train_step(state, losses, make_batch()).losses["b"] == 0


def test_numbers_of_numpys_may_stand_for_losses_and_metrics() -> None:
    def with_numbers(model: nn.Module, batch: ls.Batch) -> Any:
        losses = {**squares(model, batch), "fixed": np.float32(0.5)}
        return losses, {"share": np.float32(0.25), "seen": np.int64(7), "of": np.array(3.0)}

    report = ls.train_step(make_state(), with_numbers, make_batch(2), ls.Towers(2))
    assert report.losses["fixed"] == 0.5
    assert report.metrics == {"share": 0.25, "seen": 7.0, "of": 3.0}


@pytest.mark.parametrize("later", [lambda s: {"a": s.expand(2)}, lambda s: None, lambda s: {"a": s + 1j}])
def test_what_is_wrong_later_is_told_as_at_first(later: Callable[[Tensor], Any]) -> None:
    state = make_state()
    losses = changing(lambda s: {"a": s}, later)
    ls.train_step(state, losses, make_batch())
    with pytest.raises(ls.InputError, match=r"is not a scalar|no named losses"):
        ls.train_step(state, losses, make_batch())


# -- frozen parts -----------------------------------------------------------------------------------------------------


def test_frozen_statistics_stay_though_the_model_is_switched_to_training() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1))
    state = make_state(model, frozen="^0", freeze_statistics=True)
    model.eval()
    model.train()
    ls.train(state, squares, make_loader(), until=ls.Steps(2))
    assert torch.equal(model[1].running_mean, torch.zeros(4))


def test_no_batch_norm_to_freeze_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with pytest.raises(ls.InputError, match="no batch norm whose statistics could be frozen"):
        make_state(model, frozen="^0", freeze_statistics=True)


def test_a_state_can_be_made_again_with_the_same_patterns() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    for _ in range(2):
        state = make_state(model, frozen="^0")
    assert state.frozen.parameters == ["0.weight", "0.bias"]


def test_parameters_that_another_state_froze_are_named() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    first, second = make_state(model), make_state(model, frozen="^0")
    ls.train_step(second, squares, make_batch())
    with pytest.raises(ls.InputError, match=r"frozen, unfrozen or added.*\n.*0.weight, 0.bias\n.*\n.*no other may"):
        ls.train_step(first, squares, make_batch())


# -- updates of one's own ---------------------------------------------------------------------------------------------


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("before", torch.zeros(1, 3))
        self.register_buffer("one", torch.zeros(1, 3))
        self.register_buffer("two", torch.ones(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(x)
        return scores


def test_values_of_an_update_are_those_it_returned() -> None:
    model = Held()
    start = model.linear.weight.detach().clone()

    def keep_and_swap(m: nn.Module, step: int) -> dict[str, Tensor]:
        return {"before": m.linear.weight.detach(), "one": m.two, "two": m.one}

    ls.train_step(make_state(model, updates=[keep_and_swap]), squares, make_batch())
    assert torch.equal(model.before, start)
    assert torch.equal(model.one, torch.ones(1, 3))
    assert torch.equal(model.two, torch.zeros(1, 3))


@pytest.mark.parametrize(
    ("returned", "message"),
    [(None, "is of the wrong type"), ({"one": torch.full((1, 3), math.nan)}, "values that are not numbers")],
)
def test_an_update_that_returns_what_cannot_be_is_refused(returned: Any, message: str) -> None:
    model = Held()
    state = make_state(model, updates=[lambda m, step: returned])
    with pytest.raises(ls.InputError, match=message):
        ls.train_step(state, squares, make_batch())
    assert state.step == 0


# -- lengths and lives ------------------------------------------------------------------------------------------------


def test_epochs_are_those_of_the_batches_that_are_trained_on() -> None:
    state = make_state(optimizer=ls.optim.SGD(ls.optim.Exponential(1.0, ls.Epochs(1), 0.5)))
    rates = [r.learning_rate for r in ls.train_steps(state, squares, make_loader(4), until=ls.Steps(5))]
    assert rates == [1, 1, 1, 1, 0.5]
    rates = [r.learning_rate for r in ls.train_steps(state, squares, make_loader(8), until=ls.Steps(7))]
    assert rates == [0.25, 0.125]


def test_a_state_that_nobody_holds_is_gone_at_once() -> None:
    state = make_state()
    ls.train(state, squares, make_loader(), until=ls.Steps(1))
    gone = weakref.ref(state)
    del state
    assert gone() is None


def test_a_copy_of_a_state_is_one_of_its_own() -> None:
    state = make_state()
    ls.train(state, squares, make_loader(), until=ls.Steps(1))
    other = copy.deepcopy(state)
    before = state.model.weight.detach().clone()
    ls.train(other, squares, make_loader(), until=ls.Steps(2))
    assert (state.step, other.step) == (1, 2)
    assert torch.equal(state.model.weight, before)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "counts.batch. returns is of the wrong type"),
        ({"square": "a"}, "the count of 'square' is of the wrong type"),
        ({"square": torch.ones(3)}, "the count of 'square' is of the wrong type"),
        ({"square": -1}, "count of 'square' is -1"),
        ({"square": math.inf}, "count of 'square' is inf"),
    ],
)
def test_what_is_no_count_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(ls.InputError, match=message):
        ls.train_step(make_state(), squares, make_batch(), counts=lambda b: returned)


def test_batches_asked_for_before_a_rollback_are_refused(tmp_path: Path) -> None:
    state, loader = make_state(), make_loader()
    ls.save(state, loader, tmp_path)

    def spoiled(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"a": squares(model, batch)["square"] * (math.nan if batch.position == 4 else 1)}

    def go_on() -> None:
        for batch in ls.batches(loader, until=ls.Steps(4)):
            try:
                ls.train_step(state, spoiled, batch)
            except ls.NonFiniteError as error:
                ls.rollback(state, loader, tmp_path, error)

    with pytest.raises(ls.InputError, match=r"set to another place.*\n.*position 8"):
        go_on()
