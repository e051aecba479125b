"""What the fields of a recipe take, worked out from their type hints."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lockstep.progress import Interval
from lockstep.recipes.recipe import CLASSES_OF, SAID_ELSEWHERE
from lockstep.recipes.wording import listed

_NAMES = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    Interval: 'an interval such as "20 steps"',
}


_ONE_WORD = {"AdamW", "LeNet", "RMSProp", "SqueezeNet"}


def kind_of(cls: type) -> str:
    """A class as its `kind`: its name in snake_case, but for names that everybody writes as one word."""
    if cls.__name__ in _ONE_WORD:
        return cls.__name__.lower()
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()


@dataclass(frozen=True)
class Accepted:
    """What a field takes: the members of its union, by sort."""

    scalars: tuple[type, ...]
    """Of int, float, bool, str, Interval and NoneType."""
    words: tuple[str, ...]
    """Those of a Literal."""
    classes: Mapping[str, type]
    """The parts it may hold, by kind."""
    item: Any = None
    """The type of the items, where it takes a list."""
    entry: Any = None
    """The type of the values, where it takes a table of names of the user's own: patterns of parameters."""

    def takes(self, value: object) -> bool:
        """Whether this is a number, a word, a truth value, a text or None that the field takes as it is."""
        if isinstance(value, str) and value in self.words:
            return True
        if type(value) in (int, float) and float in self.scalars:
            return math.isfinite(value)  # type: ignore[arg-type]
        return type(value) in self.scalars

    def __str__(self) -> str:
        choices = [_NAMES[scalar] for scalar in self.scalars if scalar is not NoneType]
        if self.words:
            choices.append(f"one of {listed(self.words)}")
        if self.classes:
            choices.append(f"a table of kind {listed(self.classes, ' or ')}")
        if self.item is not None:
            choices.append("a list")
        if self.entry is not None:
            choices.append("a table by pattern")
        return ", or ".join(choices)


def accepted(hint: Any) -> Accepted:
    """What a field of this type takes."""
    members = _members(hint)
    lists = [member for member in members if get_origin(member) in (tuple, Sequence)]
    tables = [member for member in members if get_origin(member) is Mapping]
    return Accepted(
        scalars=tuple(member for member in members if member in _NAMES or member is NoneType),
        words=tuple(word for member in members if get_origin(member) is Literal for word in get_args(member)),
        classes={
            kind_of(member): member
            for member in members
            if isinstance(member, type) and is_dataclass(member) and member is not Interval
        },
        item=get_args(lists[0])[0] if lists else None,
        entry=get_args(tables[0])[1] if tables else None,
    )


def _members(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, UnionType):
        return tuple(member for part in get_args(hint) for member in _members(part))
    return CLASSES_OF.get(hint, (hint,))


def fields_of(cls: type) -> dict[str, Any]:
    """The type of each field that a recipe says of a part."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls) if (cls, field.name) not in SAID_ELSEWHERE}


def required_of(cls: type) -> list[str]:
    """The fields that have no default."""
    return [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
