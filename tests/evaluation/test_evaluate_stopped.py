"""An evaluation that a signal interrupts: on all workers, whichever of them it reaches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.evaluation.evaluate import evaluate_unless_stopped

BATCHES = 8


def results(asked: int | None) -> list[Any]:
    """Of an evaluation in whose second batch a worker is asked to stop: examples, batches; examples of another one."""
    here = ls.join("cpu")
    scored = 0

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
        nonlocal scored
        scored += 1
        if here.rank == asked and scored == 2:
            here.pulse.stop_requested = "SIGTERM"
        values = model(batch["x"]).squeeze(1)
        return {"y": values, "wrong": (values.detach(), torch.zeros(2), torch.ones(2), torch.arange(2))}

    state = ls.TrainState(nn.Linear(1, 1), ls.optim.SGD(0.1))
    reader = ls.data.Arrays({"x": torch.ones(2 * BATCHES * here.num_workers, 1)})
    loader = ls.data.Loader(reader, batch_size=2)
    metrics = {"wrong": ls.metrics.WorstMistakes()}
    result, seen = evaluate_unless_stopped(state, score, loader, metrics=metrics), scored
    # Who asks for an evaluation that nothing stops gets it.
    complete = ls.evaluate(state, score, loader, metrics=metrics)
    assert len(complete.computed["wrong"]) == metrics["wrong"].count
    return [result and result.num_examples, seen, complete.num_examples]


@pytest.mark.process
def test_a_stopped_evaluation_ends_on_all_workers(run_workers: Callable[..., list[Any]]) -> None:
    first, second = run_workers(results, 2, 1)
    assert (first[0], second[0]) == (None, None)
    assert (second[1], first[2], second[2]) == (2, 4 * BATCHES, 4 * BATCHES)


@pytest.mark.parametrize(("asked", "expected"), [(None, [2 * BATCHES, BATCHES]), (0, [None, 2])])
def test_alone(asked: int | None, expected: list[int | None]) -> None:
    assert results(asked) == [*expected, 2 * BATCHES]
