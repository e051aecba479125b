"""`lockstep run`: a script of the user's own, on several workers."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.checks import NonNegativeFloat, check_value
from lockstep.errors import InputError
from lockstep.parallel.launch import is_worker, launch


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the command in the process that the user has started."""
    if not Path(arguments.script).is_file():
        raise InputError(
            f"There is no script {arguments.script}.",
            given=arguments.script,
            expected="a Python file",
            hint="check the path: lockstep run my_script.py --workers 4",
        )
    return work(list(argv)) if is_worker() else launch(argv, plan=plan, main=work)


def plan(argv: list[str]) -> dict[str, Any]:
    """How many workers to start."""
    from lockstep.cli.crew import num_workers
    from lockstep.cli.main import parse

    arguments = parse(argv)
    check_value("--hang-seconds", arguments.hang_seconds, NonNegativeFloat)
    workers = num_workers(arguments.workers, arguments.device, None)
    return {"workers": workers, "hang_seconds": arguments.hang_seconds}


def work(argv: list[str]) -> int:
    """Run the script in one worker, as if it had been started by itself."""
    from lockstep.cli.crew import joined
    from lockstep.cli.main import parse

    arguments = parse(argv)
    script = Path(arguments.script).resolve()
    sys.argv = [str(script), *arguments.arguments]
    sys.path.insert(0, str(script.parent))
    with joined(arguments.device) as worker:
        worker.pulse.at(0, "script")
        runpy.run_path(str(script), run_name="__main__")
    return 0
