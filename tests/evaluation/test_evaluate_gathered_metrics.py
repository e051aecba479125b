"""Metrics that see whole outputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.evaluation import evaluate as evaluation
from lockstep.exchange.collectives import collectives
from lockstep.workers.group import MAX_VALUE_BYTES

SIZE, MICRO_BATCH = 11, 4


def evaluated(score: Callable[..., Any], metrics: Any) -> ls.Evaluation:
    """Of examples that are their own index; the last micro-batch has one row of padding."""
    state = ls.TrainState(nn.Linear(1, 1), ls.optim.SGD(0.1))
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.arange(SIZE)}), batch_size=MICRO_BATCH)
    return ls.evaluate(state, score, loader, metrics=metrics)


def score(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
    return {"seen": (batch["x"], batch["x"].float())}


class Seen:
    """A metric that keeps what it is given, and says `value`."""

    def __init__(self, value: Any = 0) -> None:
        self.value, self.calls = value, list[Any]()

    def reset(self) -> None:
        self.calls.append("reset")

    def update(self, x: Tensor, y: Tensor) -> None:
        assert torch.equal(x.float(), y)
        self.calls.append(x.tolist())

    def compute(self) -> Any:
        self.calls.append("compute")
        return self.value


def test_a_metric_is_reset_updated_once_a_micro_batch_and_computed_once() -> None:
    metric = Seen()
    result = evaluated(score, {"seen": metric})
    assert metric.calls == ["reset", [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10], "compute"]
    assert (result.num_examples, result.sums, str(result)) == (SIZE, {}, "seen 0.0000 over 11 examples")


class Pair(NamedTuple):
    """A value with names."""

    low: Tensor
    high: float


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(0.1), float(torch.tensor(0.1))),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ((np.float32(0.5), np.arange(2)), [0.5, [0, 1]]),
        ([Pair(torch.tensor(1), 2.0)], [{"low": 1, "high": 2.0}]),
        ({3: torch.tensor([True]), "name": None}, {"3": [True], "name": None}),
    ],
)
def test_computed_values_become_json(value: Any, expected: Any) -> None:
    assert evaluated(score, {"seen": Seen(value)}).computed == {"seen": expected}


def test_the_numbers_of_a_metric_are_scores() -> None:
    result = evaluated(score, {"seen": Seen({"low": torch.tensor(0.25), "each": torch.tensor([1.0, 2.0])})})
    assert result.scores == result.facts["scores"] == {"seen/low": 0.25}
    assert result["seen/low"] == 0.25
    assert str(result) == "seen/low 0.2500 over 11 examples"
    with pytest.raises(ls.InputError, match="cannot be 'seen/high'"):
        result["seen/high"]


def test_of_many_scores_a_line_has_the_first_ones() -> None:
    computed = {"ap": {str(number): 0.5 for number in range(14)}}
    line = str(ls.Evaluation({"top1": 1.0}, 2, computed=computed))
    assert line.startswith("top1 0.5000, ap/0 0.5000, ap/1 0.5000, ")
    assert line.endswith(", ap/10 0.5000 and 3 more over 2 examples")


def test_two_scores_of_one_name_are_refused() -> None:
    def both(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
        return {"seen/low": batch["x"].float(), **score(model, batch)}

    result = evaluated(both, {"seen": Seen({"low": 0.5})})
    with pytest.raises(ls.InputError, match=r"Two scores have the name 'seen/low'\."):
        str(result)


def test_several_metrics_beside_scores() -> None:
    def both(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
        return {"mean": batch["x"].float(), "cells": (batch["x"], batch["x"] * 0), **score(model, batch)}

    metrics = {"seen": Seen("text"), "cells": ls.metrics.ConfusionMatrix(SIZE)}
    result = evaluated(both, metrics)
    assert result["mean"] == sum(range(SIZE)) / SIZE
    assert result.computed["cells"] == [[1] * SIZE, *[[0] * SIZE] * (SIZE - 1)]
    assert str(result) == "mean 5.0000 over 11 examples"


def outputs(name: str, value: Callable[[Tensor], Any]) -> Callable[..., Any]:
    return lambda model, batch: {name: value(batch["x"])}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("other", lambda x: (x, x), r"a tuple under 'other', which is no metric\.\n.*'seen'\n.*\n.*\"other\": metric"),
        ("other", lambda x: x, r"nothing for the metric 'seen'\.\n.*'other'\n.*\n.*leave the metric out"),
        ("seen", lambda x: x, r"'seen' cannot be given .*\n.*a tensor of shape \(4,\)\n.*a tuple of tensors"),
        ("seen", lambda x: (), r"'seen' cannot be given .*\n.*an empty tuple\n"),
        ("seen", lambda x: (x, x.sum()), r"'seen' cannot be given .*\n.*shape \(\)\n.*shape \(4, \.\.\.\)"),
        ("seen", lambda x: (x, x[:2]), r"'seen' cannot be given .*\n.*shape \(2,\)\n"),
        ("seen", lambda x: (x, x.tolist()), r"'seen' cannot be given .*\n.*a list\n.*\n.*unreduced"),
    ],
)
def test_rows_that_a_metric_cannot_take_are_refused(name: str, value: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ls.InputError, match=message):
        evaluated(outputs(name, value), {"seen": Seen()})


def test_a_tuple_without_metrics_is_refused() -> None:
    with pytest.raises(ls.InputError, match=r"'seen', which is no metric\.\n.*no metrics\n"):
        evaluated(score, {})


def test_scores_missing_for_some_micro_batches_are_refused() -> None:
    def sometimes(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
        x = batch["x"].float()
        return {"first": x, "second": x} if x[0] == 0 else {"first": x}

    with pytest.raises(
        ls.InputError, match=r"other scores for one micro-batch than .*\n.*'first', 'second'; 'first'\n"
    ):
        evaluated(sometimes, {})


@pytest.mark.parametrize(
    ("last", "total"), [("inf", "inf"), ("-inf", "nan"), ("nan", "nan")], ids=["infinite", "both signs", "no number"]
)
def test_sums_that_are_not_finite(last: str, total: str) -> None:
    def score(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
        return {"loss": torch.full((MICRO_BATCH,), float("inf" if batch["x"][0] == 0 else last))}

    assert repr(evaluated(score, {}).sums["loss"]) == total


def test_values_that_are_no_metric_are_refused() -> None:
    with pytest.raises(ls.InputError, match=r"metrics\['seen'\] is of the wrong type\.\n.*\n.*reset, update and comp"):
        evaluated(score, {"seen": len})


class Failing(Seen):
    """A metric that fails at one of its methods."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__()
        self.where, self.error = where, error

    def update(self, *rows: Tensor) -> None:
        if self.where == "update":
            raise self.error

    def compute(self) -> Any:
        if self.where == "compute":
            raise self.error
        return {1, 2}


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("update", r"'seen' could not be updated with .*\(4,\) torch.int64, \(4,\) torch.float32\.\n.*ValueError: odd"),
        ("compute", r"'seen' could not compute its value\.\n.*ValueError: odd\n.*\n.*fix the metric"),
        ("json", r"'seen' could not compute its value\.\n.*set is no number, text or tensor"),
    ],
)
def test_a_metric_that_fails_is_named(where: str, message: str) -> None:
    with pytest.raises(ls.InputError, match=message):
        evaluated(score, {"seen": Failing(where, ValueError("odd"))})


def test_an_error_that_says_how_to_fix_it_stays_as_it_is() -> None:
    with pytest.raises(ls.InputError, match=r"A predicted class is none of the 3 classes"):
        evaluated(outputs("cells", lambda x: (x, x)), {"cells": ls.metrics.ConfusionMatrix(3)})


class Wide(Seen):
    """A metric that adds up wide rows."""

    def reset(self) -> None:
        self.value = 0

    def update(self, wide: Tensor, narrow: Tensor) -> None:
        assert (wide.dtype, narrow.dtype, narrow.shape) == (torch.float64, torch.bool, (len(wide), 1, 0))
        self.value += int(wide.long().sum())


def wide_rows(part_bytes: int) -> Any:
    evaluation._PART_BYTES = part_bytes

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
        rows = batch["x"][:, None].expand(-1, 300).to(torch.float64)
        return {"wide": (rows.T.contiguous().T, torch.zeros(MICRO_BATCH, 1, 0, dtype=torch.bool))}

    return evaluated(score, {"wide": Wide()}).computed["wide"]


@pytest.mark.process
def test_rows_of_any_kind_travel_in_parts(run_workers: Callable[..., list[Any]]) -> None:
    assert run_workers(wide_rows, 2, 1000) == [300 * sum(range(SIZE))] * 2


def long_value(value: Any) -> Any:
    evaluation._PART_BYTES = 100
    return evaluated(score, {"seen": Seen(value)}).computed["seen"]


@pytest.mark.process
def test_a_value_that_is_too_long_for_one_message_reaches_all_workers(run_workers: Callable[..., list[Any]]) -> None:
    value = [["\\" * 99, 'é "', float("inf")], list(range(200))]
    assert run_workers(long_value, 2, value) == [value] * 2


def test_a_part_fits_into_a_message_whatever_it_holds() -> None:
    assert len(json.dumps("\\" * evaluation._PART_BYTES)) < MAX_VALUE_BYTES - 1024


def refused_names() -> str:
    with pytest.raises(ls.errors.WorkerError) as caught:
        evaluated(score, {f"seen by {ls.join().rank}": Seen()})
    return str(caught.value)


@pytest.mark.process
def test_workers_with_other_metrics_are_named(run_workers: Callable[..., list[Any]]) -> None:
    for said in run_workers(refused_names, 2):
        assert said.startswith("The workers do not agree on the metrics of an evaluation: worker 1 differs.")
        assert 'worker 1: [0]: "seen by 1" instead of "seen by 0"' in said


class Prepared(Seen):
    """A metric of the digits of numbers, which the worker that scored them prepares, and notes its rank."""

    def prepare(self, texts: list[str], x: Tensor) -> tuple[Any, ...]:
        assert [int(text) for text in texts] == x.tolist()
        digits = ls.Ragged.of([torch.tensor([*map(int, text)]) for text in texts])
        return digits, digits.values[: len(x)], torch.full((len(x),), ls.join().rank)

    def update(self, digits: ls.Ragged, first: Tensor, rank: Tensor) -> None:  # type: ignore[override]
        assert torch.equal(digits.values[: len(digits)], first)
        self.calls.append([[row.tolist() for row in digits], rank.unique().tolist()])

    def compute(self) -> Any:
        return self.calls


def prepared() -> Any:
    def score(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
        return {"seen": ([str(x) for x in batch["x"].tolist()], batch["x"])}

    return evaluated(score, {"seen": Prepared()}).computed["seen"]


@pytest.mark.process
def test_each_worker_prepares_what_it_has_scored(run_workers: Callable[..., list[Any]]) -> None:
    digits = [[[0], [1], [2], [3]], [[4], [5], [6], [7]], [[8], [9], [1, 0]]]
    by_two = ["reset", *([some, [rank]] for some, rank in zip(digits, [0, 1, 0], strict=True))]
    assert run_workers(prepared, 2) == [by_two, by_two]
    assert prepared() == ["reset", *([some, [0]] for some in digits)]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(4), r"`prepare` of the metric 'seen' returned cannot travel\.\n.*a tensor of shape \(4,\)\n"),
        (([0, 1, 2, 3],), r"cannot travel\.\n.*a list\n.*\n.*return what `update` takes"),
        ((ls.Ragged.of([torch.zeros(0)]),), r"cannot travel\.\n.*a Ragged of 1 examples\n.*of 4 examples\n"),
        (None, r"cannot travel\.\n.*a NoneType\n"),
        (ValueError("odd"), r"'seen' could not prepare what the score function returned\.\n.*ValueError: odd\n"),
    ],
)
def test_prepared_values_that_cannot_be_sent_are_refused(returned: Any, message: str) -> None:
    class Preparing(Seen):
        def prepare(self, *values: Any) -> Any:
            if isinstance(returned, Exception):
                raise returned
            return returned

    with pytest.raises(ls.InputError, match=message):
        evaluated(score, {"seen": Preparing()})


class Gathering(nn.Module):
    """A metric as those of torchmetrics are: it would gather from other processes if there were some."""

    def __init__(self) -> None:
        super().__init__()
        self.distributed_available_fn: Callable[[], bool] = torch.distributed.is_initialized

    def reset(self) -> None:
        self.num_seen = 0

    def update(self, x: Tensor, y: Tensor) -> None:
        self.num_seen += len(x)

    def compute(self) -> list[Any]:
        return [self.num_seen, self.distributed_available_fn()]


def gathered() -> list[Any]:
    collectives(ls.join(), "gloo")
    metric = Gathering()
    return [evaluated(score, {"seen": metric}).computed["seen"], metric.distributed_available_fn()]


@pytest.mark.process
def test_a_metric_of_torchmetrics_waits_for_no_other_process(run_workers: Callable[..., list[Any]]) -> None:
    assert run_workers(gathered, 2) == [[[SIZE, False], True]] * 2
