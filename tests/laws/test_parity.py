"""The law of parity: Lockstep's own towers, exchange and update give the numbers that TensorFlow recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import lockstep as ls
from lockstep.exchange.tree import assign_towers
from lockstep.losses.weighted import softmax_cross_entropy

sys.path.insert(0, str(Path(__file__).parent.parent / "golden"))

import mnist_reference as reference

RUNS = ["two_towers_float64", "two_towers_float32", "two_towers_lrn_float32"]


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"cross_entropy": softmax_cross_entropy(model(batch["image"]), batch["label"])}


def train(name: str) -> list[float]:
    """The reference run through `train_step`, on this worker; fails unless the weights end where TensorFlow's did."""
    run = reference.golden_run(name)
    here = ls.join("cpu")
    state = ls.TrainState(reference.reference_net(run), ls.optim.SGD(run.learning_rate, run.momentum, nesterov=True))
    towers = ls.Towers(run.num_towers)
    mine = assign_towers(run.num_towers, here.num_workers)[here.rank]
    reported = []
    for step, (images, labels) in enumerate(reference.reference_batches(run)):
        size = len(labels) // run.num_towers
        rows = slice(mine.start * size, mine.stop * size)
        fields = {"image": images[rows], "label": labels[rows]}
        batch = ls.Batch(fields, position=step * len(labels), batch_size=len(labels), towers=mine)
        reported.append(ls.train_step(state, losses, batch, towers).total)
    reference.check_weights(run, state.model)
    return reported


@pytest.mark.parametrize("name", [pytest.param(RUNS[0], marks=pytest.mark.slow), *RUNS[1:]])
def test_two_towers_on_one_worker(name: str) -> None:
    reference.check_losses(reference.golden_run(name), train(name))


@pytest.mark.process
@pytest.mark.parametrize("name", [pytest.param(RUNS[0], marks=pytest.mark.slow), RUNS[1]])
def test_two_towers_on_two_workers(name: str, run_workers: Callable[..., list[Any]]) -> None:
    for reported in run_workers(train, 2, name):
        reference.check_losses(reference.golden_run(name), reported)
