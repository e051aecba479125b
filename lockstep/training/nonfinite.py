"""Attempts that are not finite: what is not, where it came from, and what the state's policy does about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.checkpoints.encoding import find_nonfinite
from lockstep.exchange.exchange import no_count
from lockstep.exchange.tree import TreeSum
from lockstep.listing import shorten
from lockstep.screen import log
from lockstep.tensors import are_finite
from lockstep.towers.diagnosis import Again, Finding, nonfinite_losses
from lockstep.towers.hosting import TowerHost
from lockstep.towers.statistics import restored
from lockstep.training.attempt import Given, Outcome
from lockstep.types import Batch, NonFiniteError, NonFiniteReport, ReplayVerdict
from lockstep.workers.rank import Worker

if TYPE_CHECKING:
    from lockstep.training.state import TrainState
    from lockstep.types import LossFunction

MAX_EXAMPLES_NAMED = 8
NO_TOWER = "no tower alone: the losses and gradients of each are finite"


def handle(
    outcome: Outcome,
    state: TrainState,
    host: TowerHost,
    given: Given,
    batch: Batch,
    sums: TreeSum,
    worker: Worker,
    make_again: Callable[[int], ReplayVerdict | None],
) -> NonFiniteReport:
    """Find what in an attempt is not finite and where it came from, then do what the state's policy says.

    The suspected towers compute their losses and gradients again, from the same values and random numbers; then the
    attempt is made again on all workers, by `Replay.of_nonfinite`. All workers come here together.

    Raises:
        InputError: a count, which a device has counted unseen, cannot be one.
        NonFiniteError: see `act` and `check_finite`.
    """
    for name, count in given.inputs.counts.items():
        if not float(count) >= 0:
            raise no_count(name, float(count))
    report = NonFiniteReport(batch.position, outcome.nonfinite)
    if not outcome.overflowed:
        check_finite(state, worker)
        with restored([*state.buffers.values(), *state.other_buffers()]):
            mine = [_look_into(host, given.losses, batch, tower, sums, worker) for tower in suspects(host, sums)]
        guilty = [line for line in mine if line]
        verdict = make_again(2 if guilty else min(len(mine), 1))
        found = [line for lines in worker.group.gather(guilty) for line in lines]
        # Without its loader, which is about to keep the report that holds this.
        part = replace(batch, fields=batch, loader=None) if guilty else None
        report = report._replace(culprits=tuple(found) or (NO_TOWER,), batch=part, verdict=verdict)
    act(state, outcome, report, is_chief=worker.is_chief)
    return report


def suspects(host: TowerHost, sums: TreeSum) -> list[int]:
    """This worker's towers with losses that are not finite; if there are none, those of sums that are not.

    What was sent early is the sum over all workers by now: then each worker's last tower is among them.
    """
    towers = [tower for tower in host.values if _losses_of(host, tower)]
    for node, partial in [] if towers else sums.nodes:
        if not all(are_finite(partial.tensors)):
            towers += [tower for tower, leaf in host.leaves.items() if node.start <= leaf < node.start + node.span]
    return towers


def act(state: TrainState, outcome: Outcome, nonfinite: NonFiniteReport, *, is_chief: bool) -> None:
    """Do what the state's policy says about an attempt that was not finite.

    Raises:
        NonFiniteError: the run is to end or to be rolled back, or the budget of attempts to skip is used up.
    """
    if outcome.overflowed:
        if is_chief:
            log.info("the gradients overflow in fp16: the loss scale is %g now", state.loss_scale.value)
        return
    skips, budget = state.nonfinite == "skip", state.nonfinite_budget
    if skips and state.num_skipped <= budget:
        if is_chief:
            count, why = f"{state.num_skipped} of at most {budget}", in_short(nonfinite)
            log.warning("the update after step %d is not finite, and was skipped: %s (%s)", state.step, why, count)
        return
    spent = f" after {budget} that were skipped" if skips else ""
    raise NonFiniteError(
        f"The update after step {state.step} is not finite{spent}; nothing was changed.",
        given=f"{', '.join(nonfinite.reasons)}; from {'; '.join(nonfinite.culprits)}",
        expected="finite losses and gradients",
        hint=(f"{nonfinite.verdict.said}; " if nonfinite.verdict else "") + _hint(state),
    ).about(nonfinite)


def in_short(nonfinite: NonFiniteReport) -> str:
    """Say in one line of the log what is not finite, and where it came from."""
    again = f"; {nonfinite.verdict.said}" if nonfinite.verdict else ""
    return f"{shorten(nonfinite.reasons, 1)}; from {'; '.join(nonfinite.culprits)}{again}"


def _hint(state: TrainState) -> str:
    usual = "lower the learning rate, clip the gradients, look at these examples"
    if state.nonfinite == "rollback":
        return f"catch this error and call rollback, then train on; or {usual}"
    return f"{usual}, or set nonfinite='skip'" + (
        " with a larger nonfinite_budget" if state.nonfinite == "skip" else ""
    )


def _look_into(
    host: TowerHost, losses: LossFunction, batch: Batch, tower: int, sums: TreeSum, worker: Worker
) -> str | None:
    """Describe what is wrong with a tower; None if its own losses and gradients are finite."""
    again = Again(losses)
    finding = host.explain(again, batch, tower, sums)
    nonfinite = _losses_of(host, tower) or ([again.nonfinite] if again.nonfinite else [])
    said = [*nonfinite, finding.words] if finding.words else nonfinite
    if again.error:
        said = [*said, f"run again, it raised {again.error!r}"]
    elif again.nonfinite == "":
        if not nonfinite:
            return None
        said = [*said, "run again, it is finite"]
    return _in_words(finding, "; ".join(said), batch, worker) if said else None


def _losses_of(host: TowerHost, tower: int) -> list[str]:
    """Describe the losses of a tower that are not finite; metrics are not checked."""
    names = host.outputs.names
    assert names is not None, "the towers ran"
    values = host.values[tower]
    read = values if isinstance(values, list) else values.tolist()
    return nonfinite_losses(dict(zip(names.losses, read, strict=False)))


def _in_words(finding: Finding, what: str, batch: Batch, worker: Worker) -> str:
    first, count = finding.positions.start, len(finding.positions)
    examples = _example_ids(batch, first, count)
    guilty = [examples[row] for row in finding.rows] if finding.rows and examples else examples
    named = f"; examples {shorten(guilty, MAX_EXAMPLES_NAMED)}" if guilty else ""
    where = f"tower {finding.tower} on {worker.name} (positions {first} to {first + count - 1} of the stream)"
    return f"{where}: {what}{named}"


def _example_ids(batch: Batch, position: int, count: int) -> list[str]:
    """The names of examples; none on an error, since the other workers wait for this one's answer."""
    if batch.loader is None:
        return []
    try:
        return batch.loader.example_ids(position, count, batch.bad)
    except Exception as error:
        log.warning("the examples at positions %d to %d have no names: %r", position, position + count - 1, error)
        return []


MAX_NAMES = 8


def check_finite(state: TrainState, worker: Worker) -> None:
    """Refuse a model that was not finite before the attempt: no batch is to blame. All workers come here together.

    Raises:
        NonFiniteError: trained parameters are not finite, or others or buffers hold NaN. Those may hold infinities, as
            a mask does.
    """
    sections = state.sections()
    mine = find_nonfinite(
        {section: sections[section] for section in ("parameters", "buffers")}, {"parameters": state.untrained()}
    )
    of_all = worker.group.gather(shorten(mine, MAX_NAMES))
    if any(of_all):
        named = [f"{name}: {found}" for name, found in zip(worker.group.names, of_all, strict=True) if found]
        raise NonFiniteError(
            f"The model is not finite after step {state.step}, so no batch is to blame.",
            given=shorten(mine, MAX_NAMES) if len(set(of_all)) == 1 else "; ".join(named),
            expected="finite parameters, and no NaN in buffers",
            hint="go on from the last checkpoint with a lower learning rate or clipped gradients; "
            "skipping batches cannot help",
        )
