"""A model of your own, trained with Lockstep. `own_model_plain_torch.py` is the same by hand: compare the two.

    python examples/own_model.py                                  alone: the towers in turn
    lockstep run --workers 2 examples/own_model.py                on two workers: the same result
    torchrun --nproc-per-node 2 examples/own_model.py             the same, where torchrun starts the workers

The same command again goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls

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


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"cross_entropy": F.cross_entropy(model(batch["image"]), batch["label"])}


def score(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"top1": ls.metrics.in_top_k(model(batch["image"]), batch["label"], k=1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=FULL_STEPS)
    parser.add_argument("--towers", type=int, default=2)
    parser.add_argument("--workdir", type=Path, default=Path("runs/own_model"))
    arguments = parser.parse_args()

    here = ls.join()
    torch.manual_seed(0)
    state = ls.TrainState(
        Net().to(here.device),
        ls.optim.SGD(ls.optim.Cosine(0.1, FULL_STEPS, warmup_steps=100), momentum=0.9, nesterov=True),
        average=ls.optim.MovingAverage(0.99),
    )
    towers = ls.Towers(arguments.towers)
    loader = ls.data.Loader(read("train"), batch_size=BATCH_SIZE)
    held_out = ls.data.Loader(read("t10k"), batch_size=500)

    ls.resume(state, loader, arguments.workdir)
    for report in ls.train_steps(state, losses, loader, towers, until=ls.Steps(arguments.steps)):
        if report.step % 10 == 0 and here.is_chief:
            print(f"step {report.step}: loss {report.total:.4f}, {report.examples_per_second:.0f} examples/s")
        if report.step % 100 == 0:
            ls.save(state, loader, arguments.workdir)
    ls.save(state, loader, arguments.workdir)

    result = ls.evaluate(state, score, held_out, weights="average")
    if here.is_chief:
        print(f"step {state.step}: test accuracy {result['top1']:.2%} of {result.num_examples}")


if __name__ == "__main__":
    main()
