from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.loader import Loader
from lockstep.data.mixture import Mixture
from lockstep.errors import InputError
from lockstep.readers.combine import Concatenated
from lockstep.readers.reader import Arrays

SEEDS = st.integers(-(2**63), 2**64 - 1)


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    names = "abcdef"[: draw(st.integers(1, 6))]
    sizes = {name: draw(st.integers(1, 12)) for name in names}
    weights = {name: draw(st.floats(1, 50)) for name in names}
    return Mixture(sizes, weights, length=draw(st.integers(300, 400)))


def indices_of(mixture: Mixture, positions: np.ndarray, seed: int = 0) -> np.ndarray:
    return mixture.indices(positions, sum(mixture.sizes.values()), seed)


def sources_of(mixture: Mixture, indices: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(mixture.sizes)), list(mixture.sizes.values()))[indices]


@given(mixture=mixtures(), epoch=st.integers(0, 10**9), seed=SEEDS)
@settings(max_examples=50, deadline=None)
def test_every_epoch_has_the_quotas(mixture: Mixture, epoch: int, seed: int) -> None:
    positions = np.arange(epoch * mixture.length, (epoch + 1) * mixture.length)
    counts = np.bincount(sources_of(mixture, indices_of(mixture, positions, seed)), minlength=len(mixture.sizes))
    assert counts.tolist() == list(mixture.quotas.values())


@given(mixture=mixtures())
@settings(max_examples=50, deadline=None)
def test_quotas_are_the_weights_to_within_one(mixture: Mixture) -> None:
    total = sum(mixture.weights.values())
    assert sum(mixture.quotas.values()) == mixture.length
    for name, quota in mixture.quotas.items():
        assert abs(quota - mixture.length * mixture.weights[name] / total) < 1


@given(mixture=mixtures(), seed=SEEDS, window=st.integers(1, 64))
@settings(max_examples=50, deadline=None)
def test_every_part_of_an_epoch_has_nearly_the_proportions(mixture: Mixture, seed: int, window: int) -> None:
    sources = sources_of(mixture, indices_of(mixture, np.arange(mixture.length), seed))
    for number, quota in enumerate(mixture.quotas.values()):
        so_far = np.concatenate([[0], np.cumsum(sources == number)])
        shares = so_far[window:] - so_far[:-window]
        shorten = 1 if len(mixture.sizes) <= 2 else 3
        assert np.abs(shares - window * quota / mixture.length).max() < shorten


@given(mixture=mixtures(), seed=SEEDS)
@settings(max_examples=50, deadline=None)
def test_no_example_of_a_source_comes_again_before_all_came(mixture: Mixture, seed: int) -> None:
    indices = indices_of(mixture, np.arange(3 * mixture.length), seed)
    sources, start = sources_of(mixture, indices), 0
    for number, size in enumerate(mixture.sizes.values()):
        walked = indices[sources == number]
        cycles = walked[: len(walked) // size * size].reshape(-1, size)
        assert all(sorted(cycle) == list(range(start, start + size)) for cycle in cycles.tolist())
        rest = walked[cycles.size :]
        assert len(set(rest.tolist())) == len(rest)
        start += size


@given(mixture=mixtures(), positions=st.lists(st.integers(0, 10**12), min_size=1, max_size=8), seed=SEEDS)
@settings(max_examples=50, deadline=None)
def test_the_index_depends_on_nothing_but_the_position(mixture: Mixture, positions: list[int], seed: int) -> None:
    together = indices_of(mixture, np.array(positions), seed)
    alone = [indices_of(mixture, np.array([position]), seed)[0] for position in positions]
    assert list(together) == alone


def test_a_large_source_goes_on_where_the_last_epoch_left_it() -> None:
    mixture = Mixture({"large": 100, "small": 10}, {"large": 1, "small": 1}, length=40)
    indices = indices_of(mixture, np.arange(5 * 40))
    assert sorted(indices[indices < 100]) == list(range(100))
    assert len(indices[indices >= 100]) == 100


def test_epochs_seeds_and_cycles_differ() -> None:
    mixture = Mixture({"a": 20, "b": 30}, {"a": 2, "b": 3}, length=50)
    assert len({tuple(indices_of(mixture, np.arange(50), seed).tolist()) for seed in range(20)}) == 20
    epochs = indices_of(mixture, np.arange(50 * 20)).reshape(20, 50)
    assert len(set(map(tuple, epochs.tolist()))) == 20
    assert len(set(map(tuple, (epochs < 20).tolist()))) > 1


def test_the_order_never_changes_between_versions() -> None:
    # A run saved by an older version must go on with the example that was due: these numbers are a promise.
    mixture = Mixture({"a": 4, "b": 3, "c": 2}, {"a": 3, "b": 1.5, "c": 1}, length=11)
    assert mixture.quotas == {"a": 6, "b": 3, "c": 2}
    assert indices_of(mixture, np.arange(22), 1).tolist() == [
        5,
        1,
        7,
        3,
        4,
        0,
        2,
        6,
        2,
        8,
        0,
        7,
        3,
        6,
        1,
        8,
        2,
        4,
        0,
        5,
        1,
        3,
    ]
    assert indices_of(mixture, np.array([10**12]), 1).tolist() == [6]


def test_a_loader_counts_its_epochs_and_names_its_examples() -> None:
    reader = Concatenated({"a": Arrays({"label": torch.arange(3)}), "b": Arrays({"label": torch.arange(10, 15)})})
    loader = Loader(reader, batch_size=4, order=Mixture(reader.sizes, {"a": 1, "b": 3}, length=20))
    assert loader.epoch_size == 20
    batch = next(loader.batches(range(1), 1))
    assert (batch["label"] < 10).sum() == 1
    names = [f"{'a' if label < 10 else 'b'}:{label % 10}" for label in batch["label"].tolist()]
    assert loader.example_ids(0, 4) == names
    assert not loader.order.is_exactly_once


def test_another_number_of_examples_is_refused() -> None:
    mixture = Mixture({"a": 2}, {"a": 1}, length=5)
    with pytest.raises(InputError) as caught:
        mixture.epoch_size(3)
    assert str(caught.value) == (
        "The sizes are those of another number of examples than the reader has.\n"
        "  given:    sizes of 2 examples\n"
        "  expected: 3, one for each example of the reader\n"
        "  hint:     make the sizes from this very reader: a Subset has not the examples of what it was cut from"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weights": {"a": 1, "c": 1}},
            "The weights are not those of the sources.\n"
            "  given:    weights of a, c\n"
            "  expected: one for each of a, b\n"
            "  hint:     give every source of the Concatenated reader a weight, by its name",
        ),
        (
            {"weights": {}, "sizes": {}},
            "The weights are not those of the sources.\n"
            "  given:    weights of nothing\n"
            "  expected: one for each of one source or more\n"
            "  hint:     give every source of the Concatenated reader a weight, by its name",
        ),
        (
            {"weights": {"a": 1, "b": 0}},
            "The weight of 'b' is out of range.\n"
            "  given:    weights['b']=0\n"
            "  expected: above 0, finite\n"
            "  hint:     give it such a weight, or leave the source out of the Concatenated reader",
        ),
        (
            {"weights": {"a": 99, "b": 1}, "length": 20},
            "An epoch of the mixture would have no example of 'b'.\n"
            "  given:    0.01 of a length of 20\n"
            "  expected: a length in which every source gets one position or more\n"
            "  hint:     give a length of 100 or more, or leave the source out",
        ),
        (
            {"sizes": {"a": 3, "b": 0}},
            "sizes['b'] is out of range.\n"
            "  given:    sizes['b']=0\n"
            "  expected: 1 or more\n"
            "  hint:     give sizes['b'] a value in this range",
        ),
        (
            {"length": 0},
            "length is out of range.\n"
            "  given:    length=0\n"
            "  expected: 1 or more, below 2**31\n"
            "  hint:     give the positions of an epoch",
        ),
        (
            {"length": 1.5},
            "length is of the wrong type.\n"
            "  given:    length is float\n"
            "  expected: a whole number\n"
            "  hint:     give the positions of an epoch",
        ),
        (
            {"sizes": [3, 4]},
            "sizes is of the wrong type.\n"
            "  given:    sizes is list\n"
            "  expected: a mapping from the names of the sources to numbers\n"
            '  hint:     give sizes=reader.sizes of a Concatenated reader, weights={"coco": 3, "voc": 1}',
        ),
    ],
)
def test_mixtures_that_cannot_be_meant_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Mixture(**{"sizes": {"a": 3, "b": 4}, "weights": {"a": 1, "b": 1}, "length": 10, **changes})
    assert str(caught.value) == message
