"""From the command to the first step: `lockstep train mnist`, beside a process that imports torch and ends.

    python benchmarks/start.py [--rounds 7] [--quick]

Each turn is a fresh process, the two in turn; one round warms up, so that all modules are compiled to bytecode. Ours
ends at the line of the first step, which two workers have made. The result is printed and appended to
benchmarks/results/start.jsonl.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import compared, record, show, take_turns

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one round: does it run?")
    arguments = parser.parse_args()
    turns = {"ours": first_step, "theirs": import_torch}
    times = take_turns(turns, 1 if arguments.quick else arguments.rounds, lambda name: turns[name](), warm_up=1)
    line = {"comparison": "lockstep train mnist to step 1 / import torch", **compared(times)}
    show(line)
    if not arguments.quick:
        record(__file__, [line], {})


def first_step() -> float:
    """Milliseconds until the first step is on the screen."""
    with tempfile.TemporaryDirectory(prefix="lockstep-start-") as folder:
        settings = ["--set", "watch.console=1 steps", "--set", "evaluate.examples=100"]
        words = ["train", "mnist", "--workdir", f"{folder}/run", "--steps", "2", *settings]
        began, command = time.perf_counter(), [sys.executable, "-m", "lockstep", *words]
        with subprocess.Popen(
            command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout
            lines = iter(process.stdout)
            assert any(line.startswith("step 1 ") for line in lines), "it made no step"
            took = time.perf_counter() - began
            assert "test accuracy" in "".join(lines), "it did not end as it should"
    return 1000 * took


def import_torch() -> float:
    """Milliseconds of a process that does nothing else."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], env=ENVIRONMENT, check=True)
    return 1000 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
