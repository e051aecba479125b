from __future__ import annotations

import json
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from lockstep.augmentations.crops import RandomCrop
from lockstep.augmentations.pixels import RandomErasing
from lockstep.augmentations.turns import HorizontalFlip, RandomShift
from lockstep.data.each_example import EachExample, ExampleDraws
from lockstep.data.loader import Loader
from lockstep.data.order import Sequential
from lockstep.errors import DataError, InputError
from lockstep.ragged import Ragged
from lockstep.randomness import Draws
from lockstep.readers.reader import AnyReader, Arrays, TorchDataset

Int64s = np.ndarray[Any, np.dtype[np.int64]]


class Numbers:
    """Example k is the number k."""

    cost = "memory"

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.batches_read = 0

    def __len__(self) -> int:
        return self.size

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        self.batches_read += 1
        return {"number": torch.from_numpy(indices), "name": [self.example_id(int(index)) for index in indices]}

    def example_id(self, index: int) -> str:
        return f"number {index}"


class AddDraws:
    """An augmentation that shows its draws."""

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        return {**batch, "draw": torch.from_numpy(draws.integers("draw", 0, 2**40))}


def loader(size: int = 10, **arguments: Any) -> Loader:
    return Loader(Numbers(size), **{"batch_size": 4, "order": "sequential", **arguments})


IMAGES, LABELS = torch.arange(30.0).reshape(10, 3), torch.arange(10)


@pytest.mark.parametrize(
    ("given", "reader"),
    [
        (TensorDataset(IMAGES, LABELS), TorchDataset(TensorDataset(IMAGES, LABELS))),
        ({"image": IMAGES, "label": LABELS}, Arrays({"image": IMAGES, "label": LABELS})),
    ],
)
def test_a_torch_dataset_and_tensors_by_name_are_readers(given: AnyReader, reader: AnyReader) -> None:
    one, other = (Loader(each, batch_size=4, num_processes=0) for each in (given, reader))
    for batch, same in zip(*(islice(each.batches(range(1), 1), 3) for each in (one, other)), strict=True):
        assert batch.keys() == same.keys() == {"image", "label"}
        assert all(torch.equal(batch[name], same[name]) for name in batch)
        assert torch.equal(batch["image"][:, 0], 3.0 * batch["label"])
    assert one.state() == other.state()


def numbers(batch: dict[str, Any]) -> list[int]:
    return batch["number"].tolist()


def test_every_batch_is_full_and_epochs_run_into_each_other() -> None:
    batches = list(islice(loader().batches(range(1), 1), 4))
    assert [numbers(batch) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5]]
    assert [batch.position for batch in batches] == [0, 4, 8, 12]
    assert batches[2]["name"] == ["number 8", "number 9", "number 0", "number 1"]


def test_a_batch_may_be_larger_than_an_epoch() -> None:
    assert numbers(next(loader(3, batch_size=8).batches(range(2), 2))) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_the_stream_goes_on_beyond_the_rows_whose_order_is_computed_at_once() -> None:
    batches = loader(7, batch_size=5000, order="shuffled").batches(range(1), 1)
    stream = np.concatenate([numbers(batch) for batch in islice(batches, 4)])
    assert stream.tolist() == loader(7, order="shuffled").order.indices(np.arange(20_000), 7, 0).tolist()


def test_a_worker_gets_the_rows_of_its_towers() -> None:
    parts = [next(loader(20, batch_size=12).batches(towers, 4)) for towers in (range(2), range(2, 3), range(3, 4))]
    assert [numbers(part) for part in parts] == [[0, 1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert [part.towers for part in parts] == [range(2), range(2, 3), range(3, 4)]
    assert {(part.position, part.batch_size, part.seed, part.epoch_size) for part in parts} == {(0, 12, 0, 20)}


def test_the_position_moves_with_attempts_and_not_with_reading() -> None:
    stream = loader(seed=3)
    batches = stream.batches(range(1), 1)
    first, second = next(batches), next(batches)
    data = {"source": "Numbers of 10 examples"}
    assert stream.state() == {"seed": 3, "position": 0, "num_examples": 10, "epoch_size": 10, "data": data}
    stream.commit(first)
    stream.commit(second)
    assert stream.position == 8
    assert next(batches).position == 8


def test_a_commit_keeps_the_report_until_the_stream_is_set_elsewhere() -> None:
    stream = loader()
    batch = next(stream.batches(range(1), 1))
    report: Any = object()
    stream.commit(batch, report)
    assert (stream.position, stream.last_report) == (4, report)
    stream.commit(batch)
    assert stream.last_report is None
    stream.commit(batch, report)
    stream.load_state(stream.state())
    assert stream.last_report is None


def test_batches_go_on_from_the_position() -> None:
    stream = loader()
    stream.position = 6
    batches = stream.batches(range(1), 1)
    stream.position = 0
    assert numbers(next(batches)) == [6, 7, 8, 9]


def test_stop_ends_the_stream_before_its_batch_and_reads_no_further() -> None:
    stream = loader()
    batches = list(stream.batches(range(1), 1, stop=lambda position: position >= 8))
    assert [batch.position for batch in batches] == [0, 4]
    assert stream.reader.batches_read == 2


def test_the_time_spent_getting_a_batch_is_told() -> None:
    assert next(loader().batches(range(1), 1)).wait_seconds > 0


def test_the_state_is_json_and_brings_the_stream_back() -> None:
    stream = loader(order="shuffled", seed=5)
    for batch in islice(stream.batches(range(1), 1), 3):
        stream.commit(batch)
    resumed = loader(order="shuffled", seed=5)
    resumed.load_state(json.loads(json.dumps(stream.state())))
    due = next(resumed.batches(range(1), 1))
    assert due.position == 12
    assert numbers(due) == numbers(next(stream.batches(range(1), 1)))


@pytest.mark.parametrize(
    ("name", "other", "value"),
    [
        ("seed", {"seed": 1, "position": 40, "epoch_size": 10}, 0),
        ("epoch_size", {"seed": 0, "position": 40, "epoch_size": 9}, 10),
        ("num_examples", {"seed": 0, "position": 40, "num_examples": 9, "epoch_size": 10}, 10),
    ],
)
def test_the_state_of_another_stream_is_refused(name: str, other: dict[str, int], value: int) -> None:
    stream = loader()
    with pytest.raises(InputError) as caught:
        stream.load_state(other)
    assert str(caught.value) == (
        f"The saved stream had another {name}.\n"
        f"  given:    {name} {value}\n"
        f"  expected: {name} {other[name]}, as it was saved at position 40\n"
        "  hint:     resume with the seed and the examples that the run began with, or start a new run"
    )
    assert stream.position == 0


def test_draws_are_keyed_by_seed_and_position() -> None:
    batch = next(islice(loader(augment=AddDraws(), seed=7).batches(range(1, 2), 2), 2, None))
    assert batch["draw"].tolist() == Draws(7, np.array([10, 11])).integers("draw", 0, 2**40).tolist()


def test_augmentations_follow_each_other() -> None:
    class Double:
        def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
            return {**batch, "double": 2 * batch["draw"]}

    batch = next(loader(augment=[AddDraws(), Double()]).batches(range(1), 1))
    assert torch.equal(batch["double"], 2 * batch["draw"])


def test_the_examples_of_an_attempt_have_names() -> None:
    stream = loader(order="shuffled")
    batch = next(islice(stream.batches(range(1), 1), 2, None))
    assert stream.example_ids(batch.position, batch.batch_size) == batch["name"]


@pytest.mark.parametrize(("batch_size", "towers", "near"), [(100, 8, "96 or 104"), (3, 4, "4"), (9, 2, "8 or 10")])
def test_a_batch_that_does_not_divide_by_the_towers_is_refused(batch_size: int, towers: int, near: str) -> None:
    with pytest.raises(InputError) as caught:
        loader(batch_size=batch_size).batches(range(1), towers)
    assert str(caught.value) == (
        "The batch cannot be split evenly over the towers.\n"
        f"  given:    batch_size={batch_size} over {towers} towers\n"
        f"  expected: a batch size that {towers} divides\n"
        f"  hint:     set batch_size to {near}, or change the towers"
    )


@pytest.mark.parametrize(("name", "least"), [("batch_size", 1), ("prefetch", 1), ("num_threads", 0), ("bad_budget", 0)])
def test_sizes_that_make_no_sense_are_refused(name: str, least: int) -> None:
    with pytest.raises(InputError) as caught:
        loader(**{name: least - 1})
    assert str(caught.value) == (
        f"{name} is out of range.\n"
        f"  given:    {name}={least - 1}\n"
        f"  expected: {least} or more\n"
        f"  hint:     give {name} a value in this range"
    )


def test_a_reader_without_examples_is_refused() -> None:
    class Empty(Numbers):
        def __repr__(self) -> str:
            return "Empty()"

    with pytest.raises(DataError) as caught:
        Loader(Empty(0), batch_size=1)
    assert str(caught.value) == (
        "The reader holds no examples.\n"
        "  given:    Empty() of length 0\n"
        "  expected: one example or more\n"
        "  hint:     check the path or the pattern of its files"
    )


def test_an_example_that_cannot_be_read_is_named() -> None:
    class Broken(Numbers):
        def read_batch(self, indices: Int64s) -> dict[str, Any]:
            if 6 in indices:
                raise OSError("no such block")
            return super().read_batch(indices)

    batches = Loader(Broken(), batch_size=4, order=Sequential()).batches(range(1), 1)
    next(batches)
    with pytest.raises(DataError) as caught:
        next(batches)
    assert str(caught.value) == (
        "Example number 6 cannot be read.\n"
        "  given:    OSError: no such block\n"
        "  expected: an example that Broken can read\n"
        "  hint:     repair it, or leave it out of the data"
    )
    assert isinstance(caught.value.__cause__, OSError)


def test_examples_that_only_fail_together_are_all_named() -> None:
    class Ragged(Numbers):
        def read_batch(self, indices: Int64s) -> dict[str, Any]:
            if len(indices) > 1:
                raise ValueError("shapes differ")
            return super().read_batch(indices)

    with pytest.raises(DataError, match="Example number 0, number 1 cannot be read"):
        next(Loader(Ragged(), batch_size=2, order="sequential").batches(range(1), 1))


@pytest.mark.parametrize(
    ("fields", "given_"),
    [
        ({"name": ["one"]}, "1 of 'name' for 2 examples"),
        ({"name": torch.tensor(3)}, "'name': a Tensor without rows"),
        ({"name": {"a": 1, "b": 2}}, "'name': a dict without rows"),
        ({"name": 7}, "'name': a int without rows"),
        (None, "a NoneType"),
        ([1, 2], "a list"),
    ],
)
def test_fields_without_an_entry_for_each_example_are_refused(fields: Any, given_: str) -> None:
    class Short(Numbers):
        def read_batch(self, indices: Int64s) -> Any:
            return fields

    with pytest.raises(DataError) as caught:
        next(Loader(Short(), batch_size=2).batches(range(1), 1))
    assert str(caught.value) == (
        "Short did not give an entry of each field for each example.\n"
        f"  given:    {given_}\n"
        "  expected: a dict of fields with the batch first: tensors, lists or Raggeds of its length\n"
        "  hint:     fix what Short returns"
    )


def test_an_augmentation_that_loses_rows_is_refused() -> None:
    def first(batch: dict[str, Any], draws: Any) -> dict[str, Any]:
        return {name: values[:1] for name, values in batch.items()}

    with pytest.raises(DataError, match=r"first did not give an entry of each field for each example\."):
        next(loader(augment=first).batches(range(1), 1))


@pytest.mark.parametrize("augment", [5, [5], ["crop"]])
def test_what_cannot_augment_is_refused(augment: Any) -> None:
    with pytest.raises(InputError, match=r"functions of a batch and its draws"):
        loader(augment=augment)


def test_evaluation_counts_each_example_once_in_full_shapes() -> None:
    batches = list(loader(order="shuffled").evaluation_batches(4))
    assert [numbers(batch) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 9, 9]]
    assert [(batch.position, batch.valid, batch.batch_size) for batch in batches] == [(0, 4, 4), (4, 4, 4), (8, 2, 4)]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_evaluation_has_the_same_micro_batches_for_any_number_of_workers(num_workers: int) -> None:
    def seen(rank: int, of: int) -> list[tuple[int, int, list[int], list[int]]]:
        batches = loader(11, augment=AddDraws()).evaluation_batches(3, rank, of)
        return [(batch.position, batch.valid, numbers(batch), batch["draw"].tolist()) for batch in batches]

    dealt = [found for rank in range(num_workers) for found in seen(rank, num_workers)]
    assert sorted(dealt) == seen(0, 1)


def test_evaluation_is_alike_in_every_pass_and_leaves_the_stream() -> None:
    stream = loader(augment=AddDraws())
    stream.position = 6
    first, again = ([batch["draw"].tolist() for batch in stream.evaluation_batches(4)] for _ in range(2))
    assert first == again
    assert first[2] == Draws(0, np.array([8, 9, 9, 9])).integers("draw", 0, 2**40).tolist()
    assert stream.position == 6


def test_evaluation_without_micro_batches_is_refused() -> None:
    with pytest.raises(InputError, match="micro_batch=0"):
        loader().evaluation_batches(0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("cost", ["memory", "decode"])
def test_batches_arrive_whole_on_the_device(cost: str) -> None:
    class Images(Numbers):
        def read_batch(self, indices: Int64s) -> dict[str, Any]:
            numbers = torch.from_numpy(indices)
            return {
                **super().read_batch(indices),
                "image": numbers[:, None, None, None].expand(-1, 3, 99, 99).contiguous(),
                "label": Ragged.of([number.expand(int(number) % 3) for number in numbers]),
            }

    Images.cost = cost
    device = torch.accelerator.current_accelerator()
    assert device is not None
    torch.ones(1, device=device)
    stream = Loader(Images(500), batch_size=64, augment=RandomShift(2), num_processes=2)
    for batch in islice(stream.batches(range(1), 1, device), 50):
        assert batch["image"].device.type == device.type
        assert torch.equal(batch["image"].amax(dim=(1, 2, 3)), batch["number"])
        assert batch["label"].lengths.device.type == "cpu"
        assert torch.equal(batch["label"].values, batch["number"].repeat_interleave(batch["number"] % 3))
        assert [f"number {number}" for number in numbers(batch)] == batch["name"]


class Pictures(Numbers):
    """Images of random pixels."""

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        pixels = np.random.default_rng(0).integers(0, 256, (self.size, 3, 6, 8), dtype=np.uint8)
        return {"image": torch.from_numpy(pixels[indices])}


def images_of(augment: list[Any], size: int = 64, seed: int = 0) -> torch.Tensor:
    batches = Loader(Pictures(size), batch_size=size, order="sequential", augment=augment, seed=seed).batches(
        range(1), 1
    )
    return next(batches)["image"]


def test_two_equal_flips_do_not_undo_each_other() -> None:
    original, once, twice, thrice = (images_of([HorizontalFlip()] * count, size=400) for count in range(4))
    for images in (once, twice, thrice):
        flipped = sum(torch.equal(image, before.flip(-1)) for image, before in zip(images, original, strict=True))
        assert 150 < flipped < 250  # half of them, whatever the number of fair flips
    # The first flip draws what it draws alone: the second one is all that differs.
    second = [not torch.equal(one, two) for one, two in zip(once, twice, strict=True)]
    assert 150 < sum(second) < 250


def test_equal_functions_of_one_example_draw_other_numbers_too() -> None:
    def add(example: dict[str, Any], draws: ExampleDraws) -> dict[str, Any]:
        return {**example, "drawn": [*example.get("drawn", []), draws.integer("n", 0, 2**40)]}

    batch = next(loader(augment=[EachExample(add), EachExample(add)]).batches(range(1), 1))
    assert all(first != second for first, second in batch["drawn"])
    assert [first for first, _ in batch["drawn"]] == [
        only for (only,) in next(loader(augment=EachExample(add)).batches(range(1), 1))["drawn"]
    ]


AUGMENTATIONS = [HorizontalFlip(0.3), RandomShift(2), RandomErasing(p=0.9), RandomCrop(8, padding=2)]


@given(st.permutations(AUGMENTATIONS), st.integers(0, len(AUGMENTATIONS)), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_a_list_without_repeats_draws_by_the_names_of_columns_alone(order: list[Any], count: int, seed: int) -> None:
    augment = order[:count]
    batch: dict[str, Any] = {"image": images_of([])}
    for each in augment:  # as the stream was before repeats drew numbers of their own
        batch = each(batch, Draws(seed, np.arange(64)))
    assert torch.equal(images_of(augment, seed=seed), batch["image"])
