from __future__ import annotations

import json
import threading
from itertools import islice
from typing import Any

import pytest
import torch

from lockstep.data.iterable_loader import IterableLoader
from lockstep.data.loader import Loader
from lockstep.data.order import Int64s, Sequential
from lockstep.errors import InputError

CPU = torch.device("cpu")


class Numbers:
    """Numbers, and which thread has read them."""

    cost = "decode"

    def __len__(self) -> int:
        return 30

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        here = threading.current_thread() is threading.main_thread()
        return {"number": torch.from_numpy(indices), "ahead": torch.full((len(indices),), not here)}

    def example_id(self, index: int) -> str:
        return f"number {index}"


def loader(**more: Any) -> Loader:
    return Loader(Numbers(), batch_size=6, order=Sequential(), num_threads=1, **more)


def test_a_slice_is_its_towers_part_of_a_batch() -> None:
    slices = loader().slices(4, 3)
    assert list(islice(slices.starts(), 4)) == [0, 4, 8, 12]
    reader = loader().slices(2, 3).reader(0, 1, CPU)
    batch = reader.read(8)
    reader.close()
    assert batch["number"].tolist() == [8, 9]
    assert (batch.position, batch.batch_size, batch.towers) == (6, 6, range(1, 2))


def test_a_slice_of_all_towers_is_a_batch() -> None:
    reader = loader().slices(6, 3).reader(0, 1, CPU)
    batch = reader.read(6)
    reader.close()
    assert (batch.position, batch.towers, len(batch["number"])) == (6, range(3), 6)


@pytest.mark.parametrize(
    ("leased", "ahead"),
    [
        ([2, 8, 14, 20], [True, True, True, True]),  # what the second of three workers expects
        ([2, 20, 26], [True, False, True]),  # it was slow: others have got what it had read ahead
        ([2, 4, 8, 0, 14], [True, False, True, False, True]),  # some that others left
        ([0, 8, 14], [True, True, True]),  # whatever comes first is the first that is read
    ],
)
def test_what_a_worker_expects_is_read_ahead_and_all_else_at_once(leased: list[int], ahead: list[bool]) -> None:
    reader = loader(prefetch=2).slices(2, 3).reader(1, 3, CPU)
    batches = [reader.read(start) for start in leased]
    reader.close()
    assert [batch["number"].tolist() for batch in batches] == [[start, start + 1] for start in leased]
    assert [bool(batch["ahead"].all()) for batch in batches] == ahead
    assert all(batch.wait_seconds >= 0 for batch in batches)


def test_the_loader_is_set_to_where_the_run_is() -> None:
    stream = loader()
    slices = stream.slices(2, 3)
    slices.commit(12, [4, 8])
    assert (stream.position, stream.returned) == (8, [range(4, 6), range(8, 10)])
    assert stream.state()["returned"] == [[4, 6], [8, 10]]
    slices.commit(14, [])
    assert (stream.position, stream.returned) == (14, [])
    assert "returned" not in stream.state()


def resumed(position: int, returned: list[list[int]], **more: Any) -> Loader:
    stream = loader(**more)
    state = {**loader().state(), "position": position, "returned": returned}
    stream.load_state(json.loads(json.dumps(state)))
    return stream


def test_what_was_returned_comes_first_after_a_resume() -> None:
    stream = resumed(6, [[4, 6], [8, 11]])
    batches = stream.batches(range(3), 3)
    for numbers, returned in (([4, 5, 8, 9, 10, 11], []), ([12, 13, 14, 15, 16, 17], [])):
        batch = next(batches)
        assert batch["number"].tolist() == numbers
        assert stream.example_ids(batch.position, 6) == [f"number {number}" for number in numbers]
        stream.commit(batch)
        assert stream.returned == returned
    assert stream.position == 18
    batches.close()


def test_more_may_have_been_returned_than_a_batch_takes() -> None:
    stream = resumed(6, [[0, 4], [8, 13]])
    batches = stream.batches(range(3), 3)
    stream.commit(next(batches))
    assert (stream.position, stream.returned) == (12, [range(10, 13)])
    batches.close()


def test_slices_go_on_with_what_was_returned_and_may_be_returned_again() -> None:
    stream = resumed(6, [[4, 6], [8, 11]])
    slices = stream.slices(2, 3)
    assert list(islice(slices.starts(), 4)) == [6, 8, 10, 12]
    reader = slices.reader(0, 1, CPU)
    assert [reader.read(start)["number"].tolist() for start in (6, 8, 10, 12)] == [[4, 5], [8, 9], [10, 11], [12, 13]]
    assert stream.example_ids(10, 2) == ["number 10", "number 11"]
    reader.close()
    slices.commit(8, [])
    assert (stream.position, stream.returned) == (8, [range(8, 11)])
    slices.commit(12, [6])
    assert (stream.position, stream.returned) == (10, [range(4, 6)])


def test_a_batch_that_is_skipped_has_no_slices() -> None:
    stream = loader()
    stream.skip(6)
    slices = stream.slices(2, 3)
    assert list(islice(slices.starts(), 5)) == [0, 2, 4, 12, 14]
    slices.commit(14, [4])
    assert (stream.position, stream.returned) == (12, [range(4, 6)])


def test_returned_examples_of_a_batch_that_is_skipped_have_no_slices() -> None:
    stream = resumed(12, [[4, 6], [8, 10], [16, 18]])
    stream.skip(6)
    slices = stream.slices(2, 3)
    assert list(islice(slices.starts(), 4)) == [12, 16, 18, 20], "places 4, 16, 18 and 20, but not 8"
    assert [slices.batch_in_stream(start) for start in (12, 14, 16, 18, 20)] == [0, 6, 12, 18, 18]
    assert slices.left(18, []) == (18, [])
    assert slices.left(14, []) == (14, [range(8, 10), range(16, 18)])


def test_a_batch_of_returned_examples_is_not_the_one_that_was_skipped() -> None:
    stream = resumed(6, [[4, 6], [8, 12]])
    stream.skip(6)
    batches = stream.batches(range(3), 3)
    assert next(batches)["number"].tolist() == [4, 5, 8, 9, 10, 11]
    batches.close()


def test_an_iterable_dataset_cannot_be_leased() -> None:
    stream = IterableLoader([{"number": 1}], batch_size=2)
    with pytest.raises(InputError) as caught:
        stream.slices(2, 1)
    assert caught.value.what == "An iterable dataset cannot be leased to workers in slices: it gives its items in turn."
