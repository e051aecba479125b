from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_workers import run_threads, thread_workers
from torch import Tensor

from lockstep.errors import WorkerError
from lockstep.exchange.transports import (
    ALIGNMENT_BYTES,
    FlatLayout,
    SharedMemoryTransport,
    pack,
    unpack,
)
from lockstep.exchange.tree import PartialSum, TreeSum, assign_towers
from lockstep.workers.rank import Worker

# Layout ---------------------------------------------------------------------------------------------------------------


def test_tensors_keep_shape_strides_and_dtype_in_their_order() -> None:
    tensors = [torch.rand(2, 3).t(), torch.arange(5), torch.rand(1, 4, 2, 2).to(memory_format=torch.channels_last)]
    layout = FlatLayout(tensors)
    views = layout.views(torch.zeros(layout.num_bytes, dtype=torch.uint8))
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    assert [(v.stride(), v.dtype) for v in views] == [(t.stride(), t.dtype) for t in tensors]


def test_strides_of_a_dimension_of_one_make_no_other_layout() -> None:
    kernel = torch.zeros(32, 1, 5, 5).to(memory_format=torch.channels_last)
    of_a_sum = kernel.as_strided(kernel.shape, (25, 25, 5, 1))
    assert of_a_sum.stride() != kernel.stride()
    assert FlatLayout([of_a_sum]).describe() == FlatLayout([kernel]).describe()


def test_each_dtype_is_one_aligned_segment() -> None:
    layout = FlatLayout([torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(20)])
    assert [(each.dtype, each.offset_bytes, each.num_elements) for each in layout.segments] == [
        (torch.float32, 0, 23),
        (torch.float64, 2 * ALIGNMENT_BYTES, 2),
    ]
    assert layout.num_bytes == 3 * ALIGNMENT_BYTES
    block = torch.arange(layout.num_bytes, dtype=torch.uint8)
    assert layout.segments[1].of(block).view(torch.uint8).tolist() == list(range(128, 144))


def test_a_partial_sum_is_packed_with_its_numbers_last() -> None:
    packed = pack(PartialSum([torch.ones(2)], [0.1, 2.0]))
    assert packed[1].dtype == torch.float64
    unpacked = unpack(packed, owned=True)
    assert ([each.tolist() for each in unpacked.tensors], unpacked.numbers) == ([[1.0, 1.0]], [0.1, 2.0])
    assert unpacked.owned


# Shared memory --------------------------------------------------------------------------------------------------------


def tower(index: int, step: int) -> PartialSum:
    generator = torch.Generator().manual_seed(1000 * step + index)
    shapes = [(7, 5), (33,), ()]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return PartialSum([*tensors, tensors[0].double()], [tensors[1].sum().item(), float(index)])


def alone(num_towers: int, step: int) -> PartialSum:
    sums = TreeSum()
    for index in range(num_towers):
        sums.add(index, tower(index, step))
    return sums.total()


@pytest.mark.parametrize(("num_towers", "num_workers"), [(2, 2), (3, 2), (7, 2), (8, 3), (5, 4)])
def test_workers_get_the_bits_of_one_worker(num_towers: int, num_workers: int) -> None:
    def work(worker: Worker) -> list[tuple[list[Tensor], list[float]]]:
        transport = SharedMemoryTransport(worker, num_towers)
        totals = []
        for step in range(3):
            sums = TreeSum()
            for index in assign_towers(num_towers, num_workers)[worker.rank]:
                sums.add(index, tower(index, step))
            total = transport.total(sums)
            assert not total.owned, "every worker reads it"
            totals.append(([tensor.clone() for tensor in total.tensors], total.numbers))
        transport.close()
        return totals

    for totals in run_threads(work, num_workers):
        for step, (tensors, numbers) in enumerate(totals):
            expected = alone(num_towers, step)
            assert numbers == expected.numbers
            assert all(map(torch.equal, tensors, expected.tensors))


def test_the_block_is_gone_when_all_have_closed_it() -> None:
    def work(worker: Worker) -> int:
        transport = SharedMemoryTransport(worker, 2)
        sums = TreeSum()
        sums.add(worker.rank, tower(worker.rank, 0))
        transport.total(sums)
        worker.group.barrier("mapped")
        mapped = num_mappings()
        worker.group.barrier("counted")
        transport.close()
        return mapped

    before = num_mappings()
    assert run_threads(work, 2) == [before + 2] * 2
    assert num_mappings() == before


def num_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:lockstep-exchange")


def test_workers_with_other_tensors_are_refused() -> None:
    def work(worker: Worker) -> str:
        sums = TreeSum()
        sums.add(worker.rank, PartialSum([torch.zeros(3 + worker.rank)], []))
        with pytest.raises(WorkerError, match="do not agree on the tensors to exchange: worker 1 differs") as raised:
            SharedMemoryTransport(worker, 2).total(sums)
        return str(raised.value.given)

    assert run_threads(work, 2)[0].startswith("worker 1: [0]: ")


@pytest.mark.parametrize(("num_bytes", "is_sealed"), [(1, True), (320, False)])
def test_memory_of_another_size_or_not_sealed_is_refused(num_bytes: int, is_sealed: bool) -> None:
    """What a worker maps must not be cut off under it."""

    def share_memory(_: int | None) -> int:
        descriptor = os.memfd_create("lockstep-exchange", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, num_bytes)
        if is_sealed:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return descriptor

    group: Any = SimpleNamespace(share_memory=share_memory, agree=lambda *_: None)
    worker = thread_workers(2, group=group)[1]
    sums = TreeSum()
    sums.add(1, PartialSum([], [1.0]))
    with pytest.raises(WorkerError, match="not the one to exchange gradients in") as raised:
        SharedMemoryTransport(worker, 2).total(sums)
    assert raised.value.given == f"{num_bytes} bytes"
    assert raised.value.expected == "320 bytes whose size is sealed"
