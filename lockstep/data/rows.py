"""Rows of a batch: their positions in the stream, the places of these, and the examples that stand there.

A position is its own place, except after examples were returned: a worker to which a piece of the stream was leased may
never give a gradient for it. Returned examples come before everything that was not leased yet, so a position still says
how many examples came before it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

from lockstep.checks import check_even_split
from lockstep.data.order import Int64s, Order
from lockstep.errors import InputError
from lockstep.randomness import Draws

# The order of this many rows is computed at once: numpy's price per call is then spread over many batches.
_ROWS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one batch, each of shape (rows,)."""

    positions: Int64s
    """Positions in the stream; in an evaluation, equal to the indices."""
    indices: Int64s
    partner_places: Int64s | None = None
    """For partners: where they stand in the stream, while `positions` are those of the examples that need them."""

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def are_partners(self) -> bool:
        """Whether they are read for other examples."""
        return self.partner_places is not None

    @property
    def places(self) -> Int64s:
        """Where the examples stand in the stream."""
        return self.positions if self.partner_places is None else self.partner_places

    def pairs(self) -> list[tuple[int, int]]:
        """Return the position and the index of each row."""
        return list(zip(self.positions.tolist(), self.indices.tolist(), strict=True))

    def alone(self, row: int) -> Rows:
        """Return one row."""
        one = slice(row, row + 1)
        places = None if self.partner_places is None else self.partner_places[one]
        return Rows(self.positions[one], self.indices[one], places)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch to read: so small a value that it always fits into a pipe."""

    start: int
    """Position of its first example; in an evaluation, its index."""

    def __str__(self) -> str:
        return f"the batch at position {self.start}"


PartnersOf = Callable[[Int64s, int], Rows]
"""Draws a partner for the example at each position, by a seed."""


class TrainingRows:
    """A worker's rows of the batches of a stream, each of so many examples over all towers; see `offsets_of`."""

    def __init__(
        self, order: Order, size: int, seed: int, batch_size: int, offsets: Int64s, places: Places | None = None
    ) -> None:
        self._order, self._size, self._seed = order, size, seed
        self._places = places or Places()
        self._offsets = offsets
        self._next_starts = batch_size * np.arange(max(1, _ROWS_AT_ONCE // len(offsets)))
        self._known: dict[int, Rows] = {}

    def __call__(self, request: BatchRequest) -> Rows:
        """Return the rows of a batch; those of the batches that follow are computed with them."""
        rows = self._known.get(request.start)
        if rows is None:
            starts = request.start + self._next_starts
            positions = self._places.of(starts[:, None] + self._offsets)
            indices = self._order.indices(positions.ravel(), self._size, self._seed).reshape(positions.shape)
            known = dict(zip(starts.tolist(), map(Rows, positions, indices), strict=True))
            self._known, rows = known, known[request.start]
        return rows

    def partners(self, positions: Int64s, seed: int) -> Rows:
        """Draw a partner for the example at each position, see `draw_partners`."""
        return draw_partners(positions, seed, self._order, self._size, self._seed)


def draw_partners(positions: Int64s, seed: int, order: Order, size: int, order_seed: int) -> Rows:
    """Draw for each position another one of the same epoch, each as likely; of an epoch of one position, that one.

    `seed` is that of the draws, `order_seed` that of the stream.
    """
    epoch_size = order.epoch_size(size)
    places = positions % epoch_size
    others = places + Draws(seed, positions).integers("partner", 1, max(2, epoch_size))
    partners = positions - places + others % epoch_size
    return Rows(positions, order.indices(partners, size, order_seed), partners)


@dataclass(frozen=True)
class EvaluationRows:
    """The rows of micro-batches in the order of the reader; the last of `size` examples is repeated to fill one."""

    micro_batch: int
    size: int

    def __call__(self, request: BatchRequest) -> Rows:
        """Return the rows of a micro-batch."""
        indices = np.minimum(np.arange(request.start, request.start + self.micro_batch), self.size - 1)
        return Rows(indices, indices)

    def partners(self, positions: Int64s, seed: int) -> NoReturn:
        """Raise InputError: each example is scored by itself."""
        raise InputError(
            "Examples that are scored have no partners.",
            given="an evaluation with an augmentation that puts several examples together, such as Mosaic or MixUp",
            expected="augmentations that take each example by itself",
            hint="give the loader that is evaluated other augmentations than the one that is trained on",
        )


RowsOf = TrainingRows | EvaluationRows
"""Computes the rows of a batch, by arithmetic alone."""


def offsets_of(batch_size: int, towers: range, num_towers: int) -> Int64s:
    """Compute the places within a batch of the rows of `towers`; raises InputError where it cannot be cut evenly."""
    check_even_split(batch_size, num_towers)
    share = batch_size // num_towers
    return (np.asarray(towers, dtype=np.int64)[:, None] * share + np.arange(share)).ravel()


@dataclass(frozen=True)
class Places:
    """Places in the stream: from `position` on those of `returned`, and after them each position is its own place."""

    position: int = 0
    returned: tuple[range, ...] = ()
    """Ascending, disjoint ranges of positions."""

    @property
    def end(self) -> int:
        """The first position after the returned ones; no later place has come before."""
        return self.position + sum(map(len, self.returned))

    def of(self, positions: Int64s) -> Int64s:
        """Return the place of each position; one that is past is its own place."""
        if not self.returned:
            return positions
        marks, distances = self._table
        return positions + distances[np.searchsorted(marks, positions, side="right")]

    @cached_property
    def _table(self) -> tuple[Int64s, Int64s]:
        """The positions from which on places are at another distance, and the distances before and after each."""
        starts = np.array([each.start for each in self.returned], dtype=np.int64)
        lengths = np.array([len(each) for each in self.returned], dtype=np.int64)
        marks = self.position + np.cumsum([0, *lengths])
        return marks, np.array([0, *(starts - marks[:-1]), 0])

    def ranges_of(self, positions: Sequence[range]) -> list[range]:
        """Return the places of ranges of positions that are apart: as few ranges as can be, ascending."""
        marks, distances = (each.tolist() for each in self._table)
        places = []
        for (start, stop), distance in zip(pairwise([0, *marks, sys.maxsize]), distances, strict=True):
            pieces = (range(max(start, each.start), min(stop, each.stop)) for each in positions)
            places += [range(each.start + distance, each.stop + distance) for each in pieces if each]
        return _joined(sorted(places, key=lambda each: each.start))


def _joined(ascending: Iterable[range]) -> list[range]:
    joined: list[range] = []
    for each in ascending:
        if joined and joined[-1].stop == each.start:
            joined[-1] = range(joined[-1].start, each.stop)
        else:
            joined.append(each)
    return joined


def without_first(returned: Sequence[range], count: int) -> list[range]:
    """Return what is left of ranges after their first `count` members."""
    left = []
    for each in returned:
        if len(each) > count:
            left.append(each[count:])
        count = max(0, count - len(each))
    return left


def saved_ranges(returned: Sequence[range]) -> list[list[int]]:
    """Return ranges as JSON, for `read_ranges`."""
    return [[each.start, each.stop] for each in returned]


FORGED = "resume from another checkpoint: this one was changed by hand or by another program"
"""The hint for a saved state that no loader has given."""


def read_ranges(state: Mapping[str, Any]) -> list[range]:
    """Return the returned ranges of a loader's state; raises InputError where they cannot be."""
    saved = state.get("returned", [])
    if _are_ranges(saved):
        ranges = [range(*pair) for pair in saved]
        marks = [mark for pair in saved for mark in pair]
        if marks == sorted({*marks}) and (not marks or marks[-1] <= state["position"] + sum(map(len, ranges))):
            return ranges
    raise InputError(
        "The saved stream has examples to come that it cannot have left out.",
        given=f'"returned": {str(saved)[:200]} at position {state["position"]}',
        expected="ascending pairs [start, stop] of places that were reached",
        hint=FORGED,
    )


def _are_ranges(saved: Any) -> bool:
    return isinstance(saved, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(mark) is int and mark >= 0 for mark in pair)
        for pair in saved
    )
