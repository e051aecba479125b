"""Folders of runs whose files are written by hand, line by line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import to_toml

SECOND = "2026-11-25T22:{:02}:{:02}+0000"
"""A time of a line: minute and second."""


def write_run(
    folder: Path, recipe: Recipe | None = None, **files: Iterable[Mapping[str, Any]] | Mapping[str, Any]
) -> Path:
    """Write the recipe of a run (mnist), and other files by their names: lines of JSON, or one object."""
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(to_toml(recipe or find("mnist")))
    for name, content in files.items():
        if isinstance(content, Mapping):
            (folder / f"{name}.json").write_text(json.dumps(content))
        else:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in content))
    return folder


def metrics_line(step: int, total: float | str = 1.0, **facts: Any) -> dict[str, Any]:
    """Return a line of metrics of an attempt with one loss."""
    line = {"step": step, "position": 128 * step, "losses": {"cross_entropy": total}, "total": total, "metrics": {}}
    rest = {"smoothed": {"cross_entropy": total, "total": total}, "learning_rate": 0.05, "gradient_norm": 1.0}
    return {**line, **rest, "refused": False, **facts}


def event(name: str, step: int, minute: int, **facts: Any) -> dict[str, Any]:
    """Return a line of a history, at a minute of an hour."""
    return {
        "time": SECOND.format(minute, 0),
        "event": name,
        "step": step,
        "workers": 2,
        "host": "one",
        "pid": 7,
        **facts,
    }


def timing_line(step: int, minute: int, second: int = 0, **facts: Any) -> dict[str, Any]:
    """Return a line of timings: ten steps of 128 examples in ten seconds, of which one was spent waiting."""
    line = {"time": SECOND.format(minute, second), "step": step, "position": 128 * step, "num_steps": 10}
    pace = {"num_examples": 1280, "seconds": 10.0, "wait_seconds": 1.0, "last_step": 100, "seconds_left": 60.0}
    return line | pace | facts
