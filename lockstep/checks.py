"""Checks of values: declared with the fields of a dataclass, or made of one argument by a function.

    @dataclass(frozen=True)
    class Blur(Checked):
        radius: PositiveFloat
        p: Probability = 0.5
        edge: Literal["zero", "repeat"] = "zero"
        decay: Annotated[float, Range(gt=0, lt=1), Hint("give a decay such as 0.9")] | None = None

A `Checked` dataclass refuses values that its annotations do not allow: of bool, int, float, str and Literal, each also
in a tuple or beside None, and of other classes that have a `Hint`. A function `(name, value)` in the annotation checks
what these words cannot say. Relations between fields are checked in a `__post_init__`, which calls that of `Checked`
first. `check_value("size", size, PositiveInt)` makes the same check of an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from lockstep.errors import InputError, InputErrors

Check = Callable[[str, Any], object]
"""Raises an InputError about the value, in which it has the name."""


class Checked:
    """A dataclass whose fields are checked by their annotations."""

    def __post_init__(self) -> None:
        kind: type = type(self)
        for name, check in _checks_of(kind):
            check(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers a field takes: greater than `gt`, at least `ge`, less than `lt`, at most `le`."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    finite: bool = True

    def __contains__(self, number: float) -> bool:
        return (
            (self.gt is None or number > self.gt)
            and (self.ge is None or number >= self.ge)
            and (self.lt is None or number < self.lt)
            and (self.le is None or number <= self.le)
            and (not self.finite or -math.inf < number < math.inf)
        )

    def text(self, kind: type = float) -> str:
        """The range in words, such as `0 or more, below 1`; that whole numbers are finite goes without saying."""
        if self.ge is not None and self.le is not None:
            return f"from {_digits(self.ge)} to {_digits(self.le)}"
        words = [
            f"above {_digits(self.gt)}" if self.gt is not None else "",
            f"{_digits(self.ge)} or more" if self.ge is not None else "",
            f"below {_digits(self.lt)}" if self.lt is not None else "",
            f"at most {_digits(self.le)}" if self.le is not None else "",
            "finite" if self.finite and kind is float and self.lt is None and self.le is None else "",
        ]
        return ", ".join(filter(None, words))


def _digits(number: float) -> str:
    """A number as short as it goes: a large power of two as such."""
    if isinstance(number, int) and number >= 1 << 20 and not number & (number - 1):
        return f"2**{number.bit_length() - 1}"
    return str(number) if isinstance(number, int) else f"{number:g}"


@dataclass(frozen=True)
class OneOf:
    """The words a field takes, where they stand in a table and not in a Literal."""

    choices: tuple[str, ...]

    def __call__(self, name: str, value: object) -> None:
        """Refuse any other."""
        check_one_of(name, value, self.choices)


@dataclass(frozen=True)
class Hint:
    """The hint that every error about a field gives."""

    text: str


PositiveInt = Annotated[int, Range(ge=1)]
NonNegativeInt = Annotated[int, Range(ge=0)]
Count = Annotated[int, Range(ge=0, lt=1 << 62)]
"""A number of steps or examples that is read from a file: sums with it stay below 64 bits."""
PositiveFloat = Annotated[float, Range(gt=0)]
NonNegativeFloat = Annotated[float, Range(ge=0)]
FiniteFloat = Annotated[float, Range()]
Probability = Annotated[float, Range(ge=0, le=1)]
Fraction = Annotated[float, Range(ge=0, lt=1)]
Decay = Annotated[float, Range(gt=0, lt=1)]

_ANY = Range(finite=False)
_KINDS: Mapping[type, str] = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}


def check_value(name: str, value: Any, annotation: Any) -> None:
    """Refuse an argument that the annotation does not allow."""
    check = _check_of(annotation)
    if check:
        check(name, value)


@cache
def _checks_of(cls: type) -> tuple[tuple[str, Check], ...]:
    hints = get_type_hints(cls, include_extras=True)
    checks = [(field.name, _check_of(hints[field.name])) for field in fields(cls)]
    return tuple((name, check) for name, check in checks if check)


@cache
def _check_of(annotation: Any, bounds: Range = _ANY, hint: str | None = None) -> Check | None:
    """The check that an annotation asks for, if any."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        marks = arguments[1:]
        bounds = next((mark for mark in marks if isinstance(mark, Range)), bounds)
        hint = next((mark.text for mark in marks if isinstance(mark, Hint)), hint)
        checks: list[Check | None] = [_check_of(arguments[0], bounds, hint), *filter(callable, marks)]
        return _all_of([check for check in checks if check])
    if origin in (Union, UnionType):
        some = [each for each in arguments if each is not NoneType]
        check = _check_of(some[0], bounds, hint) if len(some) == 1 else None
        return partial(_check_optional, check) if check else None
    if origin is Literal:
        return partial(check_one_of, choices=arguments, hint=hint)
    if origin in (tuple, Sequence):
        item = _check_of(arguments[0], bounds, hint)
        length = len(arguments) if origin is tuple and arguments[-1] is not Ellipsis else None
        return partial(_check_items, item, length, hint) if item else None
    if annotation in (int, float):
        return partial(_check_number, annotation, bounds, hint)
    if annotation in (bool, str):
        return partial(_check_plain, annotation, hint)
    if isinstance(annotation, type) and hint:
        return partial(check_type, kind=annotation, expected=f"a {annotation.__name__}", hint=hint)
    return None


def _all_of(checks: Sequence[Check]) -> Check | None:
    def check_all_of(name: str, value: Any) -> None:
        for check in checks:
            check(name, value)

    return check_all_of if len(checks) > 1 else checks[0] if checks else None


def _check_optional(check: Check, name: str, value: Any) -> None:
    if value is not None:
        check(name, value)


def _check_items(check: Check, length: int | None, hint: str | None, name: str, values: Any) -> None:
    if not isinstance(values, list | tuple):
        raise wrong_type(name, values, expected="a list", hint=hint or f"write {name}=({values!r},)")
    if length is not None and len(values) != length:
        raise InputError(
            f"{name} is of the wrong length.",
            given=f"{name}={values}",
            expected=f"{length} values",
            hint=hint or f"give {name} {length} values",
        )
    for index, value in enumerate(values):
        check(f"{name}[{index}]", value)


def _check_plain(kind: type, hint: str | None, name: str, value: Any) -> None:
    usual = f"write {name}=True, or leave it out" if kind is bool else f'write {name}="..."'
    check_type(name, value, kind, expected=_KINDS[kind], hint=hint or usual)


def _check_number(kind: type, bounds: Range, hint: str | None, name: str, value: Any) -> None:
    if not isinstance(value, int if kind is int else (int, float)) or isinstance(value, bool):
        raise wrong_type(name, value, expected=_KINDS[kind], hint=hint or f"give {name} as {_KINDS[kind]}")
    if value not in bounds:
        raise InputError(
            f"{name} is out of range.",
            given=f"{name}={value}",
            expected=bounds.text(kind),
            hint=hint or f"give {name} a value in this range",
        )


def ordered(name: str, values: Any) -> None:
    """Refuse a tuple, such as the least and the most of something, with a value less than the one before."""
    if any(second < first for first, second in pairwise(values)):
        raise InputError(
            f"{name} is out of range.",
            given=f"{name}={values}",
            expected="the least, then the most",
            hint=f"give {name}=(least, most)",
        )


def check_least_and_most(of: object, least: str, most: str) -> None:
    """Refuse a value of which the first of two fields, such as min_area and max_area, is larger than the second."""
    low, high = getattr(of, least), getattr(of, most)
    if low > high:
        raise InputError(
            f"{least} is larger than {most}.",
            given=f"{least}={low}, {most}={high}",
            expected="the least, and the most",
            hint="exchange them",
        )


def check_one_of(name: str, value: object, choices: Sequence[object], hint: str | None = None) -> None:
    """Refuse a word that is none of the choices."""
    if value not in choices:
        raise InputError(
            f"{name} cannot be {value!r}.",
            given=f"{name}={value!r}",
            expected=" or ".join(map(repr, choices)),
            hint=hint or "give one of these",
        )


def check_even_split(batch_size: int, num_towers: int) -> None:
    """Refuse a batch that cannot be split evenly over the towers."""
    if batch_size % num_towers:
        below = batch_size - batch_size % num_towers
        raise InputError(
            "The batch cannot be split evenly over the towers.",
            given=f"batch_size={batch_size} over {num_towers} towers",
            expected=f"a batch size that {num_towers} divides",
            hint=f"set batch_size to {f'{below} or ' if below else ''}{below + num_towers}, or change the towers",
        )


def plain(value: Any) -> Any:
    """A number of numpy's or torch's, without dimensions, as Python's own; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def check_type(name: str, value: object, kind: type | tuple[type, ...], *, expected: str, hint: str) -> None:
    """Refuse a value of another type. True and False are of type bool alone, and no numbers."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise wrong_type(name, value, expected=expected, hint=hint)


def check_all(name: str, values: object, kind: Any, *, hint: str) -> None:
    """Refuse what is no list, and items of another type than `kind`."""
    if not isinstance(values, list | tuple):
        raise wrong_type(name, values, expected="a list", hint=hint)
    for index, value in enumerate(values):
        if not isinstance(value, kind) or isinstance(value, type):
            raise wrong_type(f"{name}[{index}]", value, expected="a value that belongs there", hint=hint)


def wrong_type(name: str, value: object, *, expected: str, hint: str) -> InputError:
    """The error for an argument of the wrong type, where more than its class decides."""
    given = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    return InputError(f"{name} is of the wrong type.", given=f"{name} is {given}", expected=expected, hint=hint)


def check_together(checks: Iterable[Callable[[], object]]) -> None:
    """Call all checks, and raise the errors of input that they raise as one: all can be mended at once.

    Raises:
        InputErrors: several checks have failed, in different words; of one, its own error.
    """
    errors: dict[str, InputError] = {}
    for check in checks:
        try:
            check()
        except InputError as error:
            found = error.errors if isinstance(error, InputErrors) else [error]
            errors |= {str(each): each for each in found}
    if errors:
        first, *others = errors.values()
        raise InputErrors([first, *others]) if others else first
