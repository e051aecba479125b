from __future__ import annotations

import math

import pytest
from written_runs import metrics_line

from lockstep.report.curves import (
    LOSSES,
    MOST_CURVES,
    MOST_POINTS,
    NORM,
    RATE,
    SCORES,
    Mark,
    charts_of,
    charts_of_several,
    curve_of,
    points_of,
)


def test_numbers_of_lines_are_sorted_by_chart_and_name() -> None:
    two = {"losses": {"a": 1.0, "b": 2.0}, "smoothed": {"a": 1.5, "b": 2.5, "total": 4.0}, "total": 3.0}
    points = points_of(
        [
            {"step": 1, "position": 8, **two, "metrics": {"top1": 0.5}, "learning_rate": 0.1, "gradient_norm": 7},
            {"step": 1, "evaluation": "validation", "scores": {"mAP": 0.25, "X_PerformanceByCategory/AP/cat": 0.1}},
        ]
    )
    assert points == {
        LOSSES: {"total": {1: 3.0}, "a, smoothed": {1: 1.5}, "b, smoothed": {1: 2.5}, "total, smoothed": {1: 4.0}},
        SCORES: {"training top1": {1: 0.5}, "validation mAP": {1: 0.25}},
        RATE: {"learning rate": {1: 0.1}},
        NORM: {"gradient norm": {1: 7.0}},
    }


def test_a_loss_that_is_the_only_one_has_no_total() -> None:
    assert points_of([metrics_line(3, 0.5)])[LOSSES] == {
        "cross_entropy": {3: 0.5},
        "cross_entropy, smoothed": {3: 0.5},
    }


def test_rates_by_parameter_stand_in_for_the_one() -> None:
    assert points_of([metrics_line(3, learning_rates={"^head": 0.5, "": 0.1})])[RATE] == {
        "^head": {3: 0.5},
        "": {3: 0.1},
    }


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"step": "1"},
        metrics_line(-1),
        metrics_line(1 << 80),
        {"step": 1, "gradient_norm": 1 << 5000},
        {"step": 1, "losses": 3, "metrics": [], "learning_rate": None},
        {"step": 1, "losses": {"a": True}, "gradient_norm": "many"},
        {"step": 1, "evaluation": "validation", "scores": "none"},
        metrics_line(1, refused=True),
    ],
)
def test_what_is_no_step_or_no_number_has_no_points(line: dict[str, object]) -> None:
    assert not any(points_of([line]).values())


def test_what_is_not_finite_is_a_gap() -> None:
    points = points_of([metrics_line(step, total) for step, total in enumerate([1.0, "nan", "inf", 0.5])])
    curve = curve_of("loss", points[LOSSES]["cross_entropy"])
    assert curve.values == [1.0, None, None, 0.5]
    assert (curve.num_nonfinite, curve.lowest, curve.highest, curve.last) == (2, 0.5, 1.0, 0.5)


def test_a_curve_that_is_nowhere_finite_has_no_extremes() -> None:
    curve = curve_of("loss", {1: math.nan})
    assert (curve.values, curve.lowest, curve.highest, curve.last) == ([None], None, None, None)


def test_of_many_points_the_extremes_and_the_gaps_are_kept() -> None:
    values = {step: math.sin(step / 50) for step in range(100_000)}
    values |= {777: 40.0, 50_001: -40.0, 80_000: math.nan}
    curve = curve_of("loss", values)
    assert len(curve.steps) <= MOST_POINTS + 3
    assert curve.num_points == 100_000
    assert {0, 777, 50_001, 80_000, 99_999} <= {*curve.steps}
    assert dict(zip(curve.steps, curve.values, strict=True))[80_000] is None
    # No stretch is longer than the parts of which each has two points.
    assert max(b - a for a, b in zip(curve.steps, curve.steps[1:], strict=False)) <= 2 * 100_000 / (MOST_POINTS / 2)


def test_a_chart_is_logarithmic_where_values_are_positive_and_far_apart() -> None:
    def is_logarithmic(*values: float) -> bool:
        (chart,) = charts_of({LOSSES: {"a": dict(enumerate(values))}}, ())
        return chart.is_logarithmic

    assert is_logarithmic(1e-4, 3.0)
    assert not is_logarithmic(0.0, 3.0)
    assert not is_logarithmic(0.5, 3.0)
    assert not is_logarithmic(math.nan)


def test_a_chart_has_no_more_curves_than_can_be_told_apart() -> None:
    (chart,) = charts_of({SCORES: {f"score {place}": {0: 1.0} for place in range(20)}}, [Mark(3, "resume")])
    assert (len(chart.curves), chart.num_left_out) == (MOST_CURVES, 20 - MOST_CURVES)
    assert chart.marks == (Mark(3, "resume"),)


def test_runs_are_compared_by_quantity() -> None:
    one = {LOSSES: {"a": {0: 1.0}, "a, smoothed": {0: 1.0}, "b": {0: 1.0}}, RATE: {"learning rate": {0: 0.1}}}
    charts = charts_of_several({"one": one, "two": {RATE: {"learning rate": {5: 0.2}}}})
    assert [(chart.title, [curve.name for curve in chart.curves]) for chart in charts] == [
        ("Losses: a, smoothed", ["one"]),
        ("Losses: b", ["one"]),
        (RATE, ["one", "two"]),
    ]


def test_a_table_has_evenly_spread_steps_of_all_curves() -> None:
    named = {"a": {step: step / 10 for step in range(0, 101, 2)}, "b": {100: 5.0}}
    (chart,) = charts_of({LOSSES: named}, ())
    assert chart.table(3) == [(0, [0.0, None]), (50, [5.0, None]), (100, [10.0, 5.0])]
