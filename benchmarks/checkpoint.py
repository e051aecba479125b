"""What a save costs the loop: ours in the background and waiting, torch.save, and torch.distributed's async_save.

    python benchmarks/checkpoint.py [--rounds 5] [--quick] [--folder FOLDER]

25 million parameters with momentum and a moving average, 300 MB. In each round each contender saves after a step, in
turn; the same loop goes on with the same steps until the checkpoint is written. Its stall is the time that this took
longer than as many steps take without a save, which each turn measures before and after. Held is the part of it in
which the loop did nothing but wait, in the call. Both are divided by the time of
the torch.save of the same round. Once with steps of a batch of 64, once with tiny ones of a single example; with one
thread and with two. Then the same state is loaded, each time in a fresh process. The result is printed and appended to
benchmarks/results/checkpoint.jsonl. The folder decides which disk is measured; by default that of temporary files.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from measuring import Line, compared, record, report, run_part, show, take_turns
from torch import Tensor, nn

import lockstep as ls
from lockstep.checkpoints import Retention, Store
from lockstep.training.saving import snapshot

NUM_LAYERS, WIDTH = 24, 1024
BATCHES = {"steps": 64, "tiny": 1}
"""Examples in a batch, by part."""
PLAIN_STEPS = 5
"""Steps without a save that a turn begins and ends with; at least as many come after the save."""
AGAINST = "torch.save"
FOLDER = "LOCKSTEP_BENCHMARK_FOLDER"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round: does it run?")
    parser.add_argument("--folder", type=Path, help="where the checkpoints go")
    parser.add_argument("--part", choices=[*PARTS], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        os.environ[FOLDER] = str(arguments.folder)
    if arguments.part:
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")  # that it is alone, and overwrites
        with tempfile.TemporaryDirectory(prefix="lockstep-checkpoint-", dir=os.environ.get(FOLDER)) as folder:
            PARTS[arguments.part](Path(folder), arguments.rounds)
        return
    lines = []
    rounds = 1 if arguments.quick else arguments.rounds
    for threads in (1, 2):
        for part in BATCHES:
            measured = run_part(__file__, part, rounds, threads=threads)
            for line in measured:
                show_stall(line)
            lines += measured
        lines.append(compared_loads(rounds, threads))
        show(lines[-1])
    if not arguments.quick:
        record(__file__, lines)


# The run ------------------------------------------------------------------------------------------------------------


def run_of(batch_size: int) -> tuple[ls.TrainState, ls.data.Loader]:
    torch.manual_seed(1)
    layers: list[nn.Module] = [each for _ in range(NUM_LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    state = ls.TrainState(
        nn.Sequential(*layers), ls.optim.SGD(1e-3, momentum=0.9), average=ls.optim.MovingAverage(0.9999)
    )
    fields = {"x": torch.randn(1024, WIDTH)}
    return state, ls.data.Loader(ls.data.Arrays(fields), batch_size=batch_size)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": (model(batch["x"]) - 1).square().mean()}


def steps_of(state: ls.TrainState, loader: ls.data.Loader) -> Iterator[object]:
    return ls.train_steps(state, losses, loader)


# The contenders -----------------------------------------------------------------------------------------------------


@dataclass
class Contender:
    save: Callable[[], object]
    folder: Path
    is_written: Callable[[], bool] = lambda: True
    """Whether the last checkpoint is on the disk, or where its writer leaves it."""


def contenders_of(state: ls.TrainState, loader: ls.data.Loader, folder: Path) -> dict[str, Contender]:
    background = Store(folder / "background", Retention(newest=1))
    waiting = Store(folder / "waiting", Retention(newest=1))
    saver = ls.Saver(background)
    saved_step = 0

    def begin() -> None:
        nonlocal saved_step
        saved_step = state.step
        saver.save(state, loader)

    file, parts = folder / "file" / "state.pt", folder / "parts"
    file.parent.mkdir()
    durable = folder / "durable"
    durable.mkdir()

    def save_durably() -> None:
        """As careful people do: what was there stays until the new file is on the disk."""
        with (durable / "new.pt").open("wb") as new:
            torch.save(flat(state, loader), new)
            new.flush()
            os.fsync(new.fileno())
        (durable / "new.pt").replace(durable / "state.pt")

    future: Future[Any] | None = None

    def begin_distributed() -> None:
        nonlocal future
        writer = dcp.FileSystemWriter(parts, overwrite=True)
        begun = dcp.async_save(flat(state, loader), storage_writer=writer, no_dist=True)
        assert isinstance(begun, Future)
        future = begun

    def distributed_is_written() -> bool:
        return future is not None and future.done() and future.exception() is None

    return {
        "ls.Saver": Contender(begin, background.folder, lambda: background.newest() == saved_step),
        "ls.save": Contender(lambda: ls.save(state, loader, waiting), waiting.folder),
        AGAINST: Contender(lambda: torch.save(flat(state, loader), file), file.parent),
        f"{AGAINST}, fsync": Contender(save_durably, durable),
        "async_save": Contender(begin_distributed, parts, distributed_is_written),
    }


def flat(state: ls.TrainState, loader: ls.data.Loader) -> dict[str, Tensor]:
    _, sections, _ = snapshot(state, loader)
    return {f"{section}.{name}": tensor for section, members in sections.items() for name, tensor in members.items()}


# Stalls -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """Milliseconds of one save."""

    step: float
    """Of a step without a save."""
    held: float
    """In which the loop did nothing: the call."""
    stall: float
    """What the steps took longer, the call included, until the checkpoint was written."""
    written: float
    """From the call until the checkpoint was written; seen after whole steps."""


def turn_of(contender: Contender, steps: Iterator[object]) -> Turn:
    before = plain(steps)
    began = time.perf_counter()
    contender.save()
    called = time.perf_counter()
    num_steps, written = 0, called if contender.is_written() else 0.0
    while num_steps < PLAIN_STEPS or not written:
        next(steps)
        num_steps += 1
        if not written and contender.is_written():
            written = time.perf_counter()
    ended = time.perf_counter()
    usual = (before + plain(steps)) / 2
    stall = ended - began - num_steps * usual
    return Turn(*(1000 * each for each in (usual, called - began, stall, written - began)))


def plain(steps: Iterator[object]) -> float:
    """The median of the seconds of some steps."""
    times = []
    for _ in range(PLAIN_STEPS):
        began = time.perf_counter()
        next(steps)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure_stalls(part: str, folder: Path, rounds: int) -> None:
    state, loader = run_of(BATCHES[part])
    steps, contenders = steps_of(state, loader), contenders_of(state, loader, folder)
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    for number in range(rounds + 1):  # the first one warms up
        for name in list(contenders)[:: 1 if number % 2 else -1]:
            turns[name].append(turn_of(contenders[name], steps))
    kept = {name: each[1:] for name, each in turns.items()}
    for name, each in kept.items():
        report(f"{name}, batch of {BATCHES[part]}", stalled(each, kept[AGAINST], contenders[name].folder))


def stalled(turns: list[Turn], against: list[Turn], folder: Path) -> Line:
    line: Line = {"rounds": len(turns), "threads": torch.get_num_threads(), "bytes": bytes_in(folder)}
    for name in ("step", "held", "stall", "written"):
        line[f"{name}_ms"] = statistics.median(getattr(turn, name) for turn in turns)
    for name in ("held", "stall"):
        shares = sorted(getattr(turn, name) / other.held for turn, other in zip(turns, against, strict=True))
        line[f"{name}_share"], low, high = (
            statistics.median(shares),
            shares[len(shares) // 4],
            shares[-1 - len(shares) // 4],
        )
        line |= {f"{name}_share_low": low, f"{name}_share_high": high}
    return line


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def show_stall(line: Line) -> None:
    threads = f"{line['threads']} {'thread ' if line['threads'] == 1 else 'threads'}"
    shares = ", ".join(
        f"{name} {line[f'{name}_ms']:6.0f} ms = {line[f'{name}_share']:6.3f} of {AGAINST} "
        f"({line[f'{name}_share_low']:.3f} to {line[f'{name}_share_high']:.3f})"
        for name in ("held", "stall")
    )
    rest = f"written after {line['written_ms']:.0f}, a step {line['step_ms']:.1f} ms; {line['bytes'] / 1e6:.0f} MB"
    print(f"{line['comparison']:24} {threads} {shares}; {rest}")


# Loading ------------------------------------------------------------------------------------------------------------


def compared_loads(rounds: int, threads: int) -> Line:
    """Each load in a process of its own, whose memory is new, as it is where a run is resumed."""

    def milliseconds(name: str) -> float:
        return float(run_part(__file__, name, 1, threads=threads)[0]["ms"])

    line = compared(take_turns(("ours", "theirs"), rounds, milliseconds, warm_up=0))
    return {"comparison": "ls.resume / torch.load, weights_only", **line, "threads": threads}


def measure_load(name: str, folder: Path) -> None:
    state, loader = run_of(BATCHES["tiny"])
    next(steps_of(state, loader))
    ls.save(state, loader, folder)
    file = folder / "state.pt"
    torch.save(flat(state, loader), file)
    own = flat(state, loader)
    began = time.perf_counter()
    if name == "ours":
        ls.resume(state, loader, folder)
    else:
        for key, tensor in torch.load(file, weights_only=True).items():
            own[key].copy_(tensor)
    report(name, {"ms": 1000 * (time.perf_counter() - began)})


PARTS: dict[str, Callable[[Path, int], None]] = {
    "steps": lambda folder, rounds: measure_stalls("steps", folder, rounds),
    "tiny": lambda folder, rounds: measure_stalls("tiny", folder, rounds),
    "ours": lambda folder, rounds: measure_load("ours", folder),
    "theirs": lambda folder, rounds: measure_load("theirs", folder),
}


if __name__ == "__main__":
    main()
