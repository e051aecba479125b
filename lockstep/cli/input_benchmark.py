"""Measure the throughput of the input, in parts and as a whole; find the bottleneck, and advise what to change.

The examples at the start of the stream are read once, and everything else is measured on the same ones, again and
again: all parts see the same files, with warm caches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from lockstep.cores import usable_cores
from lockstep.data.bad_examples import ReplaceBad
from lockstep.data.batch_reader import BatchReader, SkipBad
from lockstep.data.loader import Loader
from lockstep.data.order import Int64s, Order
from lockstep.data.rows import BatchRequest, TrainingRows
from lockstep.reporting.console import format_rate
from lockstep.tracing import INPUT_STAGES, sum_seconds
from lockstep.types import Batch

# Shares of the seconds that the whole measurement may take.
_READING, _ALONE, _LOADER, _STEP = 0.1, 0.3, 0.35, 0.15
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Timing:
    """The time that a number of examples took."""

    num_examples: int
    seconds: float
    """Wall time."""
    cpu_seconds: float | None = None
    """CPU time over all cores; None where other processes worked too."""
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    """Time by stage, over all threads and processes; see `lockstep.tracing`."""
    queue_fill: float | None = None
    """Mean share of the prefetched batches that were ready when one was asked for; None without prefetching."""

    @property
    def examples_per_second(self) -> float:
        """Examples per second of wall time."""
        return self.num_examples / self.seconds

    @property
    def examples_per_cpu_second(self) -> float | None:
        """Examples per second of one core; None where other processes worked too."""
        return self.num_examples / self.cpu_seconds if self.cpu_seconds else None

    def share(self, stage: str) -> float:
        """Return the share of a stage in the time of all stages, 0 to 1."""
        whole = sum(self.stage_seconds.values())
        return self.stage_seconds.get(stage, 0.0) / whole if whole else 0.0


@dataclass(frozen=True)
class Measured:
    """Throughput of each part of the input, and of the step, for one worker."""

    first_read: Timing
    """Reading alone in one process, from files that may have to come from storage."""
    read: Timing
    """Reading the same examples again, from memory if they fit; so in all that follows."""
    alone: Timing
    """Reading, decoding, augmenting and collating, in one process with one thread."""
    loader: Timing
    """The loader as it runs in training, batches taken as fast as they come."""
    step: Timing | None
    """The training step on one batch, again and again, while nothing is read; None without a step."""
    num_readers: int
    """Loader processes or threads; 0 where the trainer's own process reads."""
    threads: bool
    in_memory: bool
    """Whether the examples lie in memory, and are not prefetched."""
    num_cores: int
    """Cores that this process may use."""
    step_on_cpu: bool = False
    """Whether the step computes on these cores, too."""


def measure(
    loader: Loader,
    seconds: float,
    *,
    device: torch.device = _CPU,
    num_towers: int = 1,
    step: Callable[[Batch], object] | None = None,
    announce: Callable[[str], None] = lambda doing: None,
) -> Measured:
    """Measure a loader at the start of its stream, and the step that takes its batches, for one worker on this machine.

    All parts together may take `seconds`, and each takes a few batches at least; `announce` is told which comes next.
    """
    in_memory = loader.reader.cost == "memory"
    num_readers = 0 if in_memory else loader.pool.size(1)
    with _one_thread():
        announce("reading, for the first time")
        first_read, indices = time_reading(loader, _READING * seconds)
        order = _Again(indices)
        announce("reading, again")
        read = time_loader(copy_of_loader(loader, order, augment=[]), _READING * seconds)
        announce("reading, decoding and augmenting in one process")
        alone = time_loader(copy_of_loader(loader, order), _ALONE * seconds)
    announce("the loader as it runs in training")
    whole = time_loader(copy_of_loader(loader, order, **asdict(loader.pool)), _LOADER * seconds, device, num_readers)
    pace = None
    if step is not None:
        announce("the training step alone")
        with closing(copy_of_loader(loader, loader.order).batches(range(num_towers), num_towers, device)) as batches:
            batch = next(batches)
        pace = time_step(step, batch, _STEP * seconds)
    return Measured(
        first_read=first_read,
        read=read,
        alone=alone,
        loader=whole,
        step=pace,
        num_readers=num_readers,
        threads=bool(loader.pool.num_threads),
        in_memory=in_memory,
        num_cores=usable_cores(),
        step_on_cpu=device.type == "cpu",
    )


def time_reading(loader: Loader, seconds: float) -> tuple[Timing, Int64s]:
    """Measure reading alone, in this process, for some seconds or an epoch; returns also the indices that were read."""
    size, batch_size = len(loader.reader), loader.batch_size
    order = loader.order, size, loader.seed
    leave = SkipBad(ReplaceBad(*order), size) if loader.quarantine.policy == "skip" else None
    first, whole = (TrainingRows(*order, batch_size, np.arange(rows)) for rows in (1, batch_size))
    # What is created at first use is created now.
    BatchReader(loader.reader, [], loader.seed, first, leave)(BatchRequest(0))
    reading = BatchReader(loader.reader, [], loader.seed, whole, leave)
    read: list[Int64s] = []
    passed = cpu_passed = 0.0
    while not read or (passed < seconds and len(read) * batch_size < loader.epoch_size):
        due = BatchRequest(len(read) * batch_size)
        read.append(whole(due).indices)
        started, cpu_started = time.perf_counter(), time.process_time()
        reading(due)
        passed += time.perf_counter() - started
        cpu_passed += time.process_time() - cpu_started
    return Timing(len(read) * loader.batch_size, passed, cpu_passed), np.concatenate(read)


def time_loader(loader: Loader, seconds: float, device: torch.device = _CPU, num_readers: int = 0) -> Timing:
    """Measure a loader whose batches are taken as fast as they come, for some seconds or a little longer.

    Whole rounds are counted, of a batch of each reader; the first round, in which the readers start, is not.
    """
    size = max(1, num_readers)
    stages: dict[str, float] = {}
    fills: list[float] = []
    num_batches = 0
    with closing(loader.batches(range(1), 1, device)) as batches:
        for _ in islice(batches, size):
            pass
        started, cpu_started = time.perf_counter(), time.process_time()
        while not num_batches or time.perf_counter() < started + seconds:
            for batch in islice(batches, size):
                num_batches += 1
                stages = sum_seconds(stages, batch.stage_seconds)
                fills += [] if batch.queue_fill is None else [batch.queue_fill]
        now, cpu_now = time.perf_counter(), time.process_time()
    return Timing(
        num_examples=num_batches * loader.batch_size,
        seconds=now - started,
        cpu_seconds=None if num_readers and not loader.pool.num_threads else cpu_now - cpu_started,
        stage_seconds=stages,
        queue_fill=sum(fills) / len(fills) if fills else None,
    )


def time_step(step: Callable[[Batch], object], batch: Batch, seconds: float) -> Timing:
    """Measure steps with one batch, for some seconds or a little longer; the first step is not counted."""
    step(batch)
    started, num_steps, passed = time.perf_counter(), 0, 0.0
    while not num_steps or passed < seconds:
        step(batch)
        num_steps, passed = num_steps + 1, time.perf_counter() - started
    return Timing(num_steps * batch.batch_size, passed)


def copy_of_loader(loader: Loader, order: Order, **changes: Any) -> Loader:
    """Copy a loader with another order, and by default without prefetching."""
    return Loader(
        loader.reader,
        order=order,
        **{
            "batch_size": loader.batch_size,
            "seed": loader.seed,
            "augment": loader.augment,
            "num_processes": 0,
            "bad_examples": loader.quarantine.policy,
            "bad_budget": loader.quarantine.budget,
            **changes,
        },
    )


@dataclass(frozen=True, eq=False)
class _Again:
    """Order that repeats the examples at the start of a stream."""

    read: Int64s
    is_exactly_once: ClassVar[bool] = False

    def epoch_size(self, size: int) -> int:
        return len(self.read)

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        return self.read[positions % len(self.read)]


@contextmanager
def _one_thread() -> Generator[None, None, None]:
    """Compute in one thread, as loader processes do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Limit = Literal["step", "both", "handing over", "read", "decode", "augment", "collate"]

_EVEN = 1.1
"""Rates are about even up to this ratio; a loader should be faster than the step by as much."""
_FULL = 0.5
"""Mean queue fill from which on prefetched batches wait for the trainer's process."""
_POOR = 0.6
"""Readers that together give less than this share of what they would give alone hinder each other."""
_FROM_STORAGE = 0.8
"""Storage matters where the loader gives less than this share of what it gives from memory."""

_HINTS: Mapping[Limit, tuple[str, ...]] = {
    "read": (
        "Files of records, or tar shards, read faster than a file for each example: lockstep convert.",
        "A local disk reads faster than one over a network.",
    ),
    "decode": ("Images that were made smaller once and for all decode faster: lockstep convert prepare.",),
    "augment": ("Smaller images, or fewer augmentations; what changes colours can run on the step's device.",),
    "collate": ("Smaller images make smaller batches to copy.",),
    "handing over": ("Smaller images make smaller batches to take over and to copy to the device.",),
}


@dataclass(frozen=True)
class Advice:
    """The bottleneck of a run, and what to change."""

    limit: Limit
    """The training step, or the slowest stage of the input; "both" where step and input are about even."""
    verdict: str
    """The bottleneck in a sentence or two, with the numbers."""
    changes: tuple[str, ...]
    """Sentences: what would make the run faster, the most effective first, and what else is worth knowing."""


def advise(measured: Measured) -> Advice:
    """Find the bottleneck of this input, and of this step if there is one."""
    limit = _limit(measured)
    changes = _for_the_step(measured) if limit == "step" else _for_the_input(measured, _slowest(measured))
    notes = [*_from_storage(measured), *_on_the_same_cores(measured)]
    return Advice(limit, _verdict(measured, limit), (*changes, *notes))


DEVICE_RATES = (1_000, 2_500, 5_000, 10_000)
"""Examples that accelerators take in a second: from a large model on an old one to a small model on a new one."""


def cores_for(measured: Measured, rate: float) -> int | None:
    """Compute how many cores a device that takes `rate` examples a second needs for its input, on a machine like this.

    None where nothing is decoded: the examples lie in memory.
    """
    of_a_core = measured.alone.examples_per_cpu_second
    return None if measured.in_memory or not of_a_core else math.ceil(_EVEN * rate / of_a_core)


def _limit(measured: Measured) -> Limit:
    if measured.step is None:
        return _slowest(measured)
    ratio = measured.loader.examples_per_second / measured.step.examples_per_second
    if ratio >= _EVEN:
        return "step"
    return "both" if ratio > 1 / _EVEN else _slowest(measured)


def _slowest(measured: Measured) -> Limit:
    loader = measured.loader
    if loader.queue_fill is not None and loader.queue_fill >= _FULL:
        return "handing over"
    return max(INPUT_STAGES, key=loader.share)


def _verdict(measured: Measured, limit: Limit) -> str:
    loader = measured.loader.examples_per_second
    if measured.step is None:
        return f"The input gives {format_rate(loader)} examples/s: {_of_the_input(measured, _slowest(measured))}."
    taken = format_rate(measured.step.examples_per_second)
    given = f"The input gives {format_rate(loader)} examples/s, the step takes {taken}"
    if limit == "step":
        return f"{given}: the step is the limit."
    if limit == "both":
        return f"{given}: they are about even. Of the input, {_of_the_input(measured, _slowest(measured))}."
    return f"{given}: the input is the limit, and of it {_of_the_input(measured, limit)}."


def _of_the_input(measured: Measured, slowest: Limit) -> str:
    if slowest == "handing over":
        fill = measured.loader.queue_fill or 0.0
        return f"handing over is the limit (what is read ahead is there, {_percent(fill)} of it, and has to wait)"
    whose = "the loader's time" if measured.num_readers else "the time to make a batch"
    return f"{slowest} is the limit ({_percent(measured.loader.share(slowest))} of {whose})"


def _for_the_step(measured: Measured) -> Iterator[str]:
    enough = _readers_for_the_step(measured)
    if enough < measured.num_readers:
        yield f"{_readers(measured, enough)} {'is' if enough == 1 else 'are'} enough: {_flag(measured, enough)}."
    yield "A faster step, or more devices, makes the run faster; a faster input does not."


def _for_the_input(measured: Measured, slowest: Limit) -> Iterator[str]:
    if measured.in_memory:
        yield "The examples lie in memory, and the training process reads them itself: large batches cost it least."
        yield from _HINTS[slowest] if slowest != "read" else ()
        return
    if slowest != "handing over":
        yield _more_readers(measured)
        yield from _hindered(measured)
    yield from _HINTS[slowest]
    if slowest in ("collate", "handing over") and measured.num_readers and not measured.threads:
        yield f"Threads hand over batches without a copy: --threads {measured.num_readers}."


def _more_readers(measured: Measured) -> str:
    # The training process keeps one core busy.
    idle = measured.num_cores - 1 - measured.num_readers
    if idle <= 0:
        return f"No core is idle ({measured.num_cores} in all): more {_kind(measured, 2)} would not help."
    number = measured.num_readers + idle
    if measured.step:
        number = min(number, max(measured.num_readers + 1, _readers_for_the_step(measured)))
    cores = "core is" if idle == 1 else "cores are"
    return f"More {_kind(measured, 2)}, for {idle} {cores} idle: {_flag(measured, number)}."


def _hindered(measured: Measured) -> Iterator[str]:
    times = measured.loader.examples_per_second / measured.alone.examples_per_second
    if measured.num_readers > 1 and times < _POOR * measured.num_readers:
        yield (
            f"{_readers(measured, measured.num_readers)} give {times:.1f} times what one process gives alone: "
            "something keeps the cores busy, or they are fewer than they seem."
        )


def _from_storage(measured: Measured) -> Iterator[str]:
    """Say what the loader gives while its files are not in memory, if that is less than is needed."""
    first, again = measured.first_read, measured.read
    longer = max(0.0, 1 / first.examples_per_second - 1 / again.examples_per_second)
    loader = measured.loader.examples_per_second
    from_storage = 1 / (1 / loader + longer / max(1, measured.num_readers))
    needed = loader if measured.step is None else min(loader, measured.step.examples_per_second)
    if from_storage < _FROM_STORAGE * needed:
        yield (
            f"Read for the first time, examples came at {format_rate(first.examples_per_second)} a second, and at "
            f"{format_rate(again.examples_per_second)} again: until they lie in memory, the input gives about "
            f"{format_rate(from_storage)}, and storage is the limit. "
            "If they never fit in, a local disk helps, or an order "
            "in blocks (BlockShuffled)."
        )


def _on_the_same_cores(measured: Measured) -> Iterator[str]:
    if measured.step and measured.step_on_cpu and measured.num_readers:
        yield "The step was measured alone, and computes on the cores that the loader needs: together both are slower."


def _readers_for_the_step(measured: Measured) -> int:
    """Compute how many readers the step needs, if each gives what it gives now."""
    if measured.step is None:
        return measured.num_readers
    each = measured.loader.examples_per_second / max(1, measured.num_readers)
    return math.ceil(_EVEN * measured.step.examples_per_second / each)


def _kind(measured: Measured, number: int) -> str:
    if measured.threads:
        return "loader thread" if number == 1 else "loader threads"
    return "loader process" if number == 1 else "loader processes"


def _readers(measured: Measured, number: int) -> str:
    return f"{number} {_kind(measured, number)}"


def _flag(measured: Measured, number: int) -> str:
    name = "threads" if measured.threads else "processes"
    return f"--{name} {number}, in a recipe feed.num_{name}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
