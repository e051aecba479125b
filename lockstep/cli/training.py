"""The workers of `lockstep train`, and the plan of a run before they start."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.cli.main import parse
from lockstep.cli.scoring import log_scores
from lockstep.cli.shared import choose_num_workers, join_workers, worker_exit_code
from lockstep.cli.train import given_recipe
from lockstep.owner import scratch_folder
from lockstep.progress import Steps
from lockstep.recipes.recipe import Recipe
from lockstep.runs.build import check_complete
from lockstep.runs.run import Run, check_needs_no_files
from lockstep.runs.workdir import Result, Workdir
from lockstep.screen import log
from lockstep.workers.rank import Worker


def plan_training(argv: list[str]) -> dict[str, Any]:
    """Decide how many workers to start, and refuse what can be refused before."""
    arguments = parse(argv)
    recipe, path = _recipe_and_path(arguments)
    check_complete(recipe)
    workers = choose_num_workers(recipe.num_workers, recipe.device, recipe.num_towers)
    recipe = replace(recipe, num_towers=recipe.num_towers or workers)
    recipe.towers_for(workers).check(recipe.batch_size, workers)
    if path is None and not arguments.rehearse:
        check_needs_no_files(recipe)
    if path and not arguments.rehearse:
        Workdir(path).check(recipe, accept_changes=arguments.accept_changes)
    return {"workers": workers, "hang_seconds": recipe.watch.hang_seconds}


def train_in_worker(argv: list[str]) -> int:
    """Run one worker to the end of the run."""
    arguments = parse(argv)
    recipe, path = _recipe_and_path(arguments)
    with join_workers(recipe.device) as worker:
        recipe = replace(recipe, num_towers=recipe.num_towers or worker.num_workers)
        if arguments.rehearse:
            return _rehearse(recipe, worker)
        run = Run(
            recipe,
            path,
            worker,
            accept_changes=arguments.accept_changes,
            accept_data_change=arguments.accept_data_change,
            fork_from=arguments.fork_from,
        )
        result = run.run()
        if result.reason == "stopped":
            if worker.is_chief:
                saved = ", and saved: the same command goes on from there" if path else "; nothing was saved"
                log.info("stopped at step %d%s", result.step, saved)
            return worker_exit_code(worker, requeue=arguments.requeue)
        if worker.is_chief:
            _log_result(result)
            if path:
                log.info("its checkpoints and records are in %s; to score it again: lockstep evaluate %s", path, path)
            if path and recipe.watch.summaries.amount:
                log.info("to see its curves: tensorboard --logdir %s", path / "summaries")
    return 0


def _log_result(result: Result) -> None:
    """Log how good the run has become."""
    if result.split is None:
        log.info("nothing was scored: the recipe names neither test nor validation examples")
    elif result.evaluation is None:
        log.info("%s accuracy not known: scoring was left off", result.split)
    else:
        log_scores(result.evaluation, result.split)


def _rehearse(recipe: Recipe, worker: Worker) -> int:
    """Train two steps, save, resume for one more step and evaluate, in a folder that is deleted afterwards."""
    with ExitStack() as stack:
        made = str(stack.enter_context(scratch_folder("lockstep-rehearsal-"))) if worker.is_chief else None
        scratch = Path(worker.group.broadcast(made))
        Run(replace(recipe, end=Steps(2)), scratch / "run", worker).run(conclude=False)
        result = Run(replace(recipe, end=Steps(3)), scratch / "run", worker).run()
        if worker.is_chief:
            _log_result(result)
        worker.group.barrier("the rehearsal is over")
    if worker.is_chief:
        log.info("rehearsed: two steps, saved, resumed, step %d, evaluated; nothing was left behind", result.step)
    return 0


def _recipe_and_path(arguments: argparse.Namespace) -> tuple[Recipe, Path | None]:
    """Return the recipe, changed by the flags, with the workdir's towers if neither gives them; and the workdir."""
    recipe = given_recipe(arguments)
    path = None if arguments.workdir == "none" else Path(arguments.workdir or Path("runs") / recipe.name)
    saved = Workdir(path).recipe() if path and not arguments.rehearse else None
    return replace(recipe, num_towers=recipe.num_towers or (saved.num_towers if saved else None)), path
