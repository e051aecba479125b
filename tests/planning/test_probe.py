"""What is measured of a recipe: on one worker, in this process; two workers are in `tests/cli/test_plan.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lockstep.planning.model import RunCosts, Seating, predict_step
from lockstep.planning.probe import probe_run
from lockstep.recipes.recipe import Recipe
from lockstep.workers.rank import join

WIDTH, HIDDEN = 64, 4096
opened: list[str] = []


class Net(nn.Sequential):
    """Of 3.4 MB, so that its gradients are sent in two buckets or more."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 128), nn.Linear(128, 10))


def reader(split: str) -> dict[str, Tensor] | None:
    opened.append(split)
    return {"x": torch.randn(64, WIDTH), "y": torch.arange(64) % 10} if split == "train" else None


def losses(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    return {"cross_entropy": cross_entropy(model(batch["x"]), batch["y"])}


@pytest.fixture
def recipe() -> Recipe:
    return Recipe.of(Net, reader, losses, batch_size=16, num_towers=4, device="cpu")


def costs_of(recipe: Recipe, *numbers: int, per_host: int) -> RunCosts:
    seatings = [Seating.of(recipe, number, per_host) for number in numbers]
    with TemporaryDirectory() as folder:
        return probe_run(recipe, seatings, per_host, 0.2, join("cpu"), Path(folder))


def test_one_worker_is_measured(recipe: Recipe) -> None:
    threads = torch.get_num_threads()
    opened.clear()
    found = costs_of(recipe, 1, 2, per_host=2)
    num_bytes = 4 * sum(parameter.numel() for parameter in Net().parameters())
    [cost] = found.workers
    assert (cost.num_local, cost.tower_size, found.batch_size, found.epoch_size) == (1, 4, 16, 64)
    assert cost.tower_bytes == 4 * (WIDTH * 4 + 8)
    assert num_bytes < found.gradient_bytes < 1.01 * num_bytes, "losses travel with the gradients"
    assert [bucket.early_seconds for bucket in found.buckets] == [0.0] * len(found.buckets), "nothing is sent early"
    assert 3 * num_bytes < found.save.num_bytes < 3.1 * num_bytes, "AdamW keeps two numbers beside each"
    assert min(cost.first_seconds, cost.first_cpu_seconds, cost.update_seconds, found.save.seconds) > 0
    assert cost.memory_bytes > num_bytes
    assert (found.shared_memory, found.messages, found.reads_ahead) == (None, None, False)
    assert predict_step(found, recipe, 1).step_seconds > cost.first_seconds
    assert torch.get_num_threads() == threads
    assert sorted(opened) == ["test", "train", "validation"], "a large data set takes long to open: each split once"


def test_gradients_that_are_sent_as_they_come_are_there_before_the_end(recipe: Recipe) -> None:
    found = costs_of(recipe, 1, 2, per_host=1)
    early = [bucket.early_seconds for bucket in found.buckets]
    assert early[0] > early[-1] == 0.0, "the last layer's gradients come first, and the losses last"
    assert early == sorted(early, reverse=True)


def test_each_size_of_tower_is_measured(recipe: Recipe) -> None:
    found = costs_of(replace(recipe, num_towers=None), 1, 4, per_host=4)
    assert [(cost.num_local, cost.tower_size) for cost in found.workers] == [(1, 4), (1, 16)]
    assert all(cost.further_seconds == 0.0 for cost in found.workers), "no worker has two"
