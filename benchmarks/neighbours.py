"""A training step of Inception-v3 beside busy neighbours, with OpenMP threads that spin while idle or sleep soon.

    python benchmarks/neighbours.py [--rounds 7] [--quick] [--settings NAME=VALUE...] [--python-of TF-Slim=PYTHON]

The step of inception.py at 299 pixels and batch 8: alone on the machine, beside a process that only computes, and fed
by loader processes of its own, which decode JPEGs from records. Ours runs once as OpenMP is installed, and once with
each of the settings, in processes of their own; TF-Slim's graph, which has no OpenMP, as it is. Everybody takes turns
in one run. --settings takes environment variables, several of one setting joined by commas, and so compares others:

    --settings GOMP_SPINCOUNT=100 GOMP_SPINCOUNT=1000 OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=1000,OMP_PROC_BIND=true

The result is printed and appended to benchmarks/results/neighbours.jsonl.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inception import Process
from input import prepare
from measuring import WARM_UP_ROUNDS, Line, compared, record, show

from lockstep.workers.environment import SHORT_WAITS, chosen_waits

AS_INSTALLED = "as installed"
OURS, TF_SLIM = ("ours, fp32, channels_last", "ours, bf16, channels_last"), ("TF-Slim, fp32", "TF-Slim, bf16")
QUIET, BUSY, LOADERS = "quiet", "beside one busy process", "with own loader processes"
AIM_BUSY, AIM_QUIET = 2.3, 1.01
IMAGES = Path(__file__).parents[1] / "tests" / "fixtures" / "coco" / "images"
BUSY_CODE = "print(flush=True)\nwhile True: pass"
Key = tuple[str, str, str]
"""Trainer, setting, situation."""


@dataclass
class Contender:
    """A trainer with a setting, in one situation."""

    trainer: str
    setting: str
    situation: str
    process: Process
    times: list[float] = field(default_factory=list)
    """Milliseconds of a step, by round."""

    @property
    def key(self) -> Key:
        return self.trainer, self.setting, self.situation

    def start(self) -> str:
        """Make the trainer and its first step; returns what it is made of.

        Raises:
            RuntimeError: it cannot be made.
        """
        made = self.process.ask(self._name)
        if "missing" in made:
            raise RuntimeError(made["missing"])
        if "made_of" in made:  # else another situation has made it already
            self.process.ask(self._name)
        return str(made.get("made_of", ""))

    def turn(self, num_steps: int) -> None:
        with busy_process() if self.situation == BUSY else nullcontext():
            self.times.append(1000 * self.process.ask(self._name, num_steps)["seconds"] / num_steps)

    @property
    def _name(self) -> str:
        return f"{self.trainer}, records" if self.situation == LOADERS else self.trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one round: does it run?")
    parser.add_argument("--steps", type=int, default=1, help="in a turn")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--settings", nargs="+", metavar="NAME=VALUE", default=[f"GOMP_SPINCOUNT={SHORT_WAITS['GOMP_SPINCOUNT']}"]
    )
    parser.add_argument("--images", nargs="+", type=Path, metavar="FOLDER", default=[IMAGES], help="of JPEGs")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[*OURS, *TF_SLIM], default=[*OURS, *TF_SLIM])
    parser.add_argument("--python-of", nargs="+", default=[], metavar="NAME=PYTHON", help="of PyTorch, of TF-Slim")
    arguments = parser.parse_args()
    chosen = chosen_waits(os.environ)
    assert not chosen, f"unset {', '.join(chosen)}: they would hold for all"
    pythons = dict(each.split("=", 1) for each in arguments.python_of)
    with tempfile.TemporaryDirectory(prefix="lockstep-neighbours-") as folder:
        print(prepare(Path(folder), arguments.images))
        settings = {
            "batch_size": arguments.batch_size,
            "threads": arguments.threads,
            "shards": [str(path) for path in sorted(Path(folder).glob("train-*"))],
        }
        processes = hosts([AS_INSTALLED, *arguments.settings], pythons, settings, Path(folder), arguments.only)
        try:
            contenders = started(processes, arguments.only)
            if arguments.quick:
                take_turns(contenders, 1, arguments.steps, warm_up_rounds=0)
            else:
                take_turns(contenders, arguments.rounds, arguments.steps)
        finally:
            for process in processes.values():
                process.end()
    lines = list(results(contenders, {"batch_size": arguments.batch_size, "threads": arguments.threads}))
    if not arguments.quick:
        record(__file__, lines)


# Processes ----------------------------------------------------------------------------------------------------------


@contextmanager
def busy_process() -> Iterator[None]:
    """A neighbour that only computes, with one thread."""
    process = subprocess.Popen([sys.executable, "-c", BUSY_CODE], stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def hosts(
    names: Sequence[str], pythons: Mapping[str, str], settings: Mapping[str, Any], folder: Path, trainers: Sequence[str]
) -> dict[str, Process]:
    """A process for each setting of ours, by its name, and one for TF-Slim."""
    python = pythons.get("PyTorch", sys.executable)
    processes = {}
    for name in names if set(trainers) & set(OURS) else ():
        variables = {} if name == AS_INSTALLED else dict(each.split("=", 1) for each in name.split(","))
        processes[name] = Process(python, settings, folder, f"ours {len(processes)}", variables)
    if set(trainers) & set(TF_SLIM):
        processes["TF-Slim"] = Process(pythons.get("TF-Slim", sys.executable), settings, folder, "TF-Slim", {})
    return processes


def started(processes: Mapping[str, Process], trainers: Sequence[str]) -> list[Contender]:
    """Those that can be started, the settings of one trainer in one situation beside each other."""
    contenders: list[Contender] = []
    for trainer in trainers:
        is_ours = trainer in OURS
        for situation in (QUIET, BUSY, LOADERS) if is_ours else (QUIET, BUSY):
            for setting in [name for name in processes if (name == "TF-Slim") != is_ours]:
                contender = Contender(trainer, setting if is_ours else AS_INSTALLED, situation, processes[setting])
                try:
                    if made_of := contender.start():
                        print(f"{trainer:28} {setting:28} {made_of}", flush=True)
                    contenders.append(contender)
                except RuntimeError as error:
                    print(f"{trainer}, {setting}, {situation}, is not measured: {error}")
    return contenders


def take_turns(
    contenders: Sequence[Contender], rounds: int, num_steps: int, warm_up_rounds: int = WARM_UP_ROUNDS
) -> None:
    """So many turns of each after a warm-up, the order reversed every other round."""
    for number in range(rounds + warm_up_rounds):
        for contender in contenders[:: 1 if number % 2 else -1]:
            contender.turn(num_steps)
        print(f"round {number + 1} of {rounds + warm_up_rounds}", flush=True)
    for contender in contenders:
        contender.times = contender.times[warm_up_rounds:]


# Results ------------------------------------------------------------------------------------------------------------


def results(contenders: Sequence[Contender], about: Line) -> Iterator[Line]:
    """Each situation beside quiet, and each setting beside none, in neighbouring rounds; printed on the way."""
    times = {contender.key: contender.times for contender in contenders}

    def line(comparison: str, ours: Key, theirs: Key, aim: float | None) -> Line:
        found = compared({"ours": times[ours], "theirs": times[theirs]})
        found |= {"comparison": f"{ours[0]}: {comparison}", "aim": aim, **about}
        show(found)
        return found

    for key in times:
        trainer, setting, situation = key
        is_set = setting != AS_INSTALLED
        quiet, installed = (trainer, setting, QUIET), (trainer, AS_INSTALLED, situation)
        if key != quiet and quiet in times:
            yield line(
                f"{situation} / {QUIET}, {setting}", key, quiet, AIM_BUSY if is_set and situation == BUSY else None
            )
        if key != installed and installed in times:
            yield line(
                f"{setting} / {AS_INSTALLED}, {situation}", key, installed, AIM_QUIET if situation == QUIET else None
            )


if __name__ == "__main__":
    main()
