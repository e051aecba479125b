"""Each verdict, from numbers that are made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.cli.input_benchmark import Measured, Timing, advise, cores_for

MOSTLY_DECODING = {"read": 1.0, "decode": 81.0, "augment": 14.0, "collate": 4.0}


def pace(examples_per_second: float, **more: Any) -> Timing:
    return Timing(1000, 1000 / examples_per_second, **more)


def measured(loader: float = 1900, step: float | None = None, **changes: Any) -> Measured:
    """Two loader processes on eight cores, most of whose time goes into decoding."""
    given: dict[str, Any] = {
        "first_read": pace(50_000),
        "read": pace(50_000),
        "alone": pace(1000),
        "loader": pace(loader, stage_seconds=MOSTLY_DECODING, queue_fill=0.1),
        "step": None if step is None else pace(step),
        "num_readers": 2,
        "threads": False,
        "in_memory": False,
        "num_cores": 8,
    }
    return Measured(**{**given, **changes})


def of_stages(queue_fill: float | None = 0.1, **seconds: float) -> Timing:
    return pace(1900, stage_seconds=seconds, queue_fill=queue_fill)


@pytest.mark.parametrize(("rate", "cores"), [(100, 1), (1000, 1), (2000, 2), (10_000, 9)])
def test_a_device_needs_as_many_cores_as_give_a_tenth_more_than_it_takes(rate: float, cores: int) -> None:
    alone = pace(1000, cpu_seconds=0.8)  # another process had a fifth of the core
    assert cores_for(measured(alone=alone), rate) == cores


def test_what_lies_in_memory_needs_no_cores_of_its_own() -> None:
    assert cores_for(measured(alone=pace(1000, cpu_seconds=1.0), in_memory=True), 1000) is None


def test_a_slow_step_is_the_limit_and_fewer_processes_are_enough() -> None:
    advice = advise(measured(loader=1900, step=800))
    assert advice.limit == "step"
    assert advice.verdict == "The input gives 1900 examples/s, the step takes 800: the step is the limit."
    assert advice.changes == (
        "1 loader process is enough: --processes 1, in a recipe feed.num_processes.",
        "A faster step, or more devices, makes the run faster; a faster input does not.",
    )


@pytest.mark.parametrize(
    ("step", "num_readers", "enough"),
    [(800, 1, None), (900, 2, None), (800, 4, "2 loader processes are enough"), (100, 8, "1 loader process is")],
)
def test_as_many_readers_are_enough_as_the_step_needs(step: float, num_readers: int, enough: str | None) -> None:
    first = advise(measured(loader=1900, step=step, num_readers=num_readers)).changes[0]
    assert first.startswith(enough or "A faster step")


def test_where_nobody_reads_ahead_of_a_slow_step_there_is_nobody_to_spare() -> None:
    advice = advise(measured(step=800, num_readers=0, in_memory=True))
    assert advice.changes == ("A faster step, or more devices, makes the run faster; a faster input does not.",)


def test_a_slow_input_is_the_limit_and_as_many_processes_are_named_as_the_step_needs() -> None:
    advice = advise(measured(loader=1900, step=3000))
    assert advice.limit == "decode"
    assert advice.verdict == (
        "The input gives 1900 examples/s, the step takes 3000: the input is the limit, "
        "and of it decode is the limit (81 % of the loader's time)."
    )
    assert advice.changes == (
        "More loader processes, for 5 cores are idle: --processes 4, in a recipe feed.num_processes.",
        "Images that were made smaller once and for all decode faster: lockstep convert prepare.",
    )


@pytest.mark.parametrize(
    ("step", "num_cores", "said"),
    [
        (90_000, 8, "More loader processes, for 5 cores are idle: --processes 7"),
        (90_000, 4, "More loader processes, for 1 core is idle: --processes 3"),
        (90_000, 3, "No core is idle (3 in all): more loader processes would not help."),
        (None, 8, "More loader processes, for 5 cores are idle: --processes 7"),
        (None, 2, "No core is idle (2 in all): more loader processes would not help."),
    ],
)
def test_more_processes_help_where_cores_are_idle(step: float | None, num_cores: int, said: str) -> None:
    assert advise(measured(step=step, num_cores=num_cores)).changes[0].startswith(said)


@pytest.mark.parametrize("step", [1900, 1800, 2000])
def test_what_differs_by_less_than_a_tenth_is_about_even(step: float) -> None:
    advice = advise(measured(loader=1900, step=step))
    assert advice.limit == "both"
    assert f"takes {step}: they are about even. Of the input, decode is the limit (81 %" in advice.verdict
    assert advice.changes[0].startswith("More loader processes")


def test_advice_without_a_step_names_the_limit_of_the_input() -> None:
    advice = advise(measured(loader=935))
    assert advice.limit == "decode"
    assert advice.verdict == "The input gives 935 examples/s: decode is the limit (81 % of the loader's time)."


@pytest.mark.parametrize(
    ("seconds", "limit", "hint"),
    [
        ({"read": 5.0, "decode": 4.0}, "read", "Files of records, or tar shards, read faster"),
        ({"decode": 5.0, "augment": 4.0}, "decode", "lockstep convert prepare"),
        ({"augment": 5.0, "decode": 4.0}, "augment", "fewer augmentations"),
        ({"collate": 5.0, "decode": 4.0}, "collate", "Threads hand over batches without a copy: --threads 2."),
    ],
    ids=["read", "decode", "augment", "collate"],
)
def test_the_slowest_stage_has_its_own_mend(seconds: dict[str, float], limit: str, hint: str) -> None:
    advice = advise(replace(measured(step=5000), loader=of_stages(**seconds)))
    assert advice.limit == limit
    assert any(hint in change for change in advice.changes)


@pytest.mark.parametrize("threads", [False, True])
def test_a_full_queue_means_that_batches_wait_to_be_handed_over(threads: bool) -> None:
    advice = advise(replace(measured(step=5000, threads=threads), loader=of_stages(queue_fill=0.8, decode=9.0)))
    assert advice.limit == "handing over"
    assert "handing over is the limit (what is read ahead is there, 80 % of it, and has to wait)" in advice.verdict
    assert not any("idle" in change for change in advice.changes), "who has to wait needs no help"
    assert ("Threads hand over batches without a copy: --threads 2." in advice.changes) is not threads


def test_threads_are_called_so() -> None:
    slow, fast = (advise(measured(step=step, threads=True)).changes[0] for step in (800, 9000))
    assert slow == "1 loader thread is enough: --threads 1, in a recipe feed.num_threads."
    assert fast == "More loader threads, for 5 cores are idle: --threads 7, in a recipe feed.num_threads."


def test_what_lies_in_memory_needs_no_loader_processes() -> None:
    one = measured(step=5000, num_readers=0, in_memory=True)
    advice = advise(replace(one, loader=of_stages(None, read=9.0, augment=1.0)))
    assert advice.verdict.endswith("read is the limit (90 % of the time to make a batch).")
    assert advice.changes == (
        "The examples lie in memory, and the training process reads them itself: large batches cost it least.",
    )
    advice = advise(replace(one, loader=of_stages(None, read=1.0, augment=9.0)))
    assert "fewer augmentations" in advice.changes[1]


def test_readers_that_hinder_each_other_are_named() -> None:
    said = "2 loader processes give 1.1 times what one process gives alone"
    assert any(said in change for change in advise(measured(loader=1100)).changes)
    waiting = replace(measured(), loader=of_stages(queue_fill=0.9, decode=9.0), alone=pace(5000))
    assert not any("times what one" in change for change in advise(waiting).changes), "it is the trainer that is slow"
    assert not any("times what one" in change for change in advise(measured(loader=1300)).changes)
    assert not any("times what one" in change for change in advise(measured(loader=100, num_readers=1)).changes)


@pytest.mark.parametrize(
    ("step", "first", "from_storage"),
    [(None, 500, "659"), (None, 5000, None), (800, 500, None), (800, 300, "458"), (9000, 500, "659")],
)
def test_slow_storage_is_named_where_the_run_would_feel_it(
    step: float | None, first: float, from_storage: str | None
) -> None:
    """Two processes that give 1900 examples a second from memory, and wait for each example that they read anew."""
    advice = advise(measured(loader=1900, step=step, first_read=pace(first)))
    said = [change for change in advice.changes if "storage is the limit" in change]
    if from_storage is None:
        assert said == []
    else:
        assert f"examples came at {first} a second, and at 50000 again" in said[0]
        assert f"the input gives about {from_storage}, and storage is the limit" in said[0]


@pytest.mark.parametrize("num_readers", [0, 2])
def test_a_step_on_the_loaders_cores_is_said_to_be_slower_with_it(num_readers: int) -> None:
    advice = advise(measured(step=800, num_readers=num_readers, step_on_cpu=True))
    assert ("together both are slower" in advice.changes[-1]) is (num_readers > 0)


def test_small_rates_keep_three_digits() -> None:
    assert advise(measured(loader=0.25, step=41.72)).verdict.startswith(
        "The input gives 0.25 examples/s, the step takes 41.7"
    )
