"""From the items of a dataset of torch to the fields of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.errors import DataError

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Collation:
    """How items become a batch, and how one that cannot be part of it is named: by its number.

    An item is a dict of fields, or a pair (image, label). Tensors, arrays and numbers are stacked, if all items have
    the same shape and dtype; values of anything else become a list.
    """

    dataset: str
    """The name of its class."""
    method: str
    """What gives its items, and has to be fixed where one is unfit."""

    def batch_of(self, items: Sequence[Any], numbers: Int64s) -> dict[str, Any]:
        """The fields of these items: tensors with the batch first, or lists of its length.

        Raises:
            DataError: an item is neither a dict nor a pair, or does not fit the first one; it is named.
        """
        rows = [self._fields(item, number) for item, number in zip(items, numbers, strict=True)]
        for row, number in zip(rows, numbers, strict=True):
            if row.keys() != rows[0].keys():
                raise self.unfit(number, f"the fields {_names(row)}", f"{_names(rows[0])}, as in item {numbers[0]}")
        return {name: self._column(name, [row[name] for row in rows], numbers) for name in rows[0]}

    def failed(self, number: int, error: Exception) -> DataError:
        """The error for an item in whose place the dataset has raised one."""
        return self.unfit(number, f"{type(error).__name__}: {error}", "an item")

    def unfit(self, number: int, given: str, expected: str) -> DataError:
        """The error for an item that cannot be used."""
        return DataError(
            f"Item {number} of {self.dataset} cannot be used.",
            given=given,
            expected=expected,
            hint=f"fix {self.method}, or leave the item out",
        )

    def _fields(self, item: Any, number: int) -> Mapping[str, Any]:
        if isinstance(item, Mapping):
            return item
        if isinstance(item, tuple | list) and len(item) == 2:
            return {"image": item[0], "label": item[1]}
        size = f" of {len(item)}" if isinstance(item, tuple | list) else ""
        raise self.unfit(number, f"a {type(item).__name__}{size}", "a dict of fields, or a pair (image, label)")

    def _column(self, name: str, values: Sequence[Any], numbers: Int64s) -> Tensor | list[Any]:
        tensors = [self._as_tensor(name, value, number) for value, number in zip(values, numbers, strict=True)]
        stackable = [tensor for tensor in tensors if tensor is not None]
        if not stackable:
            return list(values)
        expected = _kind(tensors[0])
        for number, tensor in zip(numbers, tensors, strict=True):
            if _kind(tensor) != expected:
                raise self.unfit(number, f"{name!r}: {_kind(tensor)}", f"{expected}, as in item {numbers[0]}")
        return torch.stack(stackable)

    def _as_tensor(self, name: str, value: Any, number: int) -> Tensor | None:
        try:
            return _as_tensor(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise self.unfit(number, f"{name!r}: {error}", "numbers that torch can hold") from error


def _kind(value: Tensor | None) -> str:
    """What has to be the same in all items of a batch, in words."""
    if value is None:
        return "no tensor"
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


def _as_tensor(value: Any) -> Tensor | None:
    """The value as a tensor, where it is numbers."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float):
        return torch.tensor(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        return torch.from_numpy(np.array(value))  # a copy: the array may be read-only
    return None


def _names(item: Mapping[str, Any]) -> str:
    return ", ".join(map(str, item))
