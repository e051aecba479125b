"""The law of the attempt made again: it changes no bit of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.data.loader import Loader
from lockstep.exchange import bucketed
from lockstep.readers.reader import Arrays

pytestmark = pytest.mark.usefixtures("each_device")

BATCH_SIZE, STEPS = 20, 5


def losses(model: nn.Module, batch: ls.Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    scores = model(batch["x"])
    noise = torch.rand(len(scores), device=scores.device)
    return {"square": (scores.squeeze(1) * noise).square().sum()}, {"mean": scores.mean()}


def counts(batch: ls.Batch) -> dict[str, float]:
    batch["found"] = object()  # as a detector leaves what it has found of the objects; nobody is sent that
    return {"square": len(batch["x"])}


def learned(replay_steps: int, num_towers: int, transport: Any = None) -> tuple[list[Any], list[Any]]:
    if transport == "gloo":  # of this process alone: else so few gradients are not sent as they come
        bucketed.SMALL_ELEMENTS, bucketed.FIRST_BUCKET_BYTES = 0, 64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    state = ls.TrainState(model, ls.optim.SGD(0.1, momentum=0.9), average=ls.optim.MovingAverage(0.9))
    state.replay_steps = replay_steps
    x = torch.randn(80, 5, generator=torch.Generator().manual_seed(1))
    loader, calls = Loader(Arrays({"x": x}), batch_size=BATCH_SIZE), []

    def counted(model: nn.Module, batch: ls.Batch) -> Any:
        calls.append(batch.position)
        return losses(model, batch)

    steps = ls.train_steps(
        state,
        counted,
        loader,
        ls.Towers(num_towers),
        ls.AllReduce(transport),
        counts=counts,
        until=ls.Steps(STEPS),
    )
    told = [(report.losses, report.metrics, report.gradient_norm, report.verdict) for report in steps]
    tensors = [t.flatten().tolist() for _, members in sorted(state.sections().items()) for t in members.values()]
    return [told, tensors, loader.position], [len(calls), torch.get_rng_state().tolist()]


def with_and_without(num_towers: int, transport: str) -> list[list[Any]]:
    return [learned(replay_steps, num_towers, transport)[0] for replay_steps in (1, 0)]


@pytest.mark.parametrize("num_towers", [1, 4])
def test_alone(num_towers: int) -> None:
    torch.manual_seed(5)
    without, (num_calls, stream) = learned(0, num_towers)
    torch.manual_seed(5)
    found, (more, same) = learned(2, num_towers)
    assert found == without
    assert same == stream
    assert more == num_calls + 2, "one tower at each second step, but for the first"


@pytest.mark.process
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_on_two_workers(run_workers: Callable[..., list[Any]], transport: str) -> None:
    for found, without in run_workers(with_and_without, 2, 5, transport):
        assert found == without
