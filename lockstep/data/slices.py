"""The stream of a loader cut into slices, for exchanges that lease them to workers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import count, filterfalse, islice
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lockstep.data.device_copies import copied_ahead
from lockstep.data.rows import BatchRequest, Places
from lockstep.tracing import TimedResult, run_timed

if TYPE_CHECKING:
    from lockstep.data.batch_reader import BatchReader, ReadRows
    from lockstep.types import Batch, StepReport

ReadAhead = Callable[["BatchReader", Iterator[BatchRequest], int], Generator[TimedResult["ReadRows"], None, None]]
"""Reads what is requested, ahead where the reader has to decode, with so many workers on this host."""
BatchOf = Callable[[range, "ReadRows", int, dict[str, Any]], "Batch"]
"""Makes a batch of some towers of the rows, the position of the batch, and the times."""


class SlicedLoader(Protocol):
    """What slices ask of the `Loader` whose stream they are."""

    batch_size: int
    skipped: list[int]

    def return_to(self, position: int, returned: list[range], report: StepReport | None) -> None:
        """Set the position, the places whose examples come next, and the report of the last step."""
        ...


class Slices:
    """The stream of a loader from its position on, in slices; `Loader.slices` makes it.

    Slice k has the positions from `position + k * size` on: the examples of one tower of a batch, or of several. They
    are read in whatever order they are leased.

    Args:
        loader: whose stream it is.
        size: examples in a slice.
        num_towers: towers that the examples of a batch are split over.
        places: of the positions, from the loader's on.
        read_rows: reads the rows of a slice.
        read_ahead: the loader's way to prefetch them.
        batch_of: makes batches.
    """

    def __init__(
        self,
        loader: SlicedLoader,
        size: int,
        num_towers: int,
        places: Places,
        read_rows: BatchReader,
        read_ahead: ReadAhead,
        batch_of: BatchOf,
    ) -> None:
        self.loader, self.size = loader, size
        self.position = places.position
        """Where the first slice begins."""
        self._tower_size = loader.batch_size // num_towers
        self.read_rows, self.read_ahead = read_rows, read_ahead
        self._places, self._batch_of = places, batch_of

    def starts(self) -> Iterator[int]:
        """Yield the first positions of all slices, without end, leaving out those of batches that are skipped."""
        skipped = {position for position in self.loader.skipped if position >= self._places.end}
        return filterfalse(lambda start: self._batch_start(start) in skipped, count(self.position, self.size))

    def commit(self, end: int, unfinished: Sequence[int], report: StepReport | None = None) -> None:
        """Set the loader to where the run is; all workers alike.

        Args:
            end: where the last slice ends that was in an update.
            unfinished: the slices before that which were in none.
            report: of the last update.
        """
        fresh = max(end, self._places.end)
        positions = [*(range(start, start + self.size) for start in unfinished), range(end, fresh)]
        returned = self._places.ranges_of(positions)
        self.loader.return_to(fresh - sum(map(len, returned)), returned, report)

    def reader(
        self, number: int, num_workers: int, device: torch.device, workers_on_host: int | None = None
    ) -> SliceReader:
        """Return what reads the slices that are leased to one of the workers that compute. Close it at the end.

        Args:
            number: of this worker, from 0.
            num_workers: those that compute.
            device: where the tensors go.
            workers_on_host: those that share this host's cores; by default all that compute.
        """
        expected = islice(self.starts(), number, None, num_workers)
        return SliceReader(self, expected, device, workers_on_host or num_workers)

    def _batch_start(self, start: int) -> int:
        return start - (start - self.position) % self.loader.batch_size

    def batch(self, start: int, rows: ReadRows, times: dict[str, Any]) -> Batch:
        """Return the batch of a slice: its towers' part of the batch that they are towers of."""
        first = self._batch_start(start)
        towers = range((start - first) // self._tower_size, (start - first + self.size) // self._tower_size)
        return self._batch_of(towers, rows, first, times)


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
        self._source = self._on_device(slices.read_ahead(slices.read_rows, self._requests(), workers_on_host))

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
            rows = run_timed(self._slices.read_rows, BatchRequest(start))
            with closing(self._on_device(each for each in [rows])) as source:
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
        """Yield what to read: what is wanted if nothing is read ahead, then what this worker expects after it."""
        while True:
            later = (start for start in self._expected if start > self._wanted)
            self._requested.append(next(later) if self._requested else self._wanted)
            yield BatchRequest(self._requested[-1])

    def _on_device(
        self, source: Generator[TimedResult[ReadRows], None, None]
    ) -> Generator[TimedResult[ReadRows], None, None]:
        return source if self._device.type == "cpu" else copied_ahead(source, self._device)
