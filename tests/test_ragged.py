"""Ragged against the plain way: a list with a tensor for each example."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import lockstep as ls
from lockstep.ragged import Ragged, tensors_of

LENGTHS = st.lists(st.integers(0, 4), min_size=1, max_size=6)


def rows_of(lengths: Sequence[int]) -> list[Tensor]:
    """For each example its values, of shape (n, 2): all of them different."""
    return list(torch.split(torch.arange(2.0 * sum(lengths)).view(-1, 2), list(lengths)))


def assert_same(ragged: Ragged, rows: Sequence[Tensor]) -> None:
    assert len(ragged) == len(rows)
    assert [each.tolist() for each in ragged] == [each.tolist() for each in rows]
    assert ragged.values.shape == (sum(map(len, rows)), 2)


@given(LENGTHS, st.data())
def test_ragged_is_indexed_as_a_list_of_tensors(lengths: list[int], data: st.DataObject) -> None:
    rows, batch = rows_of(lengths), len(lengths)
    ragged = Ragged.of(rows)
    assert_same(ragged, rows)
    assert ragged.lengths.tolist() == lengths
    for row in range(-batch, batch):
        assert torch.equal(ragged[row], rows[row])
    part = data.draw(st.slices(batch))
    assert_same(ragged[part], rows[part])
    some = data.draw(st.lists(st.integers(-batch, batch - 1)))
    assert_same(ragged[torch.tensor(some, dtype=torch.int64)], [rows[row] for row in some])


@given(LENGTHS)
def test_kept_values_stay_with_their_example(lengths: list[int]) -> None:
    rows = rows_of(lengths)
    masks = [torch.rand(length) < 0.5 for length in lengths]
    kept = Ragged.of(rows).kept(torch.cat(masks))
    assert_same(kept, [row[mask] for row, mask in zip(rows, masks, strict=True)])


@given(LENGTHS)
def test_each_value_has_its_row_as_owner(lengths: list[int]) -> None:
    assert Ragged.of(rows_of(lengths)).owner.tolist() == [row for row, n in enumerate(lengths) for _ in range(n)]


@given(LENGTHS, LENGTHS)
def test_batches_are_joined_one_after_another(first: list[int], second: list[int]) -> None:
    rows = rows_of([*first, *second])
    parts = [Ragged.of(rows[: len(first)]), Ragged.of(rows[len(first) :])]
    assert_same(Ragged.cat(parts), rows)


def test_rows_and_slices_are_views() -> None:
    ragged = Ragged.of(rows_of([2, 0, 3]))
    ragged[2][0] = 7.0
    ragged[:1].values[1] = 8.0
    assert ragged.values[:, 0].tolist() == [0.0, 8.0, 7.0, 6.0, 8.0]


def test_values_are_replaced_by_others_of_any_shape() -> None:
    areas = Ragged.of(rows_of([2, 0, 1])).replaced(torch.tensor([1, 2, 3]))
    assert [row.tolist() for row in areas] == [[1, 2], [], [3]]


def test_a_ragged_field_is_two_tensors_by_name() -> None:
    boxes, labels = Ragged.of(rows_of([1, 2])), torch.arange(2)
    assert tensors_of({"boxes": boxes, "name": ["a", "b"], "label": labels}) == {
        "boxes.values": boxes.values,
        "boxes.lengths": boxes.lengths,
        "label": labels,
    }


def test_the_lengths_stay_on_the_cpu() -> None:
    moved = Ragged.of(rows_of([2, 0, 1])).to("meta", non_blocking=True)
    assert moved.values.device.type == moved.owner.device.type == "meta"
    assert moved[0].shape == (2, 2)
    assert moved.lengths.tolist() == [2, 0, 1]


@pytest.mark.parametrize("row", [3, -4])
def test_a_row_that_is_not_there(row: int) -> None:
    with pytest.raises(IndexError):
        Ragged.of(rows_of([1, 0, 2]))[row]


@pytest.mark.parametrize(
    "lengths",
    [
        torch.tensor([2, 2]),
        torch.tensor([4, -1]),
        torch.tensor([4, -1, 0]),
        torch.tensor([1.0, 2.0]),
        torch.tensor([[1, 2]]),
        torch.tensor([], dtype=torch.int64),
    ],
)
def test_lengths_that_do_not_fit_the_values_are_refused(lengths: Tensor) -> None:
    with pytest.raises(ls.InputError, match=r"do not say whose.*\n.*values of shape \(3, 2\)"):
        Ragged(torch.zeros(3, 2), lengths)


@pytest.mark.parametrize(
    ("rows", "given"),
    [
        ([], "no examples"),
        ([torch.zeros(2, 4), torch.zeros(0)], r"shape \(2, 4\) on cpu and torch.float32 of shape \(0,\)"),
        ([torch.zeros(1), torch.zeros(1).long()], "torch.float32 .* and torch.int64"),
        ([torch.zeros(1), torch.tensor(1.0)], r"and torch.float32 of shape \(\)"),
        ([torch.zeros(1), [1.0]], "and a list"),
    ],
)
def test_examples_of_different_kinds_are_refused(rows: list[Tensor], given: str) -> None:
    with pytest.raises(ls.InputError, match=f"cannot be joined.*\n.*{given}"):
        Ragged.of(rows)
