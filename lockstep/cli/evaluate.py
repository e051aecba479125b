"""`lockstep evaluate`: score a checkpoint of a run, or each new one.

The process that the user starts only launches workers, and loads no torch; they run `lockstep.cli.scoring`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.cli.shared import (
    Command,
    add_host_arguments,
    add_json_argument,
    add_machine_arguments,
    add_settings_argument,
    add_weights_arguments,
    given_seat,
)


def _add_arguments(evaluate: argparse.ArgumentParser) -> None:
    which = add_weights_arguments(evaluate)
    which.add_argument("--follow", action="store_true", help="each new one, until the run is over")
    evaluate.add_argument(
        "--split", help="which examples: test (default, where there are some), validation (default else) or train"
    )
    evaluate.add_argument(
        "--data", metavar="PATH", help="other data: shards, their pattern, or a folder with a folder for each class"
    )
    add_settings_argument(evaluate, "of data, evaluate or feed")
    evaluate.add_argument("--examples", type=int, metavar="N", help="the first N of the split (default: as the recipe)")
    evaluate.add_argument(
        "--interval", type=float, metavar="SECONDS", help="with --follow, at least so long from one to the next (60)"
    )
    evaluate.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="with --follow, end after so long without a new one"
    )
    evaluate.add_argument(
        "--to", type=Path, metavar="FILE", help="write the result, with --follow the last one, as JSON"
    )
    add_json_argument(evaluate)
    evaluate.add_argument(
        "--confusion", type=Path, metavar="FILE", help="which classes are taken for which: a table of CSV"
    )
    evaluate.add_argument(
        "--curves", type=Path, metavar="FILE", help="precision over recall of each class of a detector: a table of CSV"
    )
    evaluate.add_argument(
        "--mistakes", type=Path, metavar="FILE", help="the examples with the largest losses, or most mistakes: one PNG"
    )
    evaluate.add_argument("--force", action="store_true", help="overwrite these files")
    add_machine_arguments(evaluate, threads="those of the run")
    add_host_arguments(evaluate)


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    from lockstep.launcher.launch import is_worker, launch_command

    if is_worker():
        return evaluate_as_worker(list(argv))
    seat = given_seat(arguments, os.environ)
    return launch_command(
        argv,
        plan=plan_evaluate,
        main=evaluate_as_worker,
        # Of several hosts each refuses it in the plan, so that the others hear of it.
        check=partial(_check, arguments) if seat is None else None,
        preload=("torch", "lockstep.cli.scoring"),
        seat=seat,
    )


def _check(arguments: argparse.Namespace) -> None:
    from lockstep.cli.given_run import scored_run

    scored_run(arguments)


def plan_evaluate(argv: list[str]) -> dict[str, Any]:
    """Decide how many workers score, for the launcher."""
    from lockstep.cli.scoring import plan_scoring

    return plan_scoring(COMMAND.parse(argv))


def evaluate_as_worker(argv: list[str]) -> int:
    """Score on one worker; returns its exit code."""
    from lockstep.cli.scoring import score_in_worker

    return score_in_worker(COMMAND.parse(argv))


COMMAND = Command("score a checkpoint of a workdir", _add_arguments, _run)
