"""What a run goes on from after its workers have regrouped: the memory of those that were left, or a checkpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.checkpoints.store import Store
from lockstep.errors import WorkerError
from lockstep.parallel.exchange import AllReduce, Exchange
from lockstep.runs.stages import Stages
from lockstep.training.handover import Standing, furthest, hand_over
from lockstep.training.preflight import check_data
from lockstep.training.resume import load_run, read_checkpoint
from lockstep.types import StepReport
from lockstep.workers.rank import Worker

NUM_REPORTS = 2
"""The chief may be lost before it has written down the last report, and on an accelerator the one before."""


class Memory(NamedTuple):
    """What a run on one worker keeps beside its parts, so that other workers can go on with it."""

    reports: Sequence[StepReport] = ()
    """The last ones."""
    history: Mapping[int, float] = {}
    """The scores by which checkpoints are the best, by step."""

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        reports = [report.as_json() for report in self.reports]
        return {"reports": reports, "history": list(self.history.items())}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Memory:
        """Make what another worker has told."""
        reports = [StepReport.from_json(report) for report in facts["reports"]]
        return cls(reports, dict(facts["history"]))


def recent_reports() -> deque[StepReport]:
    """A list of as many of the last reports as another chief may need."""
    return deque(maxlen=NUM_REPORTS)


def recall(stages: Stages, worker: Worker, exchange: Exchange, own: Memory | None) -> Memory | None:
    """Bring the parts of all workers to where the furthest of them stand in memory; returns what those know beside.

    Args:
        stages: of this worker, which has moved to `worker`.
        worker: this one; all workers of its group make the same call.
        exchange: of the run.
        own: what this worker knows; None on one that has taken no part in the run yet.

    Returns:
        None where no memory will do: every worker was lost in the middle of an update, or those that stand the furthest
        are not alike. Then nothing has changed.
    """
    state, loader = stages.parts.state, stages.parts.loader
    standing = Standing.of(state, loader, stages.now.number) if own else None
    told = worker.group.gather([standing, own.as_json()] if own and standing else None)
    standings = [Standing(*each[0]) if each else None for each in told]
    source = furthest(standings)
    there = None if source is None else standings[source]
    if source is None or there is None:
        return None
    if None in told:
        check_data(loader, worker)
    if len({*standings}) > 1:
        transport = exchange.transport if isinstance(exchange, AllReduce) else None
        checkpoint = hand_over(state, loader, worker, source, transport)
        if standing != there:
            stages.enter(there.stage)
            load_run(checkpoint, {"": stages.parts.state}, stages.parts.loader, accept_data_change=True)
    return Memory.from_json(told[source][1])


def load_last(stages: Stages, store: Store | None) -> str:
    """Load the last checkpoint on all workers; returns what it is in messages.

    Raises:
        WorkerError: there is none.
    """
    checkpoint = read_checkpoint(store) if store else None
    if checkpoint is None:
        raise WorkerError(
            "The run cannot go on after the loss of workers.",
            given="workers that were in the middle of an update, or do not agree, and no checkpoint",
            expected="the same step in the memory of those that are left, or a checkpoint",
            hint="start the run anew; with a --workdir it saves checkpoints",
        )
    stages.load(checkpoint, accept_data_change=True)
    return f"the checkpoint of step {checkpoint.step}"
