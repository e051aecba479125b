"""Which weights are scored, and over how many examples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls

SIZE, NUM_CLASSES = 53, 8


def make_state(*, statistics: bool) -> ls.TrainState:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, NUM_CLASSES))
    average = ls.optim.MovingAverage(0.5, dynamic=False, statistics=statistics)
    return ls.TrainState(model, ls.optim.SGD(0.5), average=average, frozen=("2.*",))


def make_loader() -> ls.data.Loader:
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(0, NUM_CLASSES, (SIZE,), generator=generator)
    fields = {"x": torch.randn(SIZE, 4, generator=generator), "label": labels}
    return ls.data.Loader(ls.data.Arrays(fields), batch_size=10)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"cross_entropy": nn.functional.cross_entropy(model(batch["x"]), batch["label"])}


def scored_tensors(state: ls.TrainState, weights: Any) -> tuple[dict[str, Tensor], ls.Evaluation]:
    """The parameters and buffers of the model that is scored."""
    scored: dict[str, Tensor] = {}

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        scored.update({name: value.clone() for name, value in model.state_dict().items()})
        return {"one": torch.ones(10)}

    result = ls.evaluate(state, score, make_loader(), weights=weights)
    return scored, result


@pytest.mark.parametrize("statistics", [True, False])
def test_averages_are_scored_where_there_are_some_and_the_rest_as_it_is(statistics: bool) -> None:
    state = make_state(statistics=statistics)
    raw_at_first = {name: value.clone() for name, value in state.model.state_dict().items()}
    ls.train(state, losses, make_loader(), until=ls.Steps(3))
    raw, trained = state.model.state_dict(), {"0.weight", "1.weight", "1.bias"}
    moved = {"1.running_mean", "1.running_var"}
    averages = state.averaged()
    assert set(averages) == trained | (moved if statistics else set())
    scored, result = scored_tensors(state, "average")
    for name, value in raw.items():
        # The average of three updates that begins at the first values is neither these nor the last ones.
        assert torch.equal(scored[name], averages.get(name, value)), name
        assert torch.equal(scored[name], value) == (name not in averages), name
        assert torch.equal(scored[name], raw_at_first[name]) == name.startswith("2."), name
    assert (result.weights, result.step) == ("average", 3)
    assert str(result) == "one 1.0000 over 53 examples with averaged weights"


def test_raw_weights_are_those_under_training() -> None:
    state = make_state(statistics=True)
    ls.train(state, losses, make_loader(), until=ls.Steps(2))
    scored, result = scored_tensors(state, "raw")
    assert all(torch.equal(scored[name], value) for name, value in state.model.state_dict().items())
    assert (result.weights, result.step) == ("raw", 2)
    assert str(result) == "one 1.0000 over 53 examples"


def precision_and_recall(micro_batch: int) -> list[float]:
    def score(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        logits = model(batch["x"])
        return {f"top{k}": ls.metrics.in_top_k(logits, batch["label"], k) for k in (1, 5)}

    result = ls.evaluate(make_state(statistics=False), score, make_loader(), micro_batch=micro_batch)
    return [result.num_examples, result.sums["top1"], result.sums["top5"], result["top5"]]


@pytest.mark.process
def test_precision_at_1_and_recall_at_5_are_over_each_example_once(run_workers: Callable[..., list[Any]]) -> None:
    state, fields = make_state(statistics=False), make_loader().reader.read_batch(torch.arange(SIZE).numpy())
    with torch.no_grad():
        best = state.model.eval()(fields["x"]).topk(5).indices == fields["label"][:, None]
    right, among_five = int(best[:, 0].sum()), int(best.sum())
    assert 0 < right < among_five < SIZE
    expected = [SIZE, right, among_five, among_five / SIZE]
    for micro_batch in (10, 53, 64):  # the last one not full, the only one full, the only one not full
        assert precision_and_recall(micro_batch) == expected
    assert run_workers(precision_and_recall, 3, 10) == [expected] * 3


def test_a_state_that_is_loaded_is_scored_to_the_bits_of_the_one_that_was_saved(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(0, NUM_CLASSES, (SIZE,), generator=generator)
    fields = {"x": torch.randn(SIZE, 1, 28, 28, generator=generator), "label": labels}
    loader = ls.data.Loader(ls.data.Arrays(fields), batch_size=10)

    def convolutional() -> ls.TrainState:
        torch.manual_seed(3)
        means = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), *means, nn.Linear(3, NUM_CLASSES))
        return ls.TrainState(net, ls.optim.SGD(0.5), average=ls.optim.MovingAverage(0.5))

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"cross_entropy": nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")}

    state = convolutional()
    ls.train(state, losses, loader, towers=ls.Towers(2, channels_last=True), until=ls.Steps(2))
    ls.save(state, loader, tmp_path)
    loaded = convolutional()
    ls.resume(loaded, loader, tmp_path)
    for weights in ("raw", "average"):
        assert ls.evaluate(loaded, score, loader, weights=weights) == ls.evaluate(state, score, loader, weights=weights)
