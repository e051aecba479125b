"""The law of towers: T towers on W workers make the update of one tower on the joined batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from chrome_trace import names_of, read_trace
from corners import on_devices
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.data.loader import Loader
from lockstep.exchange import bucketed
from lockstep.models.quantization import quantize
from lockstep.readers.reader import Arrays

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("each_device")]

Array = npt.NDArray[Any]

SIZE, FEATURES, CLASSES = 96, 12, 5


def make_loader(batch_size: int = 24, dtype: torch.dtype = torch.float32) -> Loader:
    generator = torch.Generator().manual_seed(7)
    fields = {
        "x": torch.randn(SIZE, FEATURES, generator=generator, dtype=torch.float64).to(dtype),
        "y": torch.randint(0, CLASSES, (SIZE,), generator=generator),
    }
    return Loader(Arrays(fields), batch_size=batch_size, seed=3)


def make_model(coupled: bool, dtype: torch.dtype, quantized: bool = False) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        body = [nn.BatchNorm1d(16), nn.Dropout(0.2)] if coupled else [nn.Tanh()]
        model = nn.Sequential(
            nn.Linear(FEATURES, 16, bias=not quantized), *body, *[nn.ReLU()] * quantized, nn.Linear(16, CLASSES)
        ).to(dtype)
    if quantized:
        quantize(model, torch.zeros(2, FEATURES), delay=5)
        assert model.get_submodule("quantization").plan.normed  # type: ignore[union-attr]
    return model


def make_state(coupled: bool = False, dtype: torch.dtype = torch.float32, quantized: bool = False) -> ls.TrainState:
    return ls.TrainState(
        make_model(coupled, dtype, quantized),
        ls.optim.SGD(ls.optim.Cosine(0.1, 40), momentum=0.9, nesterov=True),
        gradient_transforms=[ls.optim.ClipGlobalNorm(0.5)],
        average=ls.optim.MovingAverage(0.99),
    )


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"cross_entropy": F.cross_entropy(model(batch["x"]), batch["y"])}


def learned(state: ls.TrainState) -> dict[str, Array]:
    """Arrays rather than tensors: they travel between processes by value."""
    return {f"{s}/{n}": t.numpy().copy() for s, members in state.sections().items() for n, t in members.items()}


def digest(state: ls.TrainState, reported: list[float]) -> str:
    sha = hashlib.sha256(repr(reported).encode())
    for name, tensor in sorted(learned(state).items()):
        sha.update(name.encode() + tensor.tobytes())
    return sha.hexdigest()


def train_some(
    num_towers: int,
    exchange: Any,
    coupled: bool,
    dtype: torch.dtype = torch.float32,
    steps: int = 10,
    traced: Path | None = None,
    quantized: bool = False,
    **towers: Any,
) -> tuple[str, dict[str, Array]]:
    state, reports = make_state(coupled, dtype, quantized), list[ls.StepReport]()
    loader, split, until = make_loader(dtype=dtype), ls.Towers(num_towers, **towers), ls.Steps(steps)
    with ls.Trace(traced, "2:8") if traced else nullcontext(id) as trace:
        ls.train(state, losses, loader, split, exchange, until=until, hooks=[reports.append, trace])
    return digest(state, [r.total for r in reports] + [r.gradient_norm for r in reports]), learned(state)


def test_towers_equal_one_tower_on_the_joined_batch() -> None:
    _, joined = train_some(1, ls.Alone(), coupled=False, dtype=torch.float64)
    for num_towers in (2, 3, 4, 8):
        _, split = train_some(num_towers, ls.Alone(), coupled=False, dtype=torch.float64)
        for name, value in joined.items():
            np.testing.assert_allclose(split[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


def test_float32_towers_equal_one_tower_within_rounding() -> None:
    _, joined = train_some(1, ls.Alone(), coupled=False)
    _, split = train_some(4, ls.Alone(), coupled=False)
    for name, value in joined.items():
        np.testing.assert_allclose(split[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


@on_devices(
    ["num_towers", "splits"],
    quick=[("cpu", 3, (2, 3)), ("accelerator", 8, (3,))],
    slow=[("cpu", 4, (2, 3, 4)), ("cpu", 8, (3,)), ("accelerator", 3, (2, 3)), ("accelerator", 4, (2, 3, 4))],
)
def test_shared_memory_gives_the_same_bits_for_every_number_of_workers(
    run_workers: Callable[..., list[Any]], num_towers: int, splits: tuple[int, ...]
) -> None:
    exchange = ls.AllReduce(exact=True)
    alone, _ = train_some(num_towers, ls.Alone(), coupled=True)
    for num_workers in splits:
        hashes = {each[0] for each in run_workers(train_some, num_workers, num_towers, exchange, True)}
        assert hashes == {alone}, f"{num_towers} towers on {num_workers} workers"


def test_a_trace_changes_no_bits(run_workers: Callable[..., list[Any]], tmp_path: Path) -> None:
    exchange, with_trace = ls.AllReduce(exact=True), (True, torch.float32, 10, tmp_path)
    alone, _ = train_some(3, ls.Alone(), coupled=True)
    assert train_some(3, ls.Alone(), *with_trace)[0] == alone
    assert {each[0] for each in run_workers(train_some, 2, 3, exchange, *with_trace)} == {alone}
    lanes = read_trace(tmp_path / "traces/steps-2-8.json")
    assert all("wait for other workers" in names_of(lanes, "main thread", process) for process in (1, 2))


@on_devices(
    ["num_workers"],
    quick=[("cpu", 3), ("accelerator", 2)],
    slow=[*(("cpu", number) for number in (2, 4, 8)), *(("accelerator", number) for number in (3, 4, 8))],
)
def test_gloo_gives_the_same_bits_where_the_sum_is_exact(
    run_workers: Callable[..., list[Any]], num_workers: int
) -> None:
    alone, _ = train_some(8, ls.Alone(), coupled=True)
    found = run_workers(train_some, num_workers, 8, ls.AllReduce("gloo", exact=True), True)
    assert {each[0] for each in found} == {alone}


@on_devices(
    ["policy"],
    quick=[("cpu", "mean"), ("accelerator", "first"), ("accelerator", "last")],
    slow=[("cpu", "first"), ("cpu", "last"), ("accelerator", "mean")],
)
def test_batch_norm_statistics_do_not_depend_on_workers(run_workers: Callable[..., list[Any]], policy: str) -> None:
    alone = train_batch_norm(ls.Alone(), policy)
    for result in run_workers(train_batch_norm, 2, ls.AllReduce(), policy):
        assert result == alone


def train_batch_norm(exchange: Any, policy: str) -> str:
    return train_some(4, exchange, True, batch_norm=policy)[0]


@on_devices(["policy"], quick=[("accelerator", "mean")], slow=[("cpu", "mean"), ("cpu", "last")])
def test_ranges_of_quantization_do_not_depend_on_workers(run_workers: Callable[..., list[Any]], policy: str) -> None:
    alone, learned = train_quantized(ls.Alone(), policy)
    assert [value for name, value in learned.items() if name.endswith("quantization.steps")] == [10]
    for result in run_workers(train_quantized, 2, ls.AllReduce(), policy):
        assert result[0] == alone


def train_quantized(exchange: Any, policy: str) -> tuple[str, dict[str, Array]]:
    return train_some(4, exchange, True, quantized=True, batch_norm=policy)


def test_all_reduce_over_gloo_agrees_within_rounding(run_workers: Callable[..., list[Any]]) -> None:
    _, alone = train_some(4, ls.Alone(), coupled=True)
    results = run_workers(train_some, 3, 4, ls.AllReduce("gloo"), True)
    assert len({each[0] for each in results}) == 1
    for name, value in alone.items():
        np.testing.assert_allclose(results[0][1][name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def train_overlapped(num_towers: int, exchange: Any) -> tuple[str, dict[str, Array]]:
    bucketed.SMALL_ELEMENTS, bucketed.FIRST_BUCKET_BYTES = (
        0,
        64,
    )  # of this process alone; else all would be one bucket, which is sent at the end
    return train_some(num_towers, exchange, coupled=True)


@on_devices(["num_towers"], quick=[("cpu", 8), ("accelerator", 2)], slow=[("cpu", 2), ("accelerator", 8)])
def test_two_workers_over_gloo_have_the_bits_of_one(run_workers: Callable[..., list[Any]], num_towers: int) -> None:
    """A sum of two has one value in any order; the gradients are sent as they come."""
    alone, _ = train_some(num_towers, ls.Alone(), coupled=True)
    assert {each[0] for each in run_workers(train_overlapped, 2, num_towers, ls.AllReduce("gloo"))} == {alone}


@on_devices(
    ["compression"], quick=[("cpu", "bf16"), ("accelerator", "fp16")], slow=[("cpu", "fp16"), ("accelerator", "bf16")]
)
def test_compressed_gradients_agree_within_their_rounding(
    run_workers: Callable[..., list[Any]], compression: str
) -> None:
    _, alone = train_some(4, ls.Alone(), coupled=True)
    exchange = ls.AllReduce("gloo", compression=compression)  # type: ignore[arg-type]
    results = run_workers(train_overlapped, 2, 4, exchange)
    assert len({each[0] for each in results}) == 1, "the same bits on both workers"
    for name, value in alone.items():
        np.testing.assert_allclose(results[0][1][name], value, rtol=0.05, atol=0.01, err_msg=name)
