"""Metrics of torchmetrics, as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.exchange.collectives import collectives

pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

SIZE, NUM_CLASSES = 50, 4


def fields() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, NUM_CLASSES, (SIZE,), generator=generator)
    return {"x": torch.randn(SIZE, NUM_CLASSES, generator=generator), "label": labels}


def make_metrics() -> dict[str, Any]:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAUROC, MulticlassConfusionMatrix, MulticlassF1Score

    both = MetricCollection([MulticlassAUROC(NUM_CLASSES, average="macro"), MulticlassF1Score(NUM_CLASSES)])
    return {"auroc": MulticlassAUROC(NUM_CLASSES), "cells": MulticlassConfusionMatrix(NUM_CLASSES), "both": both}


def evaluated() -> Any:
    def score(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
        return {name: (model(batch["x"]), batch["label"]) for name in make_metrics()}

    here = ls.join()
    if here.num_workers > 1:
        collectives(here, "gloo")  # as a run has on several hosts: the metrics could gather by themselves
    state = ls.TrainState(nn.BatchNorm1d(NUM_CLASSES), ls.optim.SGD(0.1))
    loader = ls.data.Loader(ls.data.Arrays(fields()), batch_size=8)
    return ls.evaluate(state, score, loader, metrics=make_metrics()).computed


def test_metrics_of_torchmetrics_compute_what_they_do_alone() -> None:
    model, data, metrics = nn.BatchNorm1d(NUM_CLASSES).eval(), fields(), make_metrics()
    for metric in metrics.values():
        metric.update(model(data["x"]).detach(), data["label"])
    found = evaluated()
    assert found["auroc"] == pytest.approx(float(metrics["auroc"].compute()), rel=1e-6)
    assert found["cells"] == metrics["cells"].compute().tolist()
    assert found["both"] == pytest.approx({n: float(v) for n, v in metrics["both"].compute().items()}, rel=1e-6)


@pytest.mark.process
def test_metrics_of_torchmetrics_have_the_same_bits_for_every_number_of_workers(
    run_workers: Callable[..., list[Any]],
) -> None:
    alone = evaluated()
    assert run_workers(evaluated, 3) == [alone] * 3
