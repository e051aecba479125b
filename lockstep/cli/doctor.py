"""`lockstep doctor`: what of this machine, and of a recipe on it, lets a run train, limits it, or forbids it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lockstep.checks import Range, check_value
from lockstep.cli.shared import (
    Command,
    add_code_argument,
    add_json_argument,
    add_machine_arguments,
    add_settings_argument,
    add_towers_argument,
    check_linux,
    write_found,
)
from lockstep.doctor.check_result import Check, CheckResult, as_json, can_train, results_of, summary
from lockstep.errors import InputError, InputErrors, LockstepError
from lockstep.screen import log, show_log, write_lines

if TYPE_CHECKING:
    from lockstep.cli.given_run import GivenRun
    from lockstep.doctor.hosts import HostPort

_SECONDS = 15.0
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
    add_towers_argument(doctor)
    add_machine_arguments(doctor)
    add_settings_argument(doctor)
    add_code_argument(doctor)
    doctor.add_argument(
        "--seconds", type=float, default=_SECONDS, metavar="N", help="to measure a recipe, about (default: 15; 0: not)"
    )
    add_json_argument(doctor)
    doctor.set_defaults(**dict.fromkeys(_NOT_ASKED), **dict.fromkeys(_NOT_WANTED, False))


def _run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    check_linux("A machine is looked at on Linux alone.")

    from lockstep.doctor.hosts import HostPort
    from lockstep.records.shards import check_local

    check_value("seconds", arguments.seconds, Annotated[float, Range(ge=0, le=600)])
    places = [HostPort.of(text) for text in arguments.others]
    if arguments.workdir is not None:
        check_local(arguments.workdir)
    run = None
    if arguments.recipe is None:
        _check_no_recipe_is_meant(arguments)
    elif find_spec("torch"):  # without it no recipe can be read: what is found says so
        from lockstep.cli.given_run import given_run

        run = given_run(arguments)
    findings = []
    for finding in _findings(arguments, run, places):
        findings.append(finding)
        if not arguments.json:
            write_lines(finding.lines())
            sys.stdout.flush()
    write_found(arguments, as_json(findings), ["", summary(findings)])
    return 0 if can_train(findings) else 1


def _check_no_recipe_is_meant(arguments: argparse.Namespace) -> None:
    names = ("towers", "workers", "workers_per_device", "threads", "device", "allow_code")
    flags = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name)]
    if flags := flags + ["--set"] * bool(arguments.settings):
        raise InputError(
            "There is no recipe for these flags.",
            given=" ".join(flags),
            expected="a recipe, or none of them",
            hint="name a recipe: lockstep doctor mnist",
        )


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
    return {} if path is None else disk_checks(path)


def _recipe_results(arguments: argparse.Namespace, run: GivenRun) -> Iterator[CheckResult]:
    """Check what a dry run of `lockstep train` checks; then measure what would limit the run."""
    from lockstep.cli.run_limits import measured_limits
    from lockstep.cli.training import check_given, choose_workers
    from lockstep.runs.workdir import located

    log.info("trying whether the run can begin")
    try:
        check_given(arguments, run)
        workers = choose_workers(run.recipe)
        start = _try_start(run, workers)
    except LockstepError as error:
        for each in error.errors if isinstance(error, InputErrors) else [error]:
            yield CheckResult("recipe", f"{each.what.rstrip('.')}: {each.given}", "fails", each.hint)
        return
    except (OSError, RuntimeError) as error:  # of the system, or of torch
        why = str(error).partition("\n")[0]
        yield CheckResult("recipe", why, "fails", f"mend what it says; lockstep train {arguments.recipe} says where")
        return
    on = f"{workers} worker{'' if workers == 1 else 's'}"
    yield CheckResult("recipe", f"{arguments.recipe} can begin: {start}, on {on}", numbers={"workers": workers})
    if arguments.seconds:
        recipe = replace(located(run.recipe, run.path), num_workers=None, warm_start=None)
        yield from measured_limits(arguments.recipe, recipe, workers, arguments.seconds)


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
    "say what this machine, and a recipe on it, lets a run do, and what mends the rest",
    _add_arguments,
    _run,
    flags={"seconds": "--seconds"},
)
