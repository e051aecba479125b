"""The buffers of a model around its towers."""

from __future__ import annotations

import pytest
import torch
from device_calls import accelerator, counted
from torch import nn

from lockstep.towers.statistics import Statistics, changeable_buffers
from lockstep.towers.towers import BatchNorm


class Buffers(nn.Module):
    """Every dtype, a scalar, memory with gaps and in another order, and one buffer that cannot be written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([1.0, -2.0, 0.1]))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("wide", torch.ones(1).expand(4))
        self.register_buffer("small", torch.full((3,), 6e-8, dtype=torch.float16))
        self.register_buffer("slice", torch.arange(12.0).view(3, 4)[:, ::2])
        self.register_buffer("image", torch.rand(2, 3, 2, 2).contiguous(memory_format=torch.channels_last))
        self.register_buffer("seen", torch.tensor([False, True]))


def run_towers(model: Buffers, policy: BatchNorm, changes: list[float]) -> dict[str, torch.Tensor]:
    """Each tower adds its number to the mean and 1 to the count; returns what is to be committed, by name."""
    statistics = Statistics(model, policy, len(changes))
    statistics.save()
    sums: list[torch.Tensor] = []
    for tower, change in enumerate(changes):
        model.mean += change
        model.count += 1
        shares = statistics.shares(tower, 1 / len(changes))
        sums = [a + b for a, b in zip(sums, shares, strict=True)] if tower else shares
        statistics.restore()
    names = [name for name, _ in model.named_buffers() if name != "wide"]
    combined = statistics.combined(sums)
    return dict(zip(names if combined else [], combined, strict=True))


@pytest.mark.parametrize(("policy", "change"), [("mean", 3.0), ("sync", 3.0), ("first", 1.0), ("last", 5.0)])
def test_the_policy_says_whose_change_counts(policy: BatchNorm, change: float) -> None:
    model = Buffers()
    before = {name: value.clone() for name, value in model.named_buffers()}
    combined = run_towers(model, policy, [1.0, 3.0, 5.0])
    torch.testing.assert_close(combined.pop("mean"), before["mean"] + change)
    assert combined.pop("count") == 8
    assert combined.keys() == before.keys() - {"mean", "count", "wide"}
    for name, value in combined.items():
        assert value.dtype == before[name].dtype, name
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("policy", ["none", "frozen"])
def test_nothing_is_sent_and_nothing_committed(policy: BatchNorm) -> None:
    assert run_towers(Buffers(), policy, [1.0, 3.0]) == {}


def test_the_buffers_hold_the_values_of_the_start_again() -> None:
    model = Buffers()
    before = {name: value.clone() for name, value in model.named_buffers()}
    run_towers(model, "mean", [1.0, 3.0])
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_one_tensor_is_sent_for_each_dtype() -> None:
    statistics = Statistics(Buffers(), "mean", 2)
    statistics.save()
    assert [share.dtype for share in statistics.shares(0, 0.5)] == [
        torch.float32,
        torch.int64,
        torch.float16,
        torch.bool,
    ]


def test_on_an_accelerator_the_buffers_of_a_dtype_are_one_launch() -> None:
    model = nn.Sequential(*[nn.BatchNorm2d(4) for _ in range(30)])
    with accelerator():
        statistics = Statistics(model, "mean", 1)
        with counted() as calls:
            statistics.save()
            statistics.combined(statistics.shares(0, 1.0))
            statistics.restore()
    assert not calls.mixed
    # Three copies of 60 numbers and of 30 counts; what is computed with all of them is one tensor a dtype.
    assert sum(n for call, n in calls.launches.items() if call.what == "_foreach_copy_") == 6
    assert calls.num_launches <= 6 + 6


def test_a_model_without_buffers_has_nothing_to_send() -> None:
    statistics = Statistics(nn.Linear(2, 2), "mean", 2)
    statistics.save()
    assert statistics.shares(0, 0.5) == []
    assert statistics.combined([]) == []


def test_what_is_expanded_cannot_change() -> None:
    model = Buffers()
    changeable = set(map(id, changeable_buffers(model)))
    assert {name for name, buffer in model.named_buffers() if id(buffer) not in changeable} == {"wide"}


def changes_of(model: Buffers, statistics: Statistics, tower: int) -> list[torch.Tensor]:
    statistics.save()
    model.mean += 1.0
    model.count += 1
    shares = statistics.shares(tower, 1.0)
    statistics.restore()
    return shares


def test_a_change_that_comes_late_is_added_to_what_the_buffers_are_by_then() -> None:
    here, there = Buffers(), Buffers()
    late = changes_of(there, Statistics(there, "mean", 1), 0)
    here.mean += 10.0
    here.count += 10
    statistics = Statistics(here, "mean", 1)
    statistics.save()
    combined = statistics.combined(late)
    assert combined[0].tolist() == pytest.approx([12.0, 9.0, 11.1])
    assert combined[1] == 7 + 10 + 1


@pytest.mark.parametrize(("policy", "chosen"), [("first", 0), ("last", 2)])
def test_of_towers_in_any_order_one_gives_what_is_not_averaged(policy: BatchNorm, chosen: int) -> None:
    model = Buffers()
    statistics = Statistics(model, policy, 4, any_order=True)
    of_towers = [changes_of(model, statistics, tower) for tower in (3, 3, 1)]
    for index, shares in enumerate(of_towers):
        for values in shares:
            if values.dtype == torch.float32:
                values += index  # so that it shows whose they are
        statistics.leave_to_one(shares, is_first=index == 0, is_last=index == 2)
    total = [sum(values[1:], values[0]) for values in zip(*of_towers, strict=True)]
    combined = statistics.combined(total)
    assert combined[0].tolist() == pytest.approx([2.0 + chosen, -1.0 + chosen, 1.1 + chosen])
    assert combined[1] == 8, "the counter of the first"
