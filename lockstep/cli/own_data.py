"""`lockstep train photos/`: which run it is where data is named in place of a recipe.

The first start makes the recipe (`lockstep.cli.own_start`), and writes it to the folder of a run. From then on the
command means this run: it goes on, by the recipe as it lies there.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lockstep.errors import DataError, InputError, WorkdirError
from lockstep.readers.split_folders import RECORDS, TABLE, TAR, TFDS, find_split
from lockstep.recipes.shipped import names
from lockstep.run_files import HISTORY, RECIPE
from lockstep.runs.workdir import KnownData, Workdir
from lockstep.screen import log
from lockstep.storage.remote_path import is_url

_PATTERN = re.compile(r"[*?\[{]|\.json:")


def names_data(word: str) -> bool:
    """Whether what is to be trained by is data: a path that leads to no run, no recipe's file and no folder of runs."""
    if is_url(word) or word in names() or word.endswith(".toml"):
        return False
    path = Path(word)
    try:
        # A recipe alone above it is one that somebody has written there: a run that holds this has begun.
        if (path / RECIPE).is_file() or any(
            (above / RECIPE).is_file() and (above / HISTORY).is_file() for above in path.parents
        ):
            return False
        if path.is_dir():
            return next(path.glob(f"*/{RECIPE}"), None) is None and any(path.iterdir())
        is_there = path.exists()
    except OSError:  # a name that no system takes, or a folder that may not be read
        return False
    with suppress(DataError):  # of a split that is not there: it is said later
        is_there = is_there or find_split(word) is not None
    is_data = TABLE.search(word) or RECORDS.search(word) or TAR.search(word) or _PATTERN.search(word)
    return is_there or word.startswith(TFDS) or is_data is not None


def remark_on_name(word: str) -> None:
    """Say that a name is that of a shipped recipe, where data in a folder of this name may be meant."""
    if word in names() and names_data(f"./{word}"):
        log.warning("%s is a recipe that comes with lockstep; to train on the folder: lockstep train ./%s", word, word)


def folder_of_run(arguments: argparse.Namespace) -> Path:
    """Return the folder of the run that trains on the data, which may not be there yet."""
    if arguments.workdir == "none":
        raise WorkdirError(
            "What is trained on data of your own begins with a recipe that is written down.",
            given="--workdir none",
            expected="a folder for the run",
            hint="leave it out; or --print-recipe > mine.toml, and lockstep train mine.toml --workdir none",
        )
    return Path(arguments.workdir or Path("runs") / name_of_run(arguments.recipe))


def name_of_run(word: str) -> str:
    """Return the name of the run that is trained on the data at a path."""
    path = Path(os.path.abspath(word.partition(".json:")[0]))  # noqa: PTH100 (a link keeps its name)
    name = re.sub(r"[^\w-]+", "_", path.name.partition(".")[0]).strip("_") or "data"
    return f"{name}_data" if name in names() else name


def own_run(arguments: argparse.Namespace) -> argparse.Namespace | None:
    """Return the command line of the run that trains on the data, by the folder of that run; None before its start.

    Raises:
        WorkdirError: the folder holds another run.
    """
    folder = folder_of_run(arguments)
    saved = Workdir(folder).recipe()
    if saved is None:
        return None
    trained = getattr(saved.data, "train", None)
    begun_in = KnownData.of(Workdir(folder)).folder or ""
    theirs = {os.path.abspath(os.path.join(place, trained)) for place in ("", begun_in)} if trained else set()  # noqa: PTH100, PTH118 (it may be a pattern)
    if not any(os.path.abspath(place) in theirs for place in _places(arguments.recipe)):  # noqa: PTH100 (likewise)
        raise WorkdirError(
            f"The run in {folder} has other data.",
            given=f"{arguments.recipe}; that run is trained on {trained or 'data of its own'}",
            expected="the data of the run, or a folder for another run",
            hint=f"to begin with this data: --workdir {folder}-2; to go on with that run: lockstep train {folder}",
        )
    return argparse.Namespace(**{**vars(arguments), "recipe": str(folder), "workdir": None})


def _places(word: str) -> Iterator[str]:
    """Yield where the data is, then the set to train on within it, which is looked for only then."""
    from lockstep.runs.data_sets import find_data_sets

    yield word
    yield find_data_sets(word).train


def check_own_data(arguments: argparse.Namespace, *, several_hosts: bool) -> None:
    """Refuse what can be refused before torch is loaded, by names alone."""
    from lockstep.runs.data_sets import find_data_sets

    find_data_sets(arguments.recipe)
    data, folder = Path(arguments.recipe), folder_of_run(arguments)
    if data.is_dir() and not is_url(str(folder)) and folder.resolve().is_relative_to(data.resolve()):
        outside = os.path.relpath(data.resolve().parent / "runs" / name_of_run(arguments.recipe))
        raise WorkdirError(
            "The folder of the run would be among the data, and be taken for some of it.",
            given=f"{folder}, in {data.resolve()}",
            expected="a folder elsewhere",
            hint=f"lockstep train {shlex.quote(arguments.recipe)} --workdir {shlex.quote(outside)}",
        )
    if several_hosts or arguments.rehearse or arguments.fork_from:
        flag = "several hosts" if several_hosts else "--rehearse" if arguments.rehearse else "--fork-from"
        raise InputError(
            f"A run on data of your own begins on one host, with {RECIPE} written to its folder.",
            given=f"lockstep train {shlex.quote(arguments.recipe)} with {flag}",
            expected="a recipe for this",
            hint=f"lockstep train {shlex.quote(arguments.recipe)} --print-recipe > mine.toml; "
            "then the same with mine.toml in place of the data",
        )
