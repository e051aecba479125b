"""One order of addition, whoever does it: a fixed binary tree over the indices of the towers.

The sum of towers [lo, lo + span) is the sum of its two halves, for spans that are powers of two; towers beyond the
last are missing leaves. A worker adds up the largest aligned nodes inside its own range, and whoever holds all nodes
finishes the tree. Since every addition is between the same two operands, the bits do not depend on who hosts what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, order=True, slots=True)
class Node:
    """The sum over towers start .. start + span - 1, with span a power of two that divides start."""

    start: int
    span: int


def deal(num_towers: int, num_workers: int) -> list[range]:
    """The towers of each worker: contiguous, in order, as even as can be (8 on 3 workers: 3 + 3 + 2)."""
    share, more = divmod(num_towers, num_workers)
    starts = [rank * share + min(rank, more) for rank in range(num_workers + 1)]
    return [range(lo, hi) for lo, hi in zip(starts, starts[1:], strict=False)]


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


class TreeSum:
    """Sums of lists of tensors over towers that come in order, with log2(towers) + 1 lists alive at most."""

    def __init__(self) -> None:
        self._stack: list[tuple[Node, list[Tensor], bool]] = []

    def add(self, tower: int, tensors: list[Tensor]) -> None:
        """Add what one tower computed. The tensors stay the caller's: none is changed in place."""
        node, owned = Node(tower, 1), False
        while self._stack and self._merges(self._stack[-1][0], node):
            left, sums, left_owned = self._stack.pop()
            tensors = _plus(sums, tensors, left_owned)
            node, owned = Node(left.start, left.span * 2), True
        self._stack.append((node, tensors, owned))

    @staticmethod
    def _merges(left: Node, right: Node) -> bool:
        return left.span == right.span and left.start % (2 * left.span) == 0

    def nodes(self) -> list[tuple[Node, list[Tensor]]]:
        """The largest aligned nodes of what was added, in order."""
        return [(node, tensors) for node, tensors, _ in self._stack]

    def total(self) -> list[Tensor]:
        """The tree finished over what was added: all the towers there are."""
        sums = [tensors for _, tensors, _ in self._stack]
        owned = [owned for _, _, owned in self._stack]
        for i, j in additions([node for node, _, _ in self._stack]):
            sums[i], owned[i] = _plus(sums[i], sums[j], owned[i]), True
        return sums[0]


def _plus(left: list[Tensor], right: list[Tensor], in_place: bool) -> list[Tensor]:
    # A tower's own gradients may share storage (d(a + b) is one tensor for both), so the first sum is a new one.
    if in_place:
        torch._foreach_add_(left, right)
        return left
    return list(torch._foreach_add(left, right))
