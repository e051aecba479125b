"""Items draw the numbers of their position, whatever the items before them have drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.data.batch_reader import read_examples
from lockstep.data.rows import Rows
from lockstep.data.seeding import restore_global_generators, seed_global_generators, seeded_items
from lockstep.errors import DataError
from lockstep.readers.reader import Int64s, TorchDataset

POSITIONS, INDICES = np.arange(100, 112), np.array([5, 0, 7, 3, 1, 2, 4, 6, 8, 9, 11, 10])
ROWS = Rows(POSITIONS, INDICES)

DRAWS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: 0,
    "torch": lambda: torch.rand(()).item(),
    "python": random.random,
    "normal of python": lambda: random.gauss(0, 1),
    "numpy": np.random.random,
    "normal of numpy": np.random.standard_normal,
    "a whole state of python": lambda: [random.getrandbits(32) for _ in range(624)],
    "all": lambda: (random.random(), np.random.random(), torch.rand(()).item()),
}


class Drawing(torch.utils.data.Dataset[Any]):
    """Items whose index is a multiple of `every` draw."""

    def __init__(self, draw: Callable[[], Any], every: int) -> None:
        self.draw, self.every = draw, every

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return index, self.draw() if index % self.every == 0 else None


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("every", [1, 3, 11])
def test_an_item_draws_as_if_all_generators_were_seeded_for_it(draw: Callable[[], Any], every: int) -> None:
    dataset = Drawing(draw, every)
    expected = []
    with restore_global_generators():
        for position, index in zip(POSITIONS.tolist(), INDICES.tolist(), strict=True):
            seed_global_generators(3, position)
            expected.append(dataset[index])
    reader = TorchDataset(dataset)
    random.gauss(0, 1)  # leaves a second number behind
    for _ in range(2):
        assert seeded_items(reader, ROWS, 3) == expected


def test_only_what_draws_beyond_torch_is_read_again() -> None:
    calls: list[int] = []

    def counted(draw: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: calls.append(0) or draw()

    for draw, expected in ((DRAWS["torch"], 12), (DRAWS["numpy"], 24), (DRAWS["python"], 24), (DRAWS["all"], 24)):
        reader = TorchDataset(Drawing(counted(draw), 1))
        for number_of_reads in (expected, 12):
            calls.clear()
            seeded_items(reader, ROWS, 3)
            assert len(calls) == number_of_reads, "what a reader draws from is known after the first rows"


@pytest.mark.parametrize("draw", [random.random, np.random.random])
def test_what_an_item_draws_once_and_keeps_does_not_depend_on_numbers_drawn_before(draw: Callable[[], Any]) -> None:
    runs = []
    for run in range(2):
        draw()
        with restore_global_generators():
            seed_global_generators(run, 0)
        kept: list[Any] = []
        dataset = Drawing(lambda kept=kept: kept or kept.append(draw()) or kept, 7)  # type: ignore[func-returns-value,misc]
        runs.append(seeded_items(TorchDataset(dataset), ROWS, 3))
    assert runs[0] == runs[1]


def test_an_item_that_fails_by_what_it_has_drawn_fails_as_if_seeded() -> None:
    seen = []

    def fail() -> None:
        seen.append(random.random())
        raise ValueError("drawn")

    with pytest.raises(DataError, match="Item 5 of Drawing cannot be used"):
        seeded_items(TorchDataset(Drawing(fail, 1)), ROWS, 3)
    with restore_global_generators():
        seed_global_generators(3, 100)
        assert seen[-1] == random.random()


def test_the_generators_are_put_back_also_when_one_use_is_within_another() -> None:
    def next_numbers() -> tuple[object, ...]:
        state = random.getstate(), np.random.get_state(), torch.get_rng_state()
        numbers = random.random(), np.random.random(), torch.rand(()).item()
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])
        return numbers

    before = next_numbers()
    with restore_global_generators():
        seed_global_generators(1, 2)
        inner = next_numbers()
        with restore_global_generators():
            seed_global_generators(3, 4)
            assert next_numbers() != inner
        assert next_numbers() == inner
        assert inner != before
    assert next_numbers() == before


def test_a_reader_that_makes_its_batches_itself_does_so() -> None:
    class Own(TorchDataset):
        def read_batch(self, indices: Int64s) -> dict[str, Any]:
            return {"own": torch.from_numpy(indices)}

    assert read_examples(Own(Drawing(random.random, 1)), ROWS, 3)["own"].tolist() == INDICES.tolist()
