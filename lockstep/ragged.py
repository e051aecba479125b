"""Values of which each example of a batch has its own number, such as the boxes of an image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import index
from typing import TYPE_CHECKING, Any, overload

import torch

from lockstep.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ragged:
    """The values of all examples of a batch, one after another, and how many each of them has.

    Two tensors, whatever the size of the batch: `ragged[row]` are the values of one example, `ragged[2:4]` those of
    some, views both; `ragged[rows]`, with a tensor of row numbers, copies those of these rows.

    Raises:
        InputError: the lengths are not int64 of shape (batch,) on the CPU, one is negative, or their sum is not the
            number of values.
    """

    values: Tensor
    """Values of all examples: shape (total, ...)."""
    lengths: Tensor
    """The number of values of each example: int64 of shape (batch,), always on the CPU."""

    def __post_init__(self) -> None:
        lengths = self.lengths
        is_right = lengths.dtype == torch.int64 and lengths.dim() == 1 and lengths.device.type == "cpu"
        if not (is_right and self.values.dim() and sorted(self._ends) == [*self._ends[:-1], len(self.values)]):
            raise InputError(
                "The lengths of a Ragged do not say whose its values are.",
                given=f"values of shape {tuple(self.values.shape)}; lengths {_described(lengths)}",
                expected="lengths of dtype int64 and shape (batch,) on the CPU, 0 or more each, that add up to the "
                "number of values",
                hint="make it of the tensors of the examples: Ragged.of([boxes, more_boxes])",
            )

    @classmethod
    def of(cls, rows: Sequence[Tensor]) -> Ragged:
        """Join the values of each example, tensors of shape (n, ...) that differ in n alone.

        Raises:
            InputError: there is no example, or one has values of another dtype or shape than the first.
        """
        kinds = [_kind(row) for row in rows]
        if not kinds or None in kinds or len(set(kinds)) > 1:
            wrong = next((row for row, kind in zip(rows, kinds, strict=True) if kind is None or kind != kinds[0]), None)
            raise InputError(
                "These examples cannot be joined to a Ragged.",
                given="no examples" if wrong is None else f"{_described(rows[0])} and {_described(wrong)}",
                expected="tensors of one dtype and of shape (n, ...), which differ in n alone",
                hint="give an example without boxes torch.zeros(0, 4)",
            )
        return cls(torch.cat(list(rows)), torch.tensor([len(row) for row in rows]))

    @classmethod
    def cat(cls, parts: Sequence[Ragged]) -> Ragged:
        """Join batches, one after another."""
        return cls(torch.cat([part.values for part in parts]), torch.cat([part.lengths for part in parts]))

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.split(self.values, self.lengths.tolist()))

    @overload
    def __getitem__(self, rows: int) -> Tensor: ...

    @overload
    def __getitem__(self, rows: slice | Tensor) -> Ragged: ...

    def __getitem__(self, rows: int | slice | Tensor) -> Tensor | Ragged:
        if isinstance(rows, torch.Tensor) and rows.dim():
            return self._of_rows(rows)
        if isinstance(rows, slice):
            some = range(len(self))[rows]
            if some.step != 1:
                return self._of_rows(torch.tensor(some, dtype=torch.int64))
            return Ragged(self.values[self._ends[some.start] : self._ends[some.stop]], self.lengths[rows])
        row = range(len(self))[index(rows)]
        return self.values[self._ends[row] : self._ends[row + 1]]

    def _of_rows(self, rows: Tensor) -> Ragged:
        lengths, starts = self.lengths[rows], (self.lengths.cumsum(0) - self.lengths)[rows]
        places = torch.arange(int(lengths.sum())) + (starts - lengths.cumsum(0) + lengths).repeat_interleave(lengths)
        return Ragged(self.values[places.to(self.values.device)], lengths)

    @cached_property
    def _ends(self) -> list[int]:
        """Where the values of each row end, after a 0: row i has those from `_ends[i]` to `_ends[i + 1]`."""
        return list(accumulate(self.lengths.tolist(), initial=0))

    @property
    def owner(self) -> Tensor:
        """The row of each value: int64 of shape (total,), on the device of the values."""
        return torch.repeat_interleave(self.lengths).to(self.values.device)

    def kept(self, mask: Tensor) -> Ragged:
        """Keep the values where a mask of shape (total,) is true; a row may keep none."""
        rows = torch.repeat_interleave(self.lengths)[mask.cpu()]
        return Ragged(self.values[mask], rows.bincount(minlength=len(self)))

    def replaced(self, values: Tensor) -> Ragged:
        """Put other values of shape (total, ...) in the place of these."""
        return Ragged(values, self.lengths)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Ragged:
        """Copy the values to a device; the lengths stay on the CPU."""
        return Ragged(self.values.to(device, non_blocking=non_blocking), self.lengths)

    def pin_memory(self) -> Ragged:
        """Copy both tensors to pinned memory, from where a device can copy them in the background."""
        return Ragged(self.values.pin_memory(), self.lengths.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the values' memory from being used again before the work of a stream is done, as a tensor's method."""
        self.values.record_stream(stream)


def tensors_of(fields: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among some fields by name: of a ragged field NAME two, NAME.values and NAME.lengths."""
    tensors: dict[str, Tensor] = {}
    for name, value in fields.items():
        if isinstance(value, Ragged):
            tensors |= {f"{name}.values": value.values, f"{name}.lengths": value.lengths}
        elif isinstance(value, torch.Tensor):
            tensors[name] = value
    return tensors


def _kind(row: object) -> tuple[torch.dtype, torch.Size] | None:
    """Return what all examples have alike; None of anything but a tensor with dimensions."""
    return (row.dtype, row.shape[1:]) if isinstance(row, torch.Tensor) and row.dim() else None


def _described(tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}"
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
