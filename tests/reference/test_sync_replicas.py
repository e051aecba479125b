"""What the tests of SyncReplicasOptimizer assert, said of backup workers: the reference's numbers, in real processes.

The reference's worker i is worker i + 1 here: worker 0 serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from worker_processes import HANG_SECONDS

import lockstep as ls
from lockstep.recipes.toml import with_settings
from lockstep.types import Arrivals

pytestmark = pytest.mark.process

RunWorkers = Callable[..., list[Any]]


class Variables(nn.Module):
    """Two numbers that begin at 0 and 1, a table of two rows, 3 and 4, and a number that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.v0, self.v1 = nn.Parameter(torch.tensor(0.0)), nn.Parameter(torch.tensor(1.0))
        self.table = nn.Embedding.from_pretrained(torch.tensor([[3.0], [4.0]]), freeze=False, sparse=True)
        self.unused = nn.Parameter(torch.tensor(7.0))

    def forward(self, batch: ls.Batch) -> Tensor:
        """A loss whose gradients are those of the batch; that of the table is of one row."""
        of_row = batch["g0"][:, None] * self.table(batch["row"])
        return (batch["g0"] * self.v0 + batch["g1"] * self.v1).sum() + of_row.sum()


class Values(NamedTuple):
    step: int
    v0: float
    v1: float
    table: list[float]
    unused: float


def values_of(state: ls.TrainState) -> Values:
    model: Any = state.model
    rounded = [round(value, 4) for value in (model.v0.item(), model.v1.item(), model.unused.item())]
    table = [round(value, 4) for value in model.table.weight.flatten().tolist()]
    return Values(state.step, rounded[0], rounded[1], table, rounded[2])


def make_loader(g0: list[float], g1: list[float], rows: list[int]) -> ls.data.Loader:
    arrays = {"g0": torch.tensor(g0), "g1": torch.tensor(g1), "row": torch.tensor(rows)}
    return ls.data.Loader(ls.data.Arrays(arrays), batch_size=2, order="sequential")


def loss(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"loss": model(batch)}


# Two workers, both required -------------------------------------------------------------------------------------------


def one_update(rows: list[int], **options: Any) -> tuple[Values, list[float]]:
    """Make an update of the gradients (.1, .9) and (.3, 1.1) at a rate of 2; also what the state keeps beside."""
    state = ls.TrainState(Variables(), ls.optim.SGD(2.0), **options)
    exchange = ls.Backups() if ls.join().num_workers > 1 else ls.AllReduce()
    ls.train(state, loss, make_loader([0.1, 0.3], [0.9, 1.1], rows), ls.Towers(2), exchange, until=ls.Steps(1))
    return values_of(state), [float(average.sum()) for average in state.averages().values()]


def several_updates(options: dict[str, Any]) -> list[Any]:
    return [one_update([1, 1]), one_update([1, 0]), one_update([1, 1], **options)]


def test_an_update_is_the_mean_of_the_gradients_and_of_a_row_of_those_that_have_it(run_workers: RunWorkers) -> None:
    options = {
        "tower_gradient_transforms": [ls.optim.ClipGlobalNorm(0.5)],
        "average": ls.optim.MovingAverage(0.5, dynamic=False),
    }
    (both, _), (each, _), clipped = run_workers(several_updates, 3, options)[0]
    assert both == Values(1, -0.4, -1.0, [3.0, 3.6], 7.0)
    assert each == Values(1, -0.4, -1.0, [2.4, 3.8], 7.0)
    assert clipped == one_update([1, 1], **options), "clipped by each worker, averaged after the update"


# Three workers, two required ------------------------------------------------------------------------------------------


def two_updates(first: Path) -> list[tuple[Values, Arrivals | None]]:
    """Make two updates; the second worker computes its first gradient until the first one is made without it."""

    def late_loss(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        deadline = time.monotonic() + HANG_SECONDS
        while ls.join().rank == 2 and not first.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return loss(model, batch)

    state, after = ls.TrainState(Variables(), ls.optim.SGD(2.0)), []
    loader = make_loader([0.1, 0.3, 0.5, 0.7], [0.9, 1.1, 1.3, 1.5], [1, 1, 1, 1])
    steps = ls.train_steps(state, late_loss, loader, ls.Towers(2), ls.Backups(), until=ls.Epochs(1))
    for report in steps:
        after.append((values_of(state), report.arrivals))
        if ls.join().is_chief:
            first.touch()
    return after


def test_the_first_gradients_make_the_update_and_a_late_one_is_dropped(run_workers: RunWorkers, tmp_path: Path) -> None:
    (first, after_first), (second, after_second) = run_workers(two_updates, 4, tmp_path / "first")[0]
    assert first == Values(1, -0.6, -1.2, [3.0, 3.4], 7.0), "the mean of those of the first and the third worker"
    assert after_first.used == {1: 1, 3: 1}
    assert after_first.dropped == {2: 1}
    # Here the examples of the late one are not lost: the others have computed them anew.
    assert second == Values(2, -1.6, -3.8, [3.0, 2.4], 7.0)
    assert sum(after_second.used.values()) == 4
    assert after_second.staleness == {0: 4}


# Asynchronous workers that begin later --------------------------------------------------------------------------------


def used_after_each_step(delay: int, steps: int) -> list[dict[int, int]]:
    """Train while the first worker takes its time, and return the gradients that were used by then, by worker."""

    def slow_loss(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        time.sleep(0.02 if ls.join().rank == 1 else 0)
        return loss(model, batch)

    state, loader = ls.TrainState(Variables(), ls.optim.SGD(2.0)), make_loader([0.1, 0.3], [0.9, 1.1], [1, 1])
    exchange = ls.Asynchronous(startup_delay_steps=delay)
    reports = ls.train_steps(state, slow_loss, loader, ls.Towers(2), exchange, until=ls.Steps(steps))
    return [dict(report.arrivals.used) for report in reports if report.arrivals]


def used_with_delays() -> list[list[dict[int, int]]]:
    return [used_after_each_step(3, 30), used_after_each_step(100, 4)]


def test_with_a_delay_the_first_worker_begins_and_the_others_at_that_step_or_at_the_end(
    run_workers: RunWorkers,
) -> None:
    delayed, for_longer_than_the_run = run_workers(used_with_delays, 3)[0]
    assert delayed[:3] == [{1: 1}, {1: 2}, {1: 3}]
    assert delayed[-1][2] > 0
    assert for_longer_than_the_run == [{1: 1}, {1: 2}, {1: 3}, {1: 4}]


@pytest.mark.parametrize("exchange", ["backups", "all_reduce"])
def test_a_delay_is_refused_where_workers_wait_for_each_other(exchange: str) -> None:
    recipe = ls.recipes.find("mnist")
    settings = [f"exchange.kind={exchange}", "exchange.startup_delay_steps=15"]
    with pytest.raises(ls.errors.InputError, match=r"exchange\.startup_delay_steps in --set: there is no such field"):
        with_settings(recipe, settings)
