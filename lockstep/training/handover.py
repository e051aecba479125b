"""Handing what one worker has in memory to all others, as a checkpoint that is on no disk.

After a loss, the workers that are left may be one update apart, and those that take the place of the lost have only
just been built. The memory of whoever is furthest goes to the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lockstep.checkpoints.encoding import decode_tensors, decode_values, encode_tensors, encode_values
from lockstep.checkpoints.store import Checkpoint
from lockstep.parallel.exchange import AllReduce
from lockstep.parallel.tree import PartialSum, TreeSum
from lockstep.training.replicas import checksum_of
from lockstep.training.saving import snapshot

if TYPE_CHECKING:
    from lockstep.data.loader import Loader
    from lockstep.parallel.exchange import TransportName
    from lockstep.training.state import TrainState
    from lockstep.workers.rank import Worker

PIECE_BYTES = 16 << 20
"""What is handed over at once: an exchange takes as much for each worker, beside the state itself."""


class Standing(NamedTuple):
    """Where the memory of a worker stands; the last one, in the order of a tuple, is the furthest."""

    stage: int
    """Of the run, counted from 1."""
    step: int
    position: int
    digest: str
    """Of the state's tensors and values: two workers at the same place are to have the same."""

    @classmethod
    def of(cls, state: TrainState, loader: Loader, stage: int = 1) -> Standing | None:
        """The standing of this worker; None where an attempt is half done, and nothing can go on from its memory."""
        if not state.is_settled:
            return None
        tensors = [tensor for members in state.sections().values() for tensor in members.values()]
        devices = dict.fromkeys(tensor.device for tensor in tensors)
        sums = [int(checksum_of([t for t in tensors if t.device == each], state.step)) for each in devices]
        text = json.dumps([sums, state.values()], sort_keys=True)
        return cls(stage, state.step, loader.position, hashlib.sha256(text.encode()).hexdigest()[:16])


def furthest(standings: Sequence[Standing | None]) -> int | None:
    """Return the first of the ranks that stand the furthest; None where there are none, or they are not alike."""
    known = [each for each in standings if each is not None]
    if not known:
        return None
    place = max(each[:3] for each in known)
    there = {each for each in known if each[:3] == place}
    return standings.index(there.pop()) if len(there) == 1 else None


def hand_over(
    state: TrainState, loader: Loader, worker: Worker, source: int, transport: TransportName | None = None
) -> Checkpoint:
    """Return, on all workers, what worker `source` has in memory; they call it together.

    It goes through an exchange of bytes to which the others add zeros.

    Args:
        state: of this worker; it stays as it is.
        loader: of this worker.
        worker: this one.
        source: the rank of the one whose memory it is.
        transport: of the run's own exchange, where it names one.
    """
    files: list[bytes] = []
    names: list[str] = []
    if worker.rank == source:
        step, tensors, values = snapshot(state, loader)
        names = list(tensors)
        files = [encode_values({"step": step, "values": values})]
        files += [b"".join(encode_tensors(members)) for members in tensors.values()]
    told: list[Any] = worker.group.gather([names, [len(file) for file in files]])
    names, sizes = told[source]
    stream = _passed_on(b"".join(files), sum(sizes), worker, transport).numpy()
    first, *others = (stream[start:end].tobytes() for start, end in pairwise(accumulate(sizes, initial=0)))
    facts = decode_values(first)
    tensors = {name: decode_tensors(file) for name, file in zip(names, others, strict=True)}
    return Checkpoint(facts["step"], Path(f"the memory of {worker.group.names[source]}"), tensors, facts["values"])


def _passed_on(own: bytes, num_bytes: int, worker: Worker, transport: TransportName | None) -> Tensor:
    """The bytes that one worker has, on all of them, on the CPU; the others give none."""
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
