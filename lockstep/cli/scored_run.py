"""What `lockstep evaluate` is to score: a run, a checkpoint of it or all that come, its weights and a split."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.checkpoints.store import Store
from lockstep.checks import check_range
from lockstep.cli.target_file import check_target
from lockstep.errors import InputError, WorkdirError
from lockstep.evaluation.evaluate import Weights
from lockstep.evaluation.follow import Polling
from lockstep.recipes.data import SPLITS
from lockstep.recipes.recipe import Recipe
from lockstep.runs.workdir import HISTORY, Workdir

JSON, CONFUSION, MISTAKES = "json", "confusion", "mistakes"
_FILES = {
    JSON: (".json", "The result is written as JSON."),
    CONFUSION: (".csv", "The confusion matrix is written as a table of CSV."),
    MISTAKES: (".png", "The worst mistakes are shown as one PNG."),
}


@dataclass(frozen=True)
class ScoredRun:
    """What the flags and the recipe say together."""

    path: Path
    """The workdir."""
    recipe: Recipe
    """Of the run; `evaluate.examples` is what the flags say."""
    split: str
    weights: Weights
    patience: Polling | None
    """How the run is followed; None: one checkpoint is scored."""
    wanted: int | None
    """The step of that checkpoint; None: the newest."""

    @property
    def store(self) -> Store:
        """Its checkpoints."""
        return _store_in(self.path, self.recipe)

    def is_over(self) -> bool:
        """Whether its history says so: the last checkpoint is on the disk by then."""
        path = self.path / HISTORY
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        try:
            return bool(lines) and json.loads(lines[-1])["event"] == "end"
        except (ValueError, KeyError, TypeError):  # a line that is being written
            return False


def scored_run(arguments: argparse.Namespace) -> ScoredRun:
    """What is to be scored.

    Raises:
        InputError: there is no run, it has not what is to be scored, the flags contradict each other, or a file that
            they name cannot be written.
    """
    path, patience = Path(arguments.workdir), _patience(arguments)
    _check_split(arguments.split)
    _check_files(arguments)
    recipe = Workdir(path).recipe()
    if recipe is None:
        raise WorkdirError(
            f"There is no run in {path}.",
            given=str(path),
            expected="the workdir of a run",
            hint=f"check the path, or train first: lockstep train mnist --workdir {path}",
        )
    weights = _weights(arguments, recipe)
    wanted = _wanted(_store_in(path, recipe), arguments)
    if arguments.examples is not None:
        recipe = replace(recipe, evaluate=replace(recipe.evaluate, examples=arguments.examples))
    split = arguments.split or ("test" if "test" in recipe.data.splits else "validation")
    _check_there(split, path, recipe)
    return ScoredRun(path, recipe, split, weights, patience, wanted)


def _check_files(arguments: argparse.Namespace) -> None:
    """Refuse files that cannot be written, before any work is done."""
    for flag, (ending, what) in _FILES.items():
        path = getattr(arguments, flag)
        if path is not None:
            check_target(Path(path), (ending,), what, overwrite=arguments.force, flag=f"--{flag}")


def _store_in(path: Path, recipe: Recipe) -> Store:
    return Store(path / "checkpoints", recipe.checkpoints.retention)


def _patience(arguments: argparse.Namespace) -> Polling | None:
    given = {"--interval": arguments.interval, "--timeout": arguments.timeout}
    said = {flag: seconds for flag, seconds in given.items() if seconds is not None}
    for flag, seconds in said.items():
        check_range(flag, seconds, 0)
    if not arguments.follow:
        _check_unsaid(said)
        return None
    interval = Polling().interval_seconds if arguments.interval is None else arguments.interval
    return Polling(interval, arguments.timeout)


def _check_unsaid(said: Mapping[str, float]) -> None:
    if said:
        flags = " and ".join(said)
        raise InputError(
            f"Without --follow nothing is waited for, and {flags} {'says' if len(said) == 1 else 'say'} how.",
            given=" ".join(f"{flag} {seconds:g}" for flag, seconds in said.items()),
            expected="--follow with it",
            hint=f"add --follow to score each new checkpoint, or leave {flags} out",
        )


def _check_split(split: str | None) -> None:
    if split is not None and split not in SPLITS:
        raise InputError(
            f"There is no split {split!r}.",
            given=f"--split {split}",
            expected=", ".join(SPLITS),
            hint="name one of these, or leave it out to score the test examples",
        )


def _check_there(split: str, path: Path, recipe: Recipe) -> None:
    there = recipe.data.splits
    if there and split not in there:  # a run whose examples come from a function names none
        raise InputError(
            f"The run in {path} has no {split} examples.",
            given=f"a recipe without data.{split}",
            expected=f"--split {' or '.join(there)}",
            hint=f"lockstep evaluate {path} --split {there[-1]}",
        )


def _weights(arguments: argparse.Namespace, recipe: Recipe) -> Weights:
    if arguments.average and recipe.average is None:
        raise InputError(
            f"The run in {arguments.workdir} keeps no averages of its parameters.",
            given="--average",
            expected="a run whose recipe has an average",
            hint="leave --average out, or train with one: --set average.decay=0.9999",
        )
    if arguments.average or arguments.raw:
        return "average" if arguments.average else "raw"
    return recipe.evaluate.weights


def _wanted(store: Store, arguments: argparse.Namespace) -> int | None:
    """The step of the checkpoint to score, which is there; None: the newest, or each that comes."""
    if arguments.follow:
        return None
    if arguments.best:
        return _best(store, arguments.workdir)
    steps, step = store.steps(), arguments.step
    if not steps or step not in (None, *steps):
        raise InputError(
            f"There is no such checkpoint in {store.folder}.",
            given="the newest" if step is None else f"--step {step}",
            expected=f"one of step {', '.join(map(str, steps))}" if steps else "one at least",
            hint="name one of these, or leave --step out"
            if steps
            else "let the run train until it has saved one, or add --follow to wait for it",
        )
    return step if step is None else int(step)


def _best(store: Store, workdir: str) -> int:
    if store.retention.best is None:
        raise InputError(
            f"The run in {workdir} does not say which checkpoint is the best.",
            given="--best",
            expected="a run whose recipe keeps the best checkpoints by some score",
            hint="leave --best out, or train with one: --set checkpoints.retention.best=validation/top1",
        )
    best = store.best()
    if best is None:
        raise InputError(
            f"None of the checkpoints in {store.folder} is known to be the best.",
            given=f"checkpoints without a score {store.retention.best!r}",
            expected="one that was saved after an evaluation",
            hint="leave --best out, or let the run train until it has been scored",
        )
    return best
