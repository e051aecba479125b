"""The evaluations of a run: when one is owed, and what is done with its scores."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from lockstep.evaluation.evaluate import Evaluation, evaluate_unless_stopped
from lockstep.progress import Progress
from lockstep.recipes.build import held_out, score
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.records import Records
from lockstep.training.state import TrainState
from lockstep.workers.rank import Worker

log = logging.getLogger("lockstep")


class Validation:
    """Scores the weights of a run as they are; all workers make the same calls.

    Args:
        recipe: of the run.
        state: whose weights are scored.
        worker: this worker.
    """

    def __init__(self, recipe: Recipe, state: TrainState, worker: Worker) -> None:
        self._recipe, self._state, self._worker = recipe, state, worker

    def score(self, split: str) -> Evaluation | None:
        """Score a split; None, on all workers, where one of them is asked to stop before the end."""
        how = self._recipe.evaluate
        return evaluate_unless_stopped(
            self._state,
            score,
            held_out(self._recipe, split),
            weights=how.weights,
            micro_batch=how.micro_batch,
            drop_last=how.drop_last,
        )

    def run(self, records: Records | None) -> Mapping[str, float] | None:
        """Score the validation examples, and write the scores down where there are records; None as in `score`."""
        result = self.score("validation")
        if result is None:
            return None
        if self._worker.is_chief:
            log.info("step %d: validation %s", self._state.step, result)
        if records:
            records.write_evaluation(self._state.step, "validation", result.means)
        return result.means

    def is_owed(self, start: Progress, records: Records | None) -> bool:
        """Whether the last step before this start was to be followed by an evaluation, which was left off to stop.

        Args:
            start: where the run goes on.
            records: what is written of it; the chief's.
        """
        before = start._replace(step=start.step - 1, position=start.position - self._recipe.batch_size)
        if not start.step or not self._recipe.evaluate.every.passed(before, start):
            return False
        is_made = records is not None and records.is_evaluated(start.step, "validation")
        return not self._worker.group.broadcast(is_made)
