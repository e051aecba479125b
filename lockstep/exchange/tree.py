"""The tree: one order of addition for any number of workers, a fixed binary tree over the indices of the towers.

The sum of towers [lo, lo + span) is the sum of its two halves, for spans that are powers of two; towers beyond the
last are missing leaves. A worker adds up the largest aligned nodes inside its own range, and whoever holds all nodes
finishes the tree. Since every addition is between the same two operands, the bits do not depend on who hosts what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from lockstep.tensors import add_all_, map_all

if TYPE_CHECKING:
    from torch import Tensor


GradientHook = Callable[["Tensor"], None]
"""Gets a gradient as soon as it is known."""


@dataclass(frozen=True, order=True, slots=True)
class Node:
    """The sum over towers start .. start + span - 1, with span a power of two that divides start."""

    start: int
    span: int


def assign_towers(num_towers: int, num_workers: int) -> list[range]:
    """The towers of each worker: contiguous, in order, as even as can be (8 on 3 workers: 3 + 3 + 2)."""
    share, more = divmod(num_towers, num_workers)
    starts = [rank * share + min(rank, more) for rank in range(num_workers + 1)]
    return [range(lo, hi) for lo, hi in pairwise(starts)]


def aligned_nodes(towers: range) -> list[Node]:
    """The fewest nodes that cover a contiguous range of towers, in order."""
    nodes, start = [], towers.start
    while start < towers.stop:
        largest = start & -start or 1 << towers.stop.bit_length()
        span = min(largest, 1 << (towers.stop - start).bit_length() - 1)
        nodes.append(Node(start, span))
        start += span
    return nodes


def additions(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """How to finish the tree over nodes sorted by start: (i, j) means "add the j-th to the i-th", in this order.

    The total ends in the first.
    """
    plan: list[tuple[int, int]] = []

    def total(members: Sequence[int], start: int, span: int) -> int | None:
        if len(members) <= 1:
            return members[0] if members else None
        middle = start + span // 2
        left = total([i for i in members if nodes[i].start < middle], start, span // 2)
        right = total([i for i in members if nodes[i].start >= middle], middle, span // 2)
        if left is not None and right is not None:
            plan.append((left, right))
        return left if left is not None else right

    end = nodes[-1].start + nodes[-1].span
    total(range(len(nodes)), 0, 1 << (end - 1).bit_length())
    return plan


class NodeRows(NamedTuple):
    """The nodes of all workers as the rows of one table."""

    of_workers: list[range]
    additions: list[tuple[int, int]]
    """How to add them up: see the function."""


def rows_of_workers(num_towers: int, num_workers: int) -> NodeRows:
    """Return the rows of each worker, and how to add all of them up."""
    nodes = [aligned_nodes(towers) for towers in assign_towers(num_towers, num_workers)]
    ends = list(accumulate(map(len, nodes), initial=0))
    return NodeRows([range(*pair) for pair in pairwise(ends)], additions(list(chain(*nodes))))


def reduction(rows: list[Tensor], result: Tensor, plan: list[tuple[int, int]]) -> Callable[[], None]:
    """A function that adds up rows by `additions`, the last time into the result; the rows are used up for it."""

    def reduce() -> None:
        for i, j in plan[:-1]:
            rows[i].add_(rows[j])
        torch.add(rows[plan[-1][0]], rows[plan[-1][1]], out=result)

    return reduce


class TreeSum:
    """Sums of tensors and of numbers over towers that come in order, with log2(towers) + 1 of them alive at most."""

    def __init__(self, num_gradients: int = 0) -> None:
        self.num_gradients = num_gradients
        """The first tensors of each operand are gradients: a transport may send them early, or with fewer bits."""
        self.nodes: list[tuple[Node, PartialSum]] = []
        """The largest aligned nodes over the towers added so far, in order."""

    def add(self, tower: int, partial: PartialSum) -> None:
        """Add the partial sum of one tower. Its tensors stay the caller's: none is changed in place unless `owned`."""
        node = Node(tower, 1)
        while self.nodes and self._merges(self.nodes[-1][0], node):
            left, sums = self.nodes.pop()
            node, partial = Node(left.start, left.span * 2), sums.plus(partial)
        self.nodes.append((node, partial))

    def put(self, tower: int, partial: PartialSum) -> None:
        """Put the last tower beside the others, and add nothing: what `before` returns is added elsewhere."""
        self.nodes.append((Node(tower, 1), partial))

    def before(self, last: int) -> list[PartialSum]:
        """What is added to the partial sum of the last tower, one after the other, to make the total."""
        sums = [PartialSum(partial.tensors, partial.numbers) for _, partial in self.nodes]
        at, found = len(sums), []
        for i, j in additions([*(node for node, _ in self.nodes), Node(last, 1)]):
            if j == at:
                found.append(sums[i])
                at = i
            else:
                sums[i] = sums[i].plus(sums[j])
        return found

    @staticmethod
    def _merges(left: Node, right: Node) -> bool:
        return left.span == right.span and left.start % (2 * left.span) == 0

    def total(self) -> PartialSum:
        """Finish the tree over the towers that were added, which are all there are. The nodes stay as they are."""
        if len(self.nodes) == 1:
            return self.nodes[0][1]
        sums = [PartialSum(partial.tensors, partial.numbers) for _, partial in self.nodes]
        for i, j in additions([node for node, _ in self.nodes]):
            sums[i] = sums[i].plus(sums[j])
        return sums[0]


class PartialSum:
    """One operand of the tree: tensors, and numbers that travel with them.

    The numbers are plain, or one tensor (float64, one-dimensional) on a device that the host would wait for.
    """

    __slots__ = ("numbers", "owned", "tensors")

    def __init__(self, tensors: list[Tensor], numbers: list[float] | Tensor, *, owned: bool = False) -> None:
        self.tensors, self.numbers = tensors, numbers
        self.owned = owned
        """Nobody else holds the tensors: they are the tree's own. A tower's may be held: d(a + b) is one for both."""

    def plus(self, other: PartialSum) -> PartialSum:
        """The sum of two operands; the tensors of this one may be used up for it."""
        numbers: list[float] | Tensor
        if isinstance(self.numbers, list) and isinstance(other.numbers, list):
            numbers = [a + b for a, b in zip(self.numbers, other.numbers, strict=True)]
        else:
            numbers = cast("Tensor", self.numbers) + cast("Tensor", other.numbers)
        if not self.tensors:
            return PartialSum([], numbers)
        if not self.owned:
            return PartialSum(map_all(torch._foreach_add, self.tensors, other.tensors), numbers, owned=True)
        add_all_(self.tensors, other.tensors)
        return PartialSum(self.tensors, numbers, owned=True)
