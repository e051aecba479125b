"""Steps on an accelerator: ours beside loops by hand, DDP and Lightning, and a tiny step beside one CUDA graph.

    python benchmarks/accelerator.py [--rounds 7] [--only resnet50 eager memory ...] [--workers 1] [--shards FILE...]
    python benchmarks/accelerator.py --device cpu

ResNet-50 and Inception-v3, batch 256 a worker, bfloat16, channels_last, eager and compiled, images in the host's memory
and from records; the trainers are those of accelerator_peers.py. Each combination has fresh processes, in which the
trainers take turns, and what counts is the ratio of a turn to its neighbour. One whose first loss is not ours computes
something else, and is not measured. The result is printed and appended to benchmarks/results/accelerator.jsonl.
`--device cpu` tries all of it out in a small size, and records nothing; there, tiny steps have no CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from accelerator_peers import Settings, Step, contenders, tiny_contenders, write_noise
from measuring import Line, compared, record, report, run_part, show, take_turns

import lockstep as ls
from lockstep.workers.environment import SETTINGS

NETS, MODES, SOURCES = ("resnet50", "inception_v3"), ("eager", "compiled"), ("memory", "records")
TINY = "tiny"
AIM, TINY_AIM = 1.01, 1.1
"""Ours over the fastest by hand."""
STEPS = {"memory": 20, "records": 60}
"""In a turn: more than what loader processes have read ahead when it begins."""
TINY_STEPS = 2000
TOLERANCE = 0.02
"""Of the first loss, in bfloat16."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=[], choices=[*NETS, *MODES, *SOURCES, TINY], metavar="WORD")
    parser.add_argument("--trainers", nargs="+", metavar="NAME", help='these beside ours: "by hand", DDP, Lightning')
    parser.add_argument("--workers", type=int, default=1, help="each on an accelerator of its own")
    parser.add_argument("--batch-size", type=int, default=256, help="of each worker")
    parser.add_argument("--shards", nargs="+", default=[], metavar="FILE", help="records of ImageNet's form")
    parser.add_argument("--device", choices=["cpu"], help="try it out where there is no accelerator")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        measure(json.loads(arguments.part), arguments.rounds)
        return
    is_trial = arguments.device == "cpu"
    if not is_trial and not torch.accelerator.is_available():
        sys.exit("There is no accelerator here: --device cpu tries the same trainers out.")
    chosen = parts(arguments.only, arguments.workers, is_trial=is_trial)
    with tempfile.TemporaryDirectory(prefix="lockstep-accelerator-") as folder:
        shards = arguments.shards
        if not shards and any(part["source"] == "records" for part in chosen):
            shards = [f"{folder}/train.tfrecord"]
            write_noise(Path(shards[0]))
        lines = compare(chosen, arguments, shards, is_trial=is_trial)
    if not is_trial:
        record(__file__, lines, SETTINGS)


def compare(
    chosen: Sequence[Line], arguments: argparse.Namespace, shards: Sequence[str], *, is_trial: bool
) -> list[Line]:
    """Measure the combinations one after another, each in fresh processes, and show how ours compares."""
    lines: list[Line] = []
    for part in chosen:
        given = {"batch_size": 2 if is_trial else arguments.batch_size, "device": arguments.device, **part}
        told = json.dumps({**given, "shards": shards, "is_trial": is_trial, "trainers": arguments.trainers})
        rounds, threads = (1, 2) if is_trial else (arguments.rounds, max(1, (os.cpu_count() or 1) // arguments.workers))
        for line in run_part(__file__, told, rounds, threads=threads, num_workers=arguments.workers, settings=SETTINGS):
            show(line)
            lines.append({**line, **given, "num_workers": arguments.workers})
    return lines


def parts(words: Sequence[str], num_workers: int, *, is_trial: bool) -> list[Line]:
    """The combinations that the words leave: of each kind those that are named, or all where none is."""

    def chosen(kind: Sequence[str]) -> Sequence[str]:
        return [word for word in words if word in kind] or kind

    # To compile for a CPU takes minutes: where it is only tried out, it is asked for by name.
    modes = ["eager"] if is_trial and "compiled" not in words else chosen(MODES)
    nets = chosen((*NETS, TINY))
    made: list[Line] = [
        {"net": net, "mode": mode, "source": source}
        for net, mode, source in product([net for net in nets if net != TINY], modes, chosen(SOURCES))
    ]
    is_tiny = TINY in nets and num_workers == 1
    return made + [{"net": TINY, "mode": mode, "source": "device"} for mode in modes if is_tiny]


# One combination, in processes of its own ---------------------------------------------------------------------------


def measure(part: Mapping[str, Any], rounds: int) -> None:
    """Have the trainers of a combination take turns, and report how ours compares with each of the others."""
    worker = ls.join(part["device"])
    if worker.device.type == "cuda":
        torch.backends.cudnn.benchmark = True
    is_compiled, is_tiny = part["mode"] == "compiled", part["net"] == TINY
    num_steps = 2 if part["is_trial"] else TINY_STEPS if is_tiny else STEPS[part["source"]]
    if is_tiny:
        made = tiny_contenders(is_compiled=is_compiled)
    else:
        connect_ddp(worker)
        shards = tuple(part["shards"])
        made = contenders(
            Settings(part["net"], is_compiled, part["source"], part["batch_size"], part["device"], shards)
        )
    # The trainers share the code of the modules: without this the second net through it is compiled for any shape.
    torch._dynamo.config.automatic_dynamic_shapes = False
    steps = started({name: make for name, make in made.items() if name in ("ours", *(part["trainers"] or made))})
    times = take_turns(steps, rounds, lambda name: turn(steps[name], num_steps, worker.device), warm_up=1)
    for line in results(times, part) if worker.is_chief else ():
        report(line.pop("comparison"), line)
    sys.stdout.flush()
    os._exit(0)  # generators of batches and Lightning's thread are still at work


def connect_ddp(worker: ls.Worker) -> None:
    """Make the process group that DDP takes."""
    store = torch.distributed.PrefixStore("ddp", worker.group.store)
    backend = "gloo" if worker.device.type == "cpu" else "nccl"
    device = None if worker.device.type == "cpu" else worker.device
    torch.distributed.init_process_group(
        backend, store=store, rank=worker.rank, world_size=worker.num_workers, device_id=device
    )


def started(made: Mapping[str, Callable[[], Step]]) -> dict[str, Step]:
    """Those that can be made and that compute what ours does, each after its first step."""
    steps: dict[str, Step] = {}
    first: dict[str, float] = {}
    group = ls.join().group
    for name, make in made.items():
        try:
            steps[name] = make()
            began = time.perf_counter()
            # By hand a worker knows the loss of its own examples alone.
            first[name] = statistics.mean(group.gather(float(steps[name]())))  # type: ignore[arg-type]
        except ImportError as error:
            print(f"{name} is not measured: {error}", file=sys.stderr)
            continue
        print(f"{name}: first step {time.perf_counter() - began:.1f} s, loss {first[name]:.3f}", file=sys.stderr)
        if not math.isclose(first[name], first["ours"], rel_tol=TOLERANCE):
            print(f"{name} is not measured: its first loss is not that of ours", file=sys.stderr)
            del steps[name]
    return steps


def turn(step: Step, num_steps: int, device: torch.device) -> float:
    """Milliseconds of a step: from where the device is idle to where it is idle again."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(num_steps):
        step()
    synchronize(device)
    return (time.perf_counter() - began) / num_steps * 1000


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def results(times: Mapping[str, list[float]], part: Mapping[str, Any]) -> list[Line]:
    """A line for each of the others, the fastest first, with the aim beside it."""
    others = sorted((name for name in times if name != "ours"), key=lambda name: sorted(times[name])[0])
    lines: list[Line] = []
    for name in others:
        line = compared({"ours": times["ours"], "theirs": times[name]})
        comparison = f"{part['net']}, {part['mode']}, {part['source']}: ours / {name}"
        aim = {"aim": TINY_AIM if part["net"] == TINY else AIM} if name == others[0] else {}
        rate = {} if part["net"] == TINY else {"images_per_second": 1000 * part["batch_size"] / line["ours_ms"]}
        lines.append({"comparison": comparison, **line, **aim, **rate})
    return lines


if __name__ == "__main__":
    main()
