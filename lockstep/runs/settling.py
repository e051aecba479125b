"""What a start of a run is computed with: the choices of its first start, or those that suit the machine."""

from __future__ import annotations

import logging

import torch

from lockstep.recipes.recipe import Recipe
from lockstep.runs.build import Parts
from lockstep.runs.workdir import Workdir
from lockstep.training import choices
from lockstep.training.choices import Choices
from lockstep.workers.rank import Worker

log = logging.getLogger("lockstep")


def settle(recipe: Recipe, parts: Parts, worker: Worker, workdir: Workdir | None) -> tuple[Choices, list[str]]:
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
