"""Examples that cannot be read: what is read in their place, and how many of them a run puts up with.

Which examples are bad is a property of the files, and what takes their place is arithmetic: so the stream is the same
for any number of workers and loader processes, and after any resume, whoever came upon them first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lockstep.data.order import Order
from lockstep.data.rows import Rows
from lockstep.errors import DataError
from lockstep.types import BadExample

Policy = Literal["raise", "skip"]
POLICIES: tuple[Policy, ...] = ("raise", "skip")

Bad = Mapping[int, str]
"""The reasons, by the index of the example."""
Choose = Callable[[Rows, Bad], Rows]
"""The rows that are read where some examples are bad; the very rows where none of theirs is."""

_MOST_TRIED = 10_000


@dataclass(frozen=True)
class NextOfEpoch:
    """Training: the next example of the same epoch that is not bad stands in, and comes once more than the others."""

    order: Order
    size: int
    seed: int

    def __call__(self, rows: Rows, bad: Bad) -> Rows:
        """The rows with another example in the place of each bad one.

        Raises:
            DataError: there is none.
        """
        if bad.keys().isdisjoint(rows.indices.tolist()):
            return rows
        pairs = zip(rows.positions.tolist(), rows.indices.tolist(), strict=True)
        indices = [self._instead(position, bad) if index in bad else index for position, index in pairs]
        return Rows(rows.positions, np.array(indices))

    def _instead(self, position: int, bad: Bad) -> int:
        epoch_size = self.order.epoch_size(self.size)
        start, place = position - position % epoch_size, position % epoch_size
        others = start + (place + np.arange(1, min(epoch_size, _MOST_TRIED + 1))) % epoch_size
        for index in self.order.indices(others, self.size, self.seed).tolist():
            if index not in bad:
                return int(index)
        raise DataError(
            f"No example can stand in for the bad one at position {position}.",
            given=f"{len(bad)} bad examples, {len(others)} after it among them",
            expected="an example that can be read",
            mend="check the folder and the kind of its files: most of them cannot be read",
        )


@dataclass(frozen=True)
class LeftOut:
    """Evaluation: the rows without the bad ones, filled up with the last that is left, or else with any example."""

    size: int

    def __call__(self, rows: Rows, bad: Bad) -> Rows:
        """The rows that can be read, filled up to their number.

        Raises:
            DataError: no example at all is left.
        """
        good = [index for index in rows.indices.tolist() if index not in bad]
        if len(good) == len(rows):
            return rows
        filler = good[-1] if good else next((index for index in range(self.size) if index not in bad), None)
        if filler is None:
            raise DataError(
                "None of the examples can be read.",
                given=f"{self.size} bad examples; the first one: {bad[0]}",
                expected="one example at least that can be read",
                mend="check the folder and the kind of its files",
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
        if len(self.reasons) > self.budget:
            raise DataError(
                f"{len(self.reasons)} examples cannot be read: more than the budget of {self.budget}.",
                given="; ".join(f"{example.example_id}: {example.reason}" for example in _last(list(found.values()))),
                expected=f"at most {self.budget} bad examples",
                mend="look at the files named in the quarantine, or raise the budget (bad_budget)",
            )


def _last(examples: Sequence[BadExample], most: int = 3) -> Sequence[BadExample]:
    return examples[-most:]
