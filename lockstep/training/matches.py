"""What the patterns of a state have matched, in words: a slip in one shows before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

from torch import Tensor

from lockstep.listing import shorten
from lockstep.losses.regularization import Regularizer
from lockstep.selection import selected

MAX_NAMES = 6

Match = tuple[str, Sequence[str]]
"""A pattern with what it belongs to, and the names that it matches."""


def matches(
    parameters: Mapping[str, Tensor], frozen: Sequence[str], of_optimizer: Iterable[Match], values: Sequence[object]
) -> list[str]:
    """A line for each pattern, after one for what is trained and one for what is frozen.

    No line where there is no pattern and no penalty: then there is nothing that could have missed.

    Args:
        parameters: those that are trained.
        frozen: the names of those that were frozen by pattern.
        of_optimizer: what the optimizer's own patterns have matched.
        values: penalties and transforms; patterns are the keys of their mappings, and fields called `pattern`.
    """
    matched = list(chain(of_optimizer, *(_matched(value, parameters) for value in values)))
    if not frozen and not matched:
        return []
    numbers = sum(parameter.numel() for parameter in parameters.values())
    lines = [f"trained: {len(parameters)} parameters, {numbers} numbers"]
    if frozen:
        lines.append(f"frozen: {_named(frozen)}")
    return lines + [f"{label}: {_named(names)}" for label, names in matched]


def _matched(value: Any, parameters: Mapping[str, Tensor]) -> Iterator[Match]:
    kind = type(value).__name__
    if isinstance(value, Regularizer):
        yield f"{kind} {value.weight:g}", list(value.chosen(parameters))
    elif is_dataclass(value):
        for field in fields(value):
            content = getattr(value, field.name)
            if field.name == "pattern" and content:
                yield f"{kind} {content!r}", selected(kind, content, parameters)
            elif isinstance(content, Mapping):
                for pattern, entry in content.items():
                    yield f"{kind} {field.name} {pattern!r} = {entry}", selected(kind, pattern, parameters)


def _named(names: Sequence[str]) -> str:
    return f"{len(names)} parameter{'s' if len(names) > 1 else ''} ({shorten(names, MAX_NAMES)})"
