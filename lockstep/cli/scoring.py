"""What `lockstep evaluate` does where torch is loaded."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoints.store import Checkpoint, Store
from lockstep.cli.crew import joined, num_workers
from lockstep.cli.main import parse
from lockstep.errors import CheckpointError, InputError, WorkdirError
from lockstep.evaluation.evaluate import Evaluation, Weights, evaluate
from lockstep.recipes.build import SPLITS, build, held_out, score
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.workdir import Workdir
from lockstep.training.resume import restore

log = logging.getLogger("lockstep")


def plan(argv: list[str]) -> dict[str, Any]:
    """How many workers to start; what can be refused before they do is refused here."""
    arguments = parse(argv)
    if arguments.split not in SPLITS:
        raise InputError(
            f"There is no split {arguments.split!r}.",
            given=f"--split {arguments.split}",
            expected=", ".join(SPLITS),
            mend="name one of these, or leave it out to score the test examples",
        )
    recipe = _recipe(Path(arguments.workdir))
    return {"workers": num_workers(arguments.workers, arguments.device or recipe.device, recipe.num_towers)}


def work(argv: list[str]) -> int:
    """Score in one worker; all of them get the same result, and the chief prints it."""
    arguments = parse(argv)
    workdir = Workdir(Path(arguments.workdir))
    recipe = _recipe(workdir.path)
    with joined(arguments.device or recipe.device) as worker:
        choices = workdir.saved_choices()
        torch.set_num_threads(choices["threads"] if choices else 1)
        parts = build(recipe, worker)
        checkpoint = _read(workdir.path, arguments.step)
        worker.group.agree("the checkpoint to score", checkpoint.step)
        restore(checkpoint, parts.state)
        weights: Weights = "average" if arguments.average else "raw"
        held = held_out(recipe, arguments.split)
        result = evaluate(parts.state, score, held, weights=weights, micro_batch=recipe.evaluate.micro_batch)
        if worker.is_chief:
            log.info("%s weights of step %d, from %s", weights, checkpoint.step, checkpoint.path)
            log.info("%s accuracy %s", arguments.split, accuracy(result))
    return 0


def accuracy(result: Evaluation) -> str:
    """The share of examples that were right, with the count beside it: `99.12 % (9912 of 10000)`."""
    return f"{100 * result['top1']:.2f} % ({result.sums['top1']:.0f} of {result.num_examples})"


def _recipe(path: Path) -> Recipe:
    recipe = Workdir(path).recipe()
    if recipe is None:
        raise WorkdirError(
            f"There is no run in {path}.",
            given=str(path),
            expected="the workdir of a run",
            mend="check the path, or train first: lockstep train mnist --workdir " + str(path),
        )
    return recipe


def _read(path: Path, step: int | None) -> Checkpoint:
    checkpoint = Store(path / "checkpoints").read(step)
    if checkpoint is None:
        raise CheckpointError(
            f"The run in {path} has no checkpoint yet.",
            given=f"no checkpoint in {path / 'checkpoints'}",
            expected="one at least",
            mend="let it train until its first checkpoint",
        )
    return checkpoint
