"""Recipes as TOML, and back: every value is checked against the type hint of its field.

A part of a recipe is a table of its fields. Where the field's name does not say its class, the table does, in `kind`
(`"cosine"` for `Cosine`), which is looked up among the classes that the field takes and nowhere else: a recipe cannot
name code. Fields that are None are left out.

`--set optimizer.lr.initial=0.1` changes one field of a recipe. Its value is TOML, or text where it is not; `none` is no
value at all: `average=none`.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache, partial, reduce
from operator import attrgetter, getitem
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tomli_w

from lockstep.errors import LockstepError, RecipeError
from lockstep.inline_toml import kind_name
from lockstep.listing import did_you_mean, shorten
from lockstep.recipes.code import Function
from lockstep.recipes.recipe import CLASSES_OF, NEW_NAMES, SAID_ELSEWHERE, Recipe
from lockstep.screen import log_new_name
from lockstep.types import Interval, StepRange

_SCALARS = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    Interval: 'an interval such as "20 steps"',
    StepRange: 'a range of steps such as "100:110"',
    Function: 'a function such as "my_net:build"',
}
_AS_TEXT = (Interval, StepRange, Function)


def to_toml(recipe: Recipe) -> str:
    """Write the whole recipe as TOML, defaults included; fields that say nothing for its task are left out.

    Raises:
        RecipeError: a part has no name in recipes, such as a schedule of the user's own.
    """
    return escaped_toml(tomli_w.dumps(to_tables(recipe)))


def to_tables(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as the plain tables that `to_toml` writes."""
    tables: dict[str, Any] = write(Recipe, recipe, FieldPath(f"recipe {recipe.name}"))
    for path, default in recipe.chosen_task.unused.items():
        *parts, name = path.split(".")
        if attrgetter(path)(recipe) == default:
            del reduce(getitem, parts, tables)[name]
    return tables


def escaped_toml(text: str) -> str:
    """Escape what TOML leaves as it is and a terminal would obey; read, it is the same."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else f"\\U{ord(sign):08x}" for sign in text)


def from_toml(text: str, source: str) -> Recipe:
    """Read a recipe from TOML; fields that are left out take their defaults. Messages name the source."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(
            f"{source}: this is not TOML.",
            given=error,
            expected="lines such as batch_size = 128 below headings such as [optimizer]",
            hint="correct it there; `lockstep train mnist --print-recipe` prints a recipe to start from",
        ) from error
    recipe: Recipe = read(Recipe, tables, FieldPath(source))
    return recipe


def load(path: Path) -> Recipe:
    """Read the recipe in a file."""
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


class FieldPath(NamedTuple):
    """A field and the source it was read from, for messages: `optimizer.lr in recipe.toml`."""

    source: str
    path: str = ""
    """Empty for the recipe as a whole."""

    def at(self, name: object) -> FieldPath:
        """Return the path of a field of this table, or of an item of this list."""
        return FieldPath(self.source, f"{self.path}.{name}" if self.path else str(name))

    @property
    def name(self) -> str:
        """The last word of the path."""
        return self.path.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.path} in {self.source}" if self.path else self.source


def read(hint: Any, value: Any, path: FieldPath) -> Any:
    """Convert a plain value of TOML to the type of a field."""
    field = field_type(hint)
    if isinstance(value, dict) and field.classes:
        return _read_part(field, value, path)
    if isinstance(value, dict) and field.entry is not None:
        return {name: read(field.entry, entry, path.at(name)) for name, entry in value.items()}
    if isinstance(value, list) and field.item is not None:
        return tuple(read(field.item, item, path.at(index)) for index, item in enumerate(value))
    if Interval in field.scalars and type(value) in (int, str):
        return made(lambda: Interval.parse(str(value)), path)
    for each in (StepRange, Function):
        if each in field.scalars and isinstance(value, str):
            return made(partial(each.parse, value), path)
    if field.takes(value):
        return value
    raise _wrong_value(field, value, path)


def write(hint: Any, value: Any, path: FieldPath) -> Any:
    """Convert the value of a field to the plain one that `read` takes for it."""
    field = field_type(hint)
    if type(value) in field.classes.values():
        return _write_part(field, value, path)
    if isinstance(value, Mapping) and field.entry is not None:
        return {name: write(field.entry, entry, path.at(name)) for name, entry in value.items()}
    if isinstance(value, tuple | list) and field.item is not None:
        return [write(field.item, item, path.at(index)) for index, item in enumerate(value)]
    if not field.takes(value):
        raise _wrong_value(field, value, path)
    return str(value) if isinstance(value, _AS_TEXT) else value


def made(make: Callable[[], Any], path: FieldPath | str) -> Any:
    """Call `make`; a part that refuses its values raises a RecipeError that names its path, or its file."""
    try:
        return make()
    except LockstepError as error:
        raise RecipeError(
            f"{path}: {error.what}", given=error.given, expected=error.expected, hint=error.hint
        ) from error


def with_new_name(cls: type, name: str, value: Any, path: FieldPath) -> tuple[str, Any]:
    """Return the name that a field of a part has now, and its value by that name; the log tells who used an old one."""
    if (now := NEW_NAMES.get(cls, {}).get(name)) is None:
        return name, value
    log_new_name(str(path.at(name)), path.at(now.name).path + (f" ({now.note})" if now.note else ""))
    return now.name, now.convert(value) if now.convert else value


def unknown_field(cls: type, name: str, path: FieldPath) -> RecipeError:
    """Make the error of a part that has no field of this name."""
    elsewhere, known = SAID_ELSEWHERE.get((cls, name)), field_hints(cls)
    if name in NEW_NAMES.get(cls, {}):  # beside its new name
        elsewhere = NEW_NAMES[cls][name].name
    return RecipeError(
        f"{path.at(name)}: there is no such field.",
        given=name,
        expected=f"one of {shorten([*known], 8)}" if known else f"no field: {kind_name(cls)} has none",
        hint=f"set {elsewhere} instead"
        if elsewhere
        else did_you_mean(name, known) or "remove it; `lockstep explain` lists what there is",
    )


def _read_part(field: FieldType, table: Mapping[str, Any], path: FieldPath) -> Any:
    cls = _class_of(field, table, path)
    hints, given = field_hints(cls), table
    table = dict(with_new_name(cls, name, value, path) for name, value in given.items())
    for name in given if len(table) < len(given) else table:
        if name not in hints and name != "kind":
            raise unknown_field(cls, name, path)
    for each in fields(cls):
        if each.name not in table and each.default is MISSING and each.default_factory is MISSING:
            raise RecipeError(
                f"{path.at(each.name)}: this field is missing.",
                given=as_toml(table),
                expected=f"{each.name}, {field_type(hints[each.name])}",
                hint=f"set {path.at(each.name).path}",
            )
    values = {name: read(hint, table[name], path.at(name)) for name, hint in hints.items() if name in table}
    return made(lambda: cls(**values), path)


_PLATEAU = (
    "a schedule knows the step alone: let a script lower the rate by what it has scored, "
    "as docs/reference/coming-from.md shows (ReduceLROnPlateau)"
)
_NOT_HERE = {
    "sam": "an update sees the gradients once: write the second pass into a loss function of your own, "
    "as docs/reference/coming-from.md shows (SAM)",
    "lbfgs": "an update sees the gradients once, and none can be asked for again: take another optimizer",
    "reduce_on_plateau": _PLATEAU,
    "reduce_lr_on_plateau": _PLATEAU,
}
"""What to do in place of kinds that people look for, and that cannot be."""


def _class_of(field: FieldType, table: Mapping[str, Any], path: FieldPath) -> type:
    kinds = list(field.classes)
    kind = table.get("kind", kinds[0] if len(kinds) == 1 else None)
    if isinstance(kind, str) and kind in kinds:
        return field.classes[kind]
    raise RecipeError(
        f"{path.at('kind')}: " + ("there is no such kind here." if "kind" in table else "the kind is missing."),
        given=as_toml(table.get("kind", table)),
        expected=f"one of {_quoted(kinds)}",
        hint=_NOT_HERE.get(str(kind)) or did_you_mean(kind, kinds) or f"set {path.at('kind').path}",
    )


def _write_part(field: FieldType, part: Any, path: FieldPath) -> dict[str, Any]:
    cls: type = type(part)
    kind, hints = kind_name(cls), field_hints(cls)
    is_said_by_name = len(field.classes) == 1 and path.name in (kind, "")
    given = {name: getattr(part, name) for name in hints}
    return ({} if is_said_by_name else {"kind": kind}) | {
        name: write(hints[name], value, path.at(name)) for name, value in given.items() if value is not None
    }


def _wrong_value(field: FieldType, value: object, path: FieldPath) -> RecipeError:
    usual = "give such a value (text in quotes, numbers and true or false without)"
    return RecipeError(
        f"{path}: this value does not fit.",
        given=as_toml(value),
        expected=str(field),
        hint=did_you_mean(value, field.words) or usual,
    )


def as_toml(value: object) -> str:
    """Show a plain value much as TOML has it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {as_toml(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def _quoted(words: Iterable[str], between: str = ", ") -> str:
    return between.join(f'"{word}"' for word in words)


@dataclass(frozen=True)
class FieldType:
    """The values that a field takes, from the members of its type hint."""

    scalars: tuple[type, ...]
    """Types of plain values among int, float, bool, str, Interval, StepRange, Function and NoneType."""
    words: tuple[str, ...]
    """The words of a Literal."""
    classes: Mapping[str, type]
    """The parts it may hold, by kind."""
    item: Any = None
    """The type of the items, where it takes a list."""
    entry: Any = None
    """The type of the values, where it takes a table with keys of the user's own: patterns of parameters."""

    def takes(self, value: object) -> bool:
        """Return whether a value is a scalar that the field takes as it is; numbers must be finite."""
        if isinstance(value, str) and value in self.words:
            return True
        if type(value) in (int, float) and float in self.scalars:
            return math.isfinite(value)  # type: ignore[arg-type]
        return type(value) in self.scalars

    def __str__(self) -> str:
        choices = [_SCALARS[scalar] for scalar in self.scalars if scalar is not NoneType]
        if self.words:
            choices.append(f"one of {_quoted(self.words)}")
        if self.classes:
            choices.append(f"a table of kind {_quoted(self.classes, ' or ')}")
        if self.item is not None:
            choices.append("a list")
        if self.entry is not None:
            choices.append("a table by pattern")
        return ", or ".join(choices)


@cache
def field_type(hint: Any) -> FieldType:
    """Work out from a type hint what a field takes."""
    members = _union_members(hint)
    lists = [member for member in members if get_origin(member) in (tuple, Sequence)]
    tables = [member for member in members if get_origin(member) is Mapping]
    parts = [m for m in members if isinstance(m, type) and is_dataclass(m) and m not in _AS_TEXT]
    return FieldType(
        scalars=tuple(member for member in members if member in _SCALARS or member is NoneType),
        words=tuple(word for member in members if get_origin(member) is Literal for word in get_args(member)),
        classes={kind_name(part): part for part in parts},
        item=get_args(lists[0])[0] if lists else None,
        entry=get_args(tables[0])[1] if tables else None,
    )


def _union_members(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, UnionType):
        return tuple(member for part in get_args(hint) for member in _union_members(part))
    return CLASSES_OF.get(hint, (hint,))


@cache
def field_hints(cls: type) -> dict[str, Any]:
    """Return the type hint of each field that the table of a part may have."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls) if (cls, field.name) not in SAID_ELSEWHERE}


class _Setting(NamedTuple):
    keys: list[str]
    value: Any

    @property
    def rank(self) -> tuple[int, bool]:
        """Sort a part before its fields, and its kind before the others."""
        return len(self.keys), self.keys[-1] != "kind"


def with_settings(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """Set fields of a recipe, each given as `path.to.field=value`.

    The order of the settings does not matter, but that of two settings of the same field does: the last one holds.
    A setting of a part's field brings the part into being. One of another `kind` starts it afresh, but for the
    learning rate of an optimizer, which stays. A number in the path counts the items of a list from 0 (one past the
    last adds an item).
    """
    parsed = sorted(map(_parsed, settings), key=lambda setting: setting.rank)
    changed: Recipe = _changed(Recipe, recipe, parsed, FieldPath("--set")) if parsed else recipe
    return changed


def _changed(hint: Any, value: Any, settings: Sequence[_Setting], path: FieldPath) -> Any:
    """Apply settings to the value of a field: of a part, only the fields that they name are made anew."""
    cls: type = type(value)
    settings = _with_new_names(settings, hint, cls, path)
    if cls not in field_type(hint).classes.values() or any(setting.keys[:1] in ([], ["kind"]) for setting in settings):
        plain = write(hint, value, path) if settings[0].keys else None
        for setting in settings:
            before = plain if isinstance(plain, dict) else {}
            plain = _with(plain, setting.keys, setting.value, path)
            if setting.keys == ["kind"]:
                plain = _kept(before, field_type(hint), setting.value) | plain
        return read(hint, plain, path)
    hints = field_hints(cls)
    by_field: dict[str, list[_Setting]] = {}
    for (name, *rest), given in settings:
        if name not in hints:
            raise unknown_field(cls, name, path)
        by_field.setdefault(name, []).append(_Setting(rest, given))
    fields = {name: _changed(hints[name], getattr(value, name), each, path.at(name)) for name, each in by_field.items()}
    return made(lambda: replace(value, **fields), path)


def _with_new_names(settings: Sequence[_Setting], hint: Any, cls: type, path: FieldPath) -> Sequence[_Setting]:
    """Give fields that are set by an old name the one that they have now, in the class that the part will have."""
    kind = next((given for keys, given in settings if keys == ["kind"]), None)
    now = field_type(hint).classes.get(kind, cls) if isinstance(kind, str) else cls
    renamed = list[_Setting]()
    for keys, given in settings:
        if keys:
            first, given = with_new_name(now, keys[0], given, path)
            keys = [first, *keys[1:]]
        renamed.append(_Setting(keys, given))
    return renamed


def _kept(before: Mapping[str, Any], field: FieldType, kind: object) -> dict[str, Any]:
    """Return what a part of another kind takes over, a learning rate: other fields may mean other things in both."""
    cls = field.classes.get(kind) if isinstance(kind, str) else None
    return {"lr": before["lr"]} if cls and "lr" in field_hints(cls) and "lr" in before else {}


_KEY = re.compile(r"""\s*+(?:"((?:[^"\\]|\\.)*+)"|'([^']*+)'|([^."'=]++))\s*+([.=])""")
"""One key of a path, as in TOML: in quotes where it holds a dot, and the dot or = after it.

It gives back nothing that it has read: a long text without = is refused in linear time."""


def _parsed(setting: str) -> _Setting:
    keys, text = [], setting
    while match := _KEY.match(text):
        basic, literal, bare, after = match.groups()
        keys.append(tomllib.loads(f'key = "{basic}"')["key"] if basic is not None else literal or bare.strip())
        text = text[match.end() :]
        if after == "=":
            return _Setting(keys, value_of_setting(text.strip()))
    raise RecipeError(
        f"--set {setting}: this sets nothing.",
        given=setting,
        expected="path.to.field=value, such as optimizer.lr.initial=0.1",
        hint="name the field, and give its value after =",
    )


def value_of_setting(text: str) -> Any:
    """Read the value of a setting: TOML, or text where it is none; `none` is None."""
    if text == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text


def _with(node: Any, keys: Sequence[str], value: Any, path: FieldPath) -> Any:
    """Return the plain value of a node with one value in it set; missing tables on the way are made."""
    if not keys:
        return value
    key, *rest = keys
    inner = path.at(key)
    if isinstance(node, list):
        items = [*node, None]
        if not key.isdecimal() or int(key) >= len(items):
            raise RecipeError(
                f"{inner}: there is no such item.",
                given=key,
                expected=f"a number from 0 to {len(node)}",
                hint="count the items from 0; one past the last adds an item",
            )
        items[int(key)] = _with(items[int(key)], rest, value, inner)
        return items if int(key) == len(node) else items[:-1]
    table = node if isinstance(node, dict) else {}
    if key == "kind" and table.get("kind", value) != value:
        table = {}
    return {**table, key: _with(table.get(key), rest, value, inner)}
