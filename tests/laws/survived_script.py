"""A loop of one's own, with evaluations in its body, some of whose workers are lost at steps that the command names.

lockstep run --workers 3 --on-failure continue tests/laws/survived_script.py WORKDIR [EXCHANGE] [train|late] [FAULT ...]

Faults are those of `survived_run`; `NUMBER:in@STEP` strikes in the evaluation after that step. With `train` the body of
the loop is a hook; with `late` each attempt is read while the next one is computed, as on an accelerator. Each process
notes the steps that its body has seen in a file of its own beside the workdir.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from staged_run import Net, reader
from survived_run import BATCH_SIZE, NUM_TOWERS, STEP_SECONDS, Faults
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls
from lockstep import tensors
from lockstep.data.loader import Loader

STEPS, EVALUATE_EVERY, SAVE_EVERY = 120, 10, 20
AWAITED_AFTER = (59, 89)
"""Steps after which the workers wait for those that are started in the place of the lost, who join a step later."""


class Watched:
    """What the script keeps beside its state: the best score, and the sum of the scores as a tensor."""

    def __init__(self) -> None:
        self.best, self.sum = -1e9, torch.zeros(2)

    def see(self, score: float) -> None:
        self.best = max(self.best, score)
        self.sum += torch.tensor([score, 1.0])

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "sum": self.sum}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.sum = state_dict["best"], state_dict["sum"]


class Script:
    """The script on one worker."""

    def __init__(self, workdir: Path, texts: Sequence[str]) -> None:
        self.here = ls.join("cpu")
        self.folder, self.workdir = workdir.parent, workdir
        number = os.environ.get("RANK", "0")
        self.struck = self.folder / f"struck-{number}"
        self.strikes_in = [int(t.split("@")[1].split("+")[0]) for t in texts if t.startswith(f"{number}:in@")]
        self.faults = Faults([text for text in texts if ":in@" not in text], self.folder)
        self.pause = STEP_SECONDS if self.here.num_workers > 1 else 0.0
        self.seen = self.folder / f"seen-{number}-{os.getpid()}"
        torch.manual_seed(0)
        self.watched = Watched()
        self.state = ls.TrainState(
            Net(),
            ls.optim.SGD(ls.optim.Cosine(0.1, STEPS), momentum=0.9),
            average=ls.optim.MovingAverage(0.9),
            stateful=self.watched,
        )
        arrays, held_out = reader("train"), reader("validation")
        self.loader = Loader(arrays, batch_size=BATCH_SIZE, seed=5)
        self.held_out = Loader(held_out, batch_size=BATCH_SIZE)

    def losses(self, model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        self.faults.begin(batch.position, model)
        time.sleep(self.pause)
        return {"cross_entropy": F.cross_entropy(model(batch["image"].float() / 255), batch["label"].long())}

    def score(self, model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        if self.state.step in self.strikes_in and not self.struck.exists():
            self.struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        logits = model(batch["image"].float() / 255)
        return {"loss": F.cross_entropy(logits, batch["label"].long(), reduction="none")}

    def see(self, report: ls.StepReport) -> None:
        """Do what comes after a step."""
        with self.seen.open("a") as file:
            file.write(f"{report.step}\n")
        generations = self.here.pulse.generations
        while report.step in AWAITED_AFTER and self.here.num_workers < self.here.num_started and generations:
            if generations.regroup_requested or generations.failure():
                break
            time.sleep(0.01)
        if report.step % EVALUATE_EVERY == 0:
            self.watched.see(-ls.evaluate(self.state, self.score, self.held_out, weights="average").means["loss"])
        if report.step % SAVE_EVERY == 0:
            ls.save(self.state, self.loader, self.workdir)

    def run(self, exchange: ls.AllReduce | ls.Backups, *, hooks: bool) -> None:
        towers = ls.Towers(NUM_TOWERS)
        ls.resume(self.state, self.loader, self.workdir)
        end = ls.Steps(STEPS)
        if hooks:
            ls.train(self.state, self.losses, self.loader, towers, exchange, until=end, hooks=[self.see])
            return
        for report in ls.train_steps(self.state, self.losses, self.loader, towers, exchange, until=end):
            self.see(report)


def main() -> None:
    words = [each for each in sys.argv[2:] if ":" not in each]
    if "late" in words:
        tensors.READ_AT_ONCE = frozenset()
    exchanges = {"gloo": ls.AllReduce("gloo", exact=True), "backups": ls.Backups()}
    exchange = next((exchanges[word] for word in words if word in exchanges), ls.AllReduce(exact=True))
    script = Script(Path(sys.argv[1]), [each for each in sys.argv[2:] if ":" in each])
    script.run(exchange, hooks="train" in words)


if __name__ == "__main__":
    main()
