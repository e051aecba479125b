"""Settings of the command line: `--set optimizer.lr.initial=0.1` changes one field of a recipe.

The value is TOML, or text where it is not. `none` is no value at all: `average=none`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lockstep.errors import RecipeError
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import FieldPath, FieldType, field_hints, field_type, made, read, unknown_field, write


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


def _kept(before: Mapping[str, Any], field: FieldType, kind: object) -> dict[str, Any]:
    """Return what a part of another kind takes over: the other fields of one name may mean other things in both."""
    cls = field.classes.get(kind) if isinstance(kind, str) else None
    return {name: before[name] for name in _KEPT if cls and name in field_hints(cls) and name in before}


_KEPT = ("lr",)

_KEY = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([^."'=]+?))\s*([.=])""")
"""One key of a path, as in TOML: in quotes where it holds a dot, and the dot or = after it."""


def _parsed(setting: str) -> _Setting:
    keys, text = [], setting
    while match := _KEY.match(text):
        basic, literal, bare, after = match.groups()
        keys.append(tomllib.loads(f'key = "{basic}"')["key"] if basic is not None else literal or bare)
        text = text[match.end() :]
        if after == "=":
            return _Setting(keys, _value(text.strip()))
    raise RecipeError(
        f"--set {setting}: this sets nothing.",
        given=setting,
        expected="path.to.field=value, such as optimizer.lr.initial=0.1",
        hint="name the field, and give its value after =",
    )


def _value(text: str) -> Any:
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
