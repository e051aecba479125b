"""A run whose workers go on when some are lost, without a training loop: each step adds up what all towers give."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import PeerLostError
from lockstep.parallel.collectives import collectives
from lockstep.workers.rank import join, regroup

NUM_TOWERS = 12
STEP_SECONDS = 0.01


def plan(argv: list[str]) -> dict[str, Any]:
    return json.loads(argv[1])  # type: ignore[no-any-return]


def main(argv: list[str]) -> int:
    run = Run(Path(argv[0]), int(argv[2]), argv[3:])
    while run.step < run.num_steps:
        try:
            if run.regroups_as:
                run.regroup()
            run.train()
            continue
        except PeerLostError as error:
            lost = str(error)
        run.say("lost", lost)
        run.regroups_as = run.regroups_as or "goes on"
    run.worker.pulse.ended = True
    run.worker.group.barrier("the end")
    run.say("done", len(list(Path("/proc/self/fd").iterdir())))
    return 0


def total_of(num_steps: int) -> float:
    """What an undisturbed run has added up."""
    return sum(gives(tower, step) for step in range(num_steps) for tower in range(NUM_TOWERS))


def gives(tower: int, step: int) -> float:
    return float((tower + 1) * (step + 1))


class Run:
    """One worker; its faults are as "2:SIGKILL@20": worker 2 gets a signal after step 20, unless it is a newcomer."""

    def __init__(self, folder: Path, num_steps: int, faults: list[str]) -> None:
        self.folder, self.num_steps = folder, num_steps
        self.worker = join("cpu")
        self.number = int(os.environ["RANK"])
        self.step, self.total = 0, 0.0
        self.faults = {}
        self.regroups_as = "joins" if self.worker.is_newcomer else ""
        """What it does with its next `regroup`, which it is to call now; empty where it trains."""
        if self.worker.is_newcomer:
            self.say("newcomer", self.worker.is_chief)
        else:
            mine = [fault.partition("@") for fault in faults if fault.startswith(f"{self.number}:")]
            self.faults = {int(step): name.partition(":")[2] for name, _, step in mine}

    def say(self, what: str, more: object = None) -> None:
        line = [self.number, what, self.step, self.total, more, time.monotonic()]
        with (self.folder / f"worker{self.number}").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def train(self) -> None:
        """Train to the end, or until others are to be taken in."""
        while self.step < self.num_steps:
            worker = self.worker
            own = range(worker.rank, NUM_TOWERS, worker.num_workers)
            mine = sum(gives(tower, self.step) for tower in own)
            numbers = torch.tensor([mine, float(worker.pulse.regroup_requested)])
            collectives(worker, "gloo").all_reduce([numbers])
            self.total += float(numbers[0])
            self.step += 1
            worker.pulse.at(self.step, "compute")
            if self.step in self.faults:
                self.say("fault")
                self.do(self.faults[self.step])
            if numbers[1]:
                self.regroups_as = "takes others in"
                return
            time.sleep(STEP_SECONDS)

    def do(self, fault: str) -> None:
        if fault == "raise":
            raise ValueError("a mistake in the script")
        os.kill(os.getpid(), getattr(signal, fault))

    def regroup(self) -> None:
        self.worker = regroup()
        self.step, self.total = max(map(tuple, self.worker.group.gather([self.step, self.total])))
        self.say(self.regroups_as, [self.worker.rank, self.worker.group.names])
        self.regroups_as = ""
