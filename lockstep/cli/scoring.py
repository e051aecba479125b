"""What `lockstep evaluate` does where torch is loaded."""

from __future__ import annotations

import argparse
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoints.store import Checkpoint
from lockstep.cli.crew import joined, num_workers, stopped_code
from lockstep.cli.main import parse
from lockstep.cli.score_details import Details
from lockstep.cli.score_files import ScoreFiles, reference_names, write_json
from lockstep.cli.scored_run import ScoredRun, scored_run
from lockstep.evaluation.evaluate import Evaluation, evaluate_unless_stopped
from lockstep.evaluation.follow import Polling, follow
from lockstep.readers.reader import Reader
from lockstep.recipes.recipe import Recipe
from lockstep.runs.build import Examples, build_state, prepared, task
from lockstep.runs.stages import recipe_at, recipe_at_start
from lockstep.runs.workdir import Workdir
from lockstep.screen import log
from lockstep.training.resume import load_states, read_checkpoint
from lockstep.workers.rank import Worker


def plan(argv: list[str]) -> dict[str, Any]:
    """How many workers to start; what can be refused before they do is refused here."""
    arguments = parse(argv)
    recipe = scored_run(arguments).recipe
    return {"workers": num_workers(arguments.workers, arguments.device or recipe.device, recipe.num_towers)}


def work(argv: list[str]) -> int:
    """Score in one worker; all of them get the same result, and the chief prints it and writes it down."""
    arguments = parse(argv)
    run = scored_run(arguments)
    with joined(arguments.device or run.recipe.device) as worker, closing(_Scoring(run, arguments, worker)) as scoring:
        is_complete = _follow(run, run.patience, scoring, worker) if run.patience else scoring.score(_read(run))
        return 0 if is_complete else stopped_code(worker, requeue=False)


def accuracy(result: Evaluation) -> str:
    """The share of examples that were right, with the count beside it: `99.12 % (9912 of 10000)`."""
    return f"{100 * result['top1']:.2f} % ({result.sums['top1']:.0f} of {result.num_examples})"


def tell(result: Evaluation, split: str) -> None:
    """Say the scores; where not only the best guess counts, in the words of the inception trainer too."""
    if "top1" in result.sums:
        log.info("%s accuracy %s", split, accuracy(result))
    named = reference_names(result.means)
    if set(named) - {"Precision @ 1"}:
        shares = " ".join(f"{name.lower()} = {share:.4f}" for name, share in named.items())
        log.info("%s [%d examples]", shares, result.num_examples)


class _Scoring:
    """A model of the run, and the examples that its checkpoints are scored on, on one worker."""

    def __init__(self, run: ScoredRun, arguments: argparse.Namespace, worker: Worker) -> None:
        self._run, self._arguments, self._worker = run, arguments, worker
        self._files = ScoreFiles(run.path)
        prepared(run.recipe, worker)
        self._build(recipe_at_start(run.recipe))
        worker.pulse.at(0, "evaluate")  # while it waits, too: a stop leaves nothing to save

    def _build(self, recipe: Recipe) -> None:
        """Have what is scored of a stage of the run: stages differ in what is averaged, and in the size of images."""
        self._recipe, self._examples = recipe, Examples(recipe)
        self._held = self._examples.held_out(self._run.split)
        self._state = build_state(recipe, self._worker)
        confusion, mistakes = _path(self._arguments.confusion), _path(self._arguments.mistakes)
        self._details = Details(task(recipe), recipe.model.num_classes, confusion=confusion, mistakes=mistakes)

    def score(self, checkpoint: Checkpoint) -> bool:
        """Score it, and have the chief tell; whether it was done, and not where some worker is asked to stop."""
        choices = Workdir(self._run.path).saved_choices()
        torch.set_num_threads(choices["threads"] if choices else 1)
        recipe = recipe_at(self._run.recipe, checkpoint)
        if recipe != self._recipe:
            self._build(recipe)
        load_states(checkpoint, self._state)
        how = self._run.recipe.evaluate
        result = evaluate_unless_stopped(
            self._state,
            self._details.score,
            self._held,
            weights=self._run.weights,
            micro_batch=how.micro_batch,
            drop_last=how.drop_last,
            metrics=self._details.metrics,
        )
        if result and self._worker.is_chief:
            log.info("%s weights of step %d, from %s", result.weights, result.step, checkpoint.path)
            self._conclude(result)
        return result is not None

    def close(self) -> None:
        """Close the files that the scores are written to."""
        self._files.close()

    def _conclude(self, result: Evaluation) -> None:
        split = self._run.split
        tell(result, split)
        self._files.write(result, split)
        if path := _path(self._arguments.json):
            write_json(result, split, path)
        self._details.write(lambda: self._reader)

    @cached_property
    def _reader(self) -> Reader:
        """The images as they are stored, whatever the stage: opened where some are to be shown."""
        return self._examples.reader(self._run.split)


def _path(given: str | None) -> Path | None:
    return None if given is None else Path(given)


def _follow(run: ScoredRun, patience: Polling, scoring: _Scoring, worker: Worker) -> bool:
    """Score each new checkpoint; whether it went on to its end, and not to a signal, on some worker at least."""

    def is_stopped() -> bool:
        return worker.pulse.stop_requested is not None

    for checkpoint in follow(run.store, patience, is_over=run.is_over, stop=is_stopped):
        if not scoring.score(checkpoint):
            return False
    return not any(worker.group.gather(is_stopped()))


def _read(run: ScoredRun) -> Checkpoint:
    checkpoint = read_checkpoint(run.store, run.wanted)
    assert checkpoint is not None, "there are checkpoints, and where all are damaged the chief has raised"
    return checkpoint
