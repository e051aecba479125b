"""The stream of batches, and its slices: what stands at position p is a pure function of the seed and p."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, filterfalse, islice, takewhile
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import torch

from lockstep.augmentations.augment import Augment, finished, is_finished_on_device
from lockstep.checks import (
    Count,
    Hint,
    NonNegativeInt,
    PositiveInt,
    check_all,
    check_one_of,
    check_type,
    check_value,
    wrong_type,
)
from lockstep.data.bad_examples import POLICIES, ChooseRows, DropBad, Policy, Quarantine, ReplaceBad
from lockstep.data.batch_reader import BadRow, BatchReader, ReadRows, SkipBad
from lockstep.data.device_copies import copied_ahead, finished_here
from lockstep.data.loader_processes import read_in_processes
from lockstep.data.loader_threads import read_in_threads
from lockstep.data.order import Int64s, Order, order_of
from lockstep.data.prefetch import LoaderPool, StallTimeout
from lockstep.data.rows import (
    FORGED,
    BatchRequest,
    EvaluationRows,
    Places,
    RowsOf,
    TrainingRows,
    offsets_of,
    read_ranges,
    saved_ranges,
    without_first,
)
from lockstep.description import described
from lockstep.errors import DataError, InputError
from lockstep.readers.fingerprint import Fingerprint, fingerprint_changes, fingerprint_of
from lockstep.readers.reader import AnyReader, reader_of
from lockstep.tracing import TimedResult, run_timed
from lockstep.types import BadExample, Batch, StepReport

_CPU = torch.device("cpu")
_Place = Annotated[Count, Hint(FORGED)]

AnyBatch = TypeVar("AnyBatch", bound=Batch)


@dataclass(frozen=True, eq=False, repr=False)
class EvaluationBatch(Batch):
    """A micro-batch of an evaluation, always of the full shape."""

    valid: int = 0
    """Rows that count, the first ones; the rest repeat the last example."""


class Stuck(NamedTuple):
    """A step after which no batch has been finite so far."""

    step: int
    positions: tuple[int, ...]
    """Positions of the batches that were tried there, which are skipped."""


class Loader:
    """Batches of a reader's examples, in an order, augmented; its state is the seed, the position and what is skipped.

    The stream has no end and every batch is full: batches cross from one epoch to the next. The stream is the same for
    any number of workers and loader processes. A torch dataset, and a dict of tensors with a row for each example, are
    readers too, as by `TorchDataset` and `Arrays`. A reader that has to decode is read by `num_processes` loader
    processes (None: chosen from the cores) or by `num_threads` threads, each of which prefetches `prefetch` batches; a
    reader whose examples lie in memory is read by the trainer's own process.

    With `bad_examples="skip"` an example that cannot be read is replaced by the next readable one of its epoch, which
    then comes twice; an evaluation leaves it out. More than `bad_budget` different bad examples end the run.

    A loader process or thread that hangs, for instance on a network disk, is named with its batch and its example once
    the trainer has waited 10 s for it, or ten times as long as ever before; after `timeout_seconds` (0: never) the run
    ends.
    """

    def __init__(
        self,
        reader: AnyReader,
        *,
        batch_size: int,
        seed: int = 0,
        order: Order | str = "shuffled",
        augment: Augment | Sequence[Augment] | None = None,
        num_processes: int | None = None,
        num_threads: int = 0,
        prefetch: int = 2,
        bad_examples: Policy = "raise",
        bad_budget: int = 100,
        timeout_seconds: float = 600.0,
    ) -> None:
        reader = reader_of(reader)
        check_value("batch_size", batch_size, PositiveInt)
        check_value("bad_budget", bad_budget, NonNegativeInt)
        check_one_of("bad_examples", bad_examples, POLICIES)
        if not len(reader):
            raise DataError(
                "The reader holds no examples.",
                given=f"{reader} of length 0",
                expected="one example or more",
                hint="check the path or the pattern of its files",
            )
        self.reader = reader
        self.batch_size = batch_size
        self.seed = seed
        self.order = order_of(order)
        self.augment = [] if augment is None else augment if isinstance(augment, Sequence) else [augment]
        self.epoch_size = self.order.epoch_size(len(reader))
        """Positions in an epoch: the number of examples, unless the order repeats some."""
        self.pool = LoaderPool(num_processes, num_threads, prefetch, timeout_seconds)
        """The loader processes or threads that prefetch."""
        self.pool.check(self.reader, self.augment)
        self.quarantine = Quarantine(bad_examples, bad_budget)
        """The bad examples that were found so far."""
        self.made_with = {"batch_size": batch_size, "order": described(self.order), "augment": described(self.augment)}
        """The description that checkpoints hold; taken now, since an augmentation may count or cache later on."""
        self.num_loads = 0
        """How often `load_state` was called: batches asked for before are not the next ones any more."""
        self.position = 0
        """The next example to train on: all before it were attempted; what is prefetched does not count."""
        self.returned: list[range] = []
        """Places in the stream, ascending, whose examples come next, as no update was made from them; see `slices`."""
        self._places = Places()
        self.last_report: StepReport | None = None
        """The report given with the last commit."""
        self.skipped: list[int] = []
        """Positions of the batches that are left out of the stream, ascending; see `skip`."""
        self.stuck: Stuck | None = None
        """Set by a rollback to a checkpoint from which no step could be made, as far as is known."""

    def skip(self, position: int) -> None:
        """Leave the batch that starts at a position out of the stream. Call it on all workers alike.

        Later calls of `batches` jump over it; everything else stays as it is. If the batch size changes afterwards,
        perhaps no batch starts there any more: then none is left out.
        """
        check_type("position", position, int, expected="a place in the stream", hint="give the position of a batch")
        if position < 0 or (position - self.position) % self.batch_size:
            raise InputError(
                f"No batch starts at position {position}.",
                given=f"position {position}, batches of {self.batch_size}, one of them from {self.position} on",
                expected="the place of a batch's first example, from 0 on",
                hint="give the position of the batch as its report names it",
            )
        self.skipped = sorted({*self.skipped, position})

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The reader's fingerprint of its examples; computed once, when first needed."""
        return fingerprint_of(self.reader, len(self.reader))

    def state(self) -> dict[str, Any]:
        """Return what `load_state` needs to go on from here, as JSON."""
        return {
            "seed": self.seed,
            "position": self.position,
            **({"returned": saved_ranges(self.returned)} if self.returned else {}),
            "num_examples": len(self.reader),
            "epoch_size": self.epoch_size,
            "data": self.fingerprint,
            **({"skipped": self.skipped} if self.skipped else {}),
            **({"quarantine": self.quarantine.state()} if self.quarantine.reasons else {}),
        }

    def load_state(self, state: Mapping[str, Any], *, accept_data_change: bool = False) -> list[str]:
        """Go on where `state` was taken, and skip what was skipped there; generators of `batches` from before end.

        Args:
            state: of a stream with the same seed and the same number of examples.
            accept_data_change: go on with examples that have changed; none of them is known to be bad then.

        Returns:
            What has changed in the examples, a line each.

        Raises:
            InputError: no loader has given this state, or one of another stream or other examples; nothing has changed.
        """
        check_stream(state)
        changed = _check_same_stream(state, self.state(), accept_data_change=accept_data_change)
        self.returned = read_ranges(state) if "returned" in state else []
        self.position = state["position"]
        self._places = self._places_from_here()
        self.last_report = None
        self.num_loads += 1
        self.skipped = sorted({*self.skipped, *state.get("skipped", ())})
        known = {} if changed else state.get("quarantine", {})
        if known or self.quarantine.reasons:
            self.quarantine.load(known)
        return changed

    def batches(
        self,
        towers: range,
        num_towers: int,
        device: torch.device = _CPU,
        stop: Callable[[int], bool] | None = None,
        workers_on_host: int | None = None,
    ) -> Generator[Batch, None, None]:
        """Yield this worker's rows of every batch from `position` on, without end, leaving out the skipped ones.

        A batch is cut into `num_towers` equal slices in stream order; the rows are those of `towers`. Close the
        generator to end its loader processes. `position` moves when a batch is committed, which `train_step` does.

        Args:
            towers: the towers of this worker.
            num_towers: all towers of the run.
            device: where the tensors go; to an accelerator beside what it computes, for the stream that is current
                there when a batch is taken.
            stop: called with the position of the next batch; true ends the generator before it.
            workers_on_host: workers that share this host's cores; by default all workers of the run.

        Raises:
            WorkerError: a loader process or thread hangs, or a loader process died.
        """
        self._places = self._places_from_here()
        read = self._training_reader(self.batch_size, offsets_of(self.batch_size, towers, num_towers))
        requests = map(BatchRequest, self._starts())
        source = self._read_ahead(read, requests, workers_on_host or -(-num_towers // len(towers)))
        positions = self._starts()
        if stop is not None:
            positions = takewhile(lambda position: not stop(position), positions)
        there = self._on_device(source, device)
        delivered = _delivered(there, positions, partial(self._training_batch, towers))
        return self._while_current(delivered)

    def slices(self, size: int, num_towers: int) -> Slices:
        """Cut the stream from `position` on into slices, to be leased to workers and read in any order.

        `size` is that of the examples of one tower of a batch, or of several; `num_towers` are all towers of the run.
        """
        self._places = self._places_from_here()
        return Slices(self, size, num_towers, self._places)

    def _while_current(self, batches: Generator[Batch, None, None]) -> Generator[Batch, None, None]:
        """Yield the batches as long as `load_state` is not called: then they are no longer the next ones."""
        num_loads = self.num_loads
        with closing(batches):
            for batch in batches:
                if self.num_loads != num_loads:
                    raise InputError(
                        "The stream was set to another place while its batches were used.",
                        given=f"the batch at position {batch.position}, asked for before",
                        expected="batches asked for after resume, rollback or load_state",
                        hint="begin the loop anew after each of them",
                    )
                yield batch

    def evaluation_batches(
        self,
        micro_batch: int,
        rank: int = 0,
        num_workers: int = 1,
        device: torch.device = _CPU,
        *,
        drop_last: bool = False,
    ) -> Generator[EvaluationBatch, None, None]:
        """Yield worker `rank`'s micro-batches (rank, rank + num_workers, ...) of one pass in the order of the reader.

        Micro-batch k holds the examples from k * micro_batch on, whatever the number of workers; its `position` is that
        index. A last one that is not full is padded by its last example, or dropped. Augmentations draw as at
        position = index, alike in every pass. The stream's own position does not move.
        """
        check_value("micro_batch", micro_batch, PositiveInt)
        size = len(self.reader)
        end = size // micro_batch * micro_batch if drop_last else size
        starts = range(rank * micro_batch, end, num_workers * micro_batch)
        read = self._batch_reader(EvaluationRows(micro_batch, size), DropBad(size))
        source = self._read_ahead(read, map(BatchRequest, starts), num_workers)
        return _delivered(self._on_device(source, device), starts, partial(self._evaluation_batch, micro_batch))

    def example_ids(self, position: int, count: int, bad: Sequence[BadExample] = ()) -> list[str]:
        """Name the `count` examples from `position` of the stream on; for those in `bad`, what was read instead."""
        instead = {example.position: example.replaced_by for example in bad if not example.partner_of}
        places = self._places.of(np.arange(position, position + count))
        return [instead.get(place, name) for place, name in zip(places.tolist(), self._names(places), strict=True)]

    def add_bad(self, bad: Sequence[BadExample]) -> None:
        """Count examples of a batch that could not be read, on any worker; raises DataError beyond the budget."""
        if bad:
            indices = self._indices(np.array([example.position for example in bad]))
            self.quarantine.add(dict(zip(indices.tolist(), bad, strict=True)))

    def commit(self, batch: Batch, report: StepReport | None = None) -> None:
        """Move `position` past a batch of this loader, and count its bad examples.

        Args:
            batch: whose attempt is over.
            report: of the step made from it, kept as `last_report`; None where no step was made.
        """
        if batch.bad:
            self.add_bad(batch.bad)
        end = batch.position + batch.batch_size
        left = without_first(self.returned, end - self.position) if self.returned else []
        self.return_to(end, left, report)

    def return_to(self, position: int, returned: list[range], report: StepReport | None) -> None:
        """Set the position, the places whose examples come next, and the report of the last step."""
        self.position, self.returned, self.last_report = position, returned, report

    def _indices(self, positions: Int64s) -> Int64s:
        return self.order.indices(positions, len(self.reader), self.seed)

    def _training_batch(self, towers: range, rows: ReadRows, position: int, times: dict[str, Any]) -> Batch:
        return Batch(
            rows.fields,
            position=position,
            batch_size=self.batch_size,
            towers=towers,
            seed=self.seed,
            epoch_size=self.epoch_size,
            bad=[self._bad_example(found) for found in rows.bad],
            loader=self,
            **times,
        )

    def _evaluation_batch(
        self, micro_batch: int, rows: ReadRows, position: int, times: dict[str, Any]
    ) -> EvaluationBatch:
        return EvaluationBatch(
            rows.fields,
            position=position,
            batch_size=micro_batch,
            towers=range(1),
            seed=self.seed,
            epoch_size=self.epoch_size,
            bad=[self._bad_example(found)._replace(replaced_by="") for found in rows.bad],
            valid=min(micro_batch, len(self.reader) - position) - len(rows.bad),
            **times,
        )

    def _bad_example(self, found: BadRow) -> BadExample:
        name, instead = map(self.reader.example_id, (found.index, found.read_instead))
        partner_of = "" if found.partner_of is None else self._names(np.array([found.partner_of]))[0]
        return BadExample(found.position, name, found.reason, instead, partner_of)

    def _names(self, places: Int64s) -> list[str]:
        return [self.reader.example_id(index) for index in self._indices(places).tolist()]

    def _places_from_here(self) -> Places:
        return Places(self.position, tuple(self.returned))

    def _starts(self) -> Iterator[int]:
        skipped = {position for position in self.skipped if position >= self._places.end}
        return filterfalse(skipped.__contains__, count(self.position, self.batch_size))

    def _training_reader(self, stride: int, offsets: Int64s) -> BatchReader:
        """Return a reader of the rows at some offsets from any position that is a multiple of the stride away."""
        rows_of = TrainingRows(self.order, len(self.reader), self.seed, stride, offsets, self._places)
        return self._batch_reader(rows_of, ReplaceBad(self.order, len(self.reader), self.seed))

    def _batch_reader(self, rows_of: RowsOf, choose: ChooseRows) -> BatchReader:
        quarantine = self.quarantine
        skip_bad = SkipBad(choose, quarantine.budget, {*quarantine.reasons}) if quarantine.policy == "skip" else None
        return BatchReader(self.reader, self.augment, self.seed, rows_of, skip_bad)

    def _read_ahead(
        self, read: BatchReader, requests: Iterator[BatchRequest], num_workers: int
    ) -> Generator[TimedResult[ReadRows], None, None]:
        """Read what is requested; prefetch it if the reader has to decode."""
        pool = self.pool
        size = pool.size(num_workers) if self.reader.cost == "decode" else 0
        if not size:
            return (run_timed(read, request) for request in requests)
        read_ahead = read_in_threads if pool.num_threads else read_in_processes
        return read_ahead(read, requests, size, pool.prefetch, read.names, StallTimeout(pool.timeout_seconds))

    def _on_device(
        self, source: Generator[TimedResult[ReadRows], None, None], device: torch.device
    ) -> Generator[TimedResult[ReadRows], None, None]:
        """Bring what is read to the device, and do there what augmentations have left for it."""
        finish = partial(finished, self.augment)
        if device.type != "cpu":
            return copied_ahead(source, device, finish)
        return finished_here(source, finish) if any(map(is_finished_on_device, self.augment)) else source


def _delivered(
    source: Generator[TimedResult[ReadRows], None, None],
    positions: Iterable[int],
    batch_of: Callable[[ReadRows, int, dict[str, Any]], AnyBatch],
) -> Generator[AnyBatch, None, None]:
    """Yield a batch for each position; closes the source at the end."""
    with closing(source) as results:
        for position in positions:
            started = time.perf_counter()
            rows, seconds, queue_fill, _ = next(results)
            wait_seconds = time.perf_counter() - started
            times = {"wait_seconds": wait_seconds, "stage_seconds": seconds, "queue_fill": queue_fill}
            yield batch_of(rows, position, times)


class Slices:
    """The stream of a loader from its position on, in slices; `Loader.slices` makes it.

    Slice k has the positions from `position + k * size` on: the examples of one tower of a batch, or of several. They
    are read in whatever order they are leased.
    """

    def __init__(self, loader: Loader, size: int, num_towers: int, places: Places) -> None:
        self.loader, self.size = loader, size
        self.position = places.position
        """Where the first slice begins."""
        self._tower_size = loader.batch_size // num_towers
        self._places = places
        self._read = loader._training_reader(size, np.arange(size))

    def starts(self) -> Iterator[int]:
        """Yield the first positions of all slices, without end, leaving out those of batches that are skipped."""
        starts, skipped = count(self.position, self.size), {*self.loader.skipped}
        return filterfalse(lambda start: self.batch_in_stream(start) in skipped, starts) if skipped else starts

    def batch_in_stream(self, start: int) -> int:
        """Return the batch in which the examples of a slice have their places: to skip it leaves them out.

        It is the one that they are computed in, unless they were returned.
        """
        return self._batch_start(int(self._places.of(np.array([start]))[0]))

    def commit(self, end: int, unfinished: Sequence[int], report: StepReport | None = None) -> None:
        """Set the loader to where the run is; all workers alike.

        The last slice that was in an update ends at `end`; the unfinished slices before that were in none.
        """
        self.loader.return_to(*self.left(end, unfinished), report)

    def left(self, end: int, unfinished: Sequence[int]) -> tuple[int, list[range]]:
        """Return the position to which `commit` sets the loader, and the places whose examples come next."""
        fresh = max(end, self._places.end)
        positions = [*(range(start, start + self.size) for start in unfinished), range(end, fresh)]
        returned = self._places.ranges_of(positions)
        return fresh - sum(map(len, returned)), returned

    def reader(
        self, number: int, num_workers: int, device: torch.device, workers_on_host: int | None = None
    ) -> SliceReader:
        """Return what reads the slices leased to worker `number`, from 0, of those that compute. Close it at the end.

        The workers on this host share its cores; by default these are all that compute.
        """
        expected = islice(self.starts(), number, None, num_workers)
        return SliceReader(self, expected, device, workers_on_host or num_workers)

    def of_batch(self, start: int) -> range:
        """Return the first positions of all slices of the batch that a slice is a part of."""
        first = self._batch_start(start)
        return range(first, first + self.loader.batch_size, self.size)

    def _batch_start(self, start: int) -> int:
        return start - (start - self.position) % self.loader.batch_size

    def batch(self, start: int, rows: ReadRows, times: dict[str, Any]) -> Batch:
        """Return the batch of a slice: the part of a whole batch that is its towers'."""
        first = self._batch_start(start)
        towers = range((start - first) // self._tower_size, (start - first + self.size) // self._tower_size)
        return self.loader._training_batch(towers, rows, first, times)


class SliceReader:
    """Reads slices in the order in which they are leased; those that this worker expects are read ahead.

    Raises:
        WorkerError: a loader process or thread hangs, or a loader process died.
    """

    def __init__(self, slices: Slices, expected: Iterator[int], device: torch.device, workers_on_host: int) -> None:
        self._slices, self._expected, self._device = slices, expected, device
        self._wanted = slices.position
        self._requested: deque[int] = deque()
        """Slices whose rows the source is about to give, in this order."""
        source = slices.loader._read_ahead(slices._read, self._requests(), workers_on_host)
        self._source = slices.loader._on_device(source, device)

    def read(self, start: int) -> Batch:
        """Return the batch of a slice: at once if it was read ahead."""
        started = time.perf_counter()
        rows, seconds, queue_fill, _ = self._rows(start)
        wait_seconds = time.perf_counter() - started
        times = {"wait_seconds": wait_seconds, "stage_seconds": seconds, "queue_fill": queue_fill}
        return self._slices.batch(start, rows, times)

    def close(self) -> None:
        """End the loader processes or threads."""
        self._source.close()

    def _rows(self, start: int) -> TimedResult[ReadRows]:
        self._wanted = start
        if self._requested and start > self._requested[-1]:  # others have got all that was read ahead
            for _ in range(len(self._requested)):
                self._next()
        if self._requested and start not in self._requested:
            rows = run_timed(self._slices._read, BatchRequest(start))
            with closing(self._slices.loader._on_device((each for each in [rows]), self._device)) as source:
                return next(source)
        while True:
            found, rows = self._next()
            if found == start:
                return rows

    def _next(self) -> tuple[int, TimedResult[ReadRows]]:
        """Take the next slice that is read ahead, whereupon another one is requested."""
        rows = next(self._source)
        return self._requested.popleft(), rows

    def _requests(self) -> Iterator[BatchRequest]:
        """Yield the slice to read: the wanted one if nothing is read ahead, else the next that this worker expects."""
        while True:
            later = (start for start in self._expected if start > self._wanted)
            self._requested.append(next(later) if self._requested else self._wanted)
            yield BatchRequest(self._requested[-1])


def check_stream(state: Mapping[str, Any]) -> None:
    """Refuse what no loader has given as its state; raises InputError. All but the position may be missing."""
    check_type("state", state, Mapping, expected="what Loader.state() returned", hint=FORGED)
    check_value("position", state.get("position"), _Place)
    for name in ("seed", "num_examples", "epoch_size"):
        check_value(name, state.get(name, 0), Annotated[int, Hint(FORGED)])
    check_type("data", state.get("data", {}), Mapping, expected="a fingerprint of the examples", hint=FORGED)
    skipped, bad = state.get("skipped", []), state.get("quarantine", {})
    check_all("skipped", skipped, int, hint=FORGED)
    for index, position in enumerate(skipped):
        check_value(f"skipped[{index}]", position, _Place)
    check_type("quarantine", bad, Mapping, expected="reasons by index", hint=FORGED)
    for index, reason in bad.items():
        if not (re.fullmatch("[0-9]{1,18}", str(index)) and isinstance(reason, str)):
            raise wrong_type(f"quarantine[{index!r}]", reason, expected="the reason of an example's index", hint=FORGED)
    if "returned" in state:
        read_ranges(state)


def _check_same_stream(saved: Mapping[str, Any], here: Mapping[str, Any], *, accept_data_change: bool) -> list[str]:
    """Refuse a saved state of another seed, another number of examples, or other examples; see `Loader.load_state`."""
    # A state of an earlier version says nothing of the examples.
    changed = fingerprint_changes(saved["data"], here["data"]) if "data" in saved else []
    for name in ("seed", "num_examples", "epoch_size"):
        if saved.get(name, here[name]) != here[name]:
            raise InputError(
                f"The saved stream had another {name}.",
                given="; ".join([f"{name} {here[name]}", *changed]),
                expected=f"{name} {saved[name]}, as it was saved at position {saved['position']}",
                hint="resume with the seed and the examples that the run began with, or start a new run",
            )
    if changed and not accept_data_change:
        raise InputError(
            "The training data is not what it was when the run was saved.",
            given="; ".join(changed),
            expected=f"the data of the run, as it was at position {saved['position']}",
            hint="put the data back as it was, or start a new run; to go on with the data as it is now, give "
            "accept_data_change=True (lockstep train: --accept-data-change)",
        )
    return changed
