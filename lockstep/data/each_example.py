"""Augmentations made of a user's function of one example.

The numbers drawn for an example must be a function of the seed and its position in the stream, in whatever process it
is read. So a function gets its random numbers as an argument (`EachExample`). One that was written for other trainers
draws from the global generators of the process: these are seeded for each example, and restored (`Seeded`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lockstep.checks import check_type
from lockstep.data.seeding import restore_global_generators, seed_global_generators
from lockstep.errors import DataError, InputError, LockstepError
from lockstep.images.decode import EncodedImage
from lockstep.ragged import Ragged
from lockstep.randomness import Draws
from lockstep.readers.reader import Collation

Fields = dict[str, Any]


class ExampleDraws:
    """Random numbers of one example: a hash of (seed, position, column)."""

    def __init__(self, seed: int, position: int) -> None:
        self._draws = Draws(seed, np.array([position]))

    def uniform(self, column: str, low: float = 0.0, high: float = 1.0) -> float:
        """Draw a number in [low, high), another one for each column."""
        return low + (high - low) * float(self._draws.uniform(column)[0])

    def integer(self, column: str, low: int, high: int) -> int:
        """Draw a whole number in [low, high), another one for each column."""
        return int(self._draws.integers(column, low, high)[0])


@dataclass(frozen=True)
class EachExample:
    """An augmentation made of a function of one example and its random numbers.

    `function(example, draws)` gets the fields of one example by name and an `ExampleDraws`, and returns the new fields
    of the example. Tensors, arrays and numbers are stacked; other values become a list. A `Ragged` field stays one:
    each example may return another number of values.
    """

    function: Callable[[Fields, ExampleDraws], Mapping[str, Any]]

    def __post_init__(self) -> None:
        _check_function("function", self.function)

    def __call__(self, batch: Fields, draws: Draws) -> Fields:
        """Call the function for each example, and stack the results."""
        examples = [
            _made(self.function, position, example, ExampleDraws(draws.seed, position))
            for example, position in zip(_examples(batch), draws.positions.tolist(), strict=True)
        ]
        return _collated(examples, batch, draws, Collation(_name(self.function), "the function"))


@dataclass(frozen=True)
class Seeded:
    """An augmentation made of a transform that draws from the global random generators of the process.

    The transform gets the field of one example and returns its new value; an encoded image is decoded first, to uint8
    of shape (3, height, width). Before each example `random`, `numpy.random` and torch's generator are seeded by a hash
    of the seed and the position of the example, and after the batch they are restored: the same position gives the same
    result, in the trainer and in loader processes. Threads share the generators, so a loader with threads refuses it.
    """

    transform: Callable[[Any], Any]
    field: str = "image"
    draws_globally: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_function("transform", self.transform)

    def __call__(self, batch: Fields, draws: Draws) -> Fields:
        """Transform the field of each example."""
        if self.field not in batch:
            raise InputError(
                f"{_name(self.transform)} finds no field {self.field!r}.",
                given=f"the fields {', '.join(batch)}",
                expected=f"one called {self.field!r}",
                hint="name the field: Seeded(transform, field=...)",
            )
        with restore_global_generators():
            values = [
                self._transformed(value, draws.seed, position)
                for value, position in zip(batch[self.field], draws.positions.tolist(), strict=True)
            ]
        rows = [{self.field: value} for value in values]
        return {**batch, **_collated(rows, batch, draws, Collation(_name(self.transform), "the transform"))}

    def _transformed(self, value: Any, seed: int, position: int) -> Any:
        whole = value.decode() if isinstance(value, EncodedImage) else value
        seed_global_generators(seed, position)
        return _made(self.transform, position, whole)


def _made(function: Callable[..., Any], position: int, *arguments: Any) -> Any:
    """Call a user's function for one example; an error of its own becomes a DataError that names the position."""
    try:
        return function(*arguments)
    except LockstepError:
        raise
    except Exception as error:
        raise DataError(
            f"{_name(function)} fails for the example at position {position} of the stream.",
            given=f"{type(error).__name__}: {error}",
            expected="an example with its fields",
            hint="fix the function; `lockstep show` shows what stands at a position",
        ) from error


def _examples(batch: Fields) -> Iterator[Fields]:
    length = len(next(iter(batch.values()), ()))
    return ({name: values[row] for name, values in batch.items()} for row in range(length))


def _collated(examples: Sequence[Any], batch: Fields, draws: Draws, collation: Collation) -> Fields:
    """Collate what a user's function has made of the examples of a batch; fields that were ragged stay so."""
    ragged = [name for name, values in batch.items() if isinstance(values, Ragged)]
    return collation.batch_of(examples, draws.positions.astype(np.int64), ragged)


def _check_function(name: str, given: object) -> None:
    check_type(name, given, Callable, expected="something to call", hint=f"give {name} a function")  # type: ignore[arg-type]


def _name(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
