"""Rows of a batch: which places of the stream they are, and which examples stand there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.data.order import Int64s
from lockstep.errors import InputError


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one batch, each of shape (rows,)."""

    positions: Int64s
    """In the stream; of an evaluation, the index again."""
    indices: Int64s
    """Of the examples."""

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(self.positions[rows], self.indices[rows])

    def __str__(self) -> str:
        return f"positions {self.positions[0]} to {self.positions[-1]} of the stream"


def evaluation_rows(start: int, micro_batch: int, size: int) -> Rows:
    """The rows of a micro-batch that begins at an index; the last one of `size` examples is repeated to fill it."""
    indices = np.minimum(np.arange(start, start + micro_batch), size - 1)
    return Rows(indices, indices)


def offsets_of(batch_size: int, towers: range, num_towers: int) -> Int64s:
    """Places within a batch of the rows of `towers`.

    Raises:
        InputError: the batch size does not divide by the number of towers.
    """
    if batch_size % num_towers:
        below = batch_size // num_towers * num_towers
        near = f"{below} or {below + num_towers}" if below else f"{num_towers}"
        raise InputError(
            f"A batch of {batch_size} examples cannot be cut into {num_towers} equal parts.",
            given=f"batch size {batch_size}, {num_towers} towers",
            expected="a batch size that divides by the number of towers",
            mend=f"use a batch size of {near}, or another number of towers",
        )
    share = batch_size // num_towers
    return (np.asarray(towers, dtype=np.int64)[:, None] * share + np.arange(share)).ravel()
