"""The law of towers for every part of the update together: the same bits whatever the number of workers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from corners import on_devices
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.optim.optimizers import FTRL, Adadelta

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("each_device")]

NUM_TOWERS, STEPS = 4, 4

OPTIMIZERS: Mapping[str, Any] = {
    "sgd": ls.optim.SGD(0.1),
    "nesterov": ls.optim.SGD(0.1, momentum=0.9, nesterov=True, weight_decay={"weight$": 1e-3}),
    "rmsprop": ls.optim.RMSProp(0.01, momentum=0.9, centered=True),
    "adam": ls.optim.Adam(0.01, epsilon_hat=True),
    "adamw": ls.optim.AdamW(0.01),
    "adagrad": ls.optim.Adagrad(0.1),
    "adadelta": Adadelta(1.0),
    "ftrl": FTRL(0.1, l1=1e-3, l2=1e-3),
    "lars": ls.optim.LARS(1.0),
    "lamb": ls.optim.LAMB(0.01),
    "by name": {r"^0\.": ls.optim.SGD(0.1), r"^[1-9]": ls.optim.Adam(0.01)},
    "of torch": ls.optim.FromTorch(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
}
OPTIONS: Mapping[str, dict[str, Any]] = {
    "penalty and clip": {
        "regularization": [ls.losses.L2(1e-2)],
        "gradient_transforms": [ls.optim.ClipGlobalNorm(0.1)],
    },
    "transforms": {
        "tower_gradient_transforms": [ls.optim.ClipNorm(0.5)],
        "gradient_transforms": [
            ls.optim.ScaleGradients({"bias$": 2.0}),
            ls.optim.AdaptiveClip(0.1),
            ls.optim.ClipValue(0.05),
            ls.optim.ClipGlobalNorm(0.01),
        ],
        "average": ls.optim.MovingAverage(0.9, statistics=True),
    },
}


def make_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


def make_loader() -> ls.data.Loader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48, 6, generator=generator)
    weight = torch.rand(48, generator=generator)
    label = torch.randint(0, 3, (48,), generator=generator)
    return ls.data.Loader(ls.data.Arrays({"x": x, "y": label, "weight": weight}), batch_size=16, seed=4)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    """A mean, and a sum over weights that are no whole numbers."""
    scores = model(batch["x"])
    of_each = F.cross_entropy(scores, batch["y"], reduction="none")
    return {"mean": scores.square().mean(), "sum": (of_each * batch["weight"]).sum()}


def total_weight(batch: ls.Batch) -> dict[str, Tensor]:
    return {"sum": batch["weight"].sum()}


def digest_of(optimizer: Any, options: dict[str, Any], towers: ls.Towers) -> str:
    state = ls.TrainState(make_model(), optimizer, **options)
    reports = list(ls.train_steps(state, losses, make_loader(), towers, counts=total_weight, until=ls.Steps(STEPS)))
    sha = hashlib.sha256(repr([(dict(r.losses), r.gradient_norm) for r in reports]).encode())
    for section, tensors in sorted(state.sections().items()):
        for name, tensor in sorted(tensors.items()):
            sha.update(f"{section}/{name}".encode() + tensor.contiguous().numpy().tobytes())
    return sha.hexdigest()


def digests(precision: Any = "fp32") -> dict[str, str]:
    towers = ls.Towers(NUM_TOWERS, precision=precision)
    return {
        f"{optimizer}, {options}": digest_of(OPTIMIZERS[optimizer], OPTIONS[options], towers)
        for optimizer in OPTIMIZERS
        for options in OPTIONS
    }


@on_devices(
    ["num_workers", "precision"],
    quick=[("accelerator", 3, "fp32")],
    slow=[*(("cpu", *case) for case in ((2, "fp32"), (3, "fp32"), (2, "fp16"))), ("accelerator", 2, "fp16")],
)
def test_every_part_has_the_same_bits_on_any_number_of_workers(
    run_workers: Callable[..., list[Any]], num_workers: int, precision: str
) -> None:
    alone = digests(precision)
    for found in run_workers(digests, num_workers, precision):
        assert {case for case in alone if found[case] != alone[case]} == set()
