"""A batch: its fields are a dict's, everything else is fixed."""

from __future__ import annotations

import copy
import json
from dataclasses import FrozenInstanceError

import pytest
import torch

import lockstep as ls
from lockstep.errors import MissingFieldError
from lockstep.ragged import Ragged
from lockstep.types import BadExample, NonFiniteReport, Progress, ReplayVerdict, StepReport

BAD = [BadExample(9, "torn", "half a file", "whole")]


def make_batch() -> ls.Batch:
    boxes = Ragged.of([torch.full((number, 4), float(number)) for number in (0, 1, 2, 0)])
    fields = {"x": torch.arange(4), "name": list("abcd"), "boxes": boxes}
    return ls.Batch(fields, position=8, batch_size=8, towers=range(2, 4), seed=3, epoch_size=80, bad=BAD)


def test_its_fields_may_be_replaced_and_nothing_else() -> None:
    batch = make_batch()
    batch["x"] = batch["x"] * 2
    assert batch["x"].tolist() == [0, 2, 4, 6]
    for name in ("position", "towers", "loader", "report"):
        with pytest.raises(FrozenInstanceError, match=name):
            setattr(batch, name, None)


def test_rows_are_the_part_of_some_towers() -> None:
    part = make_batch().rows(slice(2, 4), range(3, 4))
    assert part["x"].tolist() == [2, 3]
    assert part["name"] == ["c", "d"]
    assert [row.tolist() for row in part["boxes"]] == [[[2.0] * 4] * 2, []]
    assert (part.position, part.batch_size, part.towers, part.seed, part.epoch_size) == (8, 8, range(3, 4), 3, 80)
    assert part.bad == BAD


def test_a_copy_has_the_same_fields_and_facts() -> None:
    batch = make_batch()
    again = copy.copy(batch)
    assert again == batch
    assert vars(again) == vars(batch)


def test_a_field_that_is_not_there_is_named_with_those_that_are() -> None:
    batch = make_batch()
    with pytest.raises(KeyError) as caught:
        batch["names"]
    assert isinstance(caught.value, MissingFieldError)
    assert str(caught.value).splitlines() == [
        "The batch has no field 'names'.",
        "  given:    'names'",
        "  expected: one of 'x', 'name', 'boxes'",
        '  hint:     did you mean "name"?',
    ]
    assert batch.get("names") is None
    assert "names" not in batch
    with pytest.raises(KeyError, match="no field 'zzz'"):
        batch.rows(slice(0, 2), range(2, 3))["zzz"]


def test_a_report_comes_back_from_json() -> None:
    verdict = ReplayVerdict("device", "it is the device of worker 1", ("worker 1",), 3, 8)
    refused = NonFiniteReport(8, ("a loss is not finite",), ("tower 1",), verdict=verdict)
    report = StepReport(
        Progress(3, 16, 80, 0.5), {"square": 1.5}, {"total": 1.25}, {}, 0.1, 2.0, 8, 0.01, 0.0,
        skipped=True, learning_rates={"": 0.1}, nonfinite=refused, bad=tuple(BAD), stop_requested=True,
    )  # fmt: skip
    with_batch = report._replace(nonfinite=refused._replace(batch=make_batch()))
    for each in (report, with_batch, report._replace(nonfinite=None, verdict=verdict)):
        found = StepReport.from_json(json.loads(json.dumps(each.as_json())))
        assert found == each._replace(nonfinite=each.nonfinite and refused)
