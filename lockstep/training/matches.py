"""What the patterns of a state have matched, in words: a slip in one shows before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from lockstep.losses.regularization import Regularizer
from lockstep.selection import selected

MAX_NAMES = 6


def matches(parameters: Mapping[str, Tensor], frozen: Sequence[str], values: Sequence[object]) -> list[str]:
    """A line for each pattern in these values, after one for what is trained and one for what is frozen.

    No line where there is no pattern and no penalty: then there is nothing that could have missed.

    Args:
        parameters: those that are trained.
        frozen: the names of those that were frozen by pattern.
        values: optimizers, transforms, penalties; patterns are the keys of their mappings, and fields called `pattern`.
    """
    matched = list(_matched(parameters, values))
    if not frozen and not matched:
        return []
    numbers = sum(parameter.numel() for parameter in parameters.values() if not is_lazy(parameter))
    lines = [f"trained: {len(parameters)} parameters, {numbers} numbers"]
    if frozen:
        lines.append(f"frozen: {_named(frozen)}")
    return lines + matched


def _matched(parameters: Mapping[str, Tensor], values: Sequence[object]) -> Iterator[str]:
    for value in values:
        if isinstance(value, Regularizer):
            yield f"{type(value).__name__} {value.weight:g}: {_named(list(value.chosen(parameters)))}"
            continue
        for label, patterns in _patterns(value):
            yield f"{label}: {_named(selected(label, patterns, parameters))}"


def _patterns(value: Any) -> Iterator[tuple[str, Any]]:
    if not is_dataclass(value):
        return
    kind = type(value).__name__
    for field in fields(value):
        content = getattr(value, field.name)
        if field.name == "pattern" and content:
            yield f"{kind} {content!r}", content
        elif isinstance(content, Mapping):
            for pattern, entry in content.items():
                yield f"{kind} {field.name} {pattern!r} = {entry}", pattern
                yield from _patterns(entry)


def _named(names: Sequence[str]) -> str:
    more = f", and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{len(names)} parameter{'s' if len(names) > 1 else ''} ({', '.join(names[:MAX_NAMES])}{more})"
