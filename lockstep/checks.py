"""Checks of arguments that many parts make alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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
            hint="give one of these",
        )


def check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Refuse what is no number, and one outside of low <= value < high. True and False are no numbers.

    Raises:
        InputError: naming the argument and the range.
    """
    check_type(name, value, (int, float), expected="a number", hint=f"give {name} as a number")
    if not low <= value < high:
        raise InputError(
            f"{name} is out of range.",
            given=f"{name}={value}",
            expected=f"{low:g} or more" + (f", below {high:g}" if high < math.inf else ", finite"),
            hint=f"give {name} a value in this range",
        )


def check_even_split(batch_size: int, num_towers: int) -> None:
    """Refuse a batch that cannot be split evenly over the towers."""
    if batch_size % num_towers:
        below = batch_size - batch_size % num_towers
        raise InputError(
            "The batch cannot be split evenly over the towers.",
            given=f"batch_size={batch_size} over {num_towers} towers",
            expected=f"a batch size that {num_towers} divides",
            hint=f"set batch_size to {f'{below} or ' if below else ''}{below + num_towers}, or change the towers",
        )


def check_whole(name: str, value: int, *, least: int) -> None:
    """Refuse what is no whole number, and one below the least.

    Raises:
        InputError: naming the argument and the least value.
    """
    check_type(name, value, int, expected=f"a whole number of {least} or more", hint=f"give {name} as a whole number")
    check_range(name, value, least)


def check_open_unit(name: str, value: float, *, hint: str) -> None:
    """Refuse what is no number above 0 and below 1: the decay of a moving average.

    Raises:
        InputError: naming the argument.
    """
    check_type(name, value, (int, float), expected="a number above 0 and below 1", hint=hint)
    if not 0 < value < 1:
        raise InputError(
            f"{name} is out of range.",
            given=f"{name}={value}",
            expected="above 0 and below 1",
            hint=hint,
        )


def check_positive(name: str, value: float, *, hint: str) -> None:
    """Refuse what is no number above 0; infinity is one.

    Raises:
        InputError: naming the argument.
    """
    check_type(name, value, (int, float), expected="a number above 0", hint=hint)
    if not value > 0:
        raise InputError(f"{name} is out of range.", given=f"{name}={value}", expected="a number above 0", hint=hint)


def check_switch(name: str, value: object) -> None:
    """Refuse what is neither True nor False.

    Raises:
        InputError: naming the argument.
    """
    check_type(name, value, bool, expected="True or False", hint=f"write {name}=True, or leave it out")


def plain(value: Any) -> Any:
    """A number of numpy's or torch's, without dimensions, as Python's own; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def check_type(name: str, value: object, kind: type | tuple[type, ...], *, expected: str, hint: str) -> None:
    """Refuse a value of another type. True and False are of type bool alone, and no numbers.

    Raises:
        InputError: naming the argument, the type given and the one expected.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise wrong_type(name, value, expected=expected, hint=hint)


def check_all(name: str, values: object, kind: Any, *, hint: str) -> None:
    """Refuse what is no list, and items of another type than `kind`.

    Raises:
        InputError: naming the argument, and the place of the item.
    """
    if not isinstance(values, list | tuple):
        raise wrong_type(name, values, expected="a list", hint=hint)
    for index, value in enumerate(values):
        if not isinstance(value, kind) or isinstance(value, type):
            raise wrong_type(f"{name}[{index}]", value, expected="a value that belongs there", hint=hint)


def wrong_type(name: str, value: object, *, expected: str, hint: str) -> InputError:
    """The error for an argument of the wrong type, where more than its class decides."""
    given = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    return InputError(f"{name} is of the wrong type.", given=f"{name} is {given}", expected=expected, hint=hint)
