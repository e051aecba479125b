from __future__ import annotations

import csv
from io import StringIO
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import InputError
from lockstep.evaluation.confusion_table import confusion_csv

COUNTS = [[5, 0, 1], [0, 0, 0], [2, 3, 4]]


def test_lines_are_right_classes_and_columns_predicted_ones() -> None:
    expected = "is / predicted,daisy,rose,tulip\ndaisy,5,0,1\nrose,0,0,0\ntulip,2,3,4\n"
    assert confusion_csv(COUNTS, ["daisy", "rose", "tulip"]) == expected
    assert confusion_csv(torch.tensor(COUNTS), ["daisy", "rose", "tulip"]) == expected


@pytest.mark.parametrize("names", [["background", 'hook, "line"'], {1: 'hook, "line"', 0: "background", 9: "none"}])
def test_names_are_quoted_and_classes_without_one_are_numbers(names: Any) -> None:
    rows = list(csv.reader(StringIO(confusion_csv(COUNTS, names))))
    assert rows[0] == ["is / predicted", "background", 'hook, "line"', "2"]
    assert [row[0] for row in rows] == rows[0]


@given(st.text(st.characters(), min_size=1))
def test_any_name_stays_in_its_cell(name: str) -> None:
    rows = list(csv.reader(StringIO(confusion_csv([[1, 0], [2, 3]], [name, "b"]), newline="")))
    assert rows == [["is / predicted", name, "b"], [name, "1", "0"], ["b", "2", "3"]]


@pytest.mark.parametrize("counts", [[[1, 2]], [[1, 2], [3]], torch.zeros(2, 3), torch.zeros(2)])
def test_counts_that_are_no_square_are_refused(counts: Any) -> None:
    with pytest.raises(InputError, match=r"no confusion matrix\.\n.*rows, of which not all.*\n.*\n.*compute returns"):
        confusion_csv(counts)
