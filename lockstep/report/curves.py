"""The curves of runs: losses, rates, scores and times by step, thinned to what a page can draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

MOST_POINTS = 4000
"""Most points of a curve on the page."""
MOST_CURVES = 12
"""Most curves of a chart: each has a colour and a dash pattern of its own."""
LOSSES, RATE, NORM, SCORES, SPEED, WAITING = (
    "Losses",
    "Learning rate",
    "Gradient norm",
    "Scores",
    "Examples a second",
    "Share of time waiting for data",
)
BY_CLASS = "PerformanceByCategory/"
"""The part of a name that tells the score of a single class."""
_SMOOTHED = ", smoothed"
_LOG_FROM = 100.0
"""A chart of positive values is logarithmic at first if the largest is so many times the least."""
_LARGEST = 1 << 53
"""The largest whole number that a browser knows."""

Points = dict[str, dict[int, float]]
"""Values by name and step."""


class Mark(NamedTuple):
    """A moment of a run that is marked on its charts."""

    step: int
    name: str


@dataclass(frozen=True)
class Curve:
    """Values by step, of which some may be left out."""

    name: str
    steps: list[int]
    values: list[float | None]
    """None where the value was not finite: the curve has a gap there."""
    num_points: int
    """Points before they were thinned."""
    num_nonfinite: int
    lowest: float | None
    highest: float | None
    last: float | None


@dataclass(frozen=True)
class Chart:
    """Curves that are drawn over the same steps."""

    title: str
    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...] = ()
    num_left_out: int = 0
    """Curves beyond `MOST_CURVES`, which are not drawn."""

    @property
    def is_logarithmic(self) -> bool:
        """Whether its values are best seen on a logarithmic scale."""
        low = [curve.lowest for curve in self.curves if curve.lowest is not None]
        high = [curve.highest for curve in self.curves if curve.highest is not None]
        return bool(low) and not self.from_zero and min(low) > 0 and max(high) > _LOG_FROM * min(low)

    @property
    def from_zero(self) -> bool:
        """Whether its scale begins at zero, however little its values differ."""
        return self.title in (SPEED, WAITING)

    @property
    def is_thinned(self) -> bool:
        """Whether a curve has had more points than are drawn."""
        return any(len(curve.steps) < curve.num_points for curve in self.curves)

    @property
    def num_nonfinite(self) -> int:
        """Number of values that are not finite."""
        return sum(curve.num_nonfinite for curve in self.curves)

    def table(self, most_rows: int) -> list[tuple[int, list[float | None]]]:
        """Return rows for a table: steps spread evenly over those of all curves, and the value of each there."""
        steps = sorted({step for curve in self.curves for step in curve.steps})
        places = np.unique(np.linspace(0, len(steps) - 1, min(most_rows, len(steps))).round().astype(int)).tolist()
        by_step = [dict(zip(curve.steps, curve.values, strict=True)) for curve in self.curves]
        return [(steps[place], [values.get(steps[place]) for values in by_step]) for place in places]


def points_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, Points]:
    """Sort the numbers of lines of metrics by chart and name; attempts that were refused are no steps, and have none.

    What is not as `metrics.jsonl` has it is left out.
    """
    charts: dict[str, Points] = {LOSSES: {}, SCORES: {}, RATE: {}, NORM: {}}
    for line in lines:
        step = line.get("step")
        if isinstance(step, int) and 0 <= step <= _LARGEST and not line.get("refused"):
            for title, name, value in _numbers(line):
                add_point(charts[title], name, step, value)
    return charts


def add_point(points: Points, name: str, step: int, value: Any) -> None:
    """Add a value, unless it is none: the texts "nan", "inf" and "-inf" are numbers that JSON lacks."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        value = float(value)
    is_whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST
    if is_whole or isinstance(value, float):
        points.setdefault(name, {})[step] = float(value)


def _numbers(line: Mapping[str, Any]) -> Iterable[tuple[str, str, Any]]:
    if "evaluation" in line:
        for name, value in _items(line, "scores"):
            if BY_CLASS not in name:
                yield SCORES, f"{line['evaluation']} {name}", value
        return
    if len(_items(line, "losses")) > 1:
        yield LOSSES, "total", line.get("total")
    else:
        for name, value in _items(line, "losses"):
            yield LOSSES, name, value
    for name, value in _items(line, "smoothed"):
        if name != "total" or len(_items(line, "losses")) > 1:
            yield LOSSES, f"{name}{_SMOOTHED}", value
    for name, value in _items(line, "metrics"):
        yield SCORES, f"training {name}", value
    several = _items(line, "learning_rates")
    for name, value in several or [("learning rate", line.get("learning_rate"))]:
        yield RATE, name, value
    yield NORM, "gradient norm", line.get("gradient_norm")


def _items(line: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    values = line.get(name)
    return [*values.items()] if isinstance(values, Mapping) else []


def charts_of(points: Mapping[str, Points], marks: Sequence[Mark]) -> list[Chart]:
    """Make the charts of one run."""
    return [chart for title, named in points.items() if (chart := _chart(title, named, marks))]


def charts_of_several(runs: Mapping[str, Mapping[str, Points]]) -> list[Chart]:
    """Make the charts of several runs, by their names: each compares one quantity.

    Where a loss is smoothed it is not shown as it is, too.
    """
    kinds = {(title, name): None for points in runs.values() for title, named in points.items() for name in named}
    charts = []
    for title, name in kinds:
        if (title, name + _SMOOTHED) in kinds:
            continue
        of_each = {run: points[title][name] for run, points in runs.items() if name in points.get(title, {})}
        alone = sum(each == title for each, _ in kinds) == 1
        charts.append(_chart(title if alone else f"{title}: {name}", of_each, ()))
    return [chart for chart in charts if chart]


def _chart(title: str, named: Points, marks: Sequence[Mark]) -> Chart | None:
    curves = [curve_of(name, values) for name, values in [*named.items()][:MOST_CURVES] if values]
    return Chart(title, tuple(curves), tuple(marks), max(0, len(named) - MOST_CURVES)) if curves else None


def curve_of(name: str, by_step: Mapping[int, float], most: int = MOST_POINTS) -> Curve:
    """Make a curve of values by step: of more than `most` points, the lowest and highest of each part are kept."""
    steps = np.array(sorted(by_step), np.int64)
    values = np.array([by_step[step] for step in steps.tolist()], np.float64)
    finite = values[np.isfinite(values)]
    kept = _extremes(values, most)
    return Curve(
        name,
        steps[kept].tolist(),
        [_rounded(value) for value in values[kept].tolist()],
        len(values),
        len(values) - len(finite),
        _rounded(finite.min()) if len(finite) else None,
        _rounded(finite.max()) if len(finite) else None,
        _rounded(values[-1]) if len(values) else None,
    )


def _extremes(values: np.ndarray[Any, np.dtype[np.float64]], most: int) -> list[int]:
    """Return the places of the lowest and the highest value of each of `most` / 2 parts, and one without a value."""
    if len(values) <= most:
        return [*range(len(values))]
    edges = np.linspace(0, len(values), most // 2 + 1).astype(int).tolist()
    kept = {0, len(values) - 1}
    for first, end in pairwise(edges):
        part = values[first:end]
        is_finite = np.isfinite(part)
        if is_finite.any():
            low, high = np.where(is_finite, part, np.inf), np.where(is_finite, part, -np.inf)
            kept |= {first + int(low.argmin()), first + int(high.argmax())}
        if not is_finite.all():
            kept.add(first + int(is_finite.argmin()))
    return sorted(kept)


def _rounded(value: float) -> float | None:
    """Round to six digits, which no chart shows all of; None for what is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
