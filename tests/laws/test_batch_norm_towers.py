"""The law of towers with batch norm: the statistics of a run do not depend on the number of workers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from corners import on_devices
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.towers.batch_norm import SyncedBatchNorm
from lockstep.workers.rank import leave

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("each_device")]

Array = npt.NDArray[Any]
Learned = dict[str, Array]

POLICIES: list[dict[str, Any]] = [
    {"batch_norm": "none"},
    {"batch_norm": "frozen"},
    {"variance": "biased"},
    {"batch_norm": "first", "variance": "biased"},
]
SYNCED: list[dict[str, Any]] = [{"count": 4}, {"count": 3}, {"count": 2, "variance": "biased"}]


def make_loader(dtype: torch.dtype) -> ls.data.Loader:
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(48, 2, 4, 4, generator=generator, dtype=torch.float64) * 2 + 1
    labels = torch.randint(0, 3, (48,), generator=generator)
    return ls.data.Loader(ls.data.Arrays({"image": images.to(dtype), "label": labels}), batch_size=12, seed=3)


def make_model() -> nn.Module:
    """Norms of images and of rows, with and without parameters of their own, and the first on the images themselves."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return nn.Sequential(
            nn.BatchNorm2d(2, affine=False),
            nn.Conv2d(2, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16, 6),
            nn.BatchNorm1d(6),
            nn.Linear(6, 3),
        )


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"cross_entropy": F.cross_entropy(model(batch["image"]), batch["label"])}


def trained(towers: ls.Towers, exchange: Any = None, dtype: torch.dtype = torch.float64) -> Learned:
    """Parameters, slots and statistics after six steps; arrays travel between processes by value."""
    state = ls.TrainState(make_model().to(dtype), ls.optim.SGD(0.1, momentum=0.9))
    ls.train(state, losses, make_loader(dtype), towers, exchange, until=ls.Steps(6))
    return {f"{s}/{n}": t.numpy().copy() for s, members in state.sections().items() for n, t in members.items()}


def digest(learned: Learned) -> str:
    return hashlib.sha256(b"".join(name.encode() + learned[name].tobytes() for name in sorted(learned))).hexdigest()


def digests() -> list[str]:
    exchange = ls.AllReduce(exact=True)
    return [digest(trained(ls.Towers(4, **policy), exchange, torch.float32)) for policy in POLICIES]


def test_the_same_bits_for_every_number_of_workers(run_workers: Callable[..., list[Any]]) -> None:
    alone = digests()
    assert len(set(alone)) == len(POLICIES)
    assert run_workers(digests, 2) == [alone, alone]


def all_synced() -> list[Learned]:
    """Over shared memory, and once with an exchange that has a group of its own."""
    results = [trained(ls.Towers(**each, batch_norm="sync")) for each in SYNCED]
    return [*results, trained(ls.Towers(4, batch_norm="sync"), ls.AllReduce("gloo"))]


def whole(variance: Any = "unbiased") -> Learned:
    """One tower on the joined batch."""
    return trained(ls.Towers(1, variance=variance))


def assert_equal_within_rounding(learned: Learned, expected: Learned, **tolerance: float) -> None:
    assert learned.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(learned[name], value, err_msg=name, **tolerance)


@on_devices([], quick=[("accelerator",)], slow=[("cpu",)])
def test_synchronised_towers_equal_one_tower_on_the_joined_batch(run_workers: Callable[..., list[Any]]) -> None:
    expected = [whole(), whole(), whole("biased"), whole()]
    for result in [all_synced(), *run_workers(all_synced, 2)]:
        for learned, value in zip(result, expected, strict=True):
            assert_equal_within_rounding(learned, value, rtol=1e-12, atol=1e-12)


def test_towers_of_their_own_would_not_have_agreed() -> None:
    split, joined = trained(ls.Towers(4)), whole()
    assert abs(split["parameters/5.weight"] - joined["parameters/5.weight"]).max() > 1e-3


LAYOUTS = [(6, 3), (6, 3, 2), (6, 3, 2, 2), (6, 3, 2, 1, 2)]


def normalised(context: Any, x: Tensor, gradient: Tensor, weight: bool = True) -> list[Array]:
    """Output, gradients and running statistics of one batch norm."""
    scale, shift = (torch.full((3,), value, dtype=torch.float64, requires_grad=weight) for value in (1.5, 0.5))
    mean, variance = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    x = x.requires_grad_()
    with context:
        output = F.batch_norm(x, mean, variance, *([scale, shift] if weight else []), training=True)
        output.backward(gradient)
    found = [output, x.grad, mean, variance, *([scale.grad, shift.grad] if weight else [])]
    return [tensor.detach().numpy().copy() for tensor in found if tensor is not None]


def rows_of(rank: int, shape: tuple[int, ...], cut: int) -> tuple[Tensor, Tensor]:
    """A worker's rows of the values and of the gradient; rank -1 has all."""
    generator = torch.Generator().manual_seed(len(shape))
    x, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) + 2 for _ in range(2))
    rows = {-1: slice(None), 0: slice(cut), 1: slice(cut, None)}[rank]
    return x[rows].clone(), gradient[rows].clone()


def layouts() -> list[list[Array]]:
    """Uneven rows, then none at all on one worker, then without parameters."""
    worker = ls.join()
    synced = SyncedBatchNorm(worker, biased=False)
    found = [normalised(synced, *rows_of(worker.rank, shape, cut=4)) for shape in LAYOUTS]
    found.append(normalised(synced, *rows_of(worker.rank, (6, 3, 2, 2), cut=6)))
    found.append(normalised(synced, *rows_of(worker.rank, (6, 3), cut=1), weight=False))
    return found


@on_devices([], quick=[("cpu",)], slow=[("accelerator",)])
def test_each_layout_of_rows_over_workers(run_workers: Callable[..., list[Any]]) -> None:
    first, second = run_workers(layouts, 2)
    shapes = [*LAYOUTS, (6, 3, 2, 2), (6, 3)]
    for index, shape in enumerate(shapes):
        expected = normalised(nullcontext(), *rows_of(-1, shape, cut=0), weight=index < len(shapes) - 1)
        output, gradient, mean, variance, *parameters = zip(first[index], second[index], strict=True)
        for parts, value in ((output, expected[0]), (gradient, expected[1])):
            np.testing.assert_allclose(np.concatenate(parts), value, rtol=1e-12, atol=1e-12)
        for both, value in ((mean, expected[2]), (variance, expected[3])):
            np.testing.assert_array_equal(both[0], both[1])
            np.testing.assert_allclose(both[0], value, rtol=1e-13)
        for parts, value in zip(parameters, expected[4:], strict=True):
            np.testing.assert_allclose(parts[0] + parts[1], value, rtol=1e-12)


def half_precision() -> dict[str, Any]:
    """The same images, in half the numbers and in another memory format."""
    worker = ls.join()
    synced = SyncedBatchNorm(worker, biased=False)
    x, gradient = (t.bfloat16() for t in rows_of(worker.rank, (6, 3, 2, 2), cut=2))
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    norm = nn.BatchNorm2d(3)
    with synced, torch.autocast("cpu", torch.bfloat16):
        output = norm(x)
    with synced:
        output.backward(gradient)
    assert x.grad is not None
    return {
        "dtypes": [str(t.dtype) for t in (output, x.grad, norm.running_var, norm.weight.grad)],
        "formats": [t.is_contiguous(memory_format=torch.channels_last) for t in (output, x.grad)],
        "output": output.detach().float().numpy(),
        "gradient": x.grad.float().numpy(),
        "variance": norm.running_var.numpy().copy(),
    }


@on_devices([], quick=[("accelerator",)], slow=[("cpu",)])
def test_half_precision_has_statistics_in_float32_and_keeps_its_memory_format(
    run_workers: Callable[..., list[Any]],
) -> None:
    x, gradient = (t.bfloat16().float() for t in rows_of(-1, (6, 3, 2, 2), cut=0))
    norm = nn.BatchNorm2d(3)
    expected = norm(x.requires_grad_())
    expected.backward(gradient)
    assert x.grad is not None
    found = run_workers(half_precision, 2)
    for each in found:
        assert each["dtypes"] == ["torch.bfloat16", "torch.bfloat16", "torch.float32", "torch.float32"]
        assert each["formats"] == [True, True]
        np.testing.assert_allclose(each["variance"], norm.running_var.numpy(), rtol=1e-6)
    output, found_gradient = (np.concatenate([each[name] for each in found]) for name in ("output", "gradient"))
    np.testing.assert_allclose(output, expected.detach().numpy(), atol=2e-2)
    np.testing.assert_allclose(found_gradient, x.grad.numpy(), atol=4e-2)


def lose_the_other() -> str:
    worker = ls.join()
    synced = SyncedBatchNorm(worker, biased=False)
    worker.group.barrier("both are connected")
    if worker.rank:
        leave()
        return "gone"
    with pytest.raises(ls.PeerLostError) as caught, synced:
        F.batch_norm(torch.randn(4, 3), None, None, training=True)
    return str(caught.value)


@on_devices([], quick=[("cpu",)], slow=[("accelerator",)])
def test_a_lost_worker_is_named_as_such(run_workers: Callable[..., list[Any]]) -> None:
    said, gone = run_workers(lose_the_other, 2)
    assert "worker 0 lost worker 1." in said
    assert "ended with exit code 0" in said
    assert gone == "gone"
