"""Our step against hand-written PyTorch: alone beside a plain loop, on two workers beside hand-written DDP.

    python benchmarks/parity_step.py [--rounds 15] [--quick]

All contenders of a comparison run in the same processes, round by round in turn, on the same data from the same
weights, with the same threads and the same allocator settings. What counts is the ratio of a round to its neighbour:
absolute times say little on a shared machine. A contender whose loss does not fall is not measured. The result is
printed and appended to benchmarks/results/parity_step.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from measuring import compared, interleave, record, report, run_part, show
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
from lockstep.models.mnist import MnistNet
from lockstep.training.step import bind

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
    lines = run_part(__file__, "alone", rounds, threads=2)
    lines += run_part(__file__, "workers", rounds, threads=1, num_workers=2)
    for line in lines:
        show(line)
    if not arguments.quick:
        record(__file__, lines)


# The two nets and their data --------------------------------------------------------------------------------------


def tiny_net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def deep_net() -> nn.Module:
    """A hundred small layers with batch norm."""
    layers = [each for _ in range(100) for each in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 10))


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

    def step(state: ls.TrainState = state) -> float:  # held here: its step does not keep it alive
        return bound(losses, batch).total

    return step


def alone(rounds: int) -> None:
    for name, bf16 in (("mnist fp32", False), ("mnist bf16", True)):
        data = mnist_batch(256)
        steps = {"ours": ours(seeded(MnistNet), data, bf16), "theirs": plain(seeded(MnistNet), data, bf16)}
        report(f"{name}, alone / torch.optim", compare(steps, rounds, 6))
    torch.set_num_threads(1)
    data = tiny_batch(32)
    for name, make, per_round in (("tiny", tiny_net, 400), ("100 layers with batch norm", deep_net, 20)):
        steps = {
            "ours": ours(seeded(make), data, False, everything=True),
            "theirs": plain(seeded(make), data, False),
        }
        report(f"{name}, all on / bare torch.optim", compare(steps, rounds, per_round))


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
    """Time the contenders in turn; each has to learn."""
    losses_of: dict[str, list[float]] = {name: [] for name in steps}
    contenders = {name: lambda name=name: losses_of[name].append(steps[name]()) for name in steps}
    times = interleave(contenders, rounds, per_round=per_round, before=lambda name: before_round())
    for name, values in losses_of.items():
        assert values[-1] < values[0], f"{name} does not learn: loss {values[0]} -> {values[-1]}"
    return {**compared(times), "final_losses": {name: values[-1] for name, values in losses_of.items()}}


if __name__ == "__main__":
    main()
