from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.exchange.tree import Node, PartialSum, TreeSum, additions, aligned_nodes, assign_towers


class Sum(str):
    """Adds up to the text of the addition, which shows operands, their order and brackets."""

    def __add__(self, other: str) -> Sum:
        return Sum(f"({self}+{other})")


def added_up(num_towers: int, num_workers: int) -> str:
    """How the numbers of the towers are added up when each worker sums its own and one of them finishes the tree."""
    nodes: list[tuple[Node, PartialSum]] = []
    for towers in assign_towers(num_towers, num_workers):
        sums = TreeSum()
        for tower in towers:
            sums.add(tower, PartialSum([], [Sum(tower)]))  # type: ignore[list-item]
        assert [node for node, _ in sums.nodes] == aligned_nodes(towers)
        nodes += sums.nodes
    whole = TreeSum()
    whole.nodes = nodes
    return str(whole.total().numbers[0])


def test_towers_are_assigned_in_order_and_evenly() -> None:
    assert assign_towers(8, 3) == [range(3), range(3, 6), range(6, 8)]
    assert assign_towers(2, 3) == [range(1), range(1, 2), range(2, 2)]
    assert assign_towers(4, 1) == [range(4)]


@pytest.mark.parametrize(
    ("towers", "nodes"),
    [
        (range(8), [(0, 8)]),
        (range(7), [(0, 4), (4, 2), (6, 1)]),
        (range(3, 6), [(3, 1), (4, 2)]),
        (range(2, 8), [(2, 2), (4, 4)]),
        (range(5, 6), [(5, 1)]),
        (range(2, 2), []),
    ],
)
def test_a_range_is_covered_by_the_largest_aligned_nodes(towers: range, nodes: list[tuple[int, int]]) -> None:
    assert aligned_nodes(towers) == [Node(*node) for node in nodes]


def test_additions_join_neighbours_of_one_size_and_skip_missing_ones() -> None:
    assert additions(aligned_nodes(range(8))) == []
    assert additions([Node(tower, 1) for tower in range(5)]) == [(0, 1), (2, 3), (0, 2), (0, 4)]
    assert additions([Node(0, 1), Node(1, 1), Node(2, 2), Node(4, 1)]) == [(0, 1), (0, 2), (0, 3)]


@pytest.mark.parametrize(
    ("num_towers", "expected"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
    ],
)
def test_the_tree_has_these_brackets(num_towers: int, expected: str) -> None:
    assert added_up(num_towers, 1) == expected


def test_any_number_of_workers_makes_the_same_additions() -> None:
    for num_towers, num_workers in product(range(1, 18), range(1, 10)):
        if num_workers <= num_towers:
            assert added_up(num_towers, num_workers) == added_up(num_towers, 1)


@given(st.integers(1, 200))
def test_few_partial_sums_are_alive_at_once(num_towers: int) -> None:
    sums = TreeSum()
    for tower in range(num_towers):
        sums.add(tower, PartialSum([], [1.0]))
        assert len(sums.nodes) <= num_towers.bit_length()
    assert sums.total().numbers == [num_towers]


def test_tensors_of_a_tower_are_never_changed() -> None:
    towers = [[torch.tensor([1.0]), torch.tensor([[10.0, 20.0]])] for _ in range(5)]
    sums = TreeSum()
    for tower, tensors in enumerate(towers):
        sums.add(tower, PartialSum(tensors, [float(tower)]))
    total = sums.total()
    assert [each.tolist() for each in total.tensors] == [[5.0], [[50.0, 100.0]]]
    assert total.numbers == [10.0]
    assert all([each.tolist() for each in tensors] == [[1.0], [[10.0, 20.0]]] for tensors in towers)


def test_a_tensor_that_two_gradients_share_is_added_for_each() -> None:
    """d(a + b) is one tensor for both."""
    shared = torch.tensor([1.0])
    sums = TreeSum()
    for tower in range(2):
        sums.add(tower, PartialSum([shared, shared], []))
    assert [each.item() for each in sums.total().tensors] == [2.0, 2.0]


def test_the_total_can_be_taken_again() -> None:
    sums = TreeSum()
    for tower in range(3):
        sums.add(tower, PartialSum([torch.ones(1)], [1.0]))
    assert sums.total().tensors[0].item() == sums.total().tensors[0].item() == 3.0


def test_tensors_that_nobody_else_holds_take_the_sum() -> None:
    first = PartialSum([torch.ones(2)], [1.0], owned=True)
    total = first.plus(PartialSum([torch.ones(2)], [2.0]))
    assert total.owned
    assert total.tensors[0] is first.tensors[0]
    assert (total.tensors[0].tolist(), total.numbers) == ([2.0, 2.0], [3.0])
