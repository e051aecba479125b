"""The stages of a run: what is trained in each, and how one goes on where the one before ends.

A stage ends after a number of updates that is known from the start. So the stage of a checkpoint follows from its step
alone; at the boundary of two it is that of the first, and the second begins with what is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

from lockstep.checkpoints.store import Checkpoint
from lockstep.errors import DataError, InputError
from lockstep.progress import End, Epochs, Hours, Steps
from lockstep.recipes.data import ImageData
from lockstep.recipes.parts import Stage
from lockstep.recipes.recipe import Recipe
from lockstep.runs.build import Parts, ReaderFunction, build, build_state, schedule_mismatch
from lockstep.training.resume import load_run
from lockstep.workers.rank import Worker


@dataclass(frozen=True)
class StageSpan:
    """One stage of a run; a run without stages is one span."""

    recipe: Recipe
    """The run's, with what the stage says in place of what it says; it ends with the stage."""
    number: int = 1
    """Which stage it is, from 1 on."""
    first_step: int = 0
    """Updates completed before it."""
    last_step: int | None = None
    """Updates completed with it; None where only the end of the run ends it."""

    def is_over(self, step: int) -> bool:
        """Whether no further update belongs to it."""
        return self.last_step is not None and step >= self.last_step


def stage_spans(recipe: Recipe, epoch_size: int) -> list[StageSpan]:
    """The stages of a run, in their order; one for a run without any.

    Raises:
        InputError: a stage is too short for an update.
    """
    found: list[StageSpan] = []
    first = 0
    for number, stage in enumerate(recipe.stages, start=1):
        last = first + _num_steps(stage, number, recipe, epoch_size)
        found.append(StageSpan(_recipe_of(recipe, stage), number, first, last))
        first = last
    return found or [StageSpan(recipe)]


def span_at(all_stretches: list[StageSpan], step: int) -> StageSpan:
    """The one that a checkpoint of a step belongs to."""
    return next((each for each in all_stretches if each.last_step is None or step <= each.last_step), all_stretches[-1])


def recipe_at(recipe: Recipe, checkpoint: Checkpoint) -> Recipe:
    """What was trained, and how, in the stage that a checkpoint of a run belongs to: whoever scores it builds this."""
    epoch_size = checkpoint.values["loader"]["epoch_size"]
    return span_at(stage_spans(recipe, epoch_size), checkpoint.step).recipe


def recipe_at_start(recipe: Recipe) -> Recipe:
    """That of the first stage; of a run without stages its own. What a run says and no stage takes is never built."""
    return _recipe_of(recipe, recipe.stages[0]) if recipe.stages else recipe


class Stages:
    """The way of a run through its stages, on one worker; the others make the same calls.

    Args:
        recipe: of the run, with its number of towers.
        worker: this worker.
        reader: gives the examples, in place of the recipe's paths.

    Raises:
        InputError: a stage cannot be built.
    """

    def __init__(self, recipe: Recipe, worker: Worker, reader: ReaderFunction | None = None) -> None:
        self._recipe, self._worker = recipe, worker
        self._reader = cache(reader) if reader else None  # asked once a split, and not again by each stage
        with _named(1 if recipe.stages else None):
            self.parts: Parts = build(recipe_at_start(recipe), worker, self._reader)
        """Those of the present stage."""
        self.stage_spans = stage_spans(recipe, self.parts.loader.epoch_size)
        self.now = self.stage_spans[0]
        """The present stage."""
        self.end = _end_of(recipe, self.stage_spans[-1].last_step, self.parts.loader.epoch_size)
        """Of the run: its own, or that of its last stage, whichever is known to come first."""
        for later in self.stage_spans[1:]:
            with _named(later.number):
                build_state(later.recipe, worker)  # a pattern that matches nothing is to be refused now, not in days

    @property
    def is_at_last(self) -> bool:
        """Whether no stage follows the present one."""
        return self.now is self.stage_spans[-1]

    def take_up(self, checkpoint: Checkpoint, *, accept_data_change: bool = False) -> list[str]:
        """Stand where a checkpoint was saved, in its stage; returns what has changed in the data, a line each.

        Raises:
            CheckpointError: it does not fit the recipe.
            InputError: its stream is another one.
        """
        self.turn_to(checkpoint)
        return load_run(checkpoint, self.parts.state, self.parts.loader, accept_data_change=accept_data_change)

    def turn_to(self, checkpoint: Checkpoint) -> None:
        """Have the parts of the stage of a checkpoint; the values of their state are still to be taken over."""
        self._enter(span_at(self.stage_spans, checkpoint.step))

    def go_on(self) -> None:
        """Begin the next stage: what was learned and counted goes on, and the slots of its optimizer are fresh."""
        before = self.parts.state
        self._enter(self.stage_spans[self.now.number])
        self.parts.state.continue_from(before)

    def in_words(self) -> str:
        """Which stage it is: `stage 2 of 2: steps 1001 to 1500, training 4 of 190 parameters`."""
        now, state = self.now, self.parts.state
        size = self.now.recipe.data.image_size
        sizes = {each.recipe.data.image_size for each in self.stage_spans}
        images = f", images of {size}x{size} pixels" if len(sizes) > 1 else ""
        num_parameters = sum(1 for _ in state.model.parameters())
        return (
            f"stage {now.number} of {len(self.stage_spans)}: steps {now.first_step + 1} to {now.last_step}, "
            f"training {len(state.parameters)} of {num_parameters} parameters{images}"
        )

    def mismatches(self) -> list[str]:
        """A line for an end that no stage reaches, and for each learning rate that ends elsewhere than its stage."""
        lines = [self._out_of_reach()]
        for each in self.stage_spans:
            what = "the run" if each.last_step is None else f"stage {each.number}, counted from its first step,"
            lines.append(schedule_mismatch(each.recipe, self.parts.loader.epoch_size, what))
        return [line for line in lines if line]

    def _out_of_reach(self) -> str | None:
        last, end = self.stage_spans[-1].last_step, self._recipe.end
        if last is None or end is None or isinstance(end, Hours):
            return None
        is_reached = _num_updates(end, self._recipe, self.parts.loader.epoch_size) <= last
        return None if is_reached else f"the run ends with its last stage at step {last}, and not after {end} (end)"

    def _enter(self, span: StageSpan) -> None:
        """Have the parts of a stage; its loader stands where the one before stood."""
        if span is self.now:
            return
        place = self.parts.loader.state()
        self.parts = build(span.recipe, self._worker, self._reader)
        self.parts.loader.load_state(place)
        self.parts.state.count_steps_from(span.first_step)
        self.now = span


@contextmanager
def _named(number: int | None) -> Iterator[None]:
    """What is refused in a stage is said of that stage; None: there are none. The data is the same in all of them."""
    try:
        yield
    except InputError as error:
        if number is None or isinstance(error, DataError):
            raise
        what = f"Stage {number}: {error.what}"
        raise type(error)(what, given=error.given, expected=error.expected, hint=error.hint) from error


def _end_of(recipe: Recipe, last: int | None, epoch_size: int) -> End | None:
    end = recipe.end
    if last is None or isinstance(end, Hours):
        return end
    return end if end and _num_updates(end, recipe, epoch_size) < last else Steps(last)


def _num_updates(end: Steps | Epochs, recipe: Recipe, epoch_size: int) -> int:
    """In epochs, as many as there are batches in them."""
    return end.steps(epoch_size, recipe.batch_size) if isinstance(end, Epochs) else math.ceil(end.count)


def _recipe_of(recipe: Recipe, stage: Stage) -> Recipe:
    said = {name: getattr(stage, name) for name in ("optimizer", "frozen", "train_only", "freeze_statistics")}
    if stage.image_size is not None and isinstance(recipe.data, ImageData):
        said["data"] = replace(recipe.data, image_size=stage.image_size)
    given = {name: value for name, value in said.items() if value is not None}
    return replace(recipe, **given, end=stage.length, stages=())


def _num_steps(stage: Stage, number: int, recipe: Recipe, epoch_size: int) -> int:
    count = _num_updates(stage.length, recipe, epoch_size)
    if count < 1:
        raise InputError(
            f"Stage {number} is too short for an update.",
            given=f"{stage.length}, {epoch_size} examples in an epoch, batches of {recipe.batch_size}",
            expected="at least one whole batch",
            hint=f"raise stages[{number - 1}].length, or lower the batch size",
        )
    return count
