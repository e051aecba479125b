"""The law of the stream: each example exactly once per epoch, whoever reads it, in how many parts, after any resume.

Of an order that repeats examples the law says: each example of a group (a source, a class) once per cycle of it.
A new reader, order or augmentation is held to it by one more line in `CASES`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from random import Random
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from lockstep.augmentations.turns import RandomShift
from lockstep.data.loader import Loader
from lockstep.data.order import Balanced, BlockShuffled, Mixture, Repeated, Sequential, Shuffled, Weighted
from lockstep.randomness import Draws
from lockstep.readers.combine import Concatenated, Subset, one_of, split
from lockstep.served.leases import Leases

MakeLoader = Callable[..., Loader]
Row = tuple[Any, ...]
T = TypeVar("T")


def rows_of(batch: dict[str, Any]) -> list[Row]:
    """The examples of a batch, each as bits that can be compared and counted."""
    length = len(next(iter(batch.values())))
    return [tuple((name, _bits(value[row])) for name, value in batch.items()) for row in range(length)]


def _bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().view(-1).numpy().tobytes()
    return value


def stream_of(loader: Loader, num_rows: int, dealing: Iterable[range] = (range(1),)) -> list[Row]:
    """The first rows of the stream, put together from workers with these towers."""
    return rows_of_workers(loader, -(-num_rows // loader.batch_size), list(dealing), rows_of)


def rows_of_workers(
    loader: Loader, num_batches: int, dealing: Sequence[range], to_rows: Callable[[dict[str, Any]], Iterable[T]]
) -> list[T]:
    """The rows of so many batches, put together from workers with these towers."""
    parts = []
    for towers in dealing:
        batches = loader.batches(towers, dealing[-1].stop)
        parts.append([list(to_rows(batch)) for batch in islice(batches, num_batches)])
        batches.close()
    return [row for step in zip(*parts, strict=True) for part in step for row in part]


def assert_each_example_once(make_loader: MakeLoader) -> None:
    """Every epoch holds each example of the reader once, under its own name."""
    loader = make_loader(augment=None)
    size = loader.epoch_size
    row_of = rows_by_name(loader)
    assert len(row_of) == size
    for epoch in range(3):
        assert Counter(loader.example_ids(epoch * size, size)) == Counter(list(row_of))


def assert_each_example_once_per_cycle(make_loader: MakeLoader, group_of: Callable[[str], str]) -> None:
    """No example of a group comes again before all of the group came."""
    loader = make_loader()
    groups: dict[str, set[str]] = {}
    for name in rows_by_name(make_loader(augment=None)):
        groups.setdefault(group_of(name), set()).add(name)
    stream = loader.example_ids(0, 8 * loader.epoch_size)
    for group, members in groups.items():
        walked = [name for name in stream if group_of(name) == group]
        assert len(walked) > len(members)
        for start in range(0, len(walked), len(members)):
            cycle = walked[start : start + len(members)]
            assert len(set(cycle)) == len(cycle)


def assert_rows_are_those_named(make_loader: MakeLoader) -> None:
    """Every row of the stream is the example that the stream names for its position."""
    loader = make_loader(augment=None)
    num_rows = 3 * loader.epoch_size
    row_of = rows_by_name(loader)
    assert stream_of(loader, num_rows)[:num_rows] == [row_of[name] for name in loader.example_ids(0, num_rows)]


def rows_by_name(loader: Loader) -> dict[str, Row]:
    """Every example of the reader, under a name of its own."""
    indices = np.arange(len(loader.reader))
    names = [loader.reader.example_id(int(index)) for index in indices]
    assert len(set(names)) == len(names)
    return dict(zip(names, rows_of(loader.reader.read_batch(indices)), strict=True))


def assert_same_for_any_number_of_processes(make_loader: MakeLoader) -> None:
    """The stream does not depend on who reads it, nor on how far ahead."""
    num_rows = 2 * make_loader().epoch_size
    alone = stream_of(make_loader(num_processes=0), num_rows)
    for num_processes, prefetch in ((1, 1), (3, 4)):
        assert stream_of(make_loader(num_processes=num_processes, prefetch=prefetch), num_rows) == alone


def assert_same_for_any_dealing_of_towers(make_loader: MakeLoader) -> None:
    """The rows of the workers, put together, are the stream of one worker with one tower."""
    loader = make_loader(batch_size=8, num_processes=0)
    num_rows = 2 * loader.epoch_size
    alone = stream_of(loader, num_rows)
    for dealing in (
        [range(8)],
        [range(4), range(4, 8)],
        [range(3), range(3, 6), range(6, 8)],
        [range(2), range(2, 4), range(4, 6), range(6, 8)],
        [range(1), range(1, 4)],
        [range(tower, tower + 1) for tower in range(8)],
    ):
        assert stream_of(loader, num_rows, dealing) == alone


def assert_resumes_anywhere(make_loader: MakeLoader) -> None:
    """Stopped after any batch and resumed, also with another batch size, the rest of the stream comes."""
    whole = make_loader()
    num_batches = 2 * whole.epoch_size // whole.batch_size + 2
    num_rows = num_batches * whole.batch_size
    stream = stream_of(whole, num_rows)
    for batch in islice(whole.batches(range(1), 1), num_batches):
        for changes in ({}, {"batch_size": 5, "num_processes": 0}):
            resumed = make_loader(**changes)
            resumed.load_state(whole.state())
            rest = stream[batch.position :]
            assert stream_of(resumed, len(rest))[: len(rest)] == rest
        whole.commit(batch)
    assert whole.position == num_rows


def leased_rows(loader: Loader, num_updates: int, seed: int) -> list[Row]:
    """The rows of so many updates by three workers, two slices each; they answer in a random order, or never."""
    chance = Random(seed)
    slices = loader.slices(loader.batch_size // 2, 2)
    rule = Leases(
        slices.starts(),
        slice_size=slices.size,
        epoch_size=loader.epoch_size,
        num_workers=3,
        required=2,
        staleness=0,
    )
    readers = {worker: slices.reader(worker - 1, 3, torch.device("cpu")) for worker in (1, 2, 3)}
    rows: list[Row] = []
    leased: dict[int, int] = {}
    rows_of_slice: dict[int, list[Row]] = {}
    rule.publish()
    while rule.version < num_updates:
        worker = chance.choice([1, 1, 2, 2, 3])
        if worker in leased:
            rule.arrive(worker, leased.pop(worker), rule.version)
        elif (start := rule.begin(worker)) is not None:
            leased[worker] = start
            rows_of_slice[start] = rows_of(readers[worker].read(start))
        if update := rule.take():
            rows += [row for lease in update for row in rows_of_slice[lease.slice]]
            slices.commit(*rule.unfinished())
            rule.publish()
    for reader in readers.values():
        reader.close()
    return rows


def assert_leased_in_any_order(make_loader: MakeLoader) -> None:
    """What is leased to workers, and goes on after a resume without leases, is the stream in another order."""
    first, second, third = make_loader(), make_loader(), make_loader()
    num_updates = first.epoch_size // first.batch_size + 2
    rows = leased_rows(first, num_updates, seed=0)
    second.load_state(json.loads(json.dumps(first.state())))
    rows += leased_rows(second, num_updates, seed=1)
    third.load_state(json.loads(json.dumps(second.state())))
    assert third.position == len(rows)
    rows += stream_of(third, sum(map(len, third.returned)) + 1)
    assert Counter(rows) == Counter(stream_of(make_loader(), len(rows))[: len(rows)])


def assert_stream_exact(make_loader: MakeLoader) -> None:
    """Hold a loader to the whole law; `make_loader(**changes)` makes it anew with some arguments changed."""
    if make_loader().order.is_exactly_once:
        assert_each_example_once(make_loader)
    assert_rows_are_those_named(make_loader)
    assert_same_for_any_number_of_processes(make_loader)
    assert_same_for_any_dealing_of_towers(make_loader)
    assert_resumes_anywhere(make_loader)
    assert_leased_in_any_order(make_loader)


class Pictures:
    """Small pictures and their numbers."""

    def __init__(self, size: int, cost: str) -> None:
        self.size, self.cost = size, cost

    def __len__(self) -> int:
        return self.size

    def read_batch(self, indices: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, Any]:
        number = torch.from_numpy(indices)
        pixels = (number[:, None] * 7 + torch.arange(12) + 1).to(torch.uint8)
        return {
            "image": pixels.view(-1, 1, 3, 4),
            "label": number % 3,
            "name": [f"picture {index}" for index in indices],
        }

    def example_id(self, index: int) -> str:
        return f"picture {index}"


@dataclass(frozen=True)
class Mixed:
    """Adds the pixels of other pictures to most pictures."""

    num_partners: int = 1
    p: float = 0.7

    def needs_partners(self, draws: Draws) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return draws.uniform("Mixed") < self.p

    def __call__(self, batch: dict[str, Any], draws: Draws, partners: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        images = batch["image"].clone()
        for number, partner in enumerate(partners, start=2):
            images[torch.from_numpy(self.needs_partners(draws))] += number * partner["image"]
        return {**batch, "image": images}


PAIR = Concatenated({"a": Pictures(7, "memory"), "b": Pictures(10, "memory")})
PARTS = split(Pictures(40, "memory"), {"large": 0.6, "small": 0.4})
LABELS = [0, 1, 2, 0, 0, 2, 0]


# Sizes that divide by no batch size, that do, and below one batch.
CASES = {
    "memory shuffled": partial(Loader, Pictures(23, "memory"), batch_size=4, seed=3),
    "memory augmented": partial(Loader, Pictures(16, "memory"), batch_size=4, augment=RandomShift(2)),
    "memory sequential": partial(Loader, Pictures(3, "memory"), batch_size=4, order=Sequential()),
    "decoded augmented": partial(Loader, Pictures(11, "decode"), batch_size=4, num_processes=2, augment=RandomShift(1)),
    "one example": partial(Loader, Pictures(1, "memory"), batch_size=2, order=Shuffled(), augment=RandomShift(1)),
    "blocks": partial(Loader, Pictures(23, "memory"), batch_size=4, order=BlockShuffled(4, window_blocks=2)),
    "one block": partial(Loader, Pictures(5, "memory"), batch_size=4, order=BlockShuffled(8)),
    "repeated": partial(Loader, Pictures(7, "memory"), batch_size=4, order=Repeated(3), augment=RandomShift(2)),
    "concatenated": partial(Loader, PAIR, batch_size=4, augment=RandomShift(1)),
    "concatenated in blocks": partial(Loader, PAIR, batch_size=4, order=BlockShuffled(3, window_blocks=2)),
    "concatenated, one decoded": partial(
        Loader, Concatenated([Pictures(4, "memory"), Pictures(5, "decode")]), batch_size=4
    ),
    "mixture": partial(Loader, PAIR, batch_size=4, order=Mixture(PAIR.sizes, {"a": 3, "b": 1}, length=12)),
    "balanced": partial(Loader, Pictures(7, "memory"), batch_size=4, order=Balanced(LABELS)),
    "weighted": partial(Loader, Pictures(7, "memory"), batch_size=4, order=Weighted([1, 2, 3, 0, 1, 1, 9])),
    "subset": partial(Loader, Subset(Pictures(30, "memory"), [3, 28, 0, 7, 12]), batch_size=4),
    "part of a split": partial(Loader, PARTS["small"], batch_size=4),
    "partners": partial(Loader, Pictures(11, "decode"), batch_size=4, augment=[RandomShift(1), Mixed(2)]),
    "partners of partners": partial(Loader, Pictures(7, "memory"), batch_size=4, augment=[Mixed(), Mixed(2), Mixed()]),
    "partners by weight": partial(
        Loader, PAIR, batch_size=4, order=Mixture(PAIR.sizes, {"a": 3, "b": 1}, length=12), augment=Mixed()
    ),
    "one of three": partial(Loader, one_of(PAIR, 3), batch_size=4, order=Sequential()),
}


# Each order, reader and augmentation is in another case, too.
COMBINED = ("concatenated in blocks", "memory augmented", "partners by weight", "subset")


@pytest.mark.process
@pytest.mark.parametrize(
    "make_loader",
    [pytest.param(CASES[name], marks=[pytest.mark.slow] * (name in COMBINED), id=name) for name in CASES],
)
def test_the_stream_is_exact(make_loader: MakeLoader) -> None:
    assert_stream_exact(make_loader)


@pytest.mark.parametrize(
    ("case", "group_of"),
    [
        ("mixture", lambda name: name[0]),
        ("balanced", lambda name: str(LABELS[int(name.split()[-1])])),
        ("memory shuffled", lambda name: "all"),
    ],
)
def test_each_example_comes_once_per_cycle(case: str, group_of: Callable[[str], str]) -> None:
    assert_each_example_once_per_cycle(CASES[case], group_of)


def test_the_parts_of_a_split_are_the_whole() -> None:
    names = [name for part in PARTS.values() for name in rows_by_name(Loader(part, batch_size=1))]
    assert Counter(names) == Counter(f"picture {number}" for number in range(40))


@pytest.mark.process
def test_the_law_sees_a_draw_that_depends_on_the_process() -> None:
    class Forgetful:
        """Draws from a generator with a state, as the stream must not."""

        def __call__(self, batch: dict[str, Any], draws: Any) -> dict[str, Any]:
            return {**batch, "noise": torch.rand(len(batch["label"]))}

    with pytest.raises(AssertionError):
        assert_same_for_any_number_of_processes(partial(CASES["decoded augmented"], augment=Forgetful()))


def test_the_law_sees_an_order_that_repeats_an_example() -> None:
    class Stuck(Sequential):
        def indices(self, positions: Any, size: int, seed: int) -> Any:
            return np.minimum(positions % size, size - 2)

    with pytest.raises(AssertionError):
        assert_each_example_once(partial(CASES["memory shuffled"], order=Stuck()))
    with pytest.raises(AssertionError):
        assert_each_example_once_per_cycle(partial(CASES["memory shuffled"], order=Stuck()), lambda name: "all")
