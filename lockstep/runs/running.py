"""Runs of a script: a recipe, and a function that gives its examples."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from lockstep.checks import check_type, wrong_type
from lockstep.errors import InputError
from lockstep.recipes.data import ImageData
from lockstep.recipes.recipe import Recipe
from lockstep.runs.build import check_told
from lockstep.runs.examples import ReaderFunction
from lockstep.runs.result import Result
from lockstep.runs.session import Session
from lockstep.runs.workdir import Workdir
from lockstep.workers.rank import join
from lockstep.workers.signals import stop_on_signals


def run(
    recipe: Recipe,
    workdir: str | Path | None,
    *,
    reader: ReaderFunction | None = None,
    accept_changes: bool = False,
    accept_data_change: bool = False,
    fork_from: str | None = None,
) -> Result:
    """Train by a recipe, or go on where its workdir stands: what `lockstep train` does, from a script.

    Started as it is, the script is one worker; under `lockstep run --workers 4` all workers call this, and are one run.
    Ctrl-C, SIGTERM or SIGUSR1 ends the run after its step, saved, with the reason "stopped"; the script goes on then,
    and what it runs next is stopped, too. Called in another thread than the main one, it leaves signals to the script.

    Args:
        recipe: `find("mnist")`, with what is to differ: `dataclasses.replace(recipe, batch_size=64)`.
        workdir: the run's folder; None writes nothing.
        reader: `reader(split)` gives the examples of "train", "validation" or "test", in place of the recipe's paths:
            a reader with the fields "image" and "label", or None where there are none of that split. The recipe of the
            run names the function, so that the run can be resumed by the script alone.
        accept_changes: go on although the recipe is not the one the run began with.
        accept_data_change: go on although the data is not what it was when the run was saved, if it has as many
            examples; the log and the history name what has changed.
        fork_from: another run's workdir, or RUN@STEP, whose full state a run without checkpoints begins with.

    Returns:
        What has become of the run, with the scores of its final weights; alike on all workers, but for the times.

    Raises:
        InputError: the recipe still has to be told something, or its data is not given by a function; or the data is
            not what it was when the run was saved.
        WorkdirError: the workdir holds something else, or the recipe is another one than the run's.
    """
    hint = 'write ls.run(ls.recipes.find("mnist"), "runs/mnist")'
    check_type("recipe", recipe, Recipe, expected="a Recipe", hint=hint)
    worker, path = join(recipe.device), None if workdir is None else Path(workdir)
    if reader is not None:
        recipe = _with_function(recipe, reader)
    check_told(recipe, reader)
    saved = Workdir(path).recipe() if path else None
    num_towers = recipe.num_towers or (saved.num_towers if saved else None) or worker.num_workers
    recipe = replace(recipe, num_towers=num_towers)
    is_main = threading.current_thread() is threading.main_thread()
    with stop_on_signals(worker.pulse) if is_main else nullcontext():
        session = Session(
            recipe,
            path,
            worker,
            accept_changes=accept_changes,
            accept_data_change=accept_data_change,
            fork_from=fork_from,
            reader=reader,
        )
        return session.run()


def _with_function(recipe: Recipe, reader: ReaderFunction) -> Recipe:
    """The recipe, in which the function has a name."""
    if not callable(reader):
        raise wrong_type(
            "reader",
            reader,
            expected="a function of the split that returns a reader",
            hint='write def reader(split): return ls.data.ImageFolder(f"photos/{split}")',
        )
    if not isinstance(recipe.data, ImageData):
        raise InputError(
            f"A function can give no examples to {type(recipe.data).__name__}.",
            given=f"data of {type(recipe.data).__name__}, and reader={reader!r}",
            expected="a recipe with ImageData",
            hint="replace(recipe, data=ls.recipes.ImageData(image_size=224)); or leave reader out",
        )
    named = reader.func if isinstance(reader, partial) else reader
    name = getattr(named, "__qualname__", type(named).__qualname__)
    return replace(recipe, data=replace(recipe.data, function=name))
