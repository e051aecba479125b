"""`lockstep run`: run the user's own script on several workers."""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.checks import NonNegativeFloat, NonNegativeInt, PositiveInt, check_value
from lockstep.cli.shared import (
    ENVIRONMENT,
    Command,
    OldFlag,
    add_host_arguments,
    add_machine_arguments,
    choose_num_workers,
    given_seat,
    join_workers,
    worker_exit_code,
)
from lockstep.cores import NumThreads
from lockstep.errors import InputError

_OF_SCRIPTS = ("torch", "lockstep.training.loop", "lockstep.optim.optimizers")
"""What most scripts import, imported once for all workers, and for those that take the place of lost ones."""
_OF_RUNS = ("lockstep.recipes.shipped", "lockstep.runs.run")
"""What a script imports that calls `ls.run`, imported after the first step for those that take such a place."""


def _add_arguments(run: argparse.ArgumentParser) -> None:
    run.allow_abbrev = False  # an abbreviation may be meant for the script
    run.formatter_class = argparse.RawDescriptionHelpFormatter
    own = "All other arguments are the script's own; after -- also those that lockstep would take."
    run.epilog = f"{own}\n\n{ENVIRONMENT}"
    run.add_argument("script", help="a Python file; ls.join() in it takes its place among the workers")
    run.add_argument(
        "--hang-seconds",
        type=float,
        metavar="N",
        help="end workers that stay longer at one place of a step: to compute or exchange, or in a loop body; six "
        "times as long in a first step, a save, an evaluation, a start and an end, and one and a half times for data "
        "(default: watch.hang_seconds of the recipe where the script calls ls.run, else 600; 0 never)",
    )
    run.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start the script again when workers are lost, up to N times without progress; it resumes by itself",
    )
    run.add_argument(
        "--on-failure",
        choices=("restart", "continue"),
        default="restart",
        help="continue: train_steps and train in the script go on with the workers that are left, and ls.run where its "
        "recipe says so, too",
    )
    run.add_argument(
        "--on-loss", dest="on_failure", action=OldFlag, new="--on-failure", choices=("restart", "continue")
    )
    run.add_argument(
        "--min-workers", type=int, default=1, metavar="N", help="with fewer left, start again (default: 1)"
    )
    run.add_argument(
        "--chief-serves",
        action="store_true",
        help="worker 0 computes no towers, as with ls.Backups and ls.Asynchronous, and needs no GPU of its own",
    )
    run.add_argument(
        "--full-traceback", action="store_true", help="show errors with the frames of Lockstep and torch, too"
    )
    add_machine_arguments(run)
    add_host_arguments(run)


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    from lockstep.launcher.launch import is_worker, launch_command

    seat = given_seat(arguments, os.environ)
    if seat is None:  # of several hosts each refuses it in the plan, so that the others hear of it
        _check_script(arguments.script)
    if is_worker():
        return _work(list(argv))
    return launch_command(argv, plan=_plan, main=_work, preload=_OF_SCRIPTS, spares=_OF_RUNS, seat=seat)


def _check_script(script: str) -> None:
    if not Path(script).is_file():
        raise InputError(
            f"There is no script {script}.",
            given=script,
            expected="a Python file",
            hint=f"lockstep train {shlex.quote(script)}"
            if Path(script).is_dir()
            else "check the path: lockstep run my_script.py --workers 4",
        )


def _plan(argv: list[str]) -> dict[str, Any]:
    arguments = COMMAND.parse(argv)
    seat = given_seat(arguments, os.environ)
    if seat is not None:
        _check_script(arguments.script)
    check_value("--hang-seconds", arguments.hang_seconds, NonNegativeFloat | None)
    check_value("--restarts", arguments.restarts, NonNegativeInt)
    check_value("--min-workers", arguments.min_workers, PositiveInt)
    check_value("--threads", arguments.threads, NumThreads | None)
    sharing, num_servers = arguments.workers_per_device, int(arguments.chief_serves)
    workers = choose_num_workers(arguments.workers, arguments.device, None, sharing, seat, num_servers=num_servers)
    survival = {"min_workers": arguments.min_workers, "replacements": arguments.restarts}
    return {
        "workers": workers,
        "hang_seconds": arguments.hang_seconds,
        "restarts": arguments.restarts,
        "survival": survival if arguments.on_failure == "continue" else None,
        "whole_traceback": arguments.full_traceback,
    }


def _work(argv: list[str]) -> int:
    """Run the script in one worker, as if Python had been started with it."""
    import torch

    arguments = COMMAND.parse(argv)
    script = Path(arguments.script).resolve()
    sys.argv = [str(script), *arguments.arguments]
    sys.path.insert(0, str(script.parent))
    sharing, chief_serves = arguments.workers_per_device, arguments.chief_serves
    with join_workers(arguments.device, sharing, shows_log=False, chief_serves=chief_serves) as worker:
        if arguments.threads:
            worker.pulse.named_threads = arguments.threads
            torch.set_num_threads(arguments.threads)
        worker.pulse.at(0, "script")
        runpy.run_path(str(script), run_name="__main__")
        return worker_exit_code(worker) if worker.pulse.stopped else 0


COMMAND = Command("run your own script on several workers", _add_arguments, _run, has_quiet=False)
