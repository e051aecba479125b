"""Copies of a state that no longer have the same bits are noticed, and the worker and the tensor are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lockstep as ls
from lockstep import tensors
from lockstep.data.loader import Loader
from lockstep.errors import WorkerError
from lockstep.readers.reader import Arrays
from lockstep.training.replicas import Replicas, checksum_of
from tests.thread_workers import run_threads
from tests.worker_processes import run_workers

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_changes_with_each_element_and_with_the_step(dtype: torch.dtype) -> None:
    tensors = [torch.zeros(2, 3, 4, dtype=dtype), torch.zeros((), dtype=dtype), torch.zeros(0, dtype=dtype)]
    sums = {int(checksum_of(tensors, 0)), int(checksum_of(tensors, 1))}
    tensors[0][1, 2, 3] = 1
    sums.add(int(checksum_of(tensors, 0)))
    tensors[1].fill_(1)
    sums.add(int(checksum_of(tensors, 0)))
    assert len(sums) == 4
    assert all(0 <= each < 2**20 for each in sums)


def test_a_checksum_is_of_the_elements_and_not_of_their_layout() -> None:
    images = torch.randn(2, 3, 4, 5)
    assert checksum_of([images.to(memory_format=torch.channels_last)], 7) == checksum_of([images], 7)


def make_state() -> ls.TrainState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return ls.TrainState(model, ls.optim.SGD(0.1, momentum=0.9), average=ls.optim.MovingAverage(0.9))


@given(st.lists(st.integers(0, 2**20 - 1), min_size=2, max_size=2**9))
@settings(max_examples=50, deadline=None)
def test_sums_of_checksums_and_of_their_squares_show_whether_all_are_equal(sums: list[int]) -> None:
    here = ls.join()
    replicas = Replicas(make_state(), type(here)(0, len(sums), 0, 1, here.device, here.group, here.pulse))
    total, squares = sum(map(float, sums)), sum(float(each) ** 2 for each in sums)
    if len({*sums}) == 1:
        replicas.check(total, squares)
    else:
        with pytest.raises(WorkerError):
            replicas.check(total, squares)


@pytest.mark.parametrize(
    ("section", "name", "words"),
    [
        ("parameters", "2.weight", "parameter '2.weight'"),
        ("buffers", "1.running_mean", "buffer '1.running_mean'"),
        ("slots", "momentum_buffer/0.bias", "slot 'momentum_buffer/0.bias'"),
        ("average", "0.weight", "average '0.weight'"),
    ],
)
def test_the_worker_that_differs_is_named_with_the_first_tensor(section: str, name: str, words: str) -> None:
    states = [make_state() for _ in range(3)]

    def compare(worker: Any) -> tuple[int, Any]:
        state = states[worker.rank]
        replicas = Replicas(state, worker)
        if worker.rank == 1:
            with torch.no_grad():
                state.sections()[section][name].view(-1)[0] += 1e-3
        own = int(replicas.checksum(100))
        sums = worker.group.gather(own)
        with pytest.raises(WorkerError) as caught:
            replicas.check(float(sum(sums)), float(sum(each**2 for each in sums)))
        return own, caught.value

    (first, error), (second, other), (third, _) = run_threads(compare, 3)
    assert first == third != second
    assert error.what == other.what == "The workers no longer have the same model: worker 1 differs."
    assert error.given == other.given == f"at step 0, worker 1: {words}"
    assert error.expected == "the bits of worker 0 on every worker, after each update"


def train_apart(changed_rank: int, in_step: int, compare_steps: int, transport: Any) -> tuple[int, str]:
    """Train, and change one element on one worker after a step; returns where it ends, and what is said."""
    state = make_state()
    state.compare_steps = compare_steps
    loader = Loader(Arrays({"x": torch.arange(48.0).view(16, 3) / 24 - 1}), batch_size=4)

    def squares(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"square": model(batch["x"]).square().mean()}

    try:
        for report in ls.train_steps(state, squares, loader, exchange=ls.AllReduce(transport), until=ls.Steps(12)):
            if report.step == in_step and ls.join().rank == changed_rank:
                state.model[2].weight.data[0, 1] += 2**-20  # through .data: nobody sees the change
    except WorkerError as error:
        return state.step, str(error)
    return state.step, ""


@pytest.mark.process
@pytest.mark.parametrize(("transport", "waits"), [("shared_memory", False), ("gloo", False), ("gloo", True)])
def test_a_run_whose_workers_drift_apart_ends_on_all_of_them(
    monkeypatch: pytest.MonkeyPatch, transport: str, waits: bool
) -> None:
    monkeypatch.setattr(tensors, "READ_AT_ONCE", frozenset(() if waits else {"cpu"}))
    one, other = run_workers(train_apart, 2, 1, 5, 4, transport)
    assert one == other
    step, said = one
    assert step == 8
    assert "The workers no longer have the same model: worker 1 differs." in said
    assert "at step 8, worker 1: parameter '2.weight', and 1 more" in said


@pytest.mark.process
@pytest.mark.parametrize("waits", [pytest.param(False, marks=pytest.mark.slow), True])
def test_copies_are_compared_at_the_end_too(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    monkeypatch.setattr(tensors, "READ_AT_ONCE", frozenset(() if waits else {"cpu"}))
    for in_step in (11, 12):
        one, other = run_workers(train_apart, 2, 1, in_step, 100, "gloo")
        assert one == other
        assert "at step 12, worker 1: parameter '2.weight'" in one[1]


@pytest.mark.process
def test_a_run_whose_workers_stay_together_is_left_alone_and_so_is_one_that_compares_nothing() -> None:
    assert run_workers(train_apart, 2, 7, 5, 2, None) == [(12, "")] * 2
    assert run_workers(train_apart, 2, 1, 5, 0, None) == [(12, "")] * 2


class _Words(nn.Module):
    """Batch norm, dropout, and an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 4, sparse=True)
        self.net = nn.Sequential(nn.Linear(7, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))

    def forward(self, batch: ls.Batch) -> Tensor:
        return self.net(torch.cat([batch["x"], self.words(batch["word"])], dim=1))


def train_with(towers: ls.Towers, exchange: ls.AllReduce, **more: Any) -> int:
    torch.manual_seed(0)
    state = ls.TrainState(_Words(), {r"^words": ls.optim.SGD(0.1), r"^net": ls.optim.AdamW(0.01)}, **more)
    state.compare_steps = 1
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
    loader = Loader(Arrays({"x": x, "word": torch.arange(24) % 16}), batch_size=12)
    for _ in ls.train_steps(
        state, lambda m, b: {"square": m(b).square().mean()}, loader, towers, exchange, until=ls.Steps(4)
    ):
        pass
    return state.step


def train_in_many_ways() -> list[int]:
    clip, average = [ls.optim.ClipGlobalNorm(0.1)], ls.optim.MovingAverage(0.9)
    return [
        train_with(ls.Towers(3, batch_norm="mean"), ls.AllReduce("gloo"), gradient_transforms=clip),
        train_with(ls.Towers(6, batch_norm="sync"), ls.AllReduce("gloo"), average=average),
        train_with(ls.Towers(3, batch_norm="sync"), ls.AllReduce()),
        train_with(ls.Towers(6, batch_norm="last", precision="bf16"), ls.AllReduce(exact=True), average=average),
        train_with(ls.Towers(3, batch_norm="none", precision="fp16"), ls.AllReduce("gloo", compression="bf16")),
    ]


@pytest.mark.process
def test_whatever_is_trained_with_the_copies_stay_the_same() -> None:
    assert run_workers(train_in_many_ways, 3) == [[4] * 5] * 3
