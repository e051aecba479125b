"""The evaluations of a run: when one is owed, what becomes of its scores, and when patience with them is at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.checkpoints.retention import Retention
from lockstep.checks import check_one_of
from lockstep.evaluation.evaluate import Evaluation, evaluate_unless_stopped
from lockstep.progress import Progress
from lockstep.recipes.recipe import Recipe
from lockstep.runs.build import Parts
from lockstep.runs.metrics_logger import MetricsLogger
from lockstep.screen import log
from lockstep.workers.rank import Worker

SPLIT = "validation"


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
        recipe: of the run, or of its stage.
        parts: of the run; the weights of its state are scored.
        worker: this worker.
        records: what is written of the run; the chief's, where there is a workdir.
        history: by step, the scores by which checkpoints are the best, of the run so far; where the run is written
            down, that counts.
    """

    def __init__(
        self,
        recipe: Recipe,
        parts: Parts,
        worker: Worker,
        logger: MetricsLogger | None,
        history: Mapping[int, float],
    ) -> None:
        self._recipe, self._parts, self._worker, self._logger = recipe, parts, worker, logger
        self._latest: Evaluation | None = None
        written = worker.group.broadcast(self._written()) if recipe.evaluate.patience else None
        self.history: dict[int, float] = dict(history if written is None else written)
        """The same with those of this stretch."""

    def _written(self) -> list[list[float]] | None:
        """The step of each evaluation, and the score by which checkpoints are the best; the chief's, if it writes."""
        if self._logger is None:
            return None
        name = str(self._retention.best).removeprefix(f"{SPLIT}/")
        return [[step, scores[name]] for step, scores in self._logger.evaluations(SPLIT) if name in scores]

    def run(self) -> bool:
        """Score the validation examples, and write the scores down where there are records.

        Returns:
            Whether it was done; not where some worker is asked to stop.

        Raises:
            InputError: the score that checkpoints are kept by is none of them.
        """
        result, step = score_split(self._recipe, self._parts, SPLIT), self._parts.state.step
        if result is None:
            return False
        if self._worker.is_chief:
            log.info("step %d: validation %s", step, result)
        if self._logger:
            self._logger.write_evaluation(step, SPLIT, result.means)
        self._latest = result
        best = self._retention.best
        if best is not None:
            check_one_of("checkpoints.retention.best", best, tuple(self.scores))
            self.history[step] = self.scores[best]
        return True

    @property
    def latest(self) -> Evaluation | None:
        """That of the weights as they are; None where they have not been scored."""
        return self._latest if self._latest and self._latest.step == self._parts.state.step else None

    @property
    def scores(self) -> Mapping[str, float]:
        """Those of the weights as they are; none where they have not been scored."""
        return {f"{SPLIT}/{name}": mean for name, mean in self.latest.means.items()} if self.latest else {}

    @property
    def is_out_of_patience(self) -> bool:
        """Whether the last evaluations, as many as the recipe's patience, have brought no better checkpoint."""
        patience = self._recipe.evaluate.patience
        return patience is not None and num_in_vain([*self.history.values()], self._retention) >= patience

    def why_no_patience(self) -> str:
        """What has used it up: `no better validation/top1 in 5 evaluations (evaluate.patience)`."""
        count = self._recipe.evaluate.patience
        return f"no better {self._retention.best} in {count} evaluation{'s' if count != 1 else ''} (evaluate.patience)"

    @property
    def _retention(self) -> Retention:
        return self._recipe.checkpoints.retention

    def is_owed(self, start: Progress) -> bool:
        """Whether the last step before this start was to be followed by an evaluation, which was left off to stop.

        Args:
            start: where the run goes on.
        """
        before = start._replace(step=start.step - 1, position=start.position - self._recipe.batch_size)
        is_due = self._recipe.evaluate.every.passed(before, start)
        if not (start.step and is_due and self._parts.examples.has(SPLIT)):
            return False
        is_made = self._logger is not None and self._logger.is_evaluated(start.step, SPLIT)
        return not self._worker.group.broadcast(is_made)


def num_in_vain(scores: Sequence[float], retention: Retention) -> int:
    """How many evaluations in a row, the last ones, had a score by which no checkpoint is among the best.

    Args:
        scores: of all evaluations of a run, in their order.
        retention: what is better, and by how much.
    """
    best: dict[int, float] = {}
    count = 0
    for index, score in enumerate(scores):
        is_better = retention.is_among_best(score, best)
        best |= {index: score} if is_better else {}
        count = 0 if is_better else count + 1
    return count
