"""The evaluations of a run: when one is owed, and what becomes of its scores."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from lockstep.checks import check_one_of
from lockstep.evaluation.evaluate import Evaluation, evaluate_unless_stopped
from lockstep.progress import Progress
from lockstep.recipes.build import Parts
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.records import Records
from lockstep.workers.rank import Worker

log = logging.getLogger("lockstep")


def score_split(recipe: Recipe, parts: Parts, split: str) -> Evaluation | None:
    """Score the weights of a run as they are; None, on all workers, where one of them is asked to stop."""
    how = recipe.evaluate
    return evaluate_unless_stopped(
        parts.state,
        parts.task.score,
        parts.examples.held_out(split),
        weights=how.weights,
        micro_batch=how.micro_batch,
        drop_last=how.drop_last,
    )


class Validation:
    """The evaluations of one stretch of a run on the validation examples; all workers make the same calls.

    Args:
        recipe: of the run.
        parts: of the run; the weights of its state are scored.
        worker: this worker.
    """

    def __init__(self, recipe: Recipe, parts: Parts, worker: Worker) -> None:
        self._recipe, self._parts, self._worker = recipe, parts, worker
        self._scored = -1
        self._scores: Mapping[str, float] = {}

    def run(self, records: Records | None) -> bool:
        """Score the validation examples, and write the scores down where there are records.

        Returns:
            Whether it was done; not where some worker is asked to stop.

        Raises:
            InputError: the score that checkpoints are kept by is none of them.
        """
        result, step = score_split(self._recipe, self._parts, "validation"), self._parts.state.step
        if result is None:
            return False
        if self._worker.is_chief:
            log.info("step %d: validation %s", step, result)
        if records:
            records.write_evaluation(step, "validation", result.means)
        self._scored, self._scores = step, {f"validation/{name}": mean for name, mean in result.means.items()}
        best = self._recipe.checkpoints.retention.best
        if best is not None:
            check_one_of("checkpoints.retention.best", best, tuple(self._scores))
        return True

    @property
    def scores(self) -> Mapping[str, float]:
        """Those of the weights as they are; none where they have not been scored."""
        return self._scores if self._scored == self._parts.state.step else {}

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
