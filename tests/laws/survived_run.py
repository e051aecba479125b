"""The run of three stages, longer and on six towers, some of whose workers are lost at steps that the command names.

lockstep run --workers 3 --on-loss continue tests/laws/survived_run.py WORKDIR [NUMBER:SIGNAL@STEP+MILLISECONDS ...]
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
from types import SimpleNamespace
from typing import Any

import pytest
import staged_run
from torch import nn

import lockstep as ls
from lockstep.recipes.recipe import Recipe
from lockstep.runs import stages
from lockstep.runs.build import Parts
from lockstep.runs.workdir import Result
from lockstep.workers.rank import Worker

LENGTHS = (50, 60, 50)
STEPS = sum(LENGTHS)
BATCH_SIZE, NUM_TOWERS, STEP_SECONDS = 12, 6, 0.006


def make_recipe(exchange: ls.AllReduce) -> Recipe:
    longer = tuple(replace(stage, length=ls.Steps(n)) for stage, n in zip(staged_run.STAGES, LENGTHS, strict=True))
    recipe = staged_run.make_recipe(
        20, stages=longer, batch_size=BATCH_SIZE, num_towers=NUM_TOWERS, exchange=exchange, device="cpu"
    )
    watch = replace(recipe.watch, on_loss="continue" if ls.join().num_workers > 1 else "restart")
    return replace(recipe, evaluate=replace(recipe.evaluate, every=ls.Interval(25)), watch=watch)


class Faults:
    """What is to befall this worker, by position of the batch: a signal, so many seconds after it has begun."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._of_position: dict[int, tuple[int, float]] = {}
        if ls.join("cpu").is_newcomer:
            return
        for text in texts:
            number, _, fault = text.partition(":")
            name, _, when = fault.partition("@")
            step, _, milliseconds = when.partition("+")
            if number == os.environ.get("RANK", "0"):
                number_of_signal = int(getattr(signal, name))
                self._of_position[int(step) * BATCH_SIZE] = number_of_signal, int(milliseconds or 0) / 1000

    def begin(self, position: int) -> None:
        if position in self._of_position:
            threading.Thread(target=self._strike, args=self._of_position.pop(position), daemon=True).start()

    def _strike(self, number: int, seconds: float) -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), number)


def patch_parts(patch: pytest.MonkeyPatch, texts: Sequence[str] = ()) -> None:
    """Have runs built of the parts of this one, on this worker, which faults may befall."""
    patch.setattr(staged_run, "BATCH_SIZE", BATCH_SIZE)
    patch.setattr(staged_run, "NUM_EXAMPLES", 60)
    build, faults = staged_run.make_build(staged_run.NOTHING), Faults(texts)
    pause = STEP_SECONDS if ls.join().num_workers > 1 else 0.0

    def disturbed(given: Recipe, worker: Worker, *rest: object) -> Parts:
        parts: Parts = build(given, worker, *rest)
        losses = parts.task.losses

        def with_faults(model: nn.Module, batch: ls.Batch) -> Any:
            faults.begin(batch.position)
            time.sleep(pause)
            return losses(model, batch)

        return replace(parts, task=SimpleNamespace(**{**vars(parts.task), "losses": with_faults}))  # type: ignore[arg-type]

    patch.setattr(stages, "build", disturbed)
    patch.setattr(stages, "build_state", staged_run.make_state)


def run(workdir: Path, exchange: ls.AllReduce) -> Result:
    """Run it on this worker, once the parts are patched."""
    return ls.run(make_recipe(exchange), workdir, reader=lambda split: None)


def main() -> None:
    transport = "gloo" if "gloo" in sys.argv else None
    patch_parts(pytest.MonkeyPatch(), [each for each in sys.argv[2:] if ":" in each])
    run(Path(sys.argv[1]), ls.AllReduce(transport, exact=True))


if __name__ == "__main__":
    main()
