from __future__ import annotations

import math
from pathlib import Path

import pytest

from lockstep.report.by_class import class_table, precision_curves

CAT = {"name": "cat", "objects": 3, "right": 2, "false": 1, "missed": 1, "precision": 2 / 3, "best_f1": "nan"}
EVALUATION = {"step": 7, "split": "test", "weights": "raw", "scores": {}}


def test_the_newest_table_is_taken_with_what_was_scored() -> None:
    tables = [{"classes": classes, "all": CAT, "min_score": 0.25} for classes in ([], [CAT, CAT])]
    older, newer = ({**EVALUATION, "by_class": table} for table in tables)
    found = class_table([older, newer, EVALUATION])
    assert found is not None
    assert found.scored == "test, raw weights of step 7; detections of a score of 0.25 or more"
    assert len(found.rows) == 3
    assert (found.rows[0]["missed"], found.rows[0]["recall"]) == (1, None)
    assert math.isnan(found.rows[0]["best_f1"])
    assert class_table([EVALUATION, {**EVALUATION, "by_class": {"classes": 3}}]) is None


def test_of_one_class_there_is_no_second_line() -> None:
    found = class_table([{**EVALUATION, "by_class": {"classes": [CAT], "all": CAT}}])
    assert found is not None
    assert [row["name"] for row in found.rows] == ["cat"]


def test_curves_are_read_by_class(tmp_path: Path) -> None:
    (tmp_path / "curves.csv").write_text("class,recall,precision,score\na,0,1,0.9\nb,0,0.5,0.4\na,0.01,0.75,0.8\n")
    assert precision_curves(tmp_path, []) == {"a": ((0, 1), (0.01, 0.75)), "b": ((0, 0.5),)}
    assert precision_curves(tmp_path / "none", []) == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not enough values"),
        ("class,recall\n", "its columns are not class, recall, precision, score"),
        ("class,recall,precision,score\na,1\n", "not enough values"),
        ("class,recall,precision,score\na,0,nan,1\n", "a value is not from 0 to 1"),
    ],
)
def test_a_file_that_is_no_table_of_curves_is_named(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "curves.csv").write_text(text)
    assert precision_curves(tmp_path, problems := []) == {}
    assert problems[0].startswith(f"curves.csv is no table of curves: {why}")
