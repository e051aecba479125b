"""Reading examples, and naming the one that cannot be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.data.order import Int64s
from lockstep.data.processes import Fields
from lockstep.errors import DataError, LockstepError

if TYPE_CHECKING:
    from lockstep.data.readers import Reader


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
