"""The flags that choose the weights of a run, and the weights that they choose."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lockstep.errors import InputError, WorkdirError
from lockstep.listing import closest_path, what_is_there

if TYPE_CHECKING:
    from lockstep.checkpoints.store import Store
    from lockstep.evaluation.scores import Weights
    from lockstep.recipes.recipe import Recipe


class ChosenRun(NamedTuple):
    """A run, and which of its weights are wanted."""

    path: Path
    """The workdir."""
    recipe: Recipe
    step: int | None
    """Of the checkpoint, which exists; None: the newest, or each new one."""
    weights: Weights

    @property
    def name(self) -> str:
        """The run and the step as the library takes them: `WORKDIR@STEP`."""
        return str(self.path) if self.step is None else f"{self.path}@{self.step}"


# That of argparse has no public name.
def add_weights_arguments(command: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add the flags; returns the group of those that choose the checkpoint, of which a command may have more."""
    command.add_argument("run", metavar="RUN[@STEP]", help="the folder of a run, and a step (default: the newest)")
    weights = command.add_mutually_exclusive_group()
    weights.add_argument("--average", action="store_true", help="take the moving averages of the parameters")
    weights.add_argument("--raw", action="store_true", help="take the parameters themselves (default: as the recipe)")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step, as RUN@STEP")
    which.add_argument(
        "--best", action="store_true", help="the best one, by the score that the recipe keeps the best by"
    )
    return which


def chosen_run(arguments: argparse.Namespace) -> ChosenRun:
    """Find the run and the weights that the flags choose, and refuse those that are not there.

    A command with a flag `--follow` waits for checkpoints with it, of which there may be none yet.
    """
    from lockstep.records.shards import check_local
    from lockstep.runs.workdir import RECIPE, Workdir
    from lockstep.training.run_weights import run_at_step

    check_local(arguments.run)
    path, step = run_at_step(arguments.run)
    follow = getattr(arguments, "follow", False)
    if step is not None and (arguments.best or follow or arguments.step is not None):
        raise InputError(
            "The checkpoint is chosen twice.",
            given=f"{arguments.run}, and --{'best' if arguments.best else 'follow' if follow else 'step'}",
            expected="one of the two",
            hint=f"give {path} alone with the flag, or leave the flag out",
        )
    recipe = Workdir(path).recipe() if (path / RECIPE).is_file() else None
    if recipe is None:
        runs = sorted(found.parent for found in path.glob(f"*/{RECIPE}"))
        meant = runs[0] if runs else None if path.exists() else closest_path(path)
        raise WorkdirError(
            f"There is no run in {path}.",
            given=what_is_there(path),
            expected=f"the folder of a run, with a {RECIPE}",
            hint=f"did you mean {meant}?"
            if meant
            else f"check the path, or train first: lockstep train mnist --workdir {path}",
        )
    weights = _weights(arguments, recipe)
    store = store_in(path, recipe)
    if follow:
        return ChosenRun(path, recipe, None, weights)
    if arguments.best:
        return ChosenRun(path, recipe, _best(store, path), weights)
    step = arguments.step if step is None else step
    _check_saved(store, step, may_wait="follow" in arguments)
    return ChosenRun(path, recipe, step, weights)


def store_in(path: Path, recipe: Recipe) -> Store:
    """Return the checkpoints of a run."""
    from lockstep.checkpoints.store import Store

    return Store(path / "checkpoints", recipe.checkpoints.retention)


def _weights(arguments: argparse.Namespace, recipe: Recipe) -> Weights:
    if arguments.average and recipe.average is None:
        from lockstep.runs.trained import no_averages

        raise no_averages(f"The run in {arguments.run}")
    if arguments.average or arguments.raw:
        return "average" if arguments.average else "raw"
    return recipe.evaluate.weights


def _check_saved(store: Store, step: int | None, *, may_wait: bool) -> None:
    """Refuse a step without a checkpoint; None is any."""
    steps = store.steps()
    if not steps or step not in (None, *steps):
        wait = ", or add --follow to wait for it" if may_wait else ""
        raise InputError(
            f"There is no such checkpoint in {store.folder}.",
            given="the newest" if step is None else f"--step {step}",
            expected=f"one of step {', '.join(map(str, steps))}" if steps else "one at least",
            hint="name one of these, or leave the step out"
            if steps
            else f"let the run train until it has saved one{wait}",
        )


def _best(store: Store, workdir: Path) -> int:
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
