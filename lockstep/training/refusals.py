"""Attempts that were not finite: who is to blame, and what is done about it."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from lockstep.errors import NonFiniteError
from lockstep.parallel.diagnosis import Finding
from lockstep.parallel.hosting import TowerHost
from lockstep.parallel.tree import TreeSum
from lockstep.training.attempt import Outcome
from lockstep.training.state import TrainState
from lockstep.types import Batch, Refusal
from lockstep.workers.rank import Worker

if TYPE_CHECKING:
    from lockstep.types import LossFunction

log = logging.getLogger("lockstep")

MAX_EXAMPLES_NAMED = 8


def explain(
    outcome: Outcome, host: TowerHost, losses: LossFunction, batch: Batch, sums: TreeSum, worker: Worker
) -> Refusal:
    """Say what made an attempt unfit, and where, whoever hosts it; all workers come here together."""
    towers = culprits(sums, host)
    mine = [_in_words(host.explain(losses, batch, tower, sums), batch, worker) for tower in towers]
    found = [line for lines in worker.group.gather(mine) for line in lines]
    return Refusal(batch.position, outcome.unfit, tuple(found), batch if towers else None)


def culprits(sums: TreeSum, host: TowerHost) -> list[int]:
    """The towers of this worker whose losses are not finite; where all are, those in whose sums a gradient is not."""
    towers = [tower for tower, values in host.values.items() if not all(map(math.isfinite, values))]
    for node, summand in [] if towers else sums.nodes:
        if not all(tensor.isfinite().all() for tensor in summand.tensors):
            towers += [tower for tower, place in host.places.items() if node.start <= place < node.start + node.span]
    return towers


def act(state: TrainState, outcome: Outcome, refusal: Refusal, *, is_chief: bool) -> None:
    """Do what the state was told to do about an attempt that was not finite.

    Raises:
        NonFiniteError: the run is to end, or the budget of attempts to skip is used up.
    """
    where = f"{', '.join(refusal.reasons)}; from {'; '.join(refusal.culprits) or 'the sum over the towers'}"
    if outcome.overflowed:
        if is_chief:
            log.info("the gradients overflow in fp16: the loss scale is %g now", state.loss_scale.value)
        return
    used_up = state.num_refused > state.nonfinite_budget
    if state.nonfinite == "skip" and not used_up:
        if is_chief:
            log.warning("the update after step %d is not finite, and was skipped: %s", state.step, where)
        return
    spent = f" after {state.nonfinite_budget} that were skipped" if state.nonfinite == "skip" else ""
    raise NonFiniteError(
        f"The update after step {state.step} is not finite{spent}; nothing was changed.",
        given=where,
        expected="finite losses and gradients",
        mend="lower the learning rate, clip the gradients, look at these examples, or set nonfinite='skip'"
        + (" with a larger nonfinite_budget" if spent else ""),
    ).about(refusal)


def _in_words(finding: Finding, batch: Batch, worker: Worker) -> str:
    first, count = finding.positions.start, len(finding.positions)
    examples = batch.example_ids(first, count)
    guilty = [examples[row] for row in finding.rows] if finding.rows and examples else examples
    more = f" and {len(guilty) - MAX_EXAMPLES_NAMED} more" if len(guilty) > MAX_EXAMPLES_NAMED else ""
    named = f"; examples {', '.join(guilty[:MAX_EXAMPLES_NAMED])}{more}" if guilty else ""
    where = f"tower {finding.tower} on {worker.name} (positions {first} to {first + count - 1} of the stream)"
    return f"{where}: {finding.words}{named}"
