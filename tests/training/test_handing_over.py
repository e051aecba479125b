"""Where several hosts mirror a bucket, the chief's folder alone counts: what it reads is handed to all others."""

from __future__ import annotations

from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import pytest
import torch
from torch import nn
from worker_processes import run_workers

import lockstep as ls
from lockstep.checkpoints.mirror import KnownBucket, store_in
from lockstep.checkpoints.store import Checkpoint, Store
from lockstep.evaluation.follow import follow
from lockstep.training.handing_over import hand_over
from lockstep.training.saving import read_checkpoint, snapshot


def on_a_host(folder: Path) -> Any:
    here, home = ls.join("cpu"), folder / str(ls.join("cpu").rank)
    here.num_local_workers = 1
    KnownBucket("memory://hosts/run").write(home)
    state = ls.TrainState(nn.Linear(3, 2), ls.optim.SGD(0.1, momentum=0.9))
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.zeros(8, 3)}), batch_size=4, seed=0)
    with torch.no_grad():
        state.model.weight.copy_(torch.arange(6.0).reshape(2, 3) + 100 * here.rank)
    # What another host has is of an older run, or of none.
    if here.rank < 2:
        Store(home / "checkpoints").write(*snapshot(state, loader))
    store = store_in(home)
    return [contents(each) for each in (read_checkpoint(store), *follow(store, is_over=lambda: True))]


def contents(checkpoint: Checkpoint | None) -> Any:
    assert checkpoint
    return checkpoint.step, checkpoint.tensors["parameters"]["weight"].tolist(), checkpoint.values["loader"]


@pytest.mark.process
def test_all_workers_read_the_checkpoint_of_the_chief(tmp_path: Path) -> None:
    chiefs, *others = run_workers(on_a_host, 3, tmp_path)
    assert [each[:2] for each in chiefs] == [(0, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])] * 2
    assert others == [chiefs] * 2


SIZE_MB = 100


def grown_mb(_: object) -> int:
    """Hand a checkpoint over; returns by how much that has raised the most memory that this worker has had."""
    here, own = ls.join("cpu"), None
    if here.is_chief:
        own = Checkpoint(3, Path(), {"parameters": {"weight": torch.ones(SIZE_MB * 250_000)}}, {})
    before = getrusage(RUSAGE_SELF).ru_maxrss
    assert hand_over(own, here).tensors["parameters"]["weight"].sum() == SIZE_MB * 250_000
    return (getrusage(RUSAGE_SELF).ru_maxrss - before) // 1000


@pytest.mark.process
def test_the_chief_has_a_checkpoint_twice_at_most(tmp_path: Path) -> None:
    """Its own, and what goes through the exchange."""
    chief, other = run_workers(grown_mb, 2, tmp_path)
    assert chief < 2.5 * SIZE_MB
    assert other < 4 * SIZE_MB
