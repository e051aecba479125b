"""The workers of `lockstep train`, and the plan of a run before they start."""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoints.mirror import shown_path
from lockstep.checks import check_together
from lockstep.cli.given_run import GivenRun, check_without_torch, given_run
from lockstep.cli.own_data import names_data
from lockstep.cli.own_start import begin_own_run, conclude_own_run
from lockstep.cli.scoring import log_scores
from lockstep.cli.shared import choose_num_workers, given_seat, join_workers, worker_exit_code
from lockstep.errors import InputError
from lockstep.launcher.rendezvous import Seat
from lockstep.owner import scratch_folder
from lockstep.readers.mnist import mnist_folder, to_fetch
from lockstep.recipes.data import MnistData
from lockstep.recipes.recipe import Recipe
from lockstep.run_files import SUMMARIES
from lockstep.runs.run import Run, watch_of_launcher
from lockstep.runs.start import check_sources
from lockstep.runs.workdir import Result
from lockstep.screen import log, show_log
from lockstep.served.exchanges import is_served, num_computing
from lockstep.types import Steps
from lockstep.workers.devices import num_accelerators
from lockstep.workers.rank import Worker, join

_NOT_FETCHED = "A dry run writes nothing. Where the data is there, it shows which worker computes what."


def plan_training(arguments: argparse.Namespace) -> dict[str, Any]:
    """Decide how many workers to start, and refuse what can be refused before."""
    show_log()
    if names_data(arguments.recipe):
        begin_own_run(arguments)
    run = given_run(arguments)
    check_given(arguments, run)
    workers = choose_workers(run.recipe, given_seat(arguments, os.environ))
    _log_idle_devices(run.recipe, num_computing(run.recipe.exchange, workers))
    watch = watch_of_launcher(run.recipe, has_workdir=run.path is not None and not arguments.rehearse)
    return {"workers": workers, **watch}


def check_given(arguments: argparse.Namespace, run: GivenRun) -> None:
    """Check all that a run needs before it begins; what is wrong is reported together."""
    path = None if arguments.rehearse else run.path
    check_together(
        [
            partial(check_without_torch, arguments, run),
            partial(choose_workers, run.recipe, given_seat(arguments, os.environ)),
            partial(check_sources, run.recipe, path, arguments.fork_from),
        ]
    )


def choose_workers(recipe: Recipe, seat: Seat | None = None) -> int:
    """Return the number of workers of a run on this host; one that does not fit the batch or the towers is refused."""
    here = choose_num_workers(
        recipe.num_workers,
        recipe.device,
        recipe.num_towers,
        recipe.workers_per_device,
        seat,
        num_servers=int(is_served(recipe.exchange)),
    )
    if seat and recipe.num_workers is None:
        return here  # whether the batch fits the workers of all hosts is seen when they are there
    workers = recipe.num_workers or here
    computing = num_computing(recipe.exchange, workers)
    if recipe.num_towers is None and recipe.batch_size % computing:
        raise InputError(
            "The batch cannot be split evenly over the workers.",
            given=f"batch_size={recipe.batch_size} over {computing} workers, and no number of towers",
            expected="workers that divide the batch size, or towers that do",
            hint=f"--workers {_largest_divisor(recipe.batch_size, computing) + workers - computing}; "
            "or --towers, at least one for each worker",
        )
    recipe.check_towers(workers)
    return here


def _log_idle_devices(recipe: Recipe, workers: int) -> None:
    idle = (0 if recipe.device == "cpu" else num_accelerators()) - workers
    if recipe.num_workers is None and idle > 0:
        log.info(
            "%d devices are left alone: the run has %d towers; to use more: --towers %d, which is another experiment",
            idle,
            workers,
            _largest_divisor(recipe.batch_size, workers + idle),
        )


def _largest_divisor(number: int, most: int) -> int:
    return next(divisor for divisor in range(min(most, number, 1024), 0, -1) if number % divisor == 0)


def train_in_worker(arguments: argparse.Namespace) -> int:
    """Run one worker to the end of the run."""
    recipe, path = given_run(arguments)
    with join_workers(recipe.device, recipe.workers_per_device, chief_serves=is_served(recipe.exchange)) as worker:
        recipe = replace(recipe, num_towers=recipe.towers_for(worker.num_workers).num_towers)
        if arguments.dry_run and _lacks_data(recipe, worker):
            return 0
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
        if arguments.dry_run:
            lines = run.dry_run()
            if worker.is_chief:
                print(*lines, sep="\n", flush=True)
            return 0
        result = run.run()
        worker = join()  # which may have become the chief
        if result.reason == "stopped":
            if worker.is_chief:
                saved = ", and saved: the same command goes on from there" if path else "; nothing was saved"
                log.info("stopped at step %d%s", result.step, saved)
            return worker_exit_code(worker, requeue=arguments.requeue)
        if path and names_data(arguments.recipe):
            conclude_own_run(recipe, path, result, worker)
        elif worker.is_chief:
            _log_result(result)
            if path:
                shown = shown_path(path)
                log.info("its checkpoints and records are in %s; to score it again: lockstep evaluate %s", shown, shown)
            if path and recipe.watch.summaries.amount:
                log.info("to see its curves: tensorboard --logdir %s", path / SUMMARIES)
    return 0


def _lacks_data(recipe: Recipe, worker: Worker) -> bool:
    data = recipe.data
    own = to_fetch(mnist_folder(data.folder or None, data.cache)) if isinstance(data, MnistData) else ""
    unfetched = [each for each in worker.group.gather(own) if each]
    if unfetched and worker.is_chief:
        print(f"not here yet, and {unfetched[0]}", _NOT_FETCHED, sep="\n", flush=True)
    return bool(unfetched)


def _log_result(result: Result) -> None:
    if result.split is None:
        log.info("nothing was scored: the recipe names neither test nor validation examples")
    elif result.evaluation is None:
        log.info("%s accuracy not known: scoring was left off", result.split)
    else:
        log_scores(result.evaluation, result.split)


def _rehearse(recipe: Recipe, worker: Worker) -> int:
    with ExitStack() as stack:
        made = str(stack.enter_context(scratch_folder("lockstep-rehearsal-"))) if worker.is_chief else None
        scratch = Path(worker.group.broadcast(made))
        recipe = replace(recipe, loggers=(), watch=replace(recipe.watch, trace=None, profile=None))
        Run(replace(recipe, end=Steps(2)), scratch / "run", worker).run(conclude=False)
        result = Run(replace(recipe, end=Steps(3)), scratch / "run", worker).run()
        if worker.is_chief:
            _log_result(result)
        worker.group.barrier("the rehearsal is over")
    if worker.is_chief:
        log.info("rehearsed: two steps, saved, resumed, step %d, evaluated; nothing was left behind", result.step)
    return 0
