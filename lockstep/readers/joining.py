"""One batch from parts that several sources have read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.errors import DataError

Int64s = npt.NDArray[np.int64]
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a batch that one source has read."""

    source: str
    rows: npt.NDArray[np.intp]
    """Where they stand in the batch; each row of it belongs to one part."""
    fields: Fields


def read_by_source(
    starts: Int64s, indices: Int64s, names: Sequence[str], read: Callable[[int, Int64s], Fields]
) -> Fields:
    """A batch of examples of several sources, one after another: each source is asked once, for all that are its own.

    Args:
        starts: the index of each source's first example.
        indices: of the examples.
        names: of the sources, for errors.
        read: `read(source, indices)` of a source by its number, with indices that count from its own first example.

    Raises:
        DataError: as `joined` says.
    """
    sources = source_of(starts, indices)
    parts = []
    for source in np.unique(sources).tolist():
        rows = np.flatnonzero(sources == source)
        parts.append(Part(names[source], rows, read(source, indices[rows] - starts[source])))
    return parts[0].fields if len(parts) == 1 else joined(parts)


def source_of(starts: Int64s, indices: Int64s) -> npt.NDArray[np.intp]:
    """The number of the source that each example is in."""
    return np.searchsorted(starts, indices, side="right") - 1


def joined(parts: Sequence[Part]) -> Fields:
    """The fields of the whole batch, each row in its place.

    Raises:
        DataError: two sources have other fields, or fields of another dtype or shape; or a field has not one entry for
            each of its rows.
    """
    for part in parts:
        _check_entries(part)
        _check_like(parts[0], part)
    return {name: _joined_field([(part.rows, part.fields[name]) for part in parts]) for name in parts[0].fields}


def _joined_field(parts: Sequence[tuple[npt.NDArray[np.intp], Any]]) -> Tensor | list[Any]:
    num_rows = sum(len(rows) for rows, _ in parts)
    first = parts[0][1]
    if isinstance(first, Tensor):
        joined = torch.empty((num_rows, *first.shape[1:]), dtype=first.dtype)
        for rows, values in parts:
            _bytes_of_rows(joined)[rows] = _bytes_of_rows(values)
        return joined
    entries: list[Any] = [None] * num_rows
    for rows, values in parts:
        for row, value in zip(rows.tolist(), values, strict=True):
            entries[row] = value
    return entries


def _bytes_of_rows(values: Tensor) -> npt.NDArray[np.uint8]:
    """Shape (rows, bytes of a row); of a contiguous tensor, its own memory."""
    # numpy moves whole rows, where torch's index_copy_ moves one value after another: five times as long for images.
    array: npt.NDArray[np.uint8] = values.unsqueeze(-1).flatten(1).view(torch.uint8).numpy()
    return array


def _check_entries(part: Part) -> None:
    for name, values in part.fields.items():
        if not isinstance(values, Tensor | list) or len(values) != len(part.rows):
            size = f" of {len(values)}" if hasattr(values, "__len__") else ""
            raise DataError(
                f"The source {part.source!r} did not give one {name!r} for each example.",
                given=f"{type(values).__name__}{size}, for {len(part.rows)} examples",
                expected="a tensor or a list with one entry for each example",
                hint="fix read_batch of that reader",
            )


def _check_like(first: Part, other: Part) -> None:
    expected, given = _described(first.fields), _described(other.fields)
    if given != expected:
        names = [name for name in {**expected, **given} if expected.get(name) != given.get(name)]
        raise DataError(
            f"The sources {first.source!r} and {other.source!r} have other fields than each other.",
            given=f"{other.source!r} has {_listed(given, names)}",
            expected=f"as {first.source!r} has: {_listed(expected, names)}",
            hint="give all sources fields of the same names, dtypes and shapes: OnlyFields(reader, [...]) keeps some",
        )


def _described(fields: Fields) -> dict[str, str]:
    """What has to be the same in all sources, in words."""
    return {
        name: f"{values.dtype} of shape {('rows', *values.shape[1:])}" if isinstance(values, Tensor) else "a list"
        for name, values in fields.items()
    }


def _listed(described: Mapping[str, str], names: Sequence[str]) -> str:
    return "; ".join(f"{name!r}: {described.get(name, 'missing')}" for name in names)
