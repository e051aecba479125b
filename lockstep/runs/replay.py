"""A window of a run, made again from the checkpoint before it and compared with the chain, update by update.

Nothing is written. All workers make the same updates and get the same reports, so all of them end at the same update;
the chief alone compares tensors.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.checkpoints.store import Store
from lockstep.errors import CheckpointError, InputError
from lockstep.exchange.exchange import is_exact
from lockstep.recipes.code import functions_of
from lockstep.recipes.recipe import Recipe, is_harmless, recipe_changes
from lockstep.recipes.toml import from_toml
from lockstep.reporting.chain import CHAIN, as_read, attempt_facts, read_chain
from lockstep.runs.examination import ChainDigests, Examination, named_in_short, told_differences
from lockstep.runs.segment import data_digest, how_summed
from lockstep.runs.stages import Stages
from lockstep.runs.start import resolve_choices
from lockstep.training.choices import Choices, differences
from lockstep.training.loop import steps_without_survival
from lockstep.training.saving import read_checkpoint, store_of
from lockstep.types import NonFiniteError, ProgressFunction, StepReport, Steps
from lockstep.workers.rank import Worker

_EXACT = ("step", "position", "refused", "learning_rate", "learning_rates", "bad_examples")
"""Facts that no machine changes."""
_ROUNDED = ("losses", "total", "gradient_norm")
"""Facts that are compared by size where the environment is another one."""
_MOST_NAMES = 8
TOLERANCES = {"fp32": 1e-3}
OTHER_TOLERANCE = 3e-2
"""Relative differences that another environment explains, by precision."""
GROWTH = 10
"""Factor by which the largest relative difference may grow from one update to the next, where bits may differ."""


class Window(NamedTuple):
    """Updates that are made again."""

    first: int
    last: int
    checkpoint: int
    """Step of the checkpoint that they are made from, before `first`."""


def choose_window(found: Examination, asked: tuple[int, int] | None) -> Window | None:
    """Choose the checkpoint before a window; without a window, from the last but one to the last that is kept.

    Returns:
        None where no window was asked for, and no update follows a checkpoint.

    Raises:
        InputError: the run has not made these updates, or no checkpoint before them is kept, or none in the chain.
    """
    kept = [step for step in store_of(found.path).steps() if step in found.digests]
    if asked is None:
        last = max(kept[1:], default=found.last_step)
        before = max((step for step in kept if step < last), default=None)
        return None if before is None else Window(before + 1, last, before)
    first, last = asked
    before = max((step for step in kept if step < first), default=None)
    made = f"updates {found.first_step + 1} to {found.last_step}, after a kept checkpoint: {_listed(kept)}"
    if not found.first_step < first <= last <= found.last_step:
        raise InputError(
            "The run has no such updates in its chain.",
            given=f"--steps {first}..{last}",
            expected=made,
            hint="name some of these" + (f"; the chain begins after step {found.first_step}" * (found.first_step > 0)),
        )
    if before is None:
        raise InputError(
            f"There is no checkpoint before update {first} to make it again from.",
            given=f"--steps {first}..{last}",
            expected=made,
            hint=f"begin after the first one that is kept: --steps {kept[0] + 1}..{max(kept[0] + 1, last)}"
            if kept
            else "put a checkpoint back",
        )
    return Window(first, last, before)


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(f"step {step}" for step in steps[-_MOST_NAMES:]) or "there is none"


class WindowLines(NamedTuple):
    """What the chain says of a window."""

    ground: dict[str, Any]
    """The event before its first update."""
    lines: list[dict[str, Any]]
    """The lines after its checkpoint; those of digests come right after the attempt that they are of."""

    @property
    def recipe(self) -> Recipe:
        """The recipe of the window."""
        return from_toml(str(self.ground.get("recipe", "")), f"the recipe in {CHAIN}")

    @property
    def events(self) -> list[dict[str, Any]]:
        """The event before its first update, and those in it."""
        first = next((index for index, facts in enumerate(self.lines) if "position" in facts), 0)
        return [self.ground, *(facts for facts in self.lines[first:] if "event" in facts)]

    def check(self, window: Window) -> None:
        """Refuse a window in which recipe or data change, or that nobody could make again."""
        steps = f"--steps {window.first}..{window.last}"
        for event in self.events:
            changed = recipe_changes(self.recipe, from_toml(event["recipe"], CHAIN))
            grave = [str(change) for change in changed if not is_harmless(change)]
            if event["data"] != self.ground["data"]:
                grave.append("other data")
            if grave:
                raise InputError(
                    f"At step {event['step']} the run went on by another recipe, or with other data.",
                    given=f"{steps}, and {'; '.join(grave)}",
                    expected="a window by one recipe, with one set of data",
                    hint=f"end it at step {event['step']}, or begin it after that",
                )
            if event["sums"] == "served":
                raise InputError(
                    "These updates depend on whose gradients came first: they cannot be made again.",
                    given=f"{steps}, {self.recipe.exchange} with {event['workers']} workers",
                    expected="updates of AllReduce, or of one worker",
                    hint="check the files alone: --no-replay",
                )


def window_lines(found: Examination, window: Window) -> WindowLines:
    """Read the lines of a window from the chain."""
    positions = found.digests[window.checkpoint]
    ground: dict[str, Any] = {}
    lines: list[dict[str, Any]] = []
    is_inside = is_done = False
    for line in read_chain(found.path / CHAIN):
        facts = line.facts
        if "digests" in facts:
            continue
        if not is_inside:
            is_first = "event" in facts and not ground and facts.get("from_position") in positions
            ground = facts if "event" in facts else ground
            is_inside = is_first or (facts.get("step") == window.checkpoint and facts.get("position") in positions)
            lines += _digests_after(found, facts) if is_inside else ()
            continue
        if is_done and ("position" in facts or "event" in facts):
            break
        is_begun = any("position" in before for before in lines)
        ground = facts if "event" in facts and not is_begun else ground
        lines.append(facts)
        if "position" in facts:
            lines += _digests_after(found, facts)
        is_done = is_done or (facts["step"] == window.last and facts.get("refused") is False)
    return WindowLines(ground, lines)


def _digests_after(found: Examination, facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the digests of the tensors after an attempt, or of those that an event begins with, if there are any."""
    position = facts.get("position", facts.get("from_position", -1))
    if digests := found.digests.get(facts["step"], {}).get(position):
        yield {"step": facts["step"], "digests": digests}


@dataclass
class Replayed:
    """What became of a window."""

    window: Window
    workers: int
    choices: Mapping[str, Any]
    """With which it was made again."""
    environment: list[str]
    """Differences of this environment from that of the run, by which bits may differ."""
    tolerance: float
    num_compared: int = 0
    """Attempts."""
    digests_at: list[int] = field(default_factory=list)
    """Steps after which all tensors were compared."""
    data_changed: list[str] = field(default_factory=list)
    has_same_bits: bool = True
    largest: float = 0.0
    """Largest relative difference of losses, gradient norms and parameters."""
    is_stopped: bool = False
    """Somebody has asked to stop before its end."""
    difference: str = ""
    """The first update that differs, and what it is in; "" where none does."""

    def explains(self, distance: float) -> bool:
        """Whether the environment explains a relative difference, which is kept if it is the largest.

        Training is chaotic: what begins as a rounding grows from update to update, and so may be large later on.
        """
        allowed = max(self.tolerance, GROWTH * self.largest)
        self.largest = max(self.largest, distance)
        return bool(self.environment) and distance <= allowed

    @property
    def verdict(self) -> str:
        """What it shows, in words."""
        if self.difference or self.data_changed:
            return "differs"
        return "bit-identical" if self.has_same_bits else "equal within what the environment allows"


def replay(
    recipe: Recipe,
    path: Path,
    window: Window,
    told: WindowLines,
    worker: Worker,
    *,
    tolerance: float | None,
    progress: ProgressFunction,
) -> Replayed:
    """Make a window again; all workers call it together. The result of the chief alone has looked at tensors.

    The recipe is that of the window, with its data found and its code allowed. `told` is from `window_lines`; nothing
    is written to the run's folder. Without a tolerance, the precision says which relative difference another
    environment explains. `progress` is told of the updates that are done.
    """
    stages = Stages(recipe, worker)
    now = resolve_choices(recipe, stages.parts, worker, None).now
    found = Replayed(
        window,
        worker.num_workers,
        {name: value for name, value in vars(now).items() if name != "accelerator"} | {**(now.accelerator or {})},
        _environment(recipe, told, now, worker),
        tolerance if tolerance is not None else TOLERANCES.get(recipe.towers.precision, OTHER_TOLERANCE),
    )
    checkpoint = read_checkpoint(path, window.checkpoint)
    assert checkpoint is not None, "a step was asked for"
    try:
        changed = stages.load(checkpoint, accept_data_change=True)
        # Where the run has accepted a change, the checkpoint before is of the data of before.
        is_known = told.ground["data"] == data_digest(stages.parts.loader)
        found.data_changed = [] if is_known else changed
    except InputError as error:
        found.difference = f"the data: {error.what} {error.given}, and expected was {error.expected}"
        return found
    # Attempts without an update may stand between its step, where the lines begin, and its place.
    position, lines = checkpoint.values["loader"]["position"], told.lines
    start = next((count for count, facts in enumerate(lines, start=1) if facts.get("position") == position), 0)
    _Replay(stages, recipe, store_of(path), worker, found).run(lines[start:], progress)
    return found


def _environment(recipe: Recipe, told: WindowLines, now: Choices, worker: Worker) -> list[str]:
    """Say in what this environment differs from that of the updates, or does not repeat its own bits."""
    lines: list[str] = []
    sums = how_summed(recipe.exchange, worker)
    for event in told.events:
        try:
            lines += differences(Choices.read(event.get("choices")), now)
        except ValueError as error:
            lines.append(f"the choices are those of another version of Lockstep: {error}")
        before = event["sums"], event["workers"]
        if before != (sums, worker.num_workers) and {sums, event["sums"]} != {"tree"}:
            lines.append(
                f"the sums were made by {before[0]} over {before[1]} workers, and are by {sums} over "
                f"{worker.num_workers}"
            )
    for saved, found in zip(functions_of(told.recipe), functions_of(recipe), strict=True):
        if saved.source != found.source:
            lines.append(f"the code of {saved.full_name} has changed")
    if worker.device.type != "cpu" and not is_exact(recipe.exchange):
        lines.append(f"without exchange.exact not all kernels of {worker.device.type} are deterministic")
    return [*dict.fromkeys(lines)]


class _Replay:
    """Updates that are made again, on one worker."""

    def __init__(self, stages: Stages, recipe: Recipe, store: Store, worker: Worker, found: Replayed) -> None:
        self._stages, self._recipe, self._store, self._worker, self._found = stages, recipe, store, worker, found
        self._steps: Generator[StepReport, None, None] | None = None
        self._is_stopped = False

    def run(self, lines: Sequence[Mapping[str, Any]], progress: ProgressFunction) -> None:
        """Go through the lines of the window, up to the first difference that nothing explains."""
        window = self._found.window
        try:
            for facts in lines:
                if "event" in facts:
                    self._begin_segment(facts)
                elif "digests" in facts and self._worker.is_chief:
                    self._compare_tensors(facts)
                elif "position" in facts:
                    if not self._repeat(facts):
                        return
                    progress(facts["step"] - window.checkpoint, window.last - window.checkpoint)
        except NonFiniteError as error:
            self._differs(f"after update {self._stages.parts.state.step} an attempt is not finite here: {error.given}")
        finally:
            self._end_segment()

    def _begin_segment(self, event: Mapping[str, Any]) -> None:
        """Go on as the run did: with the next stage, without the batches that it had left out by then."""
        self._end_segment()
        stages = self._stages
        while stages.now.number < event["stage"] and not stages.is_at_last:
            stages.enter_next()
        stages.parts.loader.skipped = sorted(event["skipped"])
        while stages.parts.state.step < event["step"] and self._next():
            pass  # updates of which a lost chief has left no line

    def _end_segment(self) -> None:
        if self._steps is not None:
            self._steps.close()
        self._steps = None

    def _next(self) -> StepReport | None:
        parts = self._stages.parts
        if self._steps is None:
            self._steps = steps_without_survival(
                parts.state,
                parts.task.losses,
                parts.loader,
                parts.towers,
                self._recipe.exchange,
                counts=parts.task.counts(parts.state.model),
                until=Steps(self._found.window.last),
            )
        report = next(self._steps, None)
        if report:
            self._is_stopped = report.stop_requested  # of any worker
        elif self._worker.num_workers == 1 and self._worker.pulse.stop_requested is not None:
            self._is_stopped = True
        return report

    def _repeat(self, wanted: Mapping[str, Any]) -> bool:
        """Make an attempt again; returns whether it agrees with the chain."""
        report = self._next()
        if report is None:
            self._found.is_stopped = self._is_stopped
            if not self._is_stopped:
                self._differs(f"update {wanted['step']} is not made here: the data ends before it")
            return False
        given = as_read(attempt_facts(report, in_metrics=wanted["in_metrics"]))
        self._found.num_compared += 1
        if given == wanted:
            return True
        self._found.has_same_bits = False
        distance = max((_distance(wanted.get(name), given.get(name)) for name in _ROUNDED), default=0.0)
        is_other = any(wanted.get(name) != given.get(name) for name in _EXACT)
        if self._found.explains(distance) and not is_other:
            return True
        self._differs(f"update {wanted['step']}: {told_differences(wanted, given)}{self._examples(wanted, given)}")
        return False

    def _examples(self, expected: Mapping[str, Any], given: Mapping[str, Any]) -> str:
        """Name the examples of an update whose losses differ, first those in a part of the data that has changed."""
        if expected["losses"] == given["losses"]:
            return ""
        loader = self._stages.parts.loader
        names = loader.example_ids(expected["position"] - loader.batch_size, loader.batch_size)
        parts = [line.partition(" was ")[0] for line in self._found.data_changed]
        changed = [name for name in names if any(part in name for part in parts)] or names
        more = f" and {len(changed) - _MOST_NAMES} more" if len(changed) > _MOST_NAMES else ""
        return f"; its examples: {', '.join(changed[:_MOST_NAMES])}{more}"

    def _compare_tensors(self, facts: Mapping[str, Any]) -> None:
        sections, step = self._stages.parts.state.sections(), facts["step"]
        self._found.digests_at.append(step)
        wanted: ChainDigests = facts["digests"]
        compared = {section: names for section, names in wanted.by_section.items() if section in sections}
        different = wanted._replace(by_section=compared).unlike(sections)
        if not different:
            return
        self._found.has_same_bits = False
        if not (self._found.environment and self._found.explains(self._distance_to(step, sections["parameters"]))):
            self._differs(f"after update {step}: {named_in_short(different)} not as in the chain")

    def _distance_to(self, step: int, parameters: Mapping[str, torch.Tensor]) -> float:
        """The relative difference to the parameters in a checkpoint of the run; 0 where it is not kept."""
        try:
            checkpoint = self._store.read(step)
        except CheckpointError:
            return 0.0
        assert checkpoint is not None, "a step was asked for"
        kept = checkpoint.tensors["parameters"]
        apart = sum(float((parameters[name].cpu().double() - kept[name].double()).square().sum()) for name in kept)
        size = sum(float(tensor.double().square().sum()) for tensor in kept.values())
        return math.sqrt(apart / size) if size else math.inf

    def _differs(self, text: str) -> None:
        self._found.has_same_bits = False
        self._found.difference = self._found.difference or text


def _distance(expected: Any, given: Any) -> float:
    """The largest relative difference of two facts, of which losses are by name; infinite where one is not finite."""
    if isinstance(expected, dict) and isinstance(given, dict) and expected.keys() == given.keys():
        return max((_distance(expected[name], given[name]) for name in expected), default=0.0)
    if expected == given:
        return 0.0
    try:
        before, now = float(expected), float(given)
    except (TypeError, ValueError):
        return math.inf
    distance = abs(before - now) / max(abs(before), abs(now))
    return distance if math.isfinite(distance) else math.inf
