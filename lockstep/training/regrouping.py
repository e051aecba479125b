"""What workers go on from after they have regrouped: the memory of one of them; and a script's loop that does.

After a failure, the workers that are left may be one update apart, and those that take the place of the lost have only
just been built. The memory of the worker that is furthest goes to all others, as a checkpoint that is on no disk.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.checkpoints.store import Checkpoint
from lockstep.data.loader import Loader
from lockstep.errors import PeerLostError
from lockstep.exchange.exchange import AllReduce, Exchange
from lockstep.screen import log
from lockstep.served.exchanges import is_served
from lockstep.training.handing_over import hand_over
from lockstep.training.preflight import check_data
from lockstep.training.replicas import checksum_of
from lockstep.training.saving import load_run, snapshot
from lockstep.training.state import TrainState
from lockstep.types import End, StepReport
from lockstep.workers.rank import Worker, generations_of, join, regroup


class SavePoint(NamedTuple):
    """How far the run in the memory of a worker is; the last one, in the order of a tuple, is the furthest."""

    stage: int
    """Stage of the run, counted from 1."""
    step: int
    position: int
    digest: str
    """Hash of the state's tensors and values: two workers at the same place are to have the same."""

    @classmethod
    def of(cls, state: TrainState, loader: Loader, stage: int = 1) -> SavePoint | None:
        """Return where this worker stands; None where an attempt is half done: nothing can go on from that."""
        if not state.is_settled:
            return None
        tensors = [tensor for members in state.sections().values() for tensor in members.values()]
        devices = dict.fromkeys(tensor.device for tensor in tensors)
        sums = [int(checksum_of([t for t in tensors if t.device == each], state.step)) for each in devices]
        text = json.dumps([sums, state.values()], sort_keys=True)
        return cls(stage, state.step, loader.position, hashlib.sha256(text.encode()).hexdigest()[:16])


def furthest(points: Sequence[SavePoint | None], prefer: Callable[[int], Any] = int.__neg__) -> int | None:
    """Return, of the ranks that stand the furthest, the one that is preferred most: the first, unless `prefer` says.

    None where there are none, or they are not alike.
    """
    known = [each for each in points if each is not None]
    if not known:
        return None
    place = max(each[:3] for each in known)
    there = {each for each in known if each[:3] == place}
    ranks = [rank for rank, each in enumerate(points) if each in there]
    return max(ranks, key=prefer) if len(there) == 1 else None


NUM_REPORTS = 2
"""Reports that are kept in memory: a chief may be lost before it has written down the last, on a GPU the last two."""


class Memory(NamedTuple):
    """What one worker keeps beside the parts of a run, so that other workers can go on with it."""

    reports: Sequence[StepReport] = ()
    """The last reports."""
    history: Mapping[int, float] = {}
    """The scores by which checkpoints are the best, by step."""

    @classmethod
    def of(cls, recent: Sequence[StepReport], loader: Loader, history: Mapping[int, float] | None = None) -> Memory:
        """Return the memory of this worker, whose loop body has seen the recent reports."""
        reports, last = list(recent), loader.last_report
        if last and (not reports or reports[-1].progress.position < last.progress.position):
            reports.append(last)  # lost before the loop body has seen it
        return cls(reports, history or {})

    def as_json(self) -> dict[str, Any]:
        """Return the memory as JSON."""
        reports = [report.as_json() for report in self.reports]
        return {"reports": reports, "history": list(self.history.items())}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Memory:
        """Return the memory of another worker."""
        reports = [StepReport.from_json(report) for report in facts["reports"]]
        return cls(reports, dict(facts["history"]))


class Recalled(NamedTuple):
    """The furthest place in the memory of the workers."""

    memory: Memory
    """What a worker there knows beside."""
    stage: int
    checkpoint: Checkpoint | None
    """To be loaded by this worker; None where it stands there."""


def agree_anew(worker: Worker, lost: str) -> str:
    """Have workers that have regrouped compute on as many threads as the chief; returns who was lost, as it knows."""
    who, threads = worker.group.broadcast([lost, torch.get_num_threads()])
    torch.set_num_threads(threads)
    return str(who)


def recall(
    state: TrainState,
    loader: Loader,
    worker: Worker,
    exchange: Exchange,
    own: Memory | None,
    *,
    stage: int = 1,
    prefer: Callable[[int], Any] = int.__neg__,
) -> Recalled | None:
    """Find the furthest place in memory, and hand what is there to all workers; nothing changes yet.

    All workers of a group call it together, each with its state, which is in a stage of the run; `own` is None on one
    that has taken no part in the run yet, or has not the whole state. See `furthest` for `prefer`.

    Returns:
        None where no memory will do: every worker was lost in the middle of an update, or those that stand the furthest
        are not alike.
    """
    point = SavePoint.of(state, loader, stage) if own else None
    gathered = worker.group.gather([point, own.as_json()] if own and point else None)
    points = [SavePoint(*each[0]) if each else None for each in gathered]
    source = furthest(points, prefer)
    there = None if source is None else points[source]
    if source is None or there is None:
        return None
    if None in gathered:
        check_data(loader, worker)
    checkpoint = None
    if len({*points}) > 1:
        transport = exchange.transport if isinstance(exchange, AllReduce) else None
        mine = None
        if worker.rank == source:
            step, tensors, values = snapshot(state, loader)
            mine = Checkpoint(step, Path(), tensors, values)
        checkpoint = hand_over(mine, worker, source, transport)
    return Recalled(Memory.from_json(gathered[source][1]), there.stage, None if point == there else checkpoint)


class BodyPlace(NamedTuple):
    """How far the loop body of a worker is."""

    loop: int
    """The number of the loop in the script, counted from 1."""
    begun: int
    """The position after the last attempt whose report the body was given."""
    ended: int
    """The position after the last attempt whose report the body is through with."""


class SurvivingLoop:
    """A loop of a script on one worker, which goes on when others are lost, and takes in those that join.

    The body of the loop gets each report once on each worker, whatever happens. A worker that joins gets the last one,
    too, where no other is through with it: all make the calls together that the body makes of all workers.

    Args:
        steps: trains from where the state and the loader stand, with the seconds that the loop has taken so far.
        state, loader, exchange, until: of these steps.
    """

    def __init__(
        self,
        steps: Callable[[float], Generator[StepReport, None, None]],
        state: TrainState,
        loader: Loader,
        exchange: Exchange,
        until: End | None,
    ) -> None:
        self._steps, self._state, self._loader, self._exchange, self._until = steps, state, loader, exchange, until
        self._worker, self._began = join(), time.perf_counter()
        self._generations = generations_of(self._worker)
        self._generations.num_loops += 1
        self._place = BodyPlace(self._generations.num_loops, loader.position, loader.position)
        self._takes_part = not self._worker.is_newcomer
        self._recent = deque[StepReport](maxlen=NUM_REPORTS)
        self._due = deque[StepReport]()
        """Reports that the loop body has still to see."""
        self._running: Generator[StepReport, None, None] | None = None

    def reports(self) -> Generator[StepReport, None, None]:
        """Train up to the end, and yield the reports.

        Raises:
            PeerLostError: the workers that are left cannot go on from memory.
        """
        try:
            if not self._takes_part:
                self._go_on("")
            while True:
                group, lost = self._worker.group, ""
                try:
                    if (yield from self._train()):
                        return
                except PeerLostError as error:
                    lost = str(error.given)
                # Outside of the except block, whose traceback would keep connections open.
                if self._worker.group is group:
                    self._go_on(lost)
        finally:
            self._generations.dismiss_newcomers()  # they begin with the first loop of the script

    def _train(self) -> Generator[StepReport, None, bool]:
        """Train until the loop is over: true; or until it goes on with other workers, or is to."""
        group = self._worker.group
        while self._due:
            yield from self._body(self._due.popleft())
            if self._worker.group is not group:
                return False
        with closing(self._steps(time.perf_counter() - self._began)) as self._running:
            for report in self._running:
                yield from self._body(report)
                if self._worker.group is not group or (report.regroup_requested and not self._ends_with(report)):
                    return False
        group.barrier("the loop has ended")  # with a worker that has left nobody could make up for it
        return True

    def _ends_with(self, report: StepReport) -> bool:
        is_at_end = self._until is not None and self._until.reached(report.progress, self._loader.batch_size)
        return is_at_end or report.stop_requested

    def _body(self, report: StepReport) -> Generator[StepReport, None, None]:
        self._recent.append(report)
        position = report.progress.position
        self._place = self._place._replace(begun=position)
        self._generations.recover = self._recover
        try:
            yield report
        finally:
            self._generations.recover = None
        self._place = self._place._replace(ended=position)

    def _recover(self, lost: str) -> None:
        """Go on with those that are left, in the middle of the loop body."""
        if self._running is not None:
            self._running.close()
        self._go_on(lost)

    def _go_on(self, lost: str) -> None:
        """Go on with the workers that there are now, from memory."""
        while True:
            regroup()
            try:
                can_go_on = self._recall(lost)
            except PeerLostError as error:
                lost = str(error.given)
            else:
                break
        if not can_go_on:
            if self._worker.is_chief:
                log.warning("the workers that are left cannot go on from memory: they stand apart, or are not alike")
            raise PeerLostError(
                f"{self._worker.name} cannot go on without those that are lost.",
                given=lost,
                expected="workers in the same loop, at the same step of its body, whose states there are alike",
                hint="start all again: lockstep run --restarts 3",
            )

    def _recall(self, lost: str) -> bool:
        worker, exchange = self._worker, self._exchange
        agree_anew(worker, lost)
        # Where the chief serves an exchange, it alone has the whole state.
        has_state = self._takes_part and (worker.is_chief or not is_served(exchange))
        own = Memory.of([*self._recent, *self._due], self._loader) if has_state else None
        gathered = worker.group.gather(self._place if self._takes_part else None)
        places = {rank: BodyPlace(*each) for rank, each in enumerate(gathered) if each}
        if len({each.loop for each in places.values()}) > 1:
            return False

        def progress(rank: int) -> tuple[int, int]:
            """Orders workers by what is in `stateful`: after a body rather than in it."""
            return places[rank].ended, -places[rank].begun

        recalled = recall(self._state, self._loader, worker, exchange, own, prefer=progress)
        if recalled is None:
            return False
        reports = recalled.memory.reports
        here = reports[-1].progress.position if reports else self._place.ended
        if not may_go_on(places.values(), here):
            return False
        if recalled.checkpoint:
            load_run(
                recalled.checkpoint,
                {"": self._state},
                self._loader,
                accept_data_change=True,
                keeps_stateful=self._takes_part,  # the bodies that this worker has run have led to it
            )
        if not self._takes_part:
            self._join_in(here, reports, is_due=all(each.ended < here for each in places.values()))
        known = max([self._place.begun, *(each.progress.position for each in self._due)])
        self._due.extend(report for report in reports if report.progress.position > known)
        if worker.is_chief:
            log.info("going on from step %d, position %d, from memory", self._state.step, self._loader.position)
        return True

    def _join_in(self, here: int, reports: Sequence[StepReport], *, is_due: bool) -> None:
        """Take part from now on: the body gets the last report where the others are not through with it."""
        if reports:
            self._began = time.perf_counter() - reports[-1].progress.elapsed_seconds
        self._recent.extend(reports[:-1] if is_due else reports)
        before = here - self._loader.batch_size if reports and is_due else here
        self._place = self._place._replace(begun=before, ended=before)
        self._takes_part = True


def may_go_on(places: Collection[BodyPlace], here: int) -> bool:
    """Whether the loop bodies of the workers that are left will make the same calls from position `here` on.

    Where a body was cut off in a call of all workers, it has to be the one at this place, and no other worker may be
    through with it: who has not begun it will make that call, too.
    """
    cut_off = [each for each in places if each.begun > each.ended]
    alike = all(each.begun == here for each in cut_off) and all(each.ended < here for each in places)
    return alike or not cut_off
