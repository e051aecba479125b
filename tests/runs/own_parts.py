"""A network, a task and examples of a user's own, as a module that recipes name: a regression with its own metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import lockstep as ls

SIZES = {"train": 48, "validation": 12, "test": 10}
WIDTH = 6


class Net(nn.Module):
    """A layer that is used twice, one that is frozen by its recipe, batch norm, and rows of an embedding."""

    def __init__(self, width: int = WIDTH, *, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(9, width, sparse=sparse)
        self.shared = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width)
        self.last = nn.Linear(width, 1)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.norm(self.shared(self.shared(self.words(words)).tanh()))
        found: Tensor = self.last(self.frozen(hidden)).squeeze(1)
        return found


def reader(split: str, scale: float = 1.0) -> dict[str, Tensor] | None:
    """Words, and a number for each."""
    if split not in SIZES:
        return None
    words = torch.arange(SIZES[split]) * 5 % 9
    return {"words": words, "wanted": scale * (words.float() - 4).sin()}


def losses(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    return {"mse": (model(batch["words"]) - batch["wanted"]).square().mean()}


def score(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    found = model(batch["words"])
    return {"mae": (found - batch["wanted"]).abs(), "furthest": (found, batch["wanted"])}


class Furthest:
    """The largest error of all."""

    def reset(self) -> None:
        self.most = 0.0

    def update(self, found: Tensor, wanted: Tensor) -> None:
        self.most = max(self.most, float((found - wanted).abs().max()))

    def compute(self) -> float:
        return self.most


class Regression:
    """The same as an object, with its metric and what it predicts."""

    main_score, better = "mae", "lower"

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.metrics = {"furthest": Furthest()}

    def losses(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        return {"mse": self.weight * losses(model, batch)["mse"]}

    def score(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        return score(model, batch)


def brightness_losses(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """How bright images are, from their pixels; nobody needs their labels."""
    images = batch["image"].float() / 255
    return {"mse": (model(images)[:, 0] - images.mean((1, 2, 3))).square().mean()}


def brightness(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    return {"brightness": model(batch["image"].float() / 255)[:, 0]}


class Pixels(nn.Module):
    """A classifier of images of any size."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.last = nn.Linear(4, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.last(self.conv(images).relu().mean((2, 3)))
        return logits


seen: list[int] = []


def hook(report: ls.StepReport, every: int = 1) -> None:
    if report.step % every == 0:
        seen.append(report.step)
