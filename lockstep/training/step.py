"""The training step, from a batch to a report: towers, exchange, update."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lockstep import readback
from lockstep.errors import InputError
from lockstep.parallel.exchange import AllReduce, Counts, Exchange, Reducer, is_exact
from lockstep.parallel.hosting import StepInputs, TowerBatch, TowerHost
from lockstep.parallel.statistics import restored
from lockstep.parallel.towers import Towers
from lockstep.parallel.tree import TreeSum, assign_towers
from lockstep.progress import Progress
from lockstep.screen import log
from lockstep.training.attempt import Attempt, Begun, Enqueued, Found, Outcome
from lockstep.training.extras import Extras, ExtraSums
from lockstep.training.missing_gradients import MissingGradients
from lockstep.training.nonfinite import handle
from lockstep.training.preflight import (
    check_buffers,
    check_parameters,
    check_state_and_towers,
    check_training_mode,
    prepare_steps,
)
from lockstep.training.replicas import Replicas
from lockstep.training.state import TrainState
from lockstep.training.trained_with import compare_first_step
from lockstep.types import BadExample, Batch, NonFiniteReport, StepReport
from lockstep.workers.rank import Worker, join
from lockstep.workers.signals import interruptible, uninterrupted

if TYPE_CHECKING:
    from lockstep.types import CountFunction, LossFunction


_steps: WeakKeyDictionary[TrainState, dict[tuple[Towers, Exchange], BoundStep]] = WeakKeyDictionary()
"""The steps of each state, by towers and exchange; they live as long as the state."""


def train_step(
    state: TrainState,
    losses: LossFunction,
    batch: Batch,
    towers: Towers | None = None,
    exchange: Exchange | None = None,
    *,
    counts: CountFunction | None = None,
) -> StepReport:
    """Make one update of one state from one batch, in a loop of your own.

    Only this state's parameters get gradients, whatever other models the loss uses, and the buffers of other states'
    models are put back.

    A KeyboardInterrupt, or what a SIGINT handler of your own raises, comes out of the loss function or the wait for
    other workers, and then nothing has changed; or else after the attempt as a whole: update, average and position.

    Args:
        state: what is updated.
        losses: `losses(model, batch)`, returning named losses or (losses, metrics), each the mean over a tower's
            examples. The mean over all towers is reported. What it draws from the global generators of torch, numpy and
            Python depends on the seed, the position and the tower alone; afterwards they are where they were.
        batch: this worker's examples, from `batches`.
        towers: how the batch is split; one tower a worker by default.
        exchange: how the workers' gradients become one; `AllReduce()` by default.
        counts: `counts(batch)`, returning for some losses, by name, how many things they are sums over: such a loss is
            divided by the count over all towers, so that an uneven batch weighs each thing alike; by 1 where there is
            nothing. It must be known from the batch. Where it depends on the model's output (a detector that samples
            its proposals), leave the loss out: it is then a mean per tower.

    Raises:
        InputError: the loss function returned something else than named scalars that depend on the parameters; or the
            model is in evaluation mode, or has parameters that were replaced or frozen since the state was made.
        CheckpointError: the model has what no checkpoint could hold.
        NonFiniteError: see `TrainState`.
        PeerLostError: another worker is gone.
    """
    return bind(state, towers, exchange)(losses, batch, counts)


def bind(state: TrainState, towers: Towers | None = None, exchange: Exchange | None = None) -> BoundStep:
    """Return the step of this state with these towers and this exchange; it is made at the first call.

    Raises:
        InputError: a part has the wrong type, or the state is one that only the chief has the whole of.
    """
    check_state_and_towers(state, towers)
    worker = join()
    key = (towers or Towers(worker.num_workers), exchange or AllReduce())
    if state.is_served and worker.num_workers > 1:
        raise InputError(
            "The chief alone has the optimizer's slots of this state: it has served the other workers.",
            given=f"{key[1]} after Backups or Asynchronous",
            expected="one kind of exchange for a state, or a resume in between",
            hint='save it, and ls.resume(state, loader, DIR, changed=("exchange",)) on all workers',
        )
    if state.resumed:
        compare_first_step(state, *key, worker)
    steps = _steps.get(state, {})
    if key not in steps or steps[key].worker is not worker:  # which another group has taken the place of
        before = steps.get(key)
        steps[key] = BoundStep(state, *key, worker, before)
        _steps[state] = steps
    return steps[key]


class BoundStep:
    """The step of one state, connected with the other workers.

    An attempt in four parts: run this worker's towers, exchange their sums, apply the totals, report.
    """

    def __init__(
        self,
        state: TrainState,
        towers: Towers,
        exchange: Exchange,
        worker: Worker,
        before: BoundStep | None = None,
    ) -> None:
        prepare_steps(state, towers, exchange, worker)
        self.towers, self.worker = towers, worker
        self._mine = assign_towers(towers.count, worker.num_workers)[worker.rank]
        # The state keeps its steps; it is to be gone with its last name, not when cycles are collected.
        self._state = cast("TrainState", weakref.proxy(state))
        self._host = TowerHost(
            state.model,
            state.parameters,
            towers,
            worker,
            state.name,
            state.tower_transforms,
            state.frozen.norms,
            exact=is_exact(exchange),
        )
        num_leaves, mine = (worker.num_workers, [worker.rank]) if towers.joined else (towers.count, list(self._mine))
        self._reducer = Reducer(exchange, worker, num_leaves, mine)
        self._missing = MissingGradients(self._state, num_leaves, is_chief=worker.is_chief)
        self._replicas = Replicas(self._state, worker)
        self._extras = ExtraSums(self._replicas, worker)
        self._extras.started = self._resumed = time.perf_counter()
        self._num_runs = 0
        self.resolved_for: tuple[int, int] | None = None
        """The sizes of epoch and batch for which the state has turned lengths in epochs into steps."""
        self.runs_ahead = readback.reading_waits(worker.device)
        """Updates may be enqueued before their attempts are read."""
        if before is not None:  # of the group that this one has taken the place of
            self.resolved_for, self._missing.told = before.resolved_for, before._missing.told
        if reasons := state.reads_first():
            self._read_first("; ".join(reasons))

    def start(self) -> None:
        """Begin a series of steps: its clock starts at 0.

        Raises:
            InputError: the model has changed since the state was made.
        """
        self._extras.started = self._resumed = time.perf_counter()
        check_parameters(self._state)
        check_buffers(self._state)

    def __call__(self, losses: LossFunction, batch: Batch, counts: CountFunction | None = None) -> StepReport:
        """Make one attempt; see `train_step`."""
        # A KeyboardInterrupt comes out of the loss function, the wait for other workers, or after the attempt.
        with uninterrupted():
            return self._finish(self._begin(losses, batch, counts, self._state.step), losses)

    # In parts, for a device that is to work while the host reads -----------------------------------------------------

    def begin(
        self, losses: LossFunction, batch: Batch, counts: CountFunction | None = None, *, is_after: bool = False
    ) -> Begun:
        """Compute an attempt; `is_after` says that an update before it is enqueued, and taken to be good."""
        with uninterrupted():
            return self._begin(losses, batch, counts, self._state.step + is_after, is_kept=True)

    def finish(self, begun: Begun, losses: LossFunction, counts: CountFunction | None = None) -> StepReport:
        """Read an attempt, and make its update or refuse it; one that has to be made again is computed anew."""
        with uninterrupted():
            if begun.proposal.attempt.unexpected is not None:
                found = begun.proposal.read(self.worker.group.check_peers)
                if self._is_unexpected(found):
                    begun = self._begin(losses, begun.batch, counts, self._state.step)
            return self._finish(begun, losses)

    def can_enqueue(self, begun: Begun) -> bool:
        """Whether the update can be enqueued before the attempt is read; all workers find the same."""
        has_bad = self.worker.num_workers == 1 and len(begun.batch.bad) > 0
        return self.runs_ahead and begun.proposal.unread is not None and not has_bad

    def enqueue(self, begun: Begun) -> Enqueued:
        """Enqueue the update of an attempt that is not read; the device makes none that is not finite."""
        batch, inputs, _, proposal, *_ = begun
        assert proposal.unread is not None, "asked by can_enqueue"
        with uninterrupted(), torch.no_grad():
            self._state.is_settled = False
            found_inf = self._state.found_inf(proposal)
            if found_inf is not None and proposal.attempt.statistics:
                self._host.statistics.hold_back(found_inf)
            self._state.update(proposal, found_inf=found_inf)
        return Enqueued(batch, inputs, proposal.unread)

    def complete(self, enqueued: Enqueued) -> StepReport | None:
        """Read what has become of an update that is enqueued, and report it; None if the device has made none."""
        batch, inputs, unread = enqueued
        with uninterrupted(), torch.no_grad():
            found = unread.read(self.worker.group.check_peers)
            extras = self._extras.read(found, batch.position)
            if self._is_unexpected(found) or extras.num_bad or self._state.refuses(found, inputs.loss_scale):
                return None
            outcome = self._state.settle(found, inputs.loss_scale)
            return self._report(batch, outcome, found, extras, time.perf_counter() - self._resumed)

    def is_stale(self, begun: Begun) -> bool:
        """Whether an attempt was computed with something else than what is there now."""
        state, inputs = self._state, begun.inputs
        if begun.changes_of_others != state.changes_of_others:
            self._read_first("the loop body trains another model")  # as for a GAN, and will again
            return True
        loss_scale = None if inputs.loss_scale is None else state.loss_scale.value
        return (inputs.step, inputs.loss_scale, begun.versions) != (state.step, loss_scale, self._versions())

    def _is_unexpected(self, found: Found) -> bool:
        """Whether an attempt has other parameters without gradients than it was computed for."""
        if not found.num_unexpected:
            return False
        if not self._missing.forget():
            self._read_first("which parameters have no gradient changes too often")
        return True

    def _read_first(self, why: str) -> None:
        """Make no attempt from now on that may have to be made again."""
        if self.runs_ahead and self.worker.is_chief:
            log.info("each step waits for the device before its update: %s", why)
        self.runs_ahead = False

    def compare(self) -> None:
        """Compare the copies of the state on all workers, which call it together; see `Replicas`."""
        self._replicas.compare()

    def resume(self) -> None:
        """The loop body is over: the clock of the next step begins."""
        self._resumed = time.perf_counter()

    def rehearse(self, losses: LossFunction, batch: Batch, counts: CountFunction | None = None) -> None:
        """Compute losses and gradients of a batch, and forget them; all workers call it together."""
        self._check_dealing(batch)
        parts = self._host.parts(batch)
        of_parts = [counts(part) for _, _, part in parts] if counts else []
        inputs = self._inputs(batch, of_parts, self._state.step, time.perf_counter())
        self._run_towers(losses, parts, inputs, is_rehearsal=True)
        self.worker.pulse.at(self._state.step, "start")

    # Its parts ------------------------------------------------------------------------------------------------------

    def _begin(
        self, losses: LossFunction, batch: Batch, counts: CountFunction | None, step: int, *, is_kept: bool = False
    ) -> Begun:
        """Run this worker's towers, exchange their sums, and propose the update that follows `step` completed ones."""
        began = time.perf_counter()
        self._check(batch)
        parts = self._host.parts(batch)
        if is_kept:  # it may be begun again, from the fields as they are: what the loss function writes there is gone
            parts = [part._replace(batch=replace(part.batch, fields=part.batch)) for part in parts]
            before = _versions_of(batch)
        inputs = self._inputs(batch, [counts(part) for _, _, part in parts] if counts else [], step, began)
        sums = self._run_towers(losses, parts, inputs)
        is_late = is_kept and self.runs_ahead
        proposal = self._state.propose(self._attempt(sums, inputs.loss_scale, batch.position, is_late=is_late))
        if is_kept and _versions_of(batch) != before:
            self._read_first("the loss function changes its batch in place")
        versions = self._versions() if is_kept else []
        return Begun(batch, inputs, sums, proposal, versions, self._state.changes_of_others, began)

    def _finish(self, begun: Begun, losses: LossFunction) -> StepReport:
        batch, inputs, sums, proposal, *_, began = begun
        found = proposal.read(self.worker.group.check_peers)
        extras = self._extras.read(found, batch.position)
        bad = self._extras.gather_bad(batch) if extras.num_bad else ()
        self._state.is_settled = False
        outcome = self._state.decide(proposal, found)
        nonfinite = None
        if outcome.skipped:
            nonfinite = handle(outcome, self._state, self._host, losses, batch, sums, inputs.counts, self.worker)
        seconds = batch.wait_seconds + time.perf_counter() - began
        return self._report(batch, outcome, found, extras, seconds, nonfinite, bad)

    def _report(
        self,
        batch: Batch,
        outcome: Outcome,
        found: Found,
        extras: Extras,
        seconds: float,
        nonfinite: NonFiniteReport | None = None,
        bad: tuple[BadExample, ...] = (),
    ) -> StepReport:
        """Report an attempt that is over, and commit its batch."""
        end = batch.position + batch.batch_size
        report = StepReport(
            progress=Progress(self._state.step, end, batch.epoch_size, extras.elapsed_seconds),
            losses=outcome.losses,
            smoothed=self._state.smoothed.now(),
            metrics=self._host.outputs.metrics(found.others),
            learning_rate=next(iter(outcome.learning_rates.values())),
            gradient_norm=outcome.gradient_norm,
            num_examples=batch.batch_size,
            step_seconds=seconds,
            wait_seconds=min(batch.wait_seconds, seconds),
            skipped=outcome.skipped,
            learning_rates=outcome.learning_rates,
            nonfinite=nonfinite,
            stage_seconds=batch.stage_seconds,
            queue_fill=batch.queue_fill,
            bad=bad,
            stop_requested=extras.num_stops > 0,
            regroup_requested=extras.num_regroups > 0,
        )
        if batch.loader is not None:
            batch.loader.commit(batch, report)
        self._state.is_settled = True
        self.worker.pulse.at(self._state.step, "loop body")
        return report

    def _versions(self) -> list[int]:
        """Those of the state; and the towers' runs, since each takes the memory in which the one before was summed."""
        return [self._num_runs, *self._state.versions()]

    def _check(self, batch: Batch) -> None:
        """Refuse a batch or a model that cannot be trained on; resolve lengths in epochs when the stream is new."""
        self._check_dealing(batch)
        stream = (batch.epoch_size, batch.batch_size)
        if self.resolved_for != stream:
            for line in self._state.resolve(*stream):
                if self.worker.is_chief:
                    log.info("%s", line)
            self.resolved_for = stream

    def _check_dealing(self, batch: Batch) -> None:
        """Refuse a batch of other towers, or a model in evaluation mode."""
        if batch.towers != self._mine:
            raise InputError(
                "This batch was cut for other towers than it is to be computed on.",
                given=f"a batch for towers {list(batch.towers)}",
                expected=f"one for towers {list(self._mine)}: {self.worker.name}'s of {self.towers.count}",
                hint="give `batches` and `train_step` the same Towers",
            )
        check_training_mode(self._state)

    def _inputs(self, batch: Batch, counts: Sequence[Counts], step: int, began: float) -> StepInputs:
        return StepInputs(
            step,
            self._reducer.counted(counts) if counts else {},
            self._state.loss_scale.value if self.towers.precision == "fp16" else None,
            self._extras.own(batch, step, began),
        )

    def _run_towers(
        self, losses: LossFunction, parts: Sequence[TowerBatch], inputs: StepInputs, *, is_rehearsal: bool = False
    ) -> TreeSum:
        """Run this worker's towers; the buffers of other states' models, if the loss uses them, are restored.

        Raises:
            InputError: parameters have changed since the state was made, which may be why they fail.
        """
        self._num_runs += 1
        is_first = self._host.outputs.names is None
        self.worker.pulse.at(inputs.step, "first step" if is_first else "compute")
        try:
            others = self._state.other_buffers()
            with restored(others) if others else nullcontext():
                sums = self._host.run(losses, parts, inputs, None if is_rehearsal else self._reducer.overlapped)
        except (RuntimeError, InputError):
            check_parameters(self._state)
            raise
        self.worker.pulse.at(inputs.step, "exchange")
        if is_first:
            names = [list(some) for some in self._host.outputs.names or ()]
            self.worker.group.agree("the names of losses and metrics", names)
        return sums

    # Between the workers --------------------------------------------------------------------------------------------

    def _attempt(self, sums: TreeSum, loss_scale: float | None, position: int, *, is_late: bool) -> Attempt:
        """Sum over the towers of all workers; `is_late` says that nothing may be read here."""
        with interruptible():
            total = self._reducer.total(sums)
        totals = self._host.outputs.unpacked(total)
        statistics = self._host.statistics
        others, withheld = totals.others, None
        find = self._missing.expected if is_late else lambda *of: (self._missing.left_out(*of), None)
        gradients, unexpected = find(totals, self._host.absent)
        if isinstance(others, Tensor) and self.worker.num_workers > 1:
            withheld = self._extras.withheld(others, position)
            withheld = withheld if unexpected is None else withheld + unexpected
        return Attempt(
            gradients,
            statistics.combined(totals.statistics),
            totals.losses,
            totals.rows,
            loss_scale,
            total.owned,
            statistics.check_sums(totals.statistics),
            others,
            withheld,
            unexpected,
        )


def _versions_of(batch: Batch) -> list[int]:
    """Numbers that grow with each change in place of a field."""
    return [value._version for value in batch.values() if isinstance(value, Tensor) and not value.is_inference()]
