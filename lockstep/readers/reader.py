"""Readers: where examples come from, by their index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from lockstep.checks import check_switch
from lockstep.errors import InputError, LockstepError
from lockstep.tracing import now_reading
from lockstep.readers.collate import Collation
from lockstep.readers.fingerprint import Fingerprint, fingerprint_of_dataset, fingerprint_of_tensors

Int64s = npt.NDArray[np.int64]
Cost = Literal["memory", "decode"]


class Reader(Protocol):
    """Examples that can be read in any order, a batch at a time. It may be forked at any moment.

    A reader may also have `fingerprint()`, without arguments: what its examples are made of, as JSON, such as a dict of
    file names with sizes and checksums. All workers must get the same, and a resumed run what was saved with it; so
    other data is noticed. It should be cheap, and tell nothing of folders and times. It is asked for once.
    """

    @property
    def cost(self) -> Cost:
        """Who reads: the trainer's own process what lies in `memory`, loader processes what they have to `decode`."""
        ...

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """The fields of these examples: tensors with the batch first, or lists of its length."""
        ...

    def example_id(self, index: int) -> str:
        """The name of an example, for people."""
        ...


NO_DECODER = "none"


def decoder_of(reader: Reader) -> str:
    """What decodes the images of a reader, with its version: it can change bits. "none" where nothing is decoded."""
    decoder: str = getattr(reader, "decoder", NO_DECODER)
    return decoder


def draws_globally(reader: Reader) -> bool:
    """Whether its examples may draw from the random generators of the process: they are seeded for each of them."""
    return bool(getattr(reader, "draws_globally", False))


class Arrays:
    """Examples that lie in memory: tensors of one length, a row an example.

    Raises:
        InputError: there is no field, a field has no rows, or their numbers differ.
    """

    cost: Cost = "memory"

    def __init__(self, fields: Mapping[str, Tensor]) -> None:
        self._length = _number_of_rows(fields)
        self._fields = dict(fields)

    def __len__(self) -> int:
        return self._length

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """The rows of these indices."""
        rows = torch.from_numpy(indices)
        return {name: values.index_select(0, rows) for name, values in self._fields.items()}

    def example_id(self, index: int) -> str:
        """Its index."""
        return str(index)

    def fingerprint(self) -> Fingerprint:
        """The dtype, the shape and the checksum of each field; above 1 GiB the checksum is of evenly spaced rows."""
        return fingerprint_of_tensors(self._fields)


class TorchDataset:
    """A map-style dataset of torch, whose items are dicts, or pairs (image, label).

    Tensors, arrays and numbers are stacked, if all items have the same shape and dtype; values of anything else become
    a list. What an item draws from the random generators of the process is seeded by its position in the stream.

    Args:
        dataset: with a length, and items by index.
        draws: whether items draw random numbers, as most transforms do. Without, threads may read them, and reading
            is a little faster.

    Raises:
        InputError: the dataset has no length, or no items by index.
    """

    cost: Cost = "decode"

    def __init__(self, dataset: Dataset[Any], *, draws: bool = True) -> None:
        check_switch("draws", draws)
        iterable = isinstance(dataset, IterableDataset)
        if iterable or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise InputError(
                f"{type(dataset).__name__} has no examples by index.",
                given="an iterable dataset" if iterable else repr(dataset),
                expected="a map-style dataset, with __len__ and __getitem__",
                hint="give it both; or train with ls.data.IterableLoader(dataset, ...), which cannot resume exactly",
            )
        self._dataset = dataset
        self.draws_globally = draws
        self._collation = Collation(type(dataset).__name__, "__getitem__ of the dataset")

    def __len__(self) -> int:
        return len(cast(Any, self._dataset))

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """The items of these indices.

        Raises:
            DataError: an item cannot be read, or does not fit the first one; it is named.
        """
        return self._collation.batch_of([self._item(index) for index in indices.tolist()], indices)

    def example_id(self, index: int) -> str:
        """Its index."""
        return str(index)

    def fingerprint(self) -> Fingerprint:
        """That of the dataset, if it has `fingerprint()`; else its class and length, and what torch's own ones hold."""
        return fingerprint_of_dataset(self._dataset)

    def _item(self, index: int) -> Any:
        now_reading(self.example_id(index))
        try:
            return self._dataset[index]
        except LockstepError:
            raise
        except Exception as error:
            raise self._collation.failed(index, error) from error


def _number_of_rows(fields: Mapping[str, Tensor]) -> int:
    if not fields:
        raise InputError(
            "There are no fields, so there are no examples.",
            given="no fields",
            expected="one tensor or more, by name",
            hint='give them: {"image": images, "label": labels}',
        )
    for name, values in fields.items():
        if not isinstance(values, Tensor) or not values.dim():
            raise InputError(
                f"Field {name!r} has no rows.",
                given="a tensor without dimensions" if isinstance(values, Tensor) else f"a {type(values).__name__}",
                expected="a tensor with a row for each example",
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
