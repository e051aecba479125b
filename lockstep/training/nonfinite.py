"""Attempts that were not finite: who is to blame, and what is done about it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING

from torch import Tensor

from lockstep.checkpoints.tensors import not_finite
from lockstep.errors import NonFiniteError
from lockstep.listing import shorten
from lockstep.optim.gradients import Gradients
from lockstep.parallel.diagnosis import Again, Finding, nonfinite_losses
from lockstep.parallel.hosting import TowerHost
from lockstep.parallel.statistics import put_back
from lockstep.parallel.tree import TreeSum
from lockstep.training.attempt import Outcome
from lockstep.training.state import TrainState
from lockstep.types import Batch, NonFiniteReport
from lockstep.workers.rank import Worker

if TYPE_CHECKING:
    from lockstep.training.state import TrainState
    from lockstep.types import LossFunction
    from lockstep.workers.rank import Worker


log = logging.getLogger("lockstep")

MAX_EXAMPLES_NAMED = 8
NO_TOWER = "no tower alone: the losses and gradients of each are finite"


def explain(
    outcome: Outcome, host: TowerHost, losses: LossFunction, batch: Batch, sums: TreeSum, worker: Worker
) -> NonFiniteReport:
    """Say what made an attempt unfit, and where, whoever hosts it; all workers come here together.

    Towers under suspicion compute their losses and gradients again, from the same values and random numbers.
    """
    with put_back([buffer for state in TrainState.living for buffer in state.buffers.values()]):
        mine = [_look_into(host, losses, batch, tower, sums, worker) for tower in suspects(host, sums)]
    guilty = [line for line in mine if line]
    found = [line for lines in worker.group.gather(guilty) for line in lines]
    # A copy: the batch itself is about to hold the report that holds this.
    return NonFiniteReport(
        batch.position, outcome.nonfinite, tuple(found) or (NO_TOWER,), copy(batch) if guilty else None
    )


def suspects(host: TowerHost, sums: TreeSum) -> list[int]:
    """The towers of this worker whose losses are not finite; where all are, those in whose sums something is not."""
    towers = [tower for tower in host.values if _losses_of(host, tower)]
    for node, partial in [] if towers else sums.nodes:
        if not all(tensor.isfinite().all() for tensor in partial.tensors):
            towers += [tower for tower, place in host.places.items() if node.start <= place < node.start + node.span]
    return towers


def act(state: TrainState, outcome: Outcome, nonfinite: NonFiniteReport, *, is_chief: bool) -> None:
    """Do what the state was told to do about an attempt that was not finite.

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
        hint=_hint(state),
    ).about(nonfinite)


def in_short(nonfinite: NonFiniteReport) -> str:
    """What is not finite, and where that came from: enough for a line of the log."""
    more = f" (and {len(nonfinite.reasons) - 1} more)" if len(nonfinite.reasons) > 1 else ""
    return f"{nonfinite.reasons[0]}{more}; from {'; '.join(nonfinite.culprits)}"


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
    """What is wrong with a tower, in words; None where it is innocent: its own losses and gradients are finite."""
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
    """The losses of a tower that are not finite, in words; metrics may be what they like."""
    names = host.losses.names
    assert names is not None, "the towers ran"
    return nonfinite_losses(dict(zip(names.losses, host.values[tower], strict=False)))


def _in_words(finding: Finding, what: str, batch: Batch, worker: Worker) -> str:
    first, count = finding.positions.start, len(finding.positions)
    examples = _example_ids(batch, first, count)
    guilty = [examples[row] for row in finding.rows] if finding.rows and examples else examples
    more = f" and {len(guilty) - MAX_EXAMPLES_NAMED} more" if len(guilty) > MAX_EXAMPLES_NAMED else ""
    named = f"; examples {', '.join(guilty[:MAX_EXAMPLES_NAMED])}{more}" if guilty else ""
    where = f"tower {finding.tower} on {worker.name} (positions {first} to {first + count - 1} of the stream)"
    return f"{where}: {what}{named}"


def _example_ids(batch: Batch, position: int, count: int) -> list[str]:
    """The names; none where they cannot be had: the others wait for what this worker has to say."""
    try:
        return batch.example_ids(position, count)
    except Exception as error:
        log.warning("the examples at positions %d to %d have no names: %r", position, position + count - 1, error)
        return []


MAX_NAMES = 8


def describe_nonfinite(losses: Mapping[str, float], gradients: Gradients, *, statistics_fit: bool) -> tuple[str, ...]:
    """A part for each loss and gradient that is not finite, at most eight gradients, and for the statistics."""
    words = nonfinite_losses(losses)
    names = [
        f"gradient of {name!r}"
        for name, gradient in zip(gradients.names, gradients.tensors, strict=True)
        if gradient is not None and not gradient.isfinite().all()
    ]
    words += names[:MAX_NAMES] + ([f"{len(names) - MAX_NAMES} gradients more"] if len(names) > MAX_NAMES else [])
    if not statistics_fit:
        words.append("the batch-norm statistics")
    return tuple(words or ["the gradients are finite, and their global norm is not"])


def nonfinite_penalty(penalised: Mapping[str, Tensor]) -> NonFiniteError:
    """The error for penalties that are not finite on their own, for which no batch is to blame."""
    nonfinite = [name for name, parameter in penalised.items() if not parameter.isfinite().all()]
    return NonFiniteError(
        "The penalty on the parameters is not finite; nothing was changed.",
        given=", ".join(nonfinite) or "parameters whose squares overflow",
        expected="finite parameters",
        hint="lower the learning rate; skipping a batch cannot help",
    )


def check_finite(state: TrainState, worker: Worker) -> None:
    """Refuse a model that was not finite before the attempt: no batch is to blame. All workers come here together.

    Raises:
        NonFiniteError: trained parameters are not finite, or others or buffers hold NaN. Those may hold infinities, as
            a mask does.
    """
    sections = state.sections()
    mine = not_finite(
        {section: sections[section] for section in ("parameters", "buffers")}, {"parameters": state.untrained()}
    )
    of_all = worker.group.gather(shorten(mine, MAX_NAMES))
    if any(of_all):
        named = [f"worker {rank}: {nonfinite}" for rank, nonfinite in enumerate(of_all) if nonfinite]
        raise NonFiniteError(
            f"The model is not finite after step {state.step}, so no batch is to blame.",
            given=shorten(mine, MAX_NAMES) if len(set(of_all)) == 1 else "; ".join(named),
            expected="finite parameters, and no NaN in buffers",
            hint="go on from the last checkpoint with a lower learning rate or clipped gradients; "
            "skipping batches cannot help",
        )
