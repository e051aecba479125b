"""Reading rows of which some cannot be read: others are read in their place, or an error says whose partner it was."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.data.bad_examples import ChooseRows, check_budget
from lockstep.data.rows import Rows
from lockstep.errors import DataError

if TYPE_CHECKING:
    from lockstep.data.batch_reader import RowReader

Fields = dict[str, Any]


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
    """Of a partner: the position of the example for which it was read."""


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
        """Read rows as they are, with their partners."""
        bad: list[BadRow] = []
        return ReadRows(self._reader.fields_of(rows, partial(self._read_partners, bad)), bad)

    def _read_partners(self, bad: list[BadRow], reader: RowReader, rows: Rows) -> Fields:
        fields, found = self._partners[reader].read(rows)
        bad += found
        return fields

    def _try_alone(self, rows: Rows, only: Collection[int] | None = None) -> bool:
        """Read rows one by one, all or those of certain examples; returns whether more of them are bad than known."""
        known = len(self._bad())
        for row, place in enumerate(_places(rows)):
            if place not in self._reasons and (only is None or place[1] in only):
                self._reasons[place] = self._problem_of(rows.alone(row))
        found = self._bad()
        if len(found) > known:
            self._check_budget(dict(found), len(rows))
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
        (place,) = _places(chosen)
        self._reasons[place] = self._problem_of(chosen, decoded=True)
        return len(self._bad()) > known

    def _bad(self) -> list[tuple[int, str]]:
        """Return the index of each bad row, and why it is: of these rows and of their partners."""
        own = [(index, reason) for (_, index), reason in self._reasons.items() if reason is not None]
        return [*own, *(each for partner in self._partners.values() for each in partner._bad())]

    def _check_budget(self, bad: dict[int, str], num_rows: int) -> None:
        self._skip_bad.seen |= bad.keys()
        names = {self._reader.reader.example_id(index): reason for index, reason in list(bad.items())[-3:]}
        check_budget(len(bad), self._skip_bad.budget + num_rows, names)

    def _bad_rows(self, rows: Rows, chosen: Rows) -> list[BadRow]:
        if chosen is rows:
            return []
        bad = {}
        columns = (rows.places.tolist(), _places(rows), chosen.indices.tolist())
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


def _places(rows: Rows) -> list[tuple[int, int]]:
    return list(zip(rows.positions.tolist(), rows.indices.tolist(), strict=True))
