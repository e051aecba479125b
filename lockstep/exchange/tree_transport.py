"""The transport of exact sums over a network: the fixed tree, in messages of torch.distributed from worker to worker.

The bits are those of one worker, whatever the number of workers and the library that carries the messages. All-reduce
does not promise that: it adds up in an order of its own, which depends on the number of workers, on their ranks and on
where an element lies.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor

from lockstep.exchange.collectives import Backend, Messages, collectives
from lockstep.exchange.transports import FlatLayout, pack, unpack
from lockstep.exchange.tree import PartialSum, TreeSum, rows_of_workers
from lockstep.tensors import copy_all
from lockstep.workers.rank import Worker

ONE_ROUND_BYTES = 1 << 16
"""Up to here every worker adds up all columns: a second round would cost more than the bytes that it saves."""


class TreeTransport:
    """Sums over all towers by messages, always by the fixed tree.

    As in shared memory, each node of the tree that a worker owns is a row of bytes, and each worker adds up its share
    of the columns. It takes two rounds: a worker sends every other one that one's share of its rows; then, having added
    up its own, it sends the sum to all. Where the towers of each worker are one node, as 8 towers are on 2, 4 or 8
    workers, these are as many bytes as all-reduce sends; 8 towers on 3 workers are 2 + 2 + 1 rows.

    All workers make it together; the backend is "gloo" between CPU hosts, "nccl" between GPUs.
    """

    def __init__(self, worker: Worker, backend: Backend, num_towers: int) -> None:
        self._worker = worker
        self._collectives = collectives(worker, backend)
        self._rows_of, self._additions = rows_of_workers(num_towers, worker.num_workers)
        self._rows = self._sent = torch.empty(0)
        """This worker's rows, and what is sent of them: themselves, or a copy where the backend can read it. The first
        of them becomes the sum."""
        self._views: list[list[Tensor]] = []
        self._reductions: list[Callable[[], None]] = []
        self._rounds: list[Messages] = []

    def total(self, sums: TreeSum) -> PartialSum:
        """Return the sum over all towers; valid until the next call.

        Where the host does not wait for it, what has not come is NaN, since a worker was lost.
        """
        operands = [pack(partial, self._worker.device) for _, partial in sums.nodes]
        if not self._views:
            self._open(FlatLayout(operands[0]))
        for views, tensors in zip(self._views, operands, strict=True):
            copy_all(views, tensors)
        if self._sent is not self._rows:
            self._sent.copy_(self._rows)
        parts, *sums_of_shares = self._rounds
        self._collectives.exchange(parts)
        for reduce in self._reductions:
            reduce()
        for messages in sums_of_shares:
            self._collectives.exchange(messages)
        if self._sent is not self._rows:
            self._rows[0].copy_(self._sent[0])
        return unpack(self._views[0], owned=True)

    def close(self) -> None:
        """Give back the memory; the process group stays, since others use it, until the worker leaves its run."""
        self._rows = self._sent = torch.empty(0)
        self._views, self._reductions, self._rounds = [], [], []

    def _open(self, layout: FlatLayout) -> None:
        """Make this worker's rows, and plan the messages, once all workers agree on the layout."""
        worker, ranks = self._worker, range(self._worker.num_workers)
        worker.group.agree("the tensors to exchange", layout.describe())
        num_rows = [len(rows) for rows in self._rows_of]
        self._rows = torch.zeros(num_rows[worker.rank], layout.num_bytes, dtype=torch.uint8, device=worker.device)
        self._views = [layout.views(row) for row in self._rows]
        self._sent = self._rows
        if worker.device.type != "cpu" and not self._collectives.are_enqueued:  # gloo sends what the host has
            self._sent = torch.empty(self._rows.shape, dtype=torch.uint8, pin_memory=True)
        others = [rank for rank in ranks if rank != worker.rank]
        in_one_round = layout.num_bytes <= ONE_ROUND_BYTES
        shares = [layout.share(0, 1) if in_one_round else layout.share(rank, len(ranks)) for rank in ranks]
        mine = shares[worker.rank]
        columns = [self._sent.new_empty(rows, mine.stop - mine.start) for rows in num_rows]
        columns[worker.rank] = self._sent[:, mine]
        total = self._sent[0]
        self._reductions = layout.reductions(mine, [*chain(*columns)], total[mine], self._additions)
        parts = Messages(
            [(rank, row[shares[rank]]) for rank in others for row in self._sent],
            [(rank, row) for rank in others for row in columns[rank]],
        )
        sums = Messages([(rank, total[mine]) for rank in others], [(rank, total[shares[rank]]) for rank in others])
        self._rounds = [parts] if in_one_round else [parts, sums]
