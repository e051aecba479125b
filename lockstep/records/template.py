"""Batches of small examples, sliced from the bytes of their records.

Which bytes of a record are values is decided by its other bytes alone. If those equal the other bytes of one record
that was parsed, the values are where they were there: a `Template` reads a whole batch by slicing. Records with another
layout are parsed one by one, by `read_each`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.errors import DataError
from lockstep.records.example import Values, parse_example, scan_example

UInt8s = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Pixels:
    """A field of uint8 of one shape, from the bytes of the feature `key`."""

    key: str
    shape: tuple[int, ...]

    def value(self, values: Values) -> bytes | None:
        """Return the value of one record; None if the feature has not exactly one of the right size."""
        fits = isinstance(values, list) and [len(value) for value in values] == [math.prod(self.shape)]
        return values[0] if fits else None

    def stack(self, values: list[bytes]) -> Tensor:
        """Stack values to shape (batch, *shape)."""
        return torch.frombuffer(bytearray(b"".join(values)), dtype=torch.uint8).view(-1, *self.shape)

    def read(self, columns: UInt8s) -> Tensor | None:
        """Decode values from their bytes, shape (batch, bytes), to shape (batch, *shape)."""
        return torch.from_numpy(columns.copy()).view(-1, *self.shape)

    def __str__(self) -> str:
        return f"one value of {math.prod(self.shape)} bytes"


@dataclass(frozen=True)
class Integer:
    """A field of one int64, from the feature `key`."""

    key: str

    def value(self, values: Values) -> int | None:
        """Return the value of one record; None if the feature has not exactly one."""
        fits = isinstance(values, np.ndarray) and values.dtype == np.int64 and len(values) == 1
        return int(values[0]) if fits else None

    def stack(self, values: list[int]) -> Tensor:
        """Stack values to shape (batch,)."""
        return torch.tensor(values)

    def read(self, columns: UInt8s) -> Tensor | None:
        """Decode values from their bytes, shape (batch, bytes); None if one of them has another length."""
        goes_on = columns >= 128
        if goes_on[:, -1].any() or not goes_on[:, :-1].all():
            return None
        shifts = np.arange(0, 7 * columns.shape[1], 7, dtype=np.uint64)
        parts = (columns & 127).astype(np.uint64) << shifts
        return torch.from_numpy(np.bitwise_or.reduce(parts, axis=1).view(np.int64))

    def __str__(self) -> str:
        return "one int64"


Field = Pixels | Integer


class Template:
    """The layout of one record, for all records that share it."""

    def __init__(self, record: bytes, fields: Mapping[str, Field], source: str) -> None:
        read_each([(record, source)], fields)
        features = scan_example(record, source)
        self._values = {
            name: (field, slice(*next(span for span in features[field.key].spans if span[0] < span[1])))
            for name, field in fields.items()
        }
        spans = sorted((span.start, span.stop) for _, span in self._values.values())
        starts = [0, *(stop for _, stop in spans)]
        stops = [*(start for start, _ in spans), len(record)]
        others = [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]
        self._others = [(other, np.frombuffer(record[other], dtype=np.uint8)) for other in others]

    def read(self, records: UInt8s) -> dict[str, Tensor] | None:
        """Return the fields of records as long as this one, shape (batch, bytes); None if one has another layout."""
        if any((records[:, other] != expected).any() for other, expected in self._others):
            return None
        fields = {}
        for name, (field, span) in self._values.items():
            values = field.read(records[:, span])
            if values is None:
                return None
            fields[name] = values
        return fields


def read_each(records: Iterable[tuple[bytes, str]], fields: Mapping[str, Field]) -> dict[str, Tensor]:
    """Parse the fields of (record, name of the record for errors)."""
    columns: dict[str, list[Any]] = {name: [] for name in fields}
    for record, source in records:
        features = parse_example(record, source)
        for name, field in fields.items():
            value = field.value(features[field.key]) if field.key in features else None
            if value is None:
                raise _without(field, features, source)
            columns[name].append(value)
    return {name: field.stack(columns[name]) for name, field in fields.items()}


def _without(field: Field, features: Mapping[str, Values], source: str) -> DataError:
    values = features.get(field.key)
    if values is None:
        given = f"the features {', '.join(sorted(features)) or '(none)'}"
    elif isinstance(values, list):
        given = f"{len(values)} values of {', '.join(str(len(value)) for value in values[:5]) or 'no'} bytes"
    else:
        given = f"{len(values)} values of {values.dtype}"
    return DataError(
        f"{source} has no usable feature {field.key!r}.",
        given=given,
        expected=str(field),
        hint="name the feature that holds it, or write the records again",
    )
