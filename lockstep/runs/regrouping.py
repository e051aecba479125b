"""What a run goes on from after its workers have regrouped: the memory of one of them, or a checkpoint.

After a failure, the workers that are left may be one update apart, and those that take the place of the lost have only
just been built. The memory of the worker that is furthest goes to all others, as a checkpoint that is on no disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lockstep.checkpoints.encoding import decode_tensors, decode_values, encode_tensors, encode_values
from lockstep.checkpoints.store import Checkpoint, Store
from lockstep.errors import WorkerError
from lockstep.exchange.exchange import AllReduce, Exchange
from lockstep.exchange.tree import PartialSum, TreeSum
from lockstep.runs.stages import Stages
from lockstep.training.preflight import check_data
from lockstep.training.replicas import checksum_of
from lockstep.training.saving import load_run, read_checkpoint, snapshot
from lockstep.types import StepReport
from lockstep.workers.rank import Worker

if TYPE_CHECKING:
    from lockstep.data.loader import Loader
    from lockstep.exchange.exchange import TransportName
    from lockstep.training.state import TrainState

PIECE_BYTES = 16 << 20
"""Bytes that are handed over at once: an exchange takes as much for each worker, beside the state itself."""


class SavePoint(NamedTuple):
    """How far the run in the memory of a worker is; the last one, in the order of a tuple, is the furthest."""

    stage: int
    """Stage of the run, counted from 1."""
    step: int
    position: int
    digest: str
    """Hash of the state's tensors and values: two workers at the same place are to have the same."""

    @classmethod
    def of(cls, state: TrainState, loader: Loader, stage: int = 1) -> SavePoint | None:
        """Return where this worker stands; None where an attempt is half done: nothing can go on from that."""
        if not state.is_settled:
            return None
        tensors = [tensor for members in state.sections().values() for tensor in members.values()]
        devices = dict.fromkeys(tensor.device for tensor in tensors)
        sums = [int(checksum_of([t for t in tensors if t.device == each], state.step)) for each in devices]
        text = json.dumps([sums, state.values()], sort_keys=True)
        return cls(stage, state.step, loader.position, hashlib.sha256(text.encode()).hexdigest()[:16])


def furthest(points: Sequence[SavePoint | None]) -> int | None:
    """Return the first of the ranks that stand the furthest; None where there are none, or they are not alike."""
    known = [each for each in points if each is not None]
    if not known:
        return None
    place = max(each[:3] for each in known)
    there = {each for each in known if each[:3] == place}
    return points.index(there.pop()) if len(there) == 1 else None


def hand_over(
    state: TrainState, loader: Loader, worker: Worker, source: int, transport: TransportName | None = None
) -> Checkpoint:
    """Return, on all workers, what worker `source` has in memory; they call it together.

    It goes through an exchange of bytes, by the transport that the run names, to which the others add zeros. The state
    and the loader stay as they are.
    """
    files: list[bytes] = []
    names: list[str] = []
    if worker.rank == source:
        step, tensors, values = snapshot(state, loader)
        names = list(tensors)
        files = [encode_values({"step": step, "values": values})]
        files += [b"".join(encode_tensors(members)) for members in tensors.values()]
    gathered: list[Any] = worker.group.gather([names, [len(file) for file in files]])
    names, sizes = gathered[source]
    stream = _passed_on(b"".join(files), sum(sizes), worker, transport).numpy()
    first, *others = (stream[start:end].tobytes() for start, end in pairwise(accumulate(sizes, initial=0)))
    facts = decode_values(first)
    tensors = {name: decode_tensors(file) for name, file in zip(names, others, strict=True)}
    return Checkpoint(facts["step"], Path(f"the memory of {worker.group.names[source]}"), tensors, facts["values"])


def _passed_on(own: bytes, num_bytes: int, worker: Worker, transport: TransportName | None) -> Tensor:
    """Return the bytes of one worker on all of them, on the CPU; the others give none."""
    size = min(PIECE_BYTES, num_bytes)
    stream = torch.zeros(-(-num_bytes // size) * size, dtype=torch.uint8)
    if own:
        stream[:num_bytes] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    connection = AllReduce(transport).connect(worker, worker.num_workers)
    for piece in torch.split(stream, size):
        sums = TreeSum()
        sums.add(worker.rank, PartialSum([piece.to(worker.device)], [0.0]))
        piece.copy_(connection.total(sums).tensors[0])
    connection.close()
    return stream


NUM_REPORTS = 2
"""Reports that are kept in memory: a chief may be lost before it has written down the last, on a GPU the last two."""


class Memory(NamedTuple):
    """What a run on one worker keeps beside its parts, so that other workers can go on with it."""

    reports: Sequence[StepReport] = ()
    """The last reports."""
    history: Mapping[int, float] = {}
    """The scores by which checkpoints are the best, by step."""

    def as_json(self) -> dict[str, Any]:
        """Return the memory as JSON."""
        reports = [report.as_json() for report in self.reports]
        return {"reports": reports, "history": list(self.history.items())}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Memory:
        """Return the memory of another worker."""
        reports = [StepReport.from_json(report) for report in facts["reports"]]
        return cls(reports, dict(facts["history"]))


def recall(stages: Stages, worker: Worker, exchange: Exchange, own: Memory | None) -> Memory | None:
    """Bring the parts of all workers to the furthest place in memory; returns what the workers there know beside.

    All workers of a group call it together; `own` is None on one that has taken no part in the run yet.

    Returns:
        None where no memory will do: every worker was lost in the middle of an update, or those that stand the furthest
        are not alike. Then nothing has changed.
    """
    state, loader = stages.parts.state, stages.parts.loader
    point = SavePoint.of(state, loader, stages.now.number) if own else None
    gathered = worker.group.gather([point, own.as_json()] if own and point else None)
    points = [SavePoint(*each[0]) if each else None for each in gathered]
    source = furthest(points)
    there = None if source is None else points[source]
    if source is None or there is None:
        return None
    if None in gathered:
        check_data(loader, worker)
    if len({*points}) > 1:
        transport = exchange.transport if isinstance(exchange, AllReduce) else None
        checkpoint = hand_over(state, loader, worker, source, transport)
        if point != there:
            stages.enter(there.stage)
            load_run(checkpoint, {"": stages.parts.state}, stages.parts.loader, accept_data_change=True)
    return Memory.from_json(gathered[source][1])


def load_last(stages: Stages, store: Store | None) -> str:
    """Load the last checkpoint on all workers; returns what it is in messages.

    Raises:
        WorkerError: there is none.
    """
    checkpoint = read_checkpoint(store) if store else None
    if checkpoint is None:
        raise WorkerError(
            "The run cannot go on without the workers that are lost.",
            given="workers that were in the middle of an update, or do not agree, and no checkpoint",
            expected="the same step in the memory of those that are left, or a checkpoint",
            hint="start the run anew; with a --workdir it saves checkpoints",
        )
    stages.load(checkpoint, accept_data_change=True)
    return f"the checkpoint of step {checkpoint.step}"
