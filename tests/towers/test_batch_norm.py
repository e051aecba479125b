"""What batch norm does while towers run, one worker at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.towers.batch_norm import (
    BiasedVariance,
    FrozenStatistics,
    around_towers,
    keeps_batch_statistics,
    moments,
    pooled,
)
from lockstep.towers.towers import Towers
from lockstep.workers.rank import join

SHAPES = [(6, 3), (4, 3, 5), (4, 3, 2, 5), (2, 3, 2, 3, 2)]
NORMS: list[Callable[[int], nn.Module]] = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]


class OwnNorm(nn.Module):
    """A module of a user's own, with keywords and a momentum of its own."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, training=self.training, momentum=0.25)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype) * 2 + 3


def biased_variance(x: Tensor) -> Tensor:
    return x.double().transpose(0, 1).flatten(1).var(1, correction=0)


@pytest.mark.parametrize(
    "towers",
    [ls.Towers(2), ls.Towers(2, batch_norm="sync"), ls.Towers(2, batch_norm="none", variance="biased")],
    ids=["mean", "sync", "none"],
)
def test_one_worker_keeps_torchs_own_batch_norm(towers: ls.Towers) -> None:
    assert isinstance(around_towers(nn.BatchNorm1d(3), towers, ls.join()), nullcontext)


@pytest.mark.parametrize(("shape", "norm"), list(zip(SHAPES, NORMS, strict=True)), ids=str)
@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_biased_running_variance(
    shape: tuple[int, ...], norm: Callable[..., nn.Module], momentum: float | None
) -> None:
    x = random(*shape, dtype=torch.float64)
    ours, plain = (norm(3, momentum=momentum).double() for _ in range(2))
    context = around_towers(ours, ls.Towers(2, variance="biased"), ls.join())
    for time in range(2):
        mean, variance = ours.running_mean.clone(), ours.running_var.clone()
        weight = 1 / (time + 1) if momentum is None else momentum
        with context:
            output = ours(x * (time + 1))
        assert torch.equal(output, plain(x * (time + 1)))
        expected = (1 - weight) * variance + weight * biased_variance(x * (time + 1))
        torch.testing.assert_close(ours.running_var, expected, rtol=1e-13, atol=0)
        assert torch.equal(ours.running_mean, plain.running_mean)
        assert not torch.equal(mean, ours.running_mean)


def test_biased_running_variance_of_a_module_of_ones_own() -> None:
    norm, x = OwnNorm(3), random(6, 3)
    with BiasedVariance():
        norm(x)
    torch.testing.assert_close(norm.running_var, 0.75 + 0.25 * biased_variance(x).float())


def test_biased_variance_leaves_evaluation_and_norms_without_statistics_alone() -> None:
    norm, bare, x = nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3, track_running_stats=False), random(6, 3)
    with BiasedVariance():
        assert torch.equal(norm(x), x / (1 + norm.eps) ** 0.5)
        assert torch.equal(bare(x), F.batch_norm(x, None, None, bare.weight, bare.bias, training=True))
    assert torch.equal(norm.running_var, torch.ones(3))


def test_biased_variance_allows_a_norm_that_runs_twice_before_the_backward_pass() -> None:
    norm, x = nn.BatchNorm1d(3), random(6, 3).requires_grad_()
    with BiasedVariance():
        (norm(x).square() * norm(x * 2)).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_a_single_value_a_channel_is_torchs_error() -> None:
    norm = nn.BatchNorm1d(3)
    with BiasedVariance(), pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(random(1, 3))
    assert torch.equal(norm.running_var, torch.ones(3))


class Mixed(nn.Module):
    """Everything that a frozen context has to tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.own, self.still = nn.BatchNorm1d(4), OwnNorm(4), nn.BatchNorm1d(4).eval()
        self.instance, self.dropout = nn.InstanceNorm1d(4, track_running_stats=True), nn.Dropout(0.5)


def test_frozen_statistics_switch_batch_norm_alone() -> None:
    model = Mixed()
    modes = {name: module.training for name, module in model.named_modules()}
    context = around_towers(model, Towers(batch_norm="frozen"), join())
    for _ in range(2):
        with context:
            switched = {n for n, m in model.named_modules() if m.training != modes[n]}
        assert switched == {"norm", "own"}
        assert {name: module.training for name, module in model.named_modules()} == modes


def test_frozen_statistics_are_what_is_normalised_with_and_stay() -> None:
    norm, x = nn.BatchNorm1d(3), random(6, 3)
    norm.running_mean.fill_(2.0)
    norm.running_var.fill_(4.0)
    with FrozenStatistics([norm]):
        torch.testing.assert_close(norm(x), (x - 2) / (4 + norm.eps) ** 0.5)
    assert torch.equal(norm.running_mean, torch.full((3,), 2.0))
    assert norm.num_batches_tracked == 0


def test_batch_norm_is_in_training_again_after_an_error() -> None:
    norm = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="expected 2D or 3D"), FrozenStatistics([norm]):
        norm(random(2, 3, 2, 2))
    assert norm.training


def test_only_norms_with_running_statistics_of_the_batch_are_meant() -> None:
    meant = [keeps_batch_statistics(m) for m in (nn.BatchNorm2d(2), OwnNorm(2))]
    others = [nn.BatchNorm2d(2, track_running_stats=False), nn.InstanceNorm2d(2, track_running_stats=True)]
    assert meant == [True, True]
    assert not any(map(keeps_batch_statistics, [*others, nn.GroupNorm(1, 2), nn.Sequential(nn.BatchNorm2d(2))]))


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
    offset=st.floats(-1e6, 1e6),
    seed=st.integers(0, 99),
)
def test_pooled_moments_are_those_of_all_rows(sizes: list[int], offset: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(size, 3, generator=generator, dtype=torch.float64) + offset for size in sizes]
    each = [moments(part) for part in parts]
    counts = torch.tensor([[float(size)] for size in sizes], dtype=torch.float64)
    mean, variance, count = pooled(torch.stack([m for m, _ in each]), torch.stack([v for _, v in each]), counts)
    rows = torch.cat(parts)
    torch.testing.assert_close(mean, rows.mean(0), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(variance, rows.var(0, correction=0), rtol=1e-8, atol=1e-8)
    assert count == len(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moments_are_kept_in_float32_and_survive_a_large_mean(dtype: torch.dtype) -> None:
    x = (random(64, 2, 3, 3) + 300).to(dtype)
    mean, variance = moments(x)
    assert mean.dtype == variance.dtype == torch.float32
    torch.testing.assert_close(variance.double(), biased_variance(x), rtol=1e-5, atol=0)
    torch.testing.assert_close(mean.double(), x.double().mean((0, 2, 3)), rtol=1e-6, atol=0)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["x"]).square().mean()}


def statistics_after_a_step(momentum: float = 0.1, **towers: Any) -> dict[str, Tensor]:
    norm = nn.BatchNorm1d(3, momentum=momentum)
    batch = ls.Batch({"x": random(8, 3)}, position=0, batch_size=8, towers=range(2))
    ls.train_step(ls.TrainState(norm, ls.optim.SGD(0.1)), losses, batch, ls.Towers(2, **towers))
    return dict(norm.named_buffers())


def column_mean(x: Tensor) -> Tensor:
    return x.mean(0)


def column_variance(x: Tensor) -> Tensor:
    return x.var(0)


def test_each_policy_commits_the_statistics_it_names() -> None:
    x = random(8, 3)
    parts = {"first": x[:4], "last": x[4:], "sync": x}
    mean, variance = ({name: f(part) for name, part in parts.items()} for f in (column_mean, column_variance))
    for values in (mean, variance):
        values["mean"] = (values["first"] + values["last"]) / 2
    for policy, value in mean.items():
        after = statistics_after_a_step(batch_norm=policy)
        torch.testing.assert_close(after["running_mean"], 0.1 * value)
        torch.testing.assert_close(after["running_var"], 0.9 + 0.1 * variance[policy])
        assert after["num_batches_tracked"] == 1


@pytest.mark.parametrize("variance", ["unbiased", "biased"])
@pytest.mark.parametrize("policy", ["none", "frozen"])
def test_nothing_is_committed_where_nothing_is_asked_for(policy: str, variance: str) -> None:
    after = statistics_after_a_step(batch_norm=policy, variance=variance)
    assert torch.equal(after["running_mean"], torch.zeros(3))
    assert torch.equal(after["running_var"], torch.ones(3))
    assert after["num_batches_tracked"] == 0


def test_the_mean_is_the_default() -> None:
    assert ls.Towers().batch_norm == "mean"
    assert ls.Towers().variance == "unbiased"


def after_ten_steps(**towers: Any) -> tuple[nn.BatchNorm1d, Tensor]:
    """A norm that has seen the same 16 rows ten times, with a decay of 0.1."""
    x, norm = random(16, 3), nn.BatchNorm1d(3, momentum=0.9)
    assert torch.equal(norm.running_mean, torch.zeros(3))
    assert torch.equal(norm.running_var, torch.ones(3))
    loader = ls.data.Loader(ls.data.Arrays({"x": x}), batch_size=16)
    state = ls.TrainState(norm, ls.optim.SGD(0.1))
    ls.train(state, losses, loader, ls.Towers(**towers), until=ls.Steps(10))
    assert state.step == 10
    return norm, x


@pytest.mark.parametrize(("variance", "factor"), [("unbiased", 16 / 15), ("biased", 1.0)])
def test_running_statistics_arrive_at_those_of_a_batch_that_comes_again(variance: str, factor: float) -> None:
    norm, x = after_ten_steps(variance=variance)
    torch.testing.assert_close(norm.running_mean, x.mean(0))
    torch.testing.assert_close(norm.running_var, x.var(0, correction=0) * factor)


def test_without_updates_the_running_statistics_stay_at_their_start() -> None:
    norm, _ = after_ten_steps(batch_norm="none")
    assert torch.equal(norm.running_mean, torch.zeros(3))
    assert torch.equal(norm.running_var, torch.ones(3))
