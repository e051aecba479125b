"""Several workers: two on one GPU, and one that is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_nets import learned, losses, make_loader, make_state, worker

import lockstep as ls
from lockstep.errors import PeerLostError
from lockstep.exchange.tree import PartialSum, TreeSum, assign_towers

STEPS, LOST_AT = 5, 3


def trained(workers_per_device: int) -> list[list[float]]:
    worker(workers_per_device)
    state = make_state()
    ls.train(state, losses, make_loader(), ls.Towers(2), until=ls.Steps(STEPS))
    return [value.double().flatten().tolist() for name, value in learned(state).items() if "num_batches" not in name]


def test_two_workers_on_one_gpu_train_as_one(run_workers: Callable[..., list[Any]]) -> None:
    alone = trained(1)
    one, other = run_workers(trained, 2, 2)
    assert one == other
    for mine, theirs in zip(one, alone, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="where there are several GPUs each has one of them")
def test_two_workers_on_one_gpu_are_refused_unless_asked_for(run_workers: Callable[..., list[Any]]) -> None:
    with pytest.raises(AssertionError, match="Several workers have the same device"):
        run_workers(trained, 2, 1)


def served() -> list[list[float]]:
    here = worker(1, chief_serves=True)
    assert here.num_workers == 1 or here.shares_device == (here.device.type != "cpu")
    state = make_state()
    exchange = ls.Backups() if here.num_workers > 1 else ls.AllReduce()  # an exact one has no TF32
    ls.train(state, losses, make_loader(), ls.Towers(2), exchange, until=ls.Steps(STEPS))
    return [value.double().flatten().tolist() for _, value in learned(state).items()]


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="the chief shares the GPU of worker 1 where there is one")
def test_a_chief_that_serves_shares_the_gpu_of_the_worker_that_computes(run_workers: Callable[..., list[Any]]) -> None:
    alone, (chief, _) = served(), run_workers(served, 2)
    for mine, theirs in zip(chief, alone, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def exact_sum(num_towers: int) -> list[list[float]]:
    """What lies on the GPU, by the tree over gloo, which reads the memory of the host."""
    here = worker(2)
    found, own = TreeSum(), assign_towers(num_towers, here.num_workers)[here.rank]
    for tower in own:
        generator = torch.Generator().manual_seed(tower)
        tensors = [torch.randn(shape, generator=generator).to(here.device) for shape in ((7, 5), (33,))]
        found.add(tower, PartialSum(tensors, tensors[0].flatten().double()))
    connection = ls.AllReduce("gloo", exact=True).connect(here, num_towers)
    for _ in range(2):
        total = connection.total(found)
    return [*[tensor.flatten().tolist() for tensor in total.tensors], torch.as_tensor(total.numbers).tolist()]


@pytest.mark.parametrize("num_towers", [2, 5])
def test_two_workers_on_one_gpu_add_up_by_the_tree(run_workers: Callable[..., list[Any]], num_towers: int) -> None:
    assert run_workers(exact_sum, 2, num_towers) == [exact_sum(num_towers)] * 2


def lost(workers_per_device: int) -> tuple[str, float]:
    """Worker 1 is killed in the midst of a run; what worker 0 says, and how many seconds after its last step."""
    rank = worker(workers_per_device).rank
    began = time.monotonic()

    def note(report: ls.StepReport) -> None:
        nonlocal began
        began = time.monotonic()
        if rank == 1 and report.step == LOST_AT:
            time.sleep(1)  # a beat tells the others where it is
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(PeerLostError) as caught:
        ls.train(make_state(), losses, make_loader(), ls.Towers(2), hooks=[note])
    return caught.value.what, time.monotonic() - began


@pytest.mark.parametrize(
    "workers_per_device",
    [
        pytest.param(2, id="gloo, one GPU"),
        pytest.param(
            1,
            id="NCCL, a GPU each",
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
        ),
    ],
)
def test_a_worker_that_is_killed_is_missed_in_seconds(
    workers_per_device: int, run_workers: Callable[..., list[Any]]
) -> None:
    what, seconds = run_workers(lost, 2, workers_per_device, lost=[1])[0]
    assert what.startswith("worker 0 ")
    assert seconds < 20
