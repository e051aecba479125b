"""A run of three stages on tiny data: what is trained, the optimizer and the size of the images change.

Its network, task and examples are a script's own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.checkpoints.retention import Retention
from lockstep.recipes.code import Function
from lockstep.recipes.data import ImageData
from lockstep.recipes.parts import Checkpoints, Evaluate, Monitoring, Stage
from lockstep.recipes.preprocessing import Cifarnet
from lockstep.recipes.python_parts import PythonModel, PythonTask
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.runs.run import Run
from lockstep.runs.workdir import Result
from lockstep.workers.rank import leave

BATCH_SIZE, NUM_EXAMPLES = 4, 10
BOUNDARIES, STEPS = (3, 5), 8
HEAD = r"^head\."
STAGES = (
    Stage(ls.Steps(3), optimizer=ls.optim.SGD(0.1, momentum=0.9), train_only=(HEAD,)),
    Stage(ls.Epochs(1), optimizer=ls.optim.SGD(ls.optim.Exponential(0.2, 1, 0.5), momentum=0.9)),
    Stage(ls.Steps(3), optimizer=ls.optim.Adam(0.01), frozen=(r"^head\.bias$",), image_size=32),
)
"""An epoch is two whole batches, and a half."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(3, 5)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(F.relu(self.norm(self.conv(images))).mean((2, 3))))
        return logits


@dataclass
class Disturbance:
    """What befalls a start of the run."""

    bad: Sequence[int] = ()
    """Positions of batches that are not finite."""
    skipped: Sequence[int] = ()
    """Positions of batches that it is told to skip from the start."""
    attempted: Callable[[int], None] = lambda position: None
    """Told of the position of each batch."""
    sizes: list[int] = field(default_factory=list)
    """Of the images that were scored."""


NOTHING = Disturbance()


def reader(split: str) -> dict[str, Tensor] | None:
    """Examples to train on and to validate, none to test."""
    seeds = {"train": 6, "validation": 7}
    if split not in seeds:
        return None
    generator = torch.Generator().manual_seed(seeds[split])
    images = torch.randint(0, 256, (NUM_EXAMPLES, 3, 36, 36), generator=generator, dtype=torch.uint8)
    return {"image": images, "label": torch.randint(0, 5, (NUM_EXAMPLES,), generator=generator)}


def make_task(what: Disturbance) -> PythonTask:
    """What the tiny run learns."""

    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        if batch.towers.start == 0:
            what.attempted(batch.position)
        loss = F.cross_entropy(model(batch["image"] / 255 - 0.5), batch["label"])
        return {"cross_entropy": loss * (math.nan if batch.position in what.bad else 1.0)}

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        what.sizes.append(batch["image"].shape[-1])
        logits = model(batch["image"] / 255 - 0.5)
        return {"loss": F.cross_entropy(logits, batch["label"], reduction="none")}

    # What befalls a start, which these hold, is no part of the recipe.
    return PythonTask(losses=Function(__name__, "losses", code=losses), score=Function(__name__, "score", code=score))


def make_recipe(every: int = 2, **more: Any) -> Recipe:
    """It saves after every so many steps, and scores after every second."""
    given: dict[str, Any] = {
        "model": PythonModel(Function.of(Net)),
        "data": ImageData(image_size=28, preprocessing=Cifarnet(), function=Function.of(reader)),
        "seed": 5,
        "batch_size": BATCH_SIZE,
        "num_towers": 2,
        "average": ls.optim.MovingAverage(0.9, statistics=True),
        "regularization": (ls.losses.L2(1e-2),),
        "exchange": ls.AllReduce(exact=True),
        "end": None,
        "stages": STAGES,
        "checkpoints": Checkpoints(
            ls.Interval(every), Retention(newest=50, best="validation/loss", better="lower", keep_best=2)
        ),
        "watch": Monitoring(metrics=ls.Interval(1), summaries=ls.Interval(0), console=ls.Interval(0)),
        "evaluate": Evaluate(ls.Interval(2), weights="average"),
    }
    return replace(find("mnist"), task=make_task(NOTHING), **{**given, **more})


def run(workdir: Path, given: Recipe, what: Disturbance = NOTHING, fork_from: str | None = None) -> Result:
    """A start of the run in this process."""
    leave()
    return start(workdir, given, what, fork_from).run()


def start(workdir: Path, given: Recipe, what: Disturbance = NOTHING, fork_from: str | None = None) -> Run:
    """A start of the run on this worker, that is yet to be made."""
    worker = ls.join("cpu")
    worker.pulse.stop_requested = None
    made = Run(replace(given, task=make_task(what)), workdir, worker, fork_from=fork_from)
    for position in what.skipped:
        made._stages.parts.loader.skip(position)
    return made


def contents(workdir: Path) -> dict[str, bytes]:
    """What the run has learned, said and come to, but for times."""
    result = json.loads((workdir / "result.json").read_text())
    del result["times"]
    newest = workdir / f"checkpoints/step-{STEPS:08d}"
    files = [path for path in newest.iterdir() if path.name != "manifest.json"]
    found = {path.name: path.read_bytes() for path in [*files, workdir / "metrics.jsonl"]}
    return {**found, "result.json": json.dumps(result).encode()}


def lines(workdir: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a file of JSON."""
    return [json.loads(line) for line in (workdir / name).read_text().splitlines()]
