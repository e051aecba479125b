"""Where a start of a run begins: its own last checkpoint, that of another run, weights of a file, or fresh ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from lockstep.checkpoints.store import Checkpoint, Store
from lockstep.errors import CheckpointError
from lockstep.recipes.recipe import Recipe
from lockstep.runs.stages import Course
from lockstep.training.preflight import check_data
from lockstep.training.resume import agreed, store_of
from lockstep.training.run_weights import run_at_step
from lockstep.training.warm_start import warm_start
from lockstep.weights.warm_start import WarmStartReport
from lockstep.workers.rank import Worker

log = logging.getLogger("lockstep")


class Beginning(NamedTuple):
    """Where the run stands now, and what it has that from."""

    is_resumed: bool = False
    """From its own checkpoint, which wins over all that follows."""
    is_forked: bool = False
    """From a checkpoint of another run."""
    data_changed: Sequence[str] = ()
    """What has changed in the data since the checkpoint was saved, a line each."""
    report: WarmStartReport | None = None
    """What became of the tensors of a file whose weights it has started from."""


def begin(
    course: Course,
    store: Store | None,
    recipe: Recipe,
    fork_from: str | None,
    worker: Worker,
    *,
    accept_data_change: bool,
) -> Beginning:
    """Have a run stand where it is to go on, on all workers alike.

    Args:
        course: of the run.
        store: its checkpoints, if it has a workdir.
        recipe: may name weights to start from.
        fork_from: another run's workdir, or RUN@STEP.
        worker: this worker.
        accept_data_change: go on although the data is not what it was when the checkpoint was saved.

    Raises:
        CheckpointError: what it is to begin with is missing or damaged, or does not fit.
        InputError: its stream is another one, or of other data.
        WorkerError: the workers read different data.
    """
    check_data(course.parts.loader, worker)
    source = recipe.warm_start.path if recipe.warm_start else None
    checkpoint = agreed(store) if store else None
    if checkpoint is not None:
        changed = course.take_up(checkpoint, accept_data_change=accept_data_change)
        if worker.is_chief:
            _tell("resumed", checkpoint, course)
            if fork_from:
                log.info("not forked again: the run goes on from its own checkpoint of step %d", checkpoint.step)
            _tell_not_loaded(source, checkpoint)
        return Beginning(is_resumed=True, data_changed=changed)
    if fork_from:
        checkpoint = _of_another_run(fork_from)
        changed = course.take_up(checkpoint, accept_data_change=accept_data_change)
        if worker.is_chief:
            _tell("taken up", checkpoint, course)
            _tell_not_loaded(source, checkpoint)
        return Beginning(is_forked=True, data_changed=changed)
    if recipe.warm_start and source:
        return Beginning(report=warm_start(course.parts.state, source, recipe.warm_start.mapping))
    return Beginning()


def _of_another_run(fork_from: str) -> Checkpoint:
    folder, step = run_at_step(fork_from)
    checkpoint = agreed(folder, step)
    if checkpoint is None:
        place = store_of(folder).folder
        raise CheckpointError(
            f"There is no checkpoint in {place}.",
            given=str(place),
            expected="the workdir of a run that has saved one",
            hint="check the path; for weights alone call ls.warm_start",
        )
    return checkpoint


def _tell(how: str, checkpoint: Checkpoint, course: Course) -> None:
    position = course.parts.loader.position
    log.info("%s at step %d, position %d, from %s", how, checkpoint.step, position, checkpoint.path)


def _tell_not_loaded(source: str | None, checkpoint: Checkpoint) -> None:
    if source:
        log.info("%s is not loaded: the run goes on from its own checkpoint of step %d", source, checkpoint.step)
