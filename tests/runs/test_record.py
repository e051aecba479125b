"""The record of a run: whatever its files tell, and in whatever state they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.errors import WorkdirError
from lockstep.recipes.shipped import find
from lockstep.runs.lease import EXPIRY_SECONDS
from lockstep.runs.record import RunRecord, as_unix_seconds, find_runs, format_time
from lockstep.runs.workdir import Workdir

ATTEMPT = {
    "step": 7, "position": 896, "losses": {"a": 1.5}, "smoothed": {}, "total": 1.5, "metrics": {},
    "learning_rate": 0.1, "gradient_norm": 2.0, "refused": False,
}  # fmt: skip
TIMING = {
    "time": "2026-01-02T03:04:05+0000", "step": 9, "position": 1152, "num_steps": 4, "num_examples": 512,
    "seconds": 2.0, "wait_seconds": 0.5, "last_step": 100, "seconds_left": 50.0,
}  # fmt: skip


@pytest.fixture
def workdir(tmp_path: Path) -> Workdir:
    made = Workdir(tmp_path / "run")
    made.path.mkdir()
    made.write_recipe(find("mnist"))
    return made


def write_lines(path: Path, *lines: object) -> None:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))


def test_a_run_that_has_not_begun(workdir: Workdir) -> None:
    record = RunRecord(workdir.path)
    assert (record.state, record.step, record.scores, record.checkpoints) == ("not started", 0, [], [])
    assert (record.last_attempt, record.last_timing, record.seen_unix_seconds) == (None, None, None)
    assert record.recipe == find("mnist")
    assert not record.problems


@pytest.mark.parametrize(("event", "state"), [("end", "finished"), ("stop", "stopped"), ("failed", "failed")])
def test_how_a_start_ended(workdir: Workdir, event: str, state: str) -> None:
    with workdir.held():
        workdir.note("start", step=0, workers=2)
        assert RunRecord(workdir.path).state == "running"
        workdir.note(event, step=3)
    record = RunRecord(workdir.path)
    assert (record.state, record.step) == (state, 3)
    assert record.seen_unix_seconds == as_unix_seconds(record.history[-1]["time"])


def test_remarks_end_nothing(workdir: Workdir) -> None:
    with workdir.held():
        workdir.note("start", step=0)
        workdir.note("failed", step=3, error="The disk is full.")
        workdir.note("verdict", step=3, cause="device", said="It is the device.")
        workdir.note("straggler", step=3, said="worker 1 is the slowest")
    record = RunRecord(workdir.path)
    assert (record.state, record.error) == ("failed", "The disk is full.")
    assert record.remarks == ["It is the device.", "worker 1 is the slowest"]


def test_a_start_that_gave_the_folder_up_without_a_word_has_failed(workdir: Workdir) -> None:
    with workdir.held():
        workdir.note("start", step=0)
    assert RunRecord(workdir.path).state == "failed"


@pytest.mark.process
def test_a_run_that_was_killed_was_alive_until_its_lease_was_renewed_last(workdir: Workdir) -> None:
    script = (
        "import os, sys, pathlib; from lockstep.runs.workdir import Workdir\n"
        "run = Workdir(pathlib.Path(sys.argv[1]))\n"
        "with run.held():\n    run.note('start', step=0)\n    os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, workdir.path], check=False).returncode == -9
    (lease,) = workdir.path.glob(".lease-*")
    os.utime(lease, (0, 2_000_000_000))
    record = RunRecord(workdir.path)
    assert record.state == "killed"
    assert record.seen_unix_seconds == 2_000_000_000


@pytest.mark.parametrize(("silent_seconds", "state"), [(0.0, "running"), (2 * EXPIRY_SECONDS, "killed")])
def test_a_run_on_another_host_lives_as_long_as_it_renews_its_lease(
    workdir: Workdir, silent_seconds: float, state: str
) -> None:
    with workdir.held():
        workdir.note("start", step=0)
        (lease,) = workdir.path.glob(".lease-*")
        text = lease.read_text()
    lease.write_text(json.dumps(json.loads(text) | {"system": "another"}))
    renewed = time.time() - silent_seconds
    os.utime(lease, (renewed, renewed))
    assert RunRecord(workdir.path).state == state


def test_the_last_lines_are_found_without_reading_the_others(workdir: Workdir) -> None:
    write_lines(workdir.path / "metrics.jsonl", *[ATTEMPT | {"step": step} for step in range(2000)])
    write_lines(workdir.path / "timings.jsonl", *[TIMING | {"step": step} for step in range(2000)])
    record = RunRecord(workdir.path)
    assert record.last_attempt == ATTEMPT | {"step": 1999}
    assert record.last_timing
    assert (record.last_timing.step, record.step) == (1999, 1999)
    assert (record.last_timing.examples_per_second, record.last_timing.wait_share) == (256, 0.25)


def test_torn_and_foreign_lines_are_left_out_and_told(workdir: Workdir) -> None:
    torn = '{"step": 8, "posit'
    (workdir.path / "metrics.jsonl").write_text(f"{json.dumps(ATTEMPT)}\nnonsense\n{json.dumps([1])}\n{torn}")
    (workdir.path / "timings.jsonl").write_text(f'{json.dumps(TIMING)}\n{{"time": 3}}\n{"[" * 100_000}\n')
    (workdir.path / "history.jsonl").write_bytes(b'\xff\xfe\n{"event": "start", "step": "x"}\n')
    (workdir.path / "result.json").write_text("[]")
    record = RunRecord(workdir.path)
    assert list(record.metrics()) == [ATTEMPT]
    assert len(record.timings) == 1
    assert (record.last_attempt, record.history, record.result) == (ATTEMPT, [], {})
    told = " ".join(record.problems)
    assert all(text in told for text in ("metrics.jsonl, line 2", "metrics.jsonl, line 3", "timings.jsonl, line 3"))
    assert "metrics.jsonl, line 4" not in told, "it is just being written"
    assert "result.json" in told


@pytest.mark.parametrize(
    "facts",
    [
        {"seconds_left": 10**400},
        {"step": 10**30},
        {"step": 1.5},
        {"step": float("nan")},
        {"seconds": "nan"},
        {"seconds": float("inf")},
        {"num_examples": True},
        {"time": 3},
    ],
)
def test_timings_of_another_kind_are_left_out(workdir: Workdir, facts: dict[str, object]) -> None:
    write_lines(workdir.path / "timings.jsonl", TIMING, TIMING | facts)
    record = RunRecord(workdir.path)
    assert (len(record.timings), record.last_timing, record.step) == (1, record.timings[0], 9)


@pytest.mark.parametrize("strange", ["9" * 400, "[" * 60 + "]" * 60, "[" * 100_000 + "]" * 100_000])
def test_numbers_and_objects_that_nothing_of_a_run_has_are_left_out(workdir: Workdir, strange: str) -> None:
    text = f'{{"step": 1, "evaluation": "validation", "scores": {{"top1": 1}}, "more": {strange}}}'
    write_lines(workdir.path / "metrics.jsonl", text, ATTEMPT | {"seed": 2**63 - 1})
    (workdir.path / "choices.json").write_text(text)
    record = RunRecord(workdir.path)
    assert (record.scores, record.choices) == ([], {})
    assert [line["seed"] for line in record.metrics()] == [2**63 - 1]
    assert record.problems == [
        "metrics.jsonl, line 1 cannot be read, and is left out",
        "choices.json is no JSON object, and is left out",
    ]


def test_pipes_and_links_are_not_opened(workdir: Workdir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "private.json").write_text('{"step": 3}')
    (workdir.path / "result.json").symlink_to(tmp_path / "private.json")
    for name in ("metrics.jsonl", "timings.jsonl"):
        os.mkfifo(workdir.path / name)
    record = RunRecord(workdir.path)
    assert (record.last_attempt, record.last_timing, record.scores, record.result) == (None, None, [], {})
    assert sorted(record.problems) == [
        "metrics.jsonl cannot be read: it is no plain file",
        "result.json cannot be read: it is a link",
        "timings.jsonl cannot be read: it is no plain file",
    ]
    os.mkfifo(workdir.path / ".lease-000001")
    monkeypatch.setattr("lockstep.runs.lease._READ_PAUSE_SECONDS", 0.0)
    assert RunRecord(workdir.path).holder
    (tmp_path / "link").symlink_to(workdir.path)
    assert RunRecord(tmp_path / "link").recipe == find("mnist")
    (workdir.path / "recipe.toml").rename(tmp_path / "mine.toml")
    (workdir.path / "recipe.toml").symlink_to(tmp_path / "mine.toml")
    with pytest.raises(WorkdirError):
        RunRecord(workdir.path)


def test_links_to_folders_are_not_followed(workdir: Workdir, tmp_path: Path) -> None:
    kept = tmp_path / "elsewhere/position-000000001"
    kept.mkdir(parents=True)
    (kept / "report.json").write_text('{"step": 1}')
    (workdir.path / "refused").symlink_to(kept.parent)
    for name in ("step-00000001", "step-00000002"):
        (tmp_path / name).mkdir()
    checkpoints = workdir.path / "checkpoints"
    (checkpoints / "step-00000003").mkdir(parents=True)
    (checkpoints / "step-00000002").symlink_to(tmp_path / "step-00000002")
    record = RunRecord(workdir.path)
    assert (record.refused, record.checkpoints) == ([], [3])
    told = [f"{name} is a link to a folder, and left out" for name in ("checkpoints/step-00000002", "refused")]
    assert record.problems == told


def test_scores_that_are_not_finite_are_never_the_best(workdir: Workdir) -> None:
    lines = [
        {"step": step, "evaluation": "validation", "scores": {"top1": value, "loss": 2.0}}
        for step, value in ((1, 0.5), (2, "nan"), (3, 0.75), (4, 0.25))
    ]
    write_lines(workdir.path / "metrics.jsonl", ATTEMPT, *lines)
    record = RunRecord(workdir.path)
    assert record.main_score
    assert (record.main_score.name, record.main_score.step) == ("validation/top1", 4), "the last one"
    recipe = (workdir.path / "recipe.toml").read_text()
    kept = recipe.replace("[checkpoints.retention]", '[checkpoints.retention]\nbest = "validation/top1"')
    (workdir.path / "recipe.toml").write_text(kept)
    best = RunRecord(workdir.path).main_score
    assert best
    assert (best.value, best.step) == (0.75, 3)


def test_a_recipe_that_cannot_be_read_hides_nothing_else(workdir: Workdir) -> None:
    write_lines(workdir.path / "metrics.jsonl", ATTEMPT)
    (workdir.path / "recipe.toml").write_text("name = 3")
    record = RunRecord(workdir.path)
    assert record.recipe is None
    assert record.step == 7
    assert record.problems


def test_the_autopsies_of_batches_that_were_not_finite(workdir: Workdir) -> None:
    for position in (128, 64):
        folder = workdir.path / "refused" / f"position-{position:09d}"
        folder.mkdir(parents=True)
        report = {"step": 1, "position": position, "reasons": ["<b>"], "culprits": []}
        (folder / "report.json").write_text(json.dumps(report))
    write_lines(workdir.path / "quarantine.jsonl", {"example": "a.jpg", "reason": "it is cut short"})
    record = RunRecord(workdir.path)
    assert [each["position"] for each in record.refused] == [64, 128]
    assert record.bad_examples == [{"example": "a.jpg", "reason": "it is cut short"}]


def test_runs_are_found_below_a_folder_and_not_in_runs(tmp_path: Path) -> None:
    deep = ["b", "a/one", "a/two", "x/y/z/w", "x/y/z/w/too/deep", ".hidden", "b/inside"]
    for name in deep:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "recipe.toml").write_text("")
    assert [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)] == ["a/one", "a/two", "b", "x/y/z/w"]
    assert find_runs(tmp_path / "b") == [tmp_path / "b"]


@pytest.mark.parametrize("name", ["none", "file", "empty"])
def test_what_is_no_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(WorkdirError, match="is not the folder of a run") as caught:
        RunRecord(tmp_path / name)
    assert name in str(caught.value.given)
    if name != "empty":
        with pytest.raises(WorkdirError, match="no folder"):
            find_runs(tmp_path / name)


def test_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    seconds = as_unix_seconds("2026-01-02T05:04:05+0200")
    assert seconds
    assert format_time(seconds) == "2026-01-02 03:04:05"
    assert [as_unix_seconds(each) for each in ("yesterday", None, 3)] == [None, None, None]
    far = ("9999-12-31T23:59:59-1400", "9999-12-31T23:59:59+0000", "0001-01-01T00:00:00+0000")
    assert [as_unix_seconds(each) for each in far] == [None, None, None]
    assert {format_time(each) for each in (-1.0, 1e300, float("nan"))} == {"?"}
    monkeypatch.undo()
    time.tzset()
