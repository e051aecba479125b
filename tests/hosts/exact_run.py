"""A small exact run with batch norm, dropout, an evaluation and a checkpoint: `python exact_run.py WORKDIR STEPS`.

With "forever" for the number of steps it goes on until it is ended, and says at each step that it got there. With
"backups" behind that the chief serves the others; the bits are the same, with fewer of them than towers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import lockstep as ls

NUM_TOWERS, BATCH_SIZE, NUM_EXAMPLES = 6, 24, 101
EXACT = ls.AllReduce(exact=True)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
    return {"cross_entropy": F.cross_entropy(model(batch["x"]), batch["y"])}


def score(model: nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
    return {"cross_entropy": F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")}


def train(workdir: Path, num_steps: int | None, exchange: ls.AllReduce | ls.Backups = EXACT) -> None:
    here = ls.join("cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
        fields = {"x": torch.randn(NUM_EXAMPLES, 5), "y": torch.randint(0, 4, (NUM_EXAMPLES,))}
    state = ls.TrainState(model, ls.optim.SGD(0.1, momentum=0.9))
    loader = ls.data.Loader(ls.data.Arrays(fields), batch_size=BATCH_SIZE, seed=1)
    ls.resume(state, loader, workdir)
    towers = ls.Towers(NUM_TOWERS)
    for report in ls.train_steps(state, losses, loader, towers, exchange):
        if report.step == num_steps:
            break
        if num_steps is None:
            os.write(1, f"{here.name} at step {report.step}\n".encode())
            time.sleep(0.05)
    ls.save(state, loader, workdir)
    result = ls.evaluate(state, score, ls.data.Loader(ls.data.Arrays(fields), batch_size=BATCH_SIZE))
    if here.is_chief:
        sums = {name: total.hex() for name, total in result.sums.items()}
        (workdir / "scores.json").write_text(json.dumps(sums))


def contents(workdir: Path) -> dict[str, bytes]:
    """Every byte that a run has written but those of its manifests, which hold the time of saving."""
    files = [path for path in workdir.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {str(path.relative_to(workdir)): path.read_bytes() for path in files}


if __name__ == "__main__":
    folder, steps, *others = sys.argv[1:]
    train(Path(folder), None if steps == "forever" else int(steps), ls.Backups() if others else EXACT)
