"""The scores of micro-batches: checked, freed of padding, added up."""

from __future__ import annotations

import math
import random

import pytest
import torch

from lockstep.errors import InputError
from lockstep.evaluation.scores import checked, counted, summed


def test_padding_does_not_count() -> None:
    scores = checked({"top1": torch.tensor([1.0, 0.0, 1.0]), "cells": (torch.arange(3),)}, ["cells"], 3)
    sums, rows = counted(scores, valid=2)
    assert sums == {"top1": 1.0}
    assert [column.tolist() for column in rows["cells"]] == [[0, 1]]


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
        checked(returned, [], 3)
    assert caught.value.what == what


def test_metrics_need_their_rows() -> None:
    with pytest.raises(InputError, match="returned nothing for the metric 'cells'"):
        checked({"top1": torch.ones(3)}, ["cells"], 3)


def test_scores_have_the_same_names_in_each_micro_batch() -> None:
    with pytest.raises(InputError, match="returned other scores for one micro-batch"):
        summed([{"top1": 1.0}, {"top5": 1.0}])
