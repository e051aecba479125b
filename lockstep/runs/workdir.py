"""The folder of a run: its recipe, choices, history and result, and the process that holds it.

The names of its files, and what is in each, are in `lockstep.run_files`.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from lockstep.checkpoints.fetching import fetch_run, reached
from lockstep.checkpoints.manifest import Manifest
from lockstep.checkpoints.mirror import KnownBucket, Mirror, mirror_of, store_in
from lockstep.checkpoints.store import Store
from lockstep.durable import atomic_write
from lockstep.errors import WorkdirError, WorkdirLostError
from lockstep.listing import shorten
from lockstep.owner import Owner
from lockstep.recipes.code import functions_of, with_code
from lockstep.recipes.recipe import Recipe, is_harmless, recipe_changes
from lockstep.recipes.toml import load, to_toml
from lockstep.reporting.append import append_line, no_folder
from lockstep.reporting.chain import CHAIN, ChainFile
from lockstep.reporting.jsonl import without_nonfinite
from lockstep.run_files import CHECKPOINTS, CHOICES, DATA, HISTORY, LEASE, MARKER, RECIPE, RESULT, SAVES, WARM_START
from lockstep.runs.lease import Lease, check_free, take
from lockstep.screen import log
from lockstep.types import BadExample
from lockstep.version import __version__
from lockstep.weights.warm_start import WarmStartReport

if TYPE_CHECKING:
    from lockstep.evaluation.evaluate import Evaluation
    from lockstep.readers.reader import Reader
    from lockstep.training.choices import Choices

_Made = TypeVar("_Made")

REMARKS = ("verdict", "straggler")
"""Events that neither begin nor end anything, each with a sentence, "said"."""


class Workdir:
    """The folder of one run. Reading it changes nothing; the chief alone writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lease: Lease | None = None
        self._mirror: Mirror | None = None

    @property
    def holds_run(self) -> bool:
        """Whether there is a run in the folder."""
        with self._accessed():
            return (self.path / RECIPE).is_file()

    def recipe(self) -> Recipe | None:
        """Read the recipe of the run; None if the folder is empty or not there yet."""
        with self._accessed():
            if self.holds_run:
                return load(self.path / RECIPE)
            if self.path.exists() and not self.path.is_dir():
                raise self._something_else("a file")
            entries = list(self.path.iterdir()) if self.path.is_dir() else []
        there = sorted(entry.name for entry in entries if not _is_partial(entry))
        if there:
            raise self._something_else(shorten(there, 3))
        return None

    def _something_else(self, found: str) -> WorkdirError:
        return WorkdirError(
            f"{self.path} holds something that is not a run.",
            given=found,
            expected=f"a folder that is empty, not there yet, or of a run (with a {RECIPE})",
            hint="name another folder with --workdir; nothing in this one was touched",
        )

    def store(self, recipe: Recipe) -> Store:
        """Return the checkpoints of the run."""
        return store_in(self.path, recipe.checkpoints.retention)

    def check(self, recipe: Recipe, *, accept_changes: bool) -> list[str]:
        """Compare a recipe with the one in the folder; returns the changes, a line each."""
        saved = self.recipe()
        changes = recipe_changes(saved, recipe) if saved else []
        grave = [str(change) for change in changes if not is_harmless(change)]
        if grave and not accept_changes:
            raise WorkdirError(
                f"The run in {self.path} has another recipe.",
                given="; ".join(grave),
                expected="the recipe that the run began with, but for its end, intervals and machine",
                hint="take the changes back, name another --workdir, or add --accept-changes to go on with them",
            )
        return [str(change) for change in changes]

    def check_free(self) -> None:
        """Refuse a folder in which the run goes on already, and a bucket that cannot be written; nothing is taken."""
        if self.path.is_dir():
            with self._accessed():
                check_free(self.path)
        if mirror := mirror_of(self.path):
            with reached(mirror.bucket):
                check_free(mirror.bucket)

    def write_recipe(self, recipe: Recipe) -> None:
        """Save the recipe as it runs now, without the result of a start before; what says the same keeps comments."""
        if not self.holds_run or self.recipe() != recipe:
            self.write(RECIPE, to_toml(recipe))
        with self._accessed():
            (self.path / RESULT).unlink(missing_ok=True)

    def write_start(self, recipe: Recipe, choices: Choices, warm_start: WarmStartReport | None) -> None:
        """Write the recipe and the choices of a start, and remove the result of an earlier one."""
        self.write_recipe(recipe)
        self.write(CHOICES, json.dumps(asdict(choices), indent=2) + "\n")
        if warm_start:
            self.write(WARM_START, json.dumps(warm_start.as_json(), indent=1) + "\n")

    def write_result(self, result: Result) -> None:
        """Write the result of the run, into its chain first, if this process still holds the folder."""
        self.check_held()
        with closing(ChainFile(self.path / CHAIN, from_position=sys.maxsize)) as chain:
            chain.write({"step": result.step, "result": result.facts})
            chain.flush()
        self.write(RESULT, result.as_json())

    def saved_choices(self) -> dict[str, Any] | None:
        """Read the choices of the first start; None before it."""
        from lockstep.training.choices import Choices

        return self.read_json(
            CHOICES,
            lambda facts: asdict(Choices.read(facts)),
            expected="the choices of the run's first start, as JSON",
            hint="restore the file; or move it away, and the choices of this machine are taken",
        )

    def check_unstarted(self) -> None:
        """Refuse to start anew a run that has gone on from a checkpoint, or ended with one, since they are gone."""
        steps = [event["step"] for event in self._noted(HISTORY) if event.get("event") not in ("failed", *REMARKS)]
        if any(steps):
            raise WorkdirError(
                f"The run in {self.path} has been at step {max(steps)}, and its checkpoints are gone.",
                given=f"no checkpoint in {self.path / CHECKPOINTS}",
                expected="the newest one at least",
                hint="put the checkpoints back, or name another --workdir to start afresh; nothing here was changed",
            )

    def taken_up(self, before: Owner) -> bool:
        """Bring the folder to where the bucket is if it mirrors one, and the chief before was on another host.

        Returns:
            Whether that is so: nothing is known here of what that chief has not uploaded.
        """
        origin = KnownBucket.read(self.path)
        if origin is None or origin.owner == before:
            return False
        fetch_run(origin.url)
        return True

    @contextmanager
    def held(self, *, known_dead: Owner | None = None) -> Iterator[None]:
        """Hold the folder, which is made if necessary, against a second start of the run.

        An owner that is `known_dead` has held it for this same start, as its chief before.
        """
        with self._accessed():
            self.path.mkdir(parents=True, exist_ok=True)
            lease = self._lease = take(self.path, known_dead=known_dead)
        try:
            with self._bucket_held(known_dead, lease.owner):
                yield
        finally:
            self._lease = None
            lease.release()

    @contextmanager
    def _bucket_held(self, known_dead: Owner | None, owner: Owner) -> Iterator[None]:
        """Hold the folder on the bucket, too, where this one is its mirror, and upload the rest at the end."""
        with ExitStack() as stack:
            if mirror := mirror_of(self.path):
                with reached(mirror.bucket):
                    lease = take(mirror.bucket, known_dead=known_dead, owner=owner)
                    stack.callback(lease.release)
                    stack.callback(setattr, mirror, "check", mirror.check_latest)
                    stack.callback(mirror.close)
                    mirror.check = lease.check
                    mirror.hold(owner)
                self._mirror = mirror
            yield

    def settle(self, *, stops: bool = False) -> None:
        """Wait until all of the folder is on the bucket, where this process holds the mirror of one, as it does."""
        if self._mirror:
            self._mirror.settle(stops=stops)

    @property
    def owner(self) -> Owner | None:
        """This process, if it holds the folder."""
        return self._lease.owner if self._lease else None

    @property
    def holder(self) -> dict[str, Any]:
        """Facts about the process that holds the folder, for the history."""
        if self._lease is None:
            return {}
        owner, dead = self._lease.owner, self._lease.taken_from
        return {"host": owner.host, "pid": owner.pid} | ({"taken_over_from": str(dead)} if dead else {})

    def check_held(self, *, closely: bool = True) -> None:
        """Check that this process still holds the folder, if it ever did.

        If not `closely`, it looks at the disk only where there is a reason to, and so costs nothing at every step.
        """
        if self._lease:
            with self._accessed():
                if closely:
                    self._lease.check()
                else:
                    self._lease.check_if_stale()
            if self._mirror:
                self._mirror.raise_if_lost()

    def note(self, event: str, **facts: Any) -> str:
        """Add a line to the run's history; returns it."""
        line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": event, **facts})
        self._append(HISTORY, line)
        return line

    def note_save(self, step: int, position: int, metrics_lines: int) -> None:
        """Note how many lines metrics.jsonl has, just before a checkpoint is saved."""
        self._append(SAVES, json.dumps({"step": step, "position": position, "metrics_lines": metrics_lines}))

    def _append(self, name: str, line: str) -> None:
        try:
            append_line(self.path / name, line)
        except WorkdirError as error:
            if self._lease is None:
                raise
            # It could be written when this run took it.
            raise WorkdirLostError(error.what, given=error.given, expected=error.expected, hint=error.hint) from error

    def metrics_lines(self, step: int, position: int) -> int | None:
        """Return how many lines metrics.jsonl had when a checkpoint was last saved there; None if not noted."""
        saves = [save for save in self._noted(SAVES) if (save["step"], save.get("position")) == (step, position)]
        return saves[-1].get("metrics_lines") if saves else None

    def _noted(self, name: str) -> list[dict[str, Any]]:
        """Parse the lines of a file, which each name a step; a torn last line is left out."""
        path = self.path / name
        with self._accessed():
            lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [_facts(line, path, number) for number, line in enumerate(lines, start=1)]

    def read_json(self, name: str, made: Callable[[Any], _Made], *, expected: str, hint: str) -> _Made | None:
        """Make a value of a file of JSON in the folder; None where it is not there. `made` may raise ValueError."""
        path = self.path / name
        with self._accessed():
            text = path.read_text(errors="replace") if path.exists() else None
        try:
            return None if text is None else made(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise WorkdirError(f"{path} cannot be read.", given=str(error), expected=expected, hint=hint) from None

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder atomically."""
        with self._accessed(), atomic_write(self.path / name) as file:
            file.write(text.encode())

    @contextmanager
    def _accessed(self) -> Iterator[None]:
        """Turn errors of the file system into a WorkdirError that says what to do; while it is held, a lost one."""
        try:
            yield
        except OSError as error:
            if self._lease and not self.path.exists():
                raise no_folder(self.path) from error
            kind = WorkdirLostError if self._lease else WorkdirError
            raise kind(
                f"The workdir {self.path} cannot be used: {error.strerror}.",
                given=f"{error.filename or self.path} ({error.strerror})",
                expected="a folder that can be read and written, on a disk with space left",
                hint="make space, or name a --workdir that can be written; what was written before is intact",
            ) from error


Reason = Literal["end", "patience", "stopped"]


@dataclass(frozen=True)
class Best:
    """The best checkpoint by the score of the recipe."""

    step: int
    scores: dict[str, float]

    @classmethod
    def of(cls, store: Store) -> Best | None:
        """Read the best checkpoint of a store; None if none is known to be the best."""
        step = store.best()
        return None if step is None else cls(step, dict(Manifest.read(store.path(step)).scores))


@dataclass(frozen=True)
class Result:
    """Why and where a start of a run has ended, and its scores; all but the times are the same on all workers."""

    recipe: str
    """Name of the recipe."""
    step: int
    """Completed updates."""
    epochs: float
    reason: Reason
    """Its end is reached; or `evaluate.patience` evaluations have brought no better checkpoint; or a signal has stopped
    it, and the next start goes on."""
    split: str | None
    """The examples that are scored after the end; None where the recipe names neither test nor validation examples."""
    evaluation: Evaluation | None
    """Scores of the final weights; None if there are no examples for it, or the run or the scoring was stopped."""
    best: Best | None
    seconds: float
    """Duration of this start."""
    examples_per_second: float
    """Throughput of this start without evaluations and saving; 0 if it made no attempt."""

    @property
    def is_complete(self) -> bool:
        """Whether the run has reached its end, and its weights are scored if there are examples for it."""
        return self.reason != "stopped" and (self.evaluation is not None or self.split is None)

    @property
    def facts(self) -> dict[str, Any]:
        """What can be made again, all but the times; numbers that JSON lacks are text, as in `metrics.jsonl`."""
        facts = {
            "recipe": self.recipe,
            "lockstep": __version__,
            "torch": torch.__version__,
            "step": self.step,
            "epochs": self.epochs,
            "reason": self.reason,
            "evaluations": {self.split: self.evaluation.facts} if self.evaluation else {},
            "best": self.best and asdict(self.best),
        }
        found: dict[str, Any] = without_nonfinite(facts)
        return found

    @classmethod
    def of_saved(cls, saved: Mapping[str, Any]) -> Result:
        """Make it of what `dataclasses.asdict` has made of it, and JSON of that."""
        evaluation, best = saved["evaluation"], saved["best"]
        if evaluation:
            from lockstep.evaluation.evaluate import Evaluation

            evaluation = Evaluation(**evaluation | {"bad": tuple(BadExample(*each) for each in evaluation["bad"])})
        return cls(**{**saved, "evaluation": evaluation, "best": best and Best(**best)})

    def as_json(self) -> str:
        """Make the text of the file."""
        times = {"seconds": self.seconds, "examples_per_second": self.examples_per_second}
        return json.dumps(self.facts | {"times": without_nonfinite(times)}, indent=1, allow_nan=False) + "\n"


def _facts(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        facts = json.loads(line)
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or not isinstance(facts.get("step"), int):
        raise WorkdirError(
            f"{path}, line {number} is none that was written here.",
            given=line[:80].decode(errors="replace"),
            expected='a JSON object with a "step"',
            hint=f"take this line out of {path.name}, or move the file away: nothing is trained from it",
        )
    return facts


def _is_partial(path: Path) -> bool:
    return (
        path.name.startswith(LEASE)
        or path.name == MARKER
        or (path.name.startswith(".") and path.name.endswith(".partial"))
    )


@dataclass(frozen=True)
class KnownData:
    """Where a run reads its data, and what its classes are called."""

    folder: Path | None = None
    """The folder in which relative paths of the recipe are read; None where the run is older than this file."""
    class_names: Mapping[int, str] = field(default_factory=dict)
    """Names of the classes by the model's labels; none where the data does not name them."""

    @classmethod
    def of(cls, workdir: Workdir) -> KnownData:
        """Read what the run has written down; nothing is known of a run that has no such file."""
        known = workdir.read_json(
            DATA,
            _read,
            expected='JSON such as {"folder": "/home/me", "classes": {"0": "daisy"}}',
            hint="restore the file; or move it away, and classes are called by their numbers",
        )
        return known or cls()

    def write(self, workdir: Workdir) -> None:
        """Write it down in the workdir."""
        facts = {"folder": str(self.folder), "classes": {str(label): name for label, name in self.class_names.items()}}
        workdir.write(DATA, json.dumps(facts, indent=1) + "\n")


def class_names(reader: Reader) -> dict[int, str]:
    """Return the names of the classes by the model's numbers; none if the reader knows none."""
    classes, offset = getattr(reader, "classes", ()), getattr(reader, "offset", 0)
    named = classes.items() if isinstance(classes, Mapping) else enumerate(classes)
    return {label - offset: str(name) for label, name in named if label >= offset}


def located(recipe: Recipe, path: Path | None) -> Recipe:
    """Find the data of a run from another folder than the one in which it was started.

    A relative path is read in the current folder; where it leads nowhere, in the folder that the workdir names.
    """
    folder = KnownData.of(Workdir(path)).folder if path else None
    data = recipe.data if folder is None else recipe.data.found_from(folder)
    return recipe if data == recipe.data else replace(recipe, data=data)


def with_code_of_run(recipe: Recipe, path: Path, *, allow_code: bool, named_in: str = RECIPE) -> Recipe:
    """Let the code that the recipe of a run names be called, if the user allows it, or nobody else can have named it.

    The recipe is the one in the file `named_in` of its folder. The code is looked for where it was when the run began,
    and then in the current folder. What has changed since is told.
    """
    saved = [*functions_of(recipe)]
    if not saved or not (allow_code or is_own_run(path, named_in)):
        return recipe  # what is not called does no harm; and to call it is an error that says why
    found = with_code(recipe)
    for before, now in zip(saved, functions_of(found), strict=True):
        if before.source and before.source != now.source:
            log.warning("%s has changed since %s began: %s", before.full_name, path, now.file or "it is installed")
    return found


def is_own_run(path: Path, named_in: str = RECIPE) -> bool:
    """Whether nobody but this user can have written what the recipe in a folder has this user's processes call.

    What comes from a bucket may be everybody's who can write there.
    """
    return not (path / MARKER).exists() and all(map(_is_own, (path, path / named_in)))


def _is_own(path: Path) -> bool:
    """Whether a file or folder is the user's, and nobody else may write to it, but for a group of the user's alone."""
    info = path.stat()
    if info.st_uid != os.geteuid() or info.st_mode & stat.S_IWOTH:
        return False
    if not info.st_mode & stat.S_IWGRP:
        return True
    try:
        group, user = grp.getgrgid(info.st_gid), pwd.getpwuid(info.st_uid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _read(facts: Any) -> KnownData:
    folder, classes = (facts.get(name) if isinstance(facts, dict) else None for name in ("folder", "classes"))
    if not isinstance(folder, str) or not isinstance(classes, dict):
        raise ValueError("no folder, or no classes by their numbers")
    return KnownData(Path(folder), {int(label): str(name) for label, name in classes.items()})
