from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.training import preflight, step


def make_batch(num_towers: int = 1, batch_size: int = 8, position: int = 0) -> ls.Batch:
    generator = torch.Generator().manual_seed(position)
    fields = {"x": torch.randn(batch_size, 3, generator=generator), "y": torch.randn(batch_size, generator=generator)}
    return ls.Batch(fields, position=position, batch_size=batch_size, towers=range(num_towers), epoch_size=80)


def squared(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"squared": (model(batch["x"]).squeeze(1) - batch["y"]).square().mean()}


def make_state(model: nn.Module | None = None, **options: object) -> ls.TrainState:
    torch.manual_seed(0)
    return ls.TrainState(model or nn.Linear(3, 1), ls.optim.SGD(0.1), **options)  # type: ignore[arg-type]


def test_a_report_says_what_the_step_did() -> None:
    state, batch = make_state(), make_batch(position=16)
    expected = squared(state.model, batch)["squared"].item()
    report = ls.train_step(state, squared, batch)
    assert report.step == state.step == 1
    assert report.progress.position == 24
    assert report.progress.epochs == pytest.approx(24 / 80)
    assert report.total == report.losses["squared"] == pytest.approx(expected)
    assert report.smoothed["total"] == pytest.approx(expected)
    assert report.num_examples == 8
    assert report.learning_rate == 0.1
    assert not report.skipped
    assert not report.stop_requested
    assert report.examples_per_second > 0


def test_losses_and_metrics_are_means_over_towers() -> None:
    state, batch = make_state(), make_batch(4)

    def with_metric(model: nn.Module, part: ls.Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return squared(model, part), {"largest": part["x"].max()}

    expected = float(torch.stack([batch["x"][i : i + 2].max() for i in range(0, 8, 2)]).mean())
    report = ls.train_step(state, with_metric, batch, ls.Towers(4))
    assert report.metrics["largest"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda m, b: m(b["x"]).sum(), "returned no named losses"),
        (lambda m, b: {}, "returned no named losses"),
        (lambda m, b: {"a": m(b["x"])}, r"'a' is not a scalar.*\n.*shape \(8, 1\)"),
        (lambda m, b: {"a": "1.0"}, "'a' is not a scalar"),
        (lambda m, b: {"a": 1.0}, "do not depend on any trained parameter"),
        (lambda m, b: {"a": m(b["x"]).sum().detach()}, "do not depend on any trained parameter"),
    ],
)
def test_a_loss_function_that_returns_something_else_is_told(returned: object, message: str) -> None:
    with pytest.raises(ls.InputError, match=message):
        ls.train_step(make_state(), returned, make_batch())  # type: ignore[arg-type]


def test_names_of_losses_may_not_change() -> None:
    state = make_state()
    ls.train_step(state, squared, make_batch())
    with pytest.raises(ls.InputError, match=r"other names than before.*\n.*\('other',\)"):
        ls.train_step(state, lambda m, b: {"other": squared(m, b)["squared"]}, make_batch())


class Sparse(nn.Module):
    """Not an embedding, and its gradient is sparse all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(5, 2))

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.embedding(rows, self.table, sparse=True)


def test_a_sparse_gradient_of_no_embedding_is_refused_by_name() -> None:
    with pytest.raises(ls.InputError, match=r"sparse gradient.*\n.*table"):
        ls.train_step(make_state(Sparse()), lambda m, b: {"a": m(torch.tensor([1, 2])).sum()}, make_batch())


class TwoPaths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if x[0, 0] > 0 else self.right(x)


def test_a_gradient_from_some_towers_is_the_sum_of_those_over_all(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = TwoPaths()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = ls.TrainState(model, ls.optim.SGD(1.0, weight_decay=0.5))
    batch = make_batch(2)
    batch["x"][0, 0], batch["x"][4, 0] = 1.0, -1.0
    half = squared(
        model.left, ls.Batch({k: v[:4] for k, v in batch.items()}, position=0, batch_size=4, towers=range(1))
    )
    (expected,) = torch.autograd.grad(half["squared"] / 2, [model.left.weight])
    ls.train_step(state, squared, batch, ls.Towers(2))
    torch.testing.assert_close(model.left.weight, before["left.weight"] * 0.5 - expected)
    assert torch.equal(model.never.weight, before["never.weight"])
    assert "no tower has a gradient for never.weight, never.bias" in caplog.text


def told_of_missing() -> list[str]:
    """What a worker logs while the steps take one path and the other in turn."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep").addHandler(handler)

    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        path = model.right if batch.position // 8 % 2 else model.left
        return squared(path, batch)  # type: ignore[arg-type]

    loader = ls.data.Loader(ls.data.Arrays(dict(make_batch())), batch_size=8)
    ls.train(make_state(TwoPaths()), losses, loader, ls.Towers(2), until=ls.Steps(5))
    logging.getLogger("lockstep").removeHandler(handler)
    return [line for line in told if line.startswith("no tower")]


def test_they_are_told_once_also_where_workers_regroup(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, before = make_state(TwoPaths()), ls.join()
    ls.train_step(state, lambda model, batch: squared(model.left, batch), make_batch())
    monkeypatch.setattr(step, "join", lambda: replace(before))
    ls.train_step(state, lambda model, batch: squared(model.left, batch), make_batch())
    assert caplog.text.count("no tower has a gradient for right.weight") == 1


@pytest.mark.process
def test_of_parameters_that_miss_gradients_the_chief_tells_once(run_workers: Callable[..., list[Any]]) -> None:
    chiefs = [
        "no tower has a gradient for right.weight, right.bias, never.weight, never.bias: left untouched",
        "no tower has a gradient for left.weight, left.bias: left untouched",
    ]
    assert run_workers(told_of_missing, 2) == [chiefs, []]


def never_used(in_update: bool, num_towers: int = 2) -> tuple[list[float], list[float]]:
    """A weight that only a penalty is on, after two updates, and the penalties reported."""
    torch.manual_seed(0)
    model, penalty = TwoPaths(), ls.losses.L2(0.5, "never.weight")
    first = model.never.weight.detach().clone()
    state = ls.TrainState(model, ls.optim.SGD(0.1, momentum=0.9), regularization=[penalty] if in_update else [])

    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return squared(model, batch) if in_update else {**squared(model, batch), "l2": penalty(model)}

    loader = ls.data.Loader(ls.data.Arrays(dict(make_batch())), batch_size=8)
    reports = list(ls.train_steps(state, losses, loader, ls.Towers(num_towers), until=ls.Steps(2)))
    # The buffer of the momentum is 0.5 w, then 0.9 * 0.5 w + 0.5 * 0.95 w.
    torch.testing.assert_close(model.never.weight.detach(), first * (1 - 0.05 - 0.045 - 0.0475))
    return model.never.weight.flatten().tolist(), [report.losses["l2"] for report in reports]


@pytest.mark.process
def test_a_parameter_without_a_gradient_follows_its_penalty(
    caplog: pytest.LogCaptureFixture, run_workers: Callable[..., list[Any]]
) -> None:
    """As in TensorFlow, and as where the loss function returns the penalty."""
    weight, penalties = never_used(in_update=True)
    assert "no tower has a gradient for never.bias: left untouched" in caplog.text
    assert "no tower has a gradient for never.weight: moved by the penalty alone" in caplog.text
    assert penalties[1] < penalties[0]
    expected, of_the_loss = never_used(in_update=False)
    assert weight == expected
    assert penalties == pytest.approx(of_the_loss)
    assert run_workers(never_used, 2, True) == [(weight, penalties)] * 2


def test_an_expanded_gradient_is_applied_element_by_element() -> None:
    model = nn.Linear(3, 1)
    before = model.weight.detach().clone()
    ls.train_step(make_state(model), lambda m, b: {"sum": m.weight.sum()}, make_batch())
    torch.testing.assert_close(model.weight, before - 0.1)


def test_gradients_that_share_storage_are_summed_right() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    state = make_state(Twice(), gradient_transforms=[ls.optim.ClipGlobalNorm(1.0)])
    ls.train_step(state, lambda m, b: {"sum": (m.a + m.b).sum()}, make_batch(4), ls.Towers(4))
    torch.testing.assert_close(state.model.a, torch.full((2,), -0.05))
    torch.testing.assert_close(state.model.b, torch.full((2,), -0.05))


@pytest.mark.parametrize("error", [None, ValueError("of mine")])
def test_training_leaves_the_callers_random_streams_alone(error: ValueError | None) -> None:
    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        np.random.randn()
        random.random()
        if error:
            raise error
        return squared(model, batch)

    def draw() -> list[float]:
        return [torch.rand(1).item(), np.random.rand(), random.random()]

    def drawn(between: Callable[[], object]) -> list[float]:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        between()
        return draw()

    state = make_state(nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1)))

    def step() -> None:
        with pytest.raises(ValueError, match="of mine") if error else nullcontext():
            ls.train_step(state, losses, make_batch())

    assert drawn(step) == drawn(lambda: None)


def test_dropout_is_a_function_of_seed_position_and_tower() -> None:
    masks: list[Tensor] = []

    def record(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        masks.append(F.dropout(torch.ones(64), 0.5))
        return squared(model, batch)

    for position, towers in ((0, 1), (0, 2), (8, 1)):
        ls.train_step(make_state(), record, make_batch(towers, position=position), ls.Towers(towers))
    first, tower_0, tower_1, later = masks
    assert torch.equal(first, tower_0)
    assert not torch.equal(tower_0, tower_1)
    assert not torch.equal(first, later)


def test_another_states_model_keeps_its_buffers_and_parameters() -> None:
    other = make_state(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
    before = {name: value.clone() for name, value in other.model.state_dict().items()}
    state = make_state()

    def through_both(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"both": (model(batch["x"]) - other.model(batch["x"])).square().mean()}

    ls.train_step(state, through_both, make_batch(2), ls.Towers(2))
    assert all(torch.equal(value, before[name]) for name, value in other.model.state_dict().items())


def test_bf16_keeps_parameters_and_gradients_in_float32() -> None:
    dtypes: list[torch.dtype] = []

    def record(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        output = model(batch["x"])
        dtypes.append(output.dtype)
        return {"mean": output.float().mean()}

    state = make_state()
    ls.train_step(state, record, make_batch(), ls.Towers(precision="bf16"))
    assert dtypes == [torch.bfloat16]
    assert {t.dtype for t in state.parameters.values()} == {torch.float32}


def test_a_batch_for_other_towers_is_refused() -> None:
    with pytest.raises(ls.InputError, match=r"cut for other towers.*\n.*\[0, 1\]\n.*\[0, 1, 2, 3\]: worker 0's of 4"):
        ls.train_step(make_state(), squared, make_batch(2), ls.Towers(4))


def spoiled(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    """Not a number for the last tower of four alone."""
    factor = math.nan if batch.towers.stop == 4 else 1.0
    return {"squared": squared(model, batch)["squared"] * factor}


def test_stop_names_the_loss_the_parameter_and_the_tower() -> None:
    state = make_state()
    nonfinite = r"loss 'squared' is nan, gradient of 'weight', gradient of 'bias'"
    message = rf"after step 0 is not finite.*\n.*{nonfinite}; from tower 3 on worker 0 \(positions 22 to 23"
    with pytest.raises(ls.NonFiniteError, match=message):
        ls.train_step(state, spoiled, make_batch(4, position=16), ls.Towers(4))
    assert state.step == 0


def test_a_skip_is_said(caplog: pytest.LogCaptureFixture) -> None:
    report = ls.train_step(make_state(nonfinite="skip"), spoiled, make_batch(4), ls.Towers(4))
    assert report.skipped
    assert "after step 0 is not finite, and was skipped: loss 'squared' is nan" in caplog.text


def test_a_gradient_that_is_not_finite_is_traced_to_its_towers() -> None:
    def root(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"root": model.weight.sum().mul(0.0 if batch.towers.start == 2 else 1.0).abs().sqrt()}

    with pytest.raises(ls.NonFiniteError, match="gradient of 'weight'; from tower 2 on worker 0"):
        ls.train_step(make_state(), root, make_batch(3, batch_size=6), ls.Towers(3))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: m.weight.data.fill_(float("nan")), r"'weight' cannot be trained.*\n.*not finite"),
        (lambda m: m.to("meta"), r"'weight' cannot be trained.*\n.*on the meta device"),
    ],
)
def test_a_model_without_values_is_refused_before_step_1(spoil: object, message: str) -> None:
    model = nn.Linear(3, 1)
    spoil(model)  # type: ignore[operator]
    with pytest.raises(ls.InputError, match=message):
        ls.train_step(make_state(model), squared, make_batch())


def test_a_lazy_parameter_is_refused_before_step_1() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(1))
    with pytest.raises(ls.InputError, match=r"'1.weight' cannot be trained.*\n.*not initialised"):
        ls.train_step(make_state(model), squared, make_batch())


def test_the_clock_starts_with_each_stretch_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("lockstep.training.step.time", SimpleNamespace(perf_counter=lambda: clock.now))
    state = make_state()
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(8, 3), "y": torch.ones(8)}), batch_size=4)
    for _ in range(2):
        seconds = []
        for report in ls.train_steps(state, squared, loader, until=ls.Hours(1)):
            seconds.append(report.progress.elapsed_seconds)
            clock.now += 1500.0
        assert seconds == [0.0, 1500.0, 3000.0, 4500.0]


@pytest.mark.parametrize("kind", [None, "mps"])
def test_an_accelerator_that_no_worker_uses_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str | None
) -> None:
    monkeypatch.setattr("lockstep.training.state._states", WeakSet())
    monkeypatch.setattr(preflight, "unused_kind", lambda: kind)
    caplog.set_level(logging.INFO, "lockstep")
    step.bind(ls.TrainState(nn.Linear(1, 1), ls.optim.SGD(0.1)))
    told = [line for line in caplog.messages if line.startswith("no worker uses")]
    assert told == (["no worker uses the accelerator here (mps): not every part of a step runs on it"] if kind else [])


def test_a_gpu_that_torch_does_not_see_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lockstep.training.state._states", WeakSet())
    monkeypatch.setattr(preflight, "unusable_gpu", lambda: "torch is built without CUDA")
    caplog.set_level(logging.INFO, "lockstep")
    step.bind(ls.TrainState(nn.Linear(1, 1), ls.optim.SGD(0.1)))
    assert "torch does not see the GPU of this machine: torch is built without CUDA" in caplog.messages
