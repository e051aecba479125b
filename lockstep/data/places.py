"""Where in the stream the examples stand that come next: those that were returned first, and then the rest.

A worker to which a piece of the stream was leased may never give a gradient for it; then these examples are returned.
They come before everything that was not leased yet, so a position still says how many examples came before it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.errors import InputError

if TYPE_CHECKING:
    from lockstep.data.order import Int64s


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
        """The positions where ranges of places begin or end, and how far the places before, between and after are."""
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
