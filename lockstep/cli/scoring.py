"""What `lockstep evaluate` does where torch is loaded."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoints.store import Checkpoint, Store
from lockstep.cli.crew import joined, num_workers
from lockstep.cli.main import parse
from lockstep.errors import InputError, WorkdirError
from lockstep.evaluation.evaluate import Evaluation, Weights, evaluate
from lockstep.recipes.build import SPLITS, build_state, held_out, score
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.workdir import Workdir
from lockstep.training.resume import restore
from lockstep.workers.rank import Worker

log = logging.getLogger("lockstep")


def plan(argv: list[str]) -> dict[str, Any]:
    """How many workers to start; what can be refused before they do is refused here."""
    arguments = parse(argv)
    recipe = _recipe_to_score(arguments)
    return {"workers": num_workers(arguments.workers, arguments.device or recipe.device, recipe.num_towers)}


def work(argv: list[str]) -> int:
    """Score in one worker; all of them get the same result, and the chief prints it."""
    arguments = parse(argv)
    recipe = _recipe_to_score(arguments)
    workdir = Workdir(Path(arguments.workdir))
    with joined(arguments.device or recipe.device) as worker:
        choices = workdir.saved_choices()
        torch.set_num_threads(choices["threads"] if choices else 1)
        state = build_state(recipe, worker)
        checkpoint = _read(_store(workdir.path, recipe), arguments, worker)
        restore(checkpoint, state)
        weights: Weights = "average" if arguments.average else "raw"
        held = held_out(recipe, arguments.split)
        how = recipe.evaluate
        result = evaluate(state, score, held, weights=weights, micro_batch=how.micro_batch, drop_last=how.drop_last)
        if worker.is_chief:
            log.info("%s weights of step %d, from %s", weights, checkpoint.step, checkpoint.path)
            log.info("%s accuracy %s", arguments.split, accuracy(result))
    return 0


def accuracy(result: Evaluation) -> str:
    """The share of examples that were right, with the count beside it: `99.12 % (9912 of 10000)`."""
    return f"{100 * result['top1']:.2f} % ({result.sums['top1']:.0f} of {result.num_examples})"


def _recipe_to_score(arguments: argparse.Namespace) -> Recipe:
    """The recipe of the run in the workdir.

    Raises:
        InputError: there is no run, or it has not what is to be scored.
    """
    path = Path(arguments.workdir)
    if arguments.split not in SPLITS:
        raise InputError(
            f"There is no split {arguments.split!r}.",
            given=f"--split {arguments.split}",
            expected=", ".join(SPLITS),
            mend="name one of these, or leave it out to score the test examples",
        )
    recipe = Workdir(path).recipe()
    if recipe is None:
        raise WorkdirError(
            f"There is no run in {path}.",
            given=str(path),
            expected="the workdir of a run",
            mend=f"check the path, or train first: lockstep train mnist --workdir {path}",
        )
    if arguments.average and recipe.average is None:
        raise InputError(
            f"The run in {path} keeps no averages of its parameters.",
            given="--average",
            expected="a run whose recipe has an average",
            mend="leave --average out, or train with one: --set average.decay=0.9999",
        )
    if arguments.best and recipe.checkpoints.retention.best is None:
        raise InputError(
            f"The run in {path} does not say which checkpoint is the best.",
            given="--best",
            expected="a run whose recipe keeps the best checkpoints by some score",
            mend="leave --best out, or train with one: --set checkpoints.retention.best=validation/top1",
        )
    _check_checkpoints(_store(path, recipe), arguments)
    return recipe


def _store(path: Path, recipe: Recipe) -> Store:
    return Store(path / "checkpoints", recipe.checkpoints.retention)


def _check_checkpoints(store: Store, arguments: argparse.Namespace) -> None:
    steps, step = store.steps(), arguments.step
    if arguments.best and store.best() is None:
        raise InputError(
            f"None of the checkpoints in {store.folder} is known to be the best.",
            given=f"checkpoints without a score {store.retention.best!r}",
            expected="one that was saved after an evaluation",
            mend="leave --best out, or let the run train until it has been scored",
        )
    if not steps or step not in (None, *steps):
        raise InputError(
            f"There is no such checkpoint in {store.folder}.",
            given="the newest" if step is None else f"--step {step}",
            expected=f"one of step {', '.join(map(str, steps))}" if steps else "one at least",
            mend="name one of these, or leave --step out" if steps else "let the run train until it has saved one",
        )


def _read(store: Store, arguments: argparse.Namespace, worker: Worker) -> Checkpoint:
    """The same checkpoint on all workers: the chief alone looks for one that is intact, and tells of damaged ones."""
    wanted = store.best() if arguments.best else arguments.step
    found = store.read(wanted) if worker.is_chief else None
    agreed = worker.group.broadcast(found.step if found else None)
    checkpoint = found or store.read(int(str(agreed)))
    assert checkpoint is not None, "there are checkpoints, and where all are damaged the chief has raised"
    return checkpoint
