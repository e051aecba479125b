"""What a run by a recipe records of its steps: timelines and profiles, where `watch` asks for them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from chrome_trace import names_of, read_trace
from own_parts import Net, losses, reader
from torch import Tensor, nn

import lockstep as ls
from lockstep.recipes.parts import Checkpoints, Evaluate, Monitoring
from lockstep.recipes.recipe import Recipe
from lockstep.reporting.profiling import Profile
from lockstep.types import Interval, StepRange


def score(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"mae": (model(batch["words"]) - batch["wanted"]).abs()}


def run(folder: Path, steps: int = 8, **watch: Any) -> ls.Result:
    recipe = Recipe.of(
        Net,
        reader,
        losses,
        score=score,
        batch_size=8,
        end=ls.Steps(steps),
        watch=Monitoring(metrics=Interval(1), summaries=Interval(0), console=Interval(0), **watch),
        evaluate=Evaluate(Interval(4)),
        checkpoints=Checkpoints(Interval(5)),
    )
    return ls.run(recipe, folder)


def test_a_run_is_recorded_with_its_hooks_evaluations_and_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    plain = run(tmp_path / "plain")
    watched = run(tmp_path / "run", trace=StepRange(2, 6), profile=Profile(every=4))
    assert watched.evaluation == plain.evaluation
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("plain", "run")]
    assert metrics[0] == metrics[1], "to the bit"
    found = sorted(path.name for path in (tmp_path / "run/traces").iterdir())
    assert found == ["profile-0.json", "profile-0.txt", "profile-4.json", "profile-4.txt", "steps-2-6.json"]
    assert not (tmp_path / "plain/traces").exists()
    lanes = read_trace(tmp_path / "run/traces/steps-2-6.json")
    assert names_of(lanes, "steps") == ["step 2", "step 3", "step 4", "step 5"]
    assert {"data", "compute", "exchange", "loop body", "evaluate", "save"} <= {*names_of(lanes, "phases")}
    assert {"hooks", "copy the state"} <= {*names_of(lanes, "main thread")}
    assert "write checkpoint" in names_of(lanes, "checkpoint")


def test_a_run_that_goes_on_after_the_steps_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run(tmp_path, 4, trace=StepRange(1, 3))
    run(tmp_path, 5, trace=StepRange(1, 3))
    assert "not traced" not in caplog.text
    run(tmp_path, 6, trace=StepRange(1, 4))
    assert "steps 1:4 are not traced: they were over before step 5" in caplog.text
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["steps-1-3.json"]


def test_steps_after_the_end_of_the_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ls.InputError) as caught:
        run(tmp_path, 4, trace=StepRange(4, 9))
    assert (caught.value.what, caught.value.given, caught.value.expected, caught.value.hint) == (
        "The run would be over before the steps that are to be recorded.",
        "watch.trace=4:9, and an end after 4 steps",
        "steps below 4: the last one begins when 3 updates are complete",
        "--set watch.trace=0:4; or none",
    )
    with pytest.raises(ls.InputError, match=r"given: +watch\.profile\.steps=9:10"):
        run(tmp_path, 4, profile=Profile(steps=StepRange(9, 10)))
    assert [*tmp_path.iterdir()] == []
