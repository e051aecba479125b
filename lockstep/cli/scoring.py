"""The workers of `lockstep evaluate`: score checkpoints, and write the scores down.

summaries-evaluation/SPLIT-WEIGHTS/   the scores by step, for TensorBoard
evaluations.jsonl                     a line for each evaluation: what was scored, and how well; no times

Nothing else in the workdir is touched, and the run itself may go on meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from lockstep.checkpoints.fetching import Outages, fetch_run, reached
from lockstep.checkpoints.mirror import is_stopped, shown_path
from lockstep.checkpoints.store import Checkpoint
from lockstep.cli.cards import Card, Tile, card, contact_sheet
from lockstep.cli.detector_details import DetectorDetails
from lockstep.cli.given_run import ScoredRun, has_ended, scored_run
from lockstep.cli.shared import choose_num_workers, given_seat, join_workers, worker_exit_code
from lockstep.durable import atomic_write, make_folder
from lockstep.errors import InputError, LockstepError
from lockstep.evaluation.evaluate import Evaluation, evaluate_unless_stopped
from lockstep.evaluation.follow import Polling, follow
from lockstep.images.drawing import printable
from lockstep.images.pillow import png_bytes
from lockstep.metrics.classification import ClassNames, ConfusionMatrix, class_name, confusion_csv
from lockstep.metrics.metric import NO_METRICS
from lockstep.metrics.worst_mistakes import Mistake, WorstMistakes
from lockstep.readers.reader import Reader
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.tasks import CONFUSION, MISTAKES, Classification, Detection, OwnTask
from lockstep.reporting.append import append_line
from lockstep.reporting.console import show_progress
from lockstep.reporting.events import EventFile, image_summary, scalar_summary
from lockstep.reporting.jsonl import without_nonfinite
from lockstep.run_files import EVALUATION_SUMMARIES, EVALUATIONS
from lockstep.runs.build import Examples, build_state, prepared
from lockstep.runs.inputs import check_same_classes
from lockstep.runs.showing import ShownExample, examples
from lockstep.runs.stages import recipe_at, recipe_at_start
from lockstep.runs.validation import evaluation_outputs
from lockstep.runs.workdir import KnownData, Workdir, class_names
from lockstep.screen import log, write_json
from lockstep.storage.remote_path import RemotePath, is_url
from lockstep.storage.retries import Ending, ended_by
from lockstep.training.saving import load_states, read_checkpoint
from lockstep.types import Batch
from lockstep.workers.rank import Worker

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL import Image

_SIDE_PIXELS = 300
_SECONDS_BETWEEN_LOOKS = 10.0
_TOP = re.compile(r"top(\d+)")
_OF_DETECTIONS = re.compile(r"\w+_(Precision|Recall|PerformanceByCategory)/")


def plan_scoring(arguments: argparse.Namespace) -> dict[str, Any]:
    """Decide how many workers to start, and refuse what can be refused before."""
    recipe = scored_run(arguments).recipe
    device, sharing = _placement(arguments, recipe)
    seat = given_seat(arguments, os.environ)
    return {"workers": choose_num_workers(arguments.workers, device, recipe.num_towers, sharing, seat)}


def _placement(arguments: argparse.Namespace, recipe: Recipe) -> tuple[str | None, int | None]:
    """Return the device, and how many workers may share one: by the flags, else by the recipe."""
    sharing = recipe.workers_per_device if arguments.workers_per_device is None else arguments.workers_per_device
    return arguments.device or recipe.device, sharing


def score_in_worker(arguments: argparse.Namespace) -> int:
    """Score on one worker. All of them get the same result; the chief logs it and writes it down."""
    run = scored_run(arguments)
    with (
        join_workers(*_placement(arguments, run.recipe)) as worker,
        closing(_Scoring(run, arguments, worker)) as scoring,
    ):
        is_complete = _follow(run, run.polling, scoring, worker) if run.polling else scoring.score(_checkpoint(run))
        if arguments.json and scoring.latest:
            write_json(scoring.latest)
        return 0 if is_complete else worker_exit_code(worker)


def score_once(arguments: argparse.Namespace, worker: Worker) -> None:
    """Score a run as `lockstep evaluate` does, on the workers that have trained it."""
    run = scored_run(arguments)
    with closing(_Scoring(run, arguments, worker)) as scoring:
        scoring.score(_checkpoint(run))


def format_accuracy(result: Evaluation) -> str:
    """Format the share of examples that were right, with their number: `99.12 % (9912 of 10000)`."""
    return f"{100 * result['top1']:.2f} % ({result.sums['top1']:.0f} of {result.num_examples})"


def log_scores(result: Evaluation, split: str) -> None:
    """Log the scores: the accuracies in the words of the inception trainer, too, and a line for each other score."""
    if "top1" in result.sums:
        log.info("%s accuracy %s", split, format_accuracy(result))
    named = reference_names(result.scores)
    if set(named) - {"Precision @ 1"}:
        shares = " ".join(f"{name.lower()} = {share:.4f}" for name, share in named.items())
        log.info("%s [%d examples]", shares, result.num_examples)
    others = {name: value for name, value in result.scores.items() if not _TOP.fullmatch(name)}
    width = max(map(len, others), default=0)
    for name, value in others.items():
        log.info("%s %-*s  %.4f", split, width, name, value)


def reference_names(scores: Mapping[str, float]) -> dict[str, float]:
    """Name the top-k shares as the inception trainer does: "Precision @ 1", "Recall @ 5"."""
    numbers = {int(found[1]): score for name, score in scores.items() if (found := _TOP.fullmatch(name))}
    return {f"{'Precision' if k == 1 else 'Recall'} @ {k}": mean for k, mean in sorted(numbers.items())}


class _Scoring:
    """The model of a run, and the examples that its checkpoints are scored on, on one worker."""

    def __init__(self, run: ScoredRun, arguments: argparse.Namespace, worker: Worker) -> None:
        self._run, self._arguments, self._worker = run, arguments, worker
        self._files = ScoreFiles(run.path)
        self.latest: Mapping[str, Any] = {}
        """What the chief has found last."""
        prepared(run.recipe, worker)
        self._build(recipe_at_start(run.recipe))
        worker.pulse.at(0, "evaluate")  # while it waits, too: a stop leaves nothing to save

    def _build(self, recipe: Recipe) -> None:
        """Build the model and open the examples of a stage: stages differ in averages and in the size of images."""
        known = KnownData.of(Workdir(self._run.path)).class_names
        self._recipe, self._examples = recipe, Examples(recipe, class_names=known)
        self._held = self._examples.held_out(self._run.split)
        names = class_names(self._examples.reader(self._run.split))
        self._class_names = known or names
        check_same_classes(self._run.split, names, self._class_names)
        self._state = build_state(recipe, self._worker)
        files = {name: getattr(self._arguments, name) for name in (CONFUSION, "curves", MISTAKES)}
        task = recipe.chosen_task.with_metrics(self._class_names, NO_METRICS)
        self._details: Details | DetectorDetails
        if isinstance(task, Detection):
            self._details = DetectorDetails(task, self._class_names, **files)
        else:
            self._details = Details(task, recipe.num_classes, **files)

    def score(self, checkpoint: Checkpoint) -> bool:
        """Score a checkpoint, and let the chief write the scores; returns whether no worker was stopped meanwhile."""
        choices = Workdir(self._run.path).saved_choices()
        torch.set_num_threads(self._arguments.threads or (choices["threads"] if choices else 1))
        recipe = recipe_at(self._run.recipe, checkpoint)
        if recipe != self._recipe:
            self._build(recipe)
        load_states(checkpoint, {"": self._state})
        how = self._run.recipe.evaluate
        with show_progress(f"scoring {self._run.split}") if self._worker.is_chief else nullcontext() as progress:
            result = evaluate_unless_stopped(
                self._state,
                self._details.score,
                self._held,
                weights=self._run.weights,
                precision=recipe.evaluation_precision,
                micro_batch=how.micro_batch,
                drop_last=how.drop_last,
                metrics=self._details.metrics,
                progress=progress,
            )
        if result and self._worker.is_chief:
            path = recipe.data.path_of(self._run.split)
            on = f", on {path}" if path else ""
            in_half = f" in {result.precision}" if result.precision != "fp32" else ""
            log.info("%s weights of step %d%s, from %s%s", result.weights, result.step, in_half, checkpoint.path, on)
            self._write(result)
        return result is not None

    def close(self) -> None:
        """Close the files that the scores are written to."""
        self._files.close()

    def _write(self, result: Evaluation) -> None:
        split = self._run.split
        data = self._recipe.data.path_of(split) if self._run.is_other_data else None
        log_scores(result, split)
        images = evaluation_outputs(self._details.task, self._examples.reader(split))
        more = self._details.facts
        self._files.write(result, split, data, images, more)
        self.latest = {**_facts(result, split, data), **more}
        if self._arguments.to:
            write_result(result, split, self._arguments.to, data, more)
        self._details.write(self._examples.reader(split), self._class_names)


class _BucketLooks:
    """Looks at a run on a bucket every `_SECONDS_BETWEEN_LOOKS`, and brings here what has come."""

    def __init__(self, bucket: RemotePath) -> None:
        self._bucket, self._is_over, self._outages, self._next = bucket, False, Outages(), 0.0

    def is_over(self) -> bool:
        """Whether the run there is over, and all of its checkpoints are here; a stop ends a look."""
        if time.monotonic() >= self._next:
            with self._outages.outlived(), ended_by(Ending(is_stopped)):
                with reached(self._bucket):
                    is_over = has_ended(self._bucket)  # asked first: the last checkpoint is there before the end
                fetch_run(self._bucket)
                self._is_over = is_over
            self._next = time.monotonic() + _SECONDS_BETWEEN_LOOKS
        return self._is_over


def _follow(run: ScoredRun, polling: Polling, scoring: _Scoring, worker: Worker) -> bool:
    """Score each new checkpoint; returns whether the run came to its end, and no worker was stopped."""
    is_over, shown = run.is_over, shown_path(run.path)
    if is_url(shown):
        is_over = _BucketLooks(RemotePath(shown)).is_over
    checkpoints = follow(run.store, polling, is_over=is_over, stop=is_stopped)
    most = run.recipe.evaluate.most_evaluations
    for count, checkpoint in enumerate(islice(checkpoints, most), 1):
        if not scoring.score(checkpoint):
            return False
        if count == most and worker.is_chief:
            log.info("no checkpoint is waited for any more, by %s", run.recipe.evaluate.limit)
    return not any(worker.group.gather(is_stopped()))


def _checkpoint(run: ScoredRun) -> Checkpoint:
    checkpoint = read_checkpoint(run.store, run.wanted)
    assert checkpoint is not None, "there are checkpoints, and where all are damaged the chief has raised"
    return checkpoint


def _facts(result: Evaluation, split: str, data: str | None) -> dict[str, Any]:
    """Return the facts of an evaluation: the same for the same weights and examples; "nan" and "inf" are text."""
    other = {"data": data} if data else {}
    facts: dict[str, Any] = without_nonfinite({"step": result.step, "split": split, **other, **result.facts})
    return facts


def write_result(
    result: Evaluation, split: str, path: Path, data: str | None = None, more: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Write one result to a JSON file of its own, with the path of its examples if it is not that of the run.

    `more` are further facts of it.

    Raises:
        InputError: the file cannot be written.
    """
    with atomic_write(path, failure=InputError) as file:
        file.write(json.dumps({**_facts(result, split, data), **more}, indent=1).encode() + b"\n")


class ScoreFiles:
    """The files of a workdir that keep all evaluations; one that cannot be written is a warning in the log."""

    def __init__(self, workdir: Path) -> None:
        self._workdir = workdir
        self._events: dict[Path, EventFile] = {}

    def write(
        self,
        result: Evaluation,
        split: str,
        data: str | None = None,
        images: Mapping[str, npt.NDArray[Any]] = MappingProxyType({}),
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Add the scores, further facts and pictures of an evaluation; TensorBoard shows the run's own examples."""
        path, folder = self._workdir / EVALUATIONS, self._workdir / EVALUATION_SUMMARIES / f"{split}-{result.weights}"
        with _logged_if_refused(path):
            append_line(path, json.dumps({**_facts(result, split, data), **more}))
        if data is not None:
            return
        with _logged_if_refused(folder):
            if folder not in self._events:
                make_folder(folder)
                self._events[folder] = EventFile(folder)
            ours = {f"evaluation/{split}/{name}": score for name, score in result.scores.items()}
            of_detections = {name: score for name, score in result.scores.items() if _OF_DETECTIONS.match(name)}
            named = {**reference_names(result.scores), **of_detections, **ours}
            self._events[folder].write(scalar_summary(named), result.step)
            if images:
                self._events[folder].write(image_summary(images), result.step)

    def close(self) -> None:
        """Close the event files."""
        for file in self._events.values():
            file.close()


@contextmanager
def _logged_if_refused(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, LockstepError) as error:
        why = error.what if isinstance(error, LockstepError) else f"{path} cannot be written: {error.strerror}."
        log.warning("the scores are not written down. %s", why)


class Details:
    """The confusion matrix (CSV) and the worst mistakes (PNG) of a classifier, each if there is a file to write."""

    facts: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        task: Classification | OwnTask,
        num_classes: int,
        *,
        confusion: Path | None,
        mistakes: Path | None,
        curves: Path | None = None,
    ) -> None:
        is_classifier = isinstance(task, Classification)
        for name, path in {CONFUSION: confusion, "curves": curves, MISTAKES: mistakes}.items():
            if path is not None and not (is_classifier and name != "curves"):
                raise InputError(
                    f"The scores of this run have no {name} to write.",
                    given=f"--{name} {path}",
                    expected="the run of a detector" if name == "curves" else "the run of a classifier or a detector",
                    hint=f"leave --{name} out",
                )
        self.task, self._confusion, self._mistakes = task, confusion, mistakes
        self._matrix, self._worst = None if confusion is None else ConfusionMatrix(num_classes), WorstMistakes()
        self.metrics = dict(task.metrics)
        if self._matrix is not None:
            self.metrics[CONFUSION] = self._matrix
        if mistakes is not None:
            self.metrics[MISTAKES] = self._worst

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Score each example, and return the inputs of both, too."""
        if self.task.score is None:
            raise InputError(
                "This task has no score.",
                given="a run by losses of its own alone",
                expected="a task that says how an example is scored",
                hint="give the task a function score(model, batch), and train with it",
            )
        if not isinstance(self.task, Classification) or (self._confusion is None and self._mistakes is None):
            return dict(self.task.score(model, batch))
        found = self.task.score_in_detail(model, batch)
        return {name: value for name, value in found.items() if name in self.metrics or not isinstance(value, tuple)}

    def write(self, reader: Reader, names: ClassNames) -> None:
        """Write the files, on the chief: its metrics alone have seen the examples, which the reader reads again."""
        if self._confusion is not None and self._matrix is not None:
            with atomic_write(self._confusion, failure=InputError) as file:
                # Classes are named by folders, whose names need not be text.
                file.write(confusion_csv(self._matrix.compute(), names).encode(errors="backslashreplace"))
        if self._mistakes is not None:
            with atomic_write(self._mistakes, failure=InputError) as file:
                file.write(png_bytes(mistakes_sheet(self._worst.compute(), reader, names)))


def mistakes_sheet(mistakes: Sequence[Mistake], reader: Reader, names: ClassNames = ()) -> Image.Image:
    """Draw a contact sheet of examples, each with its index, its loss, the predicted class and its own.

    An example that cannot be read any more is shown with the reason, a class without a name as its number.
    """
    shown = examples(reader, [mistake.example_index for mistake in mistakes], order="sequential")
    cards = [_mistake_card(mistake, example, names) for mistake, example in zip(mistakes, shown, strict=True)]
    title = f"the {len(cards)} worst mistakes" if len(cards) > 1 else "the worst mistake" if cards else "no mistakes"
    return contact_sheet(title, cards, _SIDE_PIXELS)


def _mistake_card(mistake: Mistake, example: ShownExample, names: ClassNames) -> Card:
    shown = card(example, _SIDE_PIXELS)
    predicted, right = (printable(class_name(names, label)) for label in (mistake.predicted, mistake.label))
    verdict = f"predicted {predicted}, is {right}"
    details = f"loss {mistake.loss:.4g}" + ("" if shown.tiles else f", {verdict}")
    return replace(shown, details=details, tiles=tuple(Tile(tile.image, verdict) for tile in shown.tiles))
