"""What is measured, never how fast it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.cli import input_benchmark
from lockstep.cli.input_benchmark import Timing, measure, time_loader, time_reading, time_step
from lockstep.data.loader import Loader
from lockstep.data.order import Int64s
from lockstep.errors import DataError
from lockstep.randomness import Draws
from lockstep.readers.reader import Cost
from lockstep.tracing import timed
from lockstep.types import Batch


@dataclass
class Numbers:
    """A reader of its own indices, which remembers what it was asked for."""

    size: int = 10
    cost: Cost = "decode"
    bad: int | None = None
    asked: list[list[int]] = field(default_factory=list)

    def __len__(self) -> int:
        return self.size

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        self.asked.append(indices.tolist())
        if self.bad in indices:
            raise DataError("Broken.", given="it", expected="a whole one", hint="repair it")
        return {"number": torch.from_numpy(indices)}

    def example_id(self, index: int) -> str:
        return str(index)


def decode(batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
    with timed("decode"):
        return {**batch, "decoded": batch["number"] + 1}


def loader_of(reader: Numbers, **more: Any) -> Loader:
    return Loader(reader, batch_size=4, seed=3, **more)


def test_a_pace_says_rates_and_shares() -> None:
    pace = Timing(100, 4.0, 2.0, {"read": 1.0, "decode": 3.0})
    assert (pace.examples_per_second, pace.examples_per_cpu_second) == (25.0, 50.0)
    assert [pace.share(name) for name in ("read", "decode", "augment")] == [0.25, 0.75, 0.0]
    assert Timing(100, 4.0).examples_per_cpu_second is None
    assert Timing(100, 4.0).share("read") == 0.0


def test_the_first_reading_is_of_the_training_stream_and_ends_with_the_epoch() -> None:
    reader = Numbers()
    loader = loader_of(reader)
    pace, indices = time_reading(loader, 60)
    stream = loader.order.indices(np.arange(12), 10, 3)
    assert pace.num_examples == len(indices) == 12, "the first whole batches that have an epoch in them"
    assert indices.tolist() == stream.tolist()
    assert reader.asked[1:] == stream.reshape(3, 4).tolist()
    assert reader.asked[0] == reader.asked[1][:1], "one example is read before, for what is made when it is needed"


def test_the_first_reading_ends_when_its_time_is_over() -> None:
    pace, _ = time_reading(loader_of(Numbers(1000)), 0)
    assert pace.num_examples == 4


def test_everything_else_is_measured_on_what_was_read_first() -> None:
    reader = Numbers(1000)
    measure(loader_of(reader, augment=decode, num_processes=0), 0)
    assert len(reader.asked) >= 8
    assert {index for batch in reader.asked for index in batch} == {*reader.asked[1]}


@pytest.mark.process
@pytest.mark.parametrize(
    ("pool", "num_readers"),
    [({"num_processes": 0}, 0), ({"num_processes": 2}, 2), ({"num_threads": 2}, 2)],
    ids=["nobody", "processes", "threads"],
)
def test_each_part_is_measured_with_its_own_stages(pool: dict[str, int], num_readers: int) -> None:
    doing: list[str] = []
    measured = measure(loader_of(Numbers(), augment=decode, **pool), 0.01, announce=doing.append)
    assert {*measured.read.stage_seconds} == {"read"}
    assert {*measured.alone.stage_seconds} == {"read", "decode", "augment"}
    in_processes = "num_processes" in pool and num_readers > 0
    assert ("collate" in measured.loader.stage_seconds) is in_processes
    assert (measured.loader.cpu_seconds is None) is in_processes
    assert (measured.loader.queue_fill is None) is (num_readers == 0)
    assert (measured.num_readers, measured.threads) == (num_readers, "num_threads" in pool)
    assert (measured.in_memory, measured.step) == (False, None)
    assert doing == [
        "reading, for the first time",
        "reading, again",
        "reading, decoding and augmenting in one process",
        "the loader as it runs in training",
    ]


def test_what_lies_in_memory_is_read_by_nobody_ahead() -> None:
    measured = measure(loader_of(Numbers(cost="memory")), 0.01)
    assert (measured.in_memory, measured.num_readers, measured.loader.queue_fill) == (True, 0, None)


def test_whole_rounds_are_counted_and_the_first_is_not() -> None:
    reader = Numbers()
    pace = time_loader(loader_of(reader, num_processes=0), 0, num_readers=3)
    assert pace.num_examples == 3 * 4
    assert len(reader.asked) == 6, "two rounds of three batches"


def test_one_thread_decodes_alone_and_all_are_back_for_the_rest() -> None:
    torch.set_num_threads(2)
    seen: list[int] = []

    def look(batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        seen.append(torch.get_num_threads())
        return batch

    measure(loader_of(Numbers(), augment=look, num_processes=0), 0)
    assert (seen[0], seen[-1], torch.get_num_threads()) == (1, 2, 2)


@pytest.mark.parametrize("num_towers", [1, 2])
def test_the_step_gets_one_training_batch_again_and_again(num_towers: int) -> None:
    loader = loader_of(Numbers(), augment=decode, num_processes=0)
    batches: list[Batch] = []
    measured = measure(loader, 0, num_towers=num_towers, step=batches.append)
    assert measured.step is not None
    assert measured.step.num_examples == 4
    assert len(batches) == 2, "one that is not counted, and one that is"
    assert batches[0] is batches[1]
    assert batches[0].towers == range(num_towers)
    assert batches[0].epoch_size == 10, "schedules in epochs are resolved by it"
    assert batches[0]["number"].tolist() == loader.order.indices(np.arange(4), 10, 3).tolist()
    assert loader.position == 0


def test_steps_are_counted_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([100.0, 100.4, 100.8, 101.2])
    monkeypatch.setattr(input_benchmark.time, "perf_counter", lambda: next(ticks))
    batch = Batch({}, position=0, batch_size=8, towers=range(1))
    pace = time_step(lambda _: None, batch, 1.0)
    assert (pace.num_examples, round(pace.seconds, 6)) == (24, 1.2)


def test_a_bad_example_ends_the_measuring_or_is_replaced_as_in_training() -> None:
    with pytest.raises(DataError, match="Broken"):
        measure(loader_of(Numbers(bad=2), num_processes=0), 10.0)  # ends with the epoch: the bad one is met
    pace, _ = time_reading(loader_of(Numbers(bad=2), num_processes=0, bad_examples="skip"), 10.0)
    assert pace.num_examples == 12
