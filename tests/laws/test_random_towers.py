"""The law of towers, and of resuming, for losses that draw from the global streams of numpy and Python."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lockstep as ls

pytestmark = pytest.mark.usefixtures("each_device")

NUM_TOWERS, STEPS = 3, 4


def make_state() -> ls.TrainState:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return ls.TrainState(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3)), ls.optim.SGD(0.1))


def make_loader() -> ls.data.Loader:
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
    return ls.data.Loader(ls.data.Arrays({"x": x}), batch_size=12, seed=4)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    """Mixup by numpy, noise by its normal numbers, and a flip by Python."""
    share, noise = np.random.beta(0.4, 0.4), float(np.random.randn())
    x = batch["x"] * share + batch["x"].flip(0) * (1 - share)
    return {"square": (model(x + 0.1 * noise) * (1 if random.random() < 0.5 else -2)).square().mean()}


def digest(state: ls.TrainState, totals: list[float]) -> str:
    sha = hashlib.sha256(repr(totals).encode())
    for name, parameter in state.parameters.items():
        sha.update(name.encode() + parameter.detach().numpy().tobytes())
    return sha.hexdigest()


def train() -> str:
    # Drawn by each worker as it likes, before and in between: none of it may count.
    rank = ls.join().rank
    random.seed(rank)
    np.random.seed(rank)
    state, totals = make_state(), []
    for report in ls.train_steps(state, losses, make_loader(), ls.Towers(NUM_TOWERS), until=ls.Steps(STEPS)):
        totals.append(report.total)
        np.random.randn(rank + 1)
    return digest(state, totals)


@pytest.mark.process
@pytest.mark.parametrize("num_workers", [2, 3])
def test_the_same_bits_on_any_number_of_workers(run_workers: Callable[..., list[Any]], num_workers: int) -> None:
    assert set(run_workers(train, num_workers)) == {train()}


def test_a_resumed_run_draws_the_same(tmp_path: Path) -> None:
    expected, loader = make_state(), make_loader()
    towers = ls.Towers(NUM_TOWERS)
    ls.train(expected, losses, loader, towers, until=ls.Steps(STEPS))
    first, loader = make_state(), make_loader()
    ls.train(first, losses, loader, towers, until=ls.Steps(2))
    ls.save(first, loader, tmp_path)
    np.random.rand(5), random.random()
    resumed, loader = make_state(), make_loader()
    assert ls.resume(resumed, loader, tmp_path) == 2
    ls.train(resumed, losses, loader, towers, until=ls.Steps(STEPS))
    assert digest(resumed, []) == digest(expected, [])
