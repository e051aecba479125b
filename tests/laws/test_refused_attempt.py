"""The law of the refused attempt: a batch that is not finite leaves the run as one told from the start to skip it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.data.loader import Loader
from lockstep.data.readers import Arrays

BAD_POSITIONS = {24, 56}
BATCH_SIZE, STEPS = 8, 10


def make_state() -> ls.TrainState:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    return ls.TrainState(
        model,
        ls.optim.SGD(ls.optim.Cosine(0.1, 20), momentum=0.9),
        average=ls.optim.MovingAverage(0.9),
        gradient_transforms=[ls.optim.ClipGlobalNorm(0.5)],
        nonfinite="skip",
    )


def make_loader() -> Loader:
    return Loader(Arrays({"x": torch.randn(64, 5, generator=torch.Generator().manual_seed(1))}), batch_size=BATCH_SIZE)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    # Only the last tower sees the bad number: all have to refuse.
    spoil = float("nan") if batch.position in BAD_POSITIONS and batch.towers.stop == 2 else 1.0
    return {"square": model(batch["x"]).square().mean() * spoil}


def learned(state: ls.TrainState) -> list[Any]:
    numbers = [t.flatten().tolist() for _, members in sorted(state.sections().items()) for t in members.values()]
    return [numbers, {**state.values(), "num_refused": 0}]


def refusing() -> tuple[list[Any], int, int]:
    state, loader = make_state(), make_loader()
    reports = list(ls.train_steps(state, losses, loader, ls.Towers(2), until=ls.Steps(STEPS)))
    return learned(state), sum(report.refused for report in reports), loader.position


def skipping() -> list[Any]:
    state = make_state()
    for batch in ls.batches(make_loader(), ls.Towers(2)):
        if batch.position in BAD_POSITIONS:
            continue
        if ls.train_step(state, losses, batch, ls.Towers(2)).step == STEPS:
            break
    return learned(state)


def test_alone() -> None:
    found, refused, position = refusing()
    assert refused == len(BAD_POSITIONS)
    assert position == (STEPS + refused) * BATCH_SIZE
    assert found == skipping()


def test_on_two_workers(run_workers: Callable[..., list[Any]]) -> None:
    for found, refused, position in run_workers(refusing, 2):
        assert refused == len(BAD_POSITIONS)
        assert position == (STEPS + refused) * BATCH_SIZE
        assert found == skipping()
