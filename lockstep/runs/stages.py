"""The stages of a run: the steps and the recipe of each, and the change from one to the next.

The number of updates of a stage is known from the start, so the stage of a checkpoint follows from its step alone. A
checkpoint at the boundary of two stages belongs to the first; the second continues from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from lockstep.checkpoints.store import Checkpoint, Store
from lockstep.errors import DataError, InputError, WorkerError
from lockstep.metrics.metric import NO_METRICS, Metric
from lockstep.optim import ByName, Cosine, LayerDecay, OneCycle
from lockstep.optim.rules import Optimizer
from lockstep.optim.schedules import resolve_schedule
from lockstep.recipes.parts import Stage
from lockstep.recipes.recipe import Recipe
from lockstep.runs.build import Parts, build, build_state, given_once
from lockstep.training.saving import load_run, read_checkpoint
from lockstep.types import End, Epochs, Hours, Steps
from lockstep.workers.rank import Worker


@dataclass(frozen=True)
class StageSpan:
    """A stage of a run and the steps that belong to it; a run without stages is one span."""

    recipe: Recipe
    """The recipe of the run with the settings of the stage; its end is that of the stage."""
    number: int = 1
    """Counted from 1."""
    first_step: int = 0
    """Updates completed before the stage."""
    last_step: int | None = None
    """Updates completed at its end; None where only the end of the run ends it."""

    def is_over(self, step: int) -> bool:
        """Whether no update after this step belongs to the stage."""
        return self.last_step is not None and step >= self.last_step


def stage_spans(recipe: Recipe, epoch_size: int) -> list[StageSpan]:
    """Work out the steps of each stage of a run."""
    found: list[StageSpan] = []
    first = 0
    for number, stage in enumerate(recipe.stages, start=1):
        count = _num_updates(stage.length, recipe, epoch_size)
        if count < 1:
            raise InputError(
                f"Stage {number} is too short for an update.",
                given=f"{stage.length}, {epoch_size} examples in an epoch, batches of {recipe.batch_size}",
                expected="at least one whole batch",
                hint=f"raise stages[{number - 1}].length, or lower the batch size",
            )
        found.append(StageSpan(_recipe_of(recipe, stage), number, first, first + count))
        first += count
    return found or [StageSpan(recipe)]


def span_at(spans: list[StageSpan], step: int) -> StageSpan:
    """Find the stage that a checkpoint of this step belongs to."""
    return next((each for each in spans if each.last_step is None or step <= each.last_step), spans[-1])


def recipe_at(recipe: Recipe, checkpoint: Checkpoint) -> Recipe:
    """Return the recipe of the stage that a checkpoint belongs to: its model is the one to score."""
    epoch_size = checkpoint.values["loader"]["epoch_size"]
    return span_at(stage_spans(recipe, epoch_size), checkpoint.step).recipe


def recipe_at_start(recipe: Recipe) -> Recipe:
    """Return the recipe of the first stage, or the run's own where it has no stages."""
    return _recipe_of(recipe, recipe.stages[0]) if recipe.stages else recipe


class Stages:
    """The stages of a run and the parts of the present one, on one worker; the others make the same calls."""

    def __init__(self, recipe: Recipe, worker: Worker, metrics: Mapping[str, Metric] = NO_METRICS) -> None:
        self._recipe, self._worker, self._metrics = recipe, worker, metrics
        self._given = given_once(recipe)  # asked once a split, and not again by each stage
        with _errors_name_stage(1 if recipe.stages else None):
            self.parts: Parts = build(recipe_at_start(recipe), worker, self._given, metrics)
        """The parts of the present stage."""
        self.spans = stage_spans(recipe, self.parts.loader.epoch_size)
        self.now = self.spans[0]
        """The present stage."""
        self.end = _end_of(recipe, self.spans[-1].last_step, self.parts.loader.epoch_size)
        """End of the run: the recipe's end or the end of the last stage, whichever is known to come first."""
        for later in self.spans[1:]:
            with _errors_name_stage(later.number):
                build_state(later.recipe, worker)  # a pattern that matches nothing is refused now, not in days

    @property
    def is_at_last(self) -> bool:
        """Whether no stage follows the present one."""
        return self.now is self.spans[-1]

    def load(self, checkpoint: Checkpoint, *, accept_data_change: bool = False) -> list[str]:
        """Load a checkpoint into the parts of its stage; returns what has changed in the data, a line each.

        Raises:
            CheckpointError: it does not fit the recipe.
            InputError: it is of another stream.
        """
        self.enter_stage_of(checkpoint)
        return load_run(checkpoint, {"": self.parts.state}, self.parts.loader, accept_data_change=accept_data_change)

    def enter_stage_of(self, checkpoint: Checkpoint) -> None:
        """Build the parts of the stage of a checkpoint, without loading it."""
        self._enter(span_at(self.spans, checkpoint.step))

    def enter_next(self) -> None:
        """Begin the next stage from the state of this one, with fresh slots of the optimizer."""
        before = self.parts.state
        self._enter(self.spans[self.now.number])
        self.parts.state.continue_from(before)

    def load_memory(self, checkpoint: Checkpoint, number: int) -> None:
        """Load what is in the memory of another worker, into the parts of its stage; the stages count from 1."""
        self._enter(self.spans[number - 1])
        load_run(checkpoint, {"": self.parts.state}, self.parts.loader, accept_data_change=True)

    def load_last(self, store: Store | None) -> str:
        """Load the last checkpoint on all workers; returns what it is in messages.

        Raises:
            WorkerError: there is none.
        """
        checkpoint = read_checkpoint(store) if store else None
        if checkpoint is None:
            raise WorkerError(
                "The run cannot go on without the workers that are lost.",
                given="workers that were in the middle of an update, or do not agree, and no checkpoint",
                expected="the same step in the memory of those that are left, or a checkpoint",
                hint="start the run anew; with a --workdir it saves checkpoints",
            )
        self.load(checkpoint, accept_data_change=True)
        self.parts.state.steps.clear()  # of which the next ones would take it that the workers have compared this
        return f"the checkpoint of step {checkpoint.step}"

    def describe(self) -> str:
        """Describe the present stage: `stage 2 of 2: steps 1001 to 1500, training 4 of 190 parameters`."""
        now, state = self.now, self.parts.state
        size = self.now.recipe.data.image_size
        sizes = {each.recipe.data.image_size for each in self.spans}
        images = f", images of {size}x{size} pixels" if len(sizes) > 1 else ""
        num_parameters = sum(1 for _ in state.model.parameters())
        return (
            f"stage {now.number} of {len(self.spans)}: steps {now.first_step + 1} to {now.last_step}, "
            f"training {len(state.parameters)} of {num_parameters} parameters{images}"
        )

    def mismatches(self) -> list[str]:
        """Describe an end that no stage reaches, and learning rates that end before or after their stage."""
        lines: list[str] = []
        last, end, epoch_size = self.spans[-1].last_step, self._recipe.end, self.parts.loader.epoch_size
        if last and isinstance(end, Steps | Epochs) and _num_updates(end, self._recipe, epoch_size) > last:
            lines.append(f"the run ends with its last stage at step {last}, and not after {end} (end)")
        for each in self.spans:
            what = "the run" if each.last_step is None else f"stage {each.number}, counted from its first step,"
            lines += _schedule_mismatches(each.recipe, epoch_size, what)
        return lines

    def _enter(self, span: StageSpan) -> None:
        """Build the parts of a stage; its loader goes on where the present one stands, stuck where that one is."""
        if span is self.now:
            return
        before = self.parts.loader
        self.parts = build(span.recipe, self._worker, self._given, self._metrics, is_prepared=True)
        self.parts.loader.load_state(before.state())
        self.parts.loader.stuck = before.stuck
        self.parts.state.count_steps_from(span.first_step)
        self.now = span


@contextmanager
def _errors_name_stage(number: int | None) -> Iterator[None]:
    """Name the stage in errors about it, but not in those about the data, which all stages share; None: no stages."""
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


def _schedule_mismatches(recipe: Recipe, epoch_size: int, what: str) -> Iterator[str]:
    """Describe the learning rates that end at another step than the run or stage called `what`."""
    if not isinstance(end := recipe.end, Steps | Epochs):
        return
    last = end.count if isinstance(end, Steps) else end.steps(epoch_size, recipe.batch_size)
    for pattern, each in _optimizers(recipe.optimizer).items():
        given = getattr(each.optimizer if isinstance(each, LayerDecay) else each, "lr", None)
        if not isinstance(given, Cosine | OneCycle):
            continue
        schedule = resolve_schedule(given, epoch_size, recipe.batch_size)
        assert isinstance(schedule, Cosine | OneCycle), "it stays one"
        steps = schedule.steps
        assert isinstance(steps, int), "it is resolved"
        if steps == last:
            continue
        after = f"stays at {schedule(steps + 1):g} from there on" if last > steps else "is still on its way"
        inner = "optimizer.lr.steps" if isinstance(each, LayerDecay) else "lr.steps"
        whose, field = (f" of {pattern!r}", inner) if pattern else ("", f"optimizer.{inner}")
        yield f"the learning rate{whose} ends at step {steps}, {what} at step {last}: it {after} ({field})"


def _optimizers(optimizer: Optimizer) -> Mapping[str, Optimizer]:
    """Return the optimizers with a learning rate by their patterns; "" where there is one for all parameters."""
    if isinstance(optimizer, ByName):
        return optimizer.optimizers if optimizer.rest is None else {**optimizer.optimizers, "rest": optimizer.rest}
    return {"": optimizer}


def _num_updates(end: Steps | Epochs, recipe: Recipe, epoch_size: int) -> int:
    """Count the updates until an end; an epoch has as many as it has whole batches."""
    return end.steps(epoch_size, recipe.batch_size) if isinstance(end, Epochs) else math.ceil(end.count)


def _recipe_of(recipe: Recipe, stage: Stage) -> Recipe:
    settings = {name: getattr(stage, name) for name in ("optimizer", "frozen", "train_only", "freeze_statistics")}
    if stage.image_size is not None:
        settings["data"] = recipe.data.resized(stage.image_size, "image_size")
    given = {name: value for name, value in settings.items() if value is not None}
    return replace(recipe, **given, end=stage.length, stages=())
