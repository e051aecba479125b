from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.permutation import permuted
from lockstep.randomness import mix_arrays


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
