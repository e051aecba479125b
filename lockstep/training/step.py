"""The training step, from a batch to a report: towers, exchange, update."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lockstep.errors import InputError
from lockstep.exchange.exchange import AllReduce, Counts, Exchange, Reducer, is_exact
from lockstep.exchange.tree import TreeSum, assign_towers
from lockstep.screen import log
from lockstep.spans import span
from lockstep.tensors import reading_waits
from lockstep.towers.backends import chosen_by_timing
from lockstep.towers.hosting import StepInputs, TowerBatch, TowerHost
from lockstep.towers.statistics import restored
from lockstep.towers.tower_outputs import MissingGradients
from lockstep.towers.towers import Towers, counted_towers
from lockstep.training import preflight
from lockstep.training.attempt import Attempt, Given, Outcome, PendingAttempt, PendingUpdate, Readings, versions_of
from lockstep.training.extras import Extras, ExtraSums
from lockstep.training.memory import is_lack_of_memory, note_on_memory
from lockstep.training.nonfinite import handle
from lockstep.training.replay import Replay
from lockstep.training.replicas import Replicas
from lockstep.training.state import TrainState
from lockstep.types import BadExample, Batch, FaultError, NonFiniteReport, Progress, StepReport
from lockstep.workers.rank import Worker, join
from lockstep.workers.signals import interruptible, uninterrupted

if TYPE_CHECKING:
    from lockstep.exchange.exchange import OverlappedConnection
    from lockstep.types import CountFunction, LossFunction


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
            model is in evaluation mode, or has parameters that were replaced or frozen since the state was made; or the
            script is to go on when workers are lost, which loops of `train_steps` alone can.
        CheckpointError: the model has what no checkpoint could hold.
        NonFiniteError: see `TrainState`.
        PeerLostError: another worker is gone.
    """
    worker = join()
    if worker.pulse.generations is not None and worker.num_started > 1:
        raise InputError(
            "A loop of batches and train_step cannot go on when a worker is lost.",
            given="train_step in a script under --on-failure continue",
            expected="a loop of train_steps, train or run: where the body of a loop makes the steps, as for a GAN, "
            "some states may have made their update and others not, and nothing is to go on from",
            hint="lockstep run --restarts 3, without --on-failure: all start again from the last checkpoint",
        )
    return bind(state, towers, exchange)(losses, batch, counts)


def bind(state: TrainState, towers: Towers | None = None, exchange: Exchange | None = None) -> BoundStep:
    """Return the step of this state with these towers and this exchange; it is made at the first call.

    Raises:
        InputError: a part has the wrong type, or the state is one that only the chief has the whole of.
    """
    preflight.check_state_and_towers(state, towers)
    worker = join()
    key = (counted_towers(towers, worker.num_workers), exchange or AllReduce())
    if state.is_served and worker.num_workers > 1:
        raise InputError(
            "The chief alone has the optimizer's slots of this state: it has served the other workers.",
            given=f"{key[1]} after Backups or Asynchronous",
            expected="one kind of exchange for a state, or a resume in between",
            hint='save it, and ls.resume(state, loader, DIR, changed=("exchange",)) on all workers',
        )
    if state.resumed:
        preflight.compare_first_step(state, *key, worker)
    step: BoundStep | None = state.steps.get((BoundStep, *key))
    if step is None or step.group is not worker.group:  # which another group has taken the place of
        step = state.steps[BoundStep, *key] = BoundStep(state, *key, worker, step)
    return step


class Step:
    """What the steps of a state have in common, whoever makes the update: the towers of this worker, and the report.

    `before` is the step of the group that this worker's group has taken the place of.
    """

    def __init__(
        self, state: TrainState, towers: Towers, host: TowerHost, reducer: Reducer, worker: Worker, before: Step | None
    ) -> None:
        # The state keeps its steps; it is to be gone with its last name, not when cycles are collected.
        self.state = cast("TrainState", weakref.proxy(state))
        self.towers, self.worker, self._host, self._reducer = towers, worker, host, reducer
        self.group = worker.group
        self._missing = MissingGradients(
            [*state.parameters],
            state.penalised,
            reducer.num_leaves,
            is_chief=worker.is_chief,
            check=partial(preflight.check_parameters, self.state),
        )
        if before is not None:
            self._missing.told = before._missing.told
        self._started = self._resumed = time.perf_counter()

    def start(self, elapsed_seconds: float = 0.0) -> None:
        """Begin a series of steps: its clock starts at 0, or where it stands if the series goes on.

        Raises:
            InputError: the model has changed since the state was made.
        """
        self._resumed = time.perf_counter()
        self._started = self._resumed - elapsed_seconds
        preflight.check_parameters(self.state)
        preflight.check_buffers(self.state)

    def resume(self) -> None:
        """The loop body is over: the clock of the next step begins."""
        self._resumed = time.perf_counter()

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the next gradients; None where losses are not scaled."""
        return self.state.loss_scale.value if self.towers.precision == "fp16" else None

    def _resolve(self, epoch_size: int, batch_size: int) -> None:
        """Turn lengths in epochs into steps, once the stream is known."""
        for line in self.state.resolve(epoch_size, batch_size):
            if self.worker.is_chief:
                log.info("%s", line)

    def _run(
        self,
        losses: LossFunction,
        parts: Sequence[TowerBatch],
        inputs: StepInputs,
        overlapped: OverlappedConnection | None = None,
    ) -> TreeSum:
        """Run this worker's towers; the buffers of other states' models, if the loss uses them, are restored.

        Raises:
            InputError: parameters have changed since the state was made, which may be why they fail.
        """
        try:
            others = self.state.other_buffers()
            with restored(others) if others else nullcontext():
                return self._host.run(losses, parts, inputs, overlapped)
        except (RuntimeError, InputError, MemoryError) as error:
            if is_lack_of_memory(error):
                _, tower, part = parts[min(len(self._host.leaves), len(parts) - 1)]
                error.add_note(note_on_memory(part, tower, self.towers, self.worker.device))
            preflight.check_parameters(self.state)
            raise

    def _report_of(
        self, outcome: Outcome, readings: Readings, position: int, epoch_size: int, elapsed_seconds: float, **more: Any
    ) -> StepReport:
        """Report an attempt; `position` is where the stream stands after it, `more` are further fields."""
        return StepReport(
            progress=Progress(self.state.step, position, epoch_size, elapsed_seconds),
            losses=outcome.losses,
            smoothed=self.state.smoothed.now(),
            metrics=self._host.outputs.metrics(readings.others),
            learning_rate=next(iter(outcome.learning_rates.values())),
            gradient_norm=outcome.gradient_norm,
            skipped=outcome.skipped,
            learning_rates=outcome.learning_rates,
            **more,
        )


class BoundStep(Step):
    """The step of one state, connected with the other workers.

    An attempt in four parts: run this worker's towers, exchange their sums, apply the totals, report.
    """

    def __init__(
        self, state: TrainState, towers: Towers, exchange: Exchange, worker: Worker, before: BoundStep | None = None
    ) -> None:
        preflight.prepare_steps(state, towers, exchange, worker, was_made=before is not None)
        self._mine = assign_towers(towers.num_towers, worker.num_workers)[worker.rank]
        num_leaves, mine = (
            (worker.num_workers, [worker.rank]) if towers.joined else (towers.num_towers, list(self._mine))
        )
        reducer = Reducer(exchange, worker, num_leaves, mine)
        host = TowerHost(
            state.model,
            state.parameters,
            towers,
            worker,
            state.name,
            state.tower_transforms,
            state.frozen.norms,
            exact=is_exact(exchange),
            sends_early=reducer.overlapped is not None,
        )
        super().__init__(state, towers, host, reducer, worker, before)
        self._replicas = Replicas(self.state, worker) if worker.num_workers > 1 else None
        self._extras = ExtraSums(self._replicas, worker)
        is_split = towers.joined and worker.num_workers > 1
        timed = chosen_by_timing(towers, worker.device, exact=is_exact(exchange))
        self._replay = Replay(
            self.state,
            host,
            worker,
            exchange.transport if isinstance(exchange, AllReduce) else None,
            "the towers of synchronised batch norm run on all workers at once" if is_split else "",
            f"with {timed[0]} each worker times its kernels, and may round otherwise than the next one"
            if timed
            else "",
        )
        self._num_runs = 0
        self._refused_at = -1
        """The position of an attempt that was not finite, and is to be made again to be read at once."""
        self.resolved_for: tuple[int, int] | None = before.resolved_for if before else None
        """The sizes of epoch and batch for which the state has turned lengths in epochs into steps."""
        self.runs_ahead = reading_waits(worker.device)
        """Updates may be enqueued before their attempts are read."""
        if reasons := state.reads_first():
            self._read_first("; ".join(reasons))

    def __call__(self, losses: LossFunction, batch: Batch, counts: CountFunction | None = None) -> StepReport:
        """Make one attempt; see `train_step`."""
        # A KeyboardInterrupt comes out of the loss function, the wait for other workers, or after the attempt.
        with uninterrupted():
            return self._finish(self._begin(losses, batch, counts, self.state.step))

    # In parts, for a device that is to work while the host reads -----------------------------------------------------

    def begin(
        self, losses: LossFunction, batch: Batch, counts: CountFunction | None = None, *, is_after: bool = False
    ) -> PendingAttempt:
        """Compute an attempt; `is_after` says that an update before it is enqueued, and taken to be good."""
        with uninterrupted():
            return self._begin(losses, batch, counts, self.state.step + is_after, is_kept=True)

    def finish(self, pending: PendingAttempt, losses: LossFunction, counts: CountFunction | None = None) -> StepReport:
        """Read an attempt, and make its update or refuse it; one that has to be made again is computed anew."""
        with uninterrupted():
            if pending.proposal.attempt.unexpected is not None:
                readings = pending.proposal.read(self.worker.group.check_peers)
                if self._is_unexpected(readings):
                    pending = self._begin(losses, pending.batch, counts, self.state.step)
            return self._finish(pending)

    def can_enqueue(self, pending: PendingAttempt) -> bool:
        """Whether the update can be enqueued before the attempt is read; all workers find the same."""
        has_bad = self.worker.num_workers == 1 and len(pending.batch.bad) > 0
        return self.runs_ahead and pending.proposal.pending is not None and not has_bad

    def enqueue(self, pending: PendingAttempt) -> PendingUpdate:
        """Enqueue the update of an attempt that is not read; the device makes none that is not finite."""
        batch, given, _, proposal, *_ = pending
        assert proposal.pending is not None, "asked by can_enqueue"
        with uninterrupted(), torch.no_grad():
            found_inf = self.state.found_inf(proposal)
            if found_inf is not None and proposal.attempt.statistics:
                self._host.statistics.hold_back(found_inf)
            self.state.update(proposal, found_inf=found_inf)
        return PendingUpdate(batch, given, proposal.pending)

    def complete(self, update: PendingUpdate) -> StepReport | None:
        """Read what has become of an update that is enqueued, and report it; None if the device has made none."""
        batch, given, pending = update
        loss_scale = given.inputs.loss_scale
        with uninterrupted(), torch.no_grad():
            readings = pending.read(self.worker.group.check_peers)
            extras = self._read_extras(readings, given)
            if is_refused := self.state.refuses(readings, loss_scale):
                self._refused_at = batch.position
            if self._is_unexpected(readings) or extras.num_bad or is_refused:
                return None
            outcome = self.state.settle(readings, loss_scale)
            return self._report(batch, outcome, readings, extras, time.perf_counter() - self._resumed)

    def is_stale(self, pending: PendingAttempt) -> bool:
        """Whether an attempt was computed with something else than what is there now."""
        state, inputs = self.state, pending.given.inputs
        if pending.changes_of_others != state.changes_of_others:
            self._read_first("the loop body trains another model")  # as for a GAN, and will again
            return True
        loss_scale = None if inputs.loss_scale is None else state.loss_scale.value
        return (inputs.step, inputs.loss_scale, pending.versions) != (state.step, loss_scale, self._versions())

    def _is_unexpected(self, readings: Readings) -> bool:
        """Whether an attempt has other parameters without gradients than it was computed for."""
        if not readings.num_unexpected:
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
        if self._replicas is not None:
            self._replicas.compare()

    def rehearse(self, losses: LossFunction, batch: Batch, counts: CountFunction | None = None) -> None:
        """Compute losses and gradients of a batch, and forget them; all workers call it together."""
        self._check_dealing(batch)
        parts = self._host.parts(batch)
        of_parts = [counts(part) for _, _, part in parts] if counts else []
        inputs = self._inputs(batch, of_parts, self.state.step, time.perf_counter())
        self._run_towers(losses, parts, inputs, sends_early=False)
        self.worker.pulse.at(self.state.step, "start")

    # Its parts ------------------------------------------------------------------------------------------------------

    def _begin(
        self, losses: LossFunction, batch: Batch, counts: CountFunction | None, step: int, *, is_kept: bool = False
    ) -> PendingAttempt:
        """Run this worker's towers, exchange their sums, and propose the update that follows `step` completed ones."""
        began = time.perf_counter()
        self._check(batch)
        parts = self._host.parts(batch)
        fields, before = dict(batch), versions_of(batch)
        if is_kept:  # it may be begun again, from the fields as they are: what the loss function writes there is gone
            parts = [part._replace(batch=replace(part.batch, fields=part.batch)) for part in parts]
        inputs = self._inputs(batch, [counts(part) for _, _, part in parts] if counts else [], step, began)
        given = Given(losses, counts, batch, fields, inputs, before)
        is_replayed = self._replay.begin(given)
        sums = self._run_towers(losses, parts, inputs, sends_early=not is_replayed)
        if self._replay.end(given):
            sums = self._run_towers(losses, parts, inputs, sends_early=False)
        is_late = is_kept and self.runs_ahead
        proposal = self.state.propose(self._attempt(sums, inputs.loss_scale, batch.position, is_late=is_late))
        if is_kept and versions_of(batch) != before:
            self._read_first("the loss function changes its batch in place")
        versions = self._versions() if is_kept else []
        return PendingAttempt(batch, given, sums, proposal, versions, self.state.changes_of_others, began)

    def _finish(self, pending: PendingAttempt) -> StepReport:
        batch, given, sums, proposal, *_, began = pending
        readings = proposal.read(self.worker.group.check_peers)
        extras = self._read_extras(readings, given)
        bad = self._extras.gather_bad(batch) if extras.num_bad else ()
        outcome = self.state.decide(proposal, readings)
        if self._refused_at == batch.position and not outcome.skipped:
            self._replay.has_passed(given)
        self._refused_at = -1
        nonfinite = None
        if outcome.skipped:
            again = partial(self._replay.of_nonfinite, given)
            nonfinite = handle(outcome, self.state, self._host, given, batch, sums, self.worker, again)
        seconds = batch.wait_seconds + time.perf_counter() - began
        return self._report(batch, outcome, readings, extras, seconds, nonfinite, bad)

    def _read_extras(self, readings: Readings, given: Given) -> Extras:
        """Read what travels with the losses; where the copies of the state differ, make the attempt again."""
        try:
            return self._extras.read(readings, given.batch.position)
        except FaultError as error:
            raise self._replay.of_replicas(error, given) from None

    def _report(
        self,
        batch: Batch,
        outcome: Outcome,
        readings: Readings,
        extras: Extras,
        seconds: float,
        nonfinite: NonFiniteReport | None = None,
        bad: tuple[BadExample, ...] = (),
    ) -> StepReport:
        """Report an attempt that is over, and commit its batch."""
        report = self._report_of(
            outcome,
            readings,
            batch.position + batch.batch_size,
            batch.epoch_size,
            extras.elapsed_seconds,
            num_examples=batch.batch_size,
            step_seconds=seconds,
            wait_seconds=min(batch.wait_seconds, seconds),
            nonfinite=nonfinite,
            stage_seconds=batch.stage_seconds,
            queue_fill=batch.queue_fill,
            bad=bad,
            stop_requested=extras.num_stops > 0,
            regroup_requested=extras.num_regroups > 0,
            verdict=self._replay.found(),
        )
        if batch.loader is not None:
            batch.loader.commit(batch, report)
        self.state.end_attempt()
        self.worker.pulse.at(self.state.step, "loop body")
        return report

    def _versions(self) -> list[int]:
        """Version counters of the state, and one of the runs of towers: each takes the memory of the sums before."""
        return [self._num_runs, *self.state.versions()]

    def _check(self, batch: Batch) -> None:
        """Refuse a batch or a model that cannot be trained on; resolve lengths in epochs when the stream is new."""
        self._check_dealing(batch)
        stream = (batch.epoch_size, batch.batch_size)
        if self.resolved_for != stream:
            self._resolve(*stream)
            self.resolved_for = stream

    def _check_dealing(self, batch: Batch) -> None:
        """Refuse a batch of other towers, or a model in evaluation mode."""
        if batch.towers != self._mine:
            raise InputError(
                "This batch was cut for other towers than it is to be computed on.",
                given=f"a batch for towers {list(batch.towers)}",
                expected=f"one for towers {list(self._mine)}: {self.worker.name}'s of {self.towers.num_towers}",
                hint="give `batches` and `train_step` the same Towers",
            )
        if not self.state.model.training:
            preflight.check_training_mode(self.state)

    def _inputs(self, batch: Batch, counts: Sequence[Counts], step: int, began: float) -> StepInputs:
        return StepInputs(
            step,
            self._reducer.counted(counts) if counts else {},
            self.loss_scale,
            self._extras.own(batch, step, began - self._started),
        )

    def _run_towers(
        self, losses: LossFunction, parts: Sequence[TowerBatch], inputs: StepInputs, *, sends_early: bool = True
    ) -> TreeSum:
        """Run this worker's towers; the first time all workers compare the names of losses and metrics."""
        self._num_runs += 1
        is_first = self._host.outputs.names is None
        self.worker.pulse.at(inputs.step, "first step" if is_first else "compute")
        sums = self._run(losses, parts, inputs, self._reducer.overlapped if sends_early else None)
        self.worker.pulse.at(inputs.step, "exchange")
        if is_first:
            names = [list(some) for some in self._host.outputs.names or ()]
            self.worker.group.agree("the names of losses and metrics", names)
        return sums

    # Between the workers --------------------------------------------------------------------------------------------

    def _attempt(self, sums: TreeSum, loss_scale: float | None, position: int, *, is_late: bool) -> Attempt:
        """Sum over the towers of all workers; `is_late` says that nothing may be read here."""
        with interruptible(), span("exchange", on_device=True):
            total = self._reducer.total(sums)
        totals = self._host.outputs.unpacked(total)
        statistics = self._host.statistics
        others, withheld = totals.others, None
        gradients, unexpected, absent = totals.gradients, None, self._host.absent
        if is_late:
            gradients, unexpected = self._missing.expected(totals, absent)
        elif absent or self.runs_ahead:  # which expects what was missing in the last attempt that was read
            gradients = self._missing.left_out(totals, absent)
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
