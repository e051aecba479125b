"""Readers: examples by their index, from files, from tensors, from datasets of torch or from classes of the user's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from lockstep.checks import Hint, check_value, wrong_type
from lockstep.description import dtype_and_shape
from lockstep.errors import DataError, InputError, LockstepError
from lockstep.ragged import Ragged, tensors_of
from lockstep.readers.fingerprint import Fingerprint, fingerprint_of, fingerprint_of_dataset, fingerprint_of_tensors
from lockstep.tracing import now_reading, reading_listener

Int64s = npt.NDArray[np.int64]
Cost = Literal["memory", "decode"]

PAIR = ("image", "label")
"""Names for the values of an item that is a pair."""


class Reader(Protocol):
    """Examples that can be read in any order, a batch at a time. It may be forked at any moment.

    A reader may also have `fingerprint()`, without arguments, which identifies its examples as JSON: a dict of file
    names with sizes and checksums, say. It must be the same for all workers, and for a resumed run the same as at the
    save, so that other data is noticed. It should be cheap, and free of folders and times. It is asked for once.
    """

    @property
    def cost(self) -> Cost:
        """Cost of reading: "memory" for the trainer's own process, "decode" for loader processes."""
        ...

    def __len__(self) -> int: ...

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """Return the fields of these examples: tensors with the batch first, lists or `Ragged`s of its length."""
        ...

    def example_id(self, index: int) -> str:
        """Return the name of an example, for people."""
        ...


class ExampleReader(Protocol):
    """The minimal reader that a user may write: a length, and single examples.

    It may also have `cost`, `example_id`, `decoder` and `fingerprint`, as a `Reader`, and `draws_globally`: unless that
    is False, the random generators of the process are seeded for each example, and threads do not read them.
    """

    def __len__(self) -> int: ...

    def read(self, index: int) -> Any:
        """Return the fields of an example by name, or a pair (image, label)."""
        ...


AnyReader = Reader | ExampleReader | Dataset[Any] | Mapping[str, Tensor | Ragged]


def reader_of(reader: AnyReader) -> Reader:
    """Return a reader of batches: the reader itself, or one of single examples, a torch dataset or tensors by field."""
    if isinstance(reader, Mapping):
        return Arrays(reader)
    if isinstance(reader, Dataset) and not hasattr(reader, "read_batch"):
        return TorchDataset(reader)
    if not isinstance(reader, type) and hasattr(reader, "__len__"):
        if hasattr(reader, "read_batch") and hasattr(reader, "cost"):
            return cast(Reader, reader)
        if hasattr(reader, "read"):
            return OneByOne(cast(ExampleReader, reader))
    raise wrong_type(
        "reader",
        reader,
        expected="a torch Dataset, a dict of tensors, or a reader: it has a length, and read(index), or "
        "read_batch(indices), cost and example_id",
        hint='give tensors by name, {"image": images}; wrap what is like a torch Dataset in '
        "ls.data.TorchDataset(dataset); read what has no length by ls.data.IterableLoader(dataset, batch_size=...)",
    )


def reader_from(given: Any) -> Reader | None:
    """Make a reader of what a function gives, as `reader_of` does; None where it gives none."""
    return None if given is None else reader_of(given)


NO_DECODER = "none"

_NUMBERS, _NUMBER_KINDS = (bool, int, float), "biuf"


def decoder_of(reader: Reader) -> str:
    """Name the library that decodes a reader's images, and its version; both can change bits. "none": no decoding."""
    decoder: str = getattr(reader, "decoder", NO_DECODER)
    return decoder


def draws_globally(reader: Reader) -> bool:
    """Tell whether reading may draw from the process's random generators, to be seeded for each example."""
    return bool(getattr(reader, "draws_globally", False))


class ReaderWrapper:
    """Base of readers whose examples are those of another one, under the same names."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.cost = reader.cost
        self.decoder = decoder_of(reader)
        self.draws_globally = draws_globally(reader)

    def __len__(self) -> int:
        return len(self._reader)

    def example_id(self, index: int) -> str:
        """Return the name of the example in the wrapped reader."""
        return self._reader.example_id(index)

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the wrapped reader."""
        return fingerprint_of(self._reader, len(self._reader))


class Arrays:
    """Examples in memory: tensors of one length, with a row for each example, and `Ragged`s."""

    cost: Cost = "memory"

    def __init__(self, fields: Mapping[str, Tensor | Ragged]) -> None:
        self._length = _number_of_rows(fields)
        self._fields = dict(fields)

    def __len__(self) -> int:
        return self._length

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """Return the rows of these indices."""
        rows = torch.from_numpy(indices)
        return {
            name: values[rows] if isinstance(values, Ragged) else values.index_select(0, rows)
            for name, values in self._fields.items()
        }

    def example_id(self, index: int) -> str:
        """Return the index as text."""
        return str(index)

    def fingerprint(self) -> Fingerprint:
        """Describe the fields as `fingerprint_of_tensors` does."""
        return fingerprint_of_tensors(tensors_of(self._fields))


def _number_of_rows(fields: Mapping[str, Tensor | Ragged]) -> int:
    if not fields:
        raise InputError(
            "There are no fields, so there are no examples.",
            given="no fields",
            expected="one tensor or more, by name",
            hint='give them: {"image": images, "label": labels}',
        )
    for name, values in fields.items():
        if not isinstance(values, Tensor | Ragged) or (isinstance(values, Tensor) and not values.dim()):
            raise InputError(
                f"Field {name!r} has no rows.",
                given="a tensor without dimensions" if isinstance(values, Tensor) else f"a {type(values).__name__}",
                expected="a tensor with a row for each example, or a Ragged",
                hint="make it one: torch.as_tensor(values)",
            )
    (first, length), *others = ((name, len(values)) for name, values in fields.items())
    for name, other in others:
        if other != length:
            raise InputError(
                f"Field {name!r} has another number of rows than {first!r}.",
                given=f"{other} rows",
                expected=f"{length} rows",
                hint="give every field one row for each example",
            )
    return length


class ItemReader:
    """Base of readers that read item by item, and collate the items to a batch."""

    cost: Cost = "decode"
    draws_from_numpy = False
    """Whether an item has drawn from numpy's generator; noted by the loader, which seeds it for each item then."""
    draws_from_python = False
    """The same of Python's."""

    def __init__(self, collation: Collation) -> None:
        self.collation = collation

    def item(self, index: int) -> Any:
        """Read one item."""
        raise NotImplementedError

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """Read and collate the items of these indices; an error names an item that differs from the first one."""
        return self.collation.batch_of([self.item(index) for index in indices.tolist()], indices)

    def example_id(self, index: int) -> str:
        """Return the index as text."""
        return str(index)


class TorchDataset(ItemReader):
    """A map-style dataset of torch, whose items are dicts, or tuples of as many values as `fields` has names.

    Tensors, arrays and numbers are stacked, if all items have the same shape and dtype; values of anything else become
    a list. What an item draws from the random generators of the process is seeded by its position in the stream; an
    first batch of which an item draws from Python's or numpy's is read twice.

    Args:
        dataset: with a length, and items by index.
        fields: names for the values of an item that is a tuple: ("image", "mask"). With one name, an item may also be
            the value itself.
        draws: whether items draw random numbers, as most transforms do. If not, threads may read them, and reading is
            a little faster.
    """

    def __init__(self, dataset: Dataset[Any], fields: tuple[str, ...] = PAIR, *, draws: bool = True) -> None:
        check_value("fields", fields, Annotated[tuple[str, ...], Hint('write fields=("image", "mask")')])
        check_value("draws", draws, bool)
        iterable = isinstance(dataset, IterableDataset)
        if iterable or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise InputError(
                f"{type(dataset).__name__} has no examples by index.",
                given="an iterable dataset" if iterable else repr(dataset),
                expected="a map-style dataset, with __len__ and __getitem__",
                hint="give it both; or train with ls.data.IterableLoader(dataset, ...), which cannot resume exactly",
            )
        super().__init__(Collation(type(dataset).__name__, "__getitem__ of the dataset", tuple(fields)))
        self._dataset = dataset
        self.draws_globally = draws

    def __len__(self) -> int:
        return len(cast(Any, self._dataset))

    def item(self, index: int) -> Any:
        """Return the dataset's item; an error names one that fails."""
        if (report := reading_listener()) is not None:
            report(str(index))
        try:
            return self._dataset[index]
        except LockstepError:
            raise
        except Exception as error:
            raise self.collation.failed(index, error) from error

    def fingerprint(self) -> Fingerprint:
        """Return the dataset's own fingerprint, or that of `fingerprint_of_dataset`."""
        return fingerprint_of_dataset(self._dataset)


class OneByOne(ItemReader):
    """Wraps a reader with `read(index)` as one with `read_batch(indices)`.

    Tensors, arrays and numbers are stacked; values of anything else become a list. Without a `cost` of its own the
    reader is read by loader processes; without `example_id` the name of an example is its index.
    """

    def __init__(self, reader: ExampleReader) -> None:
        super().__init__(Collation(type(reader).__name__, "read(index)"))
        self._reader = reader
        self.cost = getattr(reader, "cost", "decode")
        self.decoder: str = getattr(reader, "decoder", NO_DECODER)
        self.draws_globally: bool = getattr(reader, "draws_globally", True)

    def __len__(self) -> int:
        return len(self._reader)

    def item(self, index: int) -> Any:
        """Read an example."""
        now_reading(self.example_id(index))
        return self._reader.read(index)

    def example_id(self, index: int) -> str:
        """Return the example's name in the reader, or its index."""
        named = getattr(self._reader, "example_id", str)
        return str(named(index))

    def fingerprint(self) -> Fingerprint:
        """Return the reader's fingerprint."""
        return fingerprint_of(self._reader, len(self))


@dataclass(frozen=True, slots=True)
class Collation:
    """Makes a batch of items; an error names the item that cannot be part of it by its number.

    An item is a dict of fields, or a tuple of the values of `fields`. Tensors, arrays and numbers are stacked, if all
    items have the same shape and dtype; values of anything else become a list.
    """

    dataset: str
    """The class that items come from, for errors."""
    method: str
    """The method that makes items, to be fixed where one is wrong, for errors."""
    fields: tuple[str, ...] = PAIR
    """Names for the values of an item that is no dict."""

    def batch_of(self, items: Sequence[Any], indices: Int64s, ragged: Collection[str] = ()) -> dict[str, Any]:
        """Collate items to fields: tensors with the batch first, lists of its length, or `Ragged` where so named."""
        numbers = indices.tolist()
        columns = self._columns(items, numbers)
        return {name: self._column(name, values, numbers, name in ragged) for name, values in columns.items()}

    def failed(self, number: int, error: Exception) -> DataError:
        """Make the error for an item that raised one."""
        return self.unusable(number, f"{type(error).__name__}: {error}", "an item")

    def unusable(self, number: int, given: str, expected: str) -> DataError:
        """Make the error for an item that cannot be used."""
        return DataError(
            f"Item {number} of {self.dataset} cannot be used.",
            given=given,
            expected=expected,
            hint=f"fix {self.method}, or leave the item out",
        )

    def _columns(self, items: Sequence[Any], numbers: Sequence[int]) -> dict[str, Sequence[Any]]:
        if {*map(type, items)} == {tuple} and {*map(len, items)} == {len(self.fields)}:
            return dict(zip(self.fields, zip(*items, strict=True), strict=True))
        rows = [
            item if type(item) is dict else self._fields(item, number)
            for item, number in zip(items, numbers, strict=True)
        ]
        names = rows[0].keys()
        for row, number in zip(rows, numbers, strict=True):
            if row.keys() != names:
                raise self.unusable(number, f"the fields {_names(row)}", f"{_names(rows[0])}, as in item {numbers[0]}")
        return {name: [row[name] for row in rows] for name in names}

    def _fields(self, item: Any, number: int) -> Mapping[str, Any]:
        is_row = isinstance(item, (tuple, list))
        if is_row and len(item) == len(self.fields):
            return dict(zip(self.fields, item, strict=True))
        if isinstance(item, Mapping):
            return item
        if not is_row and len(self.fields) == 1:
            return {self.fields[0]: item}
        size = f" of {len(item)}" if is_row else ""
        names = f"({', '.join(self.fields)})"
        expected = "a dict of fields, or " + (f"a pair {names}" if len(self.fields) == 2 else f"a tuple {names}")
        raise self.unusable(number, f"a {type(item).__name__}{size}", expected)

    def _column(
        self, name: str, values: Sequence[Any], numbers: Sequence[int], is_ragged: bool
    ) -> Tensor | Ragged | list[Any]:
        if not is_ragged and (stacked := _stacked(values)) is not None:
            return stacked
        tensors = [self._as_tensor(name, value, number) for value, number in zip(values, numbers, strict=True)]
        stackable = [tensor for tensor in tensors if tensor is not None]
        if not stackable:
            return list(values)
        kinds = [_kind(tensor, is_ragged) for tensor in tensors]
        for number, kind in zip(numbers, kinds, strict=True):
            if kind != kinds[0]:
                raise self.unusable(number, f"{name!r}: {kind}", f"{kinds[0]}, as in item {numbers[0]}")
        return Ragged.of(stackable) if is_ragged else torch.stack(stackable)

    def _as_tensor(self, name: str, value: Any, number: int) -> Tensor | None:
        try:
            return _as_tensor(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise self.unusable(number, f"{name!r}: {error}", "numbers that torch can hold") from error


def _stacked(values: Sequence[Any]) -> Tensor | None:
    """Stack values of one kind at once; None for those that differ, which are then looked at one by one."""
    first, kind = values[0], type(values[0])
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        if {*map(type, values)} != {kind}:
            return None
        if kind in _NUMBERS:
            # Of many ints numpy makes an array in a third of the time.
            return torch.from_numpy(np.array(values, np.int64)) if kind is int else torch.tensor(values)
        if kind is Tensor and len({value.dtype for value in values}) == 1:
            return torch.stack(list(values))  # an error for other shapes
        if kind is np.ndarray and first.dtype.kind in _NUMBER_KINDS and first.dtype.isnative:
            dtype, shape = first.dtype, first.shape
            if all(value.dtype == dtype and value.shape == shape for value in values):
                rows = np.empty((len(values), *shape), dtype)  # else the rows keep their order of axes in memory
                return torch.from_numpy(np.stack(values, out=rows))
    return None


def _kind(value: Tensor | None, is_ragged: bool) -> str:
    """Describe the dtype and shape that all items of a batch must share; ragged ones differ in the first number."""
    if value is None:
        return "no tensor"
    kind = dtype_and_shape(value)
    return kind.replace(f"({len(value)},", "(n,") if is_ragged and value.ndim else kind


def _as_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, _NUMBERS):
        return torch.tensor(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMBER_KINDS:
        return torch.from_numpy(np.array(value))  # a copy: the array may be read-only
    return None


def _names(item: Mapping[str, Any]) -> str:
    return ", ".join(map(str, item))
