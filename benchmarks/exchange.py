"""What many workers cost: our exchange beside DDP, exact beside not, shared memory beside none, the watch, a start.

    python benchmarks/exchange.py [--rounds 15] [--only steps bare shared watch replay start] [--workers 2 3 4]

All on one host, over its loopback, one thread a worker. Those of a comparison take turns in the same processes, from
the same weights on the same data, after a barrier; what counts is the ratio of a turn to its neighbour. Starts take
turns as whole commands, from the command to the first step of the last worker. The parts that
run in workers are in exchange_parts.py. The result is printed and appended to benchmarks/results/exchange.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from exchange_parts import BARE, PARTS, STEPS, WATCH
from measuring import ALLOCATOR, Line, compared, record, run_part, show, take_turns

NUM_STARTED = 4
START_AIM = 0.5
START = "start"
OURS = """
import os

import torch

import lockstep as ls

ls.join()
torch.manual_seed(0)
data = ls.data.Arrays({"x": torch.randn(128, 64), "y": torch.randint(0, 10, (128,))})
state = ls.TrainState(torch.nn.Linear(64, 10), ls.optim.SGD(0.01))
losses = lambda model, batch: {"loss": torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])}
next(ls.train_steps(state, losses, ls.data.Loader(data, batch_size=128)))
os.write(1, b"first step\\n")  # in one piece, as all share the pipe
"""
BY_HAND = """
import os
import socket
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def work(rank, port, num_workers):
    if port:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_workers), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(0, 10, (32,))).backward()
    optimizer.step()
    os.write(1, b"first step\\n")  # in one piece, as all share the pipe
    dist.destroy_process_group()


if __name__ == "__main__" and "RANK" in os.environ:
    work(0, 0, 0)
elif __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(work, (port, int(sys.argv[1])), nprocs=int(sys.argv[1]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=[*PARTS, START], default=[*PARTS, START])
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 3, 4], help="of steps and of bare sums")
    parser.add_argument("--quick", action="store_true", help="a few short rounds of small nets: does it run?")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        name, is_quick = json.loads(arguments.part)
        PARTS[name](arguments.rounds, is_quick)
        return
    rounds, workers = (3, [2]) if arguments.quick else (arguments.rounds, arguments.workers)
    lines: list[Line] = []
    for name in arguments.only:
        for line in start(rounds) if name == START else measure(name, rounds, workers, is_quick=arguments.quick):
            show(line)
            lines.append(line)
    if not arguments.quick:
        record(__file__, lines)


def measure(name: str, rounds: int, workers: Sequence[int], *, is_quick: bool) -> Iterator[Line]:
    """The lines of a part that runs in workers, which are fresh processes."""
    part = json.dumps([name, is_quick])
    for num_workers in workers if name in (STEPS, BARE) else [2]:
        for line in run_part(__file__, part, rounds, threads=1, num_workers=num_workers):
            yield {**line, "workers": num_workers}
    if name == WATCH:
        launched = ["-m", "lockstep", "run", "--workers", "2", __file__, "--part", part, "--rounds", str(rounds)]
        done = subprocess.run([sys.executable, *launched], stdout=subprocess.PIPE, text=True, check=True)
        yield from ({**json.loads(line), "workers": 2} for line in done.stdout.splitlines() if line.startswith("{"))


# The start ----------------------------------------------------------------------------------------------------------


def start(rounds: int) -> Iterator[Line]:
    """From a command to the first step of its last worker: by our launcher, by torchrun, and by spawn."""
    with tempfile.TemporaryDirectory(prefix="lockstep-exchange-") as folder:
        ours, by_hand = Path(folder, "ours.py"), Path(folder, "by_hand.py")
        ours.write_text(OURS)
        by_hand.write_text(BY_HAND)
        commands = {
            "lockstep run": ["-m", "lockstep", "run", "--workers", str(NUM_STARTED), str(ours)],
            "torchrun": [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={NUM_STARTED}",
                str(by_hand),
            ],
            "spawn": [str(by_hand), str(NUM_STARTED)],
        }
        seconds = take_turns(commands, rounds, lambda name: seconds_to_start(commands[name]), warm_up=1)
    for theirs in ("torchrun", "spawn"):
        for index, what in enumerate(("first step", "CPU time")):
            times = {"ours": "lockstep run", "theirs": theirs}
            line = compared({side: [1000 * turn[index] for turn in seconds[name]] for side, name in times.items()})
            aim = None if index else START_AIM
            yield {
                **line,
                "comparison": f"{NUM_STARTED} workers, {what}: lockstep run / {theirs}",
                "aim": aim,
                "threads": 1,
            }


def seconds_to_start(command: Sequence[str]) -> tuple[float, float]:
    """Seconds until the last worker has made its first step, and CPU seconds of all processes until their end."""
    environment = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for _ in range(NUM_STARTED):
            while (line := process.stdout.readline()) and "first step" not in line:
                pass
            assert line, f"{command} has not made a step"
        seconds = time.perf_counter() - began
        process.stdout.read()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
