"""Process groups over NCCL: one worker's, and two workers' on one GPU, which NCCL refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_nets import worker

from lockstep.errors import InputError
from lockstep.exchange.collectives import Collectives, collectives
from lockstep.workers.rank import leave

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU")


def one_group() -> tuple[list[float], bool, bool]:
    here = worker()
    calls = collectives(here, "nccl")
    numbers = torch.ones(3, device=here.device)
    calls.all_reduce([numbers])
    here.group.check_peers()
    answers = callable(calls._noticed)
    leave()
    return numbers.tolist(), answers, dist.is_initialized()


def test_a_group_over_nccl_sums_and_is_left(run_workers: Callable[..., list[Any]]) -> None:
    """And torch answers what NCCL has noticed since."""
    assert run_workers(one_group, 1) == [([1.0, 1.0, 1.0], True, False)]


def share_over_nccl() -> str:
    here = dataclasses.replace(worker(2), shares_device=False)
    with pytest.raises(InputError) as caught:
        Collectives(here, "nccl").all_reduce([torch.ones(1, device=here.device)])
    return f"{caught.value.what} {caught.value.given}"


@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="where there are several GPUs each worker has one of them")
def test_two_workers_on_one_gpu_are_what_nccl_refuses(run_workers: Callable[..., list[Any]]) -> None:
    for said in run_workers(share_over_nccl, 2):
        assert said.startswith("Two workers use the same GPU.")
        assert "Duplicate GPU detected" in said
