from __future__ import annotations

import json
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.data.loader import Loader
from lockstep.errors import DataError, InputError
from lockstep.randomness import Draws

Int64s = np.ndarray[Any, np.dtype[np.int64]]
NUM_EXAMPLES = 20


class Damaged:
    """Numbers, of which some cannot be read; or, if `late`, not augmented."""

    cost = "decode"

    def __init__(self, *bad: int, late: bool = False) -> None:
        self.bad = set(bad)
        self.late = late

    def __len__(self) -> int:
        return NUM_EXAMPLES

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        if not self.late:
            self.check(indices.tolist())
        return {"number": torch.from_numpy(indices.copy())}

    def check(self, numbers: list[int]) -> None:
        if found := self.bad.intersection(numbers):
            raise DataError(f"file-{min(found)} is torn.", given="half a file", expected="a whole one", hint="none")

    def example_id(self, index: int) -> str:
        return f"file-{index}"

    def augmented(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        if self.late:
            self.check(batch["number"].tolist())
        return {**batch, "drawn": torch.from_numpy(draws.uniform("x"))}


def loader(*bad: int, late: bool = False, **arguments: Any) -> Loader:
    reader = Damaged(*bad, late=late)
    given = {"batch_size": 4, "seed": 7, "num_processes": 0, "bad_examples": "skip", **arguments}
    return Loader(reader, augment=reader.augmented, **given)


def epoch(stream: Loader, towers: range = range(1), num_towers: int = 1) -> list[Any]:
    batches = list(islice(stream.batches(towers, num_towers), NUM_EXAMPLES // stream.batch_size))
    for batch in batches:
        stream.commit(batch)
    return batches


def numbers(batches: list[Any]) -> list[int]:
    return [number for batch in batches for number in batch["number"].tolist()]


@pytest.mark.process
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("pool", [{"num_processes": 0}, {"num_processes": 2}, {"num_threads": 2}])
def test_the_next_good_example_of_the_epoch_stands_in(late: bool, pool: dict[str, int]) -> None:
    due = numbers(epoch(loader()))
    bad = {due[3], due[4], due[11]}
    stream = loader(*bad, late=late, **{"num_processes": None, **pool})
    batches = epoch(stream)
    expected = [*due]
    expected[3] = expected[4] = due[5]
    expected[11] = due[12]
    assert numbers(batches) == expected
    assert [example for batch in batches for example in batch.bad] == [
        (place, f"file-{due[place]}", f"file-{due[place]} is torn. half a file", f"file-{expected[place]}", "")
        for place in (3, 4, 11)
    ]


def test_what_stands_in_gets_the_draws_of_its_place() -> None:
    whole = torch.cat([batch["drawn"] for batch in epoch(loader())])
    torn = torch.cat([batch["drawn"] for batch in epoch(loader(1, 2, 3))])
    assert torch.equal(whole, torn)


def test_the_last_of_an_epoch_is_replaced_by_its_first() -> None:
    due = numbers(epoch(loader(order="sequential")))
    assert due[-1] == 19
    assert numbers(epoch(loader(19, order="sequential")))[-1] == 0


@pytest.mark.parametrize("num_towers", [2, 4])
def test_workers_read_what_one_alone_reads(num_towers: int) -> None:
    together = numbers(epoch(loader(3, 4, 5, 6)))
    parts = [epoch(loader(3, 4, 5, 6), range(tower, tower + 1), num_towers) for tower in range(num_towers)]
    assert [number for batches in zip(*parts, strict=True) for number in numbers(list(batches))] == together


def test_batches_name_what_was_read() -> None:
    stream = loader(0, order="sequential")
    first = next(stream.batches(range(1), 1))
    assert stream.example_ids(0, 3, first.bad) == ["file-1", "file-1", "file-2"]


def test_without_leave_the_first_bad_example_ends_the_stream() -> None:
    stream = loader(5, order="sequential", bad_examples="raise").batches(range(1), 1)
    next(stream)
    with pytest.raises(DataError, match=r"file-5 is torn"):
        next(stream)


def test_a_resumed_stream_knows_what_was_bad() -> None:
    stream = loader(5, 6)
    epoch(stream)
    state = json.loads(json.dumps(stream.state()))
    assert state["quarantine"] == {
        "5": "file-5 is torn. half a file",
        "6": "file-6 is torn. half a file",
    }
    resumed = loader(5, 6)
    resumed.load_state(state)
    assert resumed.quarantine.reasons == stream.quarantine.reasons
    assert numbers(epoch(resumed)) == numbers(epoch(stream))


def test_what_was_mended_is_read_again() -> None:
    stream = loader(5, 6)
    epoch(stream)
    fixed = loader()
    fixed.load_state({**stream.state(), "position": 0})
    assert numbers(epoch(fixed)) == numbers(epoch(loader()))


def test_more_bad_examples_than_the_budget_end_the_run() -> None:
    stream = loader(3, 4, 5, order="sequential", bad_budget=2)
    batches = stream.batches(range(1), 1)
    stream.commit(next(batches))
    with pytest.raises(DataError) as caught:
        stream.commit(next(batches))
    assert str(caught.value) == (
        "3 examples cannot be read: more than the budget of 2.\n"
        "  given:    file-4: file-4 is torn. half a file; file-5: file-5 is torn. half a file\n"
        "  expected: at most 2 bad examples\n"
        "  hint:     look at the files that the log and quarantine.jsonl name, "
        "or raise bad_budget (of a recipe: feed.bad_budget)"
    )


def test_the_same_bad_example_counts_once() -> None:
    stream = loader(3, bad_budget=1)
    epoch(stream)
    epoch(stream)
    assert list(stream.quarantine.reasons) == [3]


def test_an_epoch_without_a_readable_example_is_an_error() -> None:
    with pytest.raises(DataError) as caught:
        next(loader(*range(NUM_EXAMPLES)).batches(range(1), 1))
    assert "No example can stand in for the bad one at position 0." in str(caught.value)


def test_an_evaluation_leaves_them_out() -> None:
    batches = list(loader(2, 19).evaluation_batches(8))
    assert [batch.valid for batch in batches] == [7, 8, 3]
    read = [number for batch in batches for number in batch["number"][: batch.valid].tolist()]
    assert read == [number for number in range(20) if number not in (2, 19)]
    assert [len(batch["number"]) for batch in batches] == [8, 8, 8]
    assert [example.example_id for batch in batches for example in batch.bad] == ["file-2", "file-19"]
    assert not batches[0].bad[0].replaced_by


def test_a_micro_batch_of_nothing_but_bad_ones_counts_nothing() -> None:
    batches = list(loader(0, 4, 5, 6, 7).evaluation_batches(4))
    assert [batch.valid for batch in batches] == [3, 0, 4, 4, 4]
    assert batches[1]["number"].tolist() == [1, 1, 1, 1]


def test_an_evaluation_of_nothing_but_bad_ones_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        list(loader(*range(NUM_EXAMPLES)).evaluation_batches(4))
    assert str(caught.value) == (
        "None of the examples can be read.\n"
        "  given:    20 bad examples\n"
        "  expected: one example at least that can be read\n"
        "  hint:     check the folder and the kind of its files"
    )


def test_an_error_of_no_single_example_is_raised() -> None:
    class Unlike(Damaged):
        def read_batch(self, indices: Int64s) -> dict[str, Any]:
            if len(indices) > 1:
                raise DataError("They do not fit.", given="a", expected="b", hint="c")
            return super().read_batch(indices)

    stream = Loader(Unlike(), batch_size=4, num_processes=0, bad_examples="skip")
    with pytest.raises(DataError, match=r"They do not fit\."):
        next(stream.batches(range(1), 1))


def test_there_is_no_other_policy() -> None:
    with pytest.raises(InputError, match="bad_examples='ignore'"):
        loader(bad_examples="ignore")


@pytest.mark.process
def test_who_met_it_first_does_not_show() -> None:
    """Of an augmentation that fails for some pairs of an example and its draws."""

    class Picky(Damaged):
        def augmented(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
            drawn = torch.from_numpy((draws.uniform("pick") * 5).astype(np.int64))
            if (batch["number"] % 5 == drawn).any():
                raise DataError("They do not fit.", given="a pair", expected="another", hint="none")
            return batch

    def stream(**pool: int) -> list[int]:
        reader = Picky()
        given = Loader(reader, batch_size=4, seed=1, augment=reader.augmented, bad_examples="skip", **pool)
        return numbers(list(islice(given.batches(range(1), 1), 25)))

    alone = stream(num_processes=0)
    assert [stream(**pool) for pool in ({"num_processes": 2}, {"num_processes": 3}, {"num_threads": 3})] == [alone] * 3


def test_threads_agree_on_what_is_bad() -> None:
    for _ in range(10):
        batches = epoch(loader(3, num_threads=4, num_processes=None, batch_size=2))
        assert len(numbers(batches)) == NUM_EXAMPLES


def test_a_folder_of_bad_files_is_not_read_to_its_end() -> None:
    class Torn(Damaged):
        num_reads = 0

        def __len__(self) -> int:
            return 5000

        def read_batch(self, indices: Int64s) -> dict[str, Any]:
            self.num_reads += 1
            raise DataError("Torn.", given="half", expected="whole", hint="none")

    reader = Torn()
    stream = Loader(reader, batch_size=16, num_processes=0, bad_examples="skip", bad_budget=10).batches(range(1), 1)
    with pytest.raises(DataError, match="more than the budget of 26"):
        next(stream)
    assert reader.num_reads < 500
