"""Messages of the text format as dataclasses, and a report of what became of each of their fields.

A message's field goes to the field of its name, checked by its type hint; a hint of `Field` takes it as it is. A hint
that is a union of classes stands for a message whose one field names the class: `regularizer { l2_regularizer {} }`
(a `FixedShapeResizerConfig` is named without the last word).
Fields that no class has are reported, never dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

from lockstep.checks import check_together
from lockstep.errors import InputError, InputErrors
from lockstep.listing import did_you_mean
from lockstep.recipes.toml import FieldType, field_type
from lockstep.records.text_format import Field, Place, Word, quoted

Fate = Literal["mapped", "no effect", "not mapped"]
Part = TypeVar("Part")
Key = TypeVar("Key")

_LONGEST_PATH, _LONGEST_VALUE = 1000, 100
_WHOLE = re.compile(r"[+-]?((0|[1-9][0-9]{0,9})(\.0*)?|0[xX][0-9a-fA-F]{1,8})")  # 010 is octal for protocol buffers: 8
_TRUTH = {"true": True, "True": True, "t": True, "1": True, "false": False, "False": False, "f": False, "0": False}


@dataclass(frozen=True)
class FieldOutcome:
    """What becomes of a field: it is mapped to a field of the recipe, or else is left out for a reason."""

    fate: Fate
    text: str
    """The path of the recipe's field, or why there is none."""


def to(path: str) -> FieldOutcome:
    """Say that a field becomes this one of the recipe."""
    return FieldOutcome("mapped", path)


def no_effect(why: str) -> FieldOutcome:
    """Say why a field has no effect here."""
    return FieldOutcome("no effect", why)


def not_mapped(why: str) -> FieldOutcome:
    """Say why a field that would have an effect is left out."""
    return FieldOutcome("not mapped", why)


class Row(NamedTuple):
    """A field of the file, in the report."""

    place: Place
    field: str
    """Its path in the file."""
    value: str
    outcome: FieldOutcome

    @property
    def within(self) -> str:
        """The path of the message that it is in."""
        return self.field.rpartition(".")[0]

    @property
    def name(self) -> str:
        """Its name in that message."""
        return self.field.rpartition(".")[2]


class At(NamedTuple):
    """Where a message stands in its file, and what its fields become."""

    path: str
    place: Place
    outcome: FieldOutcome

    def inner(self, field: Field, outcome: FieldOutcome | None = None, *, part: str | None = None) -> At:
        """Return the same of a message in it: its fields become those of the same names, in the part of that name."""
        if outcome is None:
            outcome = self.outcome
            if outcome.fate == "mapped" and part != "":
                outcome = to(f"{outcome.text}.{part or field.name}")
        return At(f"{self.path}.{field.name}" if self.path else field.name, field.value_place, outcome)


class MessageReader:
    """Reads the messages of the file `source`.

    `elsewhere` has by class the fields of its message that it has no fields for, and what becomes of them.
    """

    def __init__(self, source: str, elsewhere: Mapping[type, Mapping[str, FieldOutcome]]) -> None:
        self._source, self._elsewhere = source, elsewhere
        self._rows: list[Row] = []

    @property
    def rows(self) -> list[Row]:
        """What became of all fields that have been read, in the order of the file."""
        return sorted(self._rows, key=lambda row: row.place)

    def read(self, cls: type[Part], message: Sequence[Field], at: At) -> Part:
        """Make an object of a message.

        Raises:
            InputError: InputErrors where several fields cannot be read; all name their places.
        """
        values: dict[str, Any] = {}
        check_together(partial(self._take, cls, values, field, at) for field in message)
        for each in fields(cls):  # type: ignore[arg-type]
            if each.name not in values and each.default is MISSING and each.default_factory is MISSING:
                raise self.wrong(
                    at.path or "the file", at.place, f"no field {each.name}", f"the field {each.name}", "add it"
                )
        try:
            return cls(**values)
        except InputErrors:
            raise
        except InputError as error:
            place = next((f.value_place for f in message if str(error.given).startswith(f"{f.name}=")), at.place)
            what = f"{self._source}, {place}, in {at.path}: {error.what}"
            raise InputError(what, given=error.given, expected=error.expected, hint=error.hint) from error

    def read_field(self, cls: type[Part], field: Field, at: At) -> Part:
        """Make an object of a field that is a message; an empty one is reported by itself."""
        message = self.message(field, at)
        if not message:
            self._report(field, at)
        return self.read(cls, message, at)

    def message(self, field: Field, at: At) -> list[Field]:
        """Return the fields of a message; refuse another value."""
        if isinstance(field.value, list):
            return field.value
        raise self.wrong(at.path, at.place, _shown(field.value), "a message in braces", "write { ... }")

    def leave(self, message: Sequence[Field], at: At) -> None:
        """Report fields that no object is made of, with what is in them, down to where nobody would look."""
        left = [(field, at.inner(field, at.outcome)) for field in message]
        while left:
            field, here = left.pop()
            if isinstance(field.value, list) and field.value and len(here.path) < _LONGEST_PATH:
                left += [(inner, here.inner(inner, at.outcome)) for inner in field.value]
            else:
                self._report(field, here)

    def revise(self, path: str, outcome: FieldOutcome, value: str | None = None) -> None:
        """Report another outcome of the fields with this path, or of those with this value as it is written."""
        self._rows = [
            row._replace(outcome=outcome) if row.field == path and value in (None, row.value) else row
            for row in self._rows
        ]

    def wrong(self, path: str, place: Place, given: str, expected: str, hint: str) -> InputError:
        """Make the error of a field that cannot be read."""
        what = f"{self._source}, {place}: {path} cannot be used."
        return InputError(what, given=given[:_LONGEST_VALUE], expected=expected, hint=hint)

    def _take(self, cls: type, values: dict[str, Any], field: Field, at: At) -> None:
        """Put the value of a field of a message among those of its object."""
        hints = _hints(cls)
        if field.name not in hints:
            known = self._elsewhere.get(cls, {})
            unknown = not_mapped(f"there is no such field. {did_you_mean(field.name, [*hints, *known])}".rstrip())
            self.leave([field], at._replace(outcome=known.get(field.name, unknown)))
            return
        hint = hints[field.name]
        kind = field_type(hint.type)
        if kind.item is Field:  # a message that the caller reads
            self.message(field, at.inner(field))
            values[field.name] = (*values.get(field.name, ()), field)
        elif kind.item is not None:
            inner = at.inner(field, hint.outcome, part=f"{field.name}.{len(values.get(field.name, ()))}")
            values[field.name] = (*values.get(field.name, ()), self._value(field_type(kind.item), field, inner))
        elif field.name in values:
            raise self.wrong(at.inner(field).path, field.place, "another value", "one value", "leave out all but one")
        else:
            values[field.name] = self._value(kind, field, at.inner(field, hint.outcome))

    def _value(self, kind: FieldType, field: Field, at: At) -> Any:
        if not kind.classes:
            value = _scalar(kind, field.value)
            if value is None:
                raise self.wrong(at.path, at.place, _shown(field.value), _expected(kind), _mend(kind, field.value))
            self._report(field, at)
            return value
        if len(kind.classes) > 1:
            return self._one_of(kind, self.message(field, at), at)
        (cls,) = kind.classes.values()
        return self.read_field(cls, field, at)

    def _one_of(self, kind: FieldType, message: list[Field], at: At) -> Any:
        classes = {name.removesuffix("_config"): cls for name, cls in kind.classes.items()}
        if len(message) != 1 or message[0].name not in classes:
            given = ", ".join(field.name for field in message) or "none"
            place = message[0].place if message else at.place
            hint = (len(message) == 1 and did_you_mean(given, classes)) or "name one of these"
            raise self.wrong(at.path, place, given, f"one of {', '.join(classes)}", hint)
        (field,) = message
        return self.read_field(classes[field.name], field, at.inner(field, part=""))

    def _report(self, field: Field, at: At) -> None:
        self._rows.append(Row(field.place, at.path, _shown(field.value), at.outcome))


def made_together(makers: Mapping[Key, Callable[[], Any]]) -> dict[Key, Any]:
    """Call all makers, and return what they make; the errors of several are raised as one."""
    made: dict[Key, Any] = {}

    def make(key: Key, maker: Callable[[], Any]) -> None:
        made[key] = maker()

    check_together(partial(make, key, maker) for key, maker in makers.items())
    return made


class _Hinted(NamedTuple):
    type: Any
    outcome: FieldOutcome | None


@cache
def _hints(cls: type) -> dict[str, _Hinted]:
    """Return the type of each field of a class, and what the class says that becomes of it."""
    plain, marked = get_type_hints(cls), get_type_hints(cls, include_extras=True)
    found: dict[str, _Hinted] = {}
    for each in fields(cls):
        outcomes = [mark for mark in get_args(marked[each.name]) if isinstance(mark, FieldOutcome)]
        found[each.name] = _Hinted(plain[each.name], outcomes[0] if outcomes else None)
    return found


def _scalar(kind: FieldType, value: object) -> Any:
    """The value of a word or text as one of these types; None if it has none of them."""
    if isinstance(value, str):
        return value if str in kind.scalars or value in kind.words else None  # a choice of texts, or an enumeration
    if not isinstance(value, Word):
        return None
    word = value.text
    if kind.words:
        return word.lower() if word == word.upper() and word.lower() in kind.words else None
    if bool in kind.scalars:
        return _TRUTH.get(word)
    if int in kind.scalars:
        number = int(word.partition(".")[0], 16 if "x" in word.lower() else 10) if _WHOLE.fullmatch(word) else None
        return number if number is not None and -(2**31) <= number < 2**32 else None
    return _float(word) if float in kind.scalars else None


def _float(word: str) -> float | None:
    try:
        number = float(word.removesuffix("f").removesuffix("F"))
    except ValueError:
        return None
    return number if math.isfinite(number) and word.isascii() and "_" not in word else None


def _expected(kind: FieldType) -> str:
    if kind.words:
        return f"one of {', '.join(word.upper() for word in kind.words)}"
    numbers = {bool: "true or false", int: "a whole number of 32 bits", float: "a finite number", str: "text in quotes"}
    return next(words for scalar, words in numbers.items() if scalar in kind.scalars)


def _mend(kind: FieldType, value: object) -> str:
    words = [word.upper() for word in kind.words]
    return (isinstance(value, Word) and did_you_mean(value.text, words)) or "correct it there"


def _shown(value: object) -> str:
    if isinstance(value, Word):
        return value.text
    return quoted(value) if isinstance(value, str) else "{ ... }" if value else "{}"
