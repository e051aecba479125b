from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.checkpoints import Retention
from lockstep.errors import InputError

HOUR = 3600.0


def every(hours: float, steps: range) -> dict[int, float]:
    return {step: hours * HOUR * i for i, step in enumerate(steps)}


@pytest.mark.parametrize(
    ("retention", "saved", "surplus"),
    [
        (Retention(), {}, []),
        (Retention(), every(1, range(5)), []),
        (Retention(), every(1, range(7)), [0, 1]),
        (Retention(newest=1), every(1, range(3)), [0, 1]),
        (Retention(newest=1, every_hours=1.0), every(1, range(4)), []),
        (Retention(newest=1, every_hours=2.0), every(1, range(6)), [1, 3]),
        (Retention(newest=2, every_hours=2.0), every(1, range(6)), [1, 3]),
        (Retention(newest=2, every_hours=0.5), every(0.2, range(8)), [1, 2, 4, 5]),
        (Retention(newest=2, every_hours=100.0), every(1, range(5)), [1, 2]),
    ],
)
def test_what_goes(retention: Retention, saved: dict[int, float], surplus: list[int]) -> None:
    assert retention.surplus(saved) == surplus


def test_a_clock_that_was_set_back_costs_no_later_checkpoint() -> None:
    """Times of next year must not make all of this year's too early to be kept."""
    saved = {0: 1e12, 10: 1e12 + 60, 20: 1 * HOUR, 30: 2 * HOUR, 40: 3 * HOUR, 50: 3 * HOUR}
    assert Retention(newest=1, every_hours=2.0).surplus(saved) == [10, 30]


@settings(max_examples=50)
@given(
    st.integers(1, 4),
    st.none() | st.floats(0.1, 50),
    st.dictionaries(st.integers(0, 1000), st.floats(0, 100 * HOUR), max_size=15),
)
def test_the_newest_stay_and_a_second_look_finds_nothing(newest, every_hours, saved) -> None:
    retention = Retention(newest, every_hours)
    surplus = retention.surplus(saved)
    assert not set(surplus) & set(sorted(saved)[-newest:])
    assert surplus == sorted(surplus)
    left = {step: seconds for step, seconds in saved.items() if step not in surplus}
    assert retention.surplus(left) == []


@pytest.mark.parametrize("newest", [0, -1])
def test_none_at_all_is_refused(newest: int) -> None:
    with pytest.raises(InputError) as raised:
        Retention(newest=newest)
    assert str(raised.value) == (
        "At least the newest checkpoint has to be kept.\n"
        f"  given:    newest={newest}\n"
        "  expected: 1 or more\n"
        "  mend:     keep at least one: a run without checkpoints cannot be resumed"
    )


@pytest.mark.parametrize("hours", [0.0, -1.0, math.nan])
def test_hours_that_are_none(hours: float) -> None:
    with pytest.raises(InputError) as raised:
        Retention(every_hours=hours)
    assert str(raised.value) == (
        f"One checkpoint every {hours} hours cannot be kept.\n"
        f"  given:    every_hours={hours}\n"
        "  expected: a number above 0, or None\n"
        "  mend:     give the hours between two checkpoints to keep, or None to keep the newest alone"
    )
