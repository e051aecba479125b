"""A checkpoint of one worker, read or in its memory, handed to all others by an exchange of bytes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoints.encoding import decode_tensors, decode_values, encode_tensors, encode_values
from lockstep.checkpoints.mirror import MirroredStore
from lockstep.checkpoints.store import Checkpoint, Store
from lockstep.exchange.exchange import AllReduce, TransportName
from lockstep.exchange.tree import PartialSum, TreeSum
from lockstep.workers.rank import Worker

PIECE_BYTES = 16 << 20
"""Bytes that are handed over at once: an exchange takes as much for each worker, beside the checkpoint itself."""


def only_chief_has(store: Store, worker: Worker) -> bool:
    """Whether the checkpoints of a run are in the folder of the chief's host alone: where several mirror a bucket."""
    return isinstance(store, MirroredStore) and worker.num_local_workers < worker.num_workers


def hand_over(
    own: Checkpoint | None, worker: Worker, source: int = 0, transport: TransportName | None = None
) -> Checkpoint:
    """Return, on all workers, the checkpoint of worker `source`, which alone gives one; they call it together.

    It goes through an exchange, by the transport that the run names, to which the others add zeros.
    """
    files: list[list[memoryview]] = []
    names: list[str] = []
    if own:
        names = list(own.tensors)
        files = [[memoryview(encode_values({"step": own.step, "values": own.values}))]]
        files += [[*encode_tensors(members)] for members in own.tensors.values()]
    gathered: list[Any] = worker.group.gather([names, [sum(map(len, file)) for file in files]])
    names, sizes = gathered[source]
    stream = passed_on(chain.from_iterable(files), sum(sizes), worker, transport).numpy()
    if own:
        return own
    first, *others = pairwise(accumulate(sizes, initial=0))
    facts = decode_values(stream[slice(*first)].tobytes())
    tensors = {name: decode_tensors(stream[slice(*place)].tobytes()) for name, place in zip(names, others, strict=True)}
    return Checkpoint(facts["step"], Path(f"the memory of {worker.group.names[source]}"), tensors, facts["values"])


def passed_on(
    own: Iterable[bytes | memoryview], num_bytes: int, worker: Worker, transport: TransportName | None
) -> Tensor:
    """Return the bytes of one worker, which gives them in parts, on all of them, on the CPU; the others give none."""
    size, end = min(PIECE_BYTES, num_bytes), 0
    stream = torch.zeros(-(-num_bytes // size) * size, dtype=torch.uint8)
    for part in own:  # joined, they would be in memory twice
        start, end = end, end + len(part)
        stream.numpy().data[start:end] = part
    connection = AllReduce(transport).connect(worker, worker.num_workers)
    for piece in torch.split(stream, size):
        sums = TreeSum()
        sums.add(worker.rank, PartialSum([piece.to(worker.device)], [0.0]))
        piece.copy_(connection.total(sums).tensors[0])
    connection.close()
    return stream
