"""One attempt, from a batch to a report: towers, exchange, update."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from lockstep.checks import check_type
from lockstep.errors import InputError, NonFiniteError
from lockstep.parallel.exchange import AllReduce, Connection, Exchange
from lockstep.parallel.hosting import TowerHost, changeable_buffers
from lockstep.parallel.towers import Towers
from lockstep.parallel.tree import Summand, TreeSum, deal
from lockstep.progress import Progress
from lockstep.training.preflight import check_start
from lockstep.training.state import Attempt, Outcome, TrainState
from lockstep.types import Batch, StepReport
from lockstep.workers.rank import Worker, join

if TYPE_CHECKING:
    from lockstep.types import LossFunction

log = logging.getLogger("lockstep")


def train_step(
    state: TrainState,
    losses: LossFunction,
    batch: Batch,
    towers: Towers | None = None,
    exchange: Exchange | None = None,
) -> StepReport:
    """Make one update of one state from one batch: the unit, for loops of your own.

    Only this state's parameters get gradients, whatever other models the loss uses, and the buffers of other states'
    models are put back.

    Args:
        state: what is updated.
        losses: `losses(model, batch)`, returning named losses or (losses, metrics), each the mean over a tower's
            examples. The mean over all towers is reported.
        batch: this worker's examples, from `batches`.
        towers: how the batch is split; one tower a worker by default.
        exchange: how the workers' gradients become one; `AllReduce()` by default.

    Raises:
        InputError: the loss function returned something else than named scalars that depend on the parameters.
        NonFiniteError: see `TrainState`.
        PeerLostError: another worker is gone.
    """
    return bind(state, towers, exchange)(losses, batch)


def bind(state: TrainState, towers: Towers | None = None, exchange: Exchange | None = None) -> BoundStep:
    """The step of this state with these towers and this exchange: made once, then the same one each time."""
    check_type("state", state, TrainState, expected="a TrainState", mend="write ls.TrainState(model, optimizer)")
    check_type("towers", towers, (Towers, NoneType), expected="ls.Towers", mend="write ls.Towers(4) for four towers")
    worker = join()
    key = (towers or Towers(worker.num_workers), exchange or AllReduce())
    if key not in state.steps:
        state.steps[key] = BoundStep(state, *key, worker)
    return cast("BoundStep", state.steps[key])


class BoundStep:
    """The step of one state, connected with the other workers."""

    def __init__(self, state: TrainState, towers: Towers, exchange: Exchange, worker: Worker) -> None:
        check_start(state, worker)
        if towers.channels_last:
            state.to_channels_last()
        self.towers, self.worker = towers, worker
        self._mine = deal(towers.count, worker.num_workers)[worker.rank]
        self._state = state
        self._host = TowerHost(state.model, state.parameters, towers, state.name)
        self._exchange = exchange
        self._connection = exchange.connect(worker, towers.count)
        self._presence: Connection | None = None
        self._untouched: list[str] = []
        self._started = time.perf_counter()

    def start(self) -> None:
        """Begin a stretch of steps: its clock starts at 0.

        Raises:
            InputError: what is trained of the model has changed since the state was made.
        """
        self._started = time.perf_counter()
        now = [name for name, parameter in self._state.model.named_parameters() if parameter.requires_grad]
        if now != list(self._state.parameters):
            changed = sorted(set(now) ^ set(self._state.parameters))
            raise InputError(
                "Parameters were frozen or unfrozen after the state was made.",
                given=", ".join(changed),
                expected="requires_grad as it was when TrainState took the model",
                mend="make a new TrainState after the change",
            )

    def __call__(self, losses: LossFunction, batch: Batch) -> StepReport:
        """Make one attempt; see `train_step`."""
        began = time.perf_counter()
        state, pulse = self._state, self.worker.pulse
        if batch.towers != self._mine:
            raise self._cut_for_others(batch)
        pulse.at(state.step, "compute")
        sums = self._run_towers(losses, batch, began)
        pulse.at(state.step, "exchange")
        total = self._connection.total(sums)
        named, metrics, (missing, elapsed_seconds, stops) = self._read(total.numbers)
        gradients: Sequence[Tensor | None] = total.tensors[: len(state.parameters)]
        if missing:
            gradients = self._without_missing(gradients, batch.towers)
        statistics = self._host.statistics(total.tensors[len(gradients) :])
        outcome = state.apply(Attempt(gradients, statistics, named))
        if outcome.refused:
            self._refuse(outcome, batch, sums)
        batch.attempted()
        batch.report = StepReport(
            progress=Progress(state.step, batch.position + batch.batch_size, batch.epoch_size, elapsed_seconds),
            losses=named,
            smoothed=state.smoothed.corrected(),
            metrics=metrics,
            learning_rate=outcome.learning_rate,
            gradient_norm=outcome.gradient_norm,
            num_examples=batch.batch_size,
            step_seconds=batch.wait_seconds + time.perf_counter() - began,
            wait_seconds=batch.wait_seconds,
            refused=outcome.refused,
            stop_requested=stops > 0,
        )
        return batch.report

    def _cut_for_others(self, batch: Batch) -> InputError:
        return InputError(
            "This batch was cut for other towers than it is to be computed on.",
            given=f"a batch for towers {list(batch.towers)}",
            expected=f"one for towers {list(self._mine)}: {self.worker.name}'s of {self.towers.count}",
            mend="give `batches` and `train_step` the same Towers",
        )

    def _refuse(self, outcome: Outcome, batch: Batch, sums: TreeSum) -> None:
        """Say which tower made the attempt unfit, whoever hosts it; all workers come here together.

        Raises:
            NonFiniteError: the state was told to stop.
        """
        size = batch.batch_size // self.towers.count
        mine = [
            f"tower {tower} on {self.worker.name} (positions {first} to {first + size - 1} of the stream)"
            for tower in culprits(sums, self._host.losses)
            for first in [batch.position + tower * size]
        ]
        towers = [name for names in self.worker.group.gather(mine) for name in names]
        where = f"{', '.join(outcome.unfit)}; from {', '.join(towers) or 'the sum over the towers'}"
        if self._state.nonfinite == "skip":
            if self.worker.is_chief:
                log.warning("the update after step %d is not finite, and was skipped: %s", self._state.step, where)
            return
        raise NonFiniteError(
            f"The update after step {self._state.step} is not finite; nothing was changed.",
            given=where,
            expected="finite losses and gradients",
            mend="lower the learning rate, clip the gradients, look at these examples, or set nonfinite='skip'",
        )

    def _read(self, values: list[float]) -> tuple[dict[str, float], dict[str, float], list[float]]:
        """Losses, metrics, and the numbers that follow them."""
        names = self._host.scalar_names
        assert names is not None, "the towers ran"
        first_extra = len(names.losses) + len(names.metrics)
        losses = dict(zip(names.losses, values, strict=False))
        metrics = dict(zip(names.metrics, values[len(losses) : first_extra], strict=True))
        return losses, metrics, values[first_extra:]

    def _run_towers(self, losses: LossFunction, batch: Batch, began: float) -> TreeSum:
        """Run this worker's towers; the buffers of other states' models, if the loss uses them, are put back."""
        elapsed_seconds = began - self._started if self.worker.is_chief else 0.0
        extras = (elapsed_seconds, float(self.worker.pulse.stop_requested is not None))
        if len(TrainState.living) == 1:
            return self._host.run(losses, batch, extras)
        others = [b for other in TrainState.living if other is not self._state for b in changeable_buffers(other.model)]
        kept = [buffer.clone() for buffer in others]
        sums = self._host.run(losses, batch, extras)
        with torch.no_grad():
            for buffer, value in zip(others, kept, strict=True):
                buffer.copy_(value)
        return sums

    def _without_missing(self, gradients: Sequence[Tensor | None], towers: range) -> list[Tensor | None]:
        """The gradients, None for each parameter that no tower of any worker had one for."""
        if self._presence is None:
            self._presence = self._exchange.connect(self.worker, self.towers.count)
        absent = [float(self._host.absent.get(index, 0)) for index in range(len(gradients))]
        sums = TreeSum()
        for tower in towers:
            sums.add(tower, Summand([], absent if tower == towers.start else [0.0] * len(absent)))
        everywhere = [count == self.towers.count for count in self._presence.total(sums).numbers]
        untouched = [name for name, nowhere in zip(self._state.parameters, everywhere, strict=True) if nowhere]
        if untouched and untouched != self._untouched:
            self._untouched = untouched
            log.warning("no tower has a gradient for %s: left untouched", ", ".join(untouched))
        return [None if nowhere else g for g, nowhere in zip(gradients, everywhere, strict=True)]


def culprits(sums: TreeSum, losses: Mapping[int, list[float]]) -> list[int]:
    """The towers of this worker whose losses are not finite; where all are, those in whose sums a gradient is not."""
    towers = [tower for tower, values in losses.items() if not all(map(math.isfinite, values))]
    for node, summand in [] if towers else sums.nodes:
        if not all(tensor.isfinite().all() for tensor in summand.tensors):
            towers += range(node.start, node.start + node.span)
    return towers
