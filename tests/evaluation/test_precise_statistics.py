"""Batch-norm statistics computed afresh before an evaluation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.evaluation.precise_statistics import PreciseStatistics, recompute_statistics


def make_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))


def double(fields: Any, draws: Any) -> Any:
    """An augmentation that shows."""
    return {**fields, "x": 2 * fields["x"]}


def make_loader(augment: Any = None) -> ls.data.Loader:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(1)) * 3 + 5
    return ls.data.Loader(ls.data.Arrays({"x": x}), batch_size=8, seed=4, augment=augment)


def score(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"y": model(batch["x"])[:, 0]}


def batches(loader: ls.data.Loader, position: int, count: int) -> list[Tensor]:
    loader.position = position
    stream = loader.batches(range(1), 1)
    return [next(stream)["x"] for _ in range(count)]


def recomputed(**given: Any) -> nn.Module:
    model = make_model()
    recompute_statistics(model, score, PreciseStatistics(**given), ls.join())
    return model


@pytest.mark.parametrize(("augment", "factor"), [(None, 1.0), (double, 2.0)])
@pytest.mark.parametrize("position", [0, 16])
def test_precise_statistics_are_the_means_over_the_batches(augment: Any, factor: float, position: int) -> None:
    model = recomputed(loader=make_loader(augment), num_batches=3, position=position)
    first, linear, _, second, _ = model
    inputs = [factor * x for x in batches(make_loader(), position, 3)]
    # The second norm sees what the first makes of the batch itself, and no dropout.
    hidden = [linear((x - x.mean(0)) / (x.var(0, correction=0) + first.eps).sqrt()).detach() for x in inputs]
    for norm, values in ((first, inputs), (second, hidden)):
        torch.testing.assert_close(norm.running_mean, torch.stack([v.mean(0) for v in values]).mean(0))
        torch.testing.assert_close(norm.running_var, torch.stack([v.var(0) for v in values]).mean(0))
    assert not any(module.training for module in model.modules())


def test_the_sums_are_kept_in_float64() -> None:
    means = torch.tensor([2.0**24, *[1.0] * 7])  # in float32, 2**24 + 1 is 2**24
    loader = ls.data.Loader(
        ls.data.Arrays({"x": means.repeat_interleave(2)[:, None]}), batch_size=2, order="sequential"
    )
    norm = nn.BatchNorm1d(1)
    recompute_statistics(norm, score, PreciseStatistics(loader, num_batches=8), ls.join())
    assert norm.running_mean.item() == torch.tensor((2**24 + 7) / 8).item()


def test_the_loader_does_not_move() -> None:
    loader = make_loader()
    loader.position = 24
    recomputed(loader=loader, num_batches=2)
    assert loader.position == 24


def test_a_norm_that_runs_twice_has_the_mean_of_both() -> None:
    norm = nn.BatchNorm1d(3)

    def twice(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"y": (model(batch["x"]) + model(batch["x"] * 3))[:, 0]}

    recompute_statistics(norm, twice, PreciseStatistics(make_loader(), num_batches=1), ls.join())
    torch.testing.assert_close(norm.running_mean, 2 * batches(make_loader(), 0, 1)[0].mean(0))


def test_statistics_that_training_leaves_alone_stay() -> None:
    model = make_model()
    model[0].eval()
    recompute_statistics(model, score, PreciseStatistics(make_loader(), num_batches=1), ls.join())
    assert torch.equal(model[0].running_mean, torch.zeros(3))
    assert not torch.equal(model[3].running_mean, torch.zeros(4))


def make_state() -> ls.TrainState:
    return ls.TrainState(make_model(), ls.optim.SGD(0.1), average=ls.optim.MovingAverage(0.5, dynamic=False))


def evaluated(weights: Any = "raw") -> str:
    statistics = PreciseStatistics(make_loader(), num_batches=3)
    return ls.evaluate(make_state(), score, make_loader(), weights=weights, statistics=statistics)["y"].hex()


def test_an_evaluation_scores_with_them_and_leaves_the_trained_model_alone() -> None:
    state, statistics = make_state(), PreciseStatistics(make_loader(), num_batches=3)
    for average in state.averaged().values():
        average.mul_(3.0)
    before = copy.deepcopy(state.model.state_dict())
    scores = []
    for weights in ("raw", "average"):
        expected = recomputed_with(state.averaged() if weights == "average" else {}, statistics)
        found = ls.evaluate(state, score, make_loader(), weights=weights, statistics=statistics)
        scores.append(float(found["y"]))
        assert found["y"] == pytest.approx(ls.evaluate(as_state(expected), score, make_loader())["y"], rel=1e-12)
    assert scores[0] != scores[1]
    assert all(module.training for module in state.model.modules())
    assert all(torch.equal(value, before[name]) for name, value in state.model.state_dict().items())


def recomputed_with(weights: dict[str, Tensor], statistics: PreciseStatistics) -> nn.Module:
    model = make_model()
    model.load_state_dict(weights, strict=False)
    recompute_statistics(model, score, statistics, ls.join())
    return model


def as_state(model: nn.Module) -> ls.TrainState:
    return ls.TrainState(model, ls.optim.SGD(0.1))


@pytest.mark.process
def test_the_same_bits_for_every_number_of_workers(run_workers: Callable[..., list[Any]]) -> None:
    alone = evaluated()
    assert run_workers(evaluated, 2) == [alone, alone]


def test_a_model_without_batch_norm_is_refused() -> None:
    state = ls.TrainState(nn.Linear(3, 1), ls.optim.SGD(0.1))
    with pytest.raises(
        ls.InputError, match=r"no batch-norm statistics to compute afresh(.|\n)*leave the statistics out"
    ):
        ls.evaluate(state, score, make_loader(), statistics=PreciseStatistics(make_loader()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_batches": 0}, r"num_batches is out of range\.\n.*num_batches=0\n.*1 or more"),
        ({"position": -1}, r"position is out of range\.\n.*position=-1\n.*0 or more"),
        ({"loader": "photos"}, r"loader is of the wrong type\.\n.*str\n.*a Loader\n.*training examples"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ls.InputError, match=message):
        PreciseStatistics(**{"loader": make_loader(), **given})
