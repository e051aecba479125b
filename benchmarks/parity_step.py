"""Our step against hand-written PyTorch: alone beside a plain loop, on two workers beside hand-written DDP.

    python benchmarks/parity_step.py [--rounds 15] [--quick]

All contenders of a comparison run in the same processes, round by round in turn, on the same data from the same
weights, with the same threads and the same allocator settings. What counts is the ratio of a round to its neighbour:
absolute times say little on a shared machine. A contender whose loss does not fall is not measured. The result is
printed and appended to benchmarks/results/parity_step.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
from lockstep.models.mnist import MnistNet
from lockstep.training.step import bind
from lockstep.workers.devices import describe

RESULTS = Path(__file__).parent / "results" / "parity_step.jsonl"
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "2147483647"}
LR, MOMENTUM = 0.01, 0.9
Step = Callable[[], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="three short rounds: does it run?")
    parser.add_argument("--part", choices=["alone", "workers"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rounds = 3 if arguments.quick else arguments.rounds
    if arguments.part:
        PARTS[arguments.part](rounds)
        return
    lines = run_part("alone", rounds, num_workers=1) + run_part("workers", rounds, num_workers=2)
    for line in lines:
        print(
            f"{line['comparison']:34} {line['ours_ms']:8.3f} ms / {line['theirs_ms']:8.3f} ms = "
            f"{line['ratio']:.2f} (rounds {line['ratio_low']:.2f} to {line['ratio_high']:.2f})"
        )
    if not arguments.quick:
        record(lines)


def run_part(part: str, rounds: int, num_workers: int) -> list[dict[str, Any]]:
    """Run one part in fresh processes, whose allocator keeps its pages, and return the lines of its first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    threads = 2 if part == "alone" else 1
    command = [sys.executable, __file__, "--part", part, "--rounds", str(rounds)]
    processes = []
    for rank in range(num_workers):
        seat = {} if num_workers == 1 else {
            "RANK": str(rank), "WORLD_SIZE": str(num_workers), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(num_workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        environment = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": str(threads), **seat}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), f"{part} failed"
    return [json.loads(line) for line in outputs[0].splitlines() if line.startswith("{")]


# The two nets and their data --------------------------------------------------------------------------------------


def tiny_net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def tiny_batch(size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "image": torch.randn(size, 64, generator=generator),
        "label": torch.randint(0, 10, (size,), generator=generator),
    }


def mnist_batch(size: int, rank: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1 + rank)
    image = torch.rand(size, 1, 28, 28, generator=generator) - 0.5
    return {
        "image": image.contiguous(memory_format=torch.channels_last),
        "label": torch.randint(0, 10, (size,), generator=generator),
    }


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    return make().to(memory_format=torch.channels_last)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"cross_entropy": F.cross_entropy(model(batch["image"]), batch["label"])}


# Contenders ---------------------------------------------------------------------------------------------------------


def plain(model: nn.Module, data: dict[str, Tensor], bf16: bool) -> Step:
    """The loop that everybody writes, with torch's fused optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else nullcontext():
            loss = F.cross_entropy(model(data["image"]), data["label"])
        loss.backward()
        optimizer.step()
        return loss.detach().item()

    return step


def ours(model: nn.Module, data: dict[str, Tensor], bf16: bool, everything: bool = False, num_workers: int = 1) -> Step:
    """Our step; with schedule, clip, finite check, averages and report where `everything` is on."""
    state = ls.TrainState(
        model,
        ls.optim.SGD(ls.optim.Cosine(LR, 1_000_000) if everything else LR, momentum=MOMENTUM, nesterov=True),
        gradient_transforms=[ls.optim.ClipGlobalNorm(10.0)] if everything else [],
        average=ls.optim.MovingAverage(0.9999) if everything else None,
    )
    towers = ls.Towers(num_workers, precision="bf16" if bf16 else "fp32", channels_last=True)
    bound = bind(state, towers, ls.AllReduce())
    rank = ls.join().rank
    size = len(data["label"]) * num_workers
    batch = ls.Batch(data, position=0, batch_size=size, towers=range(rank, rank + 1), epoch_size=size)
    return lambda: bound(losses, batch).total


def alone(rounds: int) -> None:
    for name, bf16 in (("mnist fp32", False), ("mnist bf16", True)):
        data = mnist_batch(256)
        steps = {"ours": ours(seeded(MnistNet), data, bf16), "theirs": plain(seeded(MnistNet), data, bf16)}
        report(f"{name}, alone / torch.optim", compare(steps, rounds, 6))
    torch.set_num_threads(1)
    data = tiny_batch(32)
    steps = {
        "ours": ours(seeded(tiny_net), data, False, everything=True),
        "theirs": plain(seeded(tiny_net), data, False),
    }
    report("tiny, all on / bare torch.optim", compare(steps, rounds, 400))


def workers(rounds: int) -> None:
    here = ls.join("cpu")
    dist.init_process_group("gloo", store=dist.PrefixStore("ddp", here.group.store), rank=here.rank, world_size=2)
    for name, bf16 in (("mnist fp32", False), ("mnist bf16", True)):
        data = mnist_batch(128, here.rank)
        ddp = DistributedDataParallel(seeded(MnistNet), gradient_as_bucket_view=True)
        steps = {"ours": ours(seeded(MnistNet), data, bf16, num_workers=2), "theirs": plain(ddp, data, bf16)}
        result = compare(steps, rounds, 6, before_round=dist.barrier)
        if here.is_chief:
            report(f"{name}, 2 workers / DDP gloo", result)
    dist.destroy_process_group()


PARTS = {"alone": alone, "workers": workers}


# Measuring ----------------------------------------------------------------------------------------------------------


def compare(
    steps: dict[str, Step], rounds: int, per_round: int, before_round: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Time the contenders round by round, the order reversed every other round, after two rounds to warm up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    first, last = {}, {}
    for number in range(rounds + 2):
        for name in list(steps)[:: 1 if number % 2 else -1]:
            before_round()
            began = time.perf_counter()
            for _ in range(per_round):
                last[name] = steps[name]()
            times[name].append((time.perf_counter() - began) / per_round * 1000)
            first.setdefault(name, last[name])
    for name in steps:
        assert last[name] < first[name], f"{name} does not learn: loss {first[name]} -> {last[name]}"
    kept = {name: values[2:] for name, values in times.items()}
    ratios = sorted(a / b for a, b in zip(kept["ours"], kept["theirs"], strict=True))
    return {
        "ours_ms": statistics.median(kept["ours"]),
        "theirs_ms": statistics.median(kept["theirs"]),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[len(ratios) // 4],
        "ratio_high": ratios[-1 - len(ratios) // 4],
        "rounds": rounds,
        "final_losses": last,
        "threads": torch.get_num_threads(),
    }


def report(comparison: str, result: dict[str, Any]) -> None:
    print(json.dumps({"comparison": comparison, **result}), flush=True)


def record(lines: list[dict[str, Any]]) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": describe(),
        "cores": os.cpu_count(),
        "allocator": ALLOCATOR,
    }
    with RESULTS.open("a") as file:
        for line in lines:
            file.write(json.dumps({**about, **line}) + "\n")


if __name__ == "__main__":
    main()
