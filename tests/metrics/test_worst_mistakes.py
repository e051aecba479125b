from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import InputError
from lockstep.metrics.worst_mistakes import Mistake, WorstMistakes


def shown(worst: WorstMistakes, rows: list[tuple[float, int, int]], first_index: int) -> None:
    losses, predicted, labels = zip(*rows, strict=True)
    indices = torch.arange(first_index, first_index + len(rows))
    worst.update(torch.tensor(losses), torch.tensor(predicted), torch.tensor(labels), indices)


# Few values, so that ties are common.
ROW = st.tuples(st.sampled_from([0.5, 1.0, 2.0, math.inf]), st.integers(0, 1), st.integers(0, 1))


@given(rows=st.lists(ROW, min_size=1, max_size=12), size=st.integers(1, 12), count=st.integers(1, 4))
@settings(max_examples=50)
def test_the_highest_losses_of_wrong_predictions_stay(
    rows: list[tuple[float, int, int]], size: int, count: int
) -> None:
    worst = WorstMistakes(count)
    for start in range(0, len(rows), size):
        shown(worst, rows[start : start + size], start)
    wrong = [Mistake(at, *row) for at, row in enumerate(rows) if row[1] != row[2]]
    assert worst.compute() == sorted(wrong, key=lambda mistake: (-mistake.loss, mistake.example_index))[:count]
    worst.reset()
    assert worst.compute() == []


def test_of_equal_losses_the_lower_index_stays_in_whatever_order_they_come() -> None:
    worst = WorstMistakes(2)
    for index in (7, 3, 5):
        shown(worst, [(1.0, 0, 1)], index)
    assert [mistake.example_index for mistake in worst.compute()] == [3, 5]


def test_a_loss_that_is_not_a_number_is_the_worst() -> None:
    worst = WorstMistakes(2)
    shown(worst, [(3.0, 1, 0), (math.inf, 1, 0), (math.nan, 2, 1), (math.nan, 1, 1)], 10)
    first, second = worst.compute()
    assert math.isnan(first.loss)
    assert (first.example_index, first.predicted, first.label) == (12, 2, 1)
    assert second == Mistake(11, math.inf, 1, 0)


def test_no_number_loses_digits() -> None:
    worst = WorstMistakes()
    index, loss = 2**40 + 1, torch.tensor([0.1])
    worst.update(loss, torch.tensor([1]), torch.tensor([0]), torch.tensor([index]))
    assert worst.compute() == [Mistake(index, float(loss), 1, 0)]


def test_losses_that_are_a_mean_already_are_refused() -> None:
    batch = torch.tensor([0, 1])
    with pytest.raises(InputError, match=r"one number of each kind an example\.\n.*\(\), \(2,\), \(2,\), \(2,\)") as it:
        WorstMistakes().update(torch.tensor(0.5), batch, batch, batch)
    it.match(r'expected: .*each of shape \(batch,\)\n  hint: .*reduction="none"')


def test_keeping_no_mistake_is_refused() -> None:
    with pytest.raises(InputError, match=r"count is out of range\.\n.*count=0\n.*1 or more"):
        WorstMistakes(0)
