from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.randomness import Draws, key_of, mix, mix_arrays

UINT64 = st.integers(0, 2**64 - 1)


def test_the_hash_is_splitmix64() -> None:
    """The first number of SplitMix64 seeded with 0, as published with Java's SplittableRandom."""
    assert mix(0) == 0xE220A8397B1DCDAF


def test_the_order_of_a_key_counts() -> None:
    assert len({mix(1, 2), mix(2, 1), mix(1), mix(1, 2, 0)}) == 4
    assert mix(-1) == mix(2**64 - 1)


@given(st.lists(UINT64, min_size=1, max_size=4))
def test_arrays_hash_as_numbers_do(key: list[int]) -> None:
    parts = [np.array([part, part ^ 1], dtype=np.uint64) for part in key]
    assert mix_arrays(*parts).tolist() == [mix(*key), mix(*(part ^ 1 for part in key))]


def test_a_name_has_a_stable_number() -> None:
    assert key_of("123456789") == 0xCBF43926, "its CRC-32"


@pytest.fixture
def draws() -> Draws:
    return Draws(7, np.arange(10_000))


def test_draws_are_uniform_and_independent_by_column(draws: Draws) -> None:
    flip, crop = draws.uniform("flip"), draws.uniform("crop")
    assert flip.min() >= 0
    assert flip.max() < 1
    assert flip.mean() == pytest.approx(0.5, abs=0.02)
    assert flip.var() == pytest.approx(1 / 12, abs=0.005)
    assert abs(np.corrcoef(flip, crop)[0, 1]) < 0.05


def test_a_draw_belongs_to_its_position_whatever_the_batch(draws: Draws) -> None:
    assert Draws(7, np.array([42, 3])).uniform("flip").tolist() == draws.uniform("flip")[[42, 3]].tolist()
    assert not np.array_equal(Draws(8, np.arange(4)).uniform("flip"), draws.uniform("flip")[:4])


def test_integers_cover_their_range(draws: Draws) -> None:
    assert set(draws.integers("angle", -2, 3).tolist()) == {-2, -1, 0, 1, 2}


def test_a_repeat_draws_other_numbers(draws: Draws) -> None:
    assert draws.again(0) is draws
    assert not np.array_equal(draws.again(1).uniform("flip"), draws.uniform("flip"))
    assert not np.array_equal(draws.again(1).uniform("flip"), draws.again(2).uniform("flip"))


def test_several_columns_at_once_are_the_same_numbers(draws: Draws) -> None:
    names = ["a", "b", "a top"]
    assert np.array_equal(draws.columns(names), np.stack([draws.uniform(name) for name in names]))


def test_several_numbers_of_a_column_begin_as_fewer_do(draws: Draws) -> None:
    many = draws.uniforms("a", 5)
    assert np.array_equal(many[:, :2], draws.uniforms("a", 2))
    assert len(np.unique(many)) == many.size
    assert np.array_equal(draws.of_rows(np.array([2, 0])).uniforms("a", 5), many[[2, 0]])
