"""How a run starts: from a checkpoint of its own or of another run, from weights in a file, or from fresh ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from lockstep.checkpoints.store import Checkpoint, Store
from lockstep.checks import check_together
from lockstep.errors import NotFoundError
from lockstep.parallel.exchange import is_exact
from lockstep.readers.reader import NO_DECODER
from lockstep.recipes.recipe import Recipe
from lockstep.runs.build import Parts
from lockstep.runs.stages import Stages
from lockstep.runs.workdir import Workdir
from lockstep.screen import log
from lockstep.training import choices
from lockstep.training.choices import Choices
from lockstep.training.preflight import check_data
from lockstep.training.resume import read_checkpoint
from lockstep.training.run_weights import open_weights, run_at_step
from lockstep.training.saving import store_of
from lockstep.training.warm_start import warm_start
from lockstep.weights.warm_start import WarmStartReport
from lockstep.workers.rank import Worker


class Start(NamedTuple):
    """The source of the weights and the position that a run starts with."""

    is_resumed: bool = False
    """From the run's own checkpoint, which goes before all others."""
    is_forked: bool = False
    """From a checkpoint of another run."""
    data_changed: Sequence[str] = ()
    """Changes in the data since the checkpoint was saved, a line each."""
    report: WarmStartReport | None = None
    """Which tensors were loaded, where the run starts from weights in a file."""


def start(
    stages: Stages,
    store: Store | None,
    recipe: Recipe,
    fork_from: str | None,
    worker: Worker,
    *,
    accept_data_change: bool,
) -> Start:
    """Load the state that a run starts from, the same on all workers.

    A checkpoint of its own (in `store`) goes before one of another run (`fork_from`, a workdir or RUN@STEP), and that
    before the weights that the recipe names.
    """
    check_data(stages.parts.loader, worker)
    own = read_checkpoint(store) if store else None
    checkpoint = own or (_of_another_run(fork_from) if fork_from else None)
    source = recipe.warm_start.path if recipe.warm_start else None
    if checkpoint is None:
        if (given := recipe.warm_start) and source:
            return Start(report=warm_start(stages.parts.state, source, given.mapping, given.takes))
        return Start()
    changed = stages.load(checkpoint, accept_data_change=accept_data_change)
    if worker.is_chief:
        step, how = checkpoint.step, "resumed" if own else "taken up"
        log.info("%s at step %d, position %d, from %s", how, step, stages.parts.loader.position, checkpoint.path)
        if own and fork_from:
            log.info("not forked again: the run goes on from its own checkpoint of step %d", step)
        if source:
            log.info("%s is not loaded: the run goes on from its own checkpoint of step %d", source, step)
    return Start(is_resumed=own is not None, is_forked=own is None, data_changed=changed)


def check_sources(recipe: Recipe, path: Path | None, fork_from: str | None) -> None:
    """Check that what a run without a checkpoint of its own begins with can be opened: another run, or weights."""
    if path and path.is_dir() and store_of(path).steps():
        return
    told = recipe.warm_start.path if recipe.warm_start else None
    checks: list[Callable[[], object]] = (
        [partial(_check_has_checkpoint, fork_from)] if fork_from else [partial(open_weights, told)] if told else []
    )
    check_together(checks)


def _check_has_checkpoint(run: str) -> None:
    folder, step = run_at_step(run)
    store = store_of(folder)
    steps = store.steps()
    if not steps or step not in (None, *steps):
        raise NotFoundError(
            f"There is no checkpoint{'' if step is None else f' of step {step}'} in {store.folder}.",
            given=f"--fork-from {run}",
            expected=f"one of the steps there are: {', '.join(map(str, steps))}"
            if steps
            else "a run that has saved one",
            hint="name one of these steps, or none for the newest" if steps else "check the path",
        )


def _of_another_run(fork_from: str) -> Checkpoint:
    _check_has_checkpoint(fork_from)
    checkpoint = read_checkpoint(*run_at_step(fork_from))
    assert checkpoint is not None, "there is one, and where all are damaged the chief has raised"
    return checkpoint


def resolve_choices(recipe: Recipe, parts: Parts, worker: Worker, workdir: Workdir | None) -> tuple[Choices, list[str]]:
    """Determine threads, kernels and versions, those of the first start where they were saved, and log them.

    Returns:
        The choices of the first start, and a line for each that differs now, which an exact run refuses.
    """
    exact = is_exact(recipe.exchange)
    saved = worker.group.broadcast(workdir.saved_choices() if workdir and worker.is_chief else None)
    before = Choices(**saved) if saved else None
    now = choices.resolve(parts.state, parts.towers, parts.loader, worker, exact=exact, saved=before)
    choices.compare(now, worker, exact=exact)
    torch.set_num_threads(now.threads)
    changed = choices.differences(before, now) if before else []
    if exact:
        choices.refuse_changed(changed)
    if worker.is_chief:
        log.debug("chosen: %s", now)
        if now.decoder != NO_DECODER:
            log.info("images are decoded by %s", now.decoder)
        if parts.loader.reader.cost == "decode":
            log.info("%s", parts.loader.pool.describe(worker.num_local_workers))
    return before or now, changed
