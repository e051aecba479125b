"""From rows of the stream to the fields of a batch: read, augmented, and what cannot be read named or left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.data.bad_examples import Bad, Choose
from lockstep.data.order import Int64s
from lockstep.data.rows import Rows
from lockstep.errors import DataError, LockstepError
from lockstep.randomness import Draws
from lockstep.stages import stage

if TYPE_CHECKING:
    from lockstep.images.augment import Augment
    from lockstep.readers.reader import Reader

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """An example that cannot be read, where it was due."""

    position: int
    index: int
    read_instead: int
    """The index of the example in its row."""
    reason: str


class ReadRows(NamedTuple):
    """What became of the rows of a batch."""

    fields: Fields
    bad: list[Found]


class Reading:
    """Reads and augments the rows of a batch; wherever it runs, the same rows give the same fields.

    A DataError is an example's own fault if the example alone raises it too. Then the rows are chosen again without
    it, until all of them can be read. An example that is bad once is taken to be bad whatever is drawn for it.

    Args:
        reader: where the examples come from.
        augment: what happens to them, in this order.
        seed: keys the draws of the augmentations.
        choose: which rows are read, given what is bad; None raises what is wrong with an example.
        bad: what is known to be bad.
    """

    def __init__(
        self,
        reader: Reader,
        augment: Sequence[Augment],
        seed: int,
        choose: Choose | None = None,
        bad: Bad | None = None,
    ) -> None:
        self._reader = reader
        self._augment = augment
        self._seed = seed
        self._choose = choose
        self._bad = dict(bad or {})

    def __call__(self, rows: Rows) -> ReadRows:
        """The fields of these rows.

        Raises:
            LockstepError: something cannot be read or augmented, and may not be left out.
        """
        while True:
            chosen = self._choose(rows, self._bad) if self._choose else rows
            try:
                return ReadRows(self._fields(chosen), self._found(rows, chosen))
            except DataError:
                if not self._choose or not self._finds_bad(chosen):
                    raise

    def _fields(self, rows: Rows) -> Fields:
        with stage("read"):
            fields = read_examples(self._reader, rows.indices)
        if self._augment:
            draws = Draws(self._seed, rows.positions)
            with stage("augment"):
                for augment in self._augment:
                    fields = augment(fields, draws)
        return fields

    def _finds_bad(self, rows: Rows) -> bool:
        """Whether some of the rows cannot even be read alone; they are remembered."""
        before = len(self._bad)
        for row in range(len(rows)):
            alone = rows[row : row + 1]
            try:
                self._fields(alone)
            except DataError as error:
                self._bad[int(alone.indices[0])] = f"{error.what} {error.given}"
        return len(self._bad) > before

    def _found(self, rows: Rows, chosen: Rows) -> list[Found]:
        if chosen is rows:
            return []
        columns = (rows.positions.tolist(), rows.indices.tolist(), chosen.indices.tolist())
        found = {
            position: Found(position, index, instead, self._bad[index])
            for position, index, instead in zip(*columns, strict=True)
            if index in self._bad
        }
        return list(found.values())


def read_examples(reader: Reader, indices: Int64s) -> Fields:
    """The examples of some indices, by field.

    Raises:
        DataError: an example cannot be read, or a field has another length than there are indices.
        LockstepError: what the reader itself has raised on purpose.
    """
    try:
        fields = reader.read_batch(indices)
    except LockstepError:
        raise
    except Exception as error:
        raise _unreadable(reader, indices, error) from error
    for name, value in fields.items():
        if len(value) != len(indices):
            raise DataError(
                f"The reader gave another number of {name!r} than examples asked for.",
                given=f"{len(value)} of {name!r} for {len(indices)} examples",
                expected="fields with the batch first: one entry for each example",
                mend=f"mend read_batch of {type(reader).__name__}",
            )
    return fields


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
        mend="repair it, or leave it out of the data",
    )
