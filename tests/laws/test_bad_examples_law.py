"""The law of bad examples: what stands in for them is the same on any number of workers, and after any resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import DataError
from lockstep.randomness import Draws

pytestmark = pytest.mark.process

Int64s = np.ndarray[Any, np.dtype[np.int64]]
BAD = {3, 4, 17, 22}
NUM_EXAMPLES, BATCH_SIZE, STEPS, TOWERS = 24, 6, 9, 3


class Damaged:
    """Rows of numbers, of which some cannot be read."""

    cost = "decode"

    def __len__(self) -> int:
        return NUM_EXAMPLES

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        if found := BAD.intersection(indices.tolist()):
            raise DataError(f"{self.example_id(min(found))} is torn.", given="half", expected="a whole", hint="none")
        rows = torch.from_numpy(indices).float()
        return {"x": torch.stack([rows.sin(), rows.cos()], 1)}

    def example_id(self, index: int) -> str:
        return f"row-{index}"


class Averaged:
    """Adds half of another row to each."""

    num_partners = 1

    def needs_partners(self, draws: Draws) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return draws.uniform("Averaged") < 0.6

    def __call__(self, batch: dict[str, Any], draws: Draws, partners: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        x = batch["x"].clone()
        for partner in partners:
            x[torch.from_numpy(self.needs_partners(draws))] += partner["x"] / 2
        return {"x": x}


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["x"]).square().mean()}


def make(budget: int = 10, augment: Any = None) -> tuple[ls.TrainState, ls.data.Loader]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        state = ls.TrainState(nn.Linear(2, 1), ls.optim.SGD(0.1))
    policy: dict[str, Any] = {"bad_examples": "skip", "bad_budget": budget}
    loader = ls.data.Loader(Damaged(), batch_size=BATCH_SIZE, seed=5, augment=augment, num_processes=1, **policy)
    return state, loader


def trained(workdir: Path | None = None, stops: tuple[int, ...] = (STEPS,), augment: Any = None) -> list[Any]:
    """Weights, bad examples by step, and the quarantine; made anew from a checkpoint at each stop."""
    torch.set_num_threads(1)
    found: list[Any] = []
    for stop in stops:
        state, loader = make(augment=augment)
        if workdir:
            ls.resume(state, loader, workdir)
        for report in ls.train_steps(
            state, losses, loader, ls.Towers(TOWERS), ls.AllReduce(exact=True), until=ls.Steps(stop)
        ):
            found.append([report.step, [list(bad) for bad in report.bad]])
        if workdir:
            ls.save(state, loader, workdir)
    return [[p.flatten().tolist() for p in state.model.parameters()], found, loader.quarantine.state()]


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    return trained()


def test_every_one_is_reported_with_what_stands_in(alone: list[Any]) -> None:
    _, reports, quarantine = alone
    bad = [example for _, found in reports for example in found]
    epochs = STEPS * BATCH_SIZE // NUM_EXAMPLES
    assert len([each for each in bad if each[0] < epochs * NUM_EXAMPLES]) == epochs * len(BAD)
    assert {name for _, name, *_ in bad} == {f"row-{index}" for index in BAD}
    assert all(instead.removeprefix("row-") not in map(str, BAD) for _, _, _, instead, _ in bad)
    assert quarantine == {str(index): f"row-{index} is torn. half" for index in BAD} | quarantine


@pytest.mark.parametrize("num_workers", [2, 3])
def test_on_several_workers(alone: list[Any], run_workers: Callable[..., list[Any]], num_workers: int) -> None:
    for found in run_workers(trained, num_workers):
        assert found == alone


def trained_with_partners() -> list[Any]:
    return trained(augment=Averaged())


def test_partners_on_several_workers(run_workers: Callable[..., list[Any]]) -> None:
    alone = trained_with_partners()
    assert any(partner_of for _, found in alone[1] for *_, partner_of in found)
    assert alone[0] != trained()[0]
    for found in run_workers(trained_with_partners, 2):
        assert found == alone


@pytest.mark.parametrize("stops", [(1, STEPS), (3, 5, STEPS)])
def test_resumed(alone: list[Any], tmp_path: Path, stops: tuple[int, ...]) -> None:
    assert trained(tmp_path, stops) == alone


def overdrawn() -> str:
    state, loader = make(budget=3)
    with pytest.raises(DataError) as caught:
        for _ in ls.train_steps(state, losses, loader, ls.Towers(TOWERS), until=ls.Steps(STEPS)):
            pass
    return f"step {state.step}: {caught.value.what}"


def test_all_workers_end_at_the_same_step(run_workers: Callable[..., list[Any]]) -> None:
    assert set(run_workers(overdrawn, 2)) == {overdrawn()}
