"""Towers without a count are one for each worker that computes; a count that is given stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import InputError
from lockstep.towers.towers import Towers, counted_towers


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"loss": model(batch["x"]).square().mean()}


def make_state() -> ls.TrainState:
    torch.manual_seed(0)
    return ls.TrainState(nn.Linear(2, 1), ls.optim.SGD(lr=0.1))


def make_loader() -> ls.data.Loader:
    return ls.data.Loader(ls.data.Arrays({"x": torch.ones(8, 2)}), batch_size=4)


def test_there_is_one_for_each_worker_that_computes_unless_a_count_is_given() -> None:
    assert counted_towers(None, 3) == Towers(3)
    assert counted_towers(Towers(precision="bf16"), 3) == Towers(3, precision="bf16")
    assert counted_towers(Towers(2, precision="bf16"), 3) == Towers(2, precision="bf16")
    assert counted_towers(Towers(1), 3).num_towers == 1


def test_a_checkpoint_holds_the_number_that_there_were(tmp_path: Path) -> None:
    state, loader, towers = make_state(), make_loader(), ls.Towers(precision="bf16")
    for batch in ls.batches(loader, towers, until=ls.Steps(1)):
        ls.train_step(state, losses, batch, towers)
    ls.train(state, losses, loader, towers, until=ls.Steps(2))
    assert state.trained_with["towers"]["count"] == 1
    ls.save(state, loader, tmp_path)

    again, again_loader = make_state(), make_loader()
    ls.resume(again, again_loader, tmp_path)
    ls.train(again, losses, again_loader, ls.Towers(1, precision="bf16"), until=ls.Steps(3))
    other, other_loader = make_state(), make_loader()
    ls.resume(other, other_loader, tmp_path)
    with pytest.raises(InputError, match=r"towers.count: saved 1, given 2") as caught:
        ls.train(other, losses, other_loader, ls.Towers(2, precision="bf16"), until=ls.Steps(3))
    assert "ls.Towers(1)" in str(caught.value)
