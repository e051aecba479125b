"""Examples that cannot be read: what is read in their place, and how many of them a run puts up with.

Whether an example is bad at a place of the stream is a property of its file and of what is drawn there, and what takes
its place is arithmetic: so the stream is the same for any number of workers and of those who read, and after any
resume, whoever came upon it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
"""The rows that are read where some are bad; the very rows where none is."""

_MOST_TRIED = 10_000
_AT_ONCE = 16
_MOST_NAMED = 3


@dataclass(frozen=True)
class ReplaceBad:
    """Training: the next example of the same epoch that is not bad stands in, with the draws of the place."""

    order: Order
    size: int
    seed: int

    def __call__(self, rows: Rows, is_bad: IsBad) -> Rows:
        """The rows with another example in the place of each bad one.

        Raises:
            DataError: there is none.
        """
        bad = [row for row, place in enumerate(_places(rows)) if is_bad(*place)]
        if not bad:
            return rows
        indices = rows.indices.copy()
        for row in bad:
            indices[row] = self._instead(int(rows.positions[row]), is_bad)
        return Rows(rows.positions, indices)

    def _instead(self, position: int, is_bad: IsBad) -> int:
        for index in islice(self._following(position), _MOST_TRIED):
            if not is_bad(position, index):
                return index
        raise DataError(
            f"No example can stand in for the bad one at position {position}.",
            given="nothing but bad examples after it in its epoch",
            expected="an example that can be read",
            hint="check the folder and the kind of its files: most of them cannot be read",
        )

    def _following(self, position: int) -> Iterator[int]:
        """The examples after a position, to the end of its epoch and on from its start."""
        epoch_size = self.order.epoch_size(self.size)
        start, place = position - position % epoch_size, position % epoch_size
        for first in range(1, epoch_size, _AT_ONCE):
            others = np.arange(first, min(first + _AT_ONCE, epoch_size))
            yield from self.order.indices(start + (place + others) % epoch_size, self.size, self.seed).tolist()


@dataclass(frozen=True)
class DropBad:
    """Evaluation: the rows without the bad ones, filled up with the last that is left, or else with any example."""

    size: int

    def __call__(self, rows: Rows, is_bad: IsBad) -> Rows:
        """The rows that can be read, filled up to their number.

        Raises:
            DataError: no example at all is left.
        """
        good = [index for position, index in _places(rows) if not is_bad(position, index)]
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
    """The bad examples that a run has come upon, by index: the same on all workers, saved with the stream."""

    def __init__(self, policy: Policy, budget: int) -> None:
        self.policy = policy
        self.budget = budget
        self.reasons: dict[int, str] = {}

    def state(self) -> dict[str, str]:
        """The reasons, as JSON: its keys are words."""
        return {str(index): reason for index, reason in self.reasons.items()}

    def load(self, state: Mapping[str, str]) -> None:
        """Know what was known when `state` was taken, and nothing else."""
        self.reasons = {int(index): reason for index, reason in state.items()}

    def add(self, found: Mapping[int, BadExample]) -> None:
        """Put up with these too, by index.

        Raises:
            DataError: they are more than the budget.
        """
        self.reasons |= {index: example.reason for index, example in found.items()}
        last = list(found.values())[-_MOST_NAMED:]
        check_budget(len(self.reasons), self.budget, {example.example_id: example.reason for example in last})


def check_budget(num_bad: int, budget: int, some: Mapping[str, str]) -> None:
    """Refuse more bad examples than may be put up with.

    Raises:
        DataError: with the reasons for some of them, by name.
    """
    if num_bad > budget:
        raise DataError(
            f"{num_bad} examples cannot be read: more than the budget of {budget}.",
            given="; ".join(f"{name}: {reason}" for name, reason in some.items()),
            expected=f"at most {budget} bad examples",
            hint="look at the files that the log and quarantine.jsonl name, or raise the budget (bad_budget)",
        )


def _places(rows: Rows) -> Iterator[tuple[int, int]]:
    return zip(rows.positions.tolist(), rows.indices.tolist(), strict=True)
