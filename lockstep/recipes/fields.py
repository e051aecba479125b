"""The parts of a recipe as plain tables, and back: every value is checked against the type of its field.

A part is a table of its fields. Where the field's name does not say its class, the table does, in `kind` (`"cosine"`
for `Cosine`), which is looked up among the classes that this field takes and nowhere else: a recipe cannot name code.
Fields that are None are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.errors import LockstepError, RecipeError
from lockstep.progress import Interval
from lockstep.recipes.hints import Accepted, accepted, fields_of, kind_of, required_of
from lockstep.recipes.recipe import SAID_ELSEWHERE
from lockstep.recipes.wording import Place, listed, shown, suggestion


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
        hint=suggestion(kind, kinds) or f"set {place.at('kind').path}",
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
        hint=f"set {elsewhere} instead" if elsewhere else suggestion(name, known) or "remove it",
    )


def _unfit(field: Accepted, value: object, place: Place) -> RecipeError:
    return RecipeError(
        f"{place}: this value does not fit.",
        given=shown(value),
        expected=str(field),
        hint=suggestion(value, field.words) or "give such a value (text in quotes, numbers and true or false without)",
    )
