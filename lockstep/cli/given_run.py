"""The run that a command line asks for: to be trained, to be scored, or one whose weights are wanted."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lockstep.checkpoints.fetching import no_run_on
from lockstep.checkpoints.mirror import shown_path
from lockstep.checkpoints.store import Store
from lockstep.checks import NonNegativeFloat, PositiveInt, check_together, check_value
from lockstep.cli.meant import run_meant
from lockstep.cli.own_data import names_data, own_run
from lockstep.cli.shared import check_target, given_seat, run_folder
from lockstep.cores import NumThreads
from lockstep.errors import InputError, RecipeError, WorkdirError
from lockstep.listing import did_you_mean, hint_for_path, what_is_there
from lockstep.recipes.code import with_code
from lockstep.recipes.data import SPLITS
from lockstep.recipes.recipe import Recipe, recipe_changes
from lockstep.recipes.shipped import find, names
from lockstep.recipes.toml import with_settings
from lockstep.run_files import HISTORY, RECIPE
from lockstep.runs.inputs import check_inputs
from lockstep.runs.workdir import REMARKS, Workdir, located, with_code_of_run
from lockstep.storage.remote_path import AnyPath, is_url
from lockstep.types import End, Epochs, Hours, Steps

if TYPE_CHECKING:
    from lockstep.evaluation.follow import Polling
    from lockstep.evaluation.scores import Weights


class ChosenRun(NamedTuple):
    """A run, and which of its weights are wanted."""

    path: Path
    recipe: Recipe
    step: int | None
    """Step of the checkpoint, which exists; None: the newest, or each new one."""
    weights: Weights

    @property
    def name(self) -> str:
        """The run and the step as the library takes them: `WORKDIR@STEP`."""
        return str(self.path) if self.step is None else f"{self.path}@{self.step}"


def chosen_run(arguments: argparse.Namespace) -> ChosenRun:
    """Find the run and the weights that the flags choose, and refuse those that are not there.

    A command with a flag `--follow` waits for checkpoints with it, of which there may be none yet.
    """
    from lockstep.training.run_weights import run_at_step, run_of_url

    follow = getattr(arguments, "follow", False)
    if is_url(arguments.run):
        url, step = run_of_url(arguments.run)
        path = run_folder(url)
    else:
        path, step = run_at_step(str(run_folder(arguments.run)))
    if step is not None and (arguments.best or follow or arguments.step is not None):
        raise InputError(
            "The checkpoint is chosen twice.",
            given=f"{arguments.run}, and --{'best' if arguments.best else 'follow' if follow else 'step'}",
            expected="one of the two",
            hint=f"give {path} alone with the flag, or leave the flag out",
        )
    recipe = Workdir(path).recipe() if Workdir(path).holds_run else None
    if recipe is None:
        raise no_run_in(path)
    recipe = with_code_of_run(recipe, path, allow_code=arguments.allow_code)
    weights = _weights(arguments, recipe)
    store = Workdir(path).store(recipe)
    if follow:
        return ChosenRun(path, recipe, None, weights)
    if arguments.best:
        return ChosenRun(path, recipe, _best(store, path), weights)
    step = arguments.step if step is None else step
    _check_saved(store, step, may_wait="follow" in arguments)
    return ChosenRun(path, recipe, step, weights)


def no_run_in(path: Path) -> WorkdirError:
    """Return the error for a folder that holds no run, which names one that may be meant."""
    if is_url(shown := shown_path(path)):
        return no_run_on(shown)
    return WorkdirError(
        f"There is no run in {path}.",
        given=what_is_there(path),
        expected=f"the folder of a run, with a {RECIPE}",
        hint=run_meant(path),
    )


def _weights(arguments: argparse.Namespace, recipe: Recipe) -> Weights:
    if arguments.average and recipe.average is None:
        from lockstep.runs.trained import no_averages

        raise no_averages(f"The run in {arguments.run}")
    if arguments.average or arguments.raw:
        return "average" if arguments.average else "raw"
    return recipe.evaluate.weights


def _check_saved(store: Store, step: int | None, *, may_wait: bool) -> None:
    steps = store.steps()
    if not steps or step not in (None, *steps):
        wait = ", or add --follow to wait for it" if may_wait else ""
        raise InputError(
            f"There is no such checkpoint in {store.folder}.",
            given="the newest" if step is None else f"--step {step}",
            expected=f"one of step {', '.join(map(str, steps))}" if steps else "one at least",
            hint="name one of these, or leave the step out"
            if steps
            else f"let the run train until it has saved one{wait}",
        )


def _best(store: Store, workdir: Path) -> int:
    if store.retention.best is None:
        raise InputError(
            f"The run in {workdir} does not say which checkpoint is the best.",
            given="--best",
            expected="a run whose recipe keeps the best checkpoints by some score",
            hint="leave --best out, or train with one: --set checkpoints.retention.best=validation/top1",
        )
    best = store.best()
    if best is None:
        raise InputError(
            f"None of the checkpoints in {store.folder} is known to be the best.",
            given=f"checkpoints without a score {store.retention.best!r}",
            expected="one that was saved after an evaluation",
            hint="leave --best out, or let the run train until it has been scored",
        )
    return best


_WRITERS = (
    "checkpoints.every",
    "watch.summaries",
    "watch.metrics",
    "watch.images",
    "watch.gradients",
    "watch.variables",
    "watch.activations",
    "watch.trace",
    "watch.profile.every",
    "watch.profile.steps",
    "loggers",
)
"""The fields that ask for files in the workdir."""


class GivenRun(NamedTuple):
    """What is trained, and where."""

    recipe: Recipe
    """Its number of towers is None only where nobody has given one: then there are as many towers as workers."""
    path: Path | None
    """The workdir; None writes nothing."""


def given_run(arguments: argparse.Namespace) -> GivenRun:
    """Return the run of a command line.

    The number of towers is the one that the user gives, by a flag, a setting or a recipe's file; else that of the run
    in the workdir; else that of the shipped recipe. Where data is named in place of a recipe, it is the run that has
    begun with it.
    """
    arguments = _of_begun_run(arguments)
    named, folder = _named(arguments.recipe)
    is_shipped = arguments.recipe in names()
    recipe = _changed(replace(named, num_towers=None) if is_shipped else named, folder, arguments)
    path = _workdir(arguments, recipe.name, folder)
    # A workdir that holds something else is refused later, with all else that is wrong.
    saved = Workdir(path).recipe() if path and not arguments.rehearse and Workdir(path).holds_run else None
    num_towers = recipe.num_towers or (saved and saved.num_towers) or named.num_towers
    if path and arguments.rehearse:  # which takes place in another folder, that knows nothing of the data
        recipe = located(recipe, path)
    return GivenRun(replace(recipe, num_towers=num_towers), path)


def _of_begun_run(arguments: argparse.Namespace) -> argparse.Namespace:
    """Put the run that has begun in place of the data that stands for a recipe."""
    if not names_data(word := arguments.recipe):
        return arguments
    if begun := own_run(argparse.Namespace(**{"workdir": None, **vars(arguments)})):
        return begun
    raise InputError(
        f"{word} is neither a recipe nor the folder of a run, and no run on this data has begun.",
        given=word,
        expected="a recipe, or the folder of a run",
        hint=f"train on it first: lockstep train {shlex.quote(word)}; "
        f"or lockstep train {shlex.quote(word)} --print-recipe > mine.toml, and name mine.toml",
    )


def given_recipe(arguments: argparse.Namespace) -> Recipe:
    """Return the recipe of a command line, whatever its workdir holds."""
    arguments = _of_begun_run(arguments)
    return _changed(*_named(arguments.recipe), arguments)


def _named(word: str) -> tuple[Recipe, Path | None]:
    folder = run_folder(word)
    if not is_url(word) and (word in names() or word.endswith(".toml")):
        return find(word), None
    if Workdir(folder).holds_run:
        recipe = Workdir(folder).recipe()
        assert recipe is not None, "it is there"
        return recipe, folder
    if is_url(word):
        raise no_run_in(folder)
    runs = [above for above in folder.parents if (above / RECIPE).is_file()]
    runs += sorted(found.parent for found in folder.glob(f"*/{RECIPE}"))
    what_for = "put a folder of images for each class into it" if folder.is_dir() else "name a folder of images"
    raise RecipeError(
        f"{word} is neither data, nor a recipe, nor the folder of a run.",
        given=what_is_there(folder),
        expected="data, such as a folder with a folder of images for each class; the folder of a run; "
        "a name that `lockstep recipes` lists; or a file that ends in .toml",
        hint=f"lockstep train {shlex.quote(str(runs[0]))}"
        if runs
        else f"{what_for}, and give the same command again"
        if folder.exists()
        else did_you_mean(word, names()) or hint_for_path(folder),
    )


def _changed(recipe: Recipe, folder: Path | None, arguments: argparse.Namespace) -> Recipe:
    """Return the recipe, of the run in `folder` or that the user gives, with the settings and flags of a command line.

    The code that it names may be called then, unless others could have written the run.
    """
    recipe = changed_by_flags(recipe, arguments)
    if folder is None:
        return with_code(recipe, Path(arguments.recipe).parent)
    return with_code_of_run(recipe, folder, allow_code=arguments.allow_code)


def changed_by_flags(recipe: Recipe, arguments: argparse.Namespace) -> Recipe:
    """Return a recipe with the settings and flags of a command line."""
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
    if folder is None:
        return None if wanted == "none" else run_folder(wanted or str(Path("runs") / name))
    if wanted is None or run_folder(wanted).absolute() == folder.absolute():
        return folder
    raise WorkdirError(
        f"A run that is named by its folder goes on in it: {folder}.",
        given=f"--workdir {wanted}",
        expected="no --workdir",
        hint=f"to begin another run by the same recipe: lockstep train {folder / RECIPE} --workdir {wanted}",
    )


def check_without_torch(arguments: argparse.Namespace, run: GivenRun) -> None:
    """Check what can be seen to be missing or wrong before torch is loaded; what is wrong is reported together."""
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


_FILES = {
    "to": (".json", "The result is written as JSON."),
    "confusion": (".csv", "The confusion matrix is written as a table of CSV."),
    "curves": (".csv", "Precision over recall is written as a table of CSV."),
    "mistakes": (".png", "The worst mistakes are shown as one PNG."),
}
"""The flags that name a file to write, with its ending."""

_SETTABLE = ("data", "evaluate", "feed")
"""The parts of a recipe that an evaluation may change: no others could change which examples are scored, or how."""


@dataclass(frozen=True)
class ScoredRun:
    """The run, the examples and the weights to score, by the flags and the recipe of the run."""

    path: Path
    recipe: Recipe
    """The run's, with the settings of the flags."""
    split: str
    is_other_data: bool
    """Whether the flags name other examples than those of the run."""
    weights: Weights
    polling: Polling | None
    """Times to wait for new checkpoints; None: one checkpoint is scored."""
    wanted: int | None
    """The step of the checkpoint; None: the newest."""

    @property
    def store(self) -> Store:
        """The checkpoints of the run."""
        return Workdir(self.path).store(self.recipe)

    def is_over(self) -> bool:
        """Whether the run's history has its end, which is written after the last checkpoint; remarks may follow."""
        return has_ended(self.path)


def has_ended(run: AnyPath) -> bool:
    """Whether the history in the folder of a run says that it is over."""
    try:
        lines = (run / HISTORY).read_bytes().splitlines()
        events = (json.loads(line)["event"] for line in reversed(lines))
        return next((event for event in events if event not in REMARKS), None) == "end"
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # none yet, or a line that is being written
        return False


def scored_run(arguments: argparse.Namespace) -> ScoredRun:
    """Decide what is to be scored, and refuse flags that this run cannot serve."""
    polling = _polling(arguments)
    check_value("--threads", arguments.threads, NumThreads | None)
    _check_split(arguments.split)
    for flag, (ending, what) in _FILES.items():
        if (file := getattr(arguments, flag)) is not None:
            check_target(file, (ending,), what, overwrite=arguments.force, flag=f"--{flag}")
    _check_two_tables(arguments.confusion, arguments.curves)
    path, saved, wanted, weights = chosen_run(arguments)
    saved = located(saved, path)
    recipe = _with_settings(arguments, saved)
    split = arguments.split or ("test" if _has_test(recipe, arguments.data) else "validation")
    if arguments.data is not None:
        recipe = replace(recipe, data=recipe.data.at(split, arguments.data))
    if not (arguments.average or arguments.raw):
        weights = recipe.evaluate.weights
    _check_there(split, path, recipe)
    recipe.data.check_there(split)
    is_other = recipe.data.path_of(split) != saved.data.path_of(split)
    return ScoredRun(path, recipe, split, is_other, weights, polling, wanted)


def _check_two_tables(confusion: Path | None, curves: Path | None) -> None:
    if confusion is not None and curves is not None and confusion.resolve() == curves.resolve():
        raise InputError(
            "The confusion matrix and precision over recall are two tables, and one would overwrite the other.",
            given=f"--confusion {confusion} --curves {curves}",
            expected="two files",
            hint=f"--curves {curves.with_name('curves.csv' if curves.name != 'curves.csv' else 'precision.csv')}",
        )


def _has_test(recipe: Recipe, other_data: str | None) -> bool:
    """Whether there are test examples; a function that gives the examples is asked, unless others are named."""
    if other_data is not None or recipe.data.function is None:
        return "test" in recipe.data.splits
    from lockstep.runs.build import Examples

    return Examples(recipe).has("test")


def _with_settings(arguments: argparse.Namespace, saved: Recipe) -> Recipe:
    """Apply the settings of the flags; one that would change what was trained is refused."""
    recipe = with_settings(saved, arguments.settings)
    if arguments.examples is not None:
        check_value("--examples", arguments.examples, PositiveInt)
        recipe = replace(recipe, evaluate=replace(recipe.evaluate, examples=arguments.examples))
    wrong = [change for change in recipe_changes(saved, recipe) if not change.is_allowed(_SETTABLE)]
    if wrong or type(recipe.data) is not type(saved.data):
        raise InputError(
            "These settings would change what was trained, and a checkpoint is scored as it was trained.",
            given="; ".join(map(str, wrong)) or f"data of another kind: {type(recipe.data).__name__}",
            expected=f"settings of {', '.join(_SETTABLE)}: which examples are scored, and how",
            hint="leave them out; to train with them: lockstep train",
        )
    return recipe


def _polling(arguments: argparse.Namespace) -> Polling | None:
    from lockstep.evaluation.follow import Polling

    given = {"--interval": arguments.interval, "--timeout": arguments.timeout}
    waiting = {flag: seconds for flag, seconds in given.items() if seconds is not None}
    for flag, seconds in waiting.items():
        check_value(flag, seconds, NonNegativeFloat)
    if not arguments.follow:
        if waiting:
            flags = " and ".join(waiting)
            raise InputError(
                f"Without --follow nothing is waited for, and {flags} {'says' if len(waiting) == 1 else 'say'} how.",
                given=" ".join(f"{flag} {seconds:g}" for flag, seconds in waiting.items()),
                expected="--follow with it",
                hint=f"add --follow to score each new checkpoint, or leave {flags} out",
            )
        return None
    interval = Polling().interval_seconds if arguments.interval is None else arguments.interval
    return Polling(interval, arguments.timeout)


def _check_split(split: str | None) -> None:
    if split is not None and split not in SPLITS:
        raise InputError(
            f"There is no split {split!r}.",
            given=f"--split {split}",
            expected=", ".join(SPLITS),
            hint="name one of these, or leave it out to score the test examples",
        )


def _check_there(split: str, path: Path, recipe: Recipe) -> None:
    there = recipe.data.splits
    if there and split not in there:  # a run whose examples come from a function names none
        raise InputError(
            f"The run in {path} has no {split} examples.",
            given=f"a recipe without data.{split}",
            expected=f"--split {' or '.join(there)}",
            hint=f"lockstep evaluate {path} --split {there[-1]}",
        )
