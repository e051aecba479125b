"""A run whose workers go on when some are lost, without a training loop: each step adds up what all towers give."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.errors import PeerLostError
from lockstep.exchange.collectives import collectives
from lockstep.workers.rank import join, regroup

NUM_TOWERS = 12
STEP_SECONDS = 0.01


def plan(argv: list[str]) -> dict[str, Any]:
    return json.loads(argv[1])  # type: ignore[no-any-return]


def main(argv: list[str]) -> int:
    run = Run(argv)
    while run.step < run.num_steps:
        if run.regroups_as:
            run.worker = regroup()
        try:
            if run.regroups_as:
                run.begin()
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


class Fault(NamedTuple):
    number: int
    name: str
    step: int

    @classmethod
    def of(cls, text: str) -> Fault:
        number, name, step = re.split("[:@]", text)
        return cls(int(number), name, int(step))


class Run:
    """One worker; its faults are as "2:SIGKILL@20": worker 2 gets a signal after step 20, unless it is a newcomer.

    Before each fault, and before the end, they wait until as many take part as there were at the start.
    """

    def __init__(self, argv: list[str]) -> None:
        self.folder, self.num_steps = Path(argv[0]), int(argv[2])
        self.full = plan(argv)["workers"] if plan(argv)["survival"]["replacements"] else 1
        faults = [Fault.of(each) for each in argv[3:]]
        self.held = {fault.step for fault in faults} | {self.num_steps - 1}
        self.worker = join("cpu")
        self.number = int(os.environ["RANK"])
        self.step, self.total = 0, 0.0
        self.regroups_as = "joins" if self.worker.is_newcomer else ""
        """Why it is to call `regroup` now; empty where it trains."""
        if self.worker.is_newcomer:
            self.say("newcomer", self.worker.is_chief)
        self.say("spare" if "wave" in sys.modules else "cold")
        mine = [fault for fault in faults if fault.number == self.number and not self.worker.is_newcomer]
        self.faults = {fault.step: fault.name for fault in mine}

    def say(self, what: str, more: object = None) -> None:
        line = [self.number, what, self.step, self.total, more, time.monotonic()]
        with (self.folder / f"worker{self.number}").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def train(self) -> None:
        """Train to the end, or until others are to be taken in."""
        while self.step < self.num_steps:
            worker = self.worker
            waits = self.step in self.held and worker.num_workers < self.full
            if self.step in self.faults and not waits:
                self.say("fault")
                os.kill(os.getpid(), getattr(signal, self.faults[self.step]))
            own = range(worker.rank, NUM_TOWERS, worker.num_workers)
            mine = sum(gives(tower, self.step) for tower in own)
            numbers = torch.tensor([mine, float(worker.pulse.regroup_requested)])
            worker.pulse.at(self.step, "exchange")
            collectives(worker, "gloo").all_reduce([numbers])
            worker.pulse.at(self.step, "compute")
            if not waits:
                self.total += float(numbers[0])
                self.step += 1
                worker.pulse.at(self.step, "compute")
            if self.step == 5:
                self.say("trains", os.getpid())
            if numbers[1]:
                self.regroups_as = "takes others in"
                return
            time.sleep(STEP_SECONDS)

    def begin(self) -> None:
        """Take the state of the worker that has come furthest."""
        self.step, self.total = max(map(tuple, self.worker.group.gather([self.step, self.total])))
        self.say(self.regroups_as, [self.worker.rank, self.worker.group.names])
        self.regroups_as = ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
