"""`lockstep train`: train by a recipe, or go on where its workdir stands.

The process that the user starts only launches, and loads no torch; `lockstep.cli.training` is what it launches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from lockstep.checks import check_positive
from lockstep.parallel.launch import is_worker, launch
from lockstep.parallel.watchdog import Limits

PRELOAD = ("torch", "lockstep.cli.training")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the command in the process that the user has started."""
    if arguments.print_recipe:
        from lockstep.cli.training import given_recipe
        from lockstep.recipes.toml import to_toml

        sys.stdout.write(to_toml(given_recipe(arguments)))
        return 0
    if is_worker():
        return work(list(argv))
    if arguments.grace is not None:
        check_positive(
            "--grace", arguments.grace, hint="give the seconds between the signal and the end of the machine"
        )
    limits = Limits(stop_seconds=arguments.grace)
    return launch(argv, plan=plan, main=work, preload=PRELOAD, limits=limits, requeue=arguments.requeue)


def plan(argv: list[str]) -> dict[str, Any]:
    """How many workers the run needs; everything that can be refused before they start is refused here."""
    from lockstep.cli import training

    return training.plan(argv)


def work(argv: list[str]) -> int:
    """Run one worker to the end of the run."""
    from lockstep.cli import training

    return training.work(argv)
