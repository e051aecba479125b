"""One attempt, from a batch to a report: towers, exchange, update."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from types import NoneType
from typing import TYPE_CHECKING, cast

from torch import Tensor

from lockstep.checks import check_type
from lockstep.errors import InputError
from lockstep.parallel.exchange import AllReduce, Exchange, Reducer
from lockstep.parallel.hosting import StepInputs, TowerHost
from lockstep.parallel.sparse import rows_of
from lockstep.parallel.statistics import put_back
from lockstep.parallel.towers import Towers
from lockstep.parallel.tree import PartialSum, TreeSum, assign_towers
from lockstep.progress import Progress
from lockstep.training.attempt import Attempt, Outcome
from lockstep.training.preflight import check_fit, check_start
from lockstep.training.refusals import act, explain
from lockstep.training.state import TrainState
from lockstep.training.trained_with import check_resumed, check_threads, of_step
from lockstep.training.unchanged import check_buffers, check_parameters, check_training_mode
from lockstep.training.unfit import check_finite
from lockstep.types import BadExample, Batch, Refusal, StepReport
from lockstep.workers.rank import Worker, join
from lockstep.workers.signals import interruptible, uninterrupted

if TYPE_CHECKING:
    from lockstep.types import CountFunction, LossFunction

log = logging.getLogger("lockstep")


def train_step(
    state: TrainState,
    losses: LossFunction,
    batch: Batch,
    towers: Towers | None = None,
    exchange: Exchange | None = None,
    *,
    counts: CountFunction | None = None,
) -> StepReport:
    """Make one update of one state from one batch: the unit, for loops of your own.

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
            divided by the count over all towers, so that an uneven batch weighs each thing alike. It must be known from
            the batch. Where it depends on the model's output (a detector that samples its proposals), leave the loss
            out: it is then a mean per tower.

    Raises:
        InputError: the loss function returned something else than named scalars that depend on the parameters; or the
            model is in evaluation mode, or has parameters that were replaced or frozen since the state was made.
        CheckpointError: the model has what no checkpoint could hold.
        NonFiniteError: see `TrainState`.
        PeerLostError: another worker is gone.
    """
    return bind(state, towers, exchange)(losses, batch, counts)


def bind(state: TrainState, towers: Towers | None = None, exchange: Exchange | None = None) -> BoundStep:
    """The step of this state with these towers and this exchange: made once, then the same one each time."""
    check_type("state", state, TrainState, expected="a TrainState", hint="write ls.TrainState(model, optimizer)")
    check_type("towers", towers, (Towers, NoneType), expected="ls.Towers", hint="write ls.Towers(4) for four towers")
    worker = join()
    key = (towers or Towers(worker.num_workers), exchange or AllReduce())
    if key not in state.steps:
        state.steps[key] = BoundStep(state, *key, worker)
    if state.resumed:
        check_resumed(state, *key, worker)
    return cast("BoundStep", state.steps[key])


class BoundStep:
    """The step of one state, connected with the other workers."""

    def __init__(self, state: TrainState, towers: Towers, exchange: Exchange, worker: Worker) -> None:
        check_start(state, worker)
        check_fit(state, towers, exchange)
        check_threads(exchange, worker)
        state.computed_with = of_step(towers, exchange)
        if worker.is_chief and not state.steps:
            for line in state.matches:
                log.info("%s", line)
        if towers.channels_last:
            state.to_channels_last()
        self.towers, self.worker = towers, worker
        self._mine = assign_towers(towers.count, worker.num_workers)[worker.rank]
        # The state keeps its steps; it is to be gone with its last name, not when cycles are collected.
        self._state = cast("TrainState", weakref.proxy(state))
        self._host = TowerHost(
            state.model, state.parameters, towers, worker, state.name, state.tower_transforms, state.frozen.norms
        )
        num_leaves, mine = (worker.num_workers, [worker.rank]) if towers.joined else (towers.count, list(self._mine))
        self._exchange = Reducer(exchange, worker, num_leaves, mine)
        self._told_missing: set[str] = set()
        self._started = time.perf_counter()
        self._resolved_for: tuple[int, int] | None = None

    def start(self) -> None:
        """Begin a stretch of steps: its clock starts at 0.

        Raises:
            InputError: the model has changed since the state was made.
        """
        self._started = time.perf_counter()
        check_parameters(self._state)
        check_buffers(self._state)

    def __call__(self, losses: LossFunction, batch: Batch, counts: CountFunction | None = None) -> StepReport:
        """Make one attempt; see `train_step`."""
        # A KeyboardInterrupt comes out of the loss function, the wait for other workers, or after the attempt.
        with uninterrupted():
            return self._make_attempt(losses, batch, counts)

    def _make_attempt(self, losses: LossFunction, batch: Batch, counts: CountFunction | None) -> StepReport:
        began = time.perf_counter()
        state, pulse = self._state, self.worker.pulse
        if batch.towers != self._mine:
            raise self._cut_for_others(batch)
        if self._resolved_for != (batch.epoch_size, batch.batch_size):
            self._resolve(batch)
        check_training_mode(state)
        is_first = self._host.losses.names is None
        pulse.at(state.step, "first step" if is_first else "compute")
        inputs = self._step_inputs(batch, counts, began)
        sums = self._run_towers(losses, batch, inputs)
        pulse.at(state.step, "exchange")
        if is_first:
            self.worker.group.agree("the names of losses and metrics", [list(n) for n in self._host.losses.names or ()])
        with interruptible():
            total = self._exchange.total(sums)
        named, metrics, (missing, elapsed_seconds, stops, num_bad) = self._read(total.numbers)
        bad = self._gather_bad(batch) if num_bad else ()
        outcome = state.apply(self._attempt(total, named, inputs.loss_scale, missing))
        refusal = self._refusal(outcome, losses, batch, sums) if outcome.refused else None
        report = StepReport(
            progress=Progress(state.step, batch.position + batch.batch_size, batch.epoch_size, elapsed_seconds),
            losses=outcome.losses,
            smoothed=state.smoothed.now(),
            metrics=metrics,
            learning_rate=next(iter(outcome.learning_rates.values())),
            gradient_norm=outcome.gradient_norm,
            num_examples=batch.batch_size,
            step_seconds=batch.wait_seconds + time.perf_counter() - began,
            wait_seconds=batch.wait_seconds,
            refused=outcome.refused,
            stop_requested=stops > 0,
            learning_rates=outcome.learning_rates,
            refusal=refusal,
            stage_seconds=batch.stage_seconds,
            queue_fill=batch.queue_fill,
            bad=bad,
        )
        if batch.loader is not None:
            batch.loader.commit(batch, report)
        pulse.at(state.step, "loop body")
        return report

    def _gather_bad(self, batch: Batch) -> tuple[BadExample, ...]:
        """Gather the examples that could not be read on any worker, and count them; all workers call it together.

        Raises:
            DataError: the budget of such examples is used up.
        """
        found = self.worker.group.gather([list(example) for example in batch.bad])
        bad = tuple(sorted(BadExample(*example) for examples in found for example in examples))
        if batch.loader is not None:
            batch.loader.add_bad(bad)
        return bad

    def _resolve(self, batch: Batch) -> None:
        """Say once what epochs and batch sizes mean for the learning rates, now that the stream is known."""
        for line in self._state.resolve(batch.epoch_size, batch.batch_size):
            if self.worker.is_chief:
                log.info("%s", line)
        self._resolved_for = (batch.epoch_size, batch.batch_size)

    def _step_inputs(self, batch: Batch, counts: CountFunction | None, began: float) -> StepInputs:
        elapsed_seconds = began - self._started if self.worker.is_chief else 0.0
        return StepInputs(
            step=self._state.step,
            counts=self._exchange.counted([counts(part) for _, _, part in self._host.parts(batch)]) if counts else {},
            loss_scale=self._state.loss_scale.value if self.towers.precision == "fp16" else None,
            extras=(elapsed_seconds, float(self.worker.pulse.stop_requested is not None), float(len(batch.bad))),
        )

    def _attempt(
        self, total: PartialSum, losses: dict[str, float], loss_scale: float | None, missing: float
    ) -> Attempt:
        """What the update is made from, out of the sum over all towers."""
        num_gradients, sparse = len(self._state.parameters), self._host.sparse
        gradients: list[Tensor | None] = list(total.tensors[:num_gradients])
        marks = total.tensors[num_gradients : num_gradients + len(sparse)]
        rows = {}
        for index, mark in zip(sparse, marks, strict=True):
            rows[index], gradients[index] = rows_of(total.tensors[index], mark)
        if missing:
            gradients = self._without_missing(gradients)
        changes = total.tensors[num_gradients + len(sparse) :]
        statistics = self._host.statistics
        return Attempt(
            gradients,
            statistics.combined(changes),
            losses,
            rows,
            loss_scale,
            total.owned,
            statistics.fit(changes),
        )

    def _cut_for_others(self, batch: Batch) -> InputError:
        return InputError(
            "This batch was cut for other towers than it is to be computed on.",
            given=f"a batch for towers {list(batch.towers)}",
            expected=f"one for towers {list(self._mine)}: {self.worker.name}'s of {self.towers.count}",
            hint="give `batches` and `train_step` the same Towers",
        )

    def _refusal(self, outcome: Outcome, losses: LossFunction, batch: Batch, sums: TreeSum) -> Refusal:
        """What made the attempt unfit, and where; see `refusals.act` and `check_finite` for what is raised."""
        if outcome.overflowed:
            refusal = Refusal(batch.position, outcome.unfit)
        else:
            check_finite(self._state, self.worker)
            refusal = explain(outcome, self._host, losses, batch, sums, self.worker)
        act(self._state, outcome, refusal, is_chief=self.worker.is_chief)
        return refusal

    def _read(self, values: list[float]) -> tuple[dict[str, float], dict[str, float], list[float]]:
        """Losses, metrics, and the numbers that follow them."""
        names = self._host.losses.names
        assert names is not None, "the towers ran"
        first_extra = len(names.losses) + len(names.metrics)
        losses = dict(zip(names.losses, values, strict=False))
        metrics = dict(zip(names.metrics, values[len(losses) : first_extra], strict=True))
        return losses, metrics, values[first_extra:]

    def _run_towers(self, losses: LossFunction, batch: Batch, inputs: StepInputs) -> TreeSum:
        """Run this worker's towers; the buffers of other states' models, if the loss uses them, are put back.

        Raises:
            InputError: parameters have changed since the state was made, which may be why they fail.
        """
        try:
            if len(TrainState.living) == 1:
                return self._host.run(losses, batch, inputs)
            mine = self._state.model
            others = [b for other in TrainState.living if other.model is not mine for b in other.buffers.values()]
            with put_back(others):
                return self._host.run(losses, batch, inputs)
        except (RuntimeError, InputError):
            check_parameters(self._state)
            raise

    def _without_missing(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients, None for each parameter that no tower of any worker had one for."""
        absent = [float(self._host.absent.get(index, 0)) for index in range(len(gradients))]
        # The first of this worker's leaves tells what all of them lack.
        of_each = [absent, *[[0.0] * len(absent)] * (len(self._host.places) - 1)]
        everywhere = [count == self._exchange.num_leaves for count in self._exchange.numbers(of_each)]
        without = [name for name, nowhere in zip(self._state.parameters, everywhere, strict=True) if nowhere]
        if new := [name for name in without if name not in self._told_missing]:
            self._told_missing.update(new)
            check_parameters(self._state)
            if self.worker.is_chief:
                self._tell_of_missing(new)
        return [None if nowhere else g for g, nowhere in zip(gradients, everywhere, strict=True)]

    def _tell_of_missing(self, without: Sequence[str]) -> None:
        penalised = [name for name in without if name in self._state.penalised]
        untouched = [name for name in without if name not in penalised]
        for names, then in ((untouched, "left untouched"), (penalised, "moved by the penalty alone")):
            if names:
                log.warning("no tower has a gradient for %s: %s", ", ".join(names), then)
