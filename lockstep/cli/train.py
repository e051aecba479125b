"""`lockstep train`: train by a recipe, or resume the run in its workdir.

The process that the user starts only launches workers, and loads no torch; they run `lockstep.cli.training`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from lockstep.checks import Hint, Range, check_value
from lockstep.cli.shared import (
    ENVIRONMENT,
    EXIT_CODES,
    Command,
    add_code_argument,
    add_host_arguments,
    add_machine_arguments,
    add_settings_argument,
    given_seat,
    run_folder,
)
from lockstep.errors import InputError, LockstepError

SHIPPED_RECIPES = (
    "mnist",
    "mnist_reference",
    "lenet",
    "inception_v3",
    "inception_v3_distributed",
    "flowers",
    "flowers_two_stages",
    "flowers_small",
    "bccd",
    "raccoon",
    "raccoon_mosaic",
    "ssd300_coco",
    "ssdlite_coco",
    "faster_rcnn_coco",
    "mask_rcnn_coco",
    "keypoint_rcnn_coco",
)
"""The names of the shipped recipes, here for the help: `lockstep.recipes.shipped` takes 0.2 s to import."""

if TYPE_CHECKING:
    from lockstep.cli.given_run import GivenRun

ON_END_SECONDS = 60
"""The most that the command of `watch.on_end` may take."""

PREEMPTION = """preemption:
  At SIGUSR1 or SIGTERM all workers end the step they are at, save, and the command ends; the same command goes on from
  there, and the run learns what it would have learned without the break. Under Slurm, with --signal=USR1@120:
    srun lockstep train mnist --workdir runs/mnist --grace 110
    if [ $? -eq 75 ]; then scontrol requeue $SLURM_JOB_ID; fi"""


def _add_arguments(train: argparse.ArgumentParser) -> None:
    train.formatter_class = argparse.RawDescriptionHelpFormatter
    train.epilog = f"{PREEMPTION}\n\n{ENVIRONMENT}\n\n{EXIT_CODES}"
    shipped = ", ".join(SHIPPED_RECIPES)
    train.add_argument(
        "recipe",
        metavar="DATA|RECIPE|RUN",
        help="data of your own, such as a folder with a folder of images for each class; "
        f"a shipped recipe ({shipped}); a file.toml; or the folder of a run, which goes on",
    )
    train.add_argument("--workdir", metavar="DIR", help="the run's folder (default: runs/NAME); 'none' writes nothing")
    train.add_argument(
        "--towers", type=int, metavar="N", help="slices of the batch (default: those of the run or recipe)"
    )
    end = train.add_mutually_exclusive_group()
    end.add_argument("--steps", type=int, metavar="N", help="end after so many updates")
    end.add_argument("--epochs", type=float, metavar="N", help="end after so many passes over the data")
    end.add_argument("--hours", type=float, metavar="N", help="end after so many hours from now")
    end.add_argument("--forever", action="store_true", help="train until stopped")
    add_settings_argument(train)
    train.add_argument(
        "--fork-from", metavar="RUN[@STEP]", help="begin a new workdir with the full state of another run"
    )
    train.add_argument("--accept-changes", action="store_true", help="resume although the recipe has changed")
    train.add_argument(
        "--accept-data-change", action="store_true", help="resume although the training data has changed"
    )
    add_code_argument(train)
    _add_ways_to_run(train)
    add_machine_arguments(train)
    add_host_arguments(train)


def _add_ways_to_run(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--trace",
        dest="settings",
        action="append",
        type='watch.trace="{}"'.format,
        metavar="A:B",
        help="record what all workers do in these steps, to look at it in Perfetto: 100:110 is ten steps",
    )
    trial = train.add_mutually_exclusive_group()
    trial.add_argument("--rehearse", action="store_true", help="two steps, save, resume, evaluate, in a scratch folder")
    trial.add_argument(
        "--dry-run",
        action="store_true",
        help="print which worker computes what, and where the state lives, and end before step 1; nothing is written",
    )
    train.add_argument("--requeue", action="store_true", help="exit code 75 at SIGTERM too, as always at SIGUSR1")
    train.add_argument(
        "--grace", type=float, metavar="SECONDS", help="after a signal, end what has not saved by then (default: wait)"
    )
    train.add_argument(
        "--print-recipe", action="store_true", help="print the recipe as TOML, each field explained, and do nothing"
    )
    train.add_argument("--all", action="store_true", help="with --print-recipe: fields that are as by default, too")


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    from lockstep.launcher.launch import is_worker, launch_command
    from lockstep.workers.limits import Limits

    _check_flags(arguments)
    if is_worker() and not arguments.print_recipe:
        return train_as_worker(list(argv))
    begins = is_first_start_on_data(arguments)
    if arguments.print_recipe:
        sys.stdout.write(_printed_recipe(arguments, begins=begins))
        return 0
    seat = given_seat(arguments, os.environ)
    if begins:
        from lockstep.cli.own_data import check_own_data

        check_own_data(arguments, several_hosts=seat is not None)
    if begins and arguments.dry_run:
        sys.stdout.write(_printed_recipe(arguments, begins=True))
        return 0
    tells = not (begins or arguments.rehearse or arguments.dry_run) and (seat is None or seat.is_chief)
    at_end: list[tuple[str, str]] = []
    if tells and seat:
        with suppress(LockstepError):  # the plan refuses it, and tells the other hosts
            _read(arguments, at_end)
    code = launch_command(
        argv,
        plan=plan_train,
        main=train_as_worker,
        # Of several hosts each refuses it in the plan, so that the others hear of it.
        check=partial(_check, arguments, at_end) if seat is None and not begins else None,
        preload=("torch", "lockstep.cli.training"),
        limits=Limits(stop_seconds=arguments.grace),
        requeue=arguments.requeue,
        seat=seat,
    )
    for command, run in at_end if tells else ():
        _run_on_end(command, run, code)
    return code


def _check_flags(arguments: argparse.Namespace) -> None:
    if arguments.all and not arguments.print_recipe:
        raise InputError(
            "--all says how much of a recipe is printed.",
            given="--all without --print-recipe",
            expected="both, or neither",
            hint=f"lockstep train {arguments.recipe} --print-recipe --all",
        )
    if arguments.grace is not None:
        hint = Hint("give the seconds between the signal and the end of the machine")
        check_value("--grace", arguments.grace, Annotated[float, Range(gt=0, finite=False), hint])


def _printed_recipe(arguments: argparse.Namespace, *, begins: bool) -> str:
    if begins:
        from lockstep.cli.own_start import print_own_recipe

        return print_own_recipe(arguments)
    from lockstep.cli.given_run import given_recipe
    from lockstep.recipes.fields import explained_toml

    return explained_toml(given_recipe(arguments), everything=arguments.all)


def is_first_start_on_data(arguments: argparse.Namespace) -> bool:
    """Whether the command names data in place of a recipe, and no run has begun with it."""
    from lockstep.cli.own_data import names_data, own_run, remark_on_name

    remark_on_name(arguments.recipe)
    return names_data(arguments.recipe) and own_run(arguments) is None


def _check(arguments: argparse.Namespace, at_end: list[tuple[str, str]]) -> None:
    from lockstep.cli.given_run import check_without_torch

    check_without_torch(arguments, _read(arguments, at_end))


def _read(arguments: argparse.Namespace, at_end: list[tuple[str, str]]) -> GivenRun:
    """Read the run; note the command that its recipe names for the end, and its folder.

    Now: until the end others may change the recipe's file, or take it away.
    """
    from lockstep.cli.given_run import given_run
    from lockstep.runs.workdir import is_own_run
    from lockstep.screen import log

    run, named = given_run(arguments), run_folder(arguments.recipe)
    is_trusted = arguments.allow_code or arguments.recipe in SHIPPED_RECIPES or not named.is_dir()
    if run.recipe.watch.on_end and not (is_trusted or is_own_run(named)):
        log.warning("watch.on_end is left out: others may have written to %s; --allow-code runs it", named)
    elif run.recipe.watch.on_end:
        at_end.append((run.recipe.watch.on_end, str(run.path.absolute()) if run.path else ""))
    return run


def _run_on_end(command: str, run: str, code: int) -> None:
    """Have the shell run the command for the end of a run, and end all that it has started where it takes too long."""
    from lockstep.screen import log

    told = {"LOCKSTEP_RUN": run, "LOCKSTEP_EXIT_CODE": str(code)}
    try:
        shell = subprocess.Popen(
            command, shell=True, env=os.environ | told, stdin=subprocess.DEVNULL, start_new_session=True
        )
    except (OSError, ValueError) as error:
        log.warning("watch.on_end cannot be run: %s", error)
        return
    try:
        failure = shell.wait(ON_END_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as ended:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
        if isinstance(ended, KeyboardInterrupt):
            raise
        log.warning("watch.on_end took more than %d s, and was ended: %s", ON_END_SECONDS, command)
    else:
        if failure:
            log.warning("watch.on_end has failed with exit code %d: %s", failure, command)


def plan_train(argv: list[str]) -> dict[str, Any]:
    """Decide how many workers train, for the launcher."""
    from lockstep.cli.training import plan_training

    return plan_training(COMMAND.parse(argv))


def train_as_worker(argv: list[str]) -> int:
    """Train on one worker; returns its exit code."""
    from lockstep.cli.training import train_in_worker

    return train_in_worker(COMMAND.parse(argv))


COMMAND = Command("train by a recipe, or go on where its workdir stands", _add_arguments, _run)
