"""The global random streams around towers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.workers import random_streams
from lockstep.workers.random_streams import RandomStreams

CPU = torch.device("cpu")


@pytest.fixture(params=["memory", "public"])
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RandomStreams:
    if request.param == "public":
        monkeypatch.setattr(random_streams, "_memory_of_python", lambda: None)
    return RandomStreams(CPU)


@pytest.fixture(autouse=True)
def callers_streams() -> Iterator[None]:
    generator, python, numpy = np.random.get_bit_generator(), random.getstate(), np.random.get_state()
    yield
    np.random.set_bit_generator(generator)
    np.random.set_state(numpy)
    random.setstate(python)


def draw() -> list[float]:
    """Numbers of each kind, an odd number of normal ones among them: these come in pairs."""
    normal = [*np.random.randn(3).tolist(), random.gauss(0, 1)]
    return [random.random(), *np.random.rand(2).tolist(), *normal, torch.rand(1).item(), random.betavariate(2, 3)]


@contextmanager
def in_a_tower(streams: RandomStreams, key: int) -> Iterator[None]:
    streams.set_aside()
    streams.seed(key)
    yield
    streams.put_back()


def states() -> list[Any]:
    kind, words, *rest = np.random.get_state()
    return [kind, words.tolist(), rest, random.getstate(), torch.get_rng_state().tolist()]


def test_the_memory_of_pythons_stream_is_known() -> None:
    """Else it is told and taken back by public functions, 10 us slower a step: then look how it lies in memory."""
    assert random_streams._memory_of_python() is not None


@pytest.mark.parametrize("before", [lambda: None, draw, lambda: np.random.randn(), lambda: random.gauss(0, 1)])
def test_the_callers_streams_go_on_where_they_were(streams: RandomStreams, before: Callable[[], object]) -> None:
    for _ in range(3):
        before()
        expected = states()
        with in_a_tower(streams, 7):
            draw()
        assert states() == expected


def test_a_normal_number_that_was_kept_back_is_used_once(streams: RandomStreams) -> None:
    np.random.seed(3)
    expected = np.random.randn(6)
    np.random.seed(3)
    found = []
    for _ in range(6):
        found.append(np.random.randn())
        with in_a_tower(streams, 7):
            draw()
    assert found == expected.tolist()


def test_a_normal_number_that_a_state_of_the_callers_holds_is_put_back(streams: RandomStreams) -> None:
    """The words of the generator are those of the step before, and yet there is a number now that was none then."""
    np.random.seed(3)
    np.random.randn()
    state = np.random.get_state()
    expected = np.random.randn(3).tolist()
    np.random.set_state(state)
    np.random.randn()
    with in_a_tower(streams, 7):
        draw()
    np.random.set_state(state)
    with in_a_tower(streams, 7):
        draw()
    assert np.random.randn(3).tolist() == expected


def test_streams_are_a_function_of_the_key(streams: RandomStreams) -> None:
    drawn = []
    for key in (2**63 + 5, 2**62 + 9, 2**63 + 5):
        draw()
        with in_a_tower(streams, key):
            drawn.append(draw())
    assert drawn[0] == drawn[2]
    assert not set(drawn[0]) & set(drawn[1])


def test_no_two_streams_draw_the_same(streams: RandomStreams) -> None:
    with in_a_tower(streams, 2**40 + 9):
        of_torch = torch.randint(0, 2**32, (50,)).tolist()
        of_numpy = np.random.randint(0, 2**32, 50, dtype=np.uint32).tolist()
        of_python = [random.getrandbits(32) for _ in range(50)]
    assert len({*of_torch, *of_numpy, *of_python}) == 150


def test_another_generator_of_numpys_is_put_back_too(streams: RandomStreams) -> None:
    mine = np.random.PCG64(3)
    np.random.set_bit_generator(mine)
    np.random.randn()
    expected = np.random.get_state(legacy=False)
    with in_a_tower(streams, 1):
        inside = draw()
    assert np.random.get_bit_generator() is mine
    assert np.random.get_state(legacy=False) == expected
    np.random.set_bit_generator(np.random.MT19937(1))
    with in_a_tower(streams, 1):
        assert draw() == inside
