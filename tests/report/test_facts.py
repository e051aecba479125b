from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from written_runs import event, metrics_line, timing_line, write_run

from lockstep.recipes.shipped import find
from lockstep.report.facts import RunFacts, facts_of_run, recipe_differences
from lockstep.runs.record import RunRecord


def facts(folder: Path, **files: Any) -> RunFacts:
    record = RunRecord(write_run(folder, **files))
    return facts_of_run(record, "mine", 0)


def test_what_happened_is_told_by_segments(tmp_path: Path) -> None:
    history = [
        event("start", 0, 0),
        event("continue", 40, 5, lost="worker 1: SIGKILL", seconds=1.25, **{"from": "memory"}),
        event("unheard-of", 45, 6),
        event("resume", 60, 30, changed=["end: 2 epochs"], taken_over_from="pid 7 on one"),
        event("failed", 80, 40, error="out of memory"),
    ]
    timings = [timing_line(10, 1), timing_line(70, 7), timing_line(75, 35)]
    found = facts(tmp_path / "run", history=history, timings=timings)
    assert [
        (each.event, each.first_step, each.last_step, each.seconds, each.ended) for each in found.course.segments
    ] == [
        ("start", 0, 40, 300.0, "continue"),
        ("continue", 40, 70, 120.0, "killed"),
        ("resume", 60, 80, 600.0, "failed"),
    ]
    assert [each.notes for each in found.course.segments] == [
        (),
        ("lost: worker 1: SIGKILL", "went on from memory", "back at work after 1.2 s"),
        ("changed: end: 2 epochs", "taken over from pid 7 on one", "failed: out of memory"),
    ]
    assert found.overview.seconds == 1020
    assert found.attention[:3] == (
        "failed: out of memory",
        f"to go on: lockstep train {tmp_path / 'run'}",
        "it was started again once",
    )


def test_a_segment_that_was_rolled_back_tells_how_far_it_had_come(tmp_path: Path) -> None:
    history = [event("start", 0, 0), event("rollback", 40, 5, from_step=55, why="loss"), event("stop", 60, 9)]
    first, second = facts(tmp_path / "a run", history=history).course.segments
    assert (first.last_step, second.first_step) == (55, 40)


def test_the_command_to_go_on_can_be_pasted(tmp_path: Path) -> None:
    found = facts(tmp_path / "a run", history=[event("start", 0, 0), event("stop", 60, 9)])
    assert f"to go on: lockstep train '{tmp_path / 'a run'}'" in found.attention


def test_a_run_that_was_killed_says_since_when(tmp_path: Path) -> None:
    found = facts(tmp_path / "run", history=[event("start", 0, 0)], timings=[timing_line(30, 2)])
    (segment,) = found.course.segments
    assert (segment.last_step, segment.seconds, segment.ended) == (30, 120.0, "killed")
    assert found.attention[0].startswith("killed, or its host was lost: nothing is heard of it since 2026-11-2")


def test_a_run_of_an_older_version_has_what_it_has(tmp_path: Path) -> None:
    result = {"step": 20, "epochs": 0.5, "reason": "end", "times": {"seconds": 9.0, "examples_per_second": 700.0}}
    found = facts(tmp_path / "run", metrics=[metrics_line(20, 0.25)], result=result)
    assert (found.overview.loss, found.overview.examples_per_second, found.overview.epochs) == (0.25, 700.0, 0.5)
    assert (found.overview.wait_share, found.course.segments, found.checkpoints, found.data) == (None, (), (), {})


def test_the_pace_is_that_of_all_timings(tmp_path: Path) -> None:
    timings = [timing_line(10, 1), timing_line(20, 2, seconds=30.0, wait_seconds=19.0)]
    found = facts(tmp_path / "run", timings=timings, history=[event("start", 0, 0), event("end", 20, 3)])
    assert (found.overview.examples_per_second, found.overview.wait_share) == (64.0, 0.5)
    assert "it waited for data 50% of the time: lockstep benchmark input says what limits it" in found.attention


def test_trouble_is_counted_and_kept_with_its_autopsy(tmp_path: Path) -> None:
    lines = [metrics_line(3, "nan", refused=True), metrics_line(4, arrivals={"used": {"1": 9}, "dropped": {"2": 4}})]
    quarantine = [{"example": "a.jpg", "reason": "truncated"}]
    folder = write_run(tmp_path / "run", metrics=lines, quarantine=quarantine)
    kept = folder / "refused/position-000000384"
    kept.mkdir(parents=True)
    (kept / "report.json").write_text(
        '{"step": 3, "position": 384, "reasons": ["loss is nan"], "culprits": ["tower 1"]}'
    )
    record = RunRecord(folder)
    found = facts_of_run(record, "mine", 1)
    assert (found.course.num_refused, found.course.refused[0]["culprits"]) == (1, ["tower 1"])
    assert found.course.by_worker == [("worker 1", 9, 0), ("worker 2", 0, 4)]
    assert found.attention == (
        "an attempt was not finite once, and changed nothing: refused/",
        "an example could not be read, once; others stood in: quarantine.jsonl",
        "a gradient came too late 4 times, and was dropped; its examples were handed out again",
    )


def test_a_score_says_who_has_scored_what(tmp_path: Path) -> None:
    lines = [{"step": 5, "evaluation": "validation", "scores": {"top1": 0.5, "top5": "nan"}}]
    result = {"step": 9, "evaluations": {"test": {"weights": "raw", "scores": {"top1": 0.75}}}}
    evaluations = [
        {"step": 7, "split": "test", "weights": "average", "num_examples": 4, "scores": {"top1": 0.6}},
        {"step": 8, "split": "test", "weights": "average", "num_examples": 4, "scores": {"top1": 0.7}},
        {"step": 8, "split": "test", "weights": "average", "data": "other", "scores": {"top1": 0.8, "odd": "many"}},
        {"step": 9, "split": "test", "weights": "raw", "scores": {"X_PerformanceByCategory/AP/cat": 1.5}},
    ]
    found = facts(tmp_path / "run", metrics=lines, result=result, evaluations=evaluations)
    assert [(each.name, each.value, each.step, each.origin) for each in found.scores if each.value == each.value] == [
        ("validation/top1", 0.5, 5, "in mid-run"),
        ("test/top1", 0.75, 9, "after the end, raw weights"),
        ("test/top1", 0.7, 8, "lockstep evaluate, average weights, 4 examples"),
        ("test/top1", 0.8, 8, "lockstep evaluate, average weights, other"),
    ]
    (by_class,) = found.class_scores
    assert (by_class.name, by_class.share) == ("test/X_PerformanceByCategory/AP/cat", 1.0)


def test_a_pipe_in_the_place_of_a_manifest_is_not_waited_for(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "checkpoints/step-00000001").mkdir(parents=True)
    os.mkfifo(folder / "checkpoints/step-00000001/manifest.json")
    (found,) = facts_of_run(RunRecord(folder), "mine", 0).checkpoints
    assert "manifest.json" in found.problem


def test_the_recipe_is_compared_with_the_shipped_one(tmp_path: Path) -> None:
    mine = replace(find("mnist"), batch_size=64)
    found = facts(tmp_path / "run", recipe=mine)
    assert [each.row for each in found.recipe.changes] == [("batch_size", "128", "64")]
    assert facts(tmp_path / "own", recipe=replace(mine, name="own")).recipe.shipped is None


def test_a_recipe_that_cannot_be_read_is_shown_as_it_is(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "recipe.toml").write_text("name = 'mnist'\nfrom_the_future = 1\n")
    found = facts_of_run(RunRecord(folder), "mine", 0)
    assert (found.recipe.shipped, found.overview.recipe) == (None, None)
    assert "from_the_future" in found.recipe.text
    assert found.problems == found.attention[-1:] != ()


def test_recipes_of_several_runs_are_compared_field_by_field() -> None:
    mnist = find("mnist")
    three = [mnist, None, replace(mnist, batch_size=64), replace(mnist, seed=3)]
    assert [each.row for each in recipe_differences(three)] == [
        ("batch_size", "128", "not readable", "64", "128"),
        ("seed", "0", "not readable", "0", "3"),
    ]
    assert recipe_differences([None, None]) == recipe_differences([mnist, mnist]) == []
