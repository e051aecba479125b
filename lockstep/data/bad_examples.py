"""Examples that cannot be read: what is read in their place, and how many of them a run tolerates.

Whether an example is bad at a position depends on its file and on what is drawn there, and its replacement is
arithmetic. So the stream is the same for any number of workers and loader processes, and after any resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import numpy as np

from lockstep.data.order import Order
from lockstep.data.rows import Rows
from lockstep.errors import DataError
from lockstep.types import BadExample

Policy = Literal["raise", "skip"]
POLICIES: tuple[Policy, ...] = ("raise", "skip")

IsBad = Callable[[int, int], bool]
"""Whether an example is bad at a position: `is_bad(position, index)`."""
ChooseRows = Callable[[Rows, IsBad], Rows]
"""Chooses the rows to read where some are bad; returns the same object where none is."""

_MOST_TRIED = 10_000
_AT_ONCE = 16
_MOST_NAMED = 3


@dataclass(frozen=True)
class ReplaceBad:
    """For training: replaces a bad example by the next good one of its epoch, with the draws of the position."""

    order: Order
    size: int
    seed: int

    def __call__(self, rows: Rows, is_bad: IsBad) -> Rows:
        """Return the rows with each bad example replaced; raises DataError if no good one is found."""
        bad = [row for row, place in enumerate(rows.pairs()) if is_bad(*place)]
        if not bad:
            return rows
        indices = rows.indices.copy()
        for row in bad:
            indices[row] = self._instead(int(rows.positions[row]), int(rows.places[row]), is_bad)
        return replace(rows, indices=indices)

    def _instead(self, position: int, place: int, is_bad: IsBad) -> int:
        for index in islice(self._following(place), _MOST_TRIED):
            if not is_bad(position, index):
                return index
        raise DataError(
            f"No example can stand in for the bad one at position {position}.",
            given="nothing but bad examples after it in its epoch",
            expected="an example that can be read",
            hint="check the folder and the kind of its files: most of them cannot be read",
        )

    def _following(self, position: int) -> Iterator[int]:
        """Yield the examples after a position, to the end of its epoch and on from its start."""
        epoch_size = self.order.epoch_size(self.size)
        start, place = position - position % epoch_size, position % epoch_size
        for first in range(1, epoch_size, _AT_ONCE):
            others = np.arange(first, min(first + _AT_ONCE, epoch_size))
            yield from self.order.indices(start + (place + others) % epoch_size, self.size, self.seed).tolist()


@dataclass(frozen=True)
class DropBad:
    """For evaluation: drops bad examples, and pads the batch with its last good example, or else with any."""

    size: int

    def __call__(self, rows: Rows, is_bad: IsBad) -> Rows:
        """Return the good rows, padded to the same number; raises DataError if no example at all is good."""
        good = [index for position, index in rows.pairs() if not is_bad(position, index)]
        if len(good) == len(rows):
            return rows
        filler = good[-1] if good else next((index for index in range(self.size) if not is_bad(index, index)), None)
        if filler is None:
            raise DataError(
                "None of the examples can be read.",
                given=f"{self.size} bad examples",
                expected="one example at least that can be read",
                hint="check the folder and the kind of its files",
            )
        indices = np.array(good + [filler] * (len(rows) - len(good)))
        return Rows(indices, indices)


class Quarantine:
    """Bad examples that a run has found, by index: the same on all workers, saved with the stream."""

    def __init__(self, policy: Policy, budget: int) -> None:
        self.policy = policy
        self.budget = budget
        self.reasons: dict[int, str] = {}

    def state(self) -> dict[str, str]:
        """Return the reasons by index, as JSON, whose keys are strings."""
        return {str(index): reason for index, reason in self.reasons.items()}

    def load(self, state: Mapping[str, str]) -> None:
        """Replace the bad examples by those of a saved state."""
        self.reasons = {int(index): reason for index, reason in state.items()}

    def add(self, found: Mapping[int, BadExample]) -> None:
        """Add bad examples by index; raises DataError beyond the budget."""
        self.reasons |= {index: example.reason for index, example in found.items()}
        last = list(found.values())[-_MOST_NAMED:]
        check_budget(len(self.reasons), self.budget, {example.example_id: example.reason for example in last})


def check_budget(num_bad: int, budget: int, some: Mapping[str, str]) -> None:
    """Raise DataError for more bad examples than the budget; `some` of them are named with their reasons."""
    if num_bad > budget:
        raise DataError(
            f"{num_bad} examples cannot be read: more than the budget of {budget}.",
            given="; ".join(f"{name}: {reason}" for name, reason in some.items()),
            expected=f"at most {budget} bad examples",
            hint="look at the files that the log and quarantine.jsonl name, "
            "or raise bad_budget (of a recipe: feed.bad_budget)",
        )
