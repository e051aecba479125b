"""The indices of scored examples: those of the reader, whatever could not be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.evaluation.evaluate import example_indices
from lockstep.evaluation.precise_statistics import PreciseStatistics

SIZE = 23


class Torn(ls.data.Arrays):
    """Some of the examples cannot be read."""

    cost = "decode"

    def __init__(self, bad: set[int]) -> None:
        super().__init__({"x": torch.arange(SIZE, dtype=torch.float32)[:, None]})
        self.bad = bad

    def read_batch(self, indices: Any) -> dict[str, Any]:
        if found := self.bad.intersection(indices.tolist()):
            raise ls.errors.DataError(f"Row {min(found)} is torn.", given="half", expected="a whole", hint="none")
        return super().read_batch(indices)


class Pairs:
    """What stood in each row that counts, and the index of it."""

    def reset(self) -> None:
        self.pairs: list[list[float]] = []

    def update(self, x: torch.Tensor, indices: torch.Tensor) -> None:
        assert indices.dtype == torch.int64
        self.pairs += torch.stack([x.double(), indices.double()], dim=1).tolist()

    def compute(self) -> list[list[float]]:
        return self.pairs


def score(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
    return {"pairs": (batch["x"][:, 0], example_indices(batch))}


def pairs(bad: set[int]) -> Any:
    state = ls.TrainState(nn.Sequential(nn.BatchNorm1d(1)), ls.optim.SGD(0.1))
    loader = ls.data.Loader(Torn(bad), batch_size=5, bad_examples="skip", num_threads=1)
    return ls.evaluate(state, score, loader, metrics={"pairs": Pairs()}).computed["pairs"]


@pytest.mark.parametrize("bad", [set(), {0}, {4, 7}, {5, 6, 7, 8, 9}, {20, 21, 22}, {22}], ids=str)
def test_bad_examples_shift_no_index(bad: set[int]) -> None:
    assert pairs(bad) == [[index, index] for index in range(SIZE) if index not in bad]


@pytest.mark.process
def test_with_several_workers(run_workers: Callable[..., list[Any]]) -> None:
    bad = {1, 7, 8, 22}
    assert run_workers(pairs, 2, bad) == [[[index, index] for index in range(SIZE) if index not in bad]] * 2


def test_the_batches_of_fresh_statistics_have_rows_too() -> None:
    def score(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
        return {"pairs": (model(batch["x"])[:, 0], example_indices(batch))}

    state = ls.TrainState(nn.BatchNorm1d(1), ls.optim.SGD(0.1))
    loader = ls.data.Loader(Torn(set()), batch_size=5, num_threads=1)
    statistics = PreciseStatistics(loader, num_batches=2)
    result = ls.evaluate(state, score, loader, metrics={"pairs": Pairs()}, statistics=statistics)
    assert [index for _, index in result.computed["pairs"]] == [*range(SIZE)]
