"""Where the workers of one step meet: the sum of the gradients, and small sums of numbers, each where it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lockstep.parallel.exchange import Connection, Exchange
from lockstep.parallel.tree import Summand, TreeSum, deal
from lockstep.workers.rank import Worker

if TYPE_CHECKING:
    from torch import Tensor


class Meeting:
    """The connections that one step has with the other workers; those for numbers alone are made when first used."""

    def __init__(self, exchange: Exchange, worker: Worker, num_summands: int) -> None:
        self.num_summands = num_summands
        """Leaves of the tree: towers, or workers that run theirs as one."""
        self._exchange = exchange
        self._worker = worker
        self._mine = deal(num_summands, worker.num_workers)[worker.rank]
        self._gradients = exchange.connect(worker, num_summands)
        self._numbers: dict[int, Connection] = {}
        self.shares_result = self._gradients.shares_result
        """Other workers read the sums that `total` returns."""

    def total(self, sums: TreeSum) -> Summand:
        """The sum over all towers; valid until the next call, never to be changed where the result is shared."""
        return self._gradients.total(sums)

    def numbers(self, mine: list[float]) -> list[float]:
        """Numbers summed over the workers; all of them call it together, with as many."""
        if len(mine) not in self._numbers:
            self._numbers[len(mine)] = self._exchange.connect(self._worker, self.num_summands)
        sums = TreeSum()
        for place in self._mine:
            sums.add(place, Summand([], mine if place == self._mine.start else [0.0] * len(mine)))
        return self._numbers[len(mine)].total(sums).numbers

    def counted(self, mine: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Counts by name, summed over the workers."""
        return dict(zip(mine, self.numbers([float(count) for count in mine.values()]), strict=True))
