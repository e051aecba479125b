"""The two halves of a step that the chief serves: a worker computes the gradient of a slice, the chief the update."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from lockstep.errors import InputError
from lockstep.exchange.exchange import Alone, Reducer, plain_counts
from lockstep.exchange.tree import PartialSum, TreeSum
from lockstep.listing import shorten
from lockstep.served.exchanges import ServedExchange
from lockstep.tensors import are_finite, numbers_on
from lockstep.towers.hosting import StepInputs, TowerHost
from lockstep.towers.tower_outputs import ScalarNames
from lockstep.towers.towers import Towers
from lockstep.training.attempt import Attempt, Outcome
from lockstep.training.nonfinite import MAX_EXAMPLES_NAMED, NO_TOWER, act, check_finite
from lockstep.training.preflight import check_training_mode, prepare_steps
from lockstep.training.state import TrainState
from lockstep.training.step import Step
from lockstep.types import Arrivals, BadExample, NonFiniteReport, StepReport
from lockstep.workers.group import Group
from lockstep.workers.rank import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.data.loader import Loader
    from lockstep.exchange.exchange import Counts
    from lockstep.served.parameter_server import Arrival
    from lockstep.types import Batch, CountFunction, LossFunction


class Computed(NamedTuple):
    """The gradient of a slice, and what the chief has to know of it, as JSON."""

    partial: PartialSum
    message: dict[str, Any]


class ServedStep(Step):
    """The step of one state on one worker, whose exchange the chief serves; all workers make one together.

    On a worker that computes, the parameters of the state are copies of the chief's.

    Raises:
        InputError: parts contradict each other.
    """

    def __init__(
        self,
        state: TrainState,
        towers: Towers,
        exchange: ServedExchange,
        worker: Worker,
        before: ServedStep | None = None,
    ) -> None:
        exchange.check_batch_norm(towers.batch_norm)
        if state.replay_steps:
            raise InputError(
                "What a chief serves is not computed on all workers at once, and so not again on all of them.",
                given=f"replay_steps={state.replay_steps}, {exchange}",
                expected="verify.replay=0, or an exchange in which all workers make the update",
                hint="leave verify.replay out, or exchange by AllReduce()",
            )
        prepare_steps(state, towers, exchange, worker)
        self.exchange = exchange
        self.num_needed = exchange.num_slices(towers.num_towers)
        """How many gradients make an update, and how many slices a batch has."""
        self._alone = _alone(worker)
        host = TowerHost(
            state.model,
            state.parameters,
            towers,
            self._alone,
            state.name,
            state.tower_transforms,
            state.frozen.norms,
            any_order=self.num_needed > 1,
        )
        num_leaves = 1 if towers.joined else towers.num_towers
        reducer = Reducer(Alone(), self._alone, num_leaves, range(num_leaves))
        super().__init__(state, towers, host, reducer, worker, before)

    def serve(self, loader: Loader, elapsed_seconds: float = 0.0) -> None:
        """Begin a series of steps on the stream of a loader, whose updates the chief makes alone; see `start`.

        Raises:
            InputError: the model has changed since the state was made.
        """
        self.state.serve()
        self.start(elapsed_seconds)
        self._resolve(loader.epoch_size, loader.batch_size)

    def like_gradient(self) -> list[Tensor]:
        """Tensors of the shapes, strides and kinds of those that a worker sends."""
        return [*self._host.outputs.like_packed(), *self._host.statistics.like_shares()]

    def compute(
        self,
        losses: LossFunction,
        batch: Batch,
        counts: CountFunction | None,
        loss_scale: float | None,
        of_batch: Callable[[Counts], Sequence[Counts]],
    ) -> Computed:
        """Compute the gradient of a slice, `batch`, with the parameters as they are; raises InputError as `train_step`.

        `loss_scale` is that of the chief. `of_batch` is given what was counted in the slice, and returns that of all
        slices of its batch, in their order.
        """
        state, host, device = self.state, self._host, self.worker.device
        check_training_mode(state)
        parts = host.parts(batch)
        found = [counts(part) for _, _, part in parts] if counts else []
        if self.num_needed > 1 and found and found[0]:
            found = [*of_batch(found[0])]
        counted = self._reducer.counted(found) if found else {}
        inputs = StepInputs(state.step, counted, loss_scale, numbers_on(device, ()))
        return Computed(
            self._run(losses, parts, inputs).total(),
            {
                "tower": batch.towers.start,
                "names": [list(names) for names in host.outputs.names or ()],
                "absent": list(host.absent.items()),
                "bad": [list(example) for example in batch.bad],
                "loss_scale": loss_scale,
                "wait_seconds": batch.wait_seconds,
                "stage_seconds": dict(batch.stage_seconds),
                "queue_fill": batch.queue_fill,
            },
        )

    def rehearse(self, losses: LossFunction, batch: Batch, counts: CountFunction | None = None) -> None:
        """Compute the gradient of a batch, and forget it; the chief, who computes none, does nothing."""
        if not self.worker.is_chief:
            self.compute(losses, batch, counts, self.loss_scale, lambda own: [own] * self.num_needed)

    def count(self, counts: CountFunction, batch: Batch) -> dict[str, float]:
        """Count in a slice that is computed elsewhere."""
        (part,) = self._host.parts(batch)
        return plain_counts(counts(part.batch))

    @property
    def has_run(self) -> bool:
        """Whether this worker has computed before: the first time takes longer."""
        return self._host.outputs.names is not None

    # The chief's half -------------------------------------------------------------------------------------------------

    def update(self, gradients: Sequence[Arrival], loader: Loader, position: int, arrivals: Arrivals) -> StepReport:
        """Make the update of these gradients, in the order of their slices, or refuse it, and report it.

        The caller moves the loader to `position`, which is that of the stream after this attempt.

        Raises:
            DataError: more examples cannot be read than the loader may replace.
            NonFiniteError: as the state's policy says.
        """
        state, messages = self.state, [cast("dict[str, Any]", gradient.message) for gradient in gradients]
        bad = tuple(sorted(BadExample(*example) for message in messages for example in message["bad"]))
        loader.add_bad(bad)
        with torch.no_grad():
            proposal = state.propose(self._attempt(gradients, messages))
            found = proposal.read(self.worker.group.check_peers)
            outcome = state.decide(proposal, found)
        nonfinite = self._handle(outcome, gradients, messages, loader) if outcome.skipped else None
        now = time.perf_counter()
        seconds = now - self._resumed
        return self._report_of(
            outcome,
            found,
            position,
            loader.epoch_size,
            now - self._started,
            num_examples=loader.batch_size,
            step_seconds=seconds,
            wait_seconds=min(seconds, max(message["wait_seconds"] for message in messages)),
            nonfinite=nonfinite,
            stage_seconds=messages[0]["stage_seconds"],
            queue_fill=messages[0]["queue_fill"],
            bad=bad,
            stop_requested=self.worker.pulse.stop_requested is not None or any(m["stops"] for m in messages),
            regroup_requested=self.worker.pulse.regroup_requested,
            arrivals=arrivals,
        )

    def _attempt(self, gradients: Sequence[Arrival], messages: Sequence[Mapping[str, Any]]) -> Attempt:
        """The sum of the gradients by the tree, in the order of their slices; their tensors are used up for it."""
        host, statistics = self._host, self._host.statistics
        host.outputs.names = _same_names([message["names"] for message in messages], host.outputs.names)
        sums, last = TreeSum(), len(gradients) - 1
        for index, gradient in enumerate(gradients):
            if last:
                of_buffers = gradient.partial.tensors[len(host.outputs.like_packed()) :]
                statistics.leave_to_one(of_buffers, is_first=index == 0, is_last=index == last)
            sums.add(index, gradient.partial)
        total = _on_device(sums.total(), self.worker.device)
        totals = host.outputs.unpacked(total, mean_over_rows_of=len(gradients) if last else None)
        statistics.save()
        absent = sum((Counter(dict(message["absent"])) for message in messages), Counter[int]())
        return Attempt(
            self._missing.left_out(totals, absent),
            statistics.combined(totals.statistics),
            totals.losses,
            totals.rows,
            messages[0]["loss_scale"],
            total.owned,
            statistics.check_sums(totals.statistics),
            totals.others,
        )

    def _handle(
        self, outcome: Outcome, gradients: Sequence[Arrival], messages: Sequence[Mapping[str, Any]], loader: Loader
    ) -> NonFiniteReport:
        """Say where an attempt that is not finite came from, and do what the state's policy says."""
        report = NonFiniteReport(messages[0]["position"], outcome.nonfinite)
        if not outcome.overflowed:
            check_finite(self.state, self._alone)
            culprits = self._culprits(gradients)
            guilty = [self._words(gradients[i], messages[i], loader) for i in culprits]
            position = messages[culprits[0]]["position"] if culprits else report.position
            report = report._replace(position=position, culprits=tuple(guilty) or (NO_TOWER,))
        act(self.state, outcome, report, is_chief=True)
        return report

    def _culprits(self, gradients: Sequence[Arrival]) -> list[int]:
        """The places of gradients that are not finite, as far as that can be seen once the tree has added them up."""
        found: list[int] = []
        for index in reversed(range(len(gradients))):
            span = index & -index or len(gradients)  # those that may have been added to this one
            partial = gradients[index].partial
            if not set(found) & set(range(index, index + span)) and not _is_finite(partial):
                found.append(index)
        return sorted(found)

    def _words(self, gradient: Arrival, message: Mapping[str, Any], loader: Loader) -> str:
        size = loader.batch_size // self.num_needed
        first, count = gradient.lease.slice, self.towers.num_towers // self.num_needed
        who = f"tower {message['tower']}" if count == 1 else f"one of towers 0 to {count - 1}"
        examples = shorten(loader.example_ids(first, size), MAX_EXAMPLES_NAMED)
        return (
            f"{who} on {self.worker.group.names[gradient.lease.worker]} (positions {first} to "
            f"{first + size - 1} of the stream): its losses or gradients are not finite; examples {examples}"
        )


def _alone(worker: Worker) -> Worker:
    """The worker as one that is alone, with its name: it computes whole towers, and exchanges nothing with others."""
    group = Group.alone()
    group.names = [worker.name]
    return replace(worker, rank=0, num_workers=1, local_rank=0, num_local_workers=1, group=group)


def _same_names(given: Sequence[Sequence[Sequence[str]]], known: ScalarNames | None) -> ScalarNames:
    """The names of losses and metrics, which all workers return alike."""
    names = known or ScalarNames(*map(tuple, given[0]))
    for each in given:
        if ScalarNames(*map(tuple, each)) != names:
            raise InputError(
                "The workers' loss functions return different names.",
                given=f"losses {each[0]}, metrics {each[1]}",
                expected=f"losses {names.losses}, metrics {names.metrics}",
                hint="return the same names for every batch on all workers",
            )
    return names


def _on_device(total: PartialSum, device: torch.device) -> PartialSum:
    """The sum where the state is: the gradients have come to the host."""
    numbers = total.numbers if isinstance(total.numbers, list) else total.numbers.tolist()
    tensors = [tensor.to(device) for tensor in total.tensors]
    return PartialSum(tensors, numbers_on(device, numbers), owned=total.owned)


def _is_finite(partial: PartialSum) -> bool:
    numbers = torch.as_tensor(partial.numbers, dtype=torch.float64)
    return bool(numbers.isfinite().all()) and all(are_finite([t for t in partial.tensors if t.is_floating_point()]))
