"""One batch, read and augmented; other examples in the place of bad ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lockstep.data.bad_examples import ReplaceBad
from lockstep.data.batch_reader import BadRow, BatchReader, SkipBad
from lockstep.data.order import Sequential
from lockstep.data.rows import BatchRequest, TrainingRows
from lockstep.errors import DataError
from lockstep.ragged import Ragged
from lockstep.randomness import Draws
from lockstep.readers.reader import Cost

SIZE = 10


class Torn:
    """A reader of its own indices, one of which cannot be read."""

    cost: Cost = "decode"

    def __init__(self, *bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return SIZE

    def read_batch(self, indices: np.ndarray) -> dict[str, Any]:
        for index in indices.tolist():
            if index in self.bad:
                raise DataError(f"{index} is torn.", given="half a file", expected="a file", hint="mend it")
        return {"number": torch.from_numpy(indices)}

    def example_id(self, index: int) -> str:
        return f"row-{index}"


def reader_of(*bad: int, augment: Any = (), skip: bool = True) -> BatchReader:
    rows_of = TrainingRows(Sequential(), SIZE, 0, 4, np.arange(4))
    skip_bad = SkipBad(ReplaceBad(Sequential(), SIZE, 0), budget=2) if skip else None
    return BatchReader(Torn(*bad), augment, 0, rows_of, skip_bad)


def test_augmentations_follow_one_another_and_equal_ones_draw_other_numbers() -> None:
    def add(batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        return {**batch, f"drawn-{len(batch)}": torch.from_numpy(draws.uniform("x"))}

    fields, bad = reader_of(augment=[add, add])(BatchRequest(4))
    assert fields["number"].tolist() == [4, 5, 6, 7]
    assert list(fields) == ["number", "drawn-1", "drawn-2"]
    assert not torch.equal(fields["drawn-1"], fields["drawn-2"])
    assert bad == []


def test_the_next_good_example_is_read_for_a_bad_one() -> None:
    fields, bad = reader_of(5, 6)(BatchRequest(4))
    assert fields["number"].tolist() == [4, 7, 7, 7]
    assert bad == [BadRow(5, 5, 7, "5 is torn. half a file"), BadRow(6, 6, 7, "6 is torn. half a file")]


def test_without_a_policy_the_error_of_the_reader_is_raised() -> None:
    with pytest.raises(DataError, match="5 is torn"):
        reader_of(5, skip=False)(BatchRequest(4))


def test_what_has_no_entry_for_each_row_is_refused() -> None:
    def lose(batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        return {"number": batch["number"][:3]}

    with pytest.raises(DataError, match="lose did not give an entry of each field for each example"):
        reader_of(augment=[lose])(BatchRequest(0))


class Counted(Torn):
    """A reader of i values for the example i, drawn one example at a time."""

    draws_globally = True

    def read_batch(self, indices: np.ndarray) -> dict[str, Any]:
        super().read_batch(indices)
        return {"value": Ragged.of([torch.full((index,), index) for index in indices.tolist()])}


def test_ragged_values_of_single_examples_are_joined() -> None:
    rows_of = TrainingRows(Sequential(), SIZE, 0, 4, np.arange(4))
    skip_bad = SkipBad(ReplaceBad(Sequential(), SIZE, 0), budget=2)
    fields, bad = BatchReader(Counted(2), [], 0, rows_of, skip_bad)(BatchRequest(0))
    assert [row.tolist() for row in fields["value"]] == [[], [1], [3, 3, 3], [3, 3, 3]]
    assert [row.index for row in bad] == [2]


def test_a_batch_is_named_without_being_read() -> None:
    assert reader_of(0)(BatchRequest(0)).fields["number"].tolist() == [1, 1, 2, 3]
    assert reader_of(0).names(BatchRequest(0)) == ["row-0", "row-1", "row-2", "row-3"]
