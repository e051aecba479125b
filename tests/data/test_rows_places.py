from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.rows import Places, read_ranges, saved_ranges, without_first
from lockstep.errors import InputError


@st.composite
def returned_ranges(draw: st.DrawFn) -> list[range]:
    marks = sorted(draw(st.sets(st.integers(0, 60), max_size=8)))
    return [range(*pair) for pair in zip(marks[::2], marks[1::2], strict=False)]


@given(returned_ranges(), st.integers(0, 20))
def test_the_returned_come_first_and_then_each_position_is_its_place(returned: list[range], more: int) -> None:
    end = (returned[-1].stop if returned else 0) + more
    position = end - sum(map(len, returned))
    places = Places(position, tuple(returned))
    assert places.end == end
    first = [place for each in returned for place in each]
    assert places.of(np.arange(position, end + 9)).tolist() == [*first, *range(end, end + 9)]
    assert places.of(np.arange(position)).tolist() == list(range(position))


@given(returned_ranges(), st.integers(0, 70))
def test_the_first_of_the_returned_are_left_out(returned: list[range], count: int) -> None:
    left = without_first(returned, count)
    assert [place for each in left for place in each] == [place for each in returned for place in each][count:]
    assert all(left)


def test_ranges_of_places_are_joined() -> None:
    places = Places(10, (range(2, 4), range(8, 12)))
    assert places.ranges_of([range(10, 13), range(14, 18)]) == [range(2, 4), range(8, 9), range(10, 12), range(16, 18)]
    assert places.ranges_of([range(16, 18), range(15, 16)]) == [range(11, 12), range(16, 18)]
    assert places.ranges_of([range(5, 5)]) == []


@given(returned_ranges(), st.integers(0, 20))
def test_ranges_are_read_as_they_were_saved(returned: list[range], more: int) -> None:
    returned = [each for each in returned if len(each)]
    end = (returned[-1].stop if returned else 0) + more
    state = {"position": end - sum(map(len, returned)), "returned": saved_ranges(returned)}
    assert read_ranges(state) == returned
    assert read_ranges({"position": 5}) == []


@pytest.mark.parametrize(
    "saved",
    [
        [[0, 2], [18, 20]],
        [[4, 2]],
        [[2, 2]],
        [[4, 6], [0, 2]],
        [[0, 2], [2, 4]],
        [[0, 3], [2, 4]],
        [[-1, 1]],
        [[0, 1, 2]],
        [[0.0, 1.0]],
        [[False, True]],
        [5],
        "ab",
        None,
    ],
)
def test_ranges_that_cannot_be_are_refused(saved: Any) -> None:
    with pytest.raises(InputError) as caught:
        read_ranges({"position": 10, "returned": saved})
    assert caught.value.given == f'"returned": {saved} at position 10'
