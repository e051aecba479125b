from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.loader import Loader
from lockstep.errors import DataError, InputError
from lockstep.ragged import Ragged
from lockstep.readers.combine import Concatenated, OnlyFields, Subset, one_of, share_by_name, split
from lockstep.readers.reader import Arrays


class Words:
    """Words with their lengths; it remembers what it was asked for."""

    def __init__(self, *words: str, cost: str = "memory") -> None:
        self.words, self.cost = words, cost
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.words)

    def read_batch(self, indices: np.ndarray) -> dict[str, Any]:
        self.asked.append(indices.tolist())
        chosen = [self.words[index] for index in indices]
        return {"word": chosen, "length": torch.tensor([len(word) for word in chosen])}

    def example_id(self, index: int) -> str:
        return self.words[index]


def numbers(start: int, stop: int) -> Arrays:
    return Arrays({"number": torch.arange(start, stop)})


def read(reader: Any, indices: list[int]) -> dict[str, Any]:
    return reader.read_batch(np.array(indices, dtype=np.int64))


def message_of(kind: type[Exception], call: Any) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_sources_follow_one_another() -> None:
    both = Concatenated({"animals": Words("ant", "bear"), "plants": Words("oak", "willow", "ivy")})
    assert len(both) == 5
    assert both.sizes == {"animals": 2, "plants": 3}
    assert read(both, [0, 1, 2, 3, 4])["word"] == ["ant", "bear", "oak", "willow", "ivy"]
    batch = read(both, [4, 0, 3, 3, 1])
    assert batch["word"] == ["ivy", "ant", "willow", "willow", "bear"]
    assert batch["length"].tolist() == [3, 3, 6, 6, 4]
    names = [both.example_id(index) for index in range(5)]
    assert names == ["animals:ant", "animals:bear", "plants:oak", "plants:willow", "plants:ivy"]


def test_sources_of_a_list_have_numbers() -> None:
    both = Concatenated([Words("ant"), Words("ant")])
    assert [both.example_id(index) for index in range(2)] == ["0:ant", "1:ant"]


def test_a_batch_asks_each_source_once_and_only_those_it_needs() -> None:
    sources = [Words("a", "b"), Words("c"), Words("d", "e", "f")]
    read(Concatenated(sources), [5, 0, 3, 1, 5])
    assert [source.asked for source in sources] == [[[0, 1]], [], [[2, 0, 2]]]


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any),
    picks=st.lists(st.integers(0, 10**6), max_size=12),
    shape=st.lists(st.integers(0, 3), max_size=2),
    dtype=st.sampled_from([torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.bool]),
)
@settings(max_examples=50, deadline=None)
def test_a_concatenation_is_the_one_table_cut_into_parts(
    lengths: list[int], picks: list[int], shape: list[int], dtype: torch.dtype
) -> None:
    table = torch.arange(sum(lengths) * int(np.prod(shape, initial=1))).reshape(sum(lengths), *shape).to(dtype)
    reader = Concatenated([Arrays({"x": rows}) for rows in table.split(lengths)])
    indices = [pick % len(table) for pick in picks] or [0]
    whole = Arrays({"x": table})
    joined, expected = read(reader, indices)["x"], read(whole, indices)["x"]
    assert joined.dtype == expected.dtype
    assert torch.equal(joined, expected)


def test_rows_of_any_memory_layout_are_joined() -> None:
    images = torch.randn(4, 3, 5, 6).contiguous(memory_format=torch.channels_last)

    class ChannelsLast(Words):
        def read_batch(self, indices: np.ndarray) -> dict[str, Any]:
            return {"image": images[torch.from_numpy(indices)].contiguous(memory_format=torch.channels_last)}

    both = Concatenated([ChannelsLast("a", "b", "c", "d"), ChannelsLast("a", "b", "c", "d")])
    assert torch.equal(read(both, [5, 2, 4, 0])["image"], images[[1, 2, 0, 0]])


def test_ragged_values_of_several_sources_stay_with_their_examples() -> None:
    class Letters(Words):
        def read_batch(self, indices: np.ndarray) -> dict[str, Any]:
            return {"letters": Ragged.of([torch.tensor([*self.words[i].encode()]).long() for i in indices])}

    batch = read(Concatenated([Letters("ant", "", "bear"), Letters("oak", "ivy")]), [4, 0, 1, 3, 0, 2])
    assert [bytes(row.tolist()).decode() for row in batch["letters"]] == ["ivy", "ant", "", "oak", "ant", "bear"]


def test_what_one_source_has_read_is_handed_on_as_it_is() -> None:
    class Table(Words):
        def read_batch(self, indices: np.ndarray) -> dict[str, Any]:
            return answer

    answer = {"x": torch.zeros(2)}
    assert Concatenated([Words("a"), Table("b", "c")]).read_batch(np.array([1, 2])) is answer


@pytest.mark.parametrize(("costs", "cost"), [(["memory", "memory"], "memory"), (["memory", "decode"], "decode")])
def test_what_one_source_has_to_decode_is_read_by_loader_processes(costs: list[str], cost: str) -> None:
    both = Concatenated([Words("a", cost=each) for each in costs])
    assert both.cost == Subset(both, [0]).cost == one_of(both, 2).cost == cost


def test_concatenations_and_subsets_nest() -> None:
    inner = Concatenated({"x": Words("a", "b"), "y": Words("c", "d")})
    outer = Concatenated({"in": Subset(inner, slice(1, 3)), "out": Words("e")})
    assert [outer.example_id(index) for index in range(3)] == ["in:x:b", "in:y:c", "out:e"]
    assert read(outer, [2, 1, 0])["word"] == ["e", "c", "b"]


def test_sources_with_other_fields_are_named() -> None:
    labelled = Arrays({"number": torch.arange(2), "label": torch.arange(2)})
    call = lambda: read(Concatenated({"old": numbers(0, 2), "new": labelled}), [0, 2])  # noqa: E731
    assert message_of(DataError, call) == (
        "The sources 'old' and 'new' have other fields than each other.\n"
        "  given:    'new' has 'label': torch.int64 of shape ('rows',)\n"
        "  expected: as 'old' has: 'label': missing\n"
        "  hint:     give all sources fields of the same names, dtypes and shapes: OnlyFields(reader, [...]) keeps some"
    )


@pytest.mark.parametrize(
    ("values", "given_text"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), "torch.float64 of shape ('rows', 3)"),
        (torch.zeros(2, 4), "torch.float32 of shape ('rows', 4)"),
        (None, "a list"),
        (Ragged.of([torch.zeros(1, 3)] * 2), "ragged torch.float32 of shape ('rows', 3)"),
    ],
)
def test_sources_with_fields_of_another_kind_are_named(values: Any, given_text: str) -> None:
    class Others(Words):
        def read_batch(self, indices: np.ndarray) -> dict[str, Any]:
            return {"x": [0] * len(indices) if values is None else values[: len(indices)]}

    other = Arrays({"x": values}) if isinstance(values, torch.Tensor) else Others("a", "b")
    reader = Concatenated([Arrays({"x": torch.zeros(2, 3)}), other])
    assert message_of(DataError, lambda: read(reader, [3, 0])) == (
        "The sources '0' and '1' have other fields than each other.\n"
        f"  given:    '1' has 'x': {given_text}\n"
        "  expected: as '0' has: 'x': torch.float32 of shape ('rows', 3)\n"
        "  hint:     give all sources fields of the same names, dtypes and shapes: OnlyFields(reader, [...]) keeps some"
    )


@pytest.mark.parametrize(
    ("values", "given_text"),
    [
        (torch.zeros(1), "Tensor of 1"),
        ([1, 2, 3], "list of 3"),
        (Ragged.of([torch.zeros(2)]), "Ragged of 1"),
        (5, "int"),
    ],
)
def test_a_source_that_gives_other_entries_than_asked_for_is_named(values: Any, given_text: str) -> None:
    class Odd(Words):
        def read_batch(self, indices: np.ndarray) -> dict[str, Any]:
            return {"number": values}

    reader = Concatenated({"even": numbers(0, 2), "odd": Odd("a", "b")})
    assert message_of(DataError, lambda: read(reader, [0, 2, 3])) == (
        "The source 'odd' did not give one 'number' for each example.\n"
        f"  given:    {given_text}, for 2 examples\n"
        "  expected: a tensor, a list or a Ragged with one entry for each example\n"
        "  hint:     fix read_batch of that reader"
    )


def test_an_example_that_cannot_be_read_is_named_with_its_source() -> None:
    class Torn(Words):
        def read_batch(self, indices: np.ndarray) -> dict[str, Any]:
            if 1 in indices:
                raise ValueError("torn")
            return super().read_batch(indices)

    reader = Concatenated({"whole": Words("a"), "torn": Torn("b", "c")})
    message = message_of(DataError, lambda: next(Loader(reader, batch_size=3, order="sequential").batches(range(1), 1)))
    assert message.startswith("Example torn:c cannot be read.\n  given:    ValueError: torn\n")


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (
            [],
            "There are no sources, so there are no examples.\n"
            "  given:    no sources\n"
            "  expected: one reader or more\n"
            '  hint:     give them by name: Concatenated({"coco": coco, "voc": voc})',
        ),
        (
            numbers(0, 1),
            "sources is of the wrong type.\n"
            "  given:    sources is Arrays\n"
            "  expected: readers by name, or a list of them\n"
            '  hint:     give them by name: Concatenated({"coco": coco, "voc": voc})',
        ),
        (
            {"here": "a path"},
            "source 'here' is of the wrong type.\n"
            "  given:    source 'here' is str\n"
            "  expected: a reader: it has read_batch, example_id, cost and a length\n"
            "  hint:     wrap tensors in Arrays({...}), a torch Dataset in TorchDataset(dataset)",
        ),
    ],
)
def test_sources_that_are_no_readers_are_refused(sources: Any, message: str) -> None:
    assert message_of(InputError, lambda: Concatenated(sources)) == message


def test_a_subset_has_the_examples_of_its_indices_in_their_order() -> None:
    words = Words("a", "bb", "ccc", "dddd")
    for indices in ([3, 0, 2], np.array([3, 0, 2], dtype=np.uint8), torch.tensor([3, 0, 2])):
        part = Subset(words, indices)
        assert len(part) == 3
        assert part.indices.tolist() == [3, 0, 2]
        assert read(part, [0, 1, 2, 0])["word"] == ["dddd", "a", "ccc", "dddd"]
        assert [part.example_id(index) for index in range(3)] == ["dddd", "a", "ccc"]
    assert words.asked[-1] == [3, 0, 2, 3]


def test_a_slice_is_that_of_a_list() -> None:
    reader = numbers(0, 10)
    for part in (slice(3), slice(-2, None), slice(1, 8, 3), slice(None, None, -1), slice(5, 5)):
        assert Subset(reader, part).indices.tolist() == list(range(10))[part]


def test_a_subset_may_be_empty() -> None:
    assert len(Subset(numbers(0, 3), [])) == 0


@pytest.mark.parametrize(
    ("indices", "what", "given_text"),
    [
        ([0, 3], "out of range", "indices[1]=3"),
        ([-1], "out of range", "indices[0]=-1"),
        ([2, 0, 2, 0], "there twice", "indices[2]=2"),
    ],
)
def test_indices_that_cannot_be_are_refused(indices: list[int], what: str, given_text: str) -> None:
    assert message_of(InputError, lambda: Subset(numbers(0, 3), indices)) == (
        f"An index of the subset is {what}.\n"
        f"  given:    {given_text}, of a reader of 3 examples\n"
        "  expected: whole numbers from 0 to 2, each at most once\n"
        "  hint:     leave it out; to see an example more often than others, use the order Weighted"
    )


@pytest.mark.parametrize(
    ("indices", "given_text"),
    [([True, False, True], "(3,) and type bool"), ([0.5], "(1,) and type float64"), (2, "() and type int64")],
)
def test_indices_of_another_type_are_refused(indices: Any, given_text: str) -> None:
    assert message_of(InputError, lambda: Subset(numbers(0, 3), indices)) == (
        "The indices of a subset are no whole numbers in a row.\n"
        f"  given:    an array of shape {given_text}\n"
        "  expected: whole numbers from 0 to 2, each at most once\n"
        "  hint:     give a list or an array of them; of a mask, torch.nonzero(mask).flatten()"
    )


@pytest.mark.parametrize("make", [lambda: Subset(5, []), lambda: one_of(5, 1), lambda: split(5, {"all": 1.0})])
def test_a_part_of_no_reader_is_refused(make: Any) -> None:
    assert message_of(InputError, make).startswith("reader is of the wrong type.\n  given:    reader is int\n")


@given(cuts=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=50, deadline=None)
def test_the_parts_of_a_split_are_disjoint_and_complete(cuts: list[int], seed: int) -> None:
    fractions = {f"part {number}": cut / sum(cuts) for number, cut in enumerate(cuts)}
    parts = split(numbers(0, 400), fractions, seed)
    assert list(parts) == list(fractions)
    assert sorted(np.concatenate([part.indices for part in parts.values()])) == list(range(400))
    for name, part in parts.items():
        assert abs(len(part) - 400 * fractions[name]) < 6 * np.sqrt(400 * fractions[name])
        assert (np.diff(part.indices) > 0).all()


def test_an_example_stays_in_its_part_when_others_are_added() -> None:
    fractions = {"train": 0.9, "validation": 0.1}
    before, after = (split(numbers(0, size), fractions) for size in (200, 300))
    for name, part in before.items():
        assert part.indices.tolist() == [index for index in after[name].indices.tolist() if index < 200]
    assert before["validation"].indices.tolist() == [
        4,
        11,
        21,
        23,
        40,
        62,
        86,
        89,
        94,
        98,
        125,
        136,
        144,
        154,
        159,
        170,
        177,
        188,
        192,
    ]  # A promise, as the order is one.


def test_seeds_give_other_splits() -> None:
    halves = {"one": 0.5, "two": 0.5}
    assert len({tuple(split(numbers(0, 60), halves, seed)["one"].indices.tolist()) for seed in range(20)}) == 20


@pytest.mark.parametrize(
    ("fractions", "given_text", "total"),
    [
        ({"train": 0.9, "test": 0.2}, "train 0.9, test 0.2", "1.1"),
        ({"train": 1.5, "test": -0.5}, "train 1.5, test -0.5", "1"),
        ({}, "no parts", "0"),
    ],
)
def test_parts_that_are_not_the_whole_are_refused(fractions: dict[str, float], given_text: str, total: str) -> None:
    assert message_of(InputError, lambda: split(numbers(0, 10), fractions)) == (
        "The parts of a split are not the whole.\n"
        f"  given:    {given_text}\n"
        f"  expected: fractions above 0 that add up to 1, not {total}\n"
        '  hint:     give them such as {"train": 0.9, "validation": 0.1}'
    )


def test_a_part_without_an_example_is_refused() -> None:
    assert message_of(InputError, lambda: split(numbers(0, 3), {"train": 0.999, "test": 0.001})) == (
        "The split leaves 'test' without an example.\n"
        "  given:    a fraction of 0.001 of 3 examples\n"
        "  expected: one example or more in each part\n"
        "  hint:     give it a larger fraction, or name its examples: Subset(reader, indices)"
    )


@pytest.mark.parametrize(("n", "kept"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (7, [0])])
def test_one_of_n_keeps_the_first_of_every_n(n: int, kept: list[int]) -> None:
    part = one_of(numbers(0, 5), n)
    assert read(part, list(range(len(part))))["number"].tolist() == kept


def test_one_of_none_is_refused() -> None:
    assert message_of(InputError, lambda: one_of(numbers(0, 5), 0)) == (
        "n is out of range.\n  given:    n=0\n  expected: 1 or more\n  hint:     give n a value in this range"
    )


def test_sources_with_other_fields_are_joined_by_those_they_share() -> None:
    more = Arrays({"x": torch.zeros(2, 1), "weight": torch.ones(2)})
    less = Arrays({"x": torch.ones(3, 1)})
    joined = Concatenated({"more": OnlyFields(more, ["x"]), "less": less})
    batch = joined.read_batch(np.array([4, 0]))
    assert list(batch) == ["x"]
    assert batch["x"].flatten().tolist() == [1, 0]
    assert joined.example_id(1) == "more:1"


def test_a_field_that_is_not_there_cannot_be_kept() -> None:
    with pytest.raises(DataError) as caught:
        OnlyFields(Arrays({"x": torch.zeros(2)}), ["x", "y"]).read_batch(np.array([0]))
    assert str(caught.value) == (
        "The reader gives no field 'y'.\n"
        "  given:    the fields x\n"
        "  expected: x, y\n"
        "  hint:     leave it out, or have the reader give it"
    )


def parts(*words: str) -> tuple[set[str], set[str]]:
    """Return the words that are held out, and the others."""
    held, kept = (share_by_name(Words(*words), 0.3, is_held_out=each) for each in (True, False))
    return {held.example_id(i) for i in range(len(held))}, {kept.example_id(i) for i in range(len(kept))}


def test_a_share_is_held_out_by_names_whatever_else_is_there() -> None:
    words = [f"image-{number}" for number in range(1000)]
    held, kept = parts(*words)
    assert held | kept == {*words}
    assert not held & kept
    assert 250 < len(held) < 350  # 300, with a standard deviation of 14.5
    of_some, _ = parts(*reversed(words[::3]))
    assert of_some == held & {*words[::3]}


def test_a_share_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="leaves no example to validate"):
        share_by_name(Words("a"), 1e-9, is_held_out=True)
