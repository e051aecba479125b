"""`lockstep status` and `lockstep runs`: what the files of runs tell, at a glance and for programs."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lockstep as ls
from lockstep.cli import status
from lockstep.cli.main import main
from lockstep.cli.status import RunStatus, status_lines, table
from lockstep.recipes.shipped import find
from lockstep.report.facts import facts_of_run
from lockstep.runs.record import RunRecord
from lockstep.runs.workdir import Workdir

TIMING = {
    "time": "2026-01-02T03:04:05+0000", "step": 9, "position": 1152, "num_steps": 4, "num_examples": 512,
    "seconds": 2.0, "wait_seconds": 0.5, "last_step": 100, "seconds_left": 50.0,
}  # fmt: skip


def attempt(step: int, total: Any) -> dict[str, Any]:
    nothing: dict[str, float] = {}
    return {
        "step": step, "position": step * 128, "losses": {"a": total}, "smoothed": nothing, "total": total,
        "metrics": nothing, "learning_rate": 0.1, "gradient_norm": 1.0, "refused": False,
    }  # fmt: skip


def make_run(path: Path, *, rate: float = 0.1, score: Any = 0.5, loss: Any = 1.5, event: str = "end") -> Path:
    path.mkdir(parents=True)
    run = Workdir(path)
    run.write_recipe(replace(find("mnist"), optimizer=ls.optim.SGD(rate), name=path.name.strip("<>\x1b")))
    with run.held():
        run.note("start", step=0, workers=2)
        run.note(event, step=9, workers=2, **({"error": "The disk is full."} if event == "failed" else {}))
    evaluation = {"step": 9, "evaluation": "validation", "scores": {"top1": score}}
    lines = [attempt(9, loss), evaluation]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "timings.jsonl").write_text(json.dumps(TIMING) + "\n")
    return path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs" / "one", rate=0.1, score=0.5, loss=2.5)
    make_run(tmp_path / "runs" / "two", rate=0.2, score=0.75, loss=1.5, event="stop")
    make_run(tmp_path / "runs" / "sub" / "three", rate=0.2, score="nan", loss="nan", event="failed")
    return tmp_path / "runs"


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def test_a_line_for_each_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, *lines = said(capsys, "status", runs).splitlines()
    assert head.split() == [*status.COLUMNS]
    rows = {Path(line.split()[0]).name: " ".join(line.split()[1:]) for line in lines[:3]}
    assert rows["one"] == "finished 9 of 100 - 2.5 validation/top1 0.5 256 2 25 % -"
    assert rows["two"] == "stopped 9 of 100 - 1.5 validation/top1 0.75 256 2 25 % -"
    assert rows["three"] == "failed 9 of 100 - nan validation/top1 nan 256 2 25 % -"
    notes = "\n".join(lines[3:])
    assert f"{runs}/sub/three: failed: The disk is full." in notes
    assert f"{runs}/two: to go on: lockstep train {runs}/two" in notes


def test_a_run_at_work_says_how_long_it_takes_and_that_it_stands_still(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path / "run")
    with Workdir(path).held():
        Workdir(path).note("resume", step=9, workers=2)
        (found,) = json.loads(said(capsys, "status", path, "--json"))["runs"]
        assert (found["state"], found["seconds_left"], found["workers"]) == ("running", 50.0, 2)
        assert any(note.startswith("no step for") for note in found["notes"])
        assert "50 s" in said(capsys, "status", path)


def test_one_folder_that_cannot_be_read_hides_no_other_run(
    runs: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("bad", "worse"):
        (runs / "odd" / name).mkdir(parents=True)
        (runs / "odd" / name / "recipe.toml").symlink_to("nowhere")
    found = {Path(facts["run"]).name: facts for facts in json.loads(said(capsys, "status", runs, "--json"))["runs"]}
    assert {name: facts["state"] for name, facts in found.items()} == {
        "one": "finished", "two": "stopped", "three": "failed", "bad": "unreadable", "worse": "unreadable",
    }  # fmt: skip
    assert found["bad"]["notes"] == [f"left out: {runs / 'odd/bad'} (no plain file recipe.toml)"]
    assert len(said(capsys, "runs", runs).splitlines()) == 6
    assert len(said(capsys, "runs", runs, "--where", "optimizer.lr=0.2").splitlines()) == 3
    assert main(["status", str(runs), str(runs / "odd" / "bad")]) == 2
    assert main(["status", str(runs / "odd")]) == 2
    assert caplog.text.count("is not the folder of a run that can be read") == 2


def test_what_runs_comes_first_and_the_others_are_counted_where_the_screen_is_full() -> None:
    ended = [RunStatus(f"old/{place}", state="finished") for place in range(30)]
    statuses = [*ended, RunStatus("dead", state="killed", notes=["gone"]), RunStatus("new", state="running")]
    for height in (None, 40):
        lines = status_lines(statuses, 200, height)
        assert len(lines) == 35
        assert lines[1].startswith("new")
    _, new, others, _, note = status_lines(statuses, 200, 10)
    assert new.startswith("new")
    assert (others, note) == ("and 30 finished, 1 killed", "dead: gone")


def test_following_says_nothing_while_nothing_happens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(tmp_path / "run")
    held = Workdir(path).held()
    held.__enter__()
    Workdir(path).note("resume", step=9, workers=2)
    now, looks = time.time(), []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        monkeypatch.setattr("lockstep.runs.record.time.time", lambda: now + 5 * len(looks))
        if len(looks) == 4:
            held.__exit__(None, None, None)

    monkeypatch.setattr(status.time, "sleep", sleep)
    shown = _followed(said(capsys, "status", path, "--follow", "--json"))
    assert [facts[0]["state"] for facts in shown] == ["running", "failed"]
    assert any(note.startswith("no step for") for note in shown[0][0]["notes"])


def test_nobody_who_reads_is_no_error(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["status", str(runs)]) == 141


def test_one_is_one_and_a_command_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "my runs" / "run", event="stop")
    Workdir(path).note("continue", step=9, workers=1)
    Workdir(path).note("stop", step=9, workers={"a": [float("nan")]})
    (path / "quarantine.jsonl").write_text('{"example": "a", "reason": "b"}\n')
    (path / "refused" / "position-000000001").mkdir(parents=True)
    (path / "refused" / "position-000000001" / "report.json").write_text('{"step": 1}')
    (found,) = json.loads(said(capsys, "status", path, "--json"))["runs"]
    assert found["workers"] == 1
    assert found["notes"] == [
        f"to go on: lockstep train '{path}'",
        "workers were lost once, and the others went on",
        "an attempt was not finite once, and changed nothing: refused/",
        "an example could not be read, once; others stood in: quarantine.jsonl",
    ]
    assert tuple(found["notes"]) == facts_of_run(RunRecord(path), "run", 0).attention[:4], "a report says the same"


def test_following_ends_with_the_last_run(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Workdir(runs / "one").held()
    held.__enter__()
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            held.__exit__(None, None, None)

    monkeypatch.setattr(status.time, "sleep", sleep)
    shown = said(capsys, "status", runs / "one", "--follow", "--json")
    states = [facts[0]["state"] for facts in _followed(shown)]
    assert states[0] == "running"
    assert states[-1] == "finished"


def _followed(text: str) -> list[Any]:
    return [json.loads(line)["runs"] for line in text.splitlines()]


def test_the_best_run_comes_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def order(*words: str) -> list[str]:
        return [Path(line.split()[0]).name for line in said(capsys, "runs", runs, *words).splitlines()[1:]]

    assert order() == ["two", "one", "three"]
    assert order("--sort", "loss") == ["two", "one", "three"]
    assert order("--sort", "name") == ["one", "three", "two"]
    assert order("--where", "optimizer.lr=0.2") == ["two", "three"]
    assert order("--where", "optimizer.lr=2e-1") == ["two", "three"]
    assert order("--where", "optimizer.lr=0.2", "--where", "optimizer.lr=0.1") == []
    assert order("--where", "optimizer.lr=0.2", "--where", "name=two") == ["two"]
    assert said(capsys, "runs", runs, "--where", "name=nobody") == "No run is like that.\n"


def test_fields_of_recipes_are_columns(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, first, *_ = said(capsys, "runs", runs, "--show", "optimizer.lr").splitlines()
    assert head.split()[-1] == "optimizer.lr"
    assert first.split()[-1] == "0.2"
    (found, *_) = json.loads(said(capsys, "runs", runs, "--show", "optimizer.lr", "--json"))["runs"]
    assert found["fields"] == {"optimizer.lr": 0.2}


@pytest.mark.parametrize("word", ["optimizer.l", "nothing"])
def test_a_field_that_no_recipe_has_is_refused(runs: Path, word: str, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["runs", str(runs), "--show", word]) == 2
    assert word in caplog.text
    assert main(["runs", str(runs), "--where", word]) == 2
    assert "FIELD=VALUE" in caplog.text


def test_folders_without_runs_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert main(["status", str(tmp_path / "none")]) == 2
    assert "There are no runs there." in caplog.text
    assert "There is no folder" in caplog.text


def test_names_from_files_move_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "run")
    with Workdir(path).held():
        Workdir(path).note("failed", step=9, error="a\x1b[2Jb")
    shown = said(capsys, "status", path)
    assert "\x1b" not in shown
    assert r"a\x1b[2Jb" in shown


def test_nothing_is_written_into_the_folders(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in runs.rglob("*")}

    before = files()
    said(capsys, "status", runs)
    said(capsys, "runs", runs)
    assert files() == before


def test_a_terminal_that_is_too_narrow_gets_a_paragraph_for_each_row() -> None:
    columns, rows = ["run", "state"], [["a", "running"], ["b", "stopped"]]
    assert table(columns, rows, 12) == ["run  state", "a    running", "b    stopped"]
    assert table(columns, rows, 10) == ["a", "  state  running", "b", "  state  stopped"]
    assert table(columns, rows, None) == table(columns, rows, 80)
