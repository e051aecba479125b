"""A small convolutional net on the worker's device, what it learns from, and everything that one may ask of a step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls

NUM_CLASSES, BATCH_SIZE, SIDE = 10, 16, 16
NUM_EXAMPLES = 8 * BATCH_SIZE
EXACT = ls.AllReduce(exact=True)
"""Without it a GPU does not even give the bits of one run again."""


def worker(workers_per_device: int = 1, *, chief_serves: bool = False) -> ls.Worker:
    """Join on the accelerator; where the tests are only tried out, on the CPU."""
    on_cpu = os.environ.get("LOCKSTEP_GPU_TESTS") == "cpu"
    device = "cpu" if on_cpu else None
    return ls.join(device, workers_per_device=workers_per_device, chief_serves=chief_serves)


class Net(nn.Sequential):
    """Batch norm, dropout, and a convolution of one pixel, whose layout has two names."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, NUM_CLASSES),
        )  # fmt: skip


def make_state(optimizer: Any = None, **options: Any) -> ls.TrainState:
    """A state on the worker's device; the same numbers each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net()
    return ls.TrainState(net.to(ls.join().device), optimizer or ls.optim.SGD(0.05, momentum=0.9), **options)


def everything() -> dict[str, Any]:
    """Arguments of a state that does all that one can do without a wait."""
    return {
        "optimizer": ls.optim.AdamW(ls.optim.Cosine(0.01, 1000)),
        "regularization": [ls.losses.L2(1e-4)],
        "gradient_transforms": [ls.optim.ClipGlobalNorm(1.0)],
        "average": ls.optim.MovingAverage(0.99),
    }


class Decoded(ls.data.Arrays):
    """What loader processes read."""

    cost = "decode"


def make_loader(bad: Mapping[int, float] | None = None, reader: Any = ls.data.Arrays, **options: Any) -> ls.data.Loader:
    """Random images; `bad` spoils those of the given positions."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(NUM_EXAMPLES, 3, SIDE, SIDE, generator=generator)
    for index, value in (bad or {}).items():
        images[index, 0, 0, 0] = value
    labels = torch.randint(0, NUM_CLASSES, (NUM_EXAMPLES,), generator=generator)
    return ls.data.Loader(
        reader({"image": images, "label": labels}), **{"batch_size": BATCH_SIZE, "order": "sequential", **options}
    )


def losses(model: nn.Module, batch: ls.Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The cross entropy, and a metric."""
    logits = model(batch["image"])
    metrics = {"top1": ls.metrics.in_top_k(logits.detach(), batch["label"]).mean()}
    return {"cross_entropy": F.cross_entropy(logits, batch["label"])}, metrics


def summed_losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    """The cross entropy as a sum, for which `counts` counts."""
    return {"cross_entropy": F.cross_entropy(model(batch["image"]), batch["label"], reduction="sum")}


def counts(batch: ls.Batch) -> dict[str, Tensor]:
    """The number of labels, counted on the device."""
    return {"cross_entropy": (batch["label"] >= 0).sum()}


def learned(state: ls.TrainState) -> dict[str, Any]:
    """All that a state has learned, on the host."""
    sections = {f"{section}/{name}": value for section, of in state.sections().items() for name, value in of.items()}
    return {name: value.detach().cpu().clone() for name, value in sections.items()}


def assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """The same tensors, bit for bit."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
