"""A training step of Inception-v3 at 299 pixels: ours, a loop by hand around torchvision's net, TF-Slim's graph.

    python benchmarks/inception.py [--rounds 5] [--quick] [--batch-size 8] [--threads 2] [--python-of NAME=PYTHON...]

On this CPU, in float32 and bfloat16, in both memory formats, and compiled: which setting is fastest? All make the whole
update of the reference, on the same images in memory from the same weights (inception_peers.py), and take turns in one
run; one whose loss does not fall is not measured. PyTorch, PyTorch compiled and TF-Slim have processes of their own, in
the Python that --python-of names for them, else in this one. Published figures stand beside ours. The result is printed
and appended to benchmarks/results/inception.jsonl. On an accelerator: accelerator.py.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from inception_peers import NUM_CLASSES, SIZE, TRAINERS
from measuring import ALLOCATOR, WARM_UP_ROUNDS, Line, compared, record, show
from torch.utils.flop_counter import FlopCounterMode

from lockstep.models.inception_v3 import InceptionV3

SCRIPT = Path(__file__).with_name("inception_peers.py")
CPU_TRAINERS = [
    "ours, fp32",
    "ours, fp32, channels_last",
    "ours, bf16",
    "ours, bf16, channels_last",
    "ours, bf16, channels_last, compiled",
    "by hand, fp32",
    "by hand, fp32, channels_last",
    "by hand, bf16, channels_last",
    "TF-Slim, fp32",
    "TF-Slim, bf16",
]
COMPARISONS = [
    ("ours, fp32", "by hand, fp32"),
    ("ours, fp32, channels_last", "by hand, fp32, channels_last"),
    ("ours, bf16, channels_last", "by hand, bf16, channels_last"),
    ("ours, fp32, channels_last", "TF-Slim, fp32"),
    ("ours, bf16, channels_last", "TF-Slim, bf16"),
    ("ours, fp32, channels_last", "ours, fp32"),
    ("ours, bf16", "ours, fp32"),
    ("ours, bf16, channels_last", "ours, bf16"),
    ("ours, bf16, channels_last, compiled", "ours, bf16, channels_last"),
]
NEEDS = {"by hand": "torchvision", "TF-Slim": "tensorflow-cpu and tf-slim"}
"""By how the name of a trainer begins."""
REFERENCE_STEPS, REFERENCE_BATCH, REFERENCE_HOURS = 100_000, 256, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round: does it run?")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1, help="in a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--shards", nargs="+", default=[], metavar="FILE", help="records of ImageNet's form to train on"
    )
    parser.add_argument("--only", nargs="+", choices=TRAINERS, metavar="NAME")
    parser.add_argument("--limit", type=float, default=300, help="seconds for the first step, which may compile")
    parser.add_argument("--python-of", nargs="+", default=[], metavar="NAME=PYTHON", help="of PyTorch, of TF-Slim")
    arguments = parser.parse_args()
    settings = {
        "batch_size": arguments.batch_size,
        "threads": arguments.threads,
        "shards": arguments.shards,
    }
    names = arguments.only or CPU_TRAINERS
    pythons = dict(each.split("=", 1) for each in arguments.python_of)
    with tempfile.TemporaryDirectory(prefix="lockstep-inception-") as folder:
        hosts = Hosts(pythons, settings, Path(folder))
        try:
            trainers = started(names, hosts, arguments.limit)
            take_turns(trainers, 1 if arguments.quick else arguments.rounds, arguments.steps)
        finally:
            hosts.end()
    lines = list(results(trainers, settings))
    for text in (*choice(trainers), *published(trainers, settings["batch_size"])):
        print(text)
    if not arguments.quick:
        record(__file__, lines)


# Processes ----------------------------------------------------------------------------------------------------------


class Process:
    """Where some of the trainers live."""

    def __init__(
        self,
        python: str,
        settings: Mapping[str, Any],
        folder: Path,
        name: str,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        environment = {
            **os.environ,
            **variables,
            **ALLOCATOR,
            "OMP_NUM_THREADS": str(settings["threads"]),
            "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]).rstrip(
                os.pathsep
            ),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / f"compiled for {name}"),
        }
        self._errors = (folder / f"{name}.log").open("w+")
        self._process = subprocess.Popen(
            [python, str(SCRIPT), json.dumps(settings)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            start_new_session=True,
        )  # fmt: skip

    def ask(self, name: str, num_steps: int = 1, limit_seconds: float = 600) -> Line:
        """What the process answers.

        Raises:
            RuntimeError: it ended instead, or had to be ended.
        """
        assert self._process.stdin
        assert self._process.stdout
        timer = threading.Timer(limit_seconds, self._kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps({"name": name, "num_steps": num_steps}) + "\n")
            self._process.stdin.flush()
            while (line := self._process.stdout.readline()) and not line.startswith("{"):
                pass
        except BrokenPipeError:
            line = ""
        finally:
            is_late = not timer.is_alive()
            timer.cancel()
        if not line:
            last = Path(self._errors.name).read_text().strip().split("\n")[-1]
            raise RuntimeError(f"it took longer than {limit_seconds:.0f} seconds" if is_late else last)
        answer: Line = json.loads(line)
        return answer

    def end(self) -> None:
        self._kill()
        self._process.communicate()
        self._errors.close()

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # with what compiles for it


class Hosts:
    """The processes, each started when it is first needed."""

    def __init__(self, pythons: Mapping[str, str], settings: Mapping[str, Any], folder: Path) -> None:
        self._pythons, self._settings, self._folder = pythons, settings, folder
        self._processes: dict[str, Process] = {}

    def of(self, name: str) -> Process:
        """Where a trainer lives: most share a process, and the memory of what they compute; a compiled one does not."""
        library = "TF-Slim" if name.startswith("TF-Slim") else "PyTorch"
        key = name if "compiled" in name else library
        if key not in self._processes:
            python = self._pythons.get(library, sys.executable)
            self._processes[key] = Process(python, self._settings, self._folder, key)
        return self._processes[key]

    def end(self) -> None:
        for process in self._processes.values():
            process.end()


# Turns --------------------------------------------------------------------------------------------------------------


class Trainer:
    """One of the trainers, where it lives, with what was measured."""

    def __init__(self, name: str, process: Process, limit_seconds: float) -> None:
        made = process.ask(name)
        if "missing" in made:
            raise RuntimeError(made["missing"])
        self.name, self.made_of = name, made["made_of"]
        self._process = process
        first = process.ask(name, limit_seconds=limit_seconds)
        self.first_seconds = first["seconds"]
        self.losses = [first["loss"]]
        self.times: list[float] = []
        """Milliseconds of a step, by round."""

    def turn(self, num_steps: int) -> None:
        answer = self._process.ask(self.name, num_steps)
        self.losses.append(answer["loss"])
        self.times.append(1000 * answer["seconds"] / num_steps)

    @property
    def milliseconds(self) -> float:
        return statistics.median(self.times)


Trainers = dict[str, Trainer]


def started(names: Sequence[str], hosts: Hosts, limit_seconds: float) -> Trainers:
    """Those that can be started; of the others it is told why not."""
    trainers = {}
    for name in names:
        try:
            trainer = trainers[name] = Trainer(name, hosts.of(name), limit_seconds)
            print(f"{name:42} first step {trainer.first_seconds:6.1f} s    {trainer.made_of}", flush=True)
        except RuntimeError as error:
            print(f"{name} is not measured: {error}")
            if needs := next((text for start, text in NEEDS.items() if name.startswith(start)), None):
                print(f"    it needs {needs}; then --python-of PyTorch=.../bin/python TF-Slim=.../bin/python")
    return trainers


def take_turns(trainers: Trainers, rounds: int, num_steps: int) -> None:
    """So many turns of each after a warm-up, the order reversed every other round; those that learn are kept."""
    for number in range(rounds + WARM_UP_ROUNDS):
        for name in list(trainers)[:: 1 if number % 2 else -1]:
            trainers[name].turn(num_steps)
    for name, trainer in list(trainers.items()):
        trainer.times = trainer.times[WARM_UP_ROUNDS:]
        first, last = trainer.losses[0], trainer.losses[-1]
        if not last < first:
            print(f"{name} is not measured: it does not learn, its loss goes from {first:.2f} to {last:.2f}")
            del trainers[name]


# Results ------------------------------------------------------------------------------------------------------------


def results(trainers: Trainers, settings: Mapping[str, Any]) -> Iterator[Line]:
    """Each trainer, then the ratios of neighbouring rounds, printed on the way."""
    size = settings["batch_size"]
    for name, trainer in trainers.items():
        rate = images_per_second(trainer, size)
        print(f"{name:42} {rate:8.2f} images/s {trainer.milliseconds:8.0f} ms a step")
        yield {"trainer": name, **settings, "images_per_second": rate, **described(trainer)}
    for ours, theirs in COMPARISONS:
        if ours in trainers and theirs in trainers:
            line = compared({"ours": trainers[ours].times, "theirs": trainers[theirs].times})
            line |= {"comparison": f"{ours} / {theirs}", **settings}
            show(line)
            yield line


def described(trainer: Trainer) -> Line:
    return {
        "rounds": len(trainer.times),
        "ms": trainer.milliseconds,
        "min_ms": min(trainer.times),
        "max_ms": max(trainer.times),
        "first_seconds": trainer.first_seconds,
        "first_loss": trainer.losses[0],
        "last_loss": trainer.losses[-1],
        "made_of": trainer.made_of,
    }


def images_per_second(trainer: Trainer, batch_size: int) -> float:
    return 1000 * batch_size / trainer.milliseconds


def choice(trainers: Trainers) -> Iterator[str]:
    """Which of our settings is fastest, and when compiling pays."""
    ours = [each for name, each in trainers.items() if name.startswith("ours") and "records" not in name]
    plain = min(
        (each for each in ours if "compiled" not in each.name), key=lambda each: each.milliseconds, default=None
    )
    if plain is None:
        return
    yield f"fastest without compiling: {plain.name}"
    for each in ours:
        if "compiled" in each.name:
            saved = (plain.milliseconds - each.milliseconds) / 1000
            steps = f"won back in {each.first_seconds / saved:.0f} steps" if saved > 0 else "never won back"
            yield f"compiled: the {each.first_seconds:.0f} s of its first step are {steps}"


def published(trainers: Trainers, batch_size: int) -> Iterator[str]:
    """What was published of the reference, on other machines, beside ours."""
    ours = [each for name, each in trainers.items() if name.startswith("ours")]
    if not ours:
        return
    best = min(ours, key=lambda each: each.milliseconds)
    rate = images_per_second(best, batch_size)
    hours = REFERENCE_STEPS * REFERENCE_BATCH / rate / 3600
    reference_rate = REFERENCE_STEPS * REFERENCE_BATCH / REFERENCE_HOURS / 3600
    giga, millions = cost()
    here, records = f"{rate:.1f} images/s", of_records(trainers, batch_size)
    rows = [
        ("PUBLISHED, ON OTHER MACHINES", "there", f"here: {best.name}, batch {batch_size}"),
        (
            "reference, eight Tesla K40, 100,000 steps of 256",
            f"{REFERENCE_HOURS} hours, {reference_rate:.0f} images/s; 73.5 % precision@1",
            f"{hours:,.0f} hours, {here}; not trained here",
        ),
        ("reference, one Tesla K40c, batch 32", "9.5 images/s", here),
        ("reference, the loss at its start", "13 to 14", f"{best.losses[0]:.1f}"),
        ("TensorFlow's benchmarks of 2017, P100: 1, 2, 4, 8", "142, 284, 569, 1131 images/s", here),
        ("the same from records", "142, 278, 551, 1079 images/s", records),
        ("the same from records, K80: 1, 2, 4, 8", "30.6, 58.4, 115, 225 images/s", records),
        ("the same, K80 of several hosts: 1, 8, 16, 32, 64", "29.7, 229, 459, 902, 1783 images/s", "one device"),
        ("the paper: multiply-adds of an image", "5 billion", f"{giga:.1f} billion"),
        ("the paper: parameters", "below 25 million", f"{millions:.1f} million"),
        ("the paper: errors with one crop", "21.2 % top-1, 5.6 % top-5", "not trained here"),
        ("TF-Slim's checkpoint: accuracy", "78.0 % top-1, 93.9 % top-5", "not trained here"),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for what, there, ours_here in rows:
        yield f"{what:{widths[0]}}  {there:{widths[1]}}  {ours_here}"


def of_records(trainers: Trainers, batch_size: int) -> str:
    trainer = trainers.get("ours, bf16, channels_last, records")
    return f"{images_per_second(trainer, batch_size):.1f} images/s" if trainer else "not measured"


def cost() -> tuple[float, float]:
    """Billions of multiply-adds for one image, and millions of parameters, both without the auxiliary head."""
    net = InceptionV3(num_classes=NUM_CLASSES, auxiliary=False).build(seed=0).to("meta").eval()
    counter = FlopCounterMode(display=False)
    with counter:
        net(torch.empty(1, 3, SIZE, SIZE, device="meta"))
    return counter.get_total_flops() / 2e9, sum(p.numel() for p in net.parameters()) / 1e6


if __name__ == "__main__":
    main()
