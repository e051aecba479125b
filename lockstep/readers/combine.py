"""Readers made of other readers: several one after another, or some examples or fields of one."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.checks import PositiveInt, check_all, check_type, check_value, wrong_type
from lockstep.errors import DataError, InputError
from lockstep.ragged import Ragged
from lockstep.randomness import Draws
from lockstep.readers.fingerprint import Fingerprint, fingerprint_of, fingerprint_of_some, tells_options
from lockstep.readers.object_table import KnownObjects
from lockstep.readers.reader import NO_DECODER, Cost, Int64s, Reader, ReaderWrapper, decoder_of, draws_globally

Fields = dict[str, Any]


@tells_options
class Concatenated:
    """The examples of several readers, one source after another.

    A batch asks each source once, for all its examples. The name of an example has its source first: "voc:17". With the
    order `Mixture` sources are drawn by weight instead of by size.

    Args:
        sources: the readers, by name; those of a list are called "0", "1", ...
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
        """The decoders of all sources."""
        self.draws_globally = any(map(draws_globally, named.values()))
        self._names, self._readers = list(named), list(named.values())
        self._starts = np.cumsum([0, *self.sizes.values()])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read_batch(self, indices: Int64s) -> Fields:
        """Return the fields of these examples; an error if the sources give different ones."""
        return read_by_source(self._starts, indices, self._names, lambda i, own: self._readers[i].read_batch(own))

    def example_id(self, index: int) -> str:
        """Return the name of its source, and its own name in there."""
        source = int(_source_of(self._starts, np.array([index]))[0])
        return f"{self._names[source]}:{self._readers[source].example_id(index - int(self._starts[source]))}"

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of each source, by its name."""
        return {
            name: fingerprint_of(reader, len(reader)) for name, reader in zip(self._names, self._readers, strict=True)
        }


@tells_options
class Subset(ReaderWrapper):
    """Some examples of a reader, with their names, in the order of the given indices.

    These are each of 0 to len(reader) - 1 at most once; or a slice, as of a list.
    """

    def __init__(self, reader: Reader, indices: Sequence[int] | npt.NDArray[Any] | Tensor | slice) -> None:
        _check_reader("reader", reader)
        super().__init__(reader)
        if isinstance(indices, slice):
            self.indices = np.arange(len(reader))[indices]
            """Indices of the examples in the reader, int64."""
        else:
            self.indices = _checked_indices(indices, len(reader))

    def __len__(self) -> int:
        return len(self.indices)

    def read_batch(self, indices: Int64s) -> Fields:
        """Return the fields of these examples of the subset."""
        return self._reader.read_batch(self.indices[indices])

    def example_id(self, index: int) -> str:
        """Return the name of the example in the reader."""
        return super().example_id(int(self.indices[index]))

    def fingerprint(self) -> Fingerprint:
        """Return the indices, and the fingerprint of the reader."""
        return fingerprint_of_some(super().fingerprint(), self.indices)


@tells_options
class OnlyFields(ReaderWrapper):
    """Some fields of a reader, in this order, for instance those that it shares with others of a `Concatenated`."""

    def __init__(self, reader: Reader, names: Sequence[str]) -> None:
        _check_reader("reader", reader)
        check_all("names", names, str, hint='give the names of fields: OnlyFields(reader, ["image", "boxes"])')
        super().__init__(reader)
        self._names = list(names)

    def read_batch(self, indices: Int64s) -> Fields:
        """Return the kept fields of these examples."""
        fields = self._reader.read_batch(indices)
        if absent := [name for name in self._names if name not in fields]:
            raise DataError(
                f"The reader gives no field {absent[0]!r}.",
                given=f"the fields {', '.join(fields)}",
                expected=", ".join(self._names),
                hint="leave it out, or have the reader give it",
            )
        return {name: fields[name] for name in self._names}


def split(reader: Reader, fractions: Mapping[str, float], seed: int = 0) -> dict[str, Subset]:
    """Cut a reader into parts: `split(reader, {"train": 0.9, "validation": 0.1})`; each example is in exactly one.

    A hash of the seed and its index decides the part of an example, so it stays there when others are added at the end.
    A part of fraction f has f * len(reader) examples only on average, with a standard deviation of at most
    sqrt(f * len(reader)).
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


def share_by_name(reader: Reader, share: float, *, is_held_out: bool) -> Subset:
    """Hold out a share of the examples of a reader, by a hash of their names, or keep the others.

    So an example stays in its part when others are added, moved or taken away. Of n examples share * n are held out on
    average, with a standard deviation of at most sqrt(share * n).

    Raises:
        InputError: no example is left in this part.
    """
    names = (os.fsencode(reader.example_id(index)) for index in range(len(reader)))
    hashed = np.array([int.from_bytes(blake2b(name, digest_size=6).digest()) for name in names])
    indices = np.flatnonzero((hashed < share * 2**48) == is_held_out)
    if not len(indices):
        raise InputError(
            f"This share leaves no example to {'validate' if is_held_out else 'train on'}.",
            given=f"{100 * share:g} % of {len(reader)} examples, by a hash of their names",
            expected="one example or more in each part",
            hint='give another share, such as data.validation="20 %", or name the examples to validate by their path',
        )
    return _NamedSubset(reader, indices)


class _NamedSubset(Subset):
    """A subset that knows of its examples what the reader knows: the names of classes, and objects."""

    def __init__(self, reader: Reader, indices: Int64s) -> None:
        super().__init__(reader, indices)
        for name in ("classes", "category_ids"):
            if hasattr(reader, name):
                setattr(self, name, getattr(reader, name))
        if hasattr(reader, "known_objects"):
            self.known_objects = self._known_objects

    def _known_objects(self) -> KnownObjects:
        known: KnownObjects = self._reader.known_objects()  # type: ignore[attr-defined]
        owners = np.repeat(np.arange(len(known.counts)), known.counts)
        return KnownObjects(
            known.sizes[self.indices], known.counts[self.indices], known.labels[np.isin(owners, self.indices)]
        )


def one_of(reader: Reader, n: int) -> Subset:
    """Keep the first of every `n` examples: those at 0, n, 2 n, ..."""
    check_type("n", n, int, expected="a whole number", hint="give n a whole number above 0")
    check_value("n", n, PositiveInt)
    return Subset(reader, slice(None, None, n))


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of a batch that one source has read."""

    source: str
    rows: npt.NDArray[np.intp]
    """Their numbers in the batch."""
    fields: Fields


def read_by_source(
    starts: Int64s, indices: Int64s, names: Sequence[str], read: Callable[[int, Int64s], Fields]
) -> Fields:
    """Read a batch from several sources that follow one another, asking each source once.

    Each has its first example at one of `starts`; `read(source, indices)` reads it by its number, with indices that
    count from its own first example. Names are for errors.
    """
    sources = _source_of(starts, indices)
    parts = []
    for source in np.unique(sources).tolist():
        rows = np.flatnonzero(sources == source)
        parts.append(_Part(names[source], rows, read(source, indices[rows] - starts[source])))
    return parts[0].fields if len(parts) == 1 else _assembled(parts)


def _source_of(starts: Int64s, indices: Int64s) -> npt.NDArray[np.intp]:
    return np.searchsorted(starts, indices, side="right") - 1


def _assembled(parts: Sequence[_Part]) -> Fields:
    """Join the parts to the fields of the whole batch, with each row in its place."""
    for part in parts:
        _check_entries(part)
        _check_like(parts[0], part)
    return {name: _assembled_field([(part.rows, part.fields[name]) for part in parts]) for name in parts[0].fields}


def _assembled_field(parts: Sequence[tuple[npt.NDArray[np.intp], Any]]) -> Tensor | Ragged | list[Any]:
    num_rows = sum(len(rows) for rows, _ in parts)
    first = parts[0][1]
    if isinstance(first, Tensor):
        whole = torch.empty((num_rows, *first.shape[1:]), dtype=first.dtype)
        for rows, values in parts:
            _bytes_of_rows(whole)[rows] = _bytes_of_rows(values)
        return whole
    if isinstance(first, Ragged):
        places = torch.from_numpy(np.argsort(np.concatenate([rows for rows, _ in parts])))
        return Ragged.cat([values for _, values in parts])[places]
    entries: list[Any] = [None] * num_rows
    for rows, values in parts:
        for row, value in zip(rows.tolist(), values, strict=True):
            entries[row] = value
    return entries


def _bytes_of_rows(values: Tensor) -> npt.NDArray[np.uint8]:
    """View a tensor as bytes, shape (rows, bytes of a row); a contiguous one's own memory."""
    # numpy moves whole rows, where torch's index_copy_ moves one value after another: five times as long for images.
    array: npt.NDArray[np.uint8] = values.unsqueeze(-1).flatten(1).view(torch.uint8).numpy()
    return array


def _check_entries(part: _Part) -> None:
    for name, values in part.fields.items():
        if not isinstance(values, Tensor | Ragged | list) or len(values) != len(part.rows):
            size = f" of {len(values)}" if hasattr(values, "__len__") else ""
            raise DataError(
                f"The source {part.source!r} did not give one {name!r} for each example.",
                given=f"{type(values).__name__}{size}, for {len(part.rows)} examples",
                expected="a tensor, a list or a Ragged with one entry for each example",
                hint="fix read_batch of that reader",
            )


def _check_like(first: _Part, other: _Part) -> None:
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
    return {name: _kind(values) for name, values in fields.items()}


def _kind(values: Any) -> str:
    if isinstance(values, Ragged):
        return f"ragged {_kind(values.values)}"
    return f"{values.dtype} of shape {('rows', *values.shape[1:])}" if isinstance(values, Tensor) else "a list"


def _listed(described: Mapping[str, str], names: Sequence[str]) -> str:
    return "; ".join(f"{name!r}: {described.get(name, 'missing')}" for name in names)


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
