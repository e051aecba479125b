from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest

from lockstep.checks import check_open_unit, check_range, check_switch, check_type
from lockstep.errors import InputError


def refusal(check: Callable[[], None]) -> tuple[object, ...]:
    with pytest.raises(InputError) as caught:
        check()
    return caught.value.what, caught.value.given, caught.value.expected, caught.value.hint


@pytest.mark.parametrize("value", [0, 0.0, 1.5, 10**400])
def test_numbers_in_the_range_are_taken(value: float) -> None:
    check_range("rate", value, 0.0, 10**500)


@pytest.mark.parametrize(
    ("value", "high", "expected"),
    [
        (-0.1, math.inf, "0 or more, finite"),
        (math.nan, math.inf, "0 or more, finite"),
        (math.inf, math.inf, "0 or more, finite"),
        (1.0, 1.0, "0 or more, below 1"),
    ],
)
def test_numbers_outside_of_the_range_are_refused(value: float, high: float, expected: str) -> None:
    assert refusal(lambda: check_range("rate", value, 0.0, high)) == (
        "rate is out of range.",
        f"rate={value}",
        expected,
        "give rate a value in this range",
    )


@pytest.mark.parametrize("value", [True, False, "0.1", None, [0.1]])
def test_what_is_no_number_is_out_of_no_range(value: object) -> None:
    assert refusal(lambda: check_range("rate", value, 0.0)) == (  # type: ignore[arg-type]
        "rate is of the wrong type.",
        f"rate is {type(value).__name__}",
        "a number",
        "give rate as a number",
    )


@pytest.mark.parametrize("value", [True, "0.9", None])
def test_what_is_no_number_is_no_decay_of_an_average(value: object) -> None:
    assert refusal(lambda: check_open_unit("decay", value, hint="give 0.9")) == (  # type: ignore[arg-type]
        "decay is of the wrong type.",
        f"decay is {type(value).__name__}",
        "a number above 0 and below 1",
        "give 0.9",
    )


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_a_switch_is_true_or_false(value: object) -> None:
    check_switch("nesterov", True)
    assert refusal(lambda: check_switch("nesterov", value)) == (
        "nesterov is of the wrong type.",
        f"nesterov is {type(value).__name__}",
        "True or False",
        "write nesterov=True, or leave it out",
    )


@pytest.mark.parametrize("kind", [int, (int, float), Mapping])
def test_true_is_no_number(kind: type) -> None:
    check_type("flag", True, (str, bool), expected="text or a switch", hint="give one")
    assert refusal(lambda: check_type("count", True, kind, expected="a count", hint="count")) == (
        "count is of the wrong type.",
        "count is bool",
        "a count",
        "count",
    )
