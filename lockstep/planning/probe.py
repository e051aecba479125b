"""Measure on this machine what a run of a recipe costs: a tower, the update, the input, a save, the exchange."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.cores import share_of_cores, usable_cores
from lockstep.exchange.bucketed import plan_buckets
from lockstep.exchange.exchange import AllReduce, Connection, TransportName, is_exact
from lockstep.exchange.transports import pack
from lockstep.exchange.tree import GradientHook, PartialSum, TreeSum
from lockstep.planning.model import Link, RunCosts, SaveCost, Seating, SentBucket, Way, WorkerCost, way_of
from lockstep.recipes.recipe import Recipe
from lockstep.runs.build import Examples, Parts, build
from lockstep.screen import errors_alone, log
from lockstep.tensors import numbers_on, reading_waits
from lockstep.training.memory import forget_peak, peak_bytes
from lockstep.training.saving import Saver
from lockstep.training.step import BoundStep
from lockstep.types import Batch
from lockstep.workers.devices import describe_machine
from lockstep.workers.group import Group
from lockstep.workers.pulse import Pulse
from lockstep.workers.rank import Worker

_STEPS, _INPUT, _EXCHANGE = 0.6, 0.15, 0.1
"""Shares of all seconds; the rest is for starts and saves, and each of them takes a few steps at least."""
_NUM_BATCHES, _LEAST_STEPS, _MOST_STEPS = 4, 3, 200
_SMALL_BYTES, _LEAST_LARGE_BYTES, _MOST_LARGE_BYTES = 1 << 10, 1 << 20, 64 << 20
_BACKWARD_SHARE = 2 / 3
"""Share of the backward pass in a tower: it makes two products where the forward pass makes one."""


def probe_run(
    recipe: Recipe, seatings: Sequence[Seating], per_host: int, seconds: float, worker: Worker, folder: Path
) -> RunCosts:
    """Measure what the model needs for these seatings; all workers, which share this host, call it together.

    Args:
        recipe: of the run; nothing of it is written but two checkpoints into `folder`.
        seatings: for which the model is to be asked.
        per_host: workers of a host, in the plan.
        seconds: how long it may take, about; each part makes a few steps at least.
        worker: this one.
        folder: for checkpoints, on the disk where runs are; whoever has made it deletes it.
    """
    if worker.is_chief:
        recipe.data.prepare()
    worker.group.barrier("the data is prepared")
    # The same few batches again and again may make the weights diverge, which is no reason to stop.
    recipe = replace(
        recipe, nonfinite="skip", nonfinite_budget=sys.maxsize, warm_start=None, stages=(), num_workers=None, loggers=()
    )
    ways = {way_of(recipe, each, is_cpu=worker.device.type == "cpu") for each in seatings}
    threads, examples = torch.get_num_threads(), Examples(recipe)
    try:
        found, buckets = _measure_places(examples, recipe, seatings, seconds, worker, "all-reduce" in ways)
        parts, _ = _built(examples, recipe, worker, 1, found[0].tower_size)
        save = _measure_save(parts, worker, folder)
        num_bytes = sum(bucket.num_bytes for bucket in buckets)
        links = _measure_links(ways, worker, num_bytes, _EXCHANGE * seconds)
    finally:
        torch.set_num_threads(threads)
    return RunCosts(
        machine=f"{worker.device.type}, {describe_machine()}",
        is_cpu=worker.device.type == "cpu",
        num_cores=usable_cores(),
        per_host=per_host,
        num_probed=worker.num_workers,
        batch_size=recipe.batch_size,
        epoch_size=parts.loader.epoch_size,
        reads_ahead=_reads_ahead(parts, per_host),
        workers=found,
        buckets=buckets,
        save=save,
        backend=worker.backend,
        **links,
    )


def _measure_places(
    examples: Examples, recipe: Recipe, seatings: Sequence[Seating], seconds: float, worker: Worker, is_overlapped: bool
) -> tuple[tuple[WorkerCost, ...], tuple[SentBucket, ...]]:
    """Measure each size of tower beside as many workers as there may be on a host, and the buckets of the first."""
    places: dict[tuple[int, int], int] = {}
    for each in seatings:
        place = min(each.num_local, worker.num_workers), each.tower_size
        places[place] = max(places.get(place, 1), each.most_towers)
    found: list[WorkerCost] = []
    buckets: tuple[SentBucket, ...] = ()
    for (num_local, tower_size), most_towers in sorted(places.items()):
        place_of = _Place(examples, recipe, worker, num_local, tower_size)
        budget = seconds / len(places)
        found.append(place_of.measure(budget, has_further=most_towers > 1))
        buckets = buckets or place_of.buckets(budget / 4, is_overlapped=is_overlapped)
    return tuple(found), buckets


def _reads_ahead(parts: Parts, num_local: int) -> bool:
    return parts.loader.reader.cost == "decode" and parts.loader.pool.size(num_local) > 0


# A worker -----------------------------------------------------------------------------------------------------------


class _Watch:
    """A connection of one worker with nobody, which notes when the gradients are there."""

    def __init__(self, device: torch.device, sent_dtype: torch.dtype | None) -> None:
        self._device, self._sent_dtype = device, sent_dtype
        self.summed = self.cpu_summed = 0.0
        self.buckets: list[list[int]] = []
        self.bucket_bytes: list[int] = []
        self.num_gradients = 0

    def total(self, sums: TreeSum) -> PartialSum:
        _wait_for(self._device)
        self.summed, self.cpu_summed = time.perf_counter(), time.process_time()
        total = sums.total()
        if not self.buckets and sums.num_gradients:
            tensors = pack(total, self._device)
            self.num_gradients = sums.num_gradients
            wire, planned = plan_buckets(tensors, sums.num_gradients, self._sent_dtype)
            self.buckets = sorted(planned, key=lambda indices: max(indices) >= sums.num_gradients)
            self.bucket_bytes = [sum(wire[index].nbytes for index in indices) for indices in self.buckets]
        return total

    def early_seconds(self) -> list[float]:
        """How long before the end of the tower each bucket was complete; 0 for one that is sent after it."""
        return [0.0] * len(self.buckets)

    def close(self) -> None:
        """Nothing is open."""


class _HookedWatch(_Watch):
    """One that also notes when each gradient comes; a worker with it has one tower."""

    def __init__(self, device: torch.device, sent_dtype: torch.dtype | None) -> None:
        super().__init__(device, sent_dtype)
        self.arrived: dict[int, float] = {}

    def start(self, sums: TreeSum, last: int) -> Mapping[int, GradientHook]:
        """Return hooks for the gradients; none in the first step, as of the transports."""
        self.arrived.clear()
        return {index: partial(self._arrive, index) for index in range(self.num_gradients)}

    def _arrive(self, index: int, _: Tensor) -> None:
        self.arrived[index] = time.perf_counter()

    def early_seconds(self) -> list[float]:
        """Return what was noted in the last step."""
        return [
            self.summed - max(self.arrived[index] for index in indices) if self.arrived.keys() >= {*indices} else 0.0
            for indices in self.buckets
        ]


@dataclass(frozen=True)
class _Watched:
    watch: _Watch = field(compare=False)
    exact: bool = False

    def connect(self, worker: Worker, num_towers: int) -> Connection:
        return self.watch


class _Times(NamedTuple):
    """Times of a step, in seconds."""

    compute: float
    compute_cpu: float
    update: float
    update_cpu: float


class _Place:
    """Some workers of this host, all of which compute one tower of one size at the same time.

    Args:
        examples: of the recipe, which may be open.
        worker: this one; all take part in every call.
        num_local: how many of them compute; the others wait.
        tower_size: examples of the tower.
    """

    def __init__(self, examples: Examples, recipe: Recipe, worker: Worker, num_local: int, tower_size: int) -> None:
        self._recipe, self._worker, self._num_local, self._size = recipe, worker, num_local, tower_size
        self._examples = examples
        self._computes = worker.rank < num_local
        one = is_exact(recipe.exchange) and worker.device.type == "cpu"
        torch.set_num_threads(recipe.num_threads or (1 if one else share_of_cores(num_local)))

    def measure(self, seconds: float, *, has_further: bool) -> WorkerCost:
        """Measure for about some seconds; `has_further` measures a second tower of a worker, too."""
        forget_peak(self._worker.device)
        share = _STEPS * seconds / (1 + has_further)
        first, memory, tower_bytes = self._steps(1, share)
        # Half of two, not what two take more than one: the difference would be all noise on a busy machine.
        further, further_cpu = self._steps(2, share)[0][:2] if has_further else (0.0, 0.0)
        given, given_cpu = self._input(_INPUT * seconds)
        return WorkerCost(
            num_local=self._num_local,
            tower_size=self._size,
            first_seconds=first.compute,
            further_seconds=further / 2,
            first_cpu_seconds=first.compute_cpu,
            further_cpu_seconds=further_cpu / 2,
            update_seconds=first.update,
            update_cpu_seconds=first.update_cpu,
            input_seconds=given,
            input_cpu_seconds=given_cpu,
            memory_bytes=memory,
            tower_bytes=tower_bytes,
        )

    def buckets(self, seconds: float, *, is_overlapped: bool) -> tuple[SentBucket, ...]:
        """Return what is sent together, and how early it is there, if it is sent beside the backward pass."""
        found: list[list[float]] = []
        if self._worker.is_chief:
            device, sent_dtype = self._worker.device, _sent_dtype(self._recipe)
            watch = _HookedWatch(device, sent_dtype) if is_overlapped else _Watch(device, sent_dtype)
            step, batches = self._bound(1, watch)
            rows: list[list[float]] = []
            times = _time_steps(step, batches, watch, device, seconds, lambda: rows.append(watch.early_seconds()))
            early = [_usual(each) for each in zip(*rows, strict=True)]
            if is_overlapped and reading_waits(device):
                early = _even_arrivals(watch, _usual([each[0] for each in times]))
            found = [[num_bytes, each] for num_bytes, each in zip(watch.bucket_bytes, early, strict=True)]
        found = self._worker.group.broadcast(found)
        return tuple(SentBucket(int(num_bytes), early) for num_bytes, early in found)

    def _steps(self, num_towers: int, seconds: float) -> tuple[_Times, int, int]:
        """Return the times of a step with so many towers, the memory in use, and the bytes of a tower's examples."""
        self._announce(f"{num_towers} tower{'s' if num_towers > 1 else ''} of {self._size} examples")
        times: list[list[float]] = []
        memory = tower_bytes = 0
        step: Callable[[Batch], object] | None = None
        if self._computes:
            watch = _Watch(self._worker.device, _sent_dtype(self._recipe))
            step, batches = self._bound(num_towers, watch)
            tower_bytes = _bytes_of(batches[0]) // num_towers
        self._worker.group.barrier("all compute")
        if step is not None:
            times = _time_steps(step, batches, watch, self._worker.device, seconds)
            memory = peak_bytes(self._worker.device)
        # A step waits for the slowest worker.
        series = [each for each in self._worker.group.gather(times) if each]
        steps = [[max(values) for values in zip(*rows, strict=True)] for rows in zip(*series, strict=False)]
        memory, tower_bytes = (max(self._worker.group.gather(each)) for each in (memory, tower_bytes))
        return _Times(*map(_usual, zip(*steps, strict=True))), memory, tower_bytes

    def _input(self, seconds: float) -> tuple[float, float]:
        """Return the seconds, of the clock and of the processors, until the examples of one tower are there."""
        self._announce("the input")
        found: list[float] = []
        parts = self._built(1)[0] if self._computes else None
        self._worker.group.barrier("all read")
        if parts is not None:
            found = _time_input(parts, self._worker.device, self._num_local, seconds)
        rows = [each for each in self._worker.group.gather(found) if each]
        return max(row[0] for row in rows), statistics.mean(row[1] for row in rows)

    def _bound(self, num_towers: int, watch: _Watch) -> tuple[Callable[[Batch], object], list[Batch]]:
        """Build a step of this worker alone, which has been made once, and some batches for it."""
        parts, alone = self._built(num_towers)
        with errors_alone():
            step = BoundStep(parts.state, parts.towers, _Watched(watch, is_exact(self._recipe.exchange)), alone)
            parts.state.resolve(parts.loader.epoch_size, self._recipe.batch_size)
        step.resolved_for = (parts.loader.epoch_size, parts.loader.batch_size)
        counts = parts.task.counts(parts.state.model)
        with closing(parts.loader.batches(range(num_towers), num_towers, self._worker.device)) as stream:
            batches = [replace(batch, fields=batch, loader=None, bad=()) for batch in islice(stream, _NUM_BATCHES)]
        # The parts are named, as a step keeps its state by a weak reference.
        return lambda batch: step(parts.task.losses, batch, counts), batches

    def _built(self, num_towers: int) -> tuple[Parts, Worker]:
        return _built(self._examples, self._recipe, self._worker, num_towers, self._size)

    def _announce(self, what: str) -> None:
        if self._worker.is_chief:
            beside = "alone" if self._num_local == 1 else f"on {self._num_local} workers at once"
            log.info("measuring %s, %s", what, beside)


def _built(
    examples: Examples, recipe: Recipe, worker: Worker, num_towers: int, tower_size: int
) -> tuple[Parts, Worker]:
    """Build the parts of a run whose batch is so many towers, for this worker as if it were alone."""
    # A pulse that nobody hears: the launcher would find those slow that measure more than others.
    alone = replace(
        worker, rank=0, num_workers=1, local_rank=0, num_local_workers=1, group=Group.alone(), pulse=Pulse()
    )
    part = replace(recipe, num_towers=num_towers, batch_size=num_towers * tower_size)
    with errors_alone():
        return build(part, alone, is_prepared=True, opened=examples), alone


def _time_steps(
    step: Callable[[Batch], object],
    batches: Sequence[Batch],
    watch: _Watch,
    device: torch.device,
    seconds: float,
    note: Callable[[], object] = lambda: None,
) -> list[list[float]]:
    """Make steps for some seconds; returns `_Times` of each but the first, which creates what is created once."""
    step(batches[0])
    found: list[list[float]] = []
    started = time.perf_counter()
    for batch in cycle(batches):
        _wait_for(device)
        began, cpu_began = time.perf_counter(), time.process_time()
        step(batch)
        _wait_for(device)
        ended, cpu_ended = time.perf_counter(), time.process_time()
        note()
        found.append(
            [watch.summed - began, watch.cpu_summed - cpu_began, ended - watch.summed, cpu_ended - watch.cpu_summed]
        )
        if len(found) >= _LEAST_STEPS and (ended - started > seconds or len(found) == _MOST_STEPS):
            return found
    raise AssertionError("a cycle has no end")


def _time_input(parts: Parts, device: torch.device, num_local: int, seconds: float) -> list[float]:
    num_readers = parts.loader.pool.size(num_local) if _reads_ahead(parts, num_local) else 0
    stages = num_batches = 0.0
    with closing(parts.loader.batches(range(1), 1, device, workers_on_host=num_local)) as batches:
        for _ in islice(batches, 1 + num_readers * (1 + parts.loader.pool.prefetch)):  # what was read ahead is no pace
            pass
        started, cpu_started = time.perf_counter(), time.process_time()
        for batch in batches:
            num_batches += 1
            stages += sum(batch.stage_seconds.values())
            passed = time.perf_counter() - started
            if num_batches > num_readers and passed > seconds:
                break
        cpu = time.process_time() - cpu_started
    return [passed / num_batches, max(cpu, stages if num_readers else 0.0) / num_batches]


def _usual(seconds: Sequence[float]) -> float:
    """The lower quartile: a host of the plan does nothing else, and what else runs here delays some of the steps."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


def _even_arrivals(watch: _Watch, compute_seconds: float) -> list[float]:
    """How early buckets are complete if gradients come evenly over the backward pass: of a device nobody sees more."""
    whole, sent, early = sum(watch.bucket_bytes), 0, []
    for indices, num_bytes in zip(watch.buckets, watch.bucket_bytes, strict=True):
        sent += num_bytes
        is_early = max(indices) < watch.num_gradients
        early.append(_BACKWARD_SHARE * compute_seconds * (1 - sent / whole) if is_early else 0.0)
    return early


def _sent_dtype(recipe: Recipe) -> torch.dtype | None:
    return recipe.exchange.sent_dtype if isinstance(recipe.exchange, AllReduce) else None


def _bytes_of(batch: Batch) -> int:
    tensors = [value for value in batch.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def _wait_for(device: torch.device) -> None:
    if reading_waits(device):
        torch.accelerator.synchronize(device)


# A save -------------------------------------------------------------------------------------------------------------


def _measure_save(parts: Parts, worker: Worker, folder: Path) -> SaveCost:
    """Measure a checkpoint of the chief; the other workers wait."""
    cost = [0.0] * 4
    if worker.is_chief:
        log.info("measuring a save")
        for place in (folder / "first", folder / "second"):  # the first creates what is created once
            with Saver(place) as saver:
                began, cpu_began = time.perf_counter(), time.process_time()
                saver.save(parts.state, parts.loader)
                blocked = time.perf_counter() - began
                saver.wait()
                seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
        num_bytes = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        cost = [num_bytes, blocked, seconds, cpu]
    num_bytes, *times = worker.group.broadcast(cost)
    return SaveCost(int(num_bytes), *times)


# The exchange -------------------------------------------------------------------------------------------------------


def _measure_links(ways: set[Way], worker: Worker, num_bytes: int, seconds: float) -> dict[str, Link | None]:
    links: dict[str, Link | None] = {"shared_memory": None, "messages": None}
    if worker.num_workers == 1:
        return links
    large = min(max(num_bytes, _LEAST_LARGE_BYTES), _MOST_LARGE_BYTES)
    if "shared memory" in ways:
        small, whole = (_time_exchange(worker, "shared_memory", each, seconds / 4) for each in (_SMALL_BYTES, large))
        # Each worker copies a row of all bytes, and adds up a share of all rows.
        per_core = min(worker.num_workers, usable_cores()) / worker.num_workers
        links["shared_memory"] = Link(small[0], max(0.0, whole[0] - small[0]) * per_core / large, small[1])
    if ways & {"all-reduce", "tree"}:
        small, whole = (_time_exchange(worker, worker.backend, each, seconds / 4) for each in (_SMALL_BYTES, large))
        messages = 2 * (worker.num_workers - 1)
        sent = messages * large / worker.num_workers
        wall, cpu = (max(0.0, both[1] - both[0]) / sent for both in zip(small, whole, strict=True))
        links["messages"] = Link(small[0] / messages, wall, small[1] / messages, cpu)
    return links


def _time_exchange(worker: Worker, transport: TransportName, num_bytes: int, seconds: float) -> tuple[float, float]:
    """Return the seconds of an exchange of so many bytes, of the clock and of this worker's processors."""
    if worker.is_chief:
        log.info("measuring the exchange of %d bytes over %s", num_bytes, transport.replace("_", " "))
    gradient, numbers = torch.zeros(num_bytes // 4, device=worker.device), numbers_on(worker.device, [0.0])
    found: list[tuple[float, float]] = []
    with closing(AllReduce(transport).connect(worker, worker.num_workers)) as connection:

        def exchange() -> None:
            sums = TreeSum(1)
            sums.add(worker.rank, PartialSum([gradient], numbers))
            began, cpu_began = time.perf_counter(), time.process_time()
            connection.total(sums)
            _wait_for(worker.device)
            found.append((time.perf_counter() - began, time.process_time() - cpu_began))

        for _ in range(_LEAST_STEPS):
            exchange()
        number = worker.group.broadcast(min(_MOST_STEPS, 1 + int(seconds / max(1e-6, found[-1][0]))))
        found.clear()
        for _ in range(number):
            exchange()
    wall, cpu = map(_usual, zip(*found, strict=True))
    return wall, cpu
