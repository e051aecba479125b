"""From the place of a batch to its fields: rows read, augmented, and what cannot be read named or left out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lockstep.data.bad_examples import ChooseRows, check_budget
from lockstep.data.each_example import restore_global_generators, seed_global_generators
from lockstep.data.order import Int64s
from lockstep.data.rows import BatchRequest, Rows, RowsOf
from lockstep.errors import DataError, LockstepError
from lockstep.images.augment import turns
from lockstep.randomness import Draws
from lockstep.readers.reader import draws_globally
from lockstep.tracing import now_reading, timed

if TYPE_CHECKING:
    from lockstep.images.augment import Augment
    from lockstep.readers.reader import Reader


Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """An example that cannot be read, where it was due."""

    position: int
    index: int
    read_instead: int
    """The index of the example in its row."""
    reason: str


class ReadRows(NamedTuple):
    """What became of the rows of a batch."""

    fields: Fields
    bad: list[BadRow]


@dataclass
class SkipBad:
    """What may be left out."""

    choose: ChooseRows
    """Which rows are read, given what is bad."""
    budget: int
    """More different bad examples than this end the run; so nobody reads on for hours to find them all."""
    seen: set[int] = field(default_factory=set)
    """Examples that were bad before, by index: they are looked at alone first."""


class BatchReader:
    """Reads and augments the rows of a batch; wherever it runs, the same rows give the same fields.

    A DataError is an example's own fault if the example alone raises it too, at its position. Then the rows are chosen
    again without it there, until all of them can be read.

    Args:
        reader: where the examples come from.
        augment: what happens to them, in this order.
        seed: keys the draws of the augmentations.
        rows_of: the rows of a batch.
        leave: what may be left out; None raises what is wrong with an example.
    """

    def __init__(
        self, reader: Reader, augment: Sequence[Augment], seed: int, rows_of: RowsOf, leave: SkipBad | None = None
    ) -> None:
        self.reader = reader
        self._augment = list(zip(augment, turns(augment), strict=True))
        self._seed = seed
        self._rows_of = rows_of
        self._leave = leave

    def __call__(self, due: BatchRequest) -> ReadRows:
        """The fields of the batch that is due.

        Raises:
            LockstepError: something cannot be read or augmented, and may not be left out.
        """
        rows = self._rows_of(due)
        if self._leave is None:
            return ReadRows(self.fields_of(rows), [])
        return _Attempts(self, self._leave).read(rows)

    def names(self, due: BatchRequest) -> list[str]:
        """The names of the examples of the batch that is due."""
        return [self.reader.example_id(index) for index in self._rows_of(due).indices.tolist()]

    def fields_of(self, rows: Rows) -> Fields:
        """Some rows, read and augmented.

        Raises:
            LockstepError: something cannot be.
        """
        with timed("read"):
            fields = read_examples(self.reader, rows, self._seed)
        now_reading("")
        if self._augment:
            draws = Draws(self._seed, rows.positions)
            with timed("augment"):
                for augment, turn in self._augment:
                    fields = _checked(augment(fields, draws.again(turn)), len(rows), augment)
        return fields


class _Attempts:
    """The attempts to read one batch, and what they have found to be bad, by (position, index)."""

    def __init__(self, reading: BatchReader, leave: SkipBad) -> None:
        self._reading = reading
        self._leave = leave
        self._reasons: dict[tuple[int, int], str | None] = {}

    def read(self, rows: Rows) -> ReadRows:
        while True:
            chosen = self._leave.choose(rows, lambda *place: self._reasons.get(place) is not None)
            if self._leave.seen and self._look_at(chosen, only=self._leave.seen):
                continue
            try:
                return ReadRows(self._reading.fields_of(chosen), self._found(rows, chosen))
            except DataError:
                if not self._look_at(chosen):
                    raise

    def _look_at(self, rows: Rows, only: Collection[int] | None = None) -> bool:
        """Whether some of the rows, of all or of certain examples, are bad that were not known to be.

        Raises:
            DataError: there are more of them than the budget, and a batch, can hold.
        """
        found = False
        for row, place in enumerate(zip(rows.positions.tolist(), rows.indices.tolist(), strict=True)):
            if place not in self._reasons and (only is None or place[1] in only):
                self._reasons[place] = self._problem_of(rows.alone(row))
                found = found or self._reasons[place] is not None
        if found:
            self._check_budget(len(rows))
        return found

    def _problem_of(self, alone: Rows) -> str | None:
        """Why a single row cannot be read; None where it can."""
        try:
            self._reading.fields_of(alone)
        except DataError as error:
            return f"{error.what} {error.given}"
        return None

    def _check_budget(self, num_rows: int) -> None:
        bad = {index: reason for (_, index), reason in self._reasons.items() if reason is not None}
        self._leave.seen |= bad.keys()
        names = {self._reading.reader.example_id(index): reason for index, reason in list(bad.items())[-3:]}
        check_budget(len(bad), self._leave.budget + num_rows, names)

    def _found(self, rows: Rows, chosen: Rows) -> list[BadRow]:
        if chosen is rows:
            return []
        columns = (rows.positions.tolist(), rows.indices.tolist(), chosen.indices.tolist())
        found = {}
        for position, index, instead in zip(*columns, strict=True):
            if (reason := self._reasons.get((position, index))) is not None:
                found[position] = BadRow(position, index, instead, reason)
        return list(found.values())


def read_examples(reader: Reader, rows: Rows, seed: int) -> Fields:
    """The examples of some rows, by field.

    Raises:
        DataError: an example cannot be read, or a field has another length than there are rows.
        LockstepError: what the reader itself has raised on purpose.
    """
    try:
        if draws_globally(reader):
            return _checked(read_seeded(reader, rows, seed), len(rows), reader)
        return _checked(reader.read_batch(rows.indices), len(rows), reader)
    except LockstepError:
        raise
    except Exception as error:
        raise _unreadable(reader, rows.indices, error) from error


def _checked(fields: Any, num_rows: int, source: object) -> Fields:
    """The fields, if each has an entry for each row."""
    if not isinstance(fields, dict):
        raise _without_entries(source, f"a {type(fields).__name__}")
    for name, value in fields.items():
        is_column = value.dim() > 0 if isinstance(value, Tensor) else type(value) in (list, tuple)
        if not is_column:
            raise _without_entries(source, f"{name!r}: a {type(value).__name__} without rows")
        if len(value) != num_rows:
            raise _without_entries(source, f"{len(value)} of {name!r} for {num_rows} examples")
    return fields


def _without_entries(source: object, given: str) -> DataError:
    name = getattr(source, "__name__", type(source).__name__)
    return DataError(
        f"{name} did not give an entry of each field for each example.",
        given=given,
        expected="a dict of fields with the batch first: tensors, or lists, of its length",
        hint=f"fix what {name} returns",
    )


def _unreadable(reader: Reader, indices: Int64s, error: Exception) -> DataError:
    """Name the first example that cannot be read even alone; else the whole batch."""
    culprits = indices
    for place in range(len(indices)):
        try:
            reader.read_batch(indices[place : place + 1])
        except Exception as alone:
            culprits, error = indices[place : place + 1], alone
            break
    names = ", ".join(reader.example_id(int(index)) for index in culprits)
    return DataError(
        f"Example {names} cannot be read.",
        given=f"{type(error).__name__}: {error}",
        expected=f"an example that {type(reader).__name__} can read",
        hint="repair it, or leave it out of the data",
    )


def read_seeded(reader: Reader, rows: Rows, seed: int) -> Fields:
    """The examples of some rows, each read with the generators seeded by its position, which are put back.

    Raises:
        DataError: the fields of two examples do not fit each other.
    """
    names = [reader.example_id(index) for index in rows.indices.tolist()]
    single = []
    with restore_global_generators():
        for row, position in enumerate(rows.positions.tolist()):
            now_reading(names[row])
            seed_global_generators(seed, position)
            single.append(reader.read_batch(rows.indices[row : row + 1]))
    for name, fields in zip(names, single, strict=True):
        if fields.keys() != single[0].keys():
            raise _unlike(names[0], name, ", ".join(map(str, single[0])), ", ".join(map(str, fields)))
    return {field: _column(field, [each[field] for each in single], names) for field in single[0]}


def _column(field: str, values: Sequence[Any], names: Sequence[str]) -> Tensor | list[Any]:
    expected = _kind(values[0])
    for name, value in zip(names, values, strict=True):
        if _kind(value) != expected:
            raise _unlike(names[0], name, f"{field!r}: {expected}", f"{field!r}: {_kind(value)}")
    if isinstance(values[0], Tensor):
        return torch.cat(list(values))
    return [entry for value in values for entry in value]


def _kind(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape[1:])}" if isinstance(value, Tensor) else "a list"


def _unlike(first: str, other: str, expected: str, given: str) -> DataError:
    return DataError(
        f"The examples {first} and {other} do not fit into one batch.",
        given=f"{other} has {given}",
        expected=f"{expected}, as {first} has",
        hint="give all examples the same fields, of the same shapes and dtypes; or lists of what differs",
    )
