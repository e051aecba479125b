"""Parameters, or modules, selected by name: by the exact name, or by a regular expression that is searched for in it.

A pattern that is itself the name of a parameter means that one alone; any other is a regular expression.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from lockstep.checks import check_type
from lockstep.errors import InputError

T = TypeVar("T")

Patterns = str | Sequence[str]

_ONE = "a regular expression, or the exact name of a {}"


def selected(field: str, patterns: Patterns, names: Iterable[str], *, kind: str = "parameter") -> list[str]:
    """Return the names that at least one pattern matches, in their order; `field` is the user's name for the patterns.

    `kind` says what the names are of.

    Raises:
        InputError: a pattern matches nothing, or is no regular expression.
    """
    expected = f"{_ONE.format(kind)}; or a list of them"
    check_type(field, patterns, Iterable, expected=expected, hint="write it as text")
    names = list(names)
    chosen: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        chosen.update(_matches(field, pattern, names, kind))
    return [name for name in names if name in chosen]


def assigned(field: str, table: Mapping[str, T], names: Iterable[str]) -> dict[str, T]:
    """Return the value of the one pattern that matches each name: see `pattern_of_each`."""
    return {name: table[pattern] for name, pattern in pattern_of_each(field, table, names).items()}


def pattern_of_each(field: str, patterns: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Return the one pattern that matches each name, in the order of the names; others are left out.

    Raises:
        InputError: a pattern matches nothing or is no regular expression, or two of them match the same name.
    """
    names = list(names)
    found: dict[str, str] = {}
    for pattern in patterns:
        for name in _matches(field, pattern, names):
            if name in found:
                raise InputError(
                    f"{name!r} is matched by two patterns of {field}.",
                    given=f"{found[name]!r} and {pattern!r}",
                    expected="one pattern at most for each parameter",
                    hint="make one of them narrower",
                )
            found[name] = pattern
    return {name: found[name] for name in names if name in found}


def _matches(field: str, pattern: str, names: Sequence[str], kind: str = "parameter") -> list[str]:
    one = _ONE.format(kind)
    check_type(f"A pattern of {field}", pattern, str, expected=one, hint="write it as text")
    if pattern in names:
        return [pattern]
    if not pattern:
        raise InputError(
            f"A pattern of {field} is empty, and would match everything.",
            given="''",
            expected=one,
            hint=f"leave it out, or write '.' for every {kind}",
        )
    try:
        found = [name for name in names if re.search(pattern, name)]
    except re.error as error:
        raise InputError(
            f"{field} holds what is no regular expression: {error}.",
            given=repr(pattern),
            expected=one,
            hint=r"escape dots and brackets, as in r'^head\.'",
        ) from error
    if not found:
        raise InputError(
            f"A pattern of {field} matches no {kind}.",
            given=repr(pattern),
            expected=f"one that is found in a name such as {', '.join(map(repr, names[:4]))}",
            hint="correct the pattern, or leave it out",
        )
    return found
