"""`lockstep doctor`: what of this machine, and of a recipe on it, lets a run train, limits it, or forbids it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.shared import Command, add_code_argument, add_machine_arguments
from lockstep.doctor.check_result import Check, CheckResult, as_json, can_train, results_of, summary
from lockstep.errors import InputError, InputErrors, LockstepError
from lockstep.screen import log, show_log, write_json, write_lines

if TYPE_CHECKING:
    from lockstep.cli.given_run import GivenRun
    from lockstep.doctor.hosts import HostPort

_RECIPE = "recipe.toml"
"""What makes a folder that of a run; `lockstep.runs.workdir` has it, and needs torch."""
_NOT_ASKED = ("steps", "epochs", "hours", "hosts", "host_rank", "chief", "fork_from")
_NOT_WANTED = ("forever", "rehearse", "accept_changes")
"""Arguments of `lockstep train` that a run is not asked for here."""


def _add_arguments(doctor: argparse.ArgumentParser) -> None:
    doctor.description = (
        "Look at this machine, and with a recipe at what would limit it here. Each line is OK, warn, or fails; what "
        "mends it stands below. Exit code 0: a run can train, though there may be warnings; 1: something fails."
    )
    doctor.add_argument(
        "recipe", nargs="?", help="a shipped recipe, a file.toml, or the folder of a run (default: the machine alone)"
    )
    doctor.add_argument("--workdir", metavar="DIR", help="whose disk is tried (default: the run's; runs); or 'none'")
    doctor.add_argument(
        "--hosts",
        dest="others",
        nargs="+",
        default=[],
        metavar="HOST[:PORT]",
        help="other hosts of a run, to be called",
    )
    doctor.add_argument("--towers", type=int, metavar="N", help="slices of the batch (default: those of the recipe)")
    add_machine_arguments(doctor)
    doctor.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="PATH=VALUE", help="change a field of the recipe"
    )
    add_code_argument(doctor)
    doctor.add_argument("--json", action="store_true", help="write JSON, for programs")
    doctor.set_defaults(**dict.fromkeys(_NOT_ASKED), **dict.fromkeys(_NOT_WANTED, False))


def _run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    if sys.platform != "linux":
        raise InputError(
            "A machine is looked at on Linux alone.",
            given=sys.platform,
            expected="Linux, whose system says what there is",
            hint="look where the run is to be",
        )

    from lockstep.doctor.hosts import HostPort

    places = [HostPort.of(text) for text in arguments.others]
    run = None
    if arguments.recipe is not None and find_spec("torch"):  # without it no recipe can be read; what is found says so
        from lockstep.cli.given_run import given_run

        run = given_run(arguments)
    elif arguments.recipe is None and arguments.settings:
        raise InputError(
            "There is no recipe to change.",
            given=f"--set {arguments.settings[0]}",
            expected="a recipe, or no --set",
            hint=f"lockstep doctor mnist --set {arguments.settings[0]}",
        )
    findings = []
    for finding in _findings(arguments, run, places):
        findings.append(finding)
        if not arguments.json:
            write_lines(finding.lines())
            sys.stdout.flush()
    if arguments.json:
        write_json(as_json(findings))
    else:
        write_lines(["", summary(findings)])
    return 0 if can_train(findings) else 1


def _findings(arguments: argparse.Namespace, run: GivenRun | None, places: Sequence[HostPort]) -> Iterator[CheckResult]:
    """Look at the machine, then at the recipe; what needs torch is left out where torch does not load."""
    from lockstep.doctor.hosts import host_checks
    from lockstep.doctor.libraries import library_results
    from lockstep.doctor.machine import machine_checks

    loads = True
    for finding in results_of({"libraries": library_results}):
        loads &= (finding.checked, finding.verdict) != ("torch", "fails")
        yield finding
    if loads:
        from lockstep.doctor.compute import compute_checks

        yield from results_of(compute_checks())
    yield from results_of({**machine_checks(), **_disk_checks(arguments, run), **host_checks(places)})
    if run is not None and loads:
        yield from _recipe_results(arguments, run)
    elif arguments.recipe is not None:
        yield CheckResult("recipe", "not looked at: torch does not load", "warn", "see the line of torch")


def _disk_checks(arguments: argparse.Namespace, run: GivenRun | None) -> Mapping[str, Check]:
    from lockstep.doctor.disk import disk_checks

    path = run.path if run else None if arguments.workdir == "none" else Path(arguments.workdir or "runs")
    return {} if path is None else disk_checks(path, holds_run=(path / _RECIPE).is_file())


def _recipe_results(arguments: argparse.Namespace, run: GivenRun) -> Iterator[CheckResult]:
    """Check what `lockstep train --dry-run` checks."""
    from lockstep.cli.training import check_given, choose_workers

    log.info("trying whether the run can begin")
    try:
        check_given(arguments, run)
        workers = choose_workers(run.recipe)
        start = _try_start(run, workers)
    except LockstepError as error:
        for each in error.errors if isinstance(error, InputErrors) else [error]:
            yield CheckResult("recipe", f"{each.what.rstrip('.')}: {each.given}", "fails", each.hint)
        return
    on = f"{workers} worker{'' if workers == 1 else 's'}"
    yield CheckResult("recipe", f"{arguments.recipe} can begin: {start}, on {on}", numbers={"workers": workers})


def _try_start(run: GivenRun, workers: int) -> str:
    """Do all that comes before the first step, in this process and quietly; returns where the run would go on."""
    import torch

    from lockstep.runs.run import Run
    from lockstep.workers.rank import join

    threads, towers = torch.get_num_threads(), run.recipe.towers_for(workers).num_towers
    show_log(level=logging.WARNING)
    try:
        return Run(replace(run.recipe, num_towers=towers), run.path, join(run.recipe.device)).dry_run()[0]
    finally:
        torch.set_num_threads(threads)
        show_log()


COMMAND = Command(
    "say what this machine, and a recipe on it, lets a run do, and what mends the rest", _add_arguments, _run
)
