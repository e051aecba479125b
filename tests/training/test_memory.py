"""A batch that is computed and forgotten before step 1: what it leaves as it was, and what is said without memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_detector import TinyDetector, make_loader, make_task
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import InputError
from lockstep.training.memory import describe_batch

TASK = make_task()


def make_state() -> ls.TrainState:
    return ls.TrainState(
        TinyDetector(coupled=True), ls.optim.SGD(0.1, momentum=0.9), average=ls.optim.MovingAverage(0.9)
    )


def contents(state: ls.TrainState) -> list[Any]:
    numbers = {f"{s}/{n}": t.tolist() for s, members in state.sections().items() for n, t in members.items()}
    return [numbers, state.values()]


def batch_of(num_towers: int = 2) -> ls.Batch:
    return next(iter(ls.batches(make_loader(TASK), ls.Towers(num_towers))))


def probe(state: ls.TrainState, losses: Any = TASK.losses, num_towers: int = 2) -> int:
    return ls.probe_memory(
        state, losses, batch_of(num_towers), ls.Towers(num_towers), counts=TASK.counts(state.model), hint="mend it"
    )


def test_nothing_changes() -> None:
    state, loader = make_state(), make_loader(TASK)
    before = contents(state)
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert probe(state) > 10_000_000, "the process has more than 10 MB"
    assert contents(state) == before
    assert loader.position == 0
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == streams[1:]  # type: ignore[index]


def trained(*, probed: bool) -> list[Any]:
    state, loader = make_state(), make_loader(TASK)
    if probed:
        probe(state)
    counts = TASK.counts(state.model)
    reports = ls.train_steps(state, TASK.losses, loader, ls.Towers(2), counts=counts, until=ls.Steps(4))
    return [*[each.total for each in reports], *contents(state)]


def test_the_steps_after_it_have_the_bits_of_those_without_it() -> None:
    assert trained(probed=True) == trained(probed=False)


@pytest.mark.process
def test_two_workers_probe_together(run_workers: Callable[..., list[Any]]) -> None:
    alone = trained(probed=False)
    assert run_workers(probed_losses, 2) == [alone[:4]] * 2


def probed_losses() -> list[float]:
    state = make_state()
    counts, exchange = TASK.counts(state.model), ls.AllReduce(exact=True)
    ls.probe_memory(state, TASK.losses, batch_of(), ls.Towers(2), exchange, counts=counts)
    loader = make_loader(TASK)
    steps = ls.train_steps(state, TASK.losses, loader, ls.Towers(2), exchange, counts=counts, until=ls.Steps(4))
    return [each.total for each in steps]


def needs_too_much(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"loss": model.head.weight.new_empty(2**50).sum()}  # type: ignore[union-attr, operator]


def raises_on_accelerator(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")


@pytest.mark.parametrize(
    ("losses", "reason"),
    [(needs_too_much, "can't allocate memory"), (raises_on_accelerator, "Tried to allocate 9 GiB.)")],
)
def test_a_lack_of_memory_is_told_with_what_needs_it(losses: Any, reason: str) -> None:
    state = make_state()
    before = contents(state)
    with pytest.raises(InputError) as caught:
        probe(state, losses)
    error = caught.value
    assert error.what == "The memory is not enough for the largest batch of this run."
    assert str(error.given).startswith("8 examples over 2 towers, image 3 x 24 x 24, up to 2 boxes each (")
    assert reason in str(error.given)
    assert error.hint == "mend it"
    assert contents(state) == before


def test_other_errors_are_not_taken_for_it() -> None:
    def fails(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        probe(make_state(), fails)


def test_images_of_several_sizes_count_by_their_largest_sides() -> None:
    images = [torch.zeros(3, 8, 20), torch.zeros(3, 16, 10)]
    batch = ls.Batch({"image": images, "name": ["a", "b"]}, position=0, batch_size=2, towers=range(1))
    assert describe_batch(batch, ls.Towers(1)) == "2 examples over 1 tower, image 3 x 16 x 20"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_step_without_memory_says_for_which_tower_and_what_needs_less(error: Exception) -> None:
    calls = 0

    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise error
        return {"square": model(batch["image"]).square().mean()}

    state = ls.TrainState(nn.Linear(3, 1), ls.optim.SGD(0.1))
    loader = ls.data.Loader(ls.data.Arrays({"image": torch.randn(8, 5, 3)}), batch_size=8)
    with pytest.raises(type(error)) as caught:
        ls.train(state, losses, loader, ls.Towers(4))
    (note,) = caught.value.__notes__
    assert note.startswith(
        "Lockstep: tower 1 of 4 had no memory for its part of 8 examples over 4 towers, image 5 x 3;"
    )
    assert "batch_size, more towers, towers.activation_checkpointing" in note
    assert state.step == 1


def test_another_error_has_no_note() -> None:
    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        raise RuntimeError("shapes cannot be multiplied")

    state = ls.TrainState(nn.Linear(3, 1), ls.optim.SGD(0.1))
    loader = ls.data.Loader(ls.data.Arrays({"image": torch.randn(8, 5, 3)}), batch_size=8)
    with pytest.raises(RuntimeError) as caught:
        ls.train(state, losses, loader)
    assert not hasattr(caught.value, "__notes__")
