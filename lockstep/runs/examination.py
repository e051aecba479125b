"""What a run has written down, checked against its chain without training: checkpoints, metrics, history, recipe.

Whatever does not fit is a problem, named in a line. What a kill, a lost disk or an older version explains is a note.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checkpoints.encoding import Tensors
from lockstep.checkpoints.manifest import MANIFEST, VALUES, Manifest
from lockstep.checkpoints.store import Digests, Store, digests_of
from lockstep.errors import LockstepError, WorkdirError
from lockstep.readers.fingerprint import checksum
from lockstep.recipes.recipe import Recipe, is_harmless, recipe_changes
from lockstep.recipes.toml import from_toml, load
from lockstep.reporting.chain import CHAIN, GROUND, ChainLine, read_chain
from lockstep.reporting.jsonl import read_lines
from lockstep.run_files import CHECKPOINTS, CHOICES, HISTORY, METRICS, RECIPE, RESULT
from lockstep.runs.lease import find_holder
from lockstep.runs.record import as_unix_seconds, links_within
from lockstep.runs.workdir import Workdir
from lockstep.training.choices import Choices, differences
from lockstep.training.replicas import digest
from lockstep.training.saving import check_values
from lockstep.types import ProgressFunction

_MOST_CHANGES = 3
_SCORE_TOLERANCE = 1e-3
_OF_CHAIN_ALONE = ("in_metrics", "link")
_ENDS = ("end", "stop")
"""Events after which nothing may be missing: they come when all lines are on the disk."""


class ChainDigests(NamedTuple):
    """The digests in a line of the chain."""

    by_section: Digests
    of_files: bool = True
    """A digest covers its section's file up to the end of the tensor; else, by an older version, its elements alone."""

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> ChainDigests:
        """Return those of a line."""
        return cls(facts["digests"], facts.get("of") == "files")

    def unlike(self, tensors: Tensors) -> list[str]:
        """Return the tensors that are not these: `parameters 'conv.weight'`; of a file the first one alone."""
        if self.of_files:
            given = digests_of(tensors)
        else:
            given = {section: {name: digest(t) for name, t in members.items()} for section, members in tensors.items()}
        unlike: list[str] = []
        for section, wanted in self.by_section.items():
            found = given.get(section, {})
            names = [name for name in dict.fromkeys([*wanted, *found]) if wanted.get(name) != found.get(name)]
            unlike += [f"{section} {name!r}" for name in names[: 1 if self.of_files else None]]
        return unlike


@dataclass
class Examination:
    """What was found in the folder of a run."""

    path: Path
    problems: list[str] = field(default_factory=list)
    """What does not fit, a line each."""
    notes: list[str] = field(default_factory=list)
    """What is incomplete, but not by anybody's change."""
    checked: dict[str, str] = field(default_factory=dict)
    """How much there is of what was checked, by file."""
    head: str = ""
    """The last link."""
    num_lines: int = 0
    first_step: int = 0
    """Updates completed before the first line of the chain."""
    last_step: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    """With all that is as in the event before."""
    made_with: Recipe | None = None
    """The recipe of the last start; None where the chain has none that can be read."""
    digests: dict[int, dict[int, ChainDigests]] = field(default_factory=dict)
    """Digests in the chain, by step and position."""
    values: dict[tuple[int, int], str] = field(default_factory=dict)
    """SHA-256 of the `values.json` of checkpoints, by step and position."""
    logged: list[dict[str, Any]] = field(default_factory=list)
    """The lines that `metrics.jsonl` should have."""
    lost: list[range] = field(default_factory=list)
    """Steps of which the chain has no lines, by its own account."""
    result: dict[str, Any] = field(default_factory=dict)
    """The last one; empty where the run has not ended."""

    @property
    def recipe(self) -> str:
        """The recipe that the run was last made with, as TOML."""
        return str(self.events[-1].get("recipe", ""))


def examine(path: Path, progress: ProgressFunction) -> Examination:
    """Check all files of a run against its chain; `progress` is told of the checkpoints that are done.

    Raises:
        WorkdirError: there is no chain, or nothing in it: an older version has made the run, or it has yet to begin;
            or a link in the folder leads to another one.
    """
    # The chain has each line first, and the history each event: so they fit while the run goes on, too.
    manifests, metrics = _read_manifests(Store(path / CHECKPOINTS)), _read_metrics(path / METRICS)
    found = walk(path)
    history = list(_whole_lines(path / HISTORY))
    _check_metrics(found, *metrics, history, saved_step=max(manifests, default=0))
    _check_history(found, history)
    _check_checkpoints(found, manifests, history, progress)
    _check_start_files(found, history)
    _check_result(found)
    return found


def walk(folder: Path) -> Examination:
    """Check that each line of a chain follows from the one before; all other files are left aside.

    Raises:
        WorkdirError: as in `examine`.
    """
    found, path = Examination(folder), folder / CHAIN
    if links := links_within(folder):
        raise WorkdirError(
            f"The run in {folder} has links to folders elsewhere, which are not followed.",
            given=", ".join(links),
            expected="a run whose files all lie in its folder",
            hint="put the folders in the places of the links, or verify a copy that has them",
        )
    if not path.is_file():
        raise WorkdirError(
            f"The run in {found.path} has no chain, so it cannot be verified.",
            given=f"no {path}",
            expected="what every run keeps since Lockstep has `lockstep verify`; older versions wrote none",
            hint="a run that goes on has one from there on",
        )
    num_updates, position = 0, -1
    for line in read_chain(path):
        found.num_lines, found.head = line.number, line.link
        facts = line.facts
        if not line.fits:
            found.problems.append(_unfit(line))
        if not facts:
            continue
        if "event" in facts:
            position = facts.get("from_position", position)
            if not found.events:
                found.first_step = found.last_step = facts["step"]
        if "position" in facts:
            _check_order(found, line, position)
            num_updates += not facts["refused"]
            position, found.last_step = facts["position"], facts["step"]
        _keep(found, facts, position)
    if not found.events:
        raise WorkdirError(
            f"The chain of the run in {found.path} has no beginning yet.",
            given=f"{path} without an event",
            expected="the line of a start, and those of updates",
            hint="train the run first",
        )
    found.checked["chain"] = f"{num_updates:,} updates in {found.num_lines:,} lines, the last link is {found.head}"
    return found


def _unfit(line: ChainLine) -> str:
    what = _called(line.facts) if line.facts else "which is none of a chain"
    return (
        f"{CHAIN}, line {line.number} ({what}): its link does not follow from it and the line before: it was changed, "
        "or lines before it were taken out or put in"
    )


def _check_order(found: Examination, line: ChainLine, position: int) -> None:
    """Check that an attempt makes the step after the one before, or none where it is refused."""
    facts = line.facts
    wanted = found.last_step + (not facts["refused"])
    if facts["step"] != wanted and found.events:
        found.problems.append(
            f"{CHAIN}, line {line.number}: step {facts['step']}, where step {wanted} would follow: "
            f"{'updates are missing' if facts['step'] > wanted else 'updates stand there twice'}"
        )
    elif facts["position"] < position:
        found.problems.append(f"{CHAIN}, line {line.number} ({_called(facts)}): it is at a place before the last one")


def _keep(found: Examination, facts: dict[str, Any], position: int) -> None:
    if facts.get("in_metrics") or "evaluation" in facts:  # of an attempt or an evaluation, not both
        found.logged.append({name: value for name, value in facts.items() if name not in _OF_CHAIN_ALONE})
    elif "digests" in facts:
        at = facts["step"], facts.get("at", position)
        if "values" in facts:
            found.values[at] = str(facts["values"])
        if "values" in facts or at not in found.values:  # a save has all sections, others those of the state alone
            found.digests.setdefault(at[0], {})[at[1]] = ChainDigests.of(facts)
    elif "event" in facts:
        found.events.append(facts)
        if lacking := GROUND.keys() - facts.keys():
            found.problems.append(f"{CHAIN}: the line of {_called(facts)} lacks {', '.join(sorted(lacking))}")
        if facts["step"] > found.last_step:
            found.notes.append(f"{CHAIN} lacks the updates {found.last_step + 1} to {facts['step']}: they were lost")
            found.lost.append(range(found.last_step + 1, facts["step"] + 1))
        found.last_step = facts["step"]
    elif "result" in facts:
        found.result = facts["result"]


def _called(facts: Mapping[str, Any]) -> str:
    what = next((f"{kind} {facts[kind]!r}, " for kind in ("event", "evaluation") if kind in facts), "")
    return f"{'digests, ' if 'digests' in facts else what}step {facts['step']}"


def _read_metrics(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Read the lines of metrics.jsonl, up to the first that is none, and say what is wrong with that one."""
    lines: list[dict[str, Any]] = []
    try:
        lines.extend(read_lines(path) if path.is_file() else ())
    except WorkdirError as error:
        return lines, error.what
    return lines, ""


def _check_metrics(
    found: Examination, lines: Sequence[dict[str, Any]], wrong: str, history: Sequence[str], *, saved_step: int
) -> None:
    """Compare each line of metrics.jsonl with its line in the chain, and look for those that are missing."""
    places = defaultdict[tuple[Any, ...], list[int]](list)
    for index, facts in enumerate(found.logged):
        places[_place(facts)].append(index)
    next_index, missing, is_ended = 0, list[int](), found.events[-1]["event"] in _ENDS
    for number, facts in enumerate(lines, start=1):
        there = places.get(_place(facts), [])
        if next_index == 0 and not there and _is_before(facts, found.events[0]):
            continue
        found_at = next((index for index in there if index >= next_index), None)
        if found_at is None:
            is_last = not is_ended and facts["step"] >= found.last_step
            is_lost = not there and (is_last or any(facts["step"] in steps for steps in found.lost))
            text = f"{METRICS}, line {number} ({_called(facts)}): the chain has no such line"
            (found.notes if is_lost else found.problems).append(text)
            continue
        missing += range(next_index, found_at)
        next_index = found_at + 1
        if facts != found.logged[found_at]:
            text = told_differences(found.logged[found_at], facts)
            found.problems.append(f"{METRICS}, line {number} ({_called(facts)}): {text}")
    found.checked[METRICS] = f"{len(lines):,} lines"
    if wrong:
        found.problems.append(wrong)
        return
    last = range(next_index, len(found.logged))
    if is_ended or not _may_be_cut_off(found, last, saved_step):
        missing += last
    elif len(last) > 1:
        found.notes.append(f"{METRICS} lacks the last {len(last)} lines: they were lost with the host, or yet come")
    if not missing:
        return
    first = f"{METRICS} lacks the line of {_called(found.logged[missing[0]])}"
    text = first + (f", and {len(missing) - 1} more" if len(missing) > 1 else "")
    lost = sum(_fact(line, "lost_metrics_lines") for line in _of_chain(found, history))
    (found.notes if len(missing) <= lost else found.problems).append(text)


def _may_be_cut_off(found: Examination, last: range, saved_step: int) -> bool:
    """Whether the last lines may yet come, as the run goes on; or were lost with a host, since it last saved."""
    if len(last) <= 1 or found.logged[last[0]]["step"] > saved_step:
        return True
    try:
        Workdir(found.path).check_free()
    except WorkdirError:
        return True
    return False


def _place(facts: Mapping[str, Any]) -> tuple[Any, ...]:
    return facts["step"], facts["position"] if "position" in facts else facts["evaluation"]


def _of_chain(found: Examination, history: Sequence[str]) -> list[str]:
    """The lines of the history that the chain vouches for."""
    known = {event.get("history") for event in found.events}
    return [line for line in history if checksum(line.encode()) in known]


def _is_before(facts: Mapping[str, Any], beginning: Mapping[str, Any]) -> bool:
    """Whether a line is older than the chain, as an older version of Lockstep has begun the run."""
    start = beginning.get("from_position", 0) if beginning["event"] != "start" else 0
    return bool(
        start > 0 and (facts["position"] <= start if "position" in facts else facts["step"] <= beginning["step"])
    )


def told_differences(wanted: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Tell in which facts a line differs from that of the chain, three at most."""
    different = [f"{name} is {now!r}, and in the chain {chained!r}" for name, chained, now in differing(wanted, given)]
    more = len(different) - _MOST_CHANGES
    return "; ".join(different[:_MOST_CHANGES]) + (f"; and {more} more" if more > 0 else "")


def differing(wanted: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the facts in which two lines differ: name, wanted and given value; None where one has none."""
    for name in dict.fromkeys([*wanted, *given]):
        before, now = wanted.get(name), given.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from ((f"{name}.{inner}", *values) for inner, *values in differing(before, now))
        elif before != now:
            yield name, before, now


def _check_history(found: Examination, history: Sequence[str]) -> None:
    """Check that the history has the very line of each event of the chain."""
    there = {checksum(line.encode()) for line in history}
    for event in found.events:
        if event.get("history") not in there:
            found.problems.append(f"{HISTORY}: the line of {_called(event)} was changed or taken out")
    found.checked[HISTORY] = f"{len(found.events):,} events of {len(history):,}"


def _read_manifests(store: Store) -> dict[int, Manifest | None]:
    """Read the manifest of each checkpoint, by its step; None for a damaged one."""
    manifests: dict[int, Manifest | None] = {}
    for step in store.steps():
        manifests[step] = None
        with suppress(LockstepError):
            manifests[step] = Manifest.read(store.path(step))
    return manifests


def _check_checkpoints(
    found: Examination, manifests: Mapping[int, Manifest | None], history: Sequence[str], progress: ProgressFunction
) -> None:
    """Read each checkpoint, verified by its manifest, and compare its tensors with the digests in the chain."""
    store = Store(found.path / CHECKPOINTS)
    left = max((_fact(line, "from_step") for line in _of_chain(found, history)), default=0)
    steps = [*manifests]
    for count, (step, manifest) in enumerate(manifests.items()):
        progress(count, len(steps))
        try:
            checkpoint = store.read(step, check_values)
        except LockstepError as error:
            if store.path(step).exists():  # else the run that goes on has just deleted it
                found.problems.append(f"checkpoint of step {step}: {error.what} Found: {error.given}")
            continue
        assert checkpoint is not None, "a step was asked for"
        by_position = found.digests.get(step, {})
        position = checkpoint.values["loader"]["position"]
        if not by_position:
            if step < found.first_step:
                found.notes.append(f"checkpoint of step {step}: it is older than the chain")
            elif step <= left:
                found.notes.append(f"checkpoint of step {step}: the run has gone back from it")
            else:
                found.problems.append(
                    f"checkpoint of step {step}: the chain has no digests of it: it was cut off before"
                )
            continue
        wanted = by_position.get(position)
        if wanted and (step, position) in found.values:  # of a save, and so of all that it holds
            wanted = wanted._replace(by_section={**{name: {} for name in checkpoint.tensors}, **wanted.by_section})
        if wanted is None:
            found.problems.append(f"checkpoint of step {step}: it is at position {position}, in the chain at another")
        elif different := wanted.unlike(checkpoint.tensors):
            found.problems.append(f"checkpoint of step {step}: {named_in_short(different)} not as in the chain")
        if manifest:
            _check_manifest(found, manifest, position)
    found.checked["checkpoints"] = f"{len(steps):,}, of step {', '.join(map(str, steps[-8:])) or 'none'}"


def _check_manifest(found: Examination, manifest: Manifest, position: int) -> None:
    """Compare the values of a checkpoint, by their hash, and the scores in its manifest."""
    step, values = manifest.step, next(file for file in manifest.files if file.name == VALUES)
    if found.values.get((step, position), values.sha256) != values.sha256:
        found.problems.append(f"checkpoint of step {step}: {VALUES} is not as in the chain")
    for name, score in manifest.scores.items() if step > found.first_step else ():
        split, _, short = name.partition("/")
        chained = [line["scores"].get(short) for line in found.logged if _place(line) == (step, split)]
        # An evaluation that other workers make again may differ by a bit, and the first one stands in the chain.
        if not any(
            isinstance(each, int | float) and math.isclose(each, score, rel_tol=_SCORE_TOLERANCE) for each in chained
        ):
            found.problems.append(
                f"checkpoint of step {step}: the score {name} in {MANIFEST} is {score!r}, and in the chain "
                f"{chained[0] if chained else 'there is none'}"
            )


def named_in_short(tensors: Sequence[str]) -> str:
    """Name the first of some tensors, and how many more there are, before a "not ..."."""
    return tensors[0] + (f" and {len(tensors) - 1} more are" if len(tensors) > 1 else " is")


def _check_start_files(found: Examination, history: Sequence[str]) -> None:
    """Compare recipe.toml with the recipe that the last start was made with, and choices.json with the first one's.

    A start that has failed, or was killed, before its event has written them too: then a difference is a note.
    """
    begin = next((facts for line in history if (facts := _event(line, found.events[0]))), {})
    last = next((number for number, line in enumerate(history) if _event(line, found.events[-1])), len(history))
    failures = sum('"event": "failed"' in line for line in history[last + 1 :])
    is_of_another = failures > (found.events[-1]["event"] not in _ENDS)  # its own start may have failed once
    event = _event(history[last], found.events[-1]) if last < len(history) else {}
    told = found.notes if is_of_another or _is_begun_since(found.path, event) else found.problems
    _check_recipe(found, told)
    _check_choices(found, begin, told)


def _event(line: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of the line of an event in the history; none where it is the line of another one."""
    facts = json.loads(line) if checksum(line.encode()) == event.get("history") else {}
    return facts if isinstance(facts, dict) else {}


def _is_begun_since(path: Path, event: Mapping[str, Any]) -> bool:
    """Whether another process has taken the run after an event."""
    try:
        holder = find_holder(path)
    except OSError:
        return False
    if holder is None:
        return False
    owner, then = holder.owner, as_unix_seconds(event.get("time"))
    is_other = (owner.host, owner.pid) != (event.get("host"), event.get("pid"))
    return is_other or (then is not None and owner.since_unix_seconds > then)


def _check_recipe(found: Examination, told: list[str]) -> None:
    try:
        found.made_with = made_with = from_toml(found.recipe, f"the recipe in {CHAIN}")
        given = load(found.path / RECIPE)
    except LockstepError as error:
        found.problems.append(f"{RECIPE}: {error.what} Found: {error.given}")
        return
    for change in recipe_changes(made_with, given):
        text = f"{RECIPE}: {change.path} is {change.given!r}, and the run was made with {change.saved!r}"
        (found.notes if is_harmless(change) else told).append(text)
    found.checked[RECIPE] = f"as at {_called(found.events[-1])}"


def _check_choices(found: Examination, begin: Mapping[str, Any], told: list[str]) -> None:
    """Check that choices.json holds those of a start of the run, or those from which the first one says it differs."""
    try:
        saved = Workdir(found.path).saved_choices()
    except LockstepError as error:
        found.problems.append(f"{CHOICES}: {error.what} Found: {error.given}")
        return
    of_starts = [event["choices"] for event in found.events if "choices" in event]
    if saved is None or not of_starts or found.events[0]["event"] != "start":
        found.notes.append(f"{CHOICES} is not compared: {'it is not there' if saved is None else 'it is older'}")
    elif saved in of_starts or _is_said(saved, of_starts[0], begin.get("changed")):
        found.checked[CHOICES] = "as at the start"
    else:
        told.append(f"{CHOICES}: {told_differences(of_starts[0], saved)}")


def _is_said(saved: dict[str, Any], chosen: dict[str, Any], changed: object) -> bool:
    """Whether a start has said how its choices differ from those that were saved before it."""
    try:
        lines = differences(Choices.read(saved), Choices.read(chosen))
    except ValueError:
        return False
    return isinstance(changed, list) and bool(lines) and all(line in changed for line in lines)


def _check_result(found: Examination) -> None:
    """Check that a run with a result has a chain that leads to its end, and to this result."""
    if not (found.path / RESULT).is_file():
        return
    last = found.events[-1]
    try:
        result = json.loads((found.path / RESULT).read_bytes())
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, dict):
        found.problems.append(f"{RESULT} cannot be read")
        return
    result.pop("times", None)
    if last["event"] != "end" or last["step"] != result.get("step"):
        found.problems.append(
            f"{RESULT} is of step {result.get('step')}, and the chain has no end there: its last is {_called(last)}"
        )
    elif not found.result:
        found.problems.append(f"{RESULT} has a result, and the chain has none: its last line was cut off")
    elif result != found.result:
        found.problems.append(f"{RESULT}: {told_differences(found.result, result)}")
    else:
        found.checked[RESULT] = "as in the chain"


def _whole_lines(path: Path) -> Iterator[str]:
    if path.is_file():
        yield from path.read_bytes().decode(errors="replace").split("\n")[:-1]


def _fact(line: str, name: str) -> int:
    """A whole number in a line of the history; 0 where it has none."""
    try:
        value = json.loads(line)[name]
    except (ValueError, RecursionError, TypeError, KeyError):
        return 0
    return value if type(value) is int else 0
