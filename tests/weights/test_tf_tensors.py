from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.weights.tf_tensors import NotWholeError, join_slices, slice_key, slice_ranges

INT64S = st.integers(-(2**63), 2**63 - 1)


def test_the_key_of_a_slice_is_that_of_tensorflow() -> None:
    # Taken from the index of a checkpoint by TensorFlow 2.21.
    assert slice_key("embedding", ((0, 4), (3, 3))) == b"\0embedding\0\1\1\2\x80\x84\x83\x83"


@given(st.lists(st.tuples(st.text(max_size=4), INT64S, INT64S), min_size=2, max_size=2, unique=True))
@settings(max_examples=50)
def test_keys_are_in_the_order_of_what_they_stand_for(two: list[tuple[str, int, int]]) -> None:
    first, second = ((name.encode(), start, size) for name, start, size in two)
    keys = [slice_key(name, ((start, size),)) for name, start, size in two]
    assert (keys[0] < keys[1]) == (first < second)


@given(st.data())
@settings(max_examples=30)
def test_a_grid_of_slices_in_any_order_makes_the_whole(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=0, max_size=3))
    shape = tuple(map(sum, sizes))
    slices: list[tuple[tuple[int, int], ...]] = [()]
    for parts in sizes:
        extents = [(sum(parts[:number]), size) for number, size in enumerate(parts)]
        slices = [(*before, extent) for before in slices for extent in extents]
    slices = data.draw(st.permutations(slices))
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    places = slice_ranges(slices, shape)
    pieces = [whole[place].reshape(-1) for place in places]
    assert torch.equal(join_slices(shape, torch.int64, places, pieces), whole)


@pytest.mark.parametrize(
    ("slices", "shape", "what"),
    [
        ([((0, 2),)], (3,), "slices with 2 values together, where it has 3"),
        ([], (), "slices with 0 values together, where it has 1"),
        ([((0, 2),), ((1, 1),)], (3,), "slice 2 of 2 overlaps with another"),
        ([((0, 2), (0, -1)), ((1, 1), (0, 1)), ((2, 1), (0, 1))], (3, 2), "slice 2 of 3 overlaps with another"),
        ([((0, -1),)], (3, 1), "a slice of 1 dimensions, where it has 2"),
        ([((1, 3),)], (3,), "a slice with starts and lengths ((1, 3),), where it has the shape (3,)"),
        ([((-1, 3),)], (3,), "a slice with starts and lengths ((-1, 3),), where it has the shape (3,)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_slices_that_do_not_make_a_whole_are_refused(
    slices: list[tuple[tuple[int, int], ...]], shape: tuple[int, ...], what: str
) -> None:
    with pytest.raises(NotWholeError) as caught:
        slice_ranges(slices, shape)
    assert str(caught.value) == what


def test_any_number_of_empty_slices_overlaps_with_nothing() -> None:
    empty = [((number % 3, 0), (0, -1)) for number in range(30_000)]
    assert len(slice_ranges([*empty, ((0, -1), (0, -1))], (3, 2))) == 30_001


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=4, max_size=4))
@settings(max_examples=50)
def test_slices_are_refused_where_a_value_is_in_two(corners: list[tuple[int, int]]) -> None:
    # As many values as the whole has, in four squares.
    slices = [((row, 2), (column, 2)) for row, column in corners if max(row, column) < 3]
    held = torch.zeros(4, 4)
    for (row, _), (column, _) in slices:
        held[row : row + 2, column : column + 2] += 1
    if bool((held == 1).all()):
        assert len(slice_ranges(slices, (4, 4))) == 4
    else:
        with pytest.raises(NotWholeError):
            slice_ranges(slices, (4, 4))
