"""Leases: which worker computes the gradient of which slice of the stream, and what becomes of a gradient.

The rule of the served exchanges, without processes, sockets or tensors. A slice is a piece of the stream, named by its
first position: a tower's part of a batch for backup workers, a whole batch for asynchronous updates. A slice is leased,
not owned. The gradients of `required` slices make an update, and the version is the number of updates so far. A lease
bears the version that its gradient is computed with; as soon as more than `staleness` updates were made since, its
gradient cannot be used any more, and the slice is leased anew. So every slice is in one update, however slow
a worker is, and whenever one dies.

A loss may be a sum that is divided by a count over the batch. A slice is computed as the part of a batch of the stream
that it is, whatever update its gradient gets into, and so is its count: over that batch. What those who compute have
counted is kept here for the others.

Epochs are kept apart: an update has slices of an epoch only if all slices of the epochs before are in it, or were in
updates before. At the end of an epoch a slice may be leased to several workers, and the first gradient counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import count, islice
from typing import NamedTuple

_MANY_IN_VAIN = 3
"""Dropped one after the other these are a rule, and not chance."""


class SliceLease(NamedTuple):
    """A slice that a worker computes the gradient of, or has computed it of."""

    worker: int
    slice: int
    version: int
    """The version of the parameters that it computes with."""


class Leases:
    """Who computes what, in one session of a served exchange; all calls under one lock.

    Args:
        starts: first positions of the slices from where the session begins, ascending, without end.
        slice_size: examples in a slice.
        epoch_size: examples in an epoch; 0: there are none.
        num_workers: those that compute, numbered from 1. Of the slices in `starts`, worker i expects those at places
            i - 1, i - 1 + num_workers, ...: it gets them where that holds nobody up, so it can read them ahead.
        required: slices whose gradients make an update.
        staleness: the number of updates that a gradient may be behind; None: any. 0, and updates are synchronous.
    """

    def __init__(
        self,
        starts: Iterator[int],
        *,
        slice_size: int,
        epoch_size: int,
        num_workers: int,
        required: int,
        staleness: int | None,
    ) -> None:
        self.required = required
        self.staleness = staleness
        self.version = 0
        """Number of updates: those that were taken, the last of which may not be published yet."""
        self.workers = set(range(1, num_workers + 1))
        self.held: dict[int, SliceLease] = {}
        """Slices whose gradients have come and wait for an update, in the order in which they came."""
        self.used: Counter[int] = Counter()
        """Gradients that updates were made of, by worker."""
        self.dropped: Counter[int] = Counter()
        """Gradients that came too late, or were given up for lost, by worker."""
        self.behind: Counter[int] = Counter()
        """Gradients used, by the number of updates that were made since their parameters were read."""
        self.counts: dict[int, Mapping[str, float]] = {}
        """What was counted in slices, by name; those that nobody asks for any more are forgotten."""
        self._starts = zip(starts, (place % num_workers + 1 for place in count()), strict=False)
        self._slice_size, self._epoch_size = slice_size, epoch_size
        self._open: dict[int, int] = {}
        """The slices so far that were in no update, each with the worker that expects it."""
        self._leases: dict[int, SliceLease] = {}
        """Leases that may still give a gradient, by worker."""
        self._end: int | None = None
        """Where the last slice ends of those that were in updates."""
        self._published: int | None = None
        """The version that can be read."""
        self._unpublished: set[int] = set()
        """Workers whose gradients are in the update that is not published yet."""
        self._late: set[int] = set()
        """Workers whose last gradient came too late, or would have."""

    # The workers ------------------------------------------------------------------------------------------------------

    def begin(self, worker: int) -> int | None:
        """Lease a slice to a worker, which gives up what it had before; None: it has to wait."""
        self._give_up(worker)
        if worker not in self.workers or self._published is None or self._waits_for_update(worker):
            return None
        start = self._next_slice(worker)
        if start is not None:
            self._leases[worker] = SliceLease(worker, start, self._published)
        return start

    def arrive(self, worker: int, start: int, version: int) -> bool:
        """Say that a gradient has come, and return whether it is held for an update; else it is dropped."""
        lease = SliceLease(worker, start, version)
        if self._leases.get(worker) != lease:
            return False  # was dropped when its slice was leased anew, or put into an update
        if start in self.held:
            self._give_up(worker)
            return False
        self.held[start] = self._leases.pop(worker)
        self._late.discard(worker)
        return True

    def join(self, worker: int) -> None:
        """Count a worker among those that are there: others get no lease."""
        self.workers.add(worker)

    def leave(self, worker: int) -> None:
        """Take back what a worker had that is gone; gradients of it that have come are used."""
        self.workers.discard(worker)
        self._leases.pop(worker, None)

    def uncounted(self, batch: Collection[int], worker: int | None = None) -> list[int]:
        """The slices of a batch of which no counts are there; with a worker, those that it expects to be leased."""
        missing = [start for start in batch if start not in self.counts]
        return missing if worker is None else [start for start in missing if self._open.get(start) == worker]

    # The server -------------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Say that parameters of this version can be read: from now on slices are leased."""
        self._published, self._unpublished = self.version, set()

    def take(self) -> list[SliceLease] | None:
        """Return what the next update is made of, in the order of the stream; None until enough is there.

        The version is the next one then; until `publish`, workers whose gradients are in it get no lease, and of
        synchronous ones none. What remains in `held` can still be used; gradients that were held and are not there any
        more are dropped.
        """
        update = self._next_update()
        if not update:
            return None
        for lease in update:
            del self.held[lease.slice], self._open[lease.slice]
            self.used[lease.worker] += 1
            self.behind[self.version - lease.version] += 1
            self._end = max(self._end or 0, lease.slice + self._slice_size)
        self.version += 1
        self._unpublished = {lease.worker for lease in update}
        for lease in [*self._leases.values()]:
            if lease.slice not in self._open or self._is_stale(lease):
                self._give_up(lease.worker)
                self._late.add(lease.worker)
        for lease in [*self.held.values()]:
            if self._is_stale(lease):
                del self.held[lease.slice]
                self.dropped[lease.worker] += 1
        first = min(self._open, default=max(lease.slice for lease in update)) - (self.required - 1) * self._slice_size
        self.counts = {start: counts for start, counts in self.counts.items() if start >= first}
        return sorted(update, key=lambda lease: lease.slice)

    def unfinished(self) -> tuple[int | None, list[int]]:
        """Where the last slice ends of those in updates, None where none was; and the slices before that were in none.

        What is held is in no update yet.
        """
        if self._end is None:
            return None, []
        return self._end, sorted(start for start in self._open if start < self._end)

    # The rule ---------------------------------------------------------------------------------------------------------

    def _waits_for_update(self, worker: int) -> bool:
        """Whether a worker is to compute with parameters that are still to be made.

        An asynchronous worker waits for its own gradient alone, so one that is alone computes as if it updated itself.
        """
        if self.staleness == 0:
            return self._published != self.version
        is_held = any(lease.worker == worker for lease in self.held.values())
        return worker in self._unpublished or (is_held and bool(self._next_update()))

    def _next_update(self) -> list[SliceLease]:
        """The gradients of the next update: the first that came, earlier epochs first; none if it has to wait."""
        update = sorted(self.held.values(), key=lambda lease: self._epoch(lease.slice))[: self.required]
        if len(update) < self.required:
            return []
        missing = min(self._open.keys() - {lease.slice for lease in update}, default=None)
        waits = missing is not None and self._epoch(missing) < self._epoch(update[-1].slice)
        return [] if waits else update

    def _next_slice(self, worker: int) -> int | None:
        """The slice for a worker that asks: of the next ones that nobody has, one that it expects, or the first."""
        begun = {*self.held, *(lease.slice for lease in self._leases.values())}
        room = self._room(worker, begun)
        if room <= 0:
            return None
        left = sorted(self._open.keys() - begun)
        more = dict(islice(self._starts, max(0, room - len(left))))
        self._open.update(more)
        left = [*left, *more][:room]
        for start in (*(start for start in left if self._open[start] == worker), *left):
            if self._fits(start):
                return start
        # Only slices of the next epoch are left, too early for them: the last ones of this epoch, a second time.
        holders = Counter(lease.slice for lease in self._leases.values() if lease.slice not in self.held)
        again = [start for start in holders if self._fits(start)]
        return min(again, key=lambda start: (holders[start], start), default=None)

    def _room(self, worker: int, begun: Collection[int]) -> int:
        """How many slices, of which the worker is to have one, may be begun beside those that are.

        Of asynchronous workers each has one, and another one is kept for it that it may read ahead.
        """
        is_synchronous, num_workers = self.staleness == 0, len(self.workers)
        room = (max(num_workers, self.required) if is_synchronous else 2 * num_workers) - len(begun)
        if len(self.held) >= self.required:  # the update waits for slices of an earlier epoch
            return max(1, room)
        return 0 if is_synchronous and self._is_provided_for(worker) else room

    def _is_provided_for(self, worker: int) -> bool:
        """Whether a synchronous worker that has done its part had better wait: others are about to do the rest.

        What it began now would be too late as a rule, and the worker then late for the next update, too. Those that
        were late themselves are not counted on.
        """
        under_way = {lease.slice for lease in self._leases.values() if lease.worker not in self._late}
        has_done = any(lease.worker == worker for lease in self.held.values())
        return has_done and len(under_way | self.held.keys()) >= self.required

    def _fits(self, start: int) -> bool:
        """Whether it is of use to begin a slice now.

        Of synchronous workers: it may be in the next update, since fewer go before it than that takes. Of asynchronous
        ones: the gradients of all earlier epochs have come.
        """
        epoch = self._epoch(start)
        before = {other for other in self._open if self._epoch(other) < epoch}
        if self.staleness != 0:
            return before <= self.held.keys()
        before.update(other for other in self.held if self._epoch(other) == epoch)
        return len(before) < self.required

    def _epoch(self, start: int) -> int:
        return start // self._epoch_size if self._epoch_size else 0

    def _is_stale(self, lease: SliceLease) -> bool:
        return self.staleness is not None and self.version - lease.version > self.staleness

    def _give_up(self, worker: int) -> None:
        if self._leases.pop(worker, None) is not None:
            self.dropped[worker] += 1


class Futile:
    """Finds workers that compute for nothing: several gradients one after the other were dropped, and none was used."""

    def __init__(self) -> None:
        self._useful: dict[int, tuple[int, int]] = {}
        """Gradients of each worker that were used, and that had been dropped when that was seen."""
        self._found: set[int] = set()

    def find(self, used: Mapping[int, int], dropped: Mapping[int, int]) -> list[tuple[int, int]]:
        """Return each such worker once, with the number of its gradients that were dropped since one was used.

        The arguments are how many gradients of each worker were used, and dropped, so far.
        """
        found = []
        for worker, num_dropped in sorted(dropped.items()):
            if used.get(worker, 0) > self._useful.get(worker, (0, 0))[0]:
                self._useful[worker] = used[worker], num_dropped
            in_vain = num_dropped - self._useful.get(worker, (0, 0))[1]
            if in_vain >= _MANY_IN_VAIN and worker not in self._found:
                self._found.add(worker)
                found.append((worker, in_vain))
        return found
