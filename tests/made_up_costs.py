"""What a probe might have found, for tests of what is told of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.planning.model import Link, RunCosts, SaveCost, SentBucket, WorkerCost

COST = WorkerCost(1, 64, 0.1, 0.08, 0.1, 0.08, 0.01, 0.01, 0.001, 0.001, 400_000_000, 50_000)


def make_costs(**changes: Any) -> RunCosts:
    """Two workers on a host of four cores, which exchange through shared memory; some of it changed."""
    costs = RunCosts(
        machine="cpu, made up",
        is_cpu=True,
        num_cores=4,
        per_host=2,
        num_probed=2,
        batch_size=128,
        epoch_size=1280,
        reads_ahead=False,
        workers=(COST,),
        buckets=(SentBucket(10_000_000, 0.05),),
        save=SaveCost(num_bytes=26_000_000, blocked_seconds=0.01, seconds=0.5, cpu_seconds=0.1),
        shared_memory=Link(0.001, 1e-10),
        messages=None,
        backend="gloo",
    )
    return replace(costs, **changes)
