"""A small run on a bucket: its batch norm, dropout and average tell whether all of its state comes back."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.recipes.recipe import Recipe
from lockstep.run_files import LATEST
from lockstep.storage.remote_path import RemotePath
from lockstep.types import Interval

STEPS, SAVE_EVERY = 12, 3
BAD_POSITION, LOST_AT = 32, 8
"""Where a loss is not finite, after step 4; and the step after which the chief of several hosts is lost."""


def stripes(split: str) -> ls.data.Reader | None:
    """Grey images with a bright upper or lower half."""
    if split == "validation":
        return None
    labels = torch.arange(40 if split == "train" else 12) % 2
    images = torch.zeros(len(labels), 1, 28, 28, dtype=torch.uint8)
    images[labels == 0, :, :14] = 200
    images[labels == 1, :, 14:] = 200
    return ls.data.Arrays({"image": images, "label": labels})


def tiny() -> nn.Module:
    return nn.Sequential(
        nn.MaxPool2d(4), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.3), nn.Linear(100, 2)
    )


def small_recipe(steps: int = STEPS) -> Recipe:
    recipe = ls.recipes.find("mnist")
    return replace(
        recipe,
        name="small",
        data=ls.recipes.ImageData(image_size=28, preprocessing=ls.recipes.preprocessing.Lenet()),
        optimizer=ls.optim.SGD(0.01, momentum=0.9),
        batch_size=8,
        num_towers=2,
        num_threads=1,
        end=ls.Steps(steps),
        checkpoints=replace(recipe.checkpoints, every=Interval(SAVE_EVERY)),
        device="cpu",
    )


class FromImages(nn.Module):
    """The same network for images of a folder, which have three channels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny()

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(image.mean(1, keepdim=True))
        return logits


def train_stored(data: str, workdir: str | Path, steps: int = STEPS) -> Any:
    """Train on a folder of images in a store, each of which is asked for each time it is read."""
    recipe = small_recipe(steps)
    read = replace(recipe.data, train=data, cache_gb=0.0)
    return ls.run(replace(recipe, data=read, feed=replace(recipe.feed, num_processes=0)), workdir, model=FromImages)


def train(workdir: str | Path, steps: int = STEPS, **options: Any) -> Any:
    return ls.run(small_recipe(steps), workdir, **{"model": tiny, "reader": stripes, **options})


def not_always_finite(model: nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
    mean = F.cross_entropy(model(batch["image"].float() / 255), batch["label"])
    return {"cross_entropy": mean * float("nan") if batch.position == BAD_POSITION else mean}


def train_on_hosts(workdir: str | Path, lost: str = "", step_seconds: float = 0.0) -> Any:
    """Train in exact mode, go back to a checkpoint once, and lose the chief once, which leaves the file `lost`.

    By then something of the run is on the bucket.
    """
    recipe = small_recipe()
    watch = replace(recipe.watch, on_failure="continue" if lost else "restart")
    recipe = replace(recipe, exchange=ls.AllReduce(exact=True), nonfinite="rollback", watch=watch)

    def wait_or_die(report: ls.StepReport) -> None:
        time.sleep(step_seconds)
        if lost and report.step == LOST_AT and ls.join().is_chief and not Path(lost).exists():
            Path(lost).touch()
            while not (RemotePath(str(workdir)) / LATEST).exists():
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)

    parts = {"model": tiny, "reader": stripes, "losses": not_always_finite}
    return ls.run(recipe, workdir, **parts, hooks=[wait_or_die])
