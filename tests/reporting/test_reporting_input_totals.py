from __future__ import annotations

from typing import Any

import pytest

from lockstep.reporting.input_totals import InputTotals
from lockstep.types import BadExample

BAD = (BadExample(3, "a.jpg", "torn", "b.jpg"),)


def totals(make_report: Any, *fields: dict[str, Any]) -> InputTotals:
    found = InputTotals()
    for step, each in enumerate(fields, start=1):
        found.add(make_report(step, step_seconds=2.0, wait_seconds=0.5, **each))
    return found


def test_means_by_tag(make_report: Any) -> None:
    found = totals(
        make_report,
        {"stage_seconds": {"read": 1.0, "decode": 6.0}, "queue_fill": 1.0, "bad": BAD},
        {"stage_seconds": {"read": 3.0, "copy": 0.5}, "queue_fill": 0.5},
    )
    assert found.scalars() == pytest.approx(
        {
            "input/queue_fill": 0.75,
            "input/read_seconds": 2.0,
            "input/decode_seconds": 3.0,
            "input/copy_seconds": 0.25,
            "input/bad_examples": 1.0,
        }
    )


def test_where_nothing_is_read_ahead_there_is_no_gauge(make_report: Any) -> None:
    assert totals(make_report, {}).scalars() == {"input/bad_examples": 0.0}


def test_in_words(make_report: Any) -> None:
    found = totals(make_report, {"stage_seconds": {"read": 1.0, "decode": 3.0, "copy": 0.001}, "bad": BAD}, {})
    assert str(found) == (
        "waited for data 25 % of 4 s; reading took 4.0 s (decode 75 %, read 25 %); bad examples replaced: 1"
    )


def test_of_no_attempt_at_all() -> None:
    assert str(InputTotals()) == "waited for data 0 % of 0 s"
