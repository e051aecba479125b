from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from lockstep.checks import (
    Checked,
    Decay,
    FiniteFloat,
    Fraction,
    Hint,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Probability,
    Range,
    check_type,
    check_value,
)
from lockstep.errors import InputError


def refusal(check: Callable[[], None]) -> tuple[object, ...]:
    with pytest.raises(InputError) as caught:
        check()
    return caught.value.what, caught.value.given, caught.value.expected, caught.value.hint


@pytest.mark.parametrize("kind", [int, (int, float), Mapping])
def test_true_is_no_number(kind: type) -> None:
    check_type("flag", True, (str, bool), expected="text or a switch", hint="give one")
    assert refusal(lambda: check_type("count", True, kind, expected="a count", hint="count")) == (
        "count is of the wrong type.",
        "count is bool",
        "a count",
        "count",
    )


def odd(name: str, value: int) -> None:
    if value % 2 == 0:
        raise InputError(f"{name} is even.", given=value, expected="an odd number", hint="add 1")


@dataclass(frozen=True)
class Blur(Checked):
    radius: PositiveFloat = 1.0
    taps: Annotated[int, odd] = 3
    edge: Literal["zero", "repeat"] = "zero"
    centre: tuple[FiniteFloat, FiniteFloat] = (0.0, 0.0)
    steps: tuple[PositiveInt, ...] = ()
    decay: Annotated[Decay | None, Hint("give 0.9")] = None
    name: str = "blur"
    exact: bool = False
    like: Annotated[Mapping[str, int] | None, Hint("not looked into")] = None
    base: Any = None


def test_fields_within_their_annotations_are_taken() -> None:
    blur = Blur(2, 5, "repeat", (0, -1.5), (1, 2), 0.9, "b", True, {}, object())
    assert Blur(2.0, 5, "repeat", [0, -1.5], [1, 2], 0.9, "b", True).steps == [1, 2]  # type: ignore[arg-type, comparison-overlap]
    assert blur.radius == 2


@pytest.mark.parametrize(
    ("fields", "what", "given", "expected", "hint"),
    [
        ({"radius": 0}, "radius is out of range.", "radius=0", "above 0, finite", "give radius a value in this range"),
        ({"radius": math.inf}, "radius is out of range.", "radius=inf", "above 0, finite", None),
        ({"radius": True}, "radius is of the wrong type.", "radius is bool", "a number", "give radius as a number"),
        ({"taps": 4}, "taps is even.", 4, "an odd number", "add 1"),
        ({"edge": "wrap"}, "edge cannot be 'wrap'.", "edge='wrap'", "'zero' or 'repeat'", "give one of these"),
        ({"centre": (1.0,)}, "centre is of the wrong length.", "centre=(1.0,)", "2 values", None),
        ({"centre": (1, math.nan)}, "centre[1] is out of range.", "centre[1]=nan", "finite", None),
        ({"steps": 3}, "steps is of the wrong type.", "steps is int", "a list", "write steps=(3,)"),
        ({"steps": (3, 0)}, "steps[1] is out of range.", "steps[1]=0", "1 or more", None),
        ({"steps": (3, 1.0)}, "steps[1] is of the wrong type.", "steps[1] is float", "a whole number", None),
        ({"decay": 1.0}, "decay is out of range.", "decay=1.0", "above 0, below 1", "give 0.9"),
        ({"decay": "0.9"}, "decay is of the wrong type.", "decay is str", "a number", "give 0.9"),
        ({"name": 3}, "name is of the wrong type.", "name is int", "text", 'write name="..."'),
        ({"exact": 1}, "exact is of the wrong type.", "exact is int", "True or False", None),
    ],
)
def test_fields_outside_of_their_annotations_are_refused(
    fields: dict[str, Any], what: str, given: object, expected: str, hint: str | None
) -> None:
    found = refusal(lambda: Blur(**fields))
    assert found[:3] == (what, given, expected)
    assert hint is None or found[3] == hint


def test_a_class_is_checked_where_it_has_a_hint() -> None:
    check_value("blur", Blur(), Blur)
    check_value("blur", "any", Blur)
    assert refusal(lambda: check_value("blur", "any", Annotated[Blur | None, Hint("write Blur()")])) == (
        "blur is of the wrong type.",
        "blur is str",
        "a Blur",
        "write Blur()",
    )


@pytest.mark.parametrize(
    ("annotation", "inside", "outside", "text"),
    [
        (Probability, [0, 0.5, 1], [-0.1, 1.1, math.nan], "from 0 to 1"),
        (Fraction, [0, 0.5], [-0.1, 1.0], "0 or more, below 1"),
        (NonNegativeFloat, [0, 1e300, 10**400], [-1, math.inf], "0 or more, finite"),
        (Annotated[float, Range(gt=0, le=1)], [1e-9, 1], [0, 1.5], "above 0, at most 1"),
        (Annotated[float, Range(gt=0, finite=False)], [math.inf], [0, math.nan], "above 0"),
        (Annotated[int, Range(ge=1, lt=2**63)], [1], [0, 2**63], "1 or more, below 2**63"),
        (Annotated[int, Range(ge=1, le=100)], [1, 100], [0, 101], "from 1 to 100"),
    ],
)
def test_the_ends_of_a_range_are_in_it_or_not(
    annotation: Any, inside: list[float], outside: list[float], text: str
) -> None:
    for value in inside:
        check_value("share", value, annotation)
    for value in outside:
        assert refusal(lambda value=value: check_value("share", value, annotation))[:3] == (  # type: ignore[misc]
            "share is out of range.",
            f"share={value}",
            text,
        )
