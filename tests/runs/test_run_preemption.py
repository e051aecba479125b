"""A run that is asked to stop: it saves first, and what it left off for that is made up for by the next start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_run_nonfinite import BATCH_SIZE, STEPS, contents, events, history, make_build, make_recipe
from torch import nn

import lockstep as ls
from lockstep.runs import stages
from lockstep.runs.run import Run
from lockstep.runs.workdir import Result
from lockstep.workers.rank import leave

Place = tuple[str, int]
"""A forward pass: "step" and the position of its batch, or "validation" and the step that is scored.

The workers tell each other at the beginning of a step and after scoring: the run stops there.
"""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """A start of a run that is scored every second step, and asked to stop by a signal at some place."""

    def begin(workdir: Path, stop_at: Place | None = None) -> Result:
        leave()
        worker = ls.join("cpu")

        def pass_by(*place: Any) -> None:
            if place == stop_at:
                worker.pulse.stop_requested = "SIGUSR1"

        def score(model: nn.Module, batch: ls.Batch) -> dict[str, torch.Tensor]:
            pass_by("validation", started.step)
            return {"top1": model(batch["x"]).squeeze(1)}

        build = make_build([], attempted=lambda position: pass_by("step", position), score=score)
        monkeypatch.setattr(stages, "build", build)
        started = Run(make_recipe("stop", "evaluate.every=2 steps"), workdir, worker)
        return started.run()

    return begin


def evaluated(workdir: Path) -> list[int]:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if "evaluation" in line]


@pytest.fixture
def undisturbed(start: Callable[..., Result], tmp_path: Path) -> dict[str, bytes]:
    start(tmp_path / "undisturbed")
    assert evaluated(tmp_path / "undisturbed") == [2, 4, 6, 8]
    return contents(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("stops", "steps", "scored"),
    [
        ([("step", BATCH_SIZE)], [2], []),
        ([("step", 2 * BATCH_SIZE)], [4], [2]),
        ([("validation", 4)], [4], [2]),
        ([("validation", 6), ("validation", 6), ("step", 6 * BATCH_SIZE)], [6, 6, 8], [2, 4, 6]),
        ([("step", 0), ("validation", 2)], [2, 2], []),
    ],
)
def test_what_was_left_off_is_made_up_for(
    start: Callable[..., Result],
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    stops: list[Place],
    steps: list[int],
    scored: list[int],
) -> None:
    workdir = tmp_path / "run"
    for place, step in zip(stops, steps, strict=True):
        stopped = start(workdir, place)
        assert (stopped.reason, stopped.step) == ("stopped", step)
        assert (workdir / f"checkpoints/step-{step:08d}").is_dir()
        assert history(workdir)[-1]["event"] == "stop"
    assert evaluated(workdir) == scored
    ended = start(workdir)
    assert (ended.reason, ended.step) == ("end", STEPS)
    assert contents(workdir) == undisturbed
    assert events(workdir) == ["start", "stop", *["resume", "stop"] * (len(stops) - 1), "resume", "end"]


def test_a_signal_in_the_final_scoring_leaves_it_off(start: Callable[..., Result], tmp_path: Path) -> None:
    ended = start(tmp_path, ("validation", STEPS))
    assert ended.reason == "end"
    assert ended.evaluation is None
    assert not (tmp_path / "result.json").exists()
    assert start(tmp_path).evaluation is not None
    assert (tmp_path / "result.json").exists()
