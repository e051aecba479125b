"""`lockstep verify`: check that a run is what it has written down, and make some of its updates again.

The process that the user starts only launches workers, and loads no torch; they run `lockstep.cli.verifying`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.cli.shared import Command, add_code_argument, add_json_argument, add_machine_arguments

EXIT_CODES = """exit codes:
  0    verified: the files are as they were written, and the updates the same, or equal within what the machine allows
  1    something differs; it is named
  2    wrong input: no run, a run of an older version, a window before the first checkpoint that is kept"""


def _add_arguments(verify: argparse.ArgumentParser) -> None:
    verify.formatter_class = argparse.RawDescriptionHelpFormatter
    verify.epilog = EXIT_CODES
    verify.add_argument("run", metavar="RUN", help="the folder of a run; nothing is written there")
    what = verify.add_mutually_exclusive_group()
    what.add_argument(
        "--steps", metavar="A..B", help="make these updates again (default: those between the last two checkpoints)"
    )
    what.add_argument("--no-replay", action="store_true", help="check the files alone, and make no update again")
    verify.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest relative difference where the environment is another one (0.001; of half precision 0.03)",
    )
    verify.add_argument("--certificate", type=Path, metavar="FILE", help="write what was verified, as JSON")
    verify.add_argument("--force", action="store_true", help="overwrite this file")
    verify.add_argument(
        "--against", type=Path, metavar="FILE", help="check that the run is that of a certificate, and its updates"
    )
    add_json_argument(verify)
    add_code_argument(verify)
    add_machine_arguments(verify, threads="those of the run")


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    from lockstep.launcher.launch import is_worker, launch_command

    if is_worker():
        return verify_as_worker(list(argv))
    return launch_command(argv, plan=plan_verify, main=verify_as_worker, preload=("torch", "lockstep.cli.verifying"))


def plan_verify(argv: list[str]) -> dict[str, Any]:
    """Decide how many workers verify, for the launcher."""
    from lockstep.cli.verifying import plan_verifying

    return plan_verifying(COMMAND.parse(argv))


def verify_as_worker(argv: list[str]) -> int:
    """Verify on one worker; returns its exit code."""
    from lockstep.cli.verifying import verify_in_worker

    return verify_in_worker(COMMAND.parse(argv))


COMMAND = Command("check that a run is what it has written down", _add_arguments, _run)
