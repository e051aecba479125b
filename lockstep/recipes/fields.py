"""The fields of recipes in words: what each means, what it takes, its default, and which shipped recipes set it.

A field's meaning is the docstring below it in its class, or its line under "Args:" in that of the class; its range and
choices are those of its annotation. Nothing is said here.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import pairwise
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import tomli_w

from lockstep.checks import OneOf, Range
from lockstep.errors import RecipeError
from lockstep.inline_toml import kind_name
from lockstep.listing import did_you_mean, shorten
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find, names
from lockstep.recipes.toml import FieldPath, as_toml, escaped_toml, field_hints, field_type, to_tables, write
from lockstep.types import Interval, StepRange

_WIDTH = 100
REQUIRED = object()
"""The default of a field that has none."""


class RecipeField(NamedTuple):
    """A field of a part of recipes."""

    cls: type
    name: str

    @property
    def hint(self) -> Any:
        """Its type hint, without annotations."""
        return field_hints(self.cls)[self.name]

    @property
    def meaning(self) -> str:
        """What it means, on one line; empty if its class does not say."""
        return _meanings(self.cls).get(self.name, "")

    @property
    def default(self) -> Any:
        """Its default; `REQUIRED` if it has none."""
        return _defaults(self.cls)[self.name]

    @property
    def shown_default(self) -> str:
        """Its default as TOML has it."""
        return "none, it has to be set" if self.default is REQUIRED else self.shown(self.default)

    @property
    def bounds(self) -> Range | None:
        """The range of its numbers, or of those in its list."""
        return next((mark for mark in self._marks if isinstance(mark, Range)), None)

    @property
    def words(self) -> Sequence[str]:
        """The words that it takes, or its list."""
        of_marks = [mark.choices for mark in self._marks if isinstance(mark, OneOf)]
        item = field_type(self.hint).item
        return of_marks[0] if of_marks else field_type(self.hint if item is None else item).words

    @property
    def parts(self) -> Sequence[type]:
        """The classes of the parts that it holds: itself, in its list or in its table by pattern."""
        return _parts_of(self.hint)

    @property
    def takes(self) -> str:
        """What it takes, in words: its type, range and choices."""
        kind = field_type(self.hint)
        text = (
            str(kind)
            if kind.item is None
            else str(kind).replace("a list", f"a list, each item {field_type(kind.item)}")
        )
        if self.bounds and (bounds := self.bounds.text().removesuffix("finite").rstrip(", ")):
            text += f" ({bounds})"
        if self.words and self.words[0] not in text:
            text += f": one of {', '.join(map(as_toml, self.words))}"
        return text + (", or left out" if NoneType in kind.scalars else "")

    def shown(self, value: Any) -> str:
        """One of its values as TOML has it; a part by its kind."""
        if value is None:
            return "left out"
        if type(value) in self.parts:
            return f"kind {as_toml(kind_name(type(value)))}"
        return as_toml(write(self.hint, value, FieldPath("", self.name)))

    def example(self, path: str) -> str:
        """A setting of it for the command line."""
        if self.parts and {*field_type(self.hint).scalars} <= {NoneType}:
            return f"--set {path}.kind={kind_name(self.parts[0])}"
        default = None if self.default is REQUIRED else self.default
        if bool in field_type(self.hint).scalars:
            value: Any = not default
        elif field_type(self.hint).words:  # another word; --set takes none for no value
            value = next(word for word in self.words if word not in (default, "none"))
        else:
            value = default if default not in (None, "", ()) else _usual(self)
        text = (
            str(value)
            if isinstance(value, str | Interval | StepRange)
            else as_toml(write(self.hint, value, FieldPath("", self.name)))
        )
        setting = f"{path}={text}"
        return f"--set {shlex.quote(setting)}"

    @property
    def _marks(self) -> Sequence[Any]:
        return _marks_of(_hints(self.cls)[self.name])


@cache
def _hints(cls: type) -> Mapping[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _usual(field: RecipeField) -> Any:
    kind = field_type(field.hint)
    item = field_type(kind.item) if kind.item is not None else kind
    least = (field.bounds and (field.bounds.ge or (field.bounds.gt or 0) + 1)) or 1
    share = 0.1 if field.bounds is None or 0.1 in field.bounds else float(least)
    usual = {int: int(least), float: share, Interval: "20 steps", StepRange: "100:110", str: "TEXT"}
    if field.words:
        value: Any = field.words[0]
    else:
        value = next((usual[scalar] for scalar in item.scalars if scalar in usual), "my_net:build")
    return value if item is kind else (value,)


@cache
def _meanings(cls: type) -> Mapping[str, str]:
    """What the fields of a class mean, from its source and from those of its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("lockstep."):
            continue
        arguments = inspect.cleandoc(base.__doc__ or "").partition("Args:")[2]
        for name, text in re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", arguments, re.M):
            found[name] = " ".join(text.split())
        body = _bodies(base.__module__).get(base.__name__, [])
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[field.target.id] = " ".join(str(text.value.value).split())  # type: ignore[union-attr]
    return {name: text[0].upper() + text[1:] for name, text in found.items()}


@cache
def _bodies(module: str) -> Mapping[str, list[ast.stmt]]:
    """The bodies of a module's classes by name."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


@cache
def _defaults(cls: type) -> Mapping[str, Any]:
    made = {
        each.name: each.default if each.default_factory is MISSING else each.default_factory() for each in fields(cls)
    }
    return {name: REQUIRED if default is MISSING else default for name, default in made.items()}


def _marks_of(annotation: Any) -> Sequence[Any]:
    """The marks of an annotation and of what it is made of, the outer first."""
    marks = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    inner = [arg for arg in get_args(annotation) if arg not in marks]
    return [*marks, *(mark for each in inner for mark in _marks_of(each))]


def _parts_of(hint: Any) -> list[type]:
    kind = field_type(hint)
    inner = [each for each in (kind.item, kind.entry) if each is not None]
    return [*kind.classes.values(), *(part for each in inner for part in _parts_of(each))]


def what_it_is(cls: type) -> str:
    """Say on one line what a part is: the first paragraph of its class's docstring."""
    return " ".join((cls.__doc__ or "").strip().partition("\n\n")[0].split())


def fields_of(cls: type) -> list[RecipeField]:
    """The fields that the table of a part may have."""
    return [RecipeField(cls, name) for name in field_hints(cls)]


@cache
def all_fields() -> Mapping[str, Sequence[RecipeField]]:
    """All fields by the shortest of their paths, without numbers of items: parts of several kinds may share a path."""
    found: dict[str, list[RecipeField]] = {}
    seen: set[type] = {Recipe}
    waiting: list[tuple[str, type]] = [("", Recipe)]
    for prefix, cls in waiting:
        for field in fields_of(cls):
            found.setdefault(prefix + field.name, []).append(field)
            new = [part for part in field.parts if part not in seen]
            seen.update(new)
            waiting += [(f"{prefix}{field.name}.", part) for part in new]
    return found


class FieldsFound(NamedTuple):
    """Where a path of `--set` leads to."""

    path: str
    """Without the kinds in it: as `--set` takes it."""
    fields: Sequence[RecipeField]
    """The field, once for each kind of part that has it; none where the last word is a kind."""
    parts: Sequence[type]
    """The classes of the parts that it may hold."""


def fields_at(path: str) -> FieldsFound:
    """Find the field that a path of `--set` leads to.

    A word may be a kind, which chooses among several: `optimizer.adam.betas`. Numbers of items, and patterns, may be
    left out.

    Raises:
        RecipeError: there is no such field.
    """
    parts: Sequence[type] = [Recipe]
    here: list[RecipeField] = []
    plain = ""
    has_items = is_pattern = False
    for word in _words(path):
        found = [RecipeField(part, word) for part in parts if word in field_hints(part)]
        of_kind = [part for part in parts if kind_name(part) == word]
        if found:
            here, parts = found, list({part: None for field in found for part in field.parts})
            kinds = [field_type(field.hint) for field in found]
            has_items = any(kind.item is not None for kind in kinds)
            is_pattern = any(kind.entry is not None for kind in kinds)
        elif of_kind and plain:
            here, parts = [], of_kind
            continue
        elif not (is_pattern or (has_items and word.isdecimal())):
            raise _no_field(path, word, parts)
        else:
            is_pattern = False
        plain = _joined(plain, word)
    return FieldsFound(plain, here, parts)


def _words(path: str) -> list[str]:
    words = [(bare or quoted) for quoted, bare in re.findall(r"""["']([^"']*)["']|([^.]+)""", path)]
    if path and "" in re.sub(r"""["'][^"']*["']""", "quoted", path).split("."):
        raise RecipeError(
            f"{path!r} is no path to a field: it has an empty word.",
            given=path,
            expected="words with one point between two of them",
            hint=f"lockstep explain {'.'.join(words) or 'optimizer.lr'}",
        )
    return words or [path]


def _no_field(path: str, word: str, parts: Sequence[type]) -> RecipeError:
    known = list(dict.fromkeys(name for part in parts for name in field_hints(part)))
    elsewhere = [full for full in all_fields() if full.rpartition(".")[2] == word]
    hint = did_you_mean(word, known) or (f"did you mean {' or '.join(elsewhere[:3])}?" if elsewhere else "")
    return RecipeError(
        f"{path}: there is no such field in a recipe.",
        given=word,
        expected=f"one of {shorten(known, 8)}" if known else "the path before it, which leads to no part",
        hint=hint or "`lockstep explain` lists the parts",
    )


def set_by(path: str) -> Mapping[str, str]:
    """Return the value of a field in the shipped recipes that have another one than the default, by their names."""
    found = {name: _set_in(recipe, _words(path)) for name, recipe in _shipped().items()}
    return {name: shown for name, shown in found.items() if shown is not None}


@cache
def _shipped() -> Mapping[str, Recipe]:
    return {name: find(name) for name in names()}


def _set_in(value: Any, words: Sequence[str]) -> str | None:
    """Show the value that a recipe has at a path; None if it has none there, or the default."""
    field = None
    for word in words:
        cls: type = type(value)
        if isinstance(value, tuple) and word.isdecimal() and int(word) < len(value):
            value = value[int(word)]
        elif is_dataclass(cls) and word in field_hints(cls):
            field, value = RecipeField(cls, word), getattr(value, word)
        else:
            return None
    return field.shown(value) if field and value != field.default else None


def explained_toml(recipe: Recipe, *, everything: bool = False) -> str:
    """Write a recipe as TOML, each field below what it means and takes; it reads back as the same recipe.

    `everything` are also the fields that are as by default, and as comments those that are not set.
    """
    lines = [*_table(Recipe, recipe, to_tables(recipe), "", everything)]
    return escaped_toml("\n".join(lines).strip("\n") + "\n")


def _table(cls: type, part: Any, table: Mapping[str, Any], path: str, everything: bool) -> Iterator[str]:
    """The lines of a part's table: its kind, its plain fields, then the tables in it."""
    if "kind" in table:
        yield _line("kind", table["kind"])
    later: list[str] = []
    for field in fields_of(cls):
        value = getattr(part, field.name)
        if field.name not in table:
            if everything and value is None:
                yield from ("", *_comment(field), f"# {field.name} is left out")
        elif everything or field.default is REQUIRED or value != field.default:
            plain = table[field.name]
            if isinstance(plain, dict) or (isinstance(plain, list) and plain and isinstance(plain[0], dict)):
                later += [
                    "",
                    *_comment(field),
                    *_tables(field.hint, value, plain, _joined(path, field.name), everything),
                ]
            else:
                yield from ("", *_comment(field), _line(field.name, plain))
    yield from later


def _tables(hint: Any, value: Any, plain: Any, path: str, everything: bool) -> Iterator[str]:
    """The lines of a part, of a list of parts, or of a table by pattern, headings included."""
    if isinstance(plain, list):
        item = field_type(hint).item
        for index, each in enumerate(plain):
            yield from ([""] if index else []) + [f"[[{path}]]"]
            yield from _body(item, value[index], each, path, everything)
        return
    yield f"[{path}]"
    yield from _body(hint, value, plain, path, everything)


def _body(hint: Any, value: Any, plain: Mapping[str, Any], path: str, everything: bool) -> Iterator[str]:
    if type(value) in field_type(hint).classes.values():
        yield from _table(type(value), value, plain, path, everything)
        return
    entry = field_type(hint).entry
    for key, each in plain.items():
        if not isinstance(each, dict):
            yield _line(key, each)
    for key, each in plain.items():
        if isinstance(each, dict):
            yield from ("", *_tables(entry, value[key], each, _joined(path, key), everything))


def _comment(field: RecipeField) -> list[str]:
    is_plain_part = len(field.parts) == 1 and {*field_type(field.hint).scalars} <= {NoneType}
    text = field.meaning if is_plain_part else f"{field.meaning} Takes {field.takes}; default: {field.shown_default}."
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _line(key: str, plain: Any) -> str:
    return tomli_w.dumps({key: plain}).rstrip("\n")


def _joined(path: str, key: str) -> str:
    quoted = tomli_w.dumps({key: {}})[1:-2]
    return f"{path}.{quoted}" if path else quoted
