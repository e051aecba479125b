"""Checks of arguments that many parts make alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep.errors import InputError


def check_one_of(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse a word that is none of the choices.

    Raises:
        InputError: naming the argument and the choices.
    """
    if value not in choices:
        quoted = [repr(choice) for choice in choices]
        raise InputError(
            f"{name} cannot be {value!r}.",
            given=f"{name}={value!r}",
            expected=" or ".join(quoted),
            mend="give one of these",
        )


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Refuse a number outside of low <= value < high, and one that is none.

    Raises:
        InputError: naming the argument and the range.
    """
    if not isinstance(value, int | float):
        raise wrong_type(name, value, expected="a number", mend=f"give {name} as a number")
    if not low <= value < high:
        raise InputError(
            f"{name} is out of range.",
            given=f"{name}={value}",
            expected=f"{low:g} or more" + (f", below {high:g}" if high < math.inf else ", finite"),
            mend=f"give {name} a value in this range",
        )


def check_open_unit(name: str, value: float, *, mend: str) -> None:
    """Refuse a number outside of 0 < value < 1: the decay of a moving average.

    Raises:
        InputError: naming the argument.
    """
    if not 0 < value < 1:
        raise InputError(
            f"{name} is out of range.",
            given=f"{name}={value}",
            expected="above 0 and below 1",
            mend=mend,
        )


def check_type(name: str, value: object, kind: type | tuple[type, ...], *, expected: str, mend: str) -> None:
    """Refuse a value of another type.

    Raises:
        InputError: naming the argument, the type given and the one expected.
    """
    if not isinstance(value, kind):
        raise wrong_type(name, value, expected=expected, mend=mend)


def wrong_type(name: str, value: object, *, expected: str, mend: str) -> InputError:
    """The error for an argument of the wrong type, where more than its class decides."""
    given = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    return InputError(f"{name} is of the wrong type.", given=f"{name} is {given}", expected=expected, mend=mend)
