"""Rows of a batch: which places of the stream they are, and which examples stand there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lockstep.checks import check_even_split
from lockstep.data.order import Int64s, Order

# The order of this many rows is computed at once: numpy's price per call is then spread over many batches.
_ROWS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one batch, each of shape (rows,)."""

    positions: Int64s
    """In the stream; of an evaluation, the index again."""
    indices: Int64s
    """Of the examples."""

    def __len__(self) -> int:
        return len(self.indices)

    def alone(self, row: int) -> Rows:
        """One of them."""
        return Rows(self.positions[row : row + 1], self.indices[row : row + 1])


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch that is to be read: so little that it always fits through a pipe."""

    start: int
    """The position of its first example; of an evaluation, its index."""

    def __str__(self) -> str:
        return f"the batch at position {self.start}"


class RowsOf(Protocol):
    """The rows of a batch, by where it starts."""

    def __call__(self, due: BatchRequest) -> Rows:
        """Arithmetic alone."""
        ...


class TrainingRows:
    """A worker's rows of the batches of a stream.

    Args:
        order: which examples stand where.
        size: number of examples.
        seed: of the stream.
        batch_size: examples of a batch, over all towers.
        offsets: places of this worker's rows within a batch.
    """

    def __init__(self, order: Order, size: int, seed: int, batch_size: int, offsets: Int64s) -> None:
        self._order, self._size, self._seed = order, size, seed
        self._offsets = offsets
        self._next_starts = batch_size * np.arange(max(1, _ROWS_AT_ONCE // len(offsets)))
        self._known: dict[int, Rows] = {}

    def __call__(self, due: BatchRequest) -> Rows:
        """The rows of the batch that starts there; those of the batches that follow are computed with them."""
        rows = self._known.get(due.start)
        if rows is None:
            starts = due.start + self._next_starts
            positions = starts[:, None] + self._offsets
            indices = self._order.indices(positions.ravel(), self._size, self._seed).reshape(positions.shape)
            known = dict(zip(starts.tolist(), map(Rows, positions, indices), strict=True))
            self._known, rows = known, known[due.start]
        return rows


@dataclass(frozen=True)
class EvaluationRows:
    """The rows of micro-batches in the order of the reader; the last of `size` examples is repeated to fill one."""

    micro_batch: int
    size: int

    def __call__(self, due: BatchRequest) -> Rows:
        """The rows of the micro-batch that begins at this index."""
        indices = np.minimum(np.arange(due.start, due.start + self.micro_batch), self.size - 1)
        return Rows(indices, indices)


def offsets_of(batch_size: int, towers: range, num_towers: int) -> Int64s:
    """Places within a batch of the rows of `towers`.

    Raises:
        InputError: the batch size does not divide by the number of towers.
    """
    check_even_split(batch_size, num_towers)
    share = batch_size // num_towers
    return (np.asarray(towers, dtype=np.int64)[:, None] * share + np.arange(share)).ravel()
