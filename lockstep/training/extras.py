"""Numbers that travel with the losses, so that all workers decide alike without asking each other."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lockstep.errors import WorkerError
from lockstep.tensors import numbers_on
from lockstep.training.attempt import Readings
from lockstep.training.replicas import Replicas
from lockstep.types import BadExample, Batch
from lockstep.workers.rank import Worker


class Extras(NamedTuple):
    """Numbers of each worker that travel with the losses, summed over the workers."""

    elapsed_seconds: float
    """On the chief's clock; the others add nothing."""
    num_stops: float
    """Workers that were asked to stop."""
    num_regroups: float
    """Workers that were asked to regroup, with others that are to join."""
    num_bad: float
    """Examples that could not be read."""
    position: float
    """Where the batch begins in the stream, on each worker the same."""
    checksum: float = 0.0
    """The checksum of the state, where the workers compare theirs; see `Replicas`."""
    squared_checksum: float = 0.0


class ExtraSums:
    """What a worker adds to the sum of each attempt beside losses and gradients, and what it learns from the total.

    A worker that is alone has no replicas.
    """

    def __init__(self, replicas: Replicas | None, worker: Worker) -> None:
        self._worker, self._replicas, self._is_chief = worker, replicas, worker.is_chief

    def own(self, batch: Batch, step: int, elapsed_seconds: float) -> list[float] | Tensor:
        """This worker's numbers for the attempt on this batch after `step` completed updates.

        `elapsed_seconds` are from the start of the series of steps to that of the attempt.
        """
        worker = self._worker
        extras = Extras(
            elapsed_seconds=elapsed_seconds if self._is_chief else 0.0,
            num_stops=float(worker.pulse.stop_requested is not None),
            num_regroups=float(worker.pulse.regroup_requested),
            num_bad=float(len(batch.bad)),
            position=float(batch.position),
        )
        numbers = numbers_on(worker.device, extras)
        if self._replicas is not None and self._replicas.is_due(step):
            own = self._replicas.checksum(step)
            if isinstance(numbers, Tensor):
                numbers[-2], numbers[-1] = own, own * own
            else:
                numbers[-2:] = [float(own), float(own) ** 2]
        return numbers

    def withheld(self, others: Tensor, position: int) -> Tensor:
        """A number on the device, not 0 where the host has to read the attempt before an update is made."""
        num_workers = self._worker.num_workers
        *_, num_bad, positions, checksums, squares = others[-len(Extras._fields) :].unbind()
        differ = (positions - num_workers * position).abs() + (num_workers * squares - checksums * checksums).abs()
        return num_bad + differ

    def read(self, readings: Readings, position: int) -> Extras:
        """Read what the workers have told each other with an attempt, here from the batch at `position`.

        Raises:
            WorkerError: the workers have not begun the same one, or their copies of the state differ.
        """
        worker = self._worker
        extras = Extras(*readings.others[-len(Extras._fields) :])
        mean = extras.position / worker.num_workers
        if mean != position:
            raise WorkerError(
                "The workers have not begun the same attempt.",
                given=f"the batch at position {position} on {worker.name}, and {mean:g} in the mean of all workers",
                expected="loop bodies that change parameters and buffers on all workers alike, or on none",
                hint="leave `if worker.is_chief` out around such changes",
            )
        if self._replicas is not None:
            self._replicas.check(extras.checksum, extras.squared_checksum)
        return extras

    def gather_bad(self, batch: Batch) -> tuple[BadExample, ...]:
        """Gather the examples that could not be read on any worker, and count them; all workers call it.

        Raises:
            DataError: there are more of them than the loader may replace.
        """
        found = self._worker.group.gather([list(example) for example in batch.bad])
        bad = tuple(sorted(BadExample(*example) for examples in found for example in examples))
        if batch.loader is not None:
            batch.loader.add_bad(bad)
        return bad
