"""`lockstep evaluate`: score a checkpoint of a workdir.

The process that the user starts only launches, and loads no torch; `lockstep.cli.scoring` is what it launches.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from lockstep.parallel.launch import is_worker, launch

PRELOAD = ("torch", "lockstep.cli.scoring")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the command in the process that the user has started."""
    return work(list(argv)) if is_worker() else launch(argv, plan=plan, main=work, preload=PRELOAD)


def plan(argv: list[str]) -> dict[str, Any]:
    """How many workers to start."""
    from lockstep.cli import scoring

    return scoring.plan(argv)


def work(argv: list[str]) -> int:
    """Score in one worker; all of them get the same result, and the chief prints it."""
    from lockstep.cli import scoring

    return scoring.work(argv)
