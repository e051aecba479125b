"""The workers of `lockstep verify`: the chief checks the files, all of them make updates again."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from lockstep.checks import Range, check_value
from lockstep.cli.given_run import no_run_in
from lockstep.cli.shared import (
    check_target,
    choose_num_workers,
    join_workers,
    run_folder,
    worker_exit_code,
    write_found,
)
from lockstep.cores import NumThreads
from lockstep.durable import atomic_write
from lockstep.errors import InputError, VerificationError
from lockstep.recipes.recipe import Recipe
from lockstep.reporting.chain import CHAIN
from lockstep.reporting.console import show_progress
from lockstep.run_files import RECIPE
from lockstep.runs.certificate import certificate_of, differences_from, read_certificate, steps_of
from lockstep.runs.examination import Examination, examine, walk
from lockstep.runs.replay import Replayed, Window, WindowLines, choose_window, replay, window_lines
from lockstep.runs.workdir import located, with_code_of_run
from lockstep.screen import show_log
from lockstep.workers.rank import Worker


def plan_verifying(arguments: argparse.Namespace) -> dict[str, Any]:
    """Decide how many workers to start, and refuse what can be refused before."""
    show_log()
    path = run_folder(arguments.run)
    asked = _asked(arguments, path)
    found = walk(path)
    if arguments.no_replay or found.problems:
        return {"workers": 1}
    window = choose_window(found, asked)
    if window is None:
        return {"workers": 1}
    told = window_lines(found, window)
    if asked:
        told.check(window)
    recipe = _recipe(arguments, path, told)
    there = choose_num_workers(arguments.workers, recipe.device, recipe.num_towers, recipe.workers_per_device)
    return {"workers": min(there, told.ground["workers"]) if arguments.workers is None else there}


def _asked(arguments: argparse.Namespace, path: Path) -> tuple[int, int] | None:
    check_value("--threads", arguments.threads, NumThreads | None)
    check_value("--tolerance", arguments.tolerance, Annotated[float, Range(ge=0, finite=True)] | None)
    if not any((path / name).is_file() for name in (RECIPE, CHAIN)):
        raise no_run_in(path)
    if (file := arguments.certificate) is not None:
        check_target(file, (".json",), "It is JSON.", overwrite=arguments.force, flag="--certificate")
        if file.resolve().is_relative_to(path.resolve()):
            raise InputError(
                "Nothing is written into the folder of a run that is verified.",
                given=f"--certificate {file}",
                expected="a file elsewhere",
                hint=f"--certificate {path.name}.json",
            )
    of_certificate = steps_of(read_certificate(arguments.against)) if arguments.against else None
    if arguments.steps is None:
        return None if arguments.no_replay else of_certificate
    match = re.fullmatch(r"(\d{1,18})(?:\.\.(\d{1,18}))?", arguments.steps)
    if match is None:
        raise InputError(
            f"{arguments.steps!r} names no updates.",
            given=f"--steps {arguments.steps}",
            expected="the first and the last of them, counted from 1",
            hint="--steps 101..200",
        )
    return int(match[1]), int(match[2] or match[1])


def _recipe(arguments: argparse.Namespace, path: Path, told: WindowLines) -> Recipe:
    """Return the recipe of a window, for this machine: its code may be called, and its threads are those of the run."""
    recipe = located(with_code_of_run(told.recipe, path, allow_code=arguments.allow_code, named_in=CHAIN), path)
    choices = told.ground["choices"]
    sharing = arguments.workers_per_device
    return replace(
        recipe,
        num_threads=choices.get("threads") if arguments.threads is None else arguments.threads,
        device=arguments.device or ("cpu" if choices.get("device") == "cpu" else recipe.device),
        workers_per_device=recipe.workers_per_device if sharing is None else sharing,
    )


def verify_in_worker(arguments: argparse.Namespace) -> int:
    """Verify on one worker; the chief tells what was found.

    Raises:
        VerificationError: something differs.
    """
    path = run_folder(arguments.run)
    asked = _asked(arguments, path)
    known = walk(path)
    told: WindowLines | None = None
    device, sharing = arguments.device or "cpu", arguments.workers_per_device
    if known.problems or arguments.no_replay:
        window = None
    elif window := choose_window(known, asked):
        told = window_lines(known, window)
        recipe = _recipe(arguments, path, told)
        device, sharing = recipe.device, recipe.workers_per_device
    with join_workers(device, sharing) as worker:
        found = _examined(path, arguments, worker) if worker.is_chief else None
        why_not = worker.group.broadcast(_why_not(arguments, found, window, told, asked) if found else None)
        replayed = None
        if window and told and not why_not:
            replayed = _replayed(recipe, path, window, told, worker, arguments)
            if replayed.is_stopped:
                return worker_exit_code(worker)
        if found:
            _conclude(found, replayed, str(why_not), arguments)
    return 0


def _examined(path: Path, arguments: argparse.Namespace, worker: Worker) -> Examination:
    with worker.pulse.during(0, "start"), show_progress("reading checkpoints") as progress:
        found = examine(path, progress)
    if arguments.against:
        found.problems += differences_from(read_certificate(arguments.against), found)
    return found


def _why_not(
    arguments: argparse.Namespace,
    found: Examination,
    window: Window | None,
    told: WindowLines | None,
    asked: tuple[int, int] | None,
) -> str:
    if found.problems:
        return "the files differ already"
    if arguments.no_replay:
        return "--no-replay"
    if window is None or told is None:
        return "no update follows a checkpoint that is kept"
    try:
        told.check(window)
    except InputError as error:
        if asked:
            raise
        return error.what
    return ""


def _replayed(
    recipe: Recipe, path: Path, window: Window, told: WindowLines, worker: Worker, arguments: argparse.Namespace
) -> Replayed:
    title = f"making updates {window.checkpoint + 1} to {window.last} again"
    with show_progress(title) if worker.is_chief else nullcontext(lambda done, total: None) as progress:
        return replay(recipe, path, window, told, worker, tolerance=arguments.tolerance, progress=progress)


def _conclude(found: Examination, replayed: Replayed | None, why_not: str, arguments: argparse.Namespace) -> None:
    """Print what was found, and write the certificate where nothing differs."""
    certificate = certificate_of(found, replayed, why_not)
    write_found(arguments, certificate, _lines(certificate, replayed, why_not))
    problems = certificate["problems"]
    if problems:
        raise VerificationError(
            f"The run in {found.path} is not what it has written down.",
            given=problems[0] + (f"; and {len(problems) - 1} more" if len(problems) > 1 else ""),
            expected="files as they were written, and the updates that the chain has",
            hint="put back what was changed; what the run went on from before that still stands",
        )
    if arguments.certificate:
        with atomic_write(arguments.certificate, failure=InputError) as file:
            file.write((json.dumps(certificate, indent=1) + "\n").encode())


def _lines(certificate: dict[str, Any], replayed: Replayed | None, why_not: str) -> Iterator[str]:
    yield from (f"{name}: {text}" for name, text in certificate["checked"].items())
    yield from (f"note: {text}" for text in certificate["notes"])
    if replayed is None:
        yield f"no update was made again: {why_not}"
    else:
        window, workers = replayed.window, replayed.workers
        yield (
            f"updates {window.checkpoint + 1} to {window.last}, from the checkpoint of step {window.checkpoint}, on "
            f"{workers} worker{'s' if workers > 1 else ''}: {replayed.verdict}"
        )
        tensors = ", ".join(map(str, replayed.digests_at[-8:]))
        yield f"compared: {replayed.num_compared} attempts; all tensors after step {tensors or 'none'}"
        yield from (f"this environment is another one: {line}" for line in replayed.environment)
        if not replayed.has_same_bits and replayed.environment:
            grown = ", as is what grew from update to update" if replayed.largest > replayed.tolerance else ""
            yield (
                f"largest relative difference: {replayed.largest:.2g}, and up to {replayed.tolerance:g} is explained"
                f"{grown}"
            )
    yield from (f"differs: {text}" for text in certificate["problems"])
    yield f"verdict: {certificate['verdict']}"
