"""Readers that give one example at a time."""

from __future__ import annotations

from typing import Any, Protocol

from lockstep.checks import wrong_type
from lockstep.tracing import now_reading
from lockstep.readers.collate import Collation
from lockstep.readers.fingerprint import Fingerprint, fingerprint_of
from lockstep.readers.reader import NO_DECODER, Cost, Int64s, Reader


class ExampleReader(Protocol):
    """The least that a reader of one's own has to have.

    `cost`, `example_id` and `decoder` may be there too, and `draws_globally`: False says that nothing in it draws from
    the random generators of the process, which are else seeded for each example, and not by threads. So may
    `fingerprint`, as of a `Reader`.
    """

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def read(self, index: int) -> Any:
        """The fields of an example by name, or a pair (image, label)."""
        ...


class OneByOne:
    """A reader with `read(index)`, as one with `read_batch(indices)`.

    Tensors, arrays and numbers are stacked; values of anything else become a list. Without a `cost` of its own it is
    read by loader processes; without `example_id` the name of an example is its index.
    """

    def __init__(self, reader: ExampleReader) -> None:
        self._reader = reader
        self._collation = Collation(type(reader).__name__, "read(index)")
        self.cost: Cost = getattr(reader, "cost", "decode")
        self.decoder: str = getattr(reader, "decoder", NO_DECODER)
        self.draws_globally: bool = getattr(reader, "draws_globally", True)

    def __len__(self) -> int:
        return len(self._reader)

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """The examples of these indices.

        Raises:
            DataError: one is neither a dict nor a pair, or does not fit the first one; it is named.
        """
        return self._collation.batch_of([self._read(index) for index in indices.tolist()], indices)

    def example_id(self, index: int) -> str:
        """Its name in the reader, or its index."""
        named = getattr(self._reader, "example_id", str)
        return str(named(index))

    def fingerprint(self) -> Fingerprint:
        """That of the reader."""
        return fingerprint_of(self._reader, len(self))

    def _read(self, index: int) -> Any:
        now_reading(self.example_id(index))
        return self._reader.read(index)


def reader_of(reader: Reader | ExampleReader) -> Reader:
    """The reader itself; or, of one that gives single examples, one that gives batches.

    Raises:
        InputError: it is neither.
    """
    if not isinstance(reader, type) and hasattr(reader, "__len__"):
        if hasattr(reader, "read_batch") and hasattr(reader, "cost"):
            return reader  # type: ignore[return-value]
        if hasattr(reader, "read"):
            return OneByOne(reader)
    raise wrong_type(
        "reader",
        reader,
        expected="a reader: it has a length, and read(index), or read_batch(indices), cost and example_id",
        hint="wrap tensors in ls.data.Arrays({...}), a torch Dataset in ls.data.TorchDataset(dataset), "
        "an iterable one in ls.data.IterableLoader(dataset, batch_size=...) instead of a Loader",
    )
