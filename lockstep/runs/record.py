"""The record of a run: what the files of its folder tell, while it goes on and after it. Nothing is written.

A run may be at work, killed at any moment, of an older version, or damaged: what cannot be read is left out, and
`RunRecord.problems` says what that is.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shlex
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from itertools import starmap
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeAlias

from lockstep.checkpoints.mirror import shown_path
from lockstep.errors import LockstepError, WorkdirError
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import from_toml
from lockstep.reporting.jsonl import is_metrics_line
from lockstep.reporting.timings import RunTiming
from lockstep.run_files import (
    CHECKPOINTS,
    CHOICES,
    DATA,
    EVALUATIONS,
    HISTORY,
    METRICS,
    QUARANTINE,
    RECIPE,
    RESULT,
    SAVES,
    TIMINGS,
)
from lockstep.runs.lease import Holder, find_holder
from lockstep.runs.workdir import REMARKS

RunState: TypeAlias = Literal["not started", "running", "stopped", "finished", "failed", "killed"]

_MAX_LINE_BYTES, _MAX_FILE_BYTES = 1 << 20, 1 << 26
_TAIL_BYTES = 1 << 16
_MAX_PROBLEMS = 20
_MAX_DEPTH = 4
_MAX_DIGITS, _MAX_NESTING = 19, 50
"""Most digits of a whole number in JSON, as many as 64 bits have, and most objects within each other."""
_LAST_SECONDS = datetime(9998, 12, 31, tzinfo=UTC).timestamp()
"""Times beyond it are none in some time zone."""


class RunScore(NamedTuple):
    """A score of an evaluation."""

    name: str
    """With the split: `validation/top1`."""
    value: float
    step: int


class RunRecord:
    """The record of the run in a folder, read when it is asked for, and then kept.

    Raises:
        WorkdirError: there is no such folder, it cannot be read, or it is none of a run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        """What could not be read, a sentence each."""
        is_run = is_there = False
        with suppress(OSError):
            is_there = path.is_dir() and os.access(path, os.R_OK | os.X_OK)
            is_run = is_there and stat.S_ISREG((path / RECIPE).lstat().st_mode)
        if not is_run:
            raise WorkdirError(
                f"{path} is not the folder of a run that can be read.",
                given=f"{path} ({'no plain file ' + RECIPE if is_there else 'not a folder that this user may read'})",
                expected=f"the workdir of a run, with its {RECIPE}",
                hint="name the --workdir of a run, such as runs/mnist; lockstep status FOLDER finds those below it",
            )

    @cached_property
    def recipe(self) -> Recipe | None:
        """The recipe as it ran last; None where it cannot be read."""
        try:
            with open_plain_file(self.path / RECIPE) as file:
                return from_toml(file.read(_MAX_FILE_BYTES).decode(), str(self.path / RECIPE))
        except (LockstepError, OSError, UnicodeError) as error:
            self._note(error.what if isinstance(error, LockstepError) else f"{RECIPE}: {error}")
            return None

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """The events of the run, each with "time", "event", "step": starts, resumes, rollbacks, losses, ends."""
        return [facts for facts in self._lines(HISTORY) if isinstance(facts.get("event"), str) and _is_step(facts)]

    @cached_property
    def timings(self) -> list[RunTiming]:
        """How fast it went; none for a run of an older version."""
        return [timing for facts in self._lines(TIMINGS) if (timing := _as_timing(facts))]

    @cached_property
    def last_timing(self) -> RunTiming | None:
        """The last line of the timings, read without the others."""
        return next((timing for facts in self._last_lines(TIMINGS) if (timing := _as_timing(facts))), None)

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of metrics.jsonl: of attempts with "position", of evaluations with "evaluation"."""
        return (facts for facts in self._lines(METRICS) if is_metrics_line(facts))

    @cached_property
    def last_attempt(self) -> dict[str, Any] | None:
        """The last line of an attempt in metrics.jsonl, near its end; None where there is none."""
        lines = (facts for facts in self._last_lines(METRICS) if is_metrics_line(facts))
        return next((facts for facts in lines if "position" in facts), None)

    @cached_property
    def scores(self) -> list[RunScore]:
        """All scores of evaluations in their order, those of the final weights last."""
        lines = filter(is_metrics_line, self._lines(METRICS, with_text=b'"evaluation"'))
        found = [
            RunScore(f"{line['evaluation']}/{name}", float(value), line["step"])
            for line in lines
            if "evaluation" in line
            for name, value in line["scores"].items()
        ]
        evaluations = self.result.get("evaluations") if self.result else None
        for split, facts in evaluations.items() if isinstance(evaluations, dict) else ():
            scores = facts.get("scores") if isinstance(facts, dict) else None
            for name, value in scores.items() if isinstance(scores, dict) else ():
                if (number := as_number(value)) is not None:
                    found.append(RunScore(f"{split}/{name}", number, int(self.result["step"])))
        return found

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations by `lockstep evaluate`, each with "step", "split", "weights" and "scores"."""
        lines = filter(_is_step, self._lines(EVALUATIONS))
        return [facts for facts in lines if isinstance(facts.get("scores"), dict)]

    @property
    def main_score(self) -> RunScore | None:
        """The best score by which the recipe keeps the best checkpoint; else the last main score of its task."""
        retention = self.recipe.checkpoints.retention if self.recipe else None
        if retention and retention.best:
            own = [score for score in self.scores if score.name == retention.best]
            best = {place: score.value for place, score in enumerate(own) if score.value == score.value}
            return own[retention.ranked(best)[0]] if best else None
        name = self.recipe.chosen_task.main_score if self.recipe else ""
        mains = [score for score in self.scores if score.name.partition("/")[2] == name]
        return next(reversed(mains or self.scores), None)

    @property
    def better(self) -> Literal["higher", "lower"]:
        """Whether the higher or the lower main score is the better one."""
        return self.recipe.checkpoints.retention.better if self.recipe else "higher"

    @cached_property
    def result(self) -> dict[str, Any]:
        """What the run came to, as in result.json; empty before its end."""
        found = self._json(RESULT)
        return found if _is_step(found) else {}

    @cached_property
    def choices(self) -> dict[str, Any]:
        """Threads, kernels, versions of its first start; empty where they are not there."""
        return self._json(CHOICES)

    @cached_property
    def data(self) -> dict[str, Any]:
        """The folder where it reads its data, and the names of its classes; empty where they are not there."""
        return self._json(DATA)

    @cached_property
    def saves(self) -> list[dict[str, Any]]:
        """The checkpoints that it has begun to save, each with "step"."""
        return [facts for facts in self._lines(SAVES) if _is_step(facts)]

    @cached_property
    def bad_examples(self) -> list[dict[str, str]]:
        """The examples that could not be read, each with "example" and "reason"."""
        lines = self._lines(QUARANTINE)
        return [{"example": str(facts.get("example")), "reason": str(facts.get("reason"))} for facts in lines]

    @cached_property
    def refused(self) -> list[dict[str, Any]]:
        """The autopsies of attempts that were not finite, each with "step", "position", "reasons", "culprits"."""
        found = [self._json(f"{name}/report.json") for name in self.folders("refused/position-*")]
        return [facts for facts in found if _is_step(facts)]

    @cached_property
    def checkpoints(self) -> list[int]:
        """The steps of the checkpoints that are there, ascending."""
        from lockstep.checkpoints.store import Store

        own = {self.path / name for name in self.folders(f"{CHECKPOINTS}/*")}
        store = Store(self.path / CHECKPOINTS)
        try:
            return [step for step in store.steps() if store.path(step) in own]
        except LockstepError as error:
            self._note(error.what)
            return []

    @cached_property
    def holder(self) -> Holder | None:
        """Who holds the run, or held it last."""
        try:
            return find_holder(self.path)
        except OSError as error:
            self._note(f"who holds the run cannot be read: {error.strerror}")
            return None

    @cached_property
    def state(self) -> RunState:
        """What the run is doing, or how its last start ended.

        "killed" is a start of which nothing is heard any more and that has not said why; "failed" one that has ended
        with an error.
        """
        if self.holder and self.holder.is_alive:
            return "running"
        last = self._last_event.get("event")
        ends: Mapping[str | None, RunState] = {None: "not started", "end": "finished", "stop": "stopped"}
        return ends.get(last) or ("failed" if last == "failed" or self._was_given_up else "killed")

    @property
    def _last_event(self) -> dict[str, Any]:
        """The last event that begins or ends something; empty where there is none."""
        return next((event for event in reversed(self.history) if event["event"] not in REMARKS), {})

    @property
    def _was_given_up(self) -> bool:
        return self.holder is not None and self.holder.owner.released

    @cached_property
    def error(self) -> str | None:
        """The error that has ended the last start; None where none is written down."""
        last = self._last_event
        return str(last["error"]) if last.get("event") == "failed" and "error" in last else None

    @property
    def remarks(self) -> list[str]:
        """What the history says of devices and data, and of slow workers."""
        return [str(event.get("said")) for event in self.history if event["event"] in REMARKS]

    def attention(self, num_refused: int = 0) -> Iterator[str]:
        """Yield what of the run is out of the ordinary, a sentence each, for `lockstep status` and reports alike.

        `num_refused` are the lines of its metrics that tell of an attempt that was not finite, where they were counted;
        its autopsies count anyway.
        """
        seen = self.seen_unix_seconds
        if self.state == "failed":
            yield f"failed: {self.error or 'no reason is written down'}"
        if self.state == "killed" and seen is not None:
            yield f"killed, or its host was lost: nothing is heard of it since {format_time(seen)}"
        if self.state in ("failed", "killed", "stopped"):
            yield f"to go on: lockstep train {shlex.quote(shown_path(self.path))}"
        events = Counter(event["event"] for event in self.history)
        for count, text in (
            (events["resume"], "it was started again {}"),
            (events["continue"], "workers were lost {}, and the others went on"),
            (events["rollback"], "it went back to a checkpoint {}, since an attempt was not finite"),
            (max(num_refused, len(self.refused)), "an attempt was not finite {}, and changed nothing: refused/"),
            (len(self.bad_examples), "an example could not be read, {}; others stood in: quarantine.jsonl"),
        ):
            if count:
                yield text.format("once" if count == 1 else f"{count:,} times")

    @property
    def step(self) -> int:
        """Completed updates, as far as is known."""
        lines = [self.last_attempt, *self.history[-1:], self.last_timing and self.last_timing._asdict()]
        if self.state == "finished" and self.result:
            return int(self.result["step"])
        return max((line["step"] for line in lines if line), default=0)

    @property
    def seen_unix_seconds(self) -> float | None:
        """When the run was last known to live or to end; None before its first start."""
        times = [event.get("time") for event in self.history[-1:]] + [self.last_timing and self.last_timing.time]
        known = [seconds for each in times if (seconds := as_unix_seconds(each)) is not None]
        if self.holder and not self.holder.owner.released:
            known.append(self.holder.renewed_unix_seconds)
        return max(known, default=None)

    def folders(self, pattern: str) -> list[str]:
        """Folders of the run that match a pattern such as `refused/*`, sorted; links are noted and left out."""
        found = sorted(path.relative_to(self.path) for path in self.path.glob(pattern) if path.is_dir())
        return [str(path) for path in found if self._links.isdisjoint(map(str, (path, *path.parents)))]

    @cached_property
    def _links(self) -> frozenset[str]:
        links = links_within(self.path)
        for link in links:
            self._note(f"{link} is a link to a folder, and left out")
        return frozenset(links)

    def _note(self, problem: str) -> None:
        if len(self.problems) < _MAX_PROBLEMS and problem not in self.problems:
            self.problems.append(problem)

    def _lines(self, name: str, *, with_text: bytes = b"") -> Iterator[dict[str, Any]]:
        """Yield the JSON objects of a file of lines; a line that is none is noted, but a last one that is torn."""
        try:
            with open_plain_file(self.path / name) as file:
                for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), start=1):
                    if with_text not in line:
                        continue
                    if (facts := json_object(line)) is not None:
                        yield facts
                    elif line.endswith(b"\n") or len(line) == _MAX_LINE_BYTES:
                        self._note(f"{name}, line {number} cannot be read, and is left out")
        except FileNotFoundError:
            return
        except OSError as error:
            self._note(f"{name} cannot be read: {error.strerror}")

    def _last_lines(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects of the last lines of a file, the last one first."""
        try:
            with open_plain_file(self.path / name) as file:
                start = max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES)
                file.seek(start)
                lines = file.read(_TAIL_BYTES).split(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:
            self._note(f"{name} cannot be read: {error.strerror}")
            return
        whole = lines[1:-1] if start else lines[:-1]
        yield from (facts for line in reversed(whole) if (facts := json_object(line)) is not None)

    def _json(self, name: str) -> dict[str, Any]:
        try:
            with open_plain_file(self.path / name) as file:
                found = json_object(file.read(_MAX_FILE_BYTES))
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._note(f"{name} cannot be read: {error.strerror}")
            return {}
        if found is None:
            self._note(f"{name} is no JSON object, and is left out")
        return found or {}


def find_runs(folder: Path) -> list[Path]:
    """Find the folders of runs: the folder itself, or those below it, four levels deep, sorted; links are not followed.

    Raises:
        WorkdirError: there is no such folder, or it cannot be read.
    """
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        raise WorkdirError(
            f"There is no folder {folder} that can be read.",
            given=str(folder),
            expected="the workdir of a run, or a folder with some in it",
            hint="name a folder such as runs",
        )
    found, depth = list[Path](), len(folder.parts)
    for path, names, files in os.walk(folder):
        here = Path(path)
        if RECIPE in files:
            found.append(here)
        if RECIPE in files or len(here.parts) - depth >= _MAX_DEPTH:
            names.clear()
        names[:] = [name for name in names if not name.startswith(".")]
    return sorted(found)


def links_within(folder: Path) -> list[str]:
    """Find what in a run's folder is a link to a whole folder, two levels deep, by name: it may lead anywhere."""
    found, names = list[str](), [""]
    for name in names:
        with suppress(OSError):  # what cannot be listed is not read either
            for entry in filter(os.DirEntry.is_dir, os.scandir(folder / name)):
                if entry.is_symlink():
                    found.append(f"{name}{entry.name}")
                elif not name:
                    names.append(f"{entry.name}/")
    return sorted(found)


def as_number(value: object) -> float | None:
    """Return a number of a file of JSON, in which those that are not finite are text; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number or value in ("nan", "inf", "-inf") else None  # type: ignore[arg-type]


def as_unix_seconds(text: object) -> float | None:
    """Return a time such as `2026-11-25T22:30:50+0000` in seconds since 1970; None for anything else."""
    try:
        seconds = datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (ValueError, OverflowError):
        return None
    return seconds if 0 <= seconds <= _LAST_SECONDS else None


def format_time(unix_seconds: float) -> str:
    """Format a moment in the time zone of this host: `2026-11-25 22:30:50`; `?` outside the years 1970 to 9998."""
    if not 0 <= unix_seconds <= _LAST_SECONDS:
        return "?"
    return datetime.fromtimestamp(unix_seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def seconds_since(unix_seconds: float) -> float:
    """Return the seconds that have passed since a moment, 0 for one that is still to come by this host's clock."""
    return max(0.0, time.time() - unix_seconds)


def open_plain_file(path: Path) -> BinaryIO:
    """Open a file of a run's folder to read its bytes.

    Others may have written there: a link could lead to a file of the user's own, and a pipe would be waited for.

    Raises:
        OSError: it cannot be opened, or is a link, pipe, device or folder.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return os.fdopen(descriptor, "rb")


def json_object(data: bytes) -> dict[str, Any] | None:
    """Read an object of JSON; None for anything else, and for one that is nested deeper than any of a run is."""
    try:
        facts = _DECODER.decode(data.decode())
    except (ValueError, RecursionError):
        return None
    is_flat = data.count(b"{") + data.count(b"[") <= _MAX_NESTING  # the usual case, which costs little
    return facts if isinstance(facts, dict) and (is_flat or _is_within(facts, _MAX_NESTING)) else None


def _is_within(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_within(each, depth - 1) for each in inner)


def _whole_number(text: str) -> int:
    if len(text.lstrip("-")) > _MAX_DIGITS:
        raise ValueError("a number of too many digits")
    return int(text)


_DECODER = json.JSONDecoder(parse_int=_whole_number)


def _is_step(facts: Mapping[str, Any]) -> bool:
    return isinstance(facts.get("step"), int)


def _as_timing(facts: Mapping[str, Any]) -> RunTiming | None:
    """Return the line of timings; None where a field is missing or of another kind."""

    def is_ours(name: str, value: Any) -> bool:
        if name == "time":
            return isinstance(value, str)
        if value is None:
            return name in ("last_step", "seconds_left")
        is_seconds = name in ("seconds", "wait_seconds", "seconds_left")
        return type(value) in ((int, float) if is_seconds else (int,)) and math.isfinite(value)

    values = {name: facts.get(name) for name in RunTiming._fields}
    return RunTiming(**values) if all(starmap(is_ours, values.items())) else None  # type: ignore[arg-type]
