"""Read and augment the rows of a batch; name the examples that cannot be read, or read others in their place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lockstep.augmentations.augment import Augment, NeedsPartners, num_partners, turns
from lockstep.data.bad_examples import ChooseRows, check_budget
from lockstep.data.order import Int64s
from lockstep.data.rows import BatchRequest, PartnersOf, Rows, RowsOf
from lockstep.data.seeding import restore_global_generators, seed_global_generators, seeded_items
from lockstep.errors import DataError, LockstepError
from lockstep.ragged import Ragged
from lockstep.randomness import Draws, key_of, mix
from lockstep.readers.reader import ItemReader, Reader
from lockstep.tracing import now_reading, timed

Fields = dict[str, Any]


ReadPartners = Callable[["RowReader", Rows], Fields]
"""Reads the partners of some rows with the reader that is there for them."""


class BatchReader:
    """Reads and augments the rows of a batch; the same rows give the same fields in any process.

    A DataError is blamed on an example if the example alone raises it too, at its position; or on a partner of it, if
    that cannot be read, augmented and decoded. Then the rows are chosen again by `skip_bad` without it there, until all
    of them can be read; without `skip_bad` it raises what is wrong.
    """

    def __init__(
        self, reader: Reader, augment: Sequence[Augment], seed: int, rows_of: RowsOf, skip_bad: SkipBad | None = None
    ) -> None:
        self._reader = RowReader(reader, augment, seed, rows_of.partners)
        self._rows_of = rows_of
        self._skip_bad = skip_bad

    def __call__(self, request: BatchRequest) -> ReadRows:
        """Read a batch; raises a LockstepError where something cannot be read or augmented, and is not skipped."""
        rows = self._rows_of(request)
        if self._skip_bad is not None:
            return SkippingReader(self._reader, self._skip_bad).read(rows)
        try:
            return ReadRows(self._reader.fields_of(rows), [])
        except DataError as error:
            if blamed := bad_partner(self._reader, rows):
                raise blamed from error
            raise

    def names(self, request: BatchRequest) -> list[str]:
        """Name the examples of a batch."""
        return [self._reader.reader.example_id(index) for index in self._rows_of(request).indices.tolist()]


class RowReader:
    """Reads rows, and augments them.

    An augmentation that needs partners has a reader for each of them. It reads other examples of the same epoch, and
    applies the augmentations that come before to them, with draws of their own.
    """

    def __init__(self, reader: Reader, augment: Sequence[Augment], seed: int, partners_of: PartnersOf) -> None:
        self.reader = reader
        self.seed = seed
        self._partners_of = partners_of
        self._stages = [
            (each, turn, self._partner_readers(augment[:place], num_partners(each)))
            for place, (each, turn) in enumerate(zip(augment, turns(augment), strict=True))
        ]

    def _partner_readers(self, augment: Sequence[Augment], count: int) -> list[RowReader]:
        seeds = [mix(self.seed, key_of("partner"), len(augment), number) for number in range(count)]
        return [RowReader(self.reader, augment, seed, self._partners_of) for seed in seeds]

    @property
    def partner_readers(self) -> list[RowReader]:
        """The readers of partners, of all augmentations."""
        return [reader for _, _, readers in self._stages for reader in readers]

    def fields_of(self, rows: Rows, read: ReadPartners | None = None) -> Fields:
        """Read and augment some rows; `read` reads their partners, by default as these."""
        with timed("read"):
            fields = read_examples(self.reader, rows, self.seed)
        now_reading("")
        if not self._stages:
            return fields
        with timed("augment"):
            return self.augmented(fields, rows, read)

    def augmented(self, fields: Fields, rows: Rows, read: ReadPartners | None = None) -> Fields:
        """Augment the fields of some rows."""
        for _, augmented in self.stages(fields, rows, read):
            fields = augmented
        return fields

    def stages(self, fields: Fields, rows: Rows, read: ReadPartners | None = None) -> Iterator[tuple[Augment, Fields]]:
        """Yield each augmentation, and the fields of the rows after it."""
        draws = Draws(self.seed, rows.positions)
        for augment, turn, readers in self._stages:
            drawn = draws.again(turn)
            if readers:
                partners = self._rows_of_partners(augment, drawn, rows, readers)
                read = read or RowReader.fields_of
                fields = cast("NeedsPartners", augment)(fields, drawn, [read(*each) for each in partners])
            else:
                fields = augment(fields, drawn)
            yield augment, _checked(fields, len(rows), augment)

    def partners(self, rows: Rows) -> Iterator[tuple[RowReader, Rows]]:
        """Yield all partners of some rows, each with the reader for them."""
        draws = Draws(self.seed, rows.positions)
        for augment, turn, readers in self._stages:
            yield from self._rows_of_partners(augment, draws.again(turn), rows, readers) if readers else ()

    def _rows_of_partners(
        self, augment: Augment, draws: Draws, rows: Rows, readers: Sequence[RowReader]
    ) -> list[tuple[RowReader, Rows]]:
        """Return the partners of the rows that need some; none at all if no row does."""
        positions = rows.positions[cast("NeedsPartners", augment).needs_partners(draws)]
        return [(reader, self._partners_of(positions, reader.seed)) for reader in readers] if len(positions) else []


def read_examples(reader: Reader, rows: Rows, seed: int) -> Fields:
    """Read the examples of some rows, by field; any other error of the reader becomes a DataError."""
    try:
        is_seeded = getattr(reader, "draws_globally", False)
        fields = _read_seeded(reader, rows, seed) if is_seeded else reader.read_batch(rows.indices)
        return _checked(fields, len(rows), reader)
    except LockstepError:
        raise
    except Exception as error:
        raise _unreadable(reader, rows.indices, error) from error


def _checked(fields: Any, num_rows: int, source: object) -> Fields:
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
        expected="a dict of fields with the batch first: tensors, lists or Raggeds of its length",
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
        return reader.collation.batch_of(seeded_items(reader, rows, seed), rows.indices)
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


def _column(field: str, values: Sequence[Any], names: Sequence[str]) -> Tensor | Ragged | list[Any]:
    expected = _kind(values[0])
    for name, value in zip(names, values, strict=True):
        if _kind(value) != expected:
            raise _unlike(names[0], name, f"{field!r}: {expected}", f"{field!r}: {_kind(value)}")
    if isinstance(values[0], Tensor):
        return torch.cat(list(values))
    if isinstance(values[0], Ragged):
        return Ragged.cat(values)
    return [entry for value in values for entry in value]


def _kind(value: Any) -> str:
    if isinstance(value, Ragged):
        return f"ragged {_kind(value.values)}"
    return f"{value.dtype} of shape {tuple(value.shape[1:])}" if isinstance(value, Tensor) else "a list"


def _unlike(first: str, other: str, expected: str, given: str) -> DataError:
    return DataError(
        f"The examples {first} and {other} do not fit into one batch.",
        given=f"{other} has {given}",
        expected=f"{expected}, as {first} has",
        hint="give all examples the same fields, of the same shapes and dtypes; or lists of what differs",
    )


# Rows that cannot be read: others are read in their place, or an error says whose partner it was ----------------------


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row whose example cannot be read, or a partner of one."""

    position: int
    """Where the bad example stands in the stream."""
    index: int
    read_instead: int
    """Index of the example that was read in its place."""
    reason: str
    partner_of: int | None = None
    """For a partner: the position of the example for which it was read."""


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


class SkippingReader:
    """Reads one batch in several attempts, and keeps the reasons why rows are bad, by (position, index).

    Partners are read by readers like it: so a partner that cannot be read or augmented is replaced before its row sees
    it. Images and masks may be decoded later only. So if a row fails that has partners, these are decoded whole first;
    where all of them can be, the row is bad itself.
    """

    def __init__(self, reader: RowReader, skip_bad: SkipBad) -> None:
        self._reader = reader
        self._skip_bad = skip_bad
        self._reasons: dict[tuple[int, int], str | None] = {}
        self._partners = {each: SkippingReader(each, skip_bad) for each in reader.partner_readers}

    def read(self, rows: Rows) -> ReadRows:
        """Read rows, and others in the place of bad ones; raises DataError beyond the budget."""
        while True:
            chosen = self._choose(rows)
            if self._skip_bad.seen and self._try_alone(chosen, only=self._skip_bad.seen):
                continue
            try:
                fields, bad_partners = self._read(chosen)
                return ReadRows(fields, self._bad_rows(rows, chosen) + bad_partners)
            except DataError:
                if not self._try_alone(chosen):
                    raise

    def _choose(self, rows: Rows) -> Rows:
        return self._skip_bad.choose(rows, lambda *place: self._reasons.get(place) is not None)

    def _read(self, rows: Rows) -> ReadRows:
        bad: list[BadRow] = []
        return ReadRows(self._reader.fields_of(rows, partial(self._read_partners, bad)), bad)

    def _read_partners(self, bad: list[BadRow], reader: RowReader, rows: Rows) -> Fields:
        fields, found = self._partners[reader].read(rows)
        bad += found
        return fields

    def _try_alone(self, rows: Rows, only: Collection[int] | None = None) -> bool:
        """Read rows one by one, all or those of certain examples; returns whether more of them are bad than known."""
        known = len(self._bad())
        for row, place in enumerate(rows.pairs()):
            if place not in self._reasons and (only is None or place[1] in only):
                self._reasons[place] = self._problem_of(rows.alone(row))
        found = self._bad()
        if len(found) > known:
            bad = dict(found)
            self._skip_bad.seen |= bad.keys()
            names = {self._reader.reader.example_id(index): reason for index, reason in list(bad.items())[-3:]}
            check_budget(len(bad), self._skip_bad.budget + len(rows), names)
        return len(found) > known

    def _problem_of(self, alone: Rows, *, decoded: bool = False) -> str | None:
        """Say why a single row cannot be read, and decoded; None where it can, perhaps with other partners."""
        while True:
            try:
                fields = self._read(alone).fields
                if decoded:
                    _decode(fields)
            except DataError as error:
                if not any(self._partners[reader]._decode_alone(rows) for reader, rows in self._reader.partners(alone)):
                    return f"{error.what} {error.given}"
            else:
                return None

    def _decode_alone(self, alone: Rows) -> bool:
        """Read and decode all of a single row; returns whether more rows are bad than known."""
        known = len(self._bad())
        chosen = self._choose(alone)
        (place,) = chosen.pairs()
        self._reasons[place] = self._problem_of(chosen, decoded=True)
        return len(self._bad()) > known

    def _bad(self) -> list[tuple[int, str]]:
        """Return the index of each bad row, and why it is: of these rows and of their partners."""
        own = [(index, reason) for (_, index), reason in self._reasons.items() if reason is not None]
        return [*own, *(each for partner in self._partners.values() for each in partner._bad())]

    def _bad_rows(self, rows: Rows, chosen: Rows) -> list[BadRow]:
        if chosen is rows:
            return []
        bad = {}
        columns = (rows.places.tolist(), rows.pairs(), chosen.indices.tolist())
        for at, (position, index), instead in zip(*columns, strict=True):
            if (reason := self._reasons.get((position, index))) is not None:
                bad[position] = BadRow(at, index, instead, reason, position if rows.are_partners else None)
        return list(bad.values())


def bad_partner(reader: RowReader, rows: Rows) -> DataError | None:
    """Find out whether the first row that cannot be read has a bad partner; returns its error, which names both."""
    for alone in map(rows.alone, range(len(rows)) if reader.partner_readers else ()):
        try:
            reader.fields_of(alone)
        except DataError:
            found = _first_bad(reader, alone)
            return found and _of_partner(*found, reader.reader.example_id(int(alone.indices[0])))
    return None


def _first_bad(reader: RowReader, alone: Rows) -> tuple[DataError, str] | None:
    """Find the first bad partner of a row, or of its partners; returns what is wrong with it, and its name."""
    for partner, theirs in reader.partners(alone):
        try:
            _decode(partner.fields_of(theirs))
        except DataError as error:
            return _first_bad(partner, theirs) or (error, reader.reader.example_id(int(theirs.indices[0])))
    return None


def _of_partner(error: DataError, name: str, wanted_by: str) -> DataError:
    return DataError(
        error.what,
        given=f"{error.given}; {name} was read as a partner of {wanted_by}",
        expected=error.expected,
        hint=error.hint,
    )


def _decode(fields: Fields) -> None:
    """Decode all images and masks that are not decoded yet, to see whether they can be."""
    for values in fields.values():
        for value in values if isinstance(values, list | tuple) else ():
            if hasattr(value, "decode") and not isinstance(value, bytes):
                value.decode()
