"""Where a start of a run begins: its own last checkpoint, that of another run, weights of a file, or fresh ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lockstep.checkpoints.store import Checkpoint, Store
from lockstep.errors import CheckpointError
from lockstep.recipes.recipe import Recipe
from lockstep.runs.build import Parts
from lockstep.runs.stages import Stages
from lockstep.runs.workdir import Workdir
from lockstep.screen import log
from lockstep.training import choices
from lockstep.training.choices import Choices
from lockstep.training.preflight import check_data
from lockstep.training.resume import read_checkpoint
from lockstep.training.run_weights import run_at_step
from lockstep.training.saving import store_of
from lockstep.training.warm_start import warm_start
from lockstep.weights.warm_start import WarmStartReport
from lockstep.workers.rank import Worker


class Start(NamedTuple):
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
    stages: Stages,
    store: Store | None,
    recipe: Recipe,
    fork_from: str | None,
    worker: Worker,
    *,
    accept_data_change: bool,
) -> Start:
    """Have a run stand where it is to go on, on all workers alike.

    Args:
        stages: of the run.
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
    check_data(stages.parts.loader, worker)
    source = recipe.warm_start.path if recipe.warm_start else None
    checkpoint = read_checkpoint(store) if store else None
    if checkpoint is not None:
        changed = stages.take_up(checkpoint, accept_data_change=accept_data_change)
        if worker.is_chief:
            _tell("resumed", checkpoint, stages)
            if fork_from:
                log.info("not forked again: the run goes on from its own checkpoint of step %d", checkpoint.step)
            _tell_not_loaded(source, checkpoint)
        return Start(is_resumed=True, data_changed=changed)
    if fork_from:
        checkpoint = _of_another_run(fork_from)
        changed = stages.take_up(checkpoint, accept_data_change=accept_data_change)
        if worker.is_chief:
            _tell("taken up", checkpoint, stages)
            _tell_not_loaded(source, checkpoint)
        return Start(is_forked=True, data_changed=changed)
    if recipe.warm_start and source:
        return Start(report=warm_start(stages.parts.state, source, recipe.warm_start.mapping))
    return Start()


def _of_another_run(fork_from: str) -> Checkpoint:
    folder, step = run_at_step(fork_from)
    checkpoint = read_checkpoint(folder, step)
    if checkpoint is None:
        place = store_of(folder).folder
        raise CheckpointError(
            f"There is no checkpoint in {place}.",
            given=str(place),
            expected="the workdir of a run that has saved one",
            hint="check the path; for weights alone call ls.warm_start",
        )
    return checkpoint


def _tell(how: str, checkpoint: Checkpoint, stages: Stages) -> None:
    position = stages.parts.loader.position
    log.info("%s at step %d, position %d, from %s", how, checkpoint.step, position, checkpoint.path)


def _tell_not_loaded(source: str | None, checkpoint: Checkpoint) -> None:
    if source:
        log.info("%s is not loaded: the run goes on from its own checkpoint of step %d", source, checkpoint.step)


def resolve_choices(recipe: Recipe, parts: Parts, worker: Worker, workdir: Workdir | None) -> tuple[Choices, list[str]]:
    """Take the saved choices, or make them, and say what they are.

    Args:
        recipe: of the run.
        parts: those of its first stage.
        worker: this worker; the others make the same call.
        workdir: of the run, if it has one.

    Returns:
        The choices of the first start, and a line for each that is another one now.

    Raises:
        WorkdirError: they differ, and the run is to be exact.
    """
    exact = getattr(recipe.exchange, "exact", False)
    saved = worker.group.broadcast(workdir.saved_choices() if workdir and worker.is_chief else None)
    before = Choices(**saved) if saved else None
    now = choices.resolve(parts.state, parts.towers, parts.loader, worker, exact=exact, saved=before)
    torch.set_num_threads(now.threads)
    changed = choices.differences(before, now) if before else []
    if exact:
        choices.refuse_changed(changed)
    if worker.is_chief:
        log.info("%s: %s", _crew(worker, parts.towers.count), now)
        if parts.loader.reader.cost == "decode":
            log.info("%s", parts.loader.pool.describe(worker.num_local_workers))
    return before or now, changed


def _crew(worker: Worker, num_towers: int) -> str:
    towers = f"{num_towers} tower{'s' if num_towers > 1 else ''}"
    return f"{towers} on {worker.num_workers} worker{'s' if worker.num_workers > 1 else ''}"
