"""`lockstep chaos`: disturb runs of a recipe on purpose, and see that nothing is lost."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lockstep.checks import NonNegativeInt, PositiveInt, Range, check_one_of, check_value
from lockstep.cli.shared import (
    Command,
    OldFlag,
    add_code_argument,
    add_json_argument,
    add_machine_arguments,
    add_settings_argument,
    add_towers_argument,
    check_linux,
    check_output_folder,
    check_target,
    write_found,
)
from lockstep.durable import atomic_write
from lockstep.owner import scratch_folder
from lockstep.screen import log

if TYPE_CHECKING:
    from lockstep.recipes.recipe import Recipe

_FAULTS = ("kill", "chief", "two", "stop", "slow", "preempt", "launcher", "all", "disk", "checkpoint", "records")
"""The names in `lockstep.chaos.faults`, here for the help."""


def _add_arguments(chaos: argparse.ArgumentParser) -> None:
    chaos.description = (
        "Train by a recipe in peace; then again and again, while faults are injected, and the command is given again "
        "where they end it; compare what came out. All runs are in a folder of their own, which is deleted at the end; "
        "exit code 1 where something was lost."
    )
    chaos.add_argument("recipe", help="a shipped recipe, a file.toml, or the folder of a run, which is left as it is")
    chaos.add_argument("--minutes", type=float, default=5.0, metavar="N", help="how long, about (default: 5)")
    chaos.add_argument(
        "--steps", type=int, metavar="N", help="of each run (default: as many as there is time for in a sixth of it)"
    )
    chaos.add_argument(
        "--rounds", type=int, metavar="N", help="how many runs are disturbed (default: as there is time)"
    )
    chaos.add_argument(
        "--faults", default=",".join(_FAULTS), metavar="NAMES", help=f"which of {', '.join(_FAULTS)} (default: all)"
    )
    chaos.add_argument("--seed", type=int, default=0, metavar="N", help="of when faults come, and whom they hit")
    chaos.add_argument(
        "--to", type=Path, metavar="FILE", help="write all that was done, and what became of it, as JSON"
    )
    add_json_argument(chaos)
    chaos.add_argument("--report", dest="to", type=Path, action=OldFlag, new="--to")
    chaos.add_argument("--keep", type=Path, metavar="DIR", help="a new folder for the runs, which are kept in it")
    add_towers_argument(chaos)
    add_machine_arguments(chaos)
    add_settings_argument(chaos)
    add_code_argument(chaos)
    chaos.set_defaults(forever=False, epochs=None, hours=None)


def _run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    recipe = _recipe(arguments)
    faults = _faults(arguments)
    check_value("minutes", arguments.minutes, Annotated[float, Range(gt=0, finite=True)])
    check_value("steps", arguments.steps, Annotated[int, Range(ge=2)] | None)
    check_value("rounds", arguments.rounds, PositiveInt | None)
    check_value("seed", arguments.seed, NonNegativeInt)
    if arguments.to is not None:
        check_target(arguments.to, [".json"], "The report is JSON.", overwrite=True)

    from lockstep.chaos.suite import Suite

    flags = [] if arguments.device is None else ["--device", arguments.device]
    with _folder(arguments.keep) as folder, _ended_by_sigterm():
        report = Suite(
            recipe,
            folder,
            faults,
            arguments.seed,
            arguments.minutes,
            steps=arguments.steps,
            rounds=arguments.rounds,
            flags=flags,
        ).run()
    write_found(arguments, json.loads(report.as_json()), report.table())
    if arguments.to is not None:
        with atomic_write(arguments.to) as file:
            file.write(report.as_json().encode())
    return 0 if report.ok else 1


def _recipe(arguments: argparse.Namespace) -> Recipe:
    from lockstep.cli.given_run import given_recipe
    from lockstep.runs.inputs import check_inputs
    from lockstep.runs.workdir import located

    check_linux("Runs are disturbed on Linux alone.")
    folder = Path(arguments.recipe)
    recipe = located(given_recipe(arguments), folder if folder.is_dir() else None)
    check_inputs(recipe, None)
    return recipe


def _faults(arguments: argparse.Namespace) -> list[str]:
    names = [name.strip() for name in arguments.faults.split(",")]
    for name in names:
        check_one_of("faults", name, list(_FAULTS))
    return list(dict.fromkeys(names))


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with scratch_folder("lockstep-chaos-") as folder:
            yield folder
        return
    check_output_folder(keep, overwrite=None, flag="--keep")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep
    log.info("the runs are in %s", keep)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does: with all that it has started."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


COMMAND = Command(
    "disturb runs of a recipe on purpose, and see that nothing is lost",
    _add_arguments,
    _run,
    flags={name: f"--{name}" for name in ("minutes", "steps", "rounds", "seed", "faults")},
)
