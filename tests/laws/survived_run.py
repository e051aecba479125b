"""The run of three stages, longer and on six towers, some of whose workers are lost at steps that the command names.

lockstep run --workers 3 --on-failure continue tests/laws/survived_run.py WORKDIR [EXCHANGE] [FAULT ...]

A fault is `NUMBER:SIGKILL@STEP+MILLISECONDS`, or any other signal, or `drift`: the worker's copy of the model comes to
differ; or `damage`: it is killed while it replaces a damaged checkpoint of the step.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import staged_run
import torch
from torch import nn

import lockstep as ls
from lockstep.checkpoints.store import Store
from lockstep.recipes.code import Function
from lockstep.recipes.python_parts import PythonTask
from lockstep.recipes.recipe import Recipe
from lockstep.runs.workdir import Result

LENGTHS = (50, 60, 50)
STEPS = sum(LENGTHS)
BATCH_SIZE, NUM_EXAMPLES, NUM_TOWERS, STEP_SECONDS = 12, 60, 6, 0.006
SLOW_SECONDS = 0.2
"""Of each tower while a file `slow` lies beside the workdir."""


def make_recipe(exchange: ls.AllReduce | ls.Backups | ls.Asynchronous) -> Recipe:
    longer = tuple(replace(stage, length=ls.Steps(n)) for stage, n in zip(staged_run.STAGES, LENGTHS, strict=True))
    recipe = staged_run.make_recipe(
        20, stages=longer, batch_size=BATCH_SIZE, num_towers=NUM_TOWERS, exchange=exchange, device="cpu"
    )
    watch = replace(recipe.watch, on_failure="continue" if ls.join().num_workers > 1 else "restart")
    evaluate = replace(recipe.evaluate, every=ls.Interval(25))
    return replace(recipe, evaluate=evaluate, watch=watch, loggers=(ls.loggers.Csv(),))


class Faults:
    """What is to befall this worker, once: signals so many seconds after a step, and a model that drifts."""

    def __init__(self, texts: Sequence[str], folder: Path) -> None:
        self._drifts_at: int | None = None
        number = os.environ.get("RANK", "0")
        self._struck = struck = folder / f"struck-{number}"
        if struck.exists():  # it is a newcomer, or all have started again
            return
        for text in texts:
            name, _, when = text.removeprefix(f"{number}:").partition("@")
            step, _, milliseconds = when.partition("+")
            if name == "drift":
                self._drifts_at = int(step) * BATCH_SIZE
            elif text.startswith(f"{number}:damage"):
                _strike_saving(struck, int(step))
            elif text.startswith(f"{number}:"):
                arguments = struck, getattr(signal, name), int(step), int(milliseconds or 0) / 1000
                threading.Thread(target=_strike, args=arguments, daemon=True).start()

    def begin(self, position: int, model: nn.Module) -> None:
        """Let the model drift if it is to."""
        if position == self._drifts_at:
            self._drifts_at = None
            self._struck.touch()
            with torch.no_grad():
                next(model.parameters()).add_(1e-3)


def _strike(struck: Path, number: int, step: int, seconds: float) -> None:
    pulse = ls.join().pulse
    while pulse.step < step:
        time.sleep(0.001)
    time.sleep(seconds)
    struck.touch()
    os.kill(os.getpid(), number)


def _strike_saving(struck: Path, step: int) -> None:
    write = Store.write

    def damage(store: Store, saved: int, *arguments: Any, **more: Any) -> Path:
        if saved != step:
            return write(store, saved, *arguments, **more)
        store.path(step).mkdir()
        (store.path(step) / "manifest.json").touch()
        struck.touch()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it is killed")

    Store.write = damage  # type: ignore[assignment, method-assign]


def make_task(folder: Path, texts: Sequence[str] = ()) -> PythonTask:
    """The task of the run of three stages on this worker, which faults may befall."""
    task, faults = staged_run.make_task(staged_run.NOTHING), Faults(texts, folder)
    pause = STEP_SECONDS if ls.join().num_workers > 1 else 0.0

    def losses(model: nn.Module, batch: ls.Batch) -> Any:
        faults.begin(batch.position, model)
        time.sleep(SLOW_SECONDS if (folder / "slow").exists() else pause)
        return task.losses(model, batch) if task.losses else None

    return replace(task, losses=Function(__name__, "losses", code=losses))


def run(workdir: Path, exchange: ls.AllReduce | ls.Backups | ls.Asynchronous, texts: Sequence[str] = ()) -> Result:
    """Run it on this worker."""
    return ls.run(make_recipe(exchange), workdir, task=make_task(workdir.parent, texts))


def main() -> None:
    staged_run.NUM_EXAMPLES = NUM_EXAMPLES
    faults = [each for each in sys.argv[2:] if ":" in each]
    exchanges = {"gloo": ls.AllReduce("gloo", exact=True), "backups": ls.Backups(), "asynchronous": ls.Asynchronous()}
    run(Path(sys.argv[1]), exchanges.get(sys.argv[2], ls.AllReduce(exact=True)), faults)


if __name__ == "__main__":
    main()
