"""Draw the curve of a run as an SVG: the smoothed loss by step, and below it the scores of its evaluations.

    python scripts/plot_curve.py runs/mnist/metrics.jsonl docs/images/mnist-curve.svg

The picture has no background and follows the reader's light or dark theme. Standard library alone.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

WIDTH, LEFT, RIGHT = 720, 64, 640
LOSS_TOP, LOSS_BOTTOM = 34, 214
SCORE_TOP, SCORE_BOTTOM, HEIGHT = 260, 330, 372

STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #57606a }
  .title { font-weight: 600; fill: #1f2328 }
  .grid { stroke: #d0d7de; stroke-width: 1 }
  .loss { stroke: #0969da; stroke-width: 2; fill: none; stroke-linejoin: round }
  .score { fill: #bc4c00 }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1 } .title { fill: #f0f6fc } .grid { stroke: #3d444d }
    .loss { stroke: #4493f8 } .score { fill: #f0883e }
  }
"""


class Run(NamedTuple):
    """What a `metrics.jsonl` says of a run."""

    losses: list[tuple[int, float]]
    """(step, smoothed total), of the updates that were not refused."""
    scores: list[tuple[int, float]]
    """(step, score) of each evaluation of the split that was scored first."""
    score_name: str


def read(path: Path) -> Run:
    """Read the lines of a run; of each evaluation, the first score."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    losses = [(each["step"], float(each["smoothed"]["total"])) for each in lines if each.get("refused") is False]
    evaluations = [each for each in lines if "evaluation" in each]
    if not evaluations:
        return Run(losses, [], "")
    split, name = evaluations[0]["evaluation"], next(iter(evaluations[0]["scores"]))
    scores = [(each["step"], float(each["scores"][name])) for each in evaluations if each["evaluation"] == split]
    return Run(losses, scores, f"{split} {name}")


def draw(run: Run, title: str) -> str:
    """The run as the text of an SVG."""
    last = run.losses[-1][0]

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / last

    height = HEIGHT if run.scores else LOSS_BOTTOM + 42
    bottom = SCORE_BOTTOM if run.scores else LOSS_BOTTOM
    body = [*_losses(run.losses, x), *(_scores(run.scores, run.score_name, x) if run.scores else [])]
    body += [_text(x(step), bottom + 20, f"{step:,}", "middle") for step in _round_steps(last)]
    body.append(_text(RIGHT, bottom + 36, "step", "end"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _losses(losses: Sequence[tuple[int, float]], x: Callable[[float], float]) -> Iterator[str]:
    """The upper panel, on a logarithmic scale."""
    logarithms = [math.log10(max(loss, 1e-12)) for _, loss in losses]
    low, high = min(logarithms), max(logarithms)
    y = _scale(low, high, LOSS_BOTTOM, LOSS_TOP)
    yield _text(LEFT, LOSS_TOP - 16, "loss, smoothed (logarithmic)", "start", "title")
    for exponent in range(math.ceil(low), math.floor(high) + 1):
        yield from _line_of_grid(y(exponent), f"{10.0**exponent:g}")
    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for (step, _), value in zip(losses, logarithms, strict=True))
    yield f'<polyline class="loss" points="{points}"/>'
    yield _text(RIGHT + 8, y(logarithms[-1]) + 4, f"{losses[-1][1]:.3g}", "start")


def _scores(scores: Sequence[tuple[int, float]], name: str, x: Callable[[float], float]) -> Iterator[str]:
    """The lower panel, each point with its value."""
    values = [score for _, score in scores]
    low, high = _whole_percents(min(values), max(values))
    y = _scale(low, high, SCORE_BOTTOM, SCORE_TOP)
    yield _text(LEFT, SCORE_TOP - 16, name, "start", "title")
    for value in (low, high):
        yield from _line_of_grid(y(value), f"{value:.0%}")
    for step, score in scores:
        yield f'<circle class="score" cx="{x(step):.1f}" cy="{y(score):.1f}" r="4"/>'
        yield _text(x(step) + 9, y(score) + 4, f"{score:.2%}", "start")


def _scale(low: float, high: float, at_low: float, at_high: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: at_low + (at_high - at_low) * (value - low) / span


def _whole_percents(low: float, high: float) -> tuple[float, float]:
    return max(0.0, math.floor(low * 100 - 0.5) / 100), min(1.0, math.ceil(high * 100) / 100)


def _round_steps(last: int) -> list[int]:
    """About five round numbers from 0 to the last step."""
    rough = max(1.0, last / 5)
    unit = 10 ** math.floor(math.log10(rough))
    size = next(int(factor * unit) for factor in (1, 2, 5, 10) if factor * unit >= rough)
    return list(range(0, last + 1, size))


def _line_of_grid(y: float, label: str) -> Iterator[str]:
    yield f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    yield _text(LEFT - 8, y + 4, label, "end")


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def main() -> None:
    """Read the metrics named on the command line, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("metrics", type=Path, help="the metrics.jsonl of a run")
    parser.add_argument("picture", type=Path, help="the .svg to write")
    arguments = parser.parse_args()
    arguments.picture.write_text(draw(read(arguments.metrics), f"The run in {arguments.metrics.parent.name}"))


if __name__ == "__main__":
    main()
