from __future__ import annotations

import math

import pytest

from lockstep.reporting import wording
from lockstep.reporting.pace import Pace


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (-3, "0 s"),
        (52.4, "52 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 0 min"),
        (7800, "2 h 10 min"),
        (86_400 * 4 + 3 * 3600 + 59, "4 d 3 h"),
        (math.inf, "?"),
        (math.nan, "?"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert wording.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.31239, "0.3124"),
        (2.302585, "2.303"),
        (0.0, "0"),
        (1.2e-05, "1.2e-05"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert wording.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(3412.4, "3412"), (41.66, "41.7"), (0.25, "0.25"), (1234567.0, "1234567"), (math.nan, "nan")]
)
def test_rate(value: float, text: str) -> None:
    assert wording.rate(value) == text


def test_place() -> None:
    assert wording.place(120, 1718) == "step 120 of 1718"
    assert wording.place(120, None) == "step 120"


def test_one_loss_needs_no_name(make_report) -> None:
    report = make_report(1, losses={"cross_entropy": 0.3124}, smoothed={"cross_entropy": 0.3551, "total": 0.3551})
    assert wording.losses(report) == "loss 0.3124 (smoothed 0.3551)"


def test_several_losses_are_named_and_summed(make_report) -> None:
    report = make_report(1, losses={"cross_entropy": 0.31, "l2": 0.02}, smoothed={"total": 0.34})
    assert wording.losses(report) == "cross_entropy 0.31, l2 0.02, total 0.33 (smoothed 0.34)"


def test_losses_before_there_is_an_average(make_report) -> None:
    assert wording.losses(make_report(1, losses={"loss": math.nan}, smoothed={})) == "loss nan"


def test_measures(make_report) -> None:
    report = make_report(1, losses={"loss": 0.5}, smoothed={"total": 0.25}, learning_rate=0.0498)
    pace = Pace(num_steps=10, num_examples=1280, seconds=0.5, wait_seconds=0.005)
    assert wording.measures(report, pace) == ("loss 0.5 (smoothed 0.25) | lr 0.0498 | 2560 examples/s | data wait 1 %")
    pace.num_skipped = 1
    assert wording.measures(report, pace).endswith(" | 1 attempt refused")
    pace.num_skipped = 2
    assert wording.measures(report, pace).endswith(" | 2 attempts refused")
