"""Buffers of every kind: what a step may change, and what it may not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls


class Kept(nn.Module):
    """A mask of infinities, constants of several dtypes, an expanded buffer and a kept activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1), persistent=False)
        self.register_buffer("table", torch.linspace(0.1, 1000, 1000))
        self.register_buffer("small", torch.full((3,), 6e-8, dtype=torch.float16))
        self.register_buffer("wide", torch.ones(1).expand(4))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.linear(x)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.features


class Replaced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x)


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(2))
        return self.linear(x)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["x"]).square().mean()}


def make_batch(num_towers: int) -> ls.Batch:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    return ls.Batch({"x": x}, position=0, batch_size=6, towers=range(num_towers))


@pytest.mark.parametrize("num_towers", [1, 2, 3])
def test_what_no_tower_changes_keeps_its_bits(num_towers: int) -> None:
    model = Kept()
    before = {name: value.clone() for name, value in model.named_buffers()}
    state = ls.TrainState(model, ls.optim.SGD(0.1))
    batch = make_batch(num_towers)
    ls.train_step(state, losses, batch, ls.Towers(num_towers))
    for name in ("mask", "table", "small", "wide"):
        assert torch.equal(dict(model.named_buffers())[name], before[name]), name
    torch.testing.assert_close(model.mean, 0.1 * batch["x"].mean(0))


def test_an_expanded_buffer_is_saved_and_taken_up_again(tmp_path: Path) -> None:
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(12, 3)}), batch_size=6)
    saved, resumed, next_stage = (ls.TrainState(Kept(), ls.optim.SGD(0.1)) for _ in range(3))
    with torch.no_grad():
        saved.model.wide[0] = 2.0
    ls.save(saved, loader, tmp_path)
    ls.resume(resumed, loader, tmp_path)
    next_stage.continue_from(resumed)
    assert resumed.model.wide.tolist() == next_stage.model.wide.tolist() == [2.0] * 4


class Counting(nn.Module):
    """Counts its passes in a buffer of some kind, in which every bit counts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("constant", torch.tensor([0.0, 1.5, 200.0]).to(dtype))
        self.register_buffer("count", torch.zeros(2).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        self.count.copy_((self.count.float() + 1).to(self.count.dtype))
        result: Tensor = self.linear(x)
        return result


UNUSUAL = [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]


def train_counting(dtype: torch.dtype, folder: Path | None = None, transport: Any = None) -> list[list[float]]:
    """The buffers after two steps of three towers; with a folder, saved and taken up in it by another state."""
    torch.manual_seed(0)
    state = ls.TrainState(Counting(dtype), ls.optim.SGD(0.1), average=ls.optim.MovingAverage(0.9, statistics=True))
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(12, 3)}), batch_size=6)
    ls.train(state, losses, loader, ls.Towers(3), ls.AllReduce(transport), until=ls.Steps(2))
    if folder:
        ls.save(state, loader, folder)
        state = ls.TrainState(Counting(dtype), ls.optim.SGD(0.1), average=ls.optim.MovingAverage(0.9, statistics=True))
        ls.resume(state, loader, folder)
    return [state.model.constant.float().tolist(), state.model.count.float().tolist()]


@pytest.mark.process
@pytest.mark.parametrize("dtype", UNUSUAL, ids=str)
def test_buffers_of_unusual_kinds_come_from_the_first_tower(
    dtype: torch.dtype, tmp_path: Path, run_workers: Callable[..., list[Any]]
) -> None:
    expected = [torch.tensor([0.0, 1.5, 200.0]).to(dtype).float().tolist(), [2.0, 2.0]]
    assert train_counting(dtype) == train_counting(dtype, tmp_path) == expected
    if dtype in (torch.uint16, torch.float8_e5m2):
        assert run_workers(train_counting, 2, dtype) == [expected] * 2
    if dtype in (torch.int16, torch.float8_e5m2):
        assert run_workers(train_counting, 2, dtype, None, "gloo") == [expected] * 2


def test_a_buffer_of_a_kind_that_cannot_be_saved_is_refused_before_the_first_step() -> None:
    model = nn.Linear(3, 1)
    model.register_buffer("angles", torch.ones(2, dtype=torch.complex64))
    state = ls.TrainState(model, ls.optim.SGD(0.1))
    with pytest.raises(
        ls.CheckpointError, match=r"'angles' of 'buffers' is of a kind.*\n.*complex64(.*\n)*.*view_as_real"
    ):
        ls.train_step(state, losses, make_batch(1))
    assert state.step == 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float32], ids=str)
def test_a_buffer_that_is_not_a_number_is_refused_whatever_its_kind(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 1)
    model.register_buffer("scale", torch.tensor([1.0, torch.nan]).to(dtype))
    with pytest.raises(ls.InputError, match=r"'scale' cannot be trained.*\n.*not finite"):
        ls.train_step(ls.TrainState(model, ls.optim.SGD(0.1)), losses, make_batch(1))


@pytest.mark.parametrize(("model", "name"), [(Replaced(), "mean"), (Late(), "late")])
def test_a_buffer_that_is_replaced_or_made_is_refused(model: nn.Module, name: str) -> None:
    state = ls.TrainState(model, ls.optim.SGD(0.1))
    with pytest.raises(ls.InputError, match=rf"has replaced a buffer.*\n.*{name}\n.*\n.*self.{name}.copy_"):
        ls.train_step(state, losses, make_batch(2), ls.Towers(2))
    assert state.step == 0


def test_a_model_that_keeps_an_activation_can_be_scored() -> None:
    state = ls.TrainState(Kept(), ls.optim.SGD(0.1))
    ls.train_step(state, losses, make_batch(1))
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(5, 3)}), batch_size=2)
    assert ls.evaluate(state, lambda m, b: {"y": m(b["x"]).squeeze(1)}, loader).num_examples == 5


def test_a_loss_called_total_is_refused() -> None:
    state = ls.TrainState(nn.Linear(3, 1), ls.optim.SGD(0.1))
    with pytest.raises(ls.InputError, match="No loss may be called 'total'"):
        ls.train_step(state, lambda m, b: {"total": losses(m, b)["square"]}, make_batch(1))


def test_a_fresh_run_without_room_for_a_batch_is_refused() -> None:
    state = ls.TrainState(nn.Linear(3, 1), ls.optim.SGD(0.1))
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(5, 3)}), batch_size=8)
    with pytest.raises(ls.InputError, match=r"no full batch fits.*\n.*1 epochs, batches of 8, 5 examples"):
        next(ls.train_steps(state, losses, loader, until=ls.Epochs(1)))
