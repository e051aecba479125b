"""How the benchmarks here measure: parts in fresh processes, contenders in turn, ratios of neighbouring rounds."""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from lockstep.workers.devices import describe_machine
from lockstep.workers.environment import SETTINGS

ALLOCATOR = {name: value for name, value in SETTINGS.items() if name.startswith("MALLOC_")}
"""What `lockstep run` sets for its workers, and so for every contender."""
WARM_UP_ROUNDS = 2
Line = dict[str, Any]
T = TypeVar("T")


def run_part(
    script: str,
    part: str,
    rounds: int,
    *,
    threads: int,
    num_workers: int = 1,
    settings: Mapping[str, str] = ALLOCATOR,
) -> list[Line]:
    """Run one part of a script in fresh processes; the lines that the first reports.

    The script is called with `--part` and `--rounds`, with these settings in its environment: by default its allocator
    keeps its pages.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, script, "--part", part, "--rounds", str(rounds)]
    processes = []
    for rank in range(num_workers):
        seat = {} if num_workers == 1 else {
            "RANK": str(rank), "WORLD_SIZE": str(num_workers), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(num_workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        environment = {**os.environ, **settings, "OMP_NUM_THREADS": str(threads), **seat}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), f"{part} failed"
    return [json.loads(line) for line in outputs[0].splitlines() if line.startswith("{")]


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    per_round: int = 1,
    before: Callable[[str], object] = lambda name: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Milliseconds of each contender, round by round, the order reversed every other round, after a warm-up.

    Args:
        contenders: by name.
        rounds: that are kept.
        per_round: calls in a row, of which the mean is taken.
        before: called with the name before each contender's turn, outside its time.
        clock: `time.process_time` counts what the process computes, whoever else is busy.
    """

    def milliseconds(name: str) -> float:
        before(name)
        began = clock()
        for _ in range(per_round):
            contenders[name]()
        return (clock() - began) / per_round * 1000

    return take_turns(contenders, rounds, milliseconds)


def take_turns(
    names: Iterable[str], rounds: int, turn: Callable[[str], T], *, warm_up: int = WARM_UP_ROUNDS
) -> dict[str, list[T]]:
    """What the turns of each return, round by round, the order reversed every other round, after a warm-up."""
    turns: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds + warm_up):
        for name in list(turns)[:: 1 if number % 2 else -1]:
            turns[name].append(turn(name))
    return {name: values[warm_up:] for name, values in turns.items()}


def ratio_of_turns(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """The ratio of neighbouring turns: the median, and what lies between a quarter and three quarters of the rounds."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return statistics.median(ratios), ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]


class Pipeline:
    """A pipeline in a process of its own, which tells what it is made of, and then reads batches when it is told to.

    Raises:
        ImportError: it cannot be started there.
    """

    def __init__(self, command: Sequence[str], log: Path, **environment: str) -> None:
        # Libraries talk to standard error, of corrupt EXIF for instance; of what they say only the end is wanted.
        self._errors = log.open("w+")
        self._process = subprocess.Popen(
            command, env={**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip
        while (line := self._answer()) and not line.startswith("{"):
            pass
        if not line:
            self.end()
            raise ImportError(Path(self._errors.name).read_text().strip().split("\n")[-1])
        self.about: Line = json.loads(line)

    def read(self, num_batches: int) -> str:
        """Have it read so many batches; its answer."""
        assert self._process.stdin
        self._process.stdin.write(f"{num_batches}\n")
        self._process.stdin.flush()
        answer = self._answer()
        assert answer, Path(self._errors.name).read_text()
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _answer(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()


def started(
    names: Sequence[str], pythons: Mapping[str, str], start: Callable[[str, str], T], needed: Callable[[str], str]
) -> dict[str, T]:
    """Those that can be started in the Python that is named for them, else in this one; of the others it is told why.

    Args:
        names: of pipelines.
        pythons: by how the names begin.
        start: given a name and a Python.
        needed: what it takes to start a pipeline.
    """
    contenders = {}
    for name in names:
        python = next((each for beginning, each in pythons.items() if name.startswith(beginning)), sys.executable)
        try:
            contenders[name] = start(name, python)
        except ImportError as error:
            print(f"{name} is not measured: {error}\n    {needed(name)}")
    return contenders


def compared(times: Mapping[str, list[float]]) -> Line:
    """Medians, the range they lie in, and the ratio of ours to theirs where there are both."""
    line: Line = {"rounds": len(times["ours"]), "threads": torch.get_num_threads()}
    for name, values in times.items():
        line |= {f"{name}_ms": statistics.median(values), f"{name}_min_ms": min(values), f"{name}_max_ms": max(values)}
    if "theirs" in times:
        line["ratio"], line["ratio_low"], line["ratio_high"] = ratio_of_turns(times["ours"], times["theirs"])
    return line


def report(comparison: str, line: Line) -> None:
    """Hand a line from a part to `run_part`."""
    print(json.dumps({"comparison": comparison, **line}), flush=True)


def show(line: Line) -> None:
    """Print a line for people."""
    ours, theirs, threads = f"{line['ours_ms']:8.3f} ms", f"{line.get('theirs_ms', 0.0):8.3f} ms", line["threads"]
    text = f"{line['comparison']:50} {threads} {'thread ' if threads == 1 else 'threads'} {ours}"
    if "ratio" in line:
        ratio, low, high = (
            f"{line[name]:{'.2f' if line[name] > 0.1 else '.1g'}}" for name in ("ratio", "ratio_low", "ratio_high")
        )
        text += f" / {theirs} = {ratio} (rounds {low} to {high})"
    print(text)


def record(script: str, lines: list[Line], allocator: Mapping[str, str] = ALLOCATOR) -> None:
    """Append lines to the results of a script, five digits a number, with what they were measured on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": describe_machine(),
        "cores": os.cpu_count(),
        "allocator": "lockstep run" if allocator == ALLOCATOR else allocator,
    }
    results = Path(script).parent / "results" / f"{Path(script).stem}.jsonl"
    with results.open("a") as file:
        for line in lines:
            rounded = {
                name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in line.items()
            }
            file.write(json.dumps({**about, **rounded}, separators=(",", ":")) + "\n")
