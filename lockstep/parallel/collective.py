"""The exchange through torch.distributed: gloo between CPU hosts, nccl between GPUs.

Buckets lie in a fixed layout by the order of the parameters: they never change after the first step, so a resumed run
adds up in the same order as the one that was stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from lockstep.errors import PeerLostError
from lockstep.parallel.layout import Layout, packed, unpacked
from lockstep.parallel.tree import PartialSum, TreeSum
from lockstep.workers.group import timeout_seconds
from lockstep.workers.rank import Worker

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
            self._open(Layout(tensors))
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

    def _open(self, layout: Layout) -> None:
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
