from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thread_workers import run_threads
from torch import Tensor
from worker_processes import HANG_SECONDS

from lockstep.errors import WorkerError
from lockstep.exchange import transports
from lockstep.exchange.collectives import Messages
from lockstep.exchange.transports import TreeTransport
from lockstep.exchange.tree import PartialSum, TreeSum, assign_towers
from lockstep.workers.rank import Worker

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]
SHAPES: list[tuple[int, ...]] = [(7, 5), (33,), (), (0, 3), (130,)]


class Mail:
    """The messages of several workers, which are threads; those of one may be lost."""

    def __init__(self, num_workers: int, lost: int | None = None) -> None:
        ranks, self.lost = range(num_workers), lost
        self.queues = {(a, b): SimpleQueue[Tensor]() for a in ranks for b in ranks}
        self.num_bytes = [0] * num_workers

    def of(self, worker: Worker, backend: str) -> MailBox:
        return MailBox(self, worker.rank)


class MailBox:
    """The collective calls of one of them."""

    are_enqueued = False

    def __init__(self, mail: Mail, rank: int) -> None:
        self.mail, self.rank = mail, rank

    def exchange(self, messages: Messages) -> None:
        for rank, tensor in messages.sends:
            assert rank != self.rank
            self.mail.num_bytes[self.rank] += tensor.nbytes
            self.mail.queues[self.rank, rank].put(tensor.clone())
        for rank, tensor in messages.receives:
            if rank == self.mail.lost:
                tensor.fill_(0xFF)
                continue
            tensor.copy_(self.mail.queues[rank, self.rank].get(timeout=HANG_SECONDS))


def tower(index: int, step: int, layout: list[tuple[tuple[int, ...], torch.dtype]]) -> PartialSum:
    generator = torch.Generator().manual_seed(1000 * step + index)
    tensors = [(torch.randn(shape, generator=generator) * 100).to(dtype) for shape, dtype in layout]
    return PartialSum(tensors, [torch.randn((), generator=generator).item(), float(index)])


def sums_of(towers: range, step: int, layout: Any) -> TreeSum:
    sums = TreeSum()
    for index in towers:
        sums.add(index, tower(index, step, layout))
    return sums


def totals_of(
    num_towers: int, num_workers: int, layout: Any, num_steps: int, mail: Mail, one_round_bytes: int = 1 << 16
) -> list[list[PartialSum]]:
    """What each worker has as the sum, at each step."""

    def work(worker: Worker) -> list[PartialSum]:
        transport, found = TreeTransport(worker, "gloo", num_towers), []
        mine = assign_towers(num_towers, num_workers)[worker.rank]
        for step in range(num_steps):
            total = transport.total(sums_of(mine, step, layout))
            assert total.owned, "the update may use it up: the next step writes it anew"
            found.append(PartialSum([tensor.clone() for tensor in total.tensors], total.numbers))
            for tensor in total.tensors:
                tensor.zero_()
        transport.close()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transports, "collectives", mail.of)
        patch.setattr(transports, "ONE_ROUND_BYTES", one_round_bytes)
        return run_threads(work, num_workers)


layouts = st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), max_size=4)
splits = st.integers(2, 5).flatmap(lambda num_workers: st.tuples(st.integers(num_workers, 20), st.just(num_workers)))


@given(splits, layouts, st.sampled_from([0, 1 << 16]))
def test_workers_get_the_bits_of_one_worker(split: tuple[int, int], layout: Any, one_round_bytes: int) -> None:
    num_towers, num_workers = split
    for totals in totals_of(num_towers, num_workers, layout, 2, Mail(num_workers), one_round_bytes):
        for step, total in enumerate(totals):
            alone = sums_of(range(num_towers), step, layout).total()
            assert total.numbers == alone.numbers
            assert all(map(torch.equal, total.tensors, alone.tensors))


@pytest.mark.parametrize(("num_towers", "num_workers", "rows"), [(8, 4, [1, 1, 1, 1]), (8, 3, [2, 2, 1])])
def test_it_sends_as_much_as_all_reduce_where_each_worker_has_one_node(
    num_towers: int, num_workers: int, rows: list[int]
) -> None:
    mail, size = Mail(num_workers), 3 << 20
    totals_of(num_towers, num_workers, [((size // 4 - 32,), torch.float32)], 1, mail)
    ring = 2 * (num_workers - 1) / num_workers * size
    assert [num / ring for num in mail.num_bytes] == pytest.approx([(n + 1) / 2 for n in rows], rel=1e-3)


@pytest.mark.parametrize("one_round_bytes", [0, 1 << 16])
def test_a_sum_is_nan_where_the_messages_of_a_worker_have_not_come(one_round_bytes: int) -> None:
    """NCCL only enqueues them: the device must make no update of what is left."""
    layout = [((130,), torch.float32), ((7, 5), torch.bfloat16)]
    *others, _ = totals_of(8, 3, layout, 1, Mail(3, lost=2), one_round_bytes)
    for (total,) in others:
        assert torch.tensor(total.numbers).isnan().all()
        assert all(tensor.isnan().all() for tensor in total.tensors)


def test_workers_with_other_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "collectives", Mail(2).of)

    def work(worker: Worker) -> None:
        sums = TreeSum()
        sums.add(worker.rank, PartialSum([torch.zeros(3 + worker.rank)], []))
        with pytest.raises(WorkerError, match="do not agree on the tensors to exchange: worker 1 differs"):
            TreeTransport(worker, "gloo", 2).total(sums)

    run_threads(work, 2)
