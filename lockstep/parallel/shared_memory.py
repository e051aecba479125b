"""The exchange between workers of one CPU host: rows of gradients in one block of shared memory.

Each worker writes the nodes of the tree that it owns, each as a row. Then worker w adds up its share of the columns
over all rows, in tree order, into the row of results. Every worker reads the whole result and makes the whole update
on parameters of its own, so a kill can never leave parameters half updated for the others.

Two barriers a step are enough: the results of one step are overwritten only behind the first barrier of the next,
which every worker reaches after its update.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.errors import WorkerError
from lockstep.parallel.barrier import SpinBarrier
from lockstep.parallel.layout import Layout, packed, unpacked
from lockstep.parallel.tree import Node, PartialSum, TreeSum, additions, aligned_nodes, assign_towers
from lockstep.workers.group import MEMORY_NAME
from lockstep.workers.rank import Worker

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemoryTransport:
    """Sums over all towers through shared memory; always by the fixed tree."""

    def __init__(self, worker: Worker, num_towers: int) -> None:
        self._worker = worker
        self._dealt = [aligned_nodes(towers) for towers in assign_towers(num_towers, worker.num_workers)]
        self._nodes: list[Node] = [node for owned in self._dealt for node in owned]
        self._plan = additions(self._nodes)
        self._first_row = sum(len(owned) for owned in self._dealt[: worker.rank])
        self._rows: list[list[Tensor]] = []
        self._result: list[Tensor] = []
        self._shares: list[Callable[[], None]] = []
        self._barrier: SpinBarrier | None = None

    def total(self, sums: TreeSum) -> PartialSum:
        """The sum over all towers of what each worker added up; valid until the next call, never to be changed.

        Raises:
            PeerLostError: another worker is gone.
        """
        if self._barrier is None:
            self._open(Layout(packed(sums.nodes[0][1])))
        assert self._barrier is not None
        for row, (_, partial) in zip(self._rows, sums.nodes, strict=True):
            torch._foreach_copy_(row, packed(partial))
        self._barrier.wait()
        for share in self._shares:
            share()
        self._barrier.wait()
        return unpacked(self._result, owned=False)

    def close(self) -> None:
        """Let go of the block; it vanishes with the last worker."""
        if self._barrier is not None:
            self._barrier.close()
        self._rows, self._result, self._shares, self._barrier = [], [], [], None

    def _open(self, layout: Layout) -> None:
        """Map the block that the chief makes, once all workers agree on what goes where."""
        worker = self._worker
        worker.group.agree("the tensors to exchange", layout.describe())
        header = SpinBarrier.num_bytes(worker.num_workers)
        block = _map_together(worker, header + (len(self._nodes) + 1) * layout.num_bytes)
        self._barrier = SpinBarrier(block[:header], worker)
        rows = [block[header + i * layout.num_bytes :][: layout.num_bytes] for i in range(len(self._nodes) + 1)]
        self._result = layout.views(rows[-1])
        owned = slice(self._first_row, self._first_row + len(self._dealt[worker.rank]))
        self._rows = [layout.views(row) for row in rows[:-1][owned]]
        for segment in layout.segments:
            share = _share(segment.num_elements, worker.rank, worker.num_workers)
            columns = [segment.of(row)[share] for row in rows]
            self._shares.append(_reduction(columns[:-1], columns[-1], self._plan))


def _share(num_elements: int, rank: int, num_workers: int) -> slice:
    """The columns that one worker adds up: whole cache lines, so that no two workers write to the same one."""
    line = 16
    lines = -(-num_elements // line)
    return slice(lines * rank // num_workers * line, lines * (rank + 1) // num_workers * line)


def _reduction(rows: list[Tensor], result: Tensor, plan: list[tuple[int, int]]) -> Callable[[], None]:
    """The additions of the tree over some columns, the last one into the result."""

    def reduce() -> None:
        for i, j in plan[:-1]:
            rows[i].add_(rows[j])
        torch.add(rows[plan[-1][0]], rows[plan[-1][1]], out=result)

    return reduce


def _map_together(worker: Worker, num_bytes: int) -> Tensor:
    """One block of zeros, mapped by all workers: a file without a name, so nothing is left behind whoever is killed."""
    descriptor = worker.group.share_memory(_memory(num_bytes) if worker.is_chief else None)
    try:
        _check_memory(descriptor, num_bytes)
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _memory(num_bytes: int) -> int:
    """A memfd of zeros whose size nobody can change: memory that is cut off under a mapping kills who touches it."""
    descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def _check_memory(descriptor: int, num_bytes: int) -> None:
    found = os.fstat(descriptor).st_size
    # Only a memfd has seals.
    if found != num_bytes or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise WorkerError(
            "The memory that the chief shares is not the one to exchange gradients in.",
            given=f"{found} bytes",
            expected=f"{num_bytes} bytes whose size is sealed",
            hint="start all workers with the same version of Lockstep, and let nobody else reach their store",
        )
