"""The JSON schema of recipes, by which editors complete TOML files, say what fields mean and mark what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

from lockstep.inline_toml import kind_name
from lockstep.recipes.code import Function
from lockstep.recipes.fields import REQUIRED, RecipeField, all_fields, fields_of, what_it_is
from lockstep.recipes.recipe import NEW_NAMES, Recipe
from lockstep.recipes.toml import FieldPath, field_type, write
from lockstep.types import Interval, StepRange

_TYPES: Mapping[type, Any] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    Interval: {"type": ["string", "integer"], "pattern": r"^\s*[0-9.eE+-]+\s*\w*\s*$"},
    StepRange: {"type": "string", "pattern": r"^\s*\d+\s*:\s*\d+\s*$"},
    Function: {"type": "string", "pattern": ":"},
}


def recipe_schema() -> dict[str, Any]:
    """Make the schema (draft 2020-12) of a recipe's file; relations between fields are beyond it."""
    parts = {part: None for found in all_fields().values() for field in found for part in field.parts}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Recipe of Lockstep",
        **_table(Recipe),
        "$defs": {part.__name__: _table(part) for part in parts},
    }


def _table(cls: type) -> dict[str, Any]:
    """The schema of a part's table, with `kind` or without; names of old are understood, and not offered."""
    named = fields_of(cls)
    old = {name: {"deprecated": True} for name in NEW_NAMES.get(cls, {})}
    kind = {} if cls is Recipe else {"kind": {"const": kind_name(cls)}}
    return {
        "type": "object",
        "description": what_it_is(cls),
        "properties": {**kind, **{field.name: _field(field) for field in named}, **old},
        "required": [field.name for field in named if field.default is REQUIRED],
        "additionalProperties": False,
    }


def _field(field: RecipeField) -> dict[str, Any]:
    default = None if field.default in (REQUIRED, None) else write(field.hint, field.default, FieldPath("", field.name))
    shown = {} if default is None else {"default": default}
    return {"description": field.meaning, **_takes(field.hint, field), **shown}


def _takes(hint: Any, field: RecipeField) -> dict[str, Any]:
    """The schema of what a type hint takes; ranges and choices are those of the field."""
    kind = field_type(hint)
    choices = [_scalar(scalar, field) for scalar in kind.scalars if scalar is not NoneType]
    if kind.words:
        choices.append({"enum": [*kind.words]})
    for part in kind.classes.values():
        choices.append(_part(part, is_one_of=len(kind.classes) > 1))
    if kind.item is not None:
        choices.append({"type": "array", "items": _takes(kind.item, field)})
    if kind.entry is not None:
        choices.append({"type": "object", "additionalProperties": _takes(kind.entry, field)})
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def _part(part: type, *, is_one_of: bool) -> dict[str, Any]:
    """A part by its definition; where several may stand, its kind is said."""
    reference = {"$ref": f"#/$defs/{part.__name__}"}
    return {**reference, "required": ["kind"]} if is_one_of else reference


def _scalar(scalar: type, field: RecipeField) -> dict[str, Any]:
    schema = dict(_TYPES[scalar])
    if scalar is str and field.words:
        schema["enum"] = [*field.words]
    if scalar in (int, float) and field.bounds:
        bounds = field.bounds
        limits = {
            "exclusiveMinimum": bounds.gt,
            "minimum": bounds.ge,
            "exclusiveMaximum": bounds.lt,
            "maximum": bounds.le,
        }
        schema |= {name: limit for name, limit in limits.items() if limit is not None}
    return schema
