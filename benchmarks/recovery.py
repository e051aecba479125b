"""How long a run stands still when one of 4 workers is lost, beside torchrun, which starts all of them again.

    python benchmarks/recovery.py [--rounds 5] [--quick]

Each turn is a run of its own, of which a worker is killed or stopped once it has made some steps; what counts is the
time from the signal to the next step of all workers that are there then. The runs take turns. The result is printed and
appended to benchmarks/results/recovery.jsonl.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from measuring import ALLOCATOR, Line, record, take_turns

NUM_WORKERS, FIRST_STEPS, TIMEOUT_SECONDS = 4, 40, 120.0
OURS = """
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

import lockstep as ls

folder = Path(sys.argv[1])
(folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
labels = torch.arange(256) % 2
images = (labels[:, None, None, None] * 200 * torch.ones(1, 1, 28, 28)).to(torch.uint8)
recipe = replace(
    ls.recipes.find("mnist"),
    model=ls.models.LeNet(num_classes=2),
    data=ls.recipes.ImageData(image_size=28, preprocessing=ls.recipes.preprocessing.Lenet()),
    optimizer=ls.optim.SGD(0.01, momentum=0.9),
    batch_size=16,
    num_towers=4,
    end=ls.Steps(100_000),
    checkpoints=replace(ls.recipes.find("mnist").checkpoints, every=ls.Interval(20)),
    watch=replace(
        ls.recipes.find("mnist").watch,
        on_failure=sys.argv[2],
        metrics=ls.Interval(1),
        summaries=ls.Interval(0),
        console=ls.Interval(0),
    ),
    device="cpu",
)
reader = ls.data.Arrays({"image": images, "label": labels})
ls.run(recipe, folder / "run", reader=lambda split: reader if split == "train" else None)
"""
TORCHRUN = """
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder = Path(sys.argv[1])
(folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(784, 100))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
(folder / "run").mkdir(exist_ok=True)
for step in range(100_000):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(torch.randn(4, 784)), torch.randint(0, 10, (4,))).backward()
    optimizer.step()
    if dist.get_rank() == 0:
        if step == 0:
            with (folder / "run/history.jsonl").open("a") as file:
                file.write(json.dumps({"event": "resume"}) + "\\n")
        with (folder / "run/metrics.jsonl").open("a") as file:
            file.write("{}\\n")
"""


@dataclass(frozen=True)
class Failure:
    """How a worker is lost, and what the history of the run says when the others are there again."""

    what: str
    aim_seconds: float | None = None
    victim: int = 2
    signal: signal.Signals = signal.SIGKILL
    on_failure: str = "continue"
    event: str = "continue"
    by_torchrun: bool = False


FAILURES = (
    Failure("a worker is killed, and the others go on", 0.2),
    Failure("the chief is killed, and the others go on", 0.2, victim=0),
    Failure("a worker is killed, and one in its place takes part", 1.0, event="join"),
    Failure("a worker is stopped (2 s pass before it counts as lost)", 4.0, signal=signal.SIGSTOP),
    Failure("a worker is killed, and all start again from the checkpoint", 10.0, on_failure="restart", event="resume"),
    Failure("a worker is killed, and torchrun starts all again", by_torchrun=True, event="resume"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one kill: does it run?")
    arguments = parser.parse_args()
    failures = {failure.what: failure for failure in FAILURES[: 1 if arguments.quick else None]}
    seconds = take_turns(
        failures, 1 if arguments.quick else arguments.rounds, lambda what: recover(failures[what]), warm_up=0
    )
    lines = [line_of(failures[what], turns) for what, turns in seconds.items()]
    for line in lines:
        aim = f", aim {line['aim']:g} s" if line["aim"] else ""
        print(f"{line['what']}: {line['seconds']:.3f} s ({line['least']:.3f} to {line['most']:.3f}{aim})")
    if not arguments.quick:
        record(__file__, lines)


def line_of(failure: Failure, turns: Sequence[float]) -> Line:
    """The median of the turns, and the range that they lie in."""
    return {
        "what": f"1 of {NUM_WORKERS}: {failure.what}",
        "seconds": statistics.median(turns),
        "least": min(turns),
        "most": max(turns),
        "aim": failure.aim_seconds,
    }


def recover(failure: Failure) -> float:
    """Start a run, lose a worker of it, and return the seconds until the next step."""
    with tempfile.TemporaryDirectory(prefix="lockstep-recovery-") as name:
        folder = Path(name)
        (folder / "script.py").write_text(TORCHRUN if failure.by_torchrun else OURS)
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *command_of(failure), str(folder / "script.py"), name, failure.on_failure],
                env={**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            return seconds_to_next_step(failure, folder)
        except TimeoutError:
            print((folder / "log").read_text())
            raise
        finally:
            # The launcher ends its workers; the session holds whoever is left.
            process.kill()
            process.wait()
            end_workers(folder)


def command_of(failure: Failure) -> list[str]:
    """The command but for the script. torchrun is as told to recover at all, and as fast as it can."""
    if failure.by_torchrun:
        how = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--monitor-interval", "0.01"]
        return ["-m", "torch.distributed.run", f"--nproc-per-node={NUM_WORKERS}", "--max-restarts", "3", *how]
    return [
        *("-m", "lockstep", "run", "--workers", str(NUM_WORKERS), "--device", "cpu"),
        *("--on-failure", failure.on_failure, "--restarts", "3"),
    ]


def seconds_to_next_step(failure: Failure, folder: Path) -> float:
    """Lose the worker once steps are made; the seconds to the first step after the event that follows."""
    history, metrics = folder / "run/history.jsonl", folder / "run/metrics.jsonl"
    wait_for(lambda: lines_in(metrics) >= FIRST_STEPS)
    num_events = lines_in(history)
    began = time.perf_counter()
    os.kill(int((folder / f"pid-{failure.victim}").read_text()), failure.signal)
    wait_for(lambda: f'"{failure.event}"' in "".join(history.read_text().splitlines()[num_events:]))
    num_steps = lines_in(metrics)
    wait_for(lambda: lines_in(metrics) > num_steps)
    return time.perf_counter() - began


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(happened: object) -> None:
    """Look each millisecond whether something has happened."""
    assert callable(happened)
    ends = time.perf_counter() + TIMEOUT_SECONDS
    while not happened():
        if time.perf_counter() > ends:
            raise TimeoutError
        time.sleep(0.001)


def end_workers(folder: Path) -> None:
    """Kill the workers that outlive their launcher, as those of torchrun do."""
    needle = str(folder).encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if needle in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            continue


if __name__ == "__main__":
    main()
