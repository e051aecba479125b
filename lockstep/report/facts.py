"""What a report tells about a run, put together from its record."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lockstep.checkpoints.manifest import VALUES, Manifest
from lockstep.checkpoints.retention import Retention
from lockstep.checkpoints.store import Store
from lockstep.description import Change, changes, described, shown_description
from lockstep.errors import LockstepError
from lockstep.recipes.code import functions_of
from lockstep.recipes.recipe import Recipe, recipe_changes
from lockstep.recipes.shipped import find, names
from lockstep.report.curves import BY_CLASS
from lockstep.run_files import CHECKPOINTS, RECIPE, WARM_START, step_name
from lockstep.runs.record import RunRecord, as_number, as_unix_seconds, format_time, json_object, open_plain_file

_BEGINS = ("start", "resume", "stage", "rollback", "continue", "join")
_ENDS = ("end", "stop", "failed")
_MOST_BYTES = 1 << 26
_MOST_WAITING = 0.1


@dataclass(frozen=True)
class Overview:
    """A run at a glance; None is what is not known."""

    recipe: str | None
    state: str
    step: int
    last_step: int | None
    epochs: float | None
    started: str | None
    seen: str | None
    """When it was last known to live, or ended."""
    seconds: float | None
    """Sum of the durations of its segments, as far as they are known."""
    workers: int | None
    loss: float | None
    """The smoothed total of the last line of metrics, else the total."""
    score: dict[str, Any] | None
    """The best by which the recipe keeps the best checkpoint, else the last: "name", "value", "step"."""
    examples_per_second: float | None
    wait_share: float | None
    """Share of the time in which the chief waited for data, 0 to 1."""


@dataclass(frozen=True)
class SegmentFacts:
    """A part of a run between two of its events."""

    event: str
    """What it began with: start, resume, rollback, stage; continue after workers were lost, join where others came."""
    began: str
    first_step: int
    last_step: int | None
    """Where it ended; None where that is not known."""
    seconds: float | None
    """None where the files do not tell when it ended, as of a run that was killed."""
    workers: int | None
    host: str
    ended: str
    """"end", "stop" or "failed", "killed" where it has not said why; the event of the next segment; "" at work."""
    notes: tuple[str, ...]
    """Workers lost and how long that took, what had changed, what was skipped."""


@dataclass(frozen=True)
class CourseFacts:
    """What happened to a run."""

    segments: tuple[SegmentFacts, ...]
    num_refused: int
    """Attempts that were not finite."""
    refused: tuple[dict[str, Any], ...]
    """Their autopsies, as far as they are kept: "step", "position", "reasons", "culprits", "examples"."""
    bad_examples: tuple[dict[str, str], ...]
    arrivals: dict[str, Any]
    """With backup workers or asynchronous updates: gradients "used", "dropped" by worker, and their "staleness"."""

    @property
    def by_worker(self) -> list[tuple[str, Any, Any]]:
        """The gradients of each worker that were used and dropped."""
        used, dropped = part(self.arrivals, "used"), part(self.arrivals, "dropped")
        return [(f"worker {each}", used.get(each, 0), dropped.get(each, 0)) for each in sorted({*used, *dropped})]

    def count(self, event: str) -> int:
        """Count the segments that begin with an event."""
        return sum(segment.event == event for segment in self.segments)


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint that is there."""

    step: int
    saved: str | None
    num_bytes: int | None
    scores: Mapping[str, float]
    is_best: bool
    problem: str = ""
    """Why it cannot be read."""


@dataclass(frozen=True)
class ScoreFacts:
    """The last value of a score of one origin."""

    name: str
    value: float
    step: int
    origin: str
    """When, or by whom, which weights were scored: "in mid-run", "after the end, raw weights"."""

    @property
    def share(self) -> float:
        """The value as the length of a bar, 0 to 1."""
        return min(max(self.value, 0.0), 1.0) if math.isfinite(self.value) else 0.0


@dataclass(frozen=True)
class FieldValues:
    """A field in which recipes differ, with its value in each of them."""

    field: str
    values: tuple[str, ...]

    @property
    def row(self) -> tuple[str, ...]:
        """The field and its values, for a table."""
        return self.field, *self.values


@dataclass(frozen=True)
class RecipeFacts:
    """The recipe of a run."""

    text: str
    shipped: str | None
    """Name of the shipped recipe that it is compared with; None if it has none."""
    changes: tuple[FieldValues, ...]
    """Fields that differ: the value of the shipped recipe, and that of the run."""


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run."""

    name: str
    path: str
    overview: Overview
    attention: tuple[str, ...]
    """What a person should look at, a sentence each."""
    course: CourseFacts
    checkpoints: tuple[CheckpointFacts, ...]
    scores: tuple[ScoreFacts, ...]
    """But for those of single classes."""
    class_scores: tuple[ScoreFacts, ...]
    recipe: RecipeFacts
    environment: dict[str, str]
    data: dict[str, str]
    """Fingerprints of the training data, as the newest checkpoint has them."""
    code: dict[str, str]
    """Fingerprints of the user's own functions that the recipe names."""
    warm_start: dict[str, Any]
    """Where its first weights came from: "origin", "share", "counts"."""
    problems: tuple[str, ...]
    """What could not be read."""

    def as_json(self) -> dict[str, Any]:
        """Return the facts as JSON."""
        return asdict(self)


def facts_of_run(record: RunRecord, name: str, num_refused: int) -> RunFacts:
    """Put the facts of a run together, under the name that the report has for it.

    `num_refused` are the lines of its metrics that tell of an attempt that was not finite.
    """
    values = _json_of(record.path / CHECKPOINTS / step_name(max(record.checkpoints, default=0)) / VALUES)
    course = CourseFacts(
        segments=tuple(_segments(record)),
        num_refused=max(num_refused, len(record.refused)),
        refused=tuple(record.refused),
        bad_examples=tuple(record.bad_examples),
        arrivals=part(record.last_attempt or {}, "arrivals"),
    )
    scores = _scores(record)
    overview = _overview(record, course, values)
    return RunFacts(
        name=name,
        path=str(record.path),
        overview=overview,
        course=course,
        checkpoints=tuple(_checkpoints(record)),
        scores=tuple(score for score in scores if BY_CLASS not in score.name),
        class_scores=tuple(score for score in scores if BY_CLASS in score.name),
        recipe=_recipe(record),
        environment={
            name.replace("_", " "): in_words(value) for name, value in record.choices.items() if value not in ({}, None)
        },
        data=_fingerprints(values),
        code={each.full_name: each.source or "not known" for each in functions_of(record.recipe)},
        warm_start=_warm_start(record.path),
        # Last: only then is known what could not be read.
        attention=tuple(_attention(record, overview, course)),
        problems=tuple(record.problems),
    )


def recipe_differences(recipes: Sequence[Recipe | None]) -> list[FieldValues]:
    """Compare the recipes of several runs: the fields in which one of them differs from the first that can be read."""
    described_all = [None if recipe is None else described(recipe) for recipe in recipes]
    first = next((each for each in described_all if each is not None), None)
    found = [{change.path: change for change in changes("", first, each)} if each else None for each in described_all]
    before = {path: change.saved for each in found if each for path, change in each.items()}

    def value(path: str, changed: Mapping[str, Change] | None) -> str:
        if changed is None:
            return "not readable"
        return shown_description(changed[path].given if path in changed else before[path])

    return [FieldValues(path, tuple(value(path, each) for each in found)) for path in before]


def _overview(record: RunRecord, course: CourseFacts, values: Mapping[str, Any]) -> Overview:
    attempt, segments, result = record.last_attempt or {}, course.segments, record.result
    seen, timing, loader = record.seen_unix_seconds, record.last_timing, part(values, "loader")
    loss = as_number(part(attempt, "smoothed").get("total"))
    known = [segment.seconds for segment in segments if segment.seconds is not None]
    seconds, waited = (sum(getattr(each, name) for each in record.timings) for name in ("seconds", "wait_seconds"))
    examples = sum(each.num_examples for each in record.timings)
    epoch_size, position = as_number(loader.get("epoch_size")), as_number(attempt.get("position"))
    epochs = position / epoch_size if position is not None and epoch_size else None
    return Overview(
        recipe=record.recipe.name if record.recipe else None,
        state=record.state,
        step=record.step,
        last_step=timing.last_step if timing else None,
        epochs=as_number(result.get("epochs")) or epochs,
        started=segments[0].began if segments else None,
        seen=None if seen is None else format_time(seen),
        seconds=sum(known) if known else None,
        workers=segments[-1].workers if segments else None,
        loss=as_number(attempt.get("total")) if loss is None else loss,
        score=record.main_score and record.main_score._asdict(),
        examples_per_second=examples / seconds
        if seconds
        else as_number(part(result, "times").get("examples_per_second")),
        wait_share=waited / seconds if seconds else None,
    )


def _segments(record: RunRecord) -> Iterator[SegmentFacts]:
    """Yield the parts of a run between its events; one that was killed has said nothing of its end."""
    events = [event for event in record.history if event["event"] in (*_BEGINS, *_ENDS)]
    for event, following in pairwise([*events, {}]):
        if event["event"] in _ENDS:
            continue
        began, ended = as_unix_seconds(event.get("time")), as_unix_seconds(following.get("time"))
        next_event = following.get("event", "" if record.state == "running" else record.state)
        was_killed = next_event in ("start", "resume", "killed")
        last_step = following.get("step")
        if isinstance(following.get("from_step"), int):  # a rollback, whose "step" is the one that it goes back to
            last_step = following["from_step"]
        if was_killed or not following:
            alive = [timing for timing in record.timings if _is_within(timing.time, began, ended)]
            ended = as_unix_seconds(alive[-1].time) if alive else None
            last_step = alive[-1].step if alive else record.step if not following else None
        yield SegmentFacts(
            event=event["event"],
            began=format_time(began) if began is not None else "",
            first_step=event["step"],
            last_step=last_step,
            seconds=None if began is None or ended is None else max(0.0, ended - began),
            workers=event.get("workers") if isinstance(event.get("workers"), int) else None,
            host=str(event.get("host", "")),
            ended="killed" if was_killed else next_event,
            notes=tuple(_notes(event, following)),
        )


def _is_within(time: str, began: float | None, ended: float | None) -> bool:
    at = as_unix_seconds(time)
    return at is not None and began is not None and began <= at and (ended is None or at <= ended)


def _notes(event: Mapping[str, Any], following: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the history says of an event, and why a start has failed."""
    said = {
        "lost": "lost: {}",
        "from": "went on from {}",
        "why": "not finite: {}",
        "changed": "changed: {}",
        "data_changed": "other data: {}",
        "forked_from": "a fork of {}",
        "taken_over_from": "taken over from {}",
        "lost_metrics_lines": "{} lines of metrics were lost",
        "stage": "stage {}",
        "from_step": "back from step {}",
    }
    for name, text in said.items():
        if value := event.get(name):
            yield text.format(in_words(value))
    if (seconds := as_number(event.get("seconds"))) is not None:
        yield f"back at work after {seconds:.1f} s"
    if following.get("event") == "failed":
        yield f"failed: {in_words(following.get('error', 'no reason is written down'))}"


def _attention(record: RunRecord, overview: Overview, course: CourseFacts) -> Iterator[str]:
    """Say what of a run is out of the ordinary."""
    yield from record.attention(course.num_refused)
    if dropped := sum(each for each in part(course.arrivals, "dropped").values() if isinstance(each, int)):
        times = "once" if dropped == 1 else f"{dropped:,} times"
        yield f"a gradient came too late {times}, and was dropped; its examples were handed out again"
    if overview.wait_share is not None and overview.wait_share > _MOST_WAITING:
        yield f"it waited for data {overview.wait_share:.0%} of the time: lockstep benchmark input says what limits it"
    yield from record.remarks
    yield from record.problems


def _checkpoints(record: RunRecord) -> Iterator[CheckpointFacts]:
    retention = record.recipe.checkpoints.retention if record.recipe else Retention()
    store = Store(record.path / CHECKPOINTS, retention)
    try:
        best = store.best()
    except LockstepError:
        best = None
    for step in record.checkpoints:
        try:
            manifest = Manifest.read(store.path(step))
        except LockstepError as error:
            yield CheckpointFacts(step, None, None, {}, False, error.what)
            continue
        num_bytes = sum(file.size_bytes for file in manifest.files)
        yield CheckpointFacts(
            step, format_time(manifest.saved_unix_seconds), num_bytes, dict(manifest.scores), step == best
        )


def _scores(record: RunRecord) -> list[ScoreFacts]:
    """Return the last value of each score of each origin: in mid-run, of the final weights, by `lockstep evaluate`."""
    evaluations = part(record.result, "evaluations")
    weights = {split: part(evaluations, split).get("weights") for split in evaluations}
    found: dict[tuple[str, str], ScoreFacts] = {}
    for name, value, step in record.scores:
        split = name.partition("/")[0]
        origin = f"after the end, {weights[split]} weights" if split in weights else "in mid-run"
        found[name, origin] = ScoreFacts(name, value, step, origin)
    for line in record.evaluations:
        told = {"{} weights": line.get("weights"), "{} examples": line.get("num_examples"), "{}": line.get("data")}
        known = (text.format(value) for text, value in told.items() if value is not None)
        origin = ", ".join(["lockstep evaluate", *known])
        for name, each in line["scores"].items():
            if (number := as_number(each)) is not None:
                score = ScoreFacts(f"{line.get('split')}/{name}", number, line["step"], origin)
                found[score.name, origin] = score
    return [*found.values()]


def _recipe(record: RunRecord) -> RecipeFacts:
    text = _bytes_of(record.path / RECIPE).decode(errors="replace")
    recipe = record.recipe
    if recipe is None or recipe.name not in names():
        return RecipeFacts(text, None, ())
    changed = [
        FieldValues(change.path, (shown_description(change.given), shown_description(change.saved)))
        for change in recipe_changes(recipe, find(recipe.name))
    ]
    return RecipeFacts(text, recipe.name, tuple(changed))


def _fingerprints(values: Mapping[str, Any]) -> dict[str, str]:
    """Return what a checkpoint says of the training data: fingerprints of files, the seed, the number of examples."""
    loader = part(values, "loader")
    facts = {name.replace("_", " "): loader[name] for name in ("num_examples", "seed") if name in loader}
    return {name: in_words(value) for name, value in (facts | part(loader, "data")).items()}


def _warm_start(path: Path) -> dict[str, Any]:
    found = _json_of(path / WARM_START)
    return {name: found[name] for name in ("origin", "share", "counts") if name in found}


def part(facts: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the object that facts hold by a name; an empty one where they hold none."""
    found = facts.get(name)
    return found if isinstance(found, dict) else {}


def in_words(value: Any) -> str:
    """Say a value of JSON in words."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {in_words(each)}" for name, each in value.items())
    return "; ".join(map(in_words, value)) if isinstance(value, list) else str(value)


def _json_of(path: Path) -> dict[str, Any]:
    return json_object(_bytes_of(path)) or {}


def _bytes_of(path: Path) -> bytes:
    try:
        with open_plain_file(path) as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return b""
