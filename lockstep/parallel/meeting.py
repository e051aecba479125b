"""Where the workers of one step meet: the sum of the gradients, and small sums of numbers, each where it is needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lockstep.checks import check_type, wrong_type
from lockstep.errors import InputError
from lockstep.parallel.exchange import Connection, Exchange
from lockstep.parallel.tree import Summand, TreeSum
from lockstep.workers.rank import Worker

if TYPE_CHECKING:
    from torch import Tensor

_HINT = 'return {"name of a loss": how many things it is a sum over}'
Counts = Mapping[str, "float | Tensor"]


class Meeting:
    """The connections that one step has with the other workers; those for numbers alone are made when first used."""

    def __init__(self, exchange: Exchange, worker: Worker, num_summands: int, mine: Sequence[int]) -> None:
        self.num_summands = num_summands
        """Leaves of the tree: towers, or workers that run theirs as one."""
        self._exchange = exchange
        self._worker = worker
        self._mine = mine
        self._gradients = exchange.connect(worker, num_summands)
        self._numbers: dict[int, Connection] = {}
        self._counted: tuple[str, ...] | None = None

    def total(self, sums: TreeSum) -> Summand:
        """The sum over all towers; valid until the next call, to be changed only where it is owned."""
        return self._gradients.total(sums)

    def numbers(self, of_each: Sequence[list[float]]) -> list[float]:
        """Numbers of each of this worker's leaves summed over all; all workers call it together, with as many."""
        count = len(of_each[0])
        if count not in self._numbers:
            self._numbers[count] = self._exchange.connect(self._worker, self.num_summands)
        sums = TreeSum()
        for place, numbers in zip(self._mine, of_each, strict=True):
            sums.add(place, Summand([], numbers))
        return self._numbers[count].total(sums).numbers

    def counted(self, of_each: Sequence[Counts]) -> dict[str, float]:
        """Counts by name, of each of this worker's leaves, summed over all.

        Raises:
            InputError: a count is negative or not finite, or the names are not those of the first time.
            WorkerError: the workers count different things.
        """
        for counts in of_each:
            check_type("what counts(batch) returns", counts, Mapping, expected="a dict", hint=_HINT)
        names = tuple(sorted(of_each[0]))
        if self._counted is None:
            self._worker.group.agree("what is counted", list(names))
            self._counted = names
        for counts in of_each:
            if tuple(sorted(counts)) != self._counted:
                raise _unlike(counts, self._counted)
        values = [[_count(name, counts[name]) for name in names] for counts in of_each]
        return dict(zip(names, self.numbers(values), strict=True)) if names else {}


def _count(name: str, count: float | Tensor) -> float:
    if not isinstance(count, int | float) and (not hasattr(count, "item") or count.numel() != 1):
        raise wrong_type(f"the count of {name!r}", count, expected="a number, or a tensor of one", hint=_HINT)
    value = float(count if isinstance(count, int | float) else count.item())
    if not 0 <= value < math.inf:
        raise InputError(
            f"The count of {name!r} is {value}.",
            given=f"counts(batch)[{name!r}] = {value}",
            expected="a finite number, 0 or more",
            hint="count the things that the loss is a sum over",
        )
    return value


def _unlike(counts: Counts, names: tuple[str, ...]) -> InputError:
    return InputError(
        "The count function returned other names than before.",
        given=f"counts of {tuple(counts)}",
        expected=f"counts of {names}, as at the start",
        hint="return the same names for every batch, with 0 where there is nothing to count",
    )
