"""How often the host waits for an accelerator while a model is scored."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from device_calls import DeviceCalls, accelerator, counted
from torch import Tensor

import lockstep as ls
from lockstep.models.values import Mnist
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import with_settings

MICRO_BATCH = 4


class Kept:
    """A metric that reads what it is given."""

    def reset(self) -> None:
        self.labels: list[int] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self.labels += labels.tolist()

    def compute(self) -> list[int]:
        return self.labels


def scored(num_micro_batches: int, recipe: Recipe, metrics: dict[str, Any]) -> tuple[DeviceCalls, ls.Evaluation]:
    """Score micro-batches that are on the device as a run does, with the branches of an accelerator."""
    size = MICRO_BATCH * num_micro_batches
    digits = {"image": torch.zeros(size, 1, 28, 28, dtype=torch.uint8), "label": torch.arange(size) % 10}
    loader = ls.data.Loader(ls.data.Arrays(digits), batch_size=MICRO_BATCH)
    batches = [*loader.evaluation_batches(MICRO_BATCH, 0, 1)]
    loader.evaluation_batches = lambda *_, **__: (batch for batch in batches)  # type: ignore[assignment, misc]
    state = ls.TrainState(Mnist().build(0), ls.optim.SGD(0.1))
    score = recipe.chosen_task.with_metrics({}, metrics).score
    with accelerator(), counted() as calls:
        result = ls.evaluate(state, score, loader, precision=recipe.evaluation_precision, metrics=metrics)
    return calls, result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("metrics", [[], ["kept"]])
def test_the_host_waits_for_no_micro_batch_that_has_just_begun(precision: str, metrics: list[str]) -> None:
    recipe = with_settings(find("mnist"), [f"evaluate.precision={precision}", "evaluate.top=[1, 3]"])
    waits = {}
    for number in (2, 6):
        calls, result = scored(number, recipe, {name: Kept() for name in metrics})
        waits[number] = Counter(call.line.partition(":")[0] for call in calls.waits)
        assert result.num_examples == number * MICRO_BATCH
    assert waits[2] == waits[6], "they do not grow with the number of micro-batches"
    assert sum(waits[2].values()) <= 1 + len(metrics)
