from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.data.shared_memory import Parcel, ReceivedMemories, SentMemories
from lockstep.ragged import Ragged

MIB = 1 << 20


class Pair:
    """A loader process and its trainer, without the pipe between them."""

    def __init__(self) -> None:
        self.sent, self.received = SentMemories(), ReceivedMemories()
        self.parcels: list[Parcel] = []

    def hand_over(self, result: Any) -> Any:
        self.sent.use_again(self.received.unused())
        parcel, descriptor = self.sent.packed(result)
        self.parcels.append(parcel)
        duplicate = None if descriptor is None else os.dup(descriptor)
        if descriptor is not None:
            os.close(descriptor)
        assert (duplicate is None) == (parcel.size == 0)
        return self.received.unpacked(parcel, lambda: int(str(duplicate)))


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_memory_is_used_again_once_its_tensors_are_gone(pair: Pair) -> None:
    for number in range(5):
        batch = pair.hand_over({"x": torch.full((3, 4), number)})
        assert batch["x"].unique().tolist() == [number]
        del batch
        gc.collect()
    assert [parcel.memory for parcel in pair.parcels] == [1, 1, 1, 1, 1]
    assert [parcel.size > 0 for parcel in pair.parcels] == [True, False, False, False, False]


@pytest.mark.parametrize("keep", ["batch", "a tensor", "a view", "numpy", "a row"])
def test_what_is_still_held_stays_as_it_is(pair: Pair, keep: str) -> None:
    first = pair.hand_over([torch.arange(6.0), Ragged.of([torch.zeros(2), torch.arange(6.0)])])
    views = {"a tensor": first[0], "a view": first[0][2:], "numpy": first[0].numpy(), "a row": first[1][1]}
    held: Any = {"batch": first, **views}[keep]
    del first, views
    gc.collect()
    for number in range(4):
        pair.hand_over([torch.full((6,), 100.0 + number), torch.ones(2)])
        gc.collect()
    values = held[0] if keep == "batch" else held
    assert values.tolist() == ([2, 3, 4, 5] if keep == "a view" else [0, 1, 2, 3, 4, 5])
    assert {parcel.memory for parcel in pair.parcels[1:]} == {2}


def test_a_larger_batch_gets_a_larger_memory_and_the_small_one_is_given_up(pair: Pair) -> None:
    pair.hand_over(torch.zeros(10, dtype=torch.uint8))
    gc.collect()
    pair.hand_over(torch.zeros(3 * MIB, dtype=torch.uint8))
    gc.collect()
    pair.hand_over(torch.zeros(10, dtype=torch.uint8))
    assert [(parcel.memory, parcel.size, list(parcel.given_up)) for parcel in pair.parcels] == [
        (1, MIB, []),
        (2, 4 * MIB, [1]),
        (2, 0, []),
    ]


def test_nothing_at_all_travels_too(pair: Pair) -> None:
    assert pair.hand_over({"name": ["a"], "empty": torch.zeros(0, 3)})["empty"].shape == (0, 3)


def test_a_ragged_travels_as_two_tensors(pair: Pair) -> None:
    boxes = Ragged.of([torch.rand(3, 4), torch.zeros(0, 4), torch.rand(1, 4)])
    arrived = pair.hand_over({"boxes": boxes, "name": ["a", "b", "c"]})["boxes"]
    assert torch.equal(arrived.values, boxes.values)
    assert torch.equal(arrived.lengths, boxes.lengths)
    stored = pair.parcels[0].tree["boxes"]
    assert [place.shape for place in (stored.values, stored.lengths)] == [(4, 4), (3,)]


@pytest.mark.process
def test_descriptors_are_not_used_up(pair: Pair) -> None:
    pair.hand_over(torch.zeros(4))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        pair.hand_over(torch.zeros(4))
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
