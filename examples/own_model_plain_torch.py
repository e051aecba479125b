"""The training of `own_model.py` by hand, with PyTorch alone: the difference is what Lockstep does.

    python examples/own_model_plain_torch.py                      alone, as own_model.py --towers 1
    torchrun --nproc-per-node 2 examples/own_model_plain_torch.py on two workers, as own_model.py --towers 2

The same command again goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

MNIST = Path(__file__).parent.parent / "data" / "mnist"
BATCH_SIZE = 128
FULL_STEPS = 1_000


def read(split: str) -> dict[str, Tensor]:
    images = gzip.decompress((MNIST / f"{split}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((MNIST / f"{split}-labels-idx1-ubyte.gz").read_bytes())
    return {
        "image": torch.frombuffer(bytearray(images[16:]), dtype=torch.uint8).view(-1, 1, 28, 28),
        "label": torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8).long(),
    }


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, stride=2, padding=2, bias=False)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 5, stride=2, padding=2, bias=False)
        self.norm2 = nn.BatchNorm2d(32)
        self.head = nn.Linear(32 * 7 * 7, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = images / 255 - 0.5
        hidden = F.relu(self.norm1(self.conv1(hidden)))
        hidden = F.relu(self.norm2(self.conv2(hidden)))
        logits: Tensor = self.head(hidden.flatten(1))
        return logits


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["image"]), batch["label"])


def score(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    right: Tensor = model(batch["image"]).argmax(1) == batch["label"]
    return right.sum()


class Worker:
    def __init__(self) -> None:
        self.rank, self.num_workers = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.is_chief = self.rank == 0
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        if self.num_workers > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def sum(self, value: Tensor) -> float:
        total = value.detach().clone()
        if self.num_workers > 1:
            dist.all_reduce(total)
        return total.item()


def learning_rate(step: int, initial: float = 0.1, warmup_steps: int = 100) -> float:
    if step < warmup_steps:
        return initial * step / warmup_steps
    done = min(1.0, (step - warmup_steps) / (FULL_STEPS - warmup_steps))
    return initial * 0.5 * (1.0 + math.cos(math.pi * done))


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, step: int) -> None:
    decay = min(0.99, (1 + step) / (10 + step))
    for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(parameter, 1 - decay)
    for kept, buffer in zip(average.buffers(), model.buffers(), strict=True):
        kept.copy_(buffer)


def batches(data: dict[str, Tensor], step: int, here: Worker) -> Iterator[dict[str, Tensor]]:
    steps_per_epoch = len(data["label"]) // BATCH_SIZE
    share = BATCH_SIZE // here.num_workers
    epoch, done = divmod(step, steps_per_epoch)
    while True:
        order = torch.randperm(len(data["label"]), generator=torch.Generator().manual_seed(epoch))
        for first in range(done * BATCH_SIZE, steps_per_epoch * BATCH_SIZE, BATCH_SIZE):
            rows = order[first + here.rank * share :][:share]
            yield {name: values[rows].to(here.device) for name, values in data.items()}
        epoch, done = epoch + 1, 0


def save(path: Path, step: int, parts: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, unfinished)
    unfinished.replace(path)


def resume(path: Path, parts: dict[str, Any], here: Worker) -> int:
    if not path.exists():
        return 0
    saved = torch.load(path, map_location=here.device, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return int(saved["step"])


@torch.inference_mode()
def evaluate(model: nn.Module, data: dict[str, Tensor], here: Worker, micro_batch: int = 500) -> float:
    if here.num_workers > 1:  # each worker has batch statistics of its own since the last step
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
    model.eval()
    correct = torch.zeros((), device=here.device)
    for first in range(here.rank * micro_batch, len(data["label"]), here.num_workers * micro_batch):
        batch = {name: values[first : first + micro_batch].to(here.device) for name, values in data.items()}
        correct += score(model, batch)
    return here.sum(correct) / len(data["label"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=FULL_STEPS)
    parser.add_argument("--workdir", type=Path, default=Path("runs/own_model_plain_torch"))
    arguments = parser.parse_args()

    here = Worker()
    torch.manual_seed(0)
    model = Net().to(here.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    average = copy.deepcopy(model)
    parts = {"model": model, "optimizer": optimizer, "average": average}
    data, held_out = read("train"), read("t10k")

    checkpoint = arguments.workdir / "checkpoint.pt"
    step = resume(checkpoint, parts, here)
    tower = DistributedDataParallel(model) if here.num_workers > 1 else model
    loader = batches(data, step, here)
    while step < arguments.steps:
        began = time.perf_counter()
        batch = next(loader)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = losses(tower, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        update_average(average, model, step)
        if step % 10 == 0:
            mean = here.sum(loss) / here.num_workers
            if here.is_chief:
                rate = BATCH_SIZE / (time.perf_counter() - began)
                print(f"step {step}: loss {mean:.4f}, {rate:.0f} examples/s")
        if step % 100 == 0 and here.is_chief:
            save(checkpoint, step, parts)
    if here.is_chief:
        save(checkpoint, step, parts)

    accuracy = evaluate(average, held_out, here)
    if here.is_chief:
        print(f"step {step}: test accuracy {accuracy:.2%} of {len(held_out['label'])}")
    if here.num_workers > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
