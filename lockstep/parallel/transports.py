"""Where each tensor of a list lies in one block of bytes: the same on every worker, and the same after a resume."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from lockstep.errors import PeerLostError, WorkerError
from lockstep.parallel.barrier import SpinBarrier
from lockstep.parallel.tree import Node, PartialSum, TreeSum, additions, aligned_nodes, assign_towers
from lockstep.workers.group import MEMORY_NAME, timeout_seconds
from lockstep.workers.rank import Worker

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Segment:
    """The tensors of one dtype, one after the other."""

    dtype: torch.dtype
    offset_bytes: int
    num_elements: int

    def of(self, block: Tensor) -> Tensor:
        """The segment's elements in a block of bytes (uint8, one-dimensional)."""
        return block[self.offset_bytes : self.offset_bytes + self.num_elements * self.dtype.itemsize].view(self.dtype)


class FlatLayout:
    """The places of a list of tensors, by dtype in order of first appearance, then in the order of the list.

    A tensor keeps its strides: what lies in the block is its memory as it is.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [(t.shape, t.stride(), t.dtype) for t in tensors]
        dtypes = list(dict.fromkeys(t.dtype for t in tensors))
        sizes = {dtype: sum(t.numel() for t in tensors if t.dtype == dtype) for dtype in dtypes}
        self.segments: list[Segment] = []
        end = 0
        for dtype in dtypes:
            self.segments.append(Segment(dtype, end, sizes[dtype]))
            end += -(-sizes[dtype] * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.num_bytes = end

    def describe(self) -> list[str]:
        """One line a tensor, equal on two workers exactly where their layouts are."""
        return [f"{tuple(shape)} {tuple(stride)} {dtype}" for shape, stride, dtype in self._shapes]

    def views(self, block: Tensor) -> list[Tensor]:
        """The tensors in a block of `num_bytes` bytes, in the order of the list."""
        rest = {segment.dtype: segment.of(block) for segment in self.segments}
        views = []
        for shape, stride, dtype in self._shapes:
            num_elements = shape.numel()
            views.append(rest[dtype][:num_elements].as_strided(shape, stride))
            rest[dtype] = rest[dtype][num_elements:]
        return views


def packed(partial: PartialSum, device: torch.device | str = "cpu") -> list[Tensor]:
    """The tensors of an operand, and last its numbers as one more (float64)."""
    return [*partial.tensors, torch.tensor(partial.numbers, dtype=torch.float64, device=device)]


def unpacked(tensors: Sequence[Tensor], *, owned: bool) -> PartialSum:
    """The operand that was packed; `owned` if no other worker reads it."""
    return PartialSum(list(tensors[:-1]), tensors[-1].tolist(), owned=owned)


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
            self._open(FlatLayout(packed(sums.nodes[0][1])))
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

    def _open(self, layout: FlatLayout) -> None:
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


BUCKET_BYTES = 25 << 20


class CollectiveTransport:
    """Sums over all towers by all-reduce: the tree inside a worker, the library's order between workers."""

    def __init__(self, worker: Worker, backend: str) -> None:
        self._worker = worker
        self._group = process_group(worker, backend)
        self._buckets: list[Tensor] = []
        self._views: list[Tensor] = []

    def total(self, sums: TreeSum) -> PartialSum:
        """The sum over all towers of what each worker added up; valid until the next call, never to be changed."""
        tensors = packed(sums.total(), self._worker.device)
        if not self._views:
            self._open(FlatLayout(tensors))
        torch._foreach_copy_(self._views, tensors)
        together(self._worker, self._all_reduce)
        return unpacked(self._views, owned=True)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)

    def _all_reduce(self) -> None:
        works = [dist.all_reduce(bucket, group=self._group, async_op=True) for bucket in self._buckets]
        for work in works:
            work.wait()

    def _open(self, layout: FlatLayout) -> None:
        self._worker.group.agree("the tensors to exchange", layout.describe())
        block = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self._worker.device)
        self._views = layout.views(block)
        for segment in layout.segments:
            self._buckets += torch.split(segment.of(block), BUCKET_BYTES // segment.dtype.itemsize)


def together(worker: Worker, collective: Callable[[], object]) -> None:
    """Make a collective call.

    Raises:
        PeerLostError: another worker has not come, or is gone.
    """
    try:
        with worker.pulse.waiting():
            collective()
    except RuntimeError as error:
        said = str(error).splitlines()[0]
    else:
        return
    # Outside the except block: its traceback would keep the group's sockets open, and the others waiting.
    raise PeerLostError(
        f"{worker.name} lost another worker in the exchange.",
        given=said,
        expected="all workers to take part",
        hint="read what the other workers said last; their launcher reports the cause",
    )


def process_group(worker: Worker, backend: str) -> dist.ProcessGroup | None:
    """A group of all workers for calls of torch.distributed; all of them make it together.

    It is another one each time, so that the calls of one part never meet those of another.
    """
    timeout = timedelta(seconds=timeout_seconds(worker.pulse))
    if dist.is_initialized():
        group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=timeout)
        return group
    store = PrefixStore("exchange", worker.group.store)
    dist.init_process_group(backend, store=store, rank=worker.rank, world_size=worker.num_workers, timeout=timeout)
    world: dist.ProcessGroup | None = dist.group.WORLD
    return world
