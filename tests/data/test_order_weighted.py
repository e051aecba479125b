from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.loader import Loader
from lockstep.data.order import Balanced, Mixture, Order, Weighted
from lockstep.errors import InputError
from lockstep.readers.combine import Concatenated
from lockstep.readers.reader import Arrays

SEEDS = st.integers(-(2**63), 2**64 - 1)
LABELS = st.lists(st.integers(-3, 5), min_size=1, max_size=40)


def test_examples_come_by_their_weight() -> None:
    weights = np.array([3.0, 0.0, 1.0, 4.0, 0.0])
    counts = np.bincount(Weighted(weights).indices(np.arange(80_000), 5, 0), minlength=5)
    assert counts[[1, 4]].tolist() == [0, 0]
    assert np.abs(counts - weights * 10_000).max() < 5 * np.sqrt(20_000)


def test_weights_are_numbers_of_any_scale_in_any_container() -> None:
    positions = np.arange(100)
    expected = Weighted([1.0, 2.0, 3.0]).indices(positions, 3, 0).tolist()
    for weights in (np.array([1, 2, 3]), torch.tensor([0.5, 1.0, 1.5]), (4e307, 8e307, 12e307)):
        assert Weighted(weights).indices(positions, 3, 0).tolist() == expected
    assert Weighted([False, True]).indices(positions, 2, 0).tolist() == [1] * 100


def test_many_weights_of_low_precision_are_added_up_precisely() -> None:
    weights = np.ones(10_000, dtype=np.float16)
    assert Weighted(weights).indices(np.arange(1000), 10_000, 0).max() > 9_900


def test_draws_do_not_depend_on_each_other() -> None:
    draws = Weighted(np.ones(1000)).indices(np.arange(20_000), 1000, 0).astype(float)
    for lag in (1, 2, 1000):
        assert abs(np.corrcoef(draws[lag:], draws[:-lag])[0, 1]) < 4 / np.sqrt(20_000)
    assert len(set(draws[:1000].tolist())) < 700  # With replacement, 632 of 1000 are expected.


@given(
    kind=st.sampled_from([Balanced, Weighted]),
    values=st.lists(st.integers(1, 6), min_size=1, max_size=20),
    positions=st.lists(st.integers(0, 10**12), min_size=1, max_size=8),
    seed=SEEDS,
)
@settings(max_examples=50, deadline=None)
def test_the_index_depends_on_nothing_but_the_position(
    kind: Any, values: list[int], positions: list[int], seed: int
) -> None:
    order, size = kind(values), len(values)
    together = order.indices(np.array(positions), size, seed)
    alone = [order.indices(np.array([position]), size, seed)[0] for position in positions]
    assert list(together) == alone
    assert 0 <= min(alone) <= max(alone) < size


@given(labels=LABELS, first_epoch=st.integers(0, 10**6), seed=SEEDS)
@settings(max_examples=50, deadline=None)
def test_every_class_comes_equally_often(labels: list[int], first_epoch: int, seed: int) -> None:
    order, classes = Balanced(labels), sorted(set(labels))
    epoch_size = order.epoch_size(len(labels))
    indices = order.indices(np.arange(first_epoch * epoch_size, (first_epoch + 1) * epoch_size), len(labels), seed)
    rounds = np.array(labels)[indices].reshape(-1, len(classes))
    assert all(sorted(each) == classes for each in rounds.tolist())
    assert len(rounds) == -(-len(labels) // len(classes))


@given(labels=LABELS, seed=SEEDS)
@settings(max_examples=50, deadline=None)
def test_no_example_of_a_class_comes_again_before_all_came(labels: list[int], seed: int) -> None:
    order, array = Balanced(labels), np.array(labels)
    indices = order.indices(np.arange(3 * len(labels) * order.num_classes), len(labels), seed)
    for label in set(labels):
        members = np.flatnonzero(array == label)
        walked = indices[array[indices] == label]
        cycles = walked[: 3 * len(members)].reshape(3, len(members))
        assert all(sorted(cycle) == members.tolist() for cycle in cycles.tolist())


def test_rounds_and_cycles_are_shuffled() -> None:
    labels = np.arange(60) % 3
    indices = Balanced(labels).indices(np.arange(60 * 50), 60, 0)
    assert len(set(map(tuple, labels[indices].reshape(-1, 3).tolist()))) == 6
    of_class_0 = indices[labels[indices] == 0].reshape(-1, 20)
    assert len(set(map(tuple, of_class_0.tolist()))) == len(of_class_0) == 50


def test_labels_are_whole_numbers_or_words() -> None:
    positions = np.arange(30)
    expected = Balanced([0, 1, 1, 2]).indices(positions, 4, 0).tolist()
    for labels in (["cat", "dog", "dog", "eel"], torch.tensor([5, 7, 7, 9]), np.array([1, 2, 2, 3], dtype=np.uint8)):
        assert Balanced(labels).indices(positions, 4, 0).tolist() == expected


def test_seeds_give_other_orders() -> None:
    for order in (Weighted(np.ones(30)), Balanced(np.arange(30) % 4)):
        assert len({tuple(order.indices(np.arange(40), 30, seed).tolist()) for seed in range(20)}) == 20


def test_these_orders_say_that_they_repeat_and_what_an_epoch_is() -> None:
    assert not Weighted.is_exactly_once
    assert not Balanced.is_exactly_once
    assert Weighted([1, 2, 3]).epoch_size(3) == 3
    assert Balanced([0, 0, 1, 2, 2]).epoch_size(5) == 6
    assert repr(Weighted([1, 2, 3])) == "Weighted(3 weights)"
    assert repr(Balanced([0, 0, 2])) == "Balanced(3 labels of 2 classes)"


def test_a_loader_counts_the_epochs_of_its_order() -> None:
    reader = Arrays({"label": torch.tensor([0, 0, 0, 0, 1, 2, 2])})
    loader = Loader(reader, batch_size=3, order=Balanced([0, 0, 0, 0, 1, 2, 2]))
    assert loader.epoch_size == 9
    batch = next(loader.batches(range(1), 1))
    assert batch.epoch_size == 9
    assert sorted(batch["label"].tolist()) == [0, 1, 2]
    evaluated = [row for part in loader.evaluation_batches(4) for row in part["label"][: part.valid].tolist()]
    assert evaluated == [0, 0, 0, 0, 1, 2, 2]


def test_the_orders_never_change_between_versions() -> None:
    # A run saved by an older version must go on with the example that was due: these numbers are a promise.
    positions = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 10**12])
    assert Weighted([1, 2, 3, 4, 5]).indices(positions, 5, 1).tolist() == [2, 3, 3, 2, 4, 2, 3, 2, 4, 3]
    assert Balanced([0, 1, 1, 2, 2, 2, 2]).indices(positions, 7, 1).tolist() == [4, 0, 2, 1, 6, 0, 0, 2, 5, 0]


@pytest.mark.parametrize(("order", "name"), [(Weighted([1, 2]), "weights"), (Balanced([0, 1]), "labels")])
def test_another_number_of_examples_is_refused(order: Order, name: str) -> None:
    expected = (
        f"The {name} are those of another number of examples than the reader has.\n"
        f"  given:    {name} of 2 examples\n"
        "  expected: 3, one for each example of the reader\n"
        f"  hint:     make the {name} from this very reader: a Subset has not the examples of what it was cut from"
    )
    with pytest.raises(InputError) as caught:
        Loader(Arrays({"label": torch.zeros(3)}), batch_size=1, order=order)
    assert str(caught.value) == expected
    with pytest.raises(InputError) as caught:
        order.indices(np.arange(2), 3, 0)
    assert str(caught.value) == expected


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_out_of_range_are_refused(weight: float) -> None:
    with pytest.raises(InputError) as caught:
        Weighted([1.0, weight])
    assert str(caught.value) == (
        "The weight of example 1 is out of range.\n"
        f"  given:    weights[1]={weight}\n"
        "  expected: 0 or more, finite\n"
        "  hint:     give every example a weight in this range"
    )


def test_weights_that_are_all_zero_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        Weighted([0, 0])
    assert str(caught.value) == (
        "All weights are 0, so no example could ever come.\n"
        "  given:    2 weights of 0\n"
        "  expected: one weight or more above 0\n"
        "  hint:     give the examples that shall come a weight above 0"
    )


@pytest.mark.parametrize(
    ("kind", "values", "expected", "given_text"),
    [
        (Weighted, [], "a number for each example", "shape (0,) and type float64"),
        (Weighted, [[1.0]], "a number for each example", "shape (1, 1) and type float64"),
        (Weighted, ["much"], "a number for each example", "shape (1,) and type <U4"),
        (Balanced, [0.5], "a whole number or a word for each example", "shape (1,) and type float64"),
        (Balanced, 3, "a whole number or a word for each example", "shape () and type int64"),
    ],
)
def test_values_of_another_kind_are_refused(kind: Any, values: Any, expected: str, given_text: str) -> None:
    name = "weights" if kind is Weighted else "labels"
    with pytest.raises(InputError) as caught:
        kind(values)
    assert str(caught.value) == (
        f"The {name} are not {expected}.\n"
        f"  given:    an array of {given_text}\n"
        f"  expected: shape (examples,), {expected}\n"
        f"  hint:     give the {name} as a list, an array or a tensor of one dimension"
    )


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
def test_mixture_the_index_depends_on_nothing_but_the_position(
    mixture: Mixture, positions: list[int], seed: int
) -> None:
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


def test_mixture_another_number_of_examples_is_refused() -> None:
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
