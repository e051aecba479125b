"""A run of three stages on tiny data: what is trained, the optimizer and the size of the images change."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.augmentations.turns import RandomShift
from lockstep.checkpoints.retention import Retention
from lockstep.data.loader import Loader
from lockstep.description import described
from lockstep.randomness import Draws
from lockstep.readers.reader import Arrays, Reader
from lockstep.recipes.data import ImageData
from lockstep.recipes.parts import Checkpoints, Evaluate, Monitoring, Stage
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.runs import stages
from lockstep.runs.build import Parts
from lockstep.runs.run import Run
from lockstep.runs.workdir import Result
from lockstep.workers.rank import Worker, leave

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
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(3, 5)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(F.relu(self.norm(self.conv(images))).mean((2, 3))))
        return logits


class Corner:
    """A corner of the images, of some size."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, batch: dict[str, Any], draws: Draws) -> dict[str, Any]:
        return {**batch, "image": batch["image"][..., : self._size, : self._size]}


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


class Scored:
    """The examples to score: some of validation, none to test."""

    trained_classes = ()

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def has(self, split: str) -> bool:
        return split == "validation"

    def held_out(self, split: str) -> Loader:
        return self._loader

    def reader(self, split: str) -> Reader:
        return self._loader.reader


def make_loader(size: int, seed: int) -> Loader:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (NUM_EXAMPLES, 1, 36, 36), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 5, (NUM_EXAMPLES,), generator=generator)
    arrays = Arrays({"image": images, "label": labels})
    return Loader(arrays, batch_size=BATCH_SIZE, seed=5, augment=[RandomShift(2), Corner(size)])


def make_state(given: Recipe, worker: Worker) -> ls.TrainState:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(given.seed)
        net = Net()
    state = ls.TrainState(
        net,
        given.optimizer,
        train_only=given.train_only,
        frozen=given.frozen,
        average=given.average,
        regularization=given.regularization,
        nonfinite=given.nonfinite,
    )
    state.train_with(towers=described(given.towers_for(worker.num_workers)), exchange=described(given.exchange))
    return state


def make_build(what: Disturbance) -> Any:
    """A `build` of the tiny run."""

    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        if batch.towers.start == 0:
            what.attempted(batch.position)
        loss = F.cross_entropy(model(batch["image"] / 255 - 0.5), batch["label"])
        return {"cross_entropy": loss * (math.nan if batch.position in what.bad else 1.0)}

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        what.sizes.append(batch["image"].shape[-1])
        logits = model(batch["image"] / 255 - 0.5)
        return {"loss": F.cross_entropy(logits, batch["label"], reduction="none")}

    def build(given: Recipe, worker: Worker, *_: object) -> Parts:
        loader = make_loader(given.data.image_size, seed=6)
        for position in what.skipped:
            loader.skip(position)
        task: Any = SimpleNamespace(losses=losses, counts=lambda model: None, score=score, metrics={})
        scored: Any = Scored(make_loader(given.data.image_size, seed=7))
        return Parts(make_state(given, worker), loader, given.towers_for(worker.num_workers), task, scored)

    return build


def make_recipe(every: int = 2, **more: Any) -> Recipe:
    """It saves after every so many steps, and scores after every second."""
    given: dict[str, Any] = {
        "data": ImageData(train="anywhere", image_size=28),
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
    return replace(find("mnist"), **{**given, **more})


NOTHING = Disturbance()


def run(workdir: Path, given: Recipe, what: Disturbance = NOTHING, fork_from: str | None = None) -> Result:
    """A start of the run in this process."""
    before = stages.build, stages.build_state
    stages.build, stages.build_state = make_build(what), make_state
    leave()
    try:
        # A function gives the examples: the recipe's path leads nowhere, and its scores are not those of a classifier.
        return Run(given, workdir, ls.join("cpu"), fork_from=fork_from, reader=lambda split: None).run()
    finally:
        stages.build, stages.build_state = before


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
