"""How fast a run goes, on disk: a line for the first attempt, one every ten seconds, and one for the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lockstep as ls
from lockstep.reporting import timings
from lockstep.reporting.timings import TimingsFile
from lockstep.types import Progress, StepReport


def report(step: int, *, skipped: bool = False) -> StepReport:
    progress = Progress(step, step * 8, 80, elapsed_seconds=step * 2.0)
    return StepReport(
        progress, {}, {}, {}, 0.1, 1.0, num_examples=8, step_seconds=2.0, wait_seconds=0.5, skipped=skipped
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(timings.time, "monotonic", lambda: now[0])
    return now


def test_lines_of_a_run(tmp_path: Path, clock: list[float]) -> None:
    path = tmp_path / "timings.jsonl"
    path.write_text('{"step": 1}\n{"torn')
    file = TimingsFile(path, batch_size=8, end=ls.Steps(100))
    for step in range(1, 8):
        file(report(step, skipped=step == 3))
        clock[0] += 2.5
    file.close()
    before, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert before == {"step": 1}, "what an earlier start wrote stays"
    assert [line["step"] for line in lines] == [1, 5, 7]
    assert [line["num_steps"] for line in lines] == [1, 3, 2]
    assert [line["num_examples"] for line in lines] == [8, 32, 16]
    assert [line["seconds"] for line in lines] == [2.0, 8.0, 4.0]
    assert [line["wait_seconds"] for line in lines] == [0.5, 2.0, 1.0]
    assert [line["last_step"] for line in lines] == [100] * 3
    assert [line["seconds_left"] for line in lines] == [None, pytest.approx(190), pytest.approx(186)]


def test_nothing_is_written_of_nothing(tmp_path: Path, clock: list[float]) -> None:
    path = tmp_path / "timings.jsonl"
    TimingsFile(path, batch_size=8, end=None).close()
    assert path.read_text() == ""
    file = TimingsFile(path, batch_size=8, end=None)
    file(report(1))
    file.close()
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["last_step"] is None
