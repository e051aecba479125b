"""How fast the way from files to batches is, in parts and as a whole, on the batches of the training stream.

The examples at its start are read once, and everything else is measured on the same ones, again and again: with warm
caches, and never with some parts on files that others have not seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch

from lockstep.cores import usable_cores
from lockstep.data.bad_examples import ReplaceBad
from lockstep.data.batch_reader import BatchReader, SkipBad
from lockstep.data.loader import Loader
from lockstep.data.order import Int64s, Order
from lockstep.data.rows import BatchRequest, TrainingRows
from lockstep.tracing import sum_seconds
from lockstep.types import Batch

# Shares of the seconds that all of it may take.
_READING, _ALONE, _LOADER, _STEP = 0.1, 0.3, 0.35, 0.15
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Throughput:
    """How long a number of examples took."""

    num_examples: int
    seconds: float
    """By the clock."""
    cpu_seconds: float | None = None
    """Of all cores; None where other processes worked too."""
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    """By stage, of all who worked; see `lockstep.tracing`."""
    queue_fill: float | None = None
    """Mean share of what may be read ahead that was there when a batch was asked for; None where nothing is."""

    @property
    def examples_per_second(self) -> float:
        """By the clock."""
        return self.num_examples / self.seconds

    @property
    def examples_per_cpu_second(self) -> float | None:
        """What one core does in a second; None where other processes worked too."""
        return self.num_examples / self.cpu_seconds if self.cpu_seconds else None

    def share(self, stage: str) -> float:
        """Of the time of all stages, 0 to 1."""
        whole = sum(self.stage_seconds.values())
        return self.stage_seconds.get(stage, 0.0) / whole if whole else 0.0


@dataclass(frozen=True)
class Measured:
    """How fast each part is, for one worker."""

    first_read: Throughput
    """Reading alone in one process, of files that may have to come from storage."""
    read: Throughput
    """The same examples again, now that they lie in memory if they fit; so all that follows."""
    alone: Throughput
    """All that makes a batch, in one process with one thread."""
    loader: Throughput
    """The same by the loader as it runs in training, batches taken as fast as they come."""
    step: Throughput | None
    """The training step on one batch, again and again, while nobody reads; None where there is none."""
    num_readers: int
    """Loader processes or threads; 0 where the trainer's own process reads."""
    threads: bool
    """They are threads."""
    in_memory: bool
    """The examples lie in memory, and nobody reads them ahead."""
    num_cores: int
    """Those that may be kept busy here."""
    step_on_cpu: bool = False
    """The step computes on these cores, too."""


def measure(
    loader: Loader,
    seconds: float,
    *,
    device: torch.device = _CPU,
    num_towers: int = 1,
    step: Callable[[Batch], object] | None = None,
    tell: Callable[[str], None] = lambda doing: None,
) -> Measured:
    """Measure a loader, and the step that takes its batches, for one worker alone on this machine.

    Args:
        loader: at the start of its stream.
        seconds: how long it may take in all; each part takes a few batches at least.
        device: where the batches go.
        num_towers: of the step.
        step: makes one attempt from a batch.
        tell: is told what is measured next.

    Raises:
        LockstepError: an example cannot be read, or what `step` raises.
    """
    in_memory = loader.reader.cost == "memory"
    num_readers = 0 if in_memory else loader.pool.size(1)
    with _one_thread():
        tell("reading, for the first time")
        first_read, indices = first_reading(loader, _READING * seconds)
        order = _Again(indices)
        tell("reading, again")
        read = loader_throughput(_copy(loader, order, augment=[]), _READING * seconds)
        tell("reading, decoding and augmenting in one process")
        alone = loader_throughput(_copy(loader, order), _ALONE * seconds)
    tell("the loader as it runs in training")
    pool = loader.pool
    whole = loader_throughput(
        _copy(loader, order, **asdict(pool)),
        _LOADER * seconds,
        device,
        num_readers,
    )
    pace = None
    if step is not None:
        tell("the training step alone")
        pace = step_throughput(step, _one_batch(loader, device, num_towers), _STEP * seconds)
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


def first_reading(loader: Loader, seconds: float) -> tuple[Throughput, Int64s]:
    """Of reading alone, in this process, until the seconds or an epoch have passed; and which examples were read."""
    size, batch_size = len(loader.reader), loader.batch_size
    order = loader.order, size, loader.seed
    leave = SkipBad(ReplaceBad(*order), size) if loader.quarantine.policy == "skip" else None
    first, whole = (TrainingRows(*order, batch_size, np.arange(rows)) for rows in (1, batch_size))
    BatchReader(loader.reader, [], loader.seed, first, leave)(
        BatchRequest(0)
    )  # Whatever is made when it is needed is made now.
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
    return Throughput(len(read) * loader.batch_size, passed, cpu_passed), np.concatenate(read)


def loader_throughput(loader: Loader, seconds: float, device: torch.device = _CPU, num_readers: int = 0) -> Throughput:
    """Of the loader's batches, taken as fast as they come, for so many seconds or a little longer.

    Counted are whole rounds, a batch of each reader; the first round, in which they start, is not.
    """
    size = max(1, num_readers)
    stages: dict[str, float] = {}
    fills: list[float] = []
    num_batches = 0
    with closing(loader.batches(range(1), 1, device)) as batches:
        _used_up(islice(batches, size))
        started, cpu_started = time.perf_counter(), time.process_time()
        while not num_batches or time.perf_counter() < started + seconds:
            for batch in islice(batches, size):
                num_batches += 1
                stages = sum_seconds(stages, batch.stage_seconds)
                fills += [] if batch.queue_fill is None else [batch.queue_fill]
        now, cpu_now = time.perf_counter(), time.process_time()
    return Throughput(
        num_examples=num_batches * loader.batch_size,
        seconds=now - started,
        cpu_seconds=None if num_readers and not loader.pool.num_threads else cpu_now - cpu_started,
        stage_seconds=stages,
        queue_fill=sum(fills) / len(fills) if fills else None,
    )


def step_throughput(step: Callable[[Batch], object], batch: Batch, seconds: float) -> Throughput:
    """Of steps with one batch, for so many seconds or a little longer; the first step is not counted."""
    step(batch)
    started, num_steps, passed = time.perf_counter(), 0, 0.0
    while not num_steps or passed < seconds:
        step(batch)
        num_steps, passed = num_steps + 1, time.perf_counter() - started
    return Throughput(num_steps * batch.batch_size, passed)


def _copy(loader: Loader, order: Order, **changes: Any) -> Loader:
    """The loader in another order, with nobody who reads ahead."""
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


def _one_batch(loader: Loader, device: torch.device, num_towers: int) -> Batch:
    with closing(_copy(loader, loader.order).batches(range(num_towers), num_towers, device)) as batches:
        return next(batches)


def _used_up(batches: Iterable[Batch]) -> None:
    for _ in batches:
        pass


@dataclass(frozen=True, eq=False)
class _Again:
    """The order of examples that stand at the start of a stream, again and again."""

    read: Int64s
    is_exactly_once: ClassVar[bool] = False

    def epoch_size(self, size: int) -> int:
        return len(self.read)

    def indices(self, positions: Int64s, size: int, seed: int) -> Int64s:
        return self.read[positions % len(self.read)]


@contextmanager
def _one_thread() -> Generator[None, None, None]:
    """As loader processes compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
