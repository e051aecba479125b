"""The scores of micro-batches: checked, freed of padding, added up."""

from __future__ import annotations

import math
import random

import pytest
import torch

from lockstep.errors import InputError
from lockstep.evaluation.scores import checked, counted, read_sums, scores_of, summed
from lockstep.metrics.classification import ConfusionMatrix
from lockstep.ragged import Ragged


def test_padding_does_not_count() -> None:
    boxes = Ragged.of([torch.zeros(1, 4), torch.zeros(0, 4), torch.zeros(2, 4)])
    returned = {"top1": torch.tensor([1.0, 0.0, 1.0]), "cells": (torch.arange(3), boxes)}
    sums, rows = counted(checked(returned, {"cells": ConfusionMatrix(3)}, 3), valid=2)
    assert read_sums([sums]) == [{"top1": 1.0}]
    numbers, kept = rows.read()["cells"]
    assert (numbers.tolist(), kept.lengths.tolist(), kept.values.shape) == ([0, 1], [1, 0], (1, 4))


def test_the_rows_of_a_metric_do_not_keep_the_memory_of_the_batch() -> None:
    boxes, labels = Ragged.of([torch.zeros(1, 4)] * 3), torch.arange(3)
    _, rows = counted(checked({"cells": (labels, boxes)}, {"cells": ConfusionMatrix(3)}, 3), valid=3)
    numbers, kept = rows.read()["cells"]
    before = {tensor.data_ptr() for tensor in (labels, boxes.values, boxes.lengths)}
    assert before.isdisjoint(tensor.data_ptr() for tensor in (numbers, kept.values, kept.lengths))


def test_where_all_is_padding_a_metric_gets_nothing() -> None:
    _, rows = counted(checked({"cells": (torch.arange(3),)}, {"cells": ConfusionMatrix(3)}, 3), valid=0)
    assert rows.read() == {}


def test_sums_are_read_by_the_names_of_each_micro_batch() -> None:
    one, two, three = (torch.tensor(number, dtype=torch.float64) for number in (0.1, 2.0, 3.0))
    assert read_sums([{"a": one, "b": two}, {}, {"c": three}]) == [{"a": 0.1, "b": 2.0}, {}, {"c": 3.0}]
    assert read_sums([{}]) == [{}]


MANY = {"map": 0.25, "map50": math.inf, "name": "a", "each": [0.1], "found": True}


@pytest.mark.parametrize(
    ("value", "scores"),
    [
        (0.5, {"m": 0.5}),
        (3, {"m": 3.0}),
        (MANY, {"m/map": 0.25, "m/map50": math.inf}),
        ([[1, 2], [3, 4]], {}),
        ("text", {}),
        (True, {}),
        ({"inner": {"map": 1.0}}, {}),
    ],
)
def test_the_numbers_that_metrics_compute_are_scores(value: object, scores: dict[str, float]) -> None:
    assert dict(scores_of({"m": value})) == scores


def test_sums_are_the_same_in_any_order() -> None:
    parts = [{"loss": 10.0**power} for power in range(-20, 20)]
    shuffled = random.Random(0).sample(parts, len(parts))
    assert summed(parts) == summed(shuffled) == {"loss": math.fsum(part["loss"] for part in parts)}


def test_infinities_of_both_signs_add_up_to_nan() -> None:
    assert summed([{"loss": math.inf}, {"loss": 1.0}]) == {"loss": math.inf}
    assert math.isnan(summed([{"loss": math.inf}, {"loss": -math.inf}])["loss"])


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        ({}, "The score function returned no named scores."),
        ({"top1": torch.ones(2)}, "The score 'top1' is not one number an example."),
        ({"cells": (torch.ones(3),)}, "The score function returned a tuple under 'cells', which is no metric."),
    ],
)
def test_other_returned_values_are_refused(returned: object, what: str) -> None:
    with pytest.raises(InputError) as caught:
        checked(returned, {}, 3)
    assert caught.value.what == what


def test_metrics_need_their_rows() -> None:
    with pytest.raises(InputError, match="returned nothing for the metric 'cells'"):
        checked({"top1": torch.ones(3)}, {"cells": ConfusionMatrix(3)}, 3)


def test_scores_have_the_same_names_in_each_micro_batch() -> None:
    with pytest.raises(InputError, match="returned other scores for one micro-batch"):
        summed([{"top1": 1.0}, {"top5": 1.0}])
