"""The evaluations of a run on its validation examples, early stopping by them, and what they leave.

A detector's evaluation leaves a file in COCO's format, and pictures of the first images with their detections.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.checkpoints.retention import Retention
from lockstep.checks import check_one_of
from lockstep.errors import LockstepError
from lockstep.evaluation.evaluate import Evaluation, evaluate_unless_stopped
from lockstep.evaluation.kept_detections import DetectedImage, with_data_labels
from lockstep.readers.coco_results import write_coco_results
from lockstep.readers.reader import Reader
from lockstep.recipes.parts import Pictures
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.tasks import KEPT, Detection, Task
from lockstep.reporting.console import show_progress
from lockstep.runs.build import Parts
from lockstep.runs.metrics_logger import MetricsLogger
from lockstep.runs.showing import drawn, examples, write_picture
from lockstep.screen import log
from lockstep.types import Progress
from lockstep.workers.rank import Worker, join

if TYPE_CHECKING:
    import numpy.typing as npt

SPLIT = "validation"


def score_split(recipe: Recipe, parts: Parts, split: str, *, most: int | None = None) -> Evaluation | None:
    """Score the present weights of a run; None, on all workers, if one of them is asked to stop.

    `most` is for a trial: so many of the first examples at most, and no progress is shown.
    """
    score: Any = parts.task.score  # there is one, as `parts.scores` says
    how, is_shown = recipe.evaluate, join().is_chief and recipe.watch.console.amount and most is None
    with show_progress(f"scoring {split}") if is_shown else nullcontext() as progress:
        return evaluate_unless_stopped(
            parts.state,
            score,
            parts.examples.held_out(split, most=most),
            weights=how.weights,
            precision=recipe.evaluation_precision,
            micro_batch=how.micro_batch,
            drop_last=how.drop_last,
            metrics=parts.task.metrics,
            progress=progress,
        )


class Validation:
    """The evaluations of a segment of a run on the validation examples; all workers make the same calls.

    Where there is a workdir the chief has a logger. `history` has the scores, by step, by which checkpoints are the
    best; metrics.jsonl goes before it.
    """

    def __init__(
        self, recipe: Recipe, parts: Parts, worker: Worker, logger: MetricsLogger | None, history: Mapping[int, float]
    ) -> None:
        self._recipe, self._parts, self._worker, self._logger = recipe, parts, worker, logger
        self._latest: Evaluation | None = None
        written = worker.group.broadcast(self._written()) if recipe.evaluate.patience else None
        self.history: dict[int, float] = dict(history if written is None else written)
        """Scores by step, those of this segment included."""
        self._num_left = self._most_evaluations()
        self._has_warned = False

    def _most_evaluations(self) -> float:
        """Return how many evaluations the run may still make."""
        most = self._recipe.evaluate.most_evaluations
        if most is None:
            return math.inf
        made = len(self._logger.metrics.evaluations(SPLIT)) if self._logger else 0
        all_made: int = self._worker.group.broadcast(made)
        return max(0, most - all_made)

    def _written(self) -> list[list[float]] | None:
        """Return steps and scores of the evaluations in metrics.jsonl; None on workers that do not write it."""
        if self._logger is None:
            return None
        name = str(self._retention.best).removeprefix(f"{SPLIT}/")
        return [[step, scores[name]] for step, scores in self._logger.metrics.evaluations(SPLIT) if name in scores]

    def run(self) -> bool:
        """Score the validation examples, and write the scores; False if left off because a worker is asked to stop.

        After as many evaluations as a recipe allows, there are no others: a warning says so once.
        """
        if not self._num_left:
            if self._worker.is_chief and not self._has_warned:
                limit = self._recipe.evaluate.limit
                log.warning("step %d: validation is left off from now on, by %s", self._parts.state.step, limit)
            self._has_warned = True
            return True
        result, step = score_split(self._recipe, self._parts, SPLIT), self._parts.state.step
        if result is None:
            return False
        if self._worker.is_chief:
            log.info("step %d: validation %s", step, result)
        if self._logger:
            self._logger.write_evaluation(step, SPLIT, result.scores)
            self._logger.write_images(self._pictures(), step)
        self._latest = result
        self._num_left -= 1
        best = self._retention.best
        if best is not None:
            check_one_of("checkpoints.retention.best", best, tuple(self.scores))
            self.history[step] = self.scores[best]
        return True

    def _pictures(self) -> Mapping[str, Any]:
        """Write the outputs of a detector's evaluation, and return its pictures; the run goes on without them."""
        try:
            return evaluation_outputs(self._parts.task, self._parts.examples.reader(SPLIT))
        except LockstepError as error:
            log.warning("the detections are not written down. %s", error.what)
            return {}

    @property
    def latest(self) -> Evaluation | None:
        """The evaluation of the present weights; None if they have not been scored."""
        return self._latest if self._latest and self._latest.step == self._parts.state.step else None

    @property
    def scores(self) -> Mapping[str, float]:
        """Scores of the present weights by name; empty if they have not been scored."""
        return {f"{SPLIT}/{name}": score for name, score in self.latest.scores.items()} if self.latest else {}

    @property
    def is_out_of_patience(self) -> bool:
        """Whether the last `evaluate.patience` evaluations have brought no better checkpoint."""
        patience = self._recipe.evaluate.patience
        return patience is not None and num_without_improvement([*self.history.values()], self._retention) >= patience

    def early_stop_reason(self) -> str:
        """Say why the run stops early: `no better validation/top1 in 5 evaluations (evaluate.patience)`."""
        count = self._recipe.evaluate.patience
        return f"no better {self._retention.best} in {count} evaluation{'s' if count != 1 else ''} (evaluate.patience)"

    @property
    def _retention(self) -> Retention:
        return self._recipe.checkpoints.retention

    def is_overdue(self, start: Progress, *, anew: bool = False) -> bool:
        """Whether the evaluation that was due after the step before `start` was left off, since the run was stopped.

        It is made `anew` though its scores are written down where a checkpoint with them may not be.
        """
        is_due = self._recipe.evaluate.every.passed(step_before(start, self._recipe.batch_size), start)
        if not (start.step and is_due and self._parts.scores(SPLIT)):
            return False
        is_made = not anew and self._logger is not None and self._logger.metrics.is_evaluated(start.step, SPLIT)
        return not self._worker.group.broadcast(is_made)


def step_before(now: Progress, batch_size: int) -> Progress:
    """Return the progress before the last step."""
    return now._replace(step=now.step - 1, position=now.position - batch_size)


def num_without_improvement(scores: Sequence[float], retention: Retention) -> int:
    """Count the evaluations at the end of a run whose scores, of all in their order, were not among the best."""
    best: dict[int, float] = {}
    count = 0
    for index, score in enumerate(scores):
        is_better = retention.is_among_best(score, best)
        best |= {index: score} if is_better else {}
        count = 0 if is_better else count + 1
    return count


def evaluation_outputs(task: Task, reader: Reader) -> Mapping[str, npt.NDArray[Any]]:
    """Write the files of the detections that a task has kept, on the chief, in place of those written before.

    The examples that were scored are read once more for pictures.

    Returns:
        The pictures by the tags of the Object Detection API, "image-0" and on: uint8 (3, height, width). None of a
        task that keeps no detections.

    Raises:
        InputError: a file cannot be written.
    """
    if not isinstance(task, Detection) or KEPT not in task.metrics:
        return {}
    kept: Any = task.metrics[KEPT]
    how = task.evaluation
    if how.export_path is not None:
        categories = getattr(reader, "category_ids", {})
        found = ((image.source_id, with_data_labels(image.found, categories)) for image in kept)
        write_coco_results(how.export_path, found)
    pictures = _pictures([*kept][: how.pictures.count], reader, how.pictures)
    if how.pictures.folder is not None:
        for tag, picture in pictures.items():
            write_picture(Path(how.pictures.folder) / f"export-{tag}.png", picture)
    return {tag: picture.numpy() for tag, picture in pictures.items()}


def _pictures(images: Sequence[DetectedImage], reader: Reader, how: Pictures) -> dict[str, Tensor]:
    """Draw images with their detections; one that cannot be read any more is left out."""
    shown = examples(reader, [image.example_index for image in images], order="sequential")
    classes = getattr(reader, "classes", {})
    return {
        f"image-{place}": drawn(example.original, image.found, classes, how)
        for place, (image, example) in enumerate(zip(images, shown, strict=True))
        if example.original
    }
