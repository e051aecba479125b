"""Runs whose checkpoints are made by hand, without training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

import lockstep as ls
from lockstep.checkpoints.store import Store
from lockstep.models import SqueezeNet
from lockstep.recipes.data import ImageData
from lockstep.recipes.parts import DataLoading
from lockstep.recipes.preprocessing import Inception
from lockstep.recipes.recipe import Recipe
from lockstep.runs.workdir import Workdir


def saved(
    folder: Path,
    given: Recipe,
    *steps: int,
    change: Callable[[nn.Module], None] | None = None,
    average: float = 1.25,
) -> ls.TrainState:
    """Make a run with a checkpoint of step 7, or of these steps, whose averages are so many times its weights."""
    model = given.model.build(1)
    if change is not None:
        change(model)
    state = ls.TrainState(model, given.optimizer, average=given.average)
    for tensor in state.averages().values():
        tensor.mul_(average)
    folder.mkdir()
    Workdir(folder).write_recipe(given)
    for step in steps or (7,):
        stream = {"seed": 0, "position": step * given.batch_size, "epoch_size": 100}
        values = {"loader": stream, "states": {"": {**state.values(), "step": step}}}
        Store(folder / "checkpoints").write(step, state.sections(), values)
    return state


def recipe_of_photos(num_classes: int = 3, **data: Any) -> Recipe:
    """A small net for photos of 32 pixels."""
    return Recipe(
        name="few",
        model=SqueezeNet(num_classes=num_classes),
        data=ImageData(image_size=32, preprocessing=Inception(), **data),
        optimizer=ls.optim.SGD(0.1),
        batch_size=2,
        feed=DataLoading(num_processes=0),
    )
