"""The input pipeline against others: JPEGs to batches of random crops, by two processes.

    python benchmarks/input.py --images FOLDER... [--rounds 7] [--quick] [--only NAME...] [--python-of NAME=PYTHON...]

All JPEGs below the folders are read, each as often as it takes to have 1,000, from TFRecord shards and, by torchvision,
from files. Decode, random resized crop to 224 pixels, flip; then the same with colour jitter and normalisation. Each
pipeline runs in a process of its own (input_peers.py), in the Python that --python-of names for it, else in this one.
They take turns. A turn ends when all that may be read ahead has been read again: nobody works in another's turn.
The result is printed and appended to benchmarks/results/input.jsonl.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from input_peers import PEERS
from measuring import Line, Pipeline, ratio_of_turns, record, started, take_turns

from lockstep.records.example import serialize_example
from lockstep.records.record_index import build_index
from lockstep.records.tfrecord import FRAME_BYTES, write_records

SCRIPT = Path(__file__).with_name("input_peers.py")
NUM_IMAGES, NUM_SHARDS, NUM_PROCESSES, BATCH_SIZE = 1000, 8, 2, 64
INSTALL = {
    "DALI": "pip install nvidia-dali-cuda120",
    "tf.data": "pip install tensorflow-cpu",
    "torchvision, tensors": "pip install torchvision torchcodec",
    "torchvision": "pip install torchvision",
    "ours, crop": "libjpeg-turbo 3.0 or later, as libturbojpeg.so",
    "ours, torchcodec": "pip install torchcodec, of the build that fits torch",
    "ours": "pip install lockstep-train",
}
"""By how the name of a pipeline begins, the longest first."""
AIMS = [
    ("ours", "DALI", 1.3),
    ("ours", "tf.data", 1.4),
    ("ours", "tf.data, aliased", None),
    ("ours", "torchvision", None),
    ("ours, threads", "DALI", 1.3),
    ("ours, coloured", "torchvision, coloured", 1.3),
    ("ours", "ours, Pillow", None),
    ("ours, Pillow", "torchvision", None),
    ("ours, torchcodec", "DALI", 1.05),
    ("ours, crop decode", "DALI", 1.2),
    ("ours, crop decode, threads", "DALI", 1.2),
    ("ours, crop decode", "tf.data, aliased", None),
    ("ours", "torchvision, tensors", None),
    ("ours, coloured", "torchvision, tensors, coloured", None),
]
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_AT_REST_SECONDS = 0.5


class Turn(NamedTuple):
    """Images in a second, of a core's time and of the clock."""

    per_cpu_second: float
    per_second: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", nargs="+", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=8, help=f"of {BATCH_SIZE} images, in a turn")
    parser.add_argument("--quick", action="store_true", help="two rounds: does it run?")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), metavar="NAME")
    parser.add_argument("--python-of", nargs="+", default=[], metavar="NAME=PYTHON", help="of those that begin so")
    arguments = parser.parse_args()
    pythons = dict(each.split("=", 1) for each in arguments.python_of)
    with tempfile.TemporaryDirectory(prefix="lockstep-input-") as folder:
        print(prepare(Path(folder), arguments.images))
        contenders = started(arguments.only, pythons, partial(Contender, folder=Path(folder)), needed)
        try:
            rounds = 2 if arguments.quick else arguments.rounds
            turns = take_turns(contenders, rounds, lambda name: contenders[name].turn(arguments.batches))
        finally:
            for contender in contenders.values():
                contender.end()
    lines = [*pipelines(contenders, turns), *ratios(turns)]
    if not arguments.quick:
        record(__file__, lines)


# Data ---------------------------------------------------------------------------------------------------------------


def prepare(folder: Path, sources: Sequence[Path]) -> str:
    """Write the images as files and as shards with an index for DALI; returns what they are."""
    found = [
        path for source in sources for path in sorted(source.rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg")
    ]
    contents = [content for path in found if (content := path.read_bytes()).startswith(b"\xff\xd8\xff")]
    assert contents, f"no JPEGs in {', '.join(map(str, sources))}"
    times = -(-NUM_IMAGES // len(contents))
    images = list(islice(cycle(contents), times * len(contents)))
    for number, content in enumerate(images):
        path = folder / "files" / f"class {number % 2}" / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for shard in range(NUM_SHARDS):
        name = f"{shard:05}-of-{NUM_SHARDS:05}"
        write_records(folder / f"train-{name}", map(example, images[shard::NUM_SHARDS]))
        (folder / f"index-{name}.idx").write_text("".join(index_lines(folder / f"train-{name}")))
    kilobytes = statistics.mean(map(len, images)) / 1000
    return f"{len(contents)} JPEGs of {kilobytes:.0f} kB, {times} times: {len(images)} examples"


def example(image: bytes) -> bytes:
    return serialize_example({"image/encoded": [image], "image/class/label": np.array([1])})


def index_lines(path: Path) -> Iterator[str]:
    """Where each record starts and how long it is, with its frame, as DALI reads it."""
    start = 0
    for length in build_index(path).lengths.tolist():
        yield f"{start} {length + FRAME_BYTES}\n"
        start += length + FRAME_BYTES


# Pipelines ----------------------------------------------------------------------------------------------------------


class Contender(Pipeline):
    """A pipeline of several processes, which are measured by what the system says of them."""

    def __init__(self, name: str, python: str, folder: Path) -> None:
        command = [python, str(SCRIPT), name, str(folder), str(NUM_PROCESSES), str(BATCH_SIZE)]
        super().__init__(command, folder / f"{name}.log", TF_CPP_MIN_LOG_LEVEL="3")
        self.rest()

    def turn(self, num_batches: int) -> Turn:
        """Read so many batches, and wait until as much is read ahead as was before."""
        before, began = self._cpu_seconds(), time.perf_counter()
        answer = self.read(num_batches)
        assert answer == "\n", answer
        ended, after = self.rest()
        images = num_batches * BATCH_SIZE
        return Turn(images / (after - before), images / (ended - began))

    def rest(self) -> tuple[float, float]:
        """Wait until nothing works any more; since when, and what was used until then."""
        since, used = time.perf_counter(), self._cpu_seconds()
        while (now := time.perf_counter()) < since + _AT_REST_SECONDS:
            time.sleep(0.005)
            # One tick may be that of an idle thread.
            if (total := self._cpu_seconds()) > used + 1.5 / _TICKS_A_SECOND:
                since, used = now, total
        return since, used

    def _cpu_seconds(self) -> float:
        return sum(map(ticks_of, family(self._process.pid))) / _TICKS_A_SECOND


def family(pid: int) -> Iterator[int]:
    """A process and all that came from it and live."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from family(int(child))


def ticks_of(pid: int) -> int:
    """Time in user code and in the system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def needed(name: str) -> str:
    text = next(text for start, text in INSTALL.items() if name.startswith(start))
    return f"it needs: {text}; then --python-of '{name}=.../bin/python'"


# Results ------------------------------------------------------------------------------------------------------------


def pipelines(contenders: Mapping[str, Contender], turns: Mapping[str, list[Turn]]) -> Iterator[Line]:
    for name, values in turns.items():
        per_cpu_second, per_second = (statistics.median(each) for each in zip(*values, strict=True))
        about = contenders[name].about
        print(f"{name:32} {per_cpu_second:6.0f} images / CPU-second {per_second:6.0f} / second    {about['made_of']}")
        rounds = {"rounds": len(values), "num_processes": NUM_PROCESSES}
        yield {"pipeline": name, "per_cpu_second": per_cpu_second, "per_second": per_second, **rounds, **about}


def ratios(turns: Mapping[str, list[Turn]]) -> Iterator[Line]:
    """Of neighbouring turns: medians, and what lies between a quarter and three quarters of the rounds."""
    for ours, theirs, aim in AIMS:
        if ours not in turns or theirs not in turns:
            continue
        line: Line = {"comparison": f"{ours} / {theirs}", "aim": aim}
        for unit in Turn._fields:
            of_each = ([getattr(turn, unit) for turn in turns[name]] for name in (ours, theirs))
            line[unit], line[f"{unit}_low"], line[f"{unit}_high"] = ratio_of_turns(*of_each)
        ranges = (
            f"{line[unit]:.2f} ({line[f'{unit}_low']:.2f} to {line[f'{unit}_high']:.2f}) {unit.replace('_', ' ')}"
            for unit in Turn._fields
        )
        print(f"{line['comparison']:48}", ", ".join(ranges) + (f", aim {aim:.2f}" if aim else ""))
        yield line


if __name__ == "__main__":
    main()
