from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.order import Order, Sequential, Shuffled, order_of
from lockstep.errors import InputError

SEEDS = st.integers(-(2**63), 2**64 - 1)


def epoch_of(number: int, size: int, seed: int = 0) -> np.ndarray:
    return Shuffled().indices(np.arange(number * size, (number + 1) * size), size, seed)


@given(size=st.one_of(st.integers(1, 40), st.integers(41, 3000)), epoch=st.integers(0, 2**40), seed=SEEDS)
@settings(max_examples=50, deadline=None)
def test_every_epoch_is_a_permutation(size: int, epoch: int, seed: int) -> None:
    assert sorted(epoch_of(epoch, size, seed)) == list(range(size))


@given(size=st.integers(1, 60), positions=st.lists(st.integers(0, 500), min_size=1), seed=SEEDS)
@settings(max_examples=50, deadline=None)
def test_the_index_depends_on_nothing_but_the_position(size: int, positions: list[int], seed: int) -> None:
    together = Shuffled().indices(np.array(positions), size, seed)
    alone = [Shuffled().indices(np.array([position]), size, seed)[0] for position in positions]
    assert list(together) == alone


def test_the_order_never_changes_between_versions() -> None:
    # A run saved by an older version must go on with the example that was due: these numbers are a promise.
    first = Shuffled().indices(np.arange(24), 10, 0).tolist()
    assert first == [3, 6, 0, 2, 1, 8, 4, 9, 7, 5, 8, 6, 7, 1, 2, 5, 9, 4, 0, 3, 3, 2, 7, 4]
    assert Shuffled().indices(np.array([0, 54_999, 55_000, 10**12]), 55_000, 1).tolist() == [13961, 14673, 21066, 1696]


def test_huge_sets_are_permuted_without_memory_for_them() -> None:
    size = 10**13 + 7
    indices = Shuffled().indices(np.arange(1000) + 3 * size, size, 0)
    assert len(set(indices.tolist())) == 1000
    assert 0 <= indices.min() < size // 100 < size - size // 100 < indices.max() < size


def test_small_sets_see_every_permutation() -> None:
    epochs = Shuffled().indices(np.arange(24 * 4 * 40), 4, 0).reshape(-1, 4)
    assert len(set(map(tuple, epochs.tolist()))) == 24


@pytest.mark.parametrize("size", [1000, 20_000])
def test_neighbours_and_epochs_are_not_correlated(size: int) -> None:
    first, second = (epoch_of(number, size).astype(float) for number in (0, 1))
    columns = -(-size // int(np.ceil(np.sqrt(size))))
    pairs = [(first[lag:], first[:-lag]) for lag in (1, 2, 3, columns, columns + 1)] + [(first, second)]
    correlations = [np.corrcoef(one, other)[0, 1] for one, other in pairs]
    assert np.abs(correlations).max() < 4 / np.sqrt(size)


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {tuple(epoch_of(number, 50, seed).tolist()) for number in range(10) for seed in range(10)}
    assert len(orders) == 100


def test_sequential_repeats_the_order_of_the_reader() -> None:
    assert Sequential().indices(np.arange(2, 9), 3, 5).tolist() == [2, 0, 1, 2, 0, 1, 2]


def test_orders_are_values_with_names() -> None:
    assert order_of("shuffled") == Shuffled() == order_of(Shuffled())
    assert order_of("sequential") == Sequential() != Shuffled()


@pytest.mark.parametrize("order", [Sequential(), Shuffled()])
def test_these_orders_show_each_example_once_an_epoch(order: Order) -> None:
    assert order.is_exactly_once
    assert order.epoch_size(7) == 7


def test_what_is_no_order_is_refused() -> None:
    for order, found in ((Shuffled, "the class Shuffled"), (5, "int")):
        with pytest.raises(InputError) as caught:
            order_of(order)
        assert str(caught.value) == (
            "order is of the wrong type.\n"
            f"  given:    order is {found}\n"
            "  expected: a name, or an order: it has indices, epoch_size and is_exactly_once\n"
            '  hint:     give "shuffled", "sequential", or an order such as BlockShuffled(block_size=32)'
        )


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        order_of("random")
    assert str(caught.value) == (
        "There is no order called 'random'.\n"
        "  given:    order='random'\n"
        '  expected: "shuffled" or "sequential"\n'
        '  hint:     use "shuffled" to train and "sequential" to keep the order of the reader'
    )
