"""The rows of a batch, by arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.data.order import Shuffled
from lockstep.data.rows import BatchRequest, EvaluationRows, TrainingRows, offsets_of
from lockstep.errors import InputError


def test_offsets_are_those_of_a_workers_towers() -> None:
    assert offsets_of(12, range(2), 4).tolist() == [0, 1, 2, 3, 4, 5]
    assert offsets_of(12, range(3, 4), 4).tolist() == [9, 10, 11]
    with pytest.raises(InputError):
        offsets_of(10, range(1), 4)


def test_rows_of_a_training_batch_are_those_of_the_order_whatever_was_asked_before() -> None:
    order, offsets = Shuffled(), offsets_of(8, range(1, 2), 2)
    rows_of = TrainingRows(order, 10, 3, 8, offsets)
    for start in (0, 8, 160_000, 4, 8):
        rows = rows_of(BatchRequest(start))
        assert rows.positions.tolist() == list(range(start + 4, start + 8))
        assert rows.indices.tolist() == order.indices(np.arange(start + 4, start + 8), 10, 3).tolist()


def test_the_last_micro_batch_repeats_the_last_example() -> None:
    rows_of = EvaluationRows(4, 6)
    assert rows_of(BatchRequest(0)).indices.tolist() == [0, 1, 2, 3]
    assert rows_of(BatchRequest(4)).indices.tolist() == rows_of(BatchRequest(4)).positions.tolist() == [4, 5, 5, 5]


def test_one_row_alone_keeps_its_position() -> None:
    alone = TrainingRows(Shuffled(), 10, 0, 4, np.arange(4))(BatchRequest(8)).alone(2)
    assert (len(alone), alone.positions.tolist()) == (1, [10])
