"""Changes to a recipe in words, as `--set` gives them: `optimizer.lr.initial=0.1`.

The value is TOML, or text where it is not. `none` is no value at all: `average=none`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from typing import Any, NamedTuple

from lockstep.errors import RecipeError
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import Place, read, write


class _Setting(NamedTuple):
    keys: list[str]
    value: Any


def with_settings(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """The recipe with these fields set, each given as `path.to.field=value`.

    The order of the settings does not matter, but that of two settings of the same field does: the last one holds.
    A setting of a part's field brings the part into being, one of another `kind` starts it afresh, and a number in
    the path counts the items of a list from 0 (one past the last adds an item).

    Raises:
        RecipeError: a setting has no `=`, or makes no recipe; the message names the field.
    """
    place = Place("--set")
    plain = write(Recipe, recipe, Place(f"recipe {recipe.name}"))
    for setting in sorted(map(_parsed, settings), key=_rank):
        plain = _with(plain, setting.keys, setting.value, place)
    changed: Recipe = read(Recipe, plain, place)
    return changed


_KEY = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([^."'=]+?))\s*([.=])""")
"""One key of a path, as in TOML: in quotes where it holds a dot, and the dot or = after it."""


def _parsed(setting: str) -> _Setting:
    keys, text = [], setting
    while match := _KEY.match(text):
        basic, literal, bare, after = match.groups()
        keys.append(tomllib.loads(f'key = "{basic}"')["key"] if basic is not None else literal or bare)
        text = text[match.end() :]
        if after == "=":
            break
    else:
        raise RecipeError(
            f"--set {setting}: this sets nothing.",
            given=setting,
            expected="path.to.field=value, such as optimizer.lr.initial=0.1",
            hint="name the field, and give its value after =",
        )
    return _Setting(keys, _value(text.strip()))


def _value(text: str) -> Any:
    if text == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text


def _rank(setting: _Setting) -> tuple[int, bool]:
    """A part comes before its fields, and its kind is the first of them."""
    return len(setting.keys), setting.keys[-1] != "kind"


def _with(node: Any, keys: Sequence[str], value: Any, place: Place) -> Any:
    """The plain value with what stands at these keys replaced."""
    if not keys:
        return value
    key, *rest = keys
    inner = place.at(key)
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
