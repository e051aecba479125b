"""As installed against as installed: one training in Lockstep, PyTorch, Lightning, Fabric, Accelerate, Keras, TF-Slim.

    python benchmarks/peers.py [--rounds 7] [--only tiny mnist ...] [--quick] [--environments .venv-peers]

Makes the environments that are not there, with pip, and runs everyone as its documentation says, each in processes of
its own, in turns of some steps; ours by `lockstep run`. All train the same net from the same weights on the same
batches, in float32 or bfloat16; who ends with another loss than ours is not measured. The scripts lie in
benchmarks/peer_scripts, the pipelines that read JPEGs are those of input.py. The result is printed, appended to
benchmarks/results/peers.jsonl, and written to docs/benchmarks/peers.md and peers.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import input as pipelines
import numpy as np
import torch
from measuring import Line, ratio_of_turns, record, take_turns

import lockstep as ls

ROOT = Path(__file__).parent.parent
SCRIPTS = Path(__file__).with_name("peer_scripts")
sys.path.append(str(SCRIPTS))
from lockstep_nets import OWN_NETS  # noqa: E402
from torch_parts import NETS  # noqa: E402
from turns import DETECTORS, WORKLOADS, Workload  # noqa: E402

PACKAGES = {
    "torch": (f"torch=={torch.__version__.partition('+')[0]}", "torchvision", "torchcodec", "lightning", "accelerate"),
    "tensorflow": ("tensorflow-cpu==2.21.*", "keras", "tf-slim"),
}
"""What is installed in each environment, as pip finds it; ours is the one that runs this."""
WARM_UP, LIMIT_SECONDS = 2, 600
US = "Lockstep"
SETTINGS = ("OMP_", "MALLOC_", "GOMP_", "KMP_", "MKL_", "PYTHONDONTWRITEBYTECODE")
"""How variables begin that no contender gets from the environment of this process."""


@dataclass(frozen=True)
class Comparison:
    title: str
    workload: str
    steps: int
    """In a turn; 0: a turn is a fresh process, to the end of its first step."""
    precision: str = "fp32"
    num_workers: int = 1
    what: str = "train"
    """What a step of a turn is: one of the training, an evaluation of all examples, a save, or a batch of input."""
    tolerance: float = 0.01
    """How far the loss after all steps may be from ours, as a part of it."""


COMPARISONS = {
    "tiny": Comparison("two small layers, batch 32", "tiny", steps=1000),
    "mnist": Comparison("MNIST net, batch 128", "mnist", steps=10),
    "mnist_bf16": Comparison("MNIST net, batch 128, bf16", "mnist", steps=10, precision="bf16", tolerance=0.05),
    "mnist_workers": Comparison("MNIST net, two workers, batch 128 each", "mnist", steps=10, num_workers=2),
    "resnet18": Comparison("ResNet-18 at 64 pixels, batch 32", "resnet18", steps=4, tolerance=0.05),
    "inception": Comparison("Inception-v3 at 299 pixels, batch 8", "inception", steps=1, tolerance=0.05),
    "inception_bf16": Comparison(
        "Inception-v3 at 299 pixels, batch 8, bf16", "inception", steps=1, precision="bf16", tolerance=0.05
    ),
    "ssdlite": Comparison("SSDlite at 320 pixels, batch 4", "ssdlite", steps=3, tolerance=0.02),
    "ssd300": Comparison("SSD300, batch 4", "ssd300", steps=1),
    "input": Comparison(
        "JPEGs decoded and cropped to 224 pixels, time of a core", "input", steps=8, what="input", tolerance=0.1
    ),
    "evaluate": Comparison("MNIST net, an evaluation of 12,800 digits", "mnist", steps=1, what="evaluate"),
    "save": Comparison("MNIST net with momentum, a save of 26 MB", "mnist", steps=10, what="save"),
    "start": Comparison("from the command to the first step", "mnist", steps=0),
    "start_workers": Comparison("from the command to the first step, two workers", "mnist", steps=0, num_workers=2),
}


@dataclass(frozen=True)
class Contender:
    name: str
    environment: str | None
    """None: the Python that runs this."""
    script: str
    takes: Sequence[str] = ("fp32", "bf16", "workers", "train", "detectors", "evaluate", "save")
    """What of it is measured."""
    words: Sequence[str] = ()
    pipeline: str = ""
    """That of input.py which it would take."""

    def command(self, comparison: Comparison, python: str) -> list[str]:
        num_workers, launcher = str(comparison.num_workers), []
        if self.environment is None:
            launcher = ["-m", "lockstep", "run", "--workers", num_workers, "--hang-seconds", "0"]
        elif self.script in ("torch_script", "accelerate_script") and comparison.num_workers > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_workers]
        return [python, *launcher, str(SCRIPTS / f"{self.script}.py"), *self.words]

    def takes_part(self, comparison: Comparison) -> bool:
        if comparison.what == "input":
            return bool(self.pipeline)
        needed = {comparison.precision, comparison.what, *(["workers"] if comparison.num_workers > 1 else [])}
        needed |= {"detectors"} if comparison.workload in DETECTORS else set()
        return needed <= {*self.takes}


CONTENDERS = [
    Contender(US, None, "lockstep_script", pipeline="ours"),
    Contender("PyTorch", "torch", "torch_script", pipeline="torchvision, tensors"),
    Contender(
        "PyTorch, compiled",
        "torch",
        "torch_script",
        takes=("fp32", "bf16", "workers", "train", "evaluate"),
        words=["--compile"],
    ),
    Contender("Lightning", "torch", "lightning_script"),
    Contender("Fabric", "torch", "fabric_script"),
    Contender("Accelerate", "torch", "accelerate_script"),
    Contender(
        "Keras", "tensorflow", "keras_script", takes=("fp32", "bf16", "train", "evaluate", "save"), pipeline="tf.data"
    ),
    Contender(
        "Keras, XLA", "tensorflow", "keras_script", takes=("fp32", "bf16", "train", "evaluate"), words=["--compile"]
    ),
    Contender("TF-Slim", "tensorflow", "tf_slim_script", takes=("fp32", "train"), pipeline="tf.data, aliased"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, default=list(COMPARISONS), metavar="NAME")
    names = [each.name for each in CONTENDERS]
    parser.add_argument("--contenders", nargs="+", choices=names, default=names, metavar="NAME", help="ours among them")
    parser.add_argument("--quick", action="store_true", help="one round of few steps: does it run?")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-peers", help="made there with pip")
    arguments = parser.parse_args()
    contenders = [each for each in CONTENDERS if each.name in arguments.contenders]
    needed = [name for name in PACKAGES if name in {each.environment for each in contenders}]
    pythons = {name: environment(arguments.environments / name, PACKAGES[name]) for name in needed}
    with tempfile.TemporaryDirectory(prefix="lockstep-peers-") as folder:
        write_inputs(Path(folder))
        for name in arguments.only:
            lines = compare(name, contenders, pythons, Path(folder), rounds=1 if arguments.quick else arguments.rounds)
            for line in lines:
                print(in_words(line), flush=True)
            if not arguments.quick:
                record(__file__, lines, {})
                write_page(ROOT / "docs/benchmarks")


def environment(folder: Path, packages: Sequence[str]) -> str:
    """Make an environment where it is not there; its Python."""
    python, made = folder / "bin/python", folder / "packages.txt"
    if folder.exists() and not made.exists():
        raise SystemExit(f"{folder} is there, and not from here: name another folder with --environments, or delete it")
    if not made.exists() or made.read_text().split() != [*packages]:
        print(f"installing {', '.join(packages)} in {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        made.write_text("")  # from here, and not complete
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], check=True
        )
        made.write_text("\n".join(packages))
    return str(python)


def write_inputs(folder: Path) -> None:
    """The data and the first weights of all nets: digits of MNIST, else noise with labels that can be learned."""
    generator = np.random.default_rng(0)
    for workload in WORKLOADS.values():
        torch.manual_seed(0)
        weights = {name: value.numpy() for name, value in {**NETS, **OWN_NETS}[workload.net]().state_dict().items()}
        np.savez(folder / f"{workload.net}-weights.npz", **weights)
        np.savez(folder / f"{workload.net}-data.npz", **examples(workload, generator))


def examples(workload: Workload, generator: np.random.Generator) -> dict[str, Any]:
    """By the names of `turns.arrays`."""
    labels = generator.integers(0, workload.num_classes, workload.num_examples)
    size = workload.image_size
    if workload.net == "mnist":
        digits = ls.data.mnist_reader("train").read_batch(np.arange(workload.num_examples))
        return {"image": np.asarray(digits["image"]), "label": np.asarray(digits["label"]).astype(np.int64)}
    if workload.net == "tiny":
        images = generator.standard_normal((10, 64), dtype=np.float32)[labels]
        images += generator.standard_normal(images.shape, dtype=np.float32)
        return {"image": images, "label": labels}
    images = generator.integers(0, 256, (workload.num_classes, 3, size, size), dtype=np.uint8)[labels]
    if workload.net not in DETECTORS:
        return {"image": images, "label": labels}
    lengths = generator.integers(1, 13, workload.num_examples)
    corners = generator.uniform(0, 0.6, (lengths.sum(), 2))
    boxes = np.concatenate([corners, corners + generator.uniform(0.1, 0.4, corners.shape)], 1) * size
    labels = generator.integers(1, workload.num_classes + 1, lengths.sum())
    return {"image": images, "boxes": boxes.astype(np.float32), "labels": labels, "lengths": lengths}


# Turns --------------------------------------------------------------------------------------------------------------


class Process:
    """A contender at work, which makes the steps that it is told to."""

    def __init__(self, command: Sequence[str], comparison: Comparison, num_steps: int, folder: Path) -> None:
        address = folder / "socket"
        address.unlink(missing_ok=True)
        words = ["--workload", comparison.workload, "--precision", comparison.precision, "--folder", str(folder)]
        words += ["--num-workers", str(comparison.num_workers), "--steps", str(num_steps), "--what", comparison.what]
        self._errors = (folder / f"{time.monotonic_ns()}.log").open("w+")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen()
            own = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
            self._process = subprocess.Popen(
                [*command, *words],
                env=own | {"PEER_SOCKET": str(address)},
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            deadline = time.monotonic() + LIMIT_SECONDS
            while not select.select([listener], [], [], 0.05)[0]:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.fail()
            self._connection = listener.accept()[0]
        self._connection.settimeout(LIMIT_SECONDS)
        self._lines = self._connection.makefile("r")
        self.made_of: dict[str, str] = self._answer()

    def make_steps(self, number: int) -> float:
        """Milliseconds of a step."""
        began = time.perf_counter()
        self._say(number)
        self._answer()
        return (time.perf_counter() - began) / number * 1000

    def end(self) -> float:
        """Let it end, after its last step; its loss."""
        self._say(0)
        loss = float(self._answer()["loss"])
        self._process.wait(LIMIT_SECONDS)
        self.kill()
        return loss

    def kill(self) -> None:
        """With all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def fail(self) -> None:
        self.kill()
        self._errors.seek(0)
        raise RuntimeError("\n".join(self._errors.read().strip().splitlines()[-5:]) or "it ended without a word")

    def _say(self, number: int) -> None:
        self._connection.sendall(f"{number}\n".encode())

    def _answer(self) -> Any:
        try:
            line = self._lines.readline()
        except OSError:
            line = ""
        if not line:
            self.fail()
        return json.loads(line)


def compare(
    name: str, contenders: Sequence[Contender], pythons: Mapping[str, str], folder: Path, *, rounds: int
) -> list[Line]:
    """Lines of all that could be measured."""
    comparison = COMPARISONS[name]
    commands, readers = {}, {}
    for each in contenders:
        if each.takes_part(comparison):
            python = pythons.get(each.environment or "", sys.executable)
            commands[each.name], readers[each.name] = each.command(comparison, python), (each.pipeline, python)
    print(f"\n{comparison.title}: {', '.join(commands)}", flush=True)
    if comparison.what == "input":
        times, made_of, losses = inputs(comparison, readers, folder, rounds)
    else:
        run = starts if comparison.steps == 0 else trainings
        times, made_of, losses = run(comparison, commands, folder, rounds)
    check_losses(comparison, times, losses)
    versions = {name: " ".join(f"{key} {value}" for key, value in made_of[name].items()) for name in times}
    lines = []
    for other in times:
        line: Line = {"comparison": name, "contender": other, "rounds": rounds, "made_of": versions[other]}
        line |= {"ms": statistics.median(times[other]), "loss": losses[other]}
        if other != US:
            line["ratio"], line["ratio_low"], line["ratio_high"] = ratio_of_turns(times[US], times[other])
        lines.append({key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in line.items()})
    return lines


Measured = tuple[dict[str, list[float]], dict[str, dict[str, str]], dict[str, float]]
"""Milliseconds of each turn, what the contenders are made of, and their losses after all steps."""


def trainings(comparison: Comparison, commands: Mapping[str, list[str]], folder: Path, rounds: int) -> Measured:
    """Turns of processes that live until the end."""
    num_steps = comparison.steps * (rounds + WARM_UP)
    processes: dict[str, Process] = {}
    losses: dict[str, float] = {}

    def turn(name: str) -> float:
        if name not in processes:  # the first turn, which warms up
            processes[name] = Process(commands[name], comparison, num_steps, folder)
        return processes[name].make_steps(comparison.steps)

    def end(name: str) -> float:
        losses[name] = processes[name].end()
        return losses[name]

    try:
        failed: set[str] = set()
        times = take_turns(commands, rounds, unless_failed(turn, failed), warm_up=WARM_UP)
        for name in commands:
            unless_failed(end, failed)(name)
    finally:
        for process in processes.values():
            process.kill()
    made_of = {name: process.made_of for name, process in processes.items()}
    return {name: turns for name, turns in times.items() if name not in failed}, made_of, losses


def starts(comparison: Comparison, commands: Mapping[str, list[str]], folder: Path, rounds: int) -> Measured:
    """Turns of whole processes: the time from the command to the end of the first step."""
    made_of: dict[str, dict[str, str]] = {}
    losses: dict[str, float] = {}

    def start(name: str) -> float:
        began = time.perf_counter()
        process = Process(commands[name], comparison, 1, folder)
        process.make_steps(1)
        took = 1000 * (time.perf_counter() - began)
        made_of[name], losses[name] = process.made_of, process.end()
        return took

    failed: set[str] = set()
    times = take_turns(commands, rounds, unless_failed(start, failed), warm_up=1)
    return {name: turns for name, turns in times.items() if name not in failed}, made_of, losses


def inputs(comparison: Comparison, readers: Mapping[str, tuple[str, str]], folder: Path, rounds: int) -> Measured:
    """Turns of pipelines that read JPEGs: milliseconds of a core for an image; the mean pixel is their loss."""
    print(pipelines.prepare(folder, [ROOT / "data/bccd/JPEGImages", ROOT / "data/raccoon/images"]))
    read: dict[str, pipelines.Contender] = {}

    def turn(name: str) -> float:
        if name not in read:
            read[name] = pipelines.Contender(*readers[name], folder=folder)
        return 1000 / read[name].turn(comparison.steps).per_cpu_second

    failed: set[str] = set()
    try:
        times = take_turns(readers, rounds, unless_failed(turn, failed), warm_up=WARM_UP)
    finally:
        for pipeline in read.values():
            pipeline.end()
    made_of = {
        name: dict(re.findall(r"(\S+) ([\d.]+\S*?)(?:;|$)", each.about["made_of"])) for name, each in read.items()
    }
    losses = {name: float(each.about["mean"]) for name, each in read.items()}
    return {name: turns for name, turns in times.items() if name not in failed}, made_of, losses


def unless_failed(turn: Callable[[str], float], failed: set[str]) -> Callable[[str], float]:
    """A turn that tells an error and notes who has failed, and gives who has failed no further turn."""

    def turn_of(name: str) -> float:
        if name not in failed:
            try:
                return turn(name)
            except (RuntimeError, ImportError, OSError, subprocess.TimeoutExpired) as error:
                failed.add(name)
                print(f"{name} is not measured:\n{error}", flush=True)
        return math.nan

    return turn_of


def check_losses(comparison: Comparison, times: dict[str, list[float]], losses: Mapping[str, float]) -> None:
    """Leave out who has learned something else than ours."""
    if US not in times:
        raise SystemExit("ours has failed: nothing is compared")
    for name in [*times]:
        if abs(losses[name] - losses[US]) > comparison.tolerance * losses[US]:
            print(f"{name} is not measured: its loss is {losses[name]:.5f}, ours {losses[US]:.5f}")
            del times[name]


# Table and picture --------------------------------------------------------------------------------------------------


def in_words(line: Line) -> str:
    text = f"{line['contender']:20} {line['ms']:10.3f} ms   loss {line['loss']:.5f}"
    if "ratio" in line:
        text += f"   ours / theirs {line['ratio']:.2f} ({line['ratio_low']:.2f} to {line['ratio_high']:.2f})"
    return f"{text}   {line['made_of']}"


def write_page(folder: Path) -> None:
    """Write the newest result of each comparison as a table and a picture."""
    found: dict[str, dict[str, Line]] = {name: {} for name in COMPARISONS}
    for text in (Path(__file__).parent / "results/peers.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["contender"] == US:
            found[line["comparison"]] = {}  # ours is the first of each run
        found[line["comparison"]][line["contender"]] = line
    found = {name: lines for name, lines in found.items() if lines}
    names = [each.name for each in CONTENDERS if each.name != US]
    rows = [f"| time, ours / theirs | ours | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for comparison, lines in found.items():
        cells = [f"{lines[name]['ratio']:.2f}" if name in lines else "-" for name in names]
        rows.append(f"| {COMPARISONS[comparison].title} | {milliseconds(lines[US]['ms'])} | {' | '.join(cells)} |")
    of_ours = [lines[US] for lines in found.values()]
    days = " and ".join(sorted({line["date"] for line in of_ours}))
    machines = " and ".join(sorted({line["machine"] for line in of_ours}))
    made_of = " ".join(line["made_of"] for lines in found.values() for line in lines.values()).split()
    versions = ", ".join(
        sorted({f"{name} {version}" for name, version in zip(made_of[::2], made_of[1::2], strict=True)})
    )
    numbers = [line["rounds"] for line in of_ours]
    rounds = " to ".join(map(str, sorted({min(numbers), max(numbers)})))
    about = f"{machines}, {days}, {rounds} rounds, {versions}"
    page = (folder / "peers.md").read_text()
    begin, end = "<!-- made by benchmarks/peers.py -->", "<!-- until here -->"
    table = "\n".join([begin, "", *rows, "", f"Measured on {about}.", "", end])
    (folder / "peers.md").write_text(re.sub(f"{begin}.*{end}", lambda _: table, page, flags=re.DOTALL))
    (folder / "peers.svg").write_text(picture(found))


def milliseconds(value: float) -> str:
    return (
        f"{value / 1000:.1f} s" if value >= 1000 else f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} ms"
    )


WIDTH, LEFT, BAR, GAP, SCALE = 720, 130, 14, 34, 180
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #57606a }
  .title { font-weight: 600; fill: #1f2328 } .name { text-anchor: end }
  rect { fill: #afb8c1 } .ours { fill: #0969da }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1 } .title { fill: #f0f6fc } rect { fill: #57606a } .ours { fill: #4493f8 }
  }
"""


def picture(found: Mapping[str, Mapping[str, Line]]) -> str:
    """Bars: the time of each as a multiple of ours."""
    body, y = [], 18.0
    for comparison, lines in found.items():
        title = f"{COMPARISONS[comparison].title}: {milliseconds(lines[US]['ms'])}"
        body.append(f'<text class="title" x="0" y="{y:.0f}">{escape(title)}</text>')
        for name, line in lines.items():
            y += BAR + 4
            times = 1 / line["ratio"] if name != US else 1.0
            width = min(times * SCALE, WIDTH - LEFT - 60)  # whoever takes longer is cut off, and said in numbers
            kind = ' class="ours"' if name == US else ""
            body.append(f'<text x="{LEFT - 8}" y="{y:.0f}" class="name">{escape(name)}</text>')
            body.append(f'<rect{kind} x="{LEFT}" y="{y - 11:.0f}" width="{width:.0f}" height="{BAR}"/>')
            body.append(f'<text x="{LEFT + width + 6:.0f}" y="{y:.0f}">{times:.2f}</text>')
        y += GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" role="img">\n'
        f"<title>Time beside that of Lockstep</title>\n<style>{STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


if __name__ == "__main__":
    main()
