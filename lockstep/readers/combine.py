"""Readers made of other readers: several one after another, or a part of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.checks import check_all, check_range, check_type, wrong_type
from lockstep.errors import DataError, InputError
from lockstep.randomness import Draws
from lockstep.readers.fingerprint import Fingerprint, fingerprint_of, fingerprint_of_some
from lockstep.readers.reader import NO_DECODER, Cost, Reader, decoder_of, draws_globally


class Concatenated:
    """The examples of several readers, one source after another.

    A batch asks each source once, for all its examples. An example's name is that of its source and its own: "voc:17".
    With the order `Mixture` the sources come by weight instead of by size.

    Args:
        sources: the readers, by name; those of a list are called "0", "1", ...

    Raises:
        InputError: there are no sources, or one is no reader.
    """

    def __init__(self, sources: Mapping[str, Reader] | Sequence[Reader]) -> None:
        check_type(
            "sources",
            sources,
            (Mapping, Sequence),
            expected="readers by name, or a list of them",
            hint='give them by name: Concatenated({"coco": coco, "voc": voc})',
        )
        named = sources if isinstance(sources, Mapping) else {str(i): reader for i, reader in enumerate(sources)}
        if not named:
            raise InputError(
                "There are no sources, so there are no examples.",
                given="no sources",
                expected="one reader or more",
                hint='give them by name: Concatenated({"coco": coco, "voc": voc})',
            )
        for name, reader in named.items():
            _check_reader(f"source {name!r}", reader)
        self.sizes = {name: len(reader) for name, reader in named.items()}
        """Number of examples of each source."""
        self.cost: Cost = "memory" if all(reader.cost == "memory" for reader in named.values()) else "decode"
        decoders = sorted({decoder_of(reader) for reader in named.values()} - {NO_DECODER})
        self.decoder = ", ".join(decoders) or NO_DECODER
        """What decodes the images of the sources."""
        self.draws_globally = any(map(draws_globally, named.values()))
        self._names, self._readers = list(named), list(named.values())
        self._starts = np.cumsum([0, *self.sizes.values()])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read_batch(self, indices: Int64s) -> Fields:
        """The fields of these examples.

        Raises:
            DataError: as `joined` says.
        """
        return read_by_source(self._starts, indices, self._names, lambda i, own: self._readers[i].read_batch(own))

    def example_id(self, index: int) -> str:
        """Its source, and its name there."""
        source = int(source_of(self._starts, np.array([index]))[0])
        return f"{self._names[source]}:{self._readers[source].example_id(index - int(self._starts[source]))}"

    def fingerprint(self) -> Fingerprint:
        """That of each source, by its name."""
        return {
            name: fingerprint_of(reader, len(reader)) for name, reader in zip(self._names, self._readers, strict=True)
        }


class Subset:
    """Some examples of a reader, in the order of their indices as given.

    Args:
        reader: whose examples they are; they keep their names.
        indices: each of 0 to len(reader) - 1 at most once; or a slice, as of a list.

    Raises:
        InputError: an index is out of range, is there twice, or is no whole number.
    """

    def __init__(self, reader: Reader, indices: Sequence[int] | npt.NDArray[Any] | Tensor | slice) -> None:
        _check_reader("reader", reader)
        self._reader = reader
        self.cost = reader.cost
        self.decoder = decoder_of(reader)
        self.draws_globally = draws_globally(reader)
        if isinstance(indices, slice):
            self.indices = np.arange(len(reader))[indices]
            """Of its examples in the reader; an array of int64."""
        else:
            self.indices = _checked_indices(indices, len(reader))

    def __len__(self) -> int:
        return len(self.indices)

    def read_batch(self, indices: Int64s) -> Fields:
        """The fields of these examples of the subset."""
        return self._reader.read_batch(self.indices[indices])

    def example_id(self, index: int) -> str:
        """Its name in the reader."""
        return self._reader.example_id(int(self.indices[index]))

    def fingerprint(self) -> Fingerprint:
        """The indices, and that of the reader."""
        return fingerprint_of_some(fingerprint_of(self._reader, len(self._reader)), self.indices)


class OnlyFields:
    """Some of the fields of a reader: so that sources with different others can be joined.

    Args:
        reader: whose examples they are; they keep their names.
        names: of the fields that are kept, in this order.

    Raises:
        InputError: no names are given.
    """

    def __init__(self, reader: Reader, names: Sequence[str]) -> None:
        _check_reader("reader", reader)
        check_all("names", names, str, hint='give the names of fields: OnlyFields(reader, ["image", "boxes"])')
        self._reader = reader
        self._names = list(names)
        self.cost = reader.cost
        self.decoder = decoder_of(reader)
        self.draws_globally = draws_globally(reader)

    def __len__(self) -> int:
        return len(self._reader)

    def read_batch(self, indices: Int64s) -> Fields:
        """These fields of the examples.

        Raises:
            DataError: the reader has no such field.
        """
        fields = self._reader.read_batch(indices)
        if absent := [name for name in self._names if name not in fields]:
            raise DataError(
                f"The reader gives no field {absent[0]!r}.",
                given=f"the fields {', '.join(fields)}",
                expected=", ".join(self._names),
                hint="leave it out, or have the reader give it",
            )
        return {name: fields[name] for name in self._names}

    def example_id(self, index: int) -> str:
        """Its name in the reader."""
        return self._reader.example_id(index)

    def fingerprint(self) -> Fingerprint:
        """That of the reader."""
        return fingerprint_of(self._reader, len(self))


def split(reader: Reader, fractions: Mapping[str, float], seed: int = 0) -> dict[str, Subset]:
    """Cut a reader into parts: `split(reader, {"train": 0.9, "validation": 0.1})`; each example is in exactly one.

    The part of an example is a hash of the seed and its index: it stays there whatever is added behind it. So a part
    of fraction f has f * len(reader) examples only on average, with a standard deviation of at most
    sqrt(f * len(reader)).

    Raises:
        InputError: a fraction is not above 0, they do not add up to 1, or a part would be empty.
    """
    _check_reader("reader", reader)
    _check_fractions(fractions)
    bounds = np.cumsum(list(fractions.values()))[:-1]
    numbers = np.searchsorted(bounds, Draws(seed, np.arange(len(reader))).uniform("split"), side="right")
    parts = {name: Subset(reader, np.flatnonzero(numbers == number)) for number, name in enumerate(fractions)}
    for name, part in parts.items():
        if not len(part):
            raise InputError(
                f"The split leaves {name!r} without an example.",
                given=f"a fraction of {fractions[name]} of {len(reader)} examples",
                expected="one example or more in each part",
                hint="give it a larger fraction, or name its examples: Subset(reader, indices)",
            )
    return parts


def one_of(reader: Reader, n: int) -> Subset:
    """The first of every `n` examples: those at 0, n, 2 n, ...

    Raises:
        InputError: `n` is below 1.
    """
    check_type("n", n, int, expected="a whole number", hint="give n a whole number above 0")
    check_range("n", n, 1, math.inf)
    return Subset(reader, slice(None, None, n))


def _checked_indices(indices: Any, size: int) -> Int64s:
    array = np.asarray(indices)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InputError(
            "The indices of a subset are no whole numbers in a row.",
            given=f"an array of shape {array.shape} and type {array.dtype}",
            expected=f"whole numbers from 0 to {size - 1}, each at most once",
            hint="give a list or an array of them; of a mask, torch.nonzero(mask).flatten()",
        )
    outside = np.flatnonzero((array < 0) | (array >= size))
    _, first_places = np.unique(array, return_index=True)
    again = np.setdiff1d(np.arange(array.size), first_places)
    for bad, what in ((outside, "out of range"), (again, "there twice")):
        if bad.size:
            raise InputError(
                f"An index of the subset is {what}.",
                given=f"indices[{bad[0]}]={array[bad[0]]}, of a reader of {size} examples",
                expected=f"whole numbers from 0 to {size - 1}, each at most once",
                hint="leave it out; to see an example more often than others, use the order Weighted",
            )
    return array.astype(np.int64)


def _check_fractions(fractions: Mapping[str, float]) -> None:
    total = math.fsum(fractions.values())
    if not all(fraction > 0 for fraction in fractions.values()) or abs(total - 1) > 1e-9:
        raise InputError(
            "The parts of a split are not the whole.",
            given=", ".join(f"{name} {fraction}" for name, fraction in fractions.items()) or "no parts",
            expected=f"fractions above 0 that add up to 1, not {total:g}",
            hint='give them such as {"train": 0.9, "validation": 0.1}',
        )


def _check_reader(name: str, reader: object) -> None:
    if isinstance(reader, type) or not (hasattr(reader, "read_batch") and hasattr(reader, "cost")):
        raise wrong_type(
            name,
            reader,
            expected="a reader: it has read_batch, example_id, cost and a length",
            hint="wrap tensors in Arrays({...}), a torch Dataset in TorchDataset(dataset)",
        )


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
