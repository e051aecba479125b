from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.order import BlockShuffled, Order, Repeated, Sequential, Shuffled, order_of, permuted
from lockstep.errors import InputError
from lockstep.randomness import mix_arrays

SEEDS = st.integers(-(2**63), 2**64 - 1)

SIZES = st.integers(1, 120)


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


@given(size=SIZES, num_repeats=st.integers(1, 5), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=50, deadline=None)
def test_repeated_examples_come_in_a_row_and_none_again_before_all_came(size: int, num_repeats: int, seed: int) -> None:
    order, positions = Repeated(num_repeats), np.arange(3 * num_repeats * size)
    rows = order.indices(positions, size, seed).reshape(3, size, num_repeats)
    assert (rows == rows[:, :, :1]).all()
    assert np.array_equal(rows[:, :, 0], np.stack([epoch_of(number, size, seed) for number in range(3)]))
    assert order.indices(positions[::-1], size, seed).tolist() == rows.reshape(-1)[::-1].tolist()
    assert (order.epoch_size(size), order.is_exactly_once) == (size, False)


def test_repeated_three_times_unless_said_otherwise() -> None:
    assert Repeated() == Repeated(3) != Repeated(2)
    for num_repeats in (0, 1.5):
        with pytest.raises(InputError, match="num_repeats"):
            Repeated(num_repeats)  # type: ignore[arg-type]


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


@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=8), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=50, deadline=None)
def test_permutations_of_many_sizes_are_made_at_once(sizes: list[int], seed: int) -> None:
    places = np.concatenate([np.arange(size) for size in sizes])
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    keys = mix_arrays(seed, numbers.astype(np.uint64))
    together = permuted(places, keys, np.array(sizes)[numbers])
    for number, size in enumerate(sizes):
        mine = numbers == number
        assert sorted(together[mine]) == list(range(size))
        assert together[mine].tolist() == permuted(np.arange(size), keys[mine], size).tolist()


def test_the_places_and_their_keys_are_left_alone() -> None:
    places, keys = np.arange(50), np.arange(50, dtype=np.uint64)
    permuted(places, keys, 50)
    assert places.tolist() == keys.tolist() == list(range(50))


def test_no_places_have_no_permutation() -> None:
    assert permuted(np.arange(0), np.uint64(1), 5).tolist() == []


ORDERS = st.builds(BlockShuffled, st.integers(1, 40), st.integers(1, 12))


def block_epoch_of(order: BlockShuffled, number: int, size: int, seed: int = 0) -> np.ndarray:
    return order.indices(np.arange(number * size, (number + 1) * size), size, seed)


@given(order=ORDERS, size=SIZES, epoch=st.integers(0, 2**40), seed=SEEDS)
@settings(max_examples=50, deadline=None)
def test_block_every_epoch_is_a_permutation(order: BlockShuffled, size: int, epoch: int, seed: int) -> None:
    assert sorted(block_epoch_of(order, epoch, size, seed)) == list(range(size))


@given(order=ORDERS, size=SIZES, positions=st.lists(st.integers(0, 500), min_size=1), seed=SEEDS)
@settings(max_examples=50, deadline=None)
def test_block_the_index_depends_on_nothing_but_the_position(
    order: BlockShuffled, size: int, positions: list[int], seed: int
) -> None:
    together = order.indices(np.array(positions), size, seed)
    alone = [order.indices(np.array([position]), size, seed)[0] for position in positions]
    assert list(together) == alone


@given(order=ORDERS, size=SIZES, seed=SEEDS)
@settings(max_examples=50, deadline=None)
def test_a_window_has_whole_blocks_and_no_more_than_it_may(order: BlockShuffled, size: int, seed: int) -> None:
    left = (block_epoch_of(order, 0, size, seed) // order.block_size).tolist()
    num_blocks = -(-size // order.block_size)
    windows = []
    while left:
        window = set()
        for block in left:  # The window ends before the first place that would be one block too many.
            if block not in window and len(window) == order.window_blocks:
                break
            window.add(block)
        size_of_window = sum(min(order.block_size, size - block * order.block_size) for block in window)
        assert sorted(left[:size_of_window]) == sorted(b for b in left if b in window)
        windows.append(len(window))
        left = left[size_of_window:]
    full, rest = divmod(num_blocks, order.window_blocks)
    assert windows == [order.window_blocks] * full + [rest] * bool(rest)


def test_examples_of_a_window_are_mixed_like_those_of_a_full_shuffle() -> None:
    order, size = BlockShuffled(32, window_blocks=64), 10_000  # 2048 examples, as a shuffle buffer of that size has.
    window = block_epoch_of(order, 0, size)[: 32 * 64].astype(float)
    assert abs(np.corrcoef(window[1:], window[:-1])[0, 1]) < 4 / np.sqrt(len(window))
    assert len(set(window[:32] // 32)) > 20


@pytest.mark.parametrize("block", [0, 3, 4])
def test_every_block_stands_anywhere_the_short_one_too(block: int) -> None:
    size, num_epochs = 18, 2000  # Four blocks of 4, and one of 2.
    blocks = BlockShuffled(4, window_blocks=1).indices(np.arange(size * num_epochs), size, 0) // 4
    found = np.argmax(blocks.reshape(num_epochs, size) == block, axis=1)
    slots = np.bincount(-(-found // 4), minlength=5)  # Behind the short block, the others start two places earlier.
    assert np.abs(slots - num_epochs / 5).max() < 5 * np.sqrt(num_epochs / 5)


def test_a_window_of_all_blocks_sees_every_permutation() -> None:
    epochs = BlockShuffled(1, window_blocks=4).indices(np.arange(24 * 4 * 40), 4, 0).reshape(-1, 4)
    assert len(set(map(tuple, epochs.tolist()))) == 24


def test_huge_sets_need_no_memory() -> None:
    size, order = 10**13 + 7, BlockShuffled(1024, window_blocks=16)
    indices = order.indices(np.arange(20_000) + 3 * size, size, 0)
    assert len(set(indices.tolist())) == 20_000
    assert len(set((indices[:16_384] // 1024).tolist())) == 16


def test_block_the_order_never_changes_between_versions() -> None:
    # A run saved by an older version must go on with the example that was due: these numbers are a promise.
    first = BlockShuffled(3, window_blocks=2).indices(np.arange(22), 11, 0).tolist()
    assert first == [7, 6, 0, 8, 1, 2, 9, 5, 10, 4, 3, 5, 9, 10, 3, 4, 7, 0, 2, 6, 8, 1]
    later = BlockShuffled(32, window_blocks=64).indices(np.array([0, 54_999, 55_000, 10**12]), 55_000, 1).tolist()
    assert later == [23283, 1171, 35899, 29483]


def test_block_shuffled_is_a_value_that_shows_each_example_once_an_epoch() -> None:
    assert BlockShuffled(32) == BlockShuffled(32, window_blocks=64) != BlockShuffled(16)
    assert BlockShuffled.is_exactly_once
    assert BlockShuffled(32).epoch_size(7) == 7


@pytest.mark.parametrize(
    ("sizes", "given_text"),
    [({"block_size": 0}, "block_size=0"), ({"block_size": 1, "window_blocks": -1}, "window_blocks=-1")],
)
def test_sizes_below_one_are_refused(sizes: dict[str, int], given_text: str) -> None:
    name = given_text.split("=")[0]
    with pytest.raises(InputError) as caught:
        BlockShuffled(**sizes)
    assert str(caught.value) == (
        f"{name} is out of range.\n"
        f"  given:    {given_text}\n"
        "  expected: 1 or more\n"
        f"  hint:     give {name} a value in this range"
    )


def test_a_size_that_is_no_whole_number_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        BlockShuffled(2.5)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "block_size is of the wrong type.\n"
        "  given:    block_size is float\n"
        "  expected: a whole number\n"
        "  hint:     give block_size as a whole number"
    )
