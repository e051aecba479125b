"""The run that a command line of `lockstep train` asks for: its recipe, with settings and flags, and its workdir."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from lockstep.checks import check_together
from lockstep.cli.shared import given_seat
from lockstep.errors import InputError, RecipeError, WorkdirError
from lockstep.listing import hint_for_path, what_is_there
from lockstep.progress import End, Epochs, Hours, Steps
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.settings import with_settings
from lockstep.recipes.shipped import find, names
from lockstep.records.shards import check_local
from lockstep.runs.inputs import check_inputs
from lockstep.runs.known_data import located
from lockstep.runs.workdir import RECIPE, Workdir

_WRITERS = (
    "checkpoints.every",
    "watch.summaries",
    "watch.metrics",
    "watch.images",
    "watch.gradients",
    "watch.variables",
    "watch.activations",
)
"""The fields that ask for files in the workdir."""


class GivenRun(NamedTuple):
    """What is trained, and where."""

    recipe: Recipe
    """Its number of towers is None only where nobody has said one: then it is that of the workers."""
    path: Path | None
    """The workdir; None writes nothing."""


def given_run(arguments: argparse.Namespace) -> GivenRun:
    """Return the run of a command line.

    The number of towers is the one that the user gives, by a flag, a setting or a recipe's file; else that of the run
    in the workdir; else that of the shipped recipe.
    """
    named, folder = _named(arguments.recipe)
    is_shipped = arguments.recipe in names()
    recipe = _changed(replace(named, num_towers=None) if is_shipped else named, arguments)
    path = _workdir(arguments, recipe.name, folder)
    # A workdir that holds something else is refused later, with all else that is wrong.
    saved = Workdir(path).recipe() if path and not arguments.rehearse and (path / RECIPE).is_file() else None
    num_towers = recipe.num_towers or (saved and saved.num_towers) or named.num_towers
    if path and arguments.rehearse:  # which takes place in another folder, that knows nothing of the data
        recipe = located(recipe, path)
    return GivenRun(replace(recipe, num_towers=num_towers), path)


def given_recipe(arguments: argparse.Namespace) -> Recipe:
    """Return the recipe of a command line, whatever its workdir holds."""
    return _changed(_named(arguments.recipe)[0], arguments)


def _named(word: str) -> tuple[Recipe, Path | None]:
    """Return the recipe that a word names, and the folder where it is the one of a run."""
    check_local(word)
    folder = Path(word)
    if word in names() or word.endswith(".toml") or not (os.sep in word or folder.exists()):
        return find(word), None
    if (folder / RECIPE).is_file():
        recipe = Workdir(folder).recipe()
        assert recipe is not None, "it is there"
        return recipe, folder
    run = next((above for above in folder.parents if (above / RECIPE).is_file()), None)
    raise RecipeError(
        f"{word} is neither a recipe nor the folder of a run.",
        given=what_is_there(folder),
        expected=f"a run's folder, with a {RECIPE}; or {', '.join(names())}; or a file that ends in .toml",
        hint=f"lockstep train {run}"
        if run
        else hint_for_path(folder)
        if not folder.exists()
        else "name another folder",
    )


def _changed(recipe: Recipe, arguments: argparse.Namespace) -> Recipe:
    """Return the recipe with the settings and the flags of a command line."""
    given = {
        "num_towers": arguments.towers,
        "num_workers": arguments.workers,
        "workers_per_device": arguments.workers_per_device,
        "num_threads": arguments.threads,
        "device": arguments.device,
    }
    flags = {field: value for field, value in given.items() if value is not None}
    if arguments.settings:
        # At once with the flags: a batch size need not be split over the towers that there were before.
        recipe = with_settings(recipe, [*arguments.settings, *(f"{name}={value}" for name, value in flags.items())])
    return replace(recipe, **flags, end=None if arguments.forever else _end(arguments) or recipe.end)


def _end(arguments: argparse.Namespace) -> End | None:
    if arguments.steps is not None:
        return Steps(arguments.steps)
    if arguments.epochs is not None:
        return Epochs(arguments.epochs)
    return Hours(arguments.hours) if arguments.hours is not None else None


def _workdir(arguments: argparse.Namespace, name: str, folder: Path | None) -> Path | None:
    """Return the workdir, which a run that is named by its folder has already."""
    wanted = arguments.workdir
    if wanted is not None:
        check_local(wanted)
    if folder is None:
        return None if wanted == "none" else Path(wanted or Path("runs") / name)
    if wanted is None or Path(wanted).absolute() == folder.absolute():
        return folder
    raise WorkdirError(
        f"A run that is named by its folder goes on in it: {folder}.",
        given=f"--workdir {wanted}",
        expected="no --workdir",
        hint=f"to begin another run by the same recipe: lockstep train {folder / RECIPE} --workdir {wanted}",
    )


def check_without_torch(arguments: argparse.Namespace, run: GivenRun) -> None:
    """Check what can be seen to be missing or wrong before torch is loaded; what is wrong is told together."""
    path = None if arguments.rehearse else run.path
    options = {"accept_changes": arguments.accept_changes, "fork_from": arguments.fork_from}
    checks = [partial(check_inputs, run.recipe, path, **options), partial(check_files_wanted, arguments, run)]
    # Not in check_inputs: a worker is there before the chief has given up the folder of a run just ended. Nor on other
    # hosts, which do not see whether a worker of the chief's host, which may just be starting again, is dead.
    seat = given_seat(arguments, os.environ)
    is_chief = seat is None or seat.is_chief
    check_together(checks + ([Workdir(path).check_free] if path and is_chief else []))


def check_files_wanted(arguments: argparse.Namespace, run: GivenRun) -> None:
    """Refuse settings that ask for files where nothing is written; those of the recipe itself are left aside."""
    set_here = [setting.partition("=")[0].strip() for setting in arguments.settings]
    values = {name: attrgetter(name)(run.recipe) for name in _WRITERS if name in set_here}
    wanted = {name: value for name, value in values.items() if getattr(value, "amount", value)}
    if run.path is None and wanted:
        raise InputError(
            "Without a workdir nothing is written.",
            given="--workdir none " + " ".join(f'--set {name}="{value}"' for name, value in wanted.items()),
            expected="a workdir for these, or settings that ask for no files",
            hint=f"name a --workdir, or leave out {' and '.join(wanted)}",
        )
