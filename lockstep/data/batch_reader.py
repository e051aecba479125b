"""Read and augment the rows of a batch; name the examples that cannot be read, or read others in their place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lockstep.data.bad_examples import ChooseRows, check_budget
from lockstep.data.order import Int64s
from lockstep.data.rows import BatchRequest, Rows, RowsOf
from lockstep.data.seeding import restore_global_generators, seed_global_generators, seeded_items
from lockstep.errors import DataError, LockstepError
from lockstep.images.augment import turns
from lockstep.ragged import Ragged
from lockstep.randomness import Draws
from lockstep.readers.reader import ItemReader, draws_globally
from lockstep.tracing import now_reading, timed

if TYPE_CHECKING:
    from lockstep.images.augment import Augment
    from lockstep.readers.reader import Reader

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row whose example cannot be read."""

    position: int
    index: int
    read_instead: int
    """Index of the example that was read for this row."""
    reason: str


class ReadRows(NamedTuple):
    """The rows of a batch after reading."""

    fields: Fields
    bad: list[BadRow]


@dataclass
class SkipBad:
    """Policy for examples that cannot be read, and the ones that were found so far."""

    choose: ChooseRows
    """Chooses the rows to read, given which are bad."""
    budget: int
    """More different bad examples than this end the run, so that nobody reads on for hours to find them all."""
    seen: set[int] = field(default_factory=set)
    """Indices of examples that were bad before: these are tried alone first."""


class BatchReader:
    """Reads and augments the rows of a batch; the same rows give the same fields in any process.

    A DataError is blamed on an example if the example alone raises it too, at its position. Then the rows are chosen
    again without it there, until all of them can be read.

    Args:
        reader: gives the examples.
        augment: applied to them in this order.
        seed: keys the draws of the augmentations.
        rows_of: the rows of a batch.
        skip_bad: reads others in the place of bad examples; None raises what is wrong with them.
    """

    def __init__(
        self, reader: Reader, augment: Sequence[Augment], seed: int, rows_of: RowsOf, skip_bad: SkipBad | None = None
    ) -> None:
        self.reader = reader
        self._augment = list(zip(augment, turns(augment), strict=True))
        self._seed = seed
        self._rows_of = rows_of
        self._skip_bad = skip_bad

    def __call__(self, request: BatchRequest) -> ReadRows:
        """Read a batch; raises a LockstepError where something cannot be read or augmented, and is not skipped."""
        rows = self._rows_of(request)
        if self._skip_bad is None:
            return ReadRows(self.fields_of(rows), [])
        return _SkippingReader(self, self._skip_bad).read(rows)

    def names(self, request: BatchRequest) -> list[str]:
        """Name the examples of a batch."""
        return [self.reader.example_id(index) for index in self._rows_of(request).indices.tolist()]

    def fields_of(self, rows: Rows) -> Fields:
        """Read and augment some rows."""
        with timed("read"):
            fields = read_examples(self.reader, rows, self._seed)
        now_reading("")
        if self._augment:
            draws = Draws(self._seed, rows.positions)
            with timed("augment"):
                for augment, turn in self._augment:
                    fields = _checked(augment(fields, draws.again(turn)), len(rows), augment)
        return fields


class _SkippingReader:
    """Reads one batch in several attempts, and keeps the reasons why rows are bad, by (position, index)."""

    def __init__(self, reader: BatchReader, skip_bad: SkipBad) -> None:
        self._reader = reader
        self._skip_bad = skip_bad
        self._reasons: dict[tuple[int, int], str | None] = {}

    def read(self, rows: Rows) -> ReadRows:
        while True:
            chosen = self._skip_bad.choose(rows, lambda *place: self._reasons.get(place) is not None)
            if self._skip_bad.seen and self._try_alone(chosen, only=self._skip_bad.seen):
                continue
            try:
                return ReadRows(self._reader.fields_of(chosen), self._bad_rows(rows, chosen))
            except DataError:
                if not self._try_alone(chosen):
                    raise

    def _try_alone(self, rows: Rows, only: Collection[int] | None = None) -> bool:
        """Read rows one by one, all or those of certain examples; returns whether more of them are bad than known."""
        found = False
        for row, place in enumerate(zip(rows.positions.tolist(), rows.indices.tolist(), strict=True)):
            if place not in self._reasons and (only is None or place[1] in only):
                self._reasons[place] = self._problem_of(rows.alone(row))
                found = found or self._reasons[place] is not None
        if found:
            self._check_budget(len(rows))
        return found

    def _problem_of(self, alone: Rows) -> str | None:
        """Say why a single row cannot be read; None where it can."""
        try:
            self._reader.fields_of(alone)
        except DataError as error:
            return f"{error.what} {error.given}"
        return None

    def _check_budget(self, num_rows: int) -> None:
        bad = {index: reason for (_, index), reason in self._reasons.items() if reason is not None}
        self._skip_bad.seen |= bad.keys()
        names = {self._reader.reader.example_id(index): reason for index, reason in list(bad.items())[-3:]}
        check_budget(len(bad), self._skip_bad.budget + num_rows, names)

    def _bad_rows(self, rows: Rows, chosen: Rows) -> list[BadRow]:
        if chosen is rows:
            return []
        columns = (rows.positions.tolist(), rows.indices.tolist(), chosen.indices.tolist())
        bad = {}
        for position, index, instead in zip(*columns, strict=True):
            if (reason := self._reasons.get((position, index))) is not None:
                bad[position] = BadRow(position, index, instead, reason)
        return list(bad.values())


def read_examples(reader: Reader, rows: Rows, seed: int) -> Fields:
    """Read the examples of some rows, by field; any other error of the reader becomes a DataError."""
    try:
        fields = _read_seeded(reader, rows, seed) if draws_globally(reader) else reader.read_batch(rows.indices)
        return _checked(fields, len(rows), reader)
    except LockstepError:
        raise
    except Exception as error:
        raise _unreadable(reader, rows.indices, error) from error


def _checked(fields: Any, num_rows: int, source: object) -> Fields:
    """Return the fields if each has an entry for each row."""
    if not isinstance(fields, dict):
        raise _without_entries(source, f"a {type(fields).__name__}")
    for name, value in fields.items():
        is_column = value.dim() > 0 if isinstance(value, Tensor) else type(value) in (list, tuple, Ragged)
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


# Readers that draw from the random generators of the process ----------------------------------------------------------


def _read_seeded(reader: Reader, rows: Rows, seed: int) -> Fields:
    """Read examples one by one, each with the generators of the process seeded by its position."""
    if isinstance(reader, ItemReader) and type(reader).read_batch is ItemReader.read_batch:
        return reader.collate(seeded_items(reader, rows, seed), rows.indices)
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
