from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_workers import run_threads, thread_workers
from torch import Tensor, nn
from torch.nn import functional as F
from worker_processes import HANG_SECONDS

import lockstep as ls
from lockstep.errors import InputError, PeerLostError, WorkerError
from lockstep.exchange import bucketed
from lockstep.exchange.bucketed import BucketedTransport
from lockstep.exchange.tree import PartialSum, TreeSum, assign_towers
from lockstep.towers.hosting import StepInputs, TowerHost
from lockstep.workers.rank import Worker

# Workers that are threads, and collective calls that are additions ----------------------------------------------------


class Calls:
    """The all-reduces of some threads: the n-th of each worker belong together, and are summed at the end."""

    are_enqueued = False

    def __init__(self, num_workers: int) -> None:
        self.begun: list[list[Tensor]] = [[] for _ in range(num_workers)]
        self.num_early = self.num_calls = 0
        self.dtypes: set[torch.dtype] = set()
        self._barrier = Barrier(num_workers, self._sum)

    def of(self, rank: int) -> Any:
        def begin_all_reduce(tensor: Tensor, number: int) -> None:
            self.num_early += 1
            self.begun[rank].append(tensor)

        def all_reduce(tensors: Sequence[Tensor]) -> None:
            self.begun[rank] += tensors
            self._barrier.wait(HANG_SECONDS)

        return SimpleNamespace(
            are_enqueued=False,
            begin_all_reduce=begin_all_reduce,
            finish=lambda: self._barrier.wait(HANG_SECONDS),
            check_finished=lambda: None,
            all_reduce=all_reduce,
        )

    def _sum(self) -> None:
        for tensors in zip(*self.begun, strict=True):
            assert len({(each.shape, each.dtype) for each in tensors}) == 1, "the buckets of a call are of one kind"
            total = sum(tensors[1:], start=tensors[0].clone())
            for each in tensors:
                each.copy_(total)
        self.num_calls += sum(map(len, self.begun))
        self.dtypes |= {tensor.dtype for tensor in self.begun[0]}
        for begun in self.begun:
            begun.clear()


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucketed, "FIRST_BUCKET_BYTES", 16)
    monkeypatch.setattr(bucketed, "BUCKET_BYTES", 200)
    monkeypatch.setattr(bucketed, "SMALL_ELEMENTS", 0)


def in_threads(monkeypatch: pytest.MonkeyPatch, num_workers: int, work: Callable[[Worker], Any]) -> tuple[Any, Calls]:
    calls = Calls(num_workers)
    monkeypatch.setattr(bucketed, "collectives", lambda worker, backend: calls.of(worker.rank))
    return run_threads(work, num_workers), calls


# Towers of a real model -----------------------------------------------------------------------------------------------

SIZE = 24


class Net(nn.Module):
    """Batch norm, an embedding with sparse gradients, a layer that only some towers use, one that none do."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.sometimes = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.embedding = nn.Embedding(9, 6, sparse=True)
        self.hidden = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.shared = self.hidden[0].weight
        self.head = nn.Linear(6, 3).to(torch.float64)
        generator = torch.Generator().manual_seed(0)  # the threads share the global one
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embedding(x))
        for layer in self.hidden:
            h = torch.tanh(layer(h))
        if x[0] % 2:
            h = h + self.sometimes(h)
        return self.head((h @ self.shared).double())  # type: ignore[no-any-return]


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"cross_entropy": F.cross_entropy(model(batch["x"]), batch["x"] % 3)}


def sums_of(
    worker: Worker, num_towers: int, *, overlapped: bool, compression: torch.dtype | None = None
) -> list[PartialSum]:
    """The sums over all towers in three steps."""
    mine = assign_towers(num_towers, worker.num_workers)[worker.rank]
    x = torch.randint(9, (SIZE,), generator=torch.Generator().manual_seed(5))
    size = SIZE // num_towers
    model = Net()
    host = TowerHost(model, dict(model.named_parameters()), ls.Towers(num_towers), worker, "")
    transport = BucketedTransport(worker, "gloo", compression)
    totals = []
    for step in range(3):
        fields = {"x": x.roll(step)[mine.start * size : mine.stop * size]}
        batch = ls.Batch(fields, position=step * SIZE, batch_size=SIZE, towers=mine, seed=1)
        sums = host.run(losses, host.parts(batch), StepInputs(step), transport if overlapped else None)
        total = transport.total(sums)
        totals.append(PartialSum([tensor.clone() for tensor in total.tensors], total.numbers))
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())
    return totals


def same(some: PartialSum, others: PartialSum) -> bool:
    return some.numbers == others.numbers and all(map(torch.equal, some.tensors, others.tensors))


@pytest.mark.parametrize(("num_towers", "num_workers"), [(2, 2), (4, 2), (12, 2), (8, 3), (6, 4)])
def test_gradients_that_are_sent_as_they_come_have_the_bits_of_those_sent_at_the_end(
    num_towers: int, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucketed, "WORTH_FREEING_ELEMENTS", 0)
    runs = {}
    for overlapped in (False, True):
        runs[overlapped], calls = in_threads(
            monkeypatch, num_workers, lambda worker, o=overlapped: sums_of(worker, num_towers, overlapped=o)
        )
        assert (calls.num_early > 0) == overlapped
    for at_the_end, early in zip(runs[False], runs[True], strict=True):
        assert all(map(same, at_the_end, early))


def test_a_gradient_that_was_sent_early_is_a_view_of_its_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucketed, "WORTH_FREEING_ELEMENTS", 65)

    def work(worker: Worker) -> list[tuple[bool, float]]:
        transport = BucketedTransport(worker, "gloo")
        large, small, late = torch.ones(13, 5).t(), torch.ones(64), torch.ones(3)
        for _ in range(2):
            sums = TreeSum(3)
            hooks = transport.start(sums, worker.rank)
            for index in hooks:
                hooks[index]([late, small, large][index])
            sums.put(worker.rank, PartialSum([late, small, large, torch.ones(1)], []))
            total = transport.total(sums).tensors
        assert [tensor.unique().item() for tensor in total] == [2.0] * 4
        of_buckets = {view.data_ptr() for view in transport._views}
        return [(each.data_ptr() in of_buckets, each.sum().item()) for each in (large, small, late)]

    held, calls = in_threads(monkeypatch, 2, work)
    assert calls.num_early > 0
    assert held == [[(True, 130.0), (False, 64.0), (False, 3.0)]] * 2


def test_two_workers_have_the_bits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of two operands has one value in any order."""
    (alone,), _ = in_threads(monkeypatch, 1, lambda worker: sums_of(worker, 8, overlapped=True))
    both, _ = in_threads(monkeypatch, 2, lambda worker: sums_of(worker, 8, overlapped=True))
    num_gradients = len(list(Net().parameters()))
    for mine in both:
        for one, two in zip(alone, mine, strict=True):
            assert one.numbers == two.numbers
            assert all(map(torch.equal, one.tensors[:num_gradients], two.tensors))


@pytest.mark.parametrize("num_towers", [2, 6])
def test_little_is_sent_in_one_call_and_has_the_same_bits(num_towers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of two numbers of float32 is rounded once, whether or not it is rounded to float64 before."""
    many, calls = in_threads(monkeypatch, 2, lambda worker: sums_of(worker, num_towers, overlapped=True))
    assert calls.num_early > 0
    monkeypatch.setattr(bucketed, "SMALL_ELEMENTS", 1000)
    monkeypatch.setattr(bucketed, "FIRST_BUCKET_BYTES", 8 * 1000)
    one, calls = in_threads(monkeypatch, 2, lambda worker: sums_of(worker, num_towers, overlapped=True))
    assert calls.dtypes == {torch.float64, torch.int64}, "int64 counts the batches of batch norm"
    assert calls.num_calls == 2 * 3 * 2
    assert calls.num_early == 0
    for some, others in zip(one, many, strict=True):
        assert all(map(same, some, others))


def test_buckets_go_in_one_order_whatever_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reverse order of the parameters, a small bucket first, and what is known last in the last ones."""
    monkeypatch.setattr(bucketed, "BUCKET_BYTES", 32)

    def work(worker: Worker) -> list[list[int]]:
        transport = BucketedTransport(worker, "gloo")
        values = [torch.full((4,), float(index)) for index in range(5)]
        for step in range(2):
            sums = TreeSum(len(values))
            hooks = transport.start(sums, worker.rank)
            assert list(hooks) == ([4, 3, 2, 1, 0] if step else [])
            for index in sorted(hooks, reverse=worker.rank == 0):
                hooks[index](values[index])
            sums.put(worker.rank, PartialSum([*values, torch.tensor([7.0])], [0.5]))
            total = transport.total(sums)
            assert [each[0].item() for each in total.tensors] == [0.0, 3.0, 6.0, 9.0, 12.0, 21.0]
            assert total.numbers == [1.5]
        return [list(bucket.indices) for bucket in transport._buckets]

    orders, _ = in_threads(monkeypatch, 3, work)
    assert orders == [[[4], [3, 2], [1, 0], [5], [6]]] * 3


def test_a_bucket_with_a_gradient_that_does_not_come_waits_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(worker: Worker) -> int:
        transport = BucketedTransport(worker, "gloo")
        values = [torch.ones(64) for _ in range(4)]
        for missing in (0, 3, 2):
            sums = TreeSum(len(values))
            hooks = transport.start(sums, worker.rank)
            for index in hooks:
                if index != missing or worker.rank:
                    hooks[index](values[index])
            is_begun = transport._num_sent > 0
            assert is_begun == (bool(hooks) and (missing != 3 or worker.rank > 0))
            sums.put(worker.rank, PartialSum(values, []))
            assert [each.sum().item() for each in transport.total(sums).tensors] == [128.0] * 4
        return len(hooks)

    assert in_threads(monkeypatch, 2, work)[0] == [4, 4]


@given(data=st.data(), num_workers=st.integers(1, 4), num_more=st.integers(0, 20))
@settings(max_examples=50)
def test_what_is_before_the_last_tower_completes_its_total(
    data: st.DataObject, num_workers: int, num_more: int
) -> None:
    towers = assign_towers(num_workers + num_more, num_workers)[data.draw(st.integers(0, num_workers - 1))]
    values = {tower: data.draw(st.floats(-1e6, 1e6, width=32)) for tower in towers}
    sums, early = TreeSum(), TreeSum()
    for tower in towers:
        operand = PartialSum([torch.tensor(values[tower])], [values[tower]])
        sums.add(tower, operand)
        if tower != towers[-1]:
            early.add(tower, operand)
    numbers, tensor = values[towers[-1]], torch.tensor(values[towers[-1]])
    for before in early.before(towers[-1]):
        numbers, tensor = numbers + before.numbers[0], tensor + before.tensors[0]
    total = sums.total()
    assert total.numbers == [numbers]
    assert total.tensors == [tensor]


# What cannot go well --------------------------------------------------------------------------------------------------


def alone(monkeypatch: pytest.MonkeyPatch) -> BucketedTransport:
    """A transport of one worker that has made its first step, with three gradients."""
    calls = Calls(1)
    monkeypatch.setattr(bucketed, "collectives", lambda worker, backend: calls.of(0))
    transport = BucketedTransport(thread_workers(1)[0], "gloo")
    sums = TreeSum(3)
    sums.add(0, PartialSum([torch.ones(64) for _ in range(3)], [1.0]))
    transport.total(sums)
    return transport


class Fails(torch.autograd.Function):
    """What a first layer does whose backward pass fails where it is told to."""

    here = False

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        if Fails.here:
            raise ValueError("out of luck")
        return gradients[0]


def fail_half_way(goes_on_with: str) -> str:
    """The backward pass of worker 1 fails once it has sent the gradients of the last layers; its script goes on."""
    bucketed.SMALL_ELEMENTS, bucketed.FIRST_BUCKET_BYTES, bucketed.BUCKET_BYTES = 0, 64, 64
    worker = ls.join("cpu")
    layers = [nn.Linear(4, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))]
    states = {name: ls.TrainState(nn.ModuleList(deepcopy(layers)), ls.optim.SGD(0.1), name=name) for name in "ab"}

    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        first, last = model.children()
        return {"mean": last(Fails.apply(first(batch["x"]))).mean()}  # type: ignore[no-untyped-call]

    loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(8, 4)}), batch_size=4)
    batches = ls.batches(loader, ls.Towers(2))
    batch = next(batches)
    for state in states.values():
        ls.train_step(state, losses, batch, ls.Towers(2), ls.AllReduce("gloo"))
    Fails.here = worker.rank == 1
    batch = next(batches)
    if worker.rank == 1:
        with pytest.raises(ValueError, match="out of luck"):
            ls.train_step(states["a"], losses, batch, ls.Towers(2), ls.AllReduce("gloo"))
        Fails.here = False
    with pytest.raises((WorkerError, PeerLostError)) as caught:
        ls.train_step(
            states[goes_on_with if worker.rank == 1 else "a"], losses, batch, ls.Towers(2), ls.AllReduce("gloo")
        )
    worker.group.leave(caught.value)
    return str(caught.value)


@pytest.mark.process
@pytest.mark.parametrize("goes_on_with", ["a", "b"])
def test_an_error_half_way_ends_the_run_of_all(run_workers: Callable[..., list[Any]], goes_on_with: str) -> None:
    # Both answer: the timeout of the group, which nobody is to wait for, is half an hour.
    _, said = run_workers(fail_half_way, 2, goes_on_with)
    assert "An error has cut the exchange of an earlier step short" in said
    assert "one more step on worker 1, after the error was caught" in said


def test_a_step_after_an_error_before_anything_was_sent_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = alone(monkeypatch)
    transport.start(TreeSum(3), 0)[1](torch.ones(64))
    transport.start(TreeSum(3), 0)[2](torch.ones(64))
    assert transport._num_sent == 1, "the gradient of the step before is forgotten"


def test_a_gradient_that_comes_again_after_it_was_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = alone(monkeypatch).start(TreeSum(3), 0)
    hooks[2](torch.ones(64))
    with pytest.raises(InputError, match="a second time in one backward pass"):
        hooks[2](torch.ones(64))


def test_workers_with_other_compressions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(worker: Worker) -> str:
        transport = BucketedTransport(worker, "gloo", torch.bfloat16 if worker.rank else None)
        sums = TreeSum(1)
        sums.add(worker.rank, PartialSum([torch.zeros(3)], []))
        with pytest.raises(WorkerError, match="do not agree on the tensors to exchange: worker 1 differs") as raised:
            transport.total(sums)
        return str(raised.value.given)

    assert "torch.bfloat16" in in_threads(monkeypatch, 2, work)[0][0]


# Compression ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compression", "tolerance"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
@pytest.mark.parametrize("overlapped", [False, True])
def test_compressed_gradients_are_near_and_all_else_keeps_its_bits(
    compression: torch.dtype, tolerance: float, overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, _ = in_threads(monkeypatch, 2, lambda worker: sums_of(worker, 4, overlapped=True))
    runs, _ = in_threads(
        monkeypatch, 2, lambda worker: sums_of(worker, 4, overlapped=overlapped, compression=compression)
    )
    parameters = dict(Net().named_parameters())
    differing = set()
    for of_worker, expected in zip(runs, exact, strict=True):
        for total, reference in zip(of_worker, expected, strict=True):
            assert total.numbers == reference.numbers
            assert [each.dtype for each in total.tensors] == [each.dtype for each in reference.tensors]
            for index, (found, wanted) in enumerate(zip(total.tensors, reference.tensors, strict=True)):
                torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * 0.1)
                if not torch.equal(found, wanted):
                    differing.add(index)
    compressed = {index for index, p in enumerate(parameters.values()) if p.dtype == torch.float32}
    assert differing, "16 bits are fewer"
    assert differing <= compressed


def test_workers_have_the_same_bits_of_compressed_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, _ = in_threads(monkeypatch, 3, lambda worker: sums_of(worker, 3, overlapped=True, compression=torch.bfloat16))
    assert all(same(runs[0][step], each[step]) for each in runs for step in range(3))


# A device -------------------------------------------------------------------------------------------------------------


class Enqueued:
    """The collective calls of a device, of which some are cut short: the tensors are as they were."""

    are_enqueued = True

    def __init__(self, num_workers: int, is_cut_short: bool) -> None:
        self.factor = 1 if is_cut_short else num_workers

    def all_reduce(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            tensor.mul_(self.factor)


@pytest.mark.parametrize("is_cut_short", [False, True])
def test_the_numbers_of_a_sum_that_was_cut_short_are_nan(is_cut_short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the device makes no update of it, though the host has not seen yet that a worker is lost."""
    monkeypatch.setattr(bucketed, "collectives", lambda *_: Enqueued(3, is_cut_short))
    group: Any = SimpleNamespace(agree=lambda *_: None)
    transport = BucketedTransport(thread_workers(3, group=group)[0], "nccl")
    for _ in range(2):
        sums = TreeSum()
        sums.add(0, PartialSum([torch.ones(2)], [1.0, 2.0]))
        total = transport.total(sums)
        assert total.tensors[0].tolist() == ([1.0, 1.0] if is_cut_short else [3.0, 3.0])
        assert total.numbers == pytest.approx([math.nan] * 2 if is_cut_short else [3.0, 6.0], nan_ok=True)
