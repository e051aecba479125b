"""Where in the stream the examples stand that come next: those that were returned first, and then the rest.

A worker to which a piece of the stream was leased may never give a gradient for it; then these examples are returned.
They come before everything that was not leased yet, so a position still says how many examples came before it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from lockstep.checks import Hint, Range, check_all, check_type, check_value, wrong_type
from lockstep.errors import InputError

if TYPE_CHECKING:
    from lockstep.data.order import Int64s


@dataclass(frozen=True)
class Places:
    """From `position` on the places of `returned`, and from then on each position is its own place."""

    position: int = 0
    returned: tuple[range, ...] = ()
    """Ascending and apart."""

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


_HAND = "resume from another checkpoint: this one was changed by hand or by another program"
_Place = Annotated[int, Range(ge=0, lt=1 << 62), Hint(_HAND)]


def check_stream(state: Mapping[str, Any]) -> None:
    """Refuse what no loader has given as its state; raises InputError. All but the position may be missing."""
    check_type("state", state, Mapping, expected="what Loader.state() returned", hint=_HAND)
    check_value("position", state.get("position"), _Place)
    for name in ("seed", "num_examples", "epoch_size"):
        check_value(name, state.get(name, 0), Annotated[int, Hint(_HAND)])
    check_type("data", state.get("data", {}), Mapping, expected="a fingerprint of the examples", hint=_HAND)
    skipped, bad = state.get("skipped", []), state.get("quarantine", {})
    check_all("skipped", skipped, int, hint=_HAND)
    for index, position in enumerate(skipped):
        check_value(f"skipped[{index}]", position, _Place)
    check_type("quarantine", bad, Mapping, expected="reasons by index", hint=_HAND)
    for index, reason in bad.items():
        if not (re.fullmatch("[0-9]{1,18}", str(index)) and isinstance(reason, str)):
            raise wrong_type(f"quarantine[{index!r}]", reason, expected="the reason of an example's index", hint=_HAND)
    read_ranges(state)


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
        hint=_HAND,
    )


def _are_ranges(saved: Any) -> bool:
    return isinstance(saved, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(mark) is int and mark >= 0 for mark in pair)
        for pair in saved
    )
