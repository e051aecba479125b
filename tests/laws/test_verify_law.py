"""The law of verification: whatever befalls a run, its files fit its chain, and its updates can be made again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from staged_run import NOTHING, STEPS, Disturbance, make_recipe, make_task, run, start

import lockstep as ls
from lockstep.recipes.parts import Checkpoints, Evaluate, Verification
from lockstep.recipes.recipe import Recipe
from lockstep.reporting.chain import CHAIN, read_chain
from lockstep.runs.examination import Examination, examine
from lockstep.runs.replay import Replayed, choose_window, replay, window_lines
from lockstep.workers.rank import leave


class CrashError(Exception):
    pass


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    leave()


def no_progress(done: int, total: int) -> None:
    pass


def examined(workdir: Path) -> Examination:
    found = examine(workdir, no_progress)
    assert found.problems == []
    return found


def verified(
    workdir: Path, given: Recipe, steps: tuple[int, int] = (1, STEPS), what: Disturbance = NOTHING
) -> Replayed:
    """Verify a run whose functions are those of a script."""
    found = examined(workdir)
    window = choose_window(found, steps)
    assert window is not None
    told = window_lines(found, window)
    told.check(window)
    leave()
    recipe = replace(told.recipe, task=make_task(what), model=given.model, data=given.data, num_threads=1)
    replayed = replay(recipe, workdir, window, told, ls.join("cpu"), tolerance=None, progress=no_progress)
    assert (replayed.verdict, replayed.difference, replayed.environment) == ("bit-identical", "", [])
    return replayed


def crash_at(position: int, **more: Any) -> Disturbance:
    def attempted(now: int) -> None:
        if now == position:
            raise CrashError

    return Disturbance(attempted=attempted, **more)


@pytest.mark.parametrize("steps", [(1, 8), (3, 4), (6, 6)])
def test_stages_averages_and_evaluations(tmp_path: Path, steps: tuple[int, int]) -> None:
    given = make_recipe(every=3, verify=Verification(every=1))
    run(tmp_path / "run", given)
    found = verified(tmp_path / "run", given, steps)
    assert found.digests_at == [*range(found.window.checkpoint, steps[1] + 1)]


def test_a_run_that_was_killed_stopped_and_resumed(tmp_path: Path) -> None:
    given, workdir = make_recipe(every=2), tmp_path / "run"
    for position in (4, 12, 20, 28):
        with pytest.raises(CrashError):
            run(workdir, given, crash_at(position))
        examined(workdir)
        with (workdir / CHAIN).open("a") as file:
            file.write('{"step": 99, "po')
        with (workdir / "metrics.jsonl").open("a") as file:
            file.write('{"step"')
        examined(workdir)
    stopped = start(workdir, given)
    stopped._worker.pulse.stop_requested = "SIGTERM"
    assert stopped.run().reason == "stopped"
    run(workdir, given)
    assert verified(workdir, given).num_compared == STEPS
    names = [line.facts["event"] for line in read_chain(workdir / CHAIN) if "event" in line.facts]
    assert names.count("resume") >= 4


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_attempts_that_are_not_finite(tmp_path: Path, policy: Any) -> None:
    given, workdir, what = make_recipe(nonfinite=policy), tmp_path / "run", Disturbance(bad=(4, 8, 12, 24))
    run(workdir, given, what)
    found = verified(workdir, given, what=what)
    assert found.num_compared == STEPS + (4 if policy == "skip" else 0)


def test_a_checkpoint_after_a_skipped_attempt(tmp_path: Path) -> None:
    rarely = {"checkpoints": Checkpoints(ls.Interval(50)), "evaluate": Evaluate(ls.Interval(0))}
    given, workdir = make_recipe(nonfinite="skip", verify=Verification(every=1), **rarely), tmp_path / "run"

    def stop(now: int) -> None:
        if now == 4:  # seen with the next attempt
            ls.join().pulse.stop_requested = "SIGTERM"

    assert run(workdir, given, Disturbance(bad=(8,), attempted=stop)).reason == "stopped"
    run(workdir, given, Disturbance(bad=(8,)))
    found = examined(workdir)
    assert [*found.digests[2]] == [8, 12]
    verified(workdir, given, (3, STEPS), Disturbance(bad=(8,)))


def test_a_rollback_that_was_killed_before_it_was_saved(tmp_path: Path) -> None:
    given, workdir = make_recipe(every=3, nonfinite="rollback"), tmp_path / "run"
    bad = (4, 24)
    for position in (12, 32):
        with pytest.raises(CrashError):
            run(workdir, given, crash_at(position, bad=bad))
        examined(workdir)
    run(workdir, given, Disturbance(bad=bad))
    verified(workdir, given, what=Disturbance(bad=bad))


def test_a_run_that_goes_on_by_another_recipe_with_leave(tmp_path: Path) -> None:
    given, workdir = make_recipe(stages=(), end=ls.Steps(4), optimizer=ls.optim.SGD(0.1)), tmp_path / "run"
    run(workdir, given)
    leave()
    other = replace(given, end=ls.Steps(8), optimizer=ls.optim.SGD(0.2))
    ls.run(other, workdir, accept_changes=True)
    verified(workdir, given, (2, 4))
    verified(workdir, given, (5, 8))
    with pytest.raises(ls.InputError, match="At step 4 the run went on by another recipe") as caught:
        verified(workdir, given, (3, 6))
    assert "optimizer.lr: saved 0.1, given 0.2" in str(caught.value)


def test_a_fork(tmp_path: Path) -> None:
    given = make_recipe()
    run(tmp_path / "first", replace(given, end=ls.Steps(4)))
    run(tmp_path / "fork", given, fork_from=str(tmp_path / "first"))
    verified(tmp_path / "fork", given, (5, 8))
    with pytest.raises(ls.InputError, match="no such updates"):
        verified(tmp_path / "fork", given, (4, 8))
