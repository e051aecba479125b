"""`lockstep evaluate`: score a checkpoint of a run, or each new one.

The process that the user starts only launches workers, and loads no torch; they run `lockstep.cli.scoring`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checks import NonNegativeFloat, PositiveInt, check_value
from lockstep.cli.shared import Command, add_machine_arguments, check_target, given_seat
from lockstep.cli.weights import add_weights_arguments, chosen_run, store_in
from lockstep.cores import NumThreads
from lockstep.errors import InputError

if TYPE_CHECKING:
    from lockstep.checkpoints.store import Store
    from lockstep.evaluation.follow import Polling
    from lockstep.evaluation.scores import Weights
    from lockstep.recipes.recipe import Recipe

_FILES = {
    "json": (".json", "The result is written as JSON."),
    "confusion": (".csv", "The confusion matrix is written as a table of CSV."),
    "mistakes": (".png", "The worst mistakes are shown as one PNG."),
}
"""The flags that name a file to write, with its ending."""

_SETTABLE = ("data", "evaluate", "feed")
"""The parts of a recipe that an evaluation may change: no others could change which examples are scored, or how."""


def _add_arguments(evaluate: argparse.ArgumentParser) -> None:
    which = add_weights_arguments(evaluate)
    which.add_argument("--follow", action="store_true", help="each new one, until the run is over")
    evaluate.add_argument(
        "--split", help="which examples: test (default, where there are some), validation (default else) or train"
    )
    evaluate.add_argument(
        "--data", metavar="PATH", help="other data: shards, their pattern, or a folder with a folder for each class"
    )
    evaluate.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="PATH=VALUE", help="of data, evaluate or feed"
    )
    evaluate.add_argument("--examples", type=int, metavar="N", help="the first N of the split (default: as the recipe)")
    evaluate.add_argument(
        "--interval", type=float, metavar="SECONDS", help="with --follow, at least so long from one to the next (60)"
    )
    evaluate.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="with --follow, end after so long without a new one"
    )
    evaluate.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result, with --follow the last one, as JSON"
    )
    evaluate.add_argument(
        "--confusion", type=Path, metavar="FILE", help="which classes are taken for which: a table of CSV"
    )
    evaluate.add_argument("--mistakes", type=Path, metavar="FILE", help="the examples with the largest losses: one PNG")
    evaluate.add_argument("--force", action="store_true", help="overwrite these files")
    add_machine_arguments(evaluate, threads="those of the run")


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    from lockstep.launcher.launch import is_worker, launch

    if is_worker():
        return _work(list(argv))
    seat = given_seat(arguments, os.environ)
    if seat is None:  # of several hosts each refuses it in the plan, so that the others hear of it
        # What can be refused without torch is refused here, before there is any other process.
        scored_run(arguments)
    return launch(argv, plan=_plan, main=_work, preload=("torch", "lockstep.cli.scoring"), seat=seat)


def _plan(argv: list[str]) -> dict[str, Any]:
    from lockstep.cli.scoring import plan_scoring

    return plan_scoring(argv)


def _work(argv: list[str]) -> int:
    from lockstep.cli.scoring import score_in_worker

    return score_in_worker(argv)


@dataclass(frozen=True)
class ScoredRun:
    """The run, the examples and the weights to score, by the flags and the recipe of the run."""

    path: Path
    """The workdir."""
    recipe: Recipe
    """The run's, with the settings of the flags."""
    split: str
    is_other_data: bool
    """Whether the flags name other examples than those of the run."""
    weights: Weights
    polling: Polling | None
    """Times to wait for new checkpoints; None: one checkpoint is scored."""
    wanted: int | None
    """The step of the checkpoint; None: the newest."""

    @property
    def store(self) -> Store:
        """The checkpoints of the run."""
        return store_in(self.path, self.recipe)

    def is_over(self) -> bool:
        """Whether the run's history has its end, which is written after the last checkpoint."""
        from lockstep.runs.workdir import HISTORY

        path = self.path / HISTORY
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        try:
            return bool(lines) and json.loads(lines[-1])["event"] == "end"
        except (ValueError, KeyError, TypeError):  # a line that is being written
            return False


def scored_run(arguments: argparse.Namespace) -> ScoredRun:
    """Decide what is to be scored, and refuse flags that this run cannot serve."""
    from lockstep.runs.known_data import located

    polling = _polling(arguments)
    check_value("--threads", arguments.threads, NumThreads | None)
    _check_split(arguments.split)
    for flag, (ending, what) in _FILES.items():
        if (file := getattr(arguments, flag)) is not None:
            check_target(file, (ending,), what, overwrite=arguments.force, flag=f"--{flag}")
    path, saved, wanted, weights = chosen_run(arguments)
    saved = located(saved, path)
    recipe = _with_settings(arguments, saved)
    split = arguments.split or ("test" if "test" in recipe.data.splits else "validation")
    if arguments.data is not None:
        recipe = replace(recipe, data=recipe.data.at(split, arguments.data))
    if not (arguments.average or arguments.raw):
        weights = recipe.evaluate.weights
    _check_there(split, path, recipe)
    recipe.data.check_there(split)
    is_other = recipe.data.path_of(split) != saved.data.path_of(split)
    return ScoredRun(path, recipe, split, is_other, weights, polling, wanted)


def _with_settings(arguments: argparse.Namespace, saved: Recipe) -> Recipe:
    """Apply the settings of the flags; one that would change what was trained is refused."""
    from lockstep.recipes.recipe import recipe_changes
    from lockstep.recipes.settings import with_settings

    recipe = with_settings(saved, arguments.settings)
    if arguments.examples is not None:
        check_value("--examples", arguments.examples, PositiveInt)
        recipe = replace(recipe, evaluate=replace(recipe.evaluate, examples=arguments.examples))
    wrong = [change for change in recipe_changes(saved, recipe) if not change.is_allowed(_SETTABLE)]
    if wrong or type(recipe.data) is not type(saved.data):
        raise InputError(
            "These settings would change what was trained, and a checkpoint is scored as it was trained.",
            given="; ".join(map(str, wrong)) or f"data of another kind: {type(recipe.data).__name__}",
            expected=f"settings of {', '.join(_SETTABLE)}: which examples are scored, and how",
            hint="leave them out; to train with them: lockstep train",
        )
    return recipe


def _polling(arguments: argparse.Namespace) -> Polling | None:
    from lockstep.evaluation.follow import Polling

    given = {"--interval": arguments.interval, "--timeout": arguments.timeout}
    said = {flag: seconds for flag, seconds in given.items() if seconds is not None}
    for flag, seconds in said.items():
        check_value(flag, seconds, NonNegativeFloat)
    if not arguments.follow:
        if said:
            flags = " and ".join(said)
            raise InputError(
                f"Without --follow nothing is waited for, and {flags} {'says' if len(said) == 1 else 'say'} how.",
                given=" ".join(f"{flag} {seconds:g}" for flag, seconds in said.items()),
                expected="--follow with it",
                hint=f"add --follow to score each new checkpoint, or leave {flags} out",
            )
        return None
    interval = Polling().interval_seconds if arguments.interval is None else arguments.interval
    return Polling(interval, arguments.timeout)


def _check_split(split: str | None) -> None:
    from lockstep.recipes.data import SPLITS

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


COMMAND = Command("score a checkpoint of a workdir", _add_arguments, _run)
