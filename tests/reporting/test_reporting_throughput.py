from __future__ import annotations

from typing import Any

import pytest

from lockstep.reporting.throughput import InputTotals, Throughput, last_step, moment_before, seconds_left
from lockstep.types import BadExample, Epochs, Hours, Progress, Steps


def test_rates_are_over_all_attempts(make_report) -> None:
    pace = Throughput()
    pace.add(make_report(1, step_seconds=0.3, wait_seconds=0.1))
    pace.add(make_report(2, step_seconds=0.1, wait_seconds=0.0))
    pace.add(make_report(2, step_seconds=0.1, wait_seconds=0.0, skipped=True))
    assert pace.steps_per_second == pytest.approx(4)
    assert pace.examples_per_second == pytest.approx(3 * 128 / 0.5)
    assert pace.wait_share == pytest.approx(0.2)
    assert pace.num_skipped == 1


def test_rates_over_no_time_are_zero() -> None:
    assert (Throughput().steps_per_second, Throughput().examples_per_second, Throughput().wait_share) == (0, 0, 0)


def test_what_faded_weighs_less(make_report) -> None:
    pace = Throughput()
    pace.add(make_report(1, step_seconds=1.0, skipped=True))
    pace.fade(0.5)
    assert pace.examples_per_second == pytest.approx(128)
    pace.add(make_report(1, step_seconds=0.1))
    assert pace.examples_per_second == pytest.approx((64 + 128) / (0.5 + 0.1))
    assert pace.num_skipped == 1


def test_moment_before(make_report) -> None:
    before = moment_before(make_report(7))
    assert (before.step, before.position) == (6, 6 * 128)
    assert before.elapsed_seconds == pytest.approx(0.6)
    assert moment_before(make_report(7, skipped=True)).step == 7


def progress(step: int, elapsed_seconds: float = 0.0, position: int | None = None) -> Progress:
    return Progress(step, 10 * step if position is None else position, 100, elapsed_seconds)


def test_last_step() -> None:
    assert last_step(Steps(40), progress(3), batch_size=10) == 40
    assert last_step(Epochs(2.5), progress(3), batch_size=10) == 25
    assert last_step(Epochs(2.59), progress(3), batch_size=10) == 25
    assert last_step(Epochs(2), progress(30), batch_size=10) == 30
    assert last_step(Hours(1), progress(3), batch_size=10) is None
    assert last_step(None, progress(3), batch_size=10) is None


def test_refused_attempts_cost_steps_of_an_epoch() -> None:
    assert last_step(Epochs(1), progress(3, position=50), batch_size=10) == 8


def test_time_left_follows_the_rate() -> None:
    assert seconds_left(Steps(100), progress(10, 5.0), progress(60, 10.0)) == pytest.approx(4.0)
    assert seconds_left(Epochs(10), progress(10, 5.0), progress(60, 10.0)) == pytest.approx(4.0)
    assert seconds_left(Steps(50), progress(10, 5.0), progress(60, 10.0)) == 0


def test_time_left_of_hours_is_what_the_clock_leaves() -> None:
    assert seconds_left(Hours(1), progress(1), progress(1, 600.0)) == 3000
    assert seconds_left(Hours(1), progress(1), progress(9, 3601.0)) == 0


def test_time_left_is_unknown_without_an_end_or_a_rate() -> None:
    assert seconds_left(None, progress(1), progress(2, 1.0)) is None
    assert seconds_left(Steps(9), progress(1, 1.0), progress(1, 1.0)) is None
    assert seconds_left(Epochs(9), Progress(1, 10, 0), Progress(2, 20, 0, 1.0)) is None


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


def test_input_totals_print_shares_and_seconds(make_report: Any) -> None:
    found = totals(make_report, {"stage_seconds": {"read": 1.0, "decode": 3.0, "copy": 0.001}, "bad": BAD}, {})
    assert str(found) == (
        "waited for data 25 % of 4 s; reading took 4.0 s (decode 75 %, read 25 %); bad examples replaced: 1"
    )


def test_input_totals_without_an_attempt_print_zero() -> None:
    assert str(InputTotals()) == "waited for data 0 % of 0 s"
