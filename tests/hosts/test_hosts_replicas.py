"""Workers of several hosts that run other files, or whose models come to differ: all screens name worker and host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from separate_hosts import Hosts

pytestmark = pytest.mark.process

# One start of two processes for both cases: to import torch is what it costs.
SCRIPT = """
import sys

import torch
from torch import nn

import lockstep as ls

torch.manual_seed(0)
here = ls.join("cpu")
model = nn.Linear(3, 2)
loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(8, 3)}), batch_size=2)


def train():
    state = ls.TrainState(model, ls.optim.SGD(0.1))
    state.compare_steps = 2
    losses = lambda model, batch: {"square": model(batch["x"]).square().mean()}
    try:
        for report in ls.train_steps(state, losses, loader, until=ls.Steps(9)):
            if report.step == 3 and here.rank == 1:
                model.weight.data[1, 2] += 1
    except ls.WorkerError as error:
        print(f"{error.what} {error.given}")


mine, sys.argv[0] = sys.argv[0], sys.argv[1]
train()
sys.argv[0] = mine
train()
"""


@pytest.mark.slow
def test_other_files_and_other_weights_are_told_on_both_hosts(
    make_hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    hosts = make_hosts(2)
    (tmp_path / "script.py").write_text(SCRIPT)
    seats = [{"RANK": str(rank), "LOCAL_RANK": "0"} for rank in range(2)]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
    for rank in range(2):
        other = tmp_path / str(rank) / "mine.py"
        other.parent.mkdir()
        other.write_text(f"# a copy of its own on host {rank}")
    commands = [
        hosts.start(rank, sys.executable, tmp_path / "script.py", tmp_path / str(rank) / "mine.py", **seat, **shared)
        for rank, seat in enumerate(seats)
    ]
    for command in commands:
        assert command.wait() == 0, command.text
        assert (
            "The workers do not agree on versions: worker 1 on host1 differs. worker 1 on host1: the file mine.py: "
            in (command.text)
        )
        assert (
            "The workers no longer have the same model: worker 1 on host1 differs. "
            "at step 4, worker 1 on host1: parameter 'weight'"
        ) in command.text
    assert hosts.leftovers() == []
