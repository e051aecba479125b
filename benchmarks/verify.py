"""What the chain of a run costs beside a step: a line for each update, and digests of all tensors at a checkpoint.

    python benchmarks/verify.py [--rounds 11]

The step is that of the recipe `mnist`, on one worker and one thread; a round makes 10 of them, or writes 1,000 lines of
their reports to a file in the current folder, or digests the state 10 times. Printed, and appended to
benchmarks/results/verify.jsonl, is the time of one line or digest over that of one step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch
from measuring import compared, record, show, take_turns

import lockstep as ls
from lockstep.checkpoints.store import digests_of
from lockstep.recipes.shipped import find
from lockstep.reporting.chain import CHAIN, ChainFile, attempt_facts
from lockstep.runs.build import build

STEPS, LINES, DIGESTS = 10, 1_000, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    parts = build(find("mnist"), ls.join("cpu"))
    steps = ls.train_steps(parts.state, parts.task.losses, parts.loader, parts.towers, ls.Alone())
    reports = [next(steps) for _ in range(STEPS)]
    with tempfile.TemporaryDirectory(dir=".") as folder, closing(steps):
        chain = ChainFile(Path(folder) / CHAIN, from_position=0)

        def milliseconds(turn: str) -> float:
            began = time.process_time()
            if turn == "step":
                count = STEPS
                for _ in range(count):
                    next(steps)
            elif turn == "line":
                count = LINES
                for number in range(count):
                    chain.write(attempt_facts(reports[number % STEPS], in_metrics=False))
            else:
                count = DIGESTS
                for _ in range(count):
                    digests_of(parts.state.sections())
            return 1000 * (time.process_time() - began) / count

        times = take_turns(("step", "line", "digests"), rounds, milliseconds)
        chain.close()
    lines = [
        {
            "comparison": f"{name} of the chain, beside a step of mnist",
            **compared({"ours": ours, "theirs": times["step"]}),
        }
        for name, ours in times.items()
        if name != "step"
    ]
    for line in lines:
        show(line)
    record(__file__, lines)


if __name__ == "__main__":
    main()
