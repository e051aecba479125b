"""Readers whose examples may draw from the random generators of the process: read one by one, each seeded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.data.generators import generators_put_back, seed_generators
from lockstep.data.rows import Rows
from lockstep.errors import DataError
from lockstep.tracing import now_reading

if TYPE_CHECKING:
    from lockstep.readers.reader import Reader

Fields = dict[str, Any]


def read_seeded(reader: Reader, rows: Rows, seed: int) -> Fields:
    """The examples of some rows, each read with the generators seeded by its position, which are put back.

    Raises:
        DataError: the fields of two examples do not fit each other.
    """
    names = [reader.example_id(index) for index in rows.indices.tolist()]
    single = []
    with generators_put_back():
        for row, position in enumerate(rows.positions.tolist()):
            now_reading(names[row])
            seed_generators(seed, position)
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
