"""A recipe as TOML, and back."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tomli_w

from lockstep.errors import LockstepError, RecipeError
from lockstep.listing import did_you_mean
from lockstep.progress import Interval
from lockstep.recipes.recipe import CLASSES_OF, SAID_ELSEWHERE, Recipe


def to_toml(recipe: Recipe) -> str:
    """The whole recipe, defaults included.

    Raises:
        RecipeError: it holds what a recipe cannot say, such as a schedule of one's own.
    """
    text = tomli_w.dumps(write(Recipe, recipe, Place(f"recipe {recipe.name}")))
    # TOML leaves some characters as they are that a terminal would obey; escaped, they are the same.
    return "".join(sign if sign.isprintable() or sign in "\n\t" else f"\\U{ord(sign):08x}" for sign in text)


def from_toml(text: str, source: str) -> Recipe:
    """The recipe that a text describes; fields that it leaves out take their defaults.

    Args:
        text: TOML.
        source: where it comes from, for messages.

    Raises:
        RecipeError: it is not TOML, or describes no recipe; the message names the field.
    """
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(
            f"{source}: this is not TOML.",
            given=error,
            expected="lines such as batch_size = 128 below headings such as [optimizer]",
            hint="correct it there; `lockstep train mnist --print-recipe` prints a recipe to start from",
        ) from error
    recipe: Recipe = read(Recipe, tables, Place(source))
    return recipe


def load(path: Path) -> Recipe:
    """The recipe in a file.

    Raises:
        RecipeError: it cannot be read, or describes no recipe.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise RecipeError(
            f"{path}: the recipe cannot be read.",
            given=f"{path} ({reason})",
            expected="a TOML file",
            hint="check the path; `lockstep train mnist --print-recipe` prints a recipe to start from",
        ) from error
    return from_toml(text, str(path))


class Place(NamedTuple):
    """Where a value stands: `optimizer.lr in recipe.toml`; the recipe as a whole where the path is empty."""

    source: str
    path: str = ""

    def at(self, name: object) -> Place:
        """The place of a field of this table, or of an item of this list."""
        return Place(self.source, f"{self.path}.{name}" if self.path else str(name))

    @property
    def name(self) -> str:
        """The last word of the path."""
        return self.path.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.path} in {self.source}" if self.path else self.source


def shown(value: object) -> str:
    """A plain value, much as TOML has it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {shown(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(shown(item) for item in value) + "]"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def listed(words: Iterable[str], between: str = ", ") -> str:
    """Words in quotes, one after the other."""
    return between.join(f'"{word}"' for word in words)


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


def read(hint: Any, value: Any, place: Place) -> Any:
    """The value that a field of this type takes from a plain one.

    Raises:
        RecipeError: it is not of this type, or the part itself refuses it.
    """
    field = accepted(hint)
    if isinstance(value, dict) and field.classes:
        return _read_part(field, value, place)
    if isinstance(value, dict) and field.entry is not None:
        return {name: read(field.entry, entry, place.at(name)) for name, entry in value.items()}
    if isinstance(value, list) and field.item is not None:
        return tuple(read(field.item, item, place.at(index)) for index, item in enumerate(value))
    if Interval in field.scalars and type(value) in (int, str):
        return _made(lambda: Interval.parse(str(value)), place)
    if field.takes(value):
        return value
    raise _unfit(field, value, place)


def write(hint: Any, value: Any, place: Place) -> Any:
    """The plain value that `read` takes for this one.

    Raises:
        RecipeError: a recipe cannot say it.
    """
    field = accepted(hint)
    if type(value) in field.classes.values():
        return _write_part(field, value, place)
    if isinstance(value, Mapping) and field.entry is not None:
        return {name: write(field.entry, entry, place.at(name)) for name, entry in value.items()}
    if isinstance(value, tuple | list) and field.item is not None:
        return [write(field.item, item, place.at(index)) for index, item in enumerate(value)]
    if isinstance(value, Interval) and field.takes(value):
        return str(value)
    if field.takes(value):
        return value
    raise _unfit(field, value, place)


def _read_part(field: Accepted, table: Mapping[str, Any], place: Place) -> Any:
    cls = _class_of(field, table, place)
    hints = fields_of(cls)
    for name in table:
        if name not in hints and name != "kind":
            raise _unknown_field(cls, name, place)
    for name in required_of(cls):
        if name not in table:
            raise RecipeError(
                f"{place.at(name)}: this field is missing.",
                given=shown(table),
                expected=f"{name}, {accepted(hints[name])}",
                hint=f"set {place.at(name).path}",
            )
    values = {name: read(hint, table[name], place.at(name)) for name, hint in hints.items() if name in table}
    return _made(lambda: cls(**values), place)


def _class_of(field: Accepted, table: Mapping[str, Any], place: Place) -> type:
    kinds = list(field.classes)
    kind = table.get("kind", kinds[0] if len(kinds) == 1 else None)
    if isinstance(kind, str) and kind in kinds:
        return field.classes[kind]
    raise RecipeError(
        f"{place.at('kind')}: " + ("there is no such kind here." if "kind" in table else "the kind is missing."),
        given=shown(table.get("kind", table)),
        expected=f"one of {listed(kinds)}",
        hint=did_you_mean(kind, kinds) or f"set {place.at('kind').path}",
    )


def _made(make: Callable[[], Any], place: Place) -> Any:
    """What `make` returns; its errors gain the place."""
    try:
        return make()
    except LockstepError as error:
        raise RecipeError(
            f"{place}: {error.what}", given=error.given, expected=error.expected, hint=error.hint
        ) from error


def _write_part(field: Accepted, part: Any, place: Place) -> dict[str, Any]:
    kind, hints = kind_of(type(part)), fields_of(type(part))
    is_said_by_name = len(field.classes) == 1 and place.name in (kind, "")
    given = {name: getattr(part, name) for name in hints}
    return ({} if is_said_by_name else {"kind": kind}) | {
        name: write(hints[name], value, place.at(name)) for name, value in given.items() if value is not None
    }


def _unknown_field(cls: type, name: str, place: Place) -> RecipeError:
    elsewhere, known = SAID_ELSEWHERE.get((cls, name)), fields_of(cls)
    return RecipeError(
        f"{place.at(name)}: there is no such field.",
        given=name,
        expected=f"one of {', '.join(known)}" if known else f"no field: {kind_of(cls)} has none",
        hint=f"set {elsewhere} instead" if elsewhere else did_you_mean(name, known) or "remove it",
    )


def _unfit(field: Accepted, value: object, place: Place) -> RecipeError:
    return RecipeError(
        f"{place}: this value does not fit.",
        given=shown(value),
        expected=str(field),
        hint=did_you_mean(value, field.words)
        or "give such a value (text in quotes, numbers and true or false without)",
    )
