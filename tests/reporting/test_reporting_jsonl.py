from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_processes import HANG_SECONDS

from lockstep.errors import WorkdirError
from lockstep.reporting.jsonl import MetricsFile
from lockstep.types import Progress, StepReport


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_holds_the_facts_of_an_attempt(tmp_path: Path, make_report) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", from_position=0)
    file.write(
        make_report(
            3, losses={"cross_entropy": 0.1, "l2": 0.2}, smoothed={"total": 1 / 3}, metrics={"top1": 0.5}, skipped=True
        )
    )
    file.write_evaluation(3, "validate", {"top1": 0.9912, "correct": 9912})
    file.flush()
    file.close()
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 3, "position": 384, "losses": {"cross_entropy": 0.1, "l2": 0.2}, '
        '"smoothed": {"total": 0.3333333333333333}, "total": 0.30000000000000004, "metrics": {"top1": 0.5}, '
        '"learning_rate": 0.05, "gradient_norm": 2.0, "refused": true}\n'
        '{"step": 3, "evaluation": "validate", "scores": {"top1": 0.9912, "correct": 9912}}\n'
    )


def test_learning_rates_are_there_where_they_are_several(tmp_path: Path, make_report) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", from_position=0)
    file.write(make_report(1, learning_rate=0.5, learning_rates={"^body": 0.5, "^head": 0.25}))
    file.write(make_report(2, learning_rate=0.5, learning_rates={"": 0.5}))
    file.close()
    several, one = lines_of(tmp_path / "metrics.jsonl")
    assert several["learning_rates"] == {"^body": 0.5, "^head": 0.25}
    assert several["learning_rate"] == one["learning_rate"] == 0.5
    assert "learning_rates" not in one


def write_lines(path: Path, from_position: int, *reports: StepReport) -> None:
    with closing(MetricsFile(path, from_position=from_position)) as file:
        for report in reports:
            file.write(report)


def test_times_leave_no_trace(tmp_path: Path, make_report) -> None:
    quick, slow = tmp_path / "quick", tmp_path / "slow"
    write_lines(quick, 0, make_report(1))
    write_lines(slow, 0, make_report(1, elapsed_seconds=99.0, step_seconds=50.0, wait_seconds=30.0))
    assert quick.read_bytes() == slow.read_bytes()


@given(st.floats())
@settings(max_examples=50)
def test_every_number_comes_back(value: float) -> None:
    report = StepReport(Progress(1, 1, 1), {"loss": value}, {}, {}, 0.1, value, 1, 0.1, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        write_lines(path, 0, report)
        (line,) = [json.loads(text, parse_constant=pytest.fail) for text in path.read_text().splitlines()]
    for given_back in (float(line["losses"]["loss"]), float(line["gradient_norm"])):
        assert given_back == value or (math.isnan(given_back) and math.isnan(value))


def test_numbers_that_json_has_not_are_strings(tmp_path: Path, make_report) -> None:
    write_lines(
        tmp_path / "metrics.jsonl",
        0,
        make_report(1, losses={"a": math.nan, "b": math.inf}, gradient_norm=-math.inf, skipped=True),
    )
    (line,) = lines_of(tmp_path / "metrics.jsonl")
    assert line["losses"] == {"a": "nan", "b": "inf"}
    assert (line["total"], line["gradient_norm"], line["refused"]) == ("nan", "-inf", True)


def attempts() -> list[StepReport]:
    """Twelve attempts; each third is refused, so that a step stands for several positions."""
    reports, step = [], 0
    for attempt in range(1, 13):
        skipped = attempt % 3 == 0
        step += not skipped
        loss = math.nan if skipped else 1 / attempt
        reports.append(
            StepReport(Progress(step, 8 * attempt, 96), {"loss": loss}, {}, {}, 0.1, loss, 8, 0.1, 0.0, skipped)
        )
    return reports


def train(
    path: Path, from_position: int, reports: list[StepReport], save: Callable[[int], object] = lambda position: None
) -> None:
    """A run that evaluates after every other attempt, and then saves."""
    with closing(MetricsFile(path, from_position=from_position)) as file:
        for report in reports:
            file.write(report)
            if report.progress.position % 16 == 0:
                file.write_evaluation(report.step, "validate", {"top1": report.progress.position / 96})
                save(report.progress.position)


@given(st.data())
@settings(max_examples=50)
def test_a_killed_and_resumed_run_leaves_the_same_bytes(data: st.DataObject) -> None:
    sizes = {0: 0}
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        train(whole, 0, attempts(), lambda position: sizes.update({position: whole.stat().st_size}))
        saved = data.draw(st.sampled_from(sorted(sizes)), label="position of the checkpoint")
        size = data.draw(st.integers(sizes[saved], sizes[96]), label="size at the kill")
        killed.write_bytes(whole.read_bytes()[:size])
        rest = [report for report in attempts() if report.progress.position > saved]
        train(killed, saved, rest)
        assert killed.read_bytes() == whole.read_bytes()


def test_a_torn_last_line_goes_even_if_it_is_due(tmp_path: Path, make_report) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, 0, make_report(1))
    first = path.read_bytes()
    write_lines(path, 1000, make_report(2))
    path.write_bytes(path.read_bytes()[:-1])
    write_lines(path, 1000)
    assert path.read_bytes() == first


def test_an_evaluation_stands_there_once(tmp_path: Path, make_report) -> None:
    path = tmp_path / "metrics.jsonl"
    for from_position in (0, 128):
        with closing(MetricsFile(path, from_position=from_position)) as file:
            if not from_position:
                file.write(make_report(1))
            file.write_evaluation(1, "validate", {"top1": 0.5})
            file.write_evaluation(1, "validate", {"top1": 0.5})
    assert [line.get("evaluation") for line in lines_of(path)] == [None, "validate"]
    with closing(MetricsFile(path, from_position=128)) as file:
        file.write_evaluation(1, "test", {"top1": 0.5})
        file.write(make_report(2))
        file.write_evaluation(2, "validate", {"top1": 0.5})
    assert [line.get("evaluation") for line in lines_of(path)] == [None, "validate", "test", None, "validate"]


@pytest.mark.process
def test_what_a_killed_process_wrote_is_there(tmp_path: Path) -> None:
    program = (
        "import os, sys, signal, pathlib\n"
        "from lockstep.types import Progress\n"
        "from lockstep.types import StepReport\n"
        "from lockstep.reporting.jsonl import MetricsFile\n"
        "file = MetricsFile(pathlib.Path(sys.argv[1]), from_position=0)\n"
        "for step in range(1, 51):\n"
        "    file.write(StepReport(Progress(step, step, 0), {'loss': 1.0}, {}, {}, 0.1, 1.0, 1, 0.1, 0.0))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "metrics.jsonl"
    ended = subprocess.run([sys.executable, "-c", program, str(path)], timeout=HANG_SECONDS, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [line["step"] for line in lines_of(path)] == list(range(1, 51))


@pytest.mark.parametrize(
    "foreign",
    [
        b"not json",
        b"[1, 2]",
        b'{"epoch": 3}',
        b'{"step": "3", "position": 4}',
        b'{"step": 3, "position": "4"}',
        b'{"step": 3, "evaluation": 4}',
        b"\xff\xfe",
        b"[" * 5000,
        b"x" * (3 << 20),
    ],
    ids=["text", "list", "keys", "step", "position", "evaluation", "bytes", "nested", "long"],
)
@pytest.mark.parametrize("from_position", [0, 1000])
def test_foreign_content_is_named_and_kept(tmp_path: Path, make_report, foreign: bytes, from_position: int) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, 0, make_report(1))
    with path.open("ab") as whole:
        whole.write(foreign + b"\n")
    before = path.read_bytes()
    with pytest.raises(WorkdirError) as error:
        MetricsFile(path, from_position=from_position)
    assert error.value.what == f"{path}, line 2 is not a line of metrics."
    assert len(str(error.value.given)) <= 80
    assert error.value.expected == 'a JSON object with "step" and "position", or with "step" and "evaluation"'
    assert error.value.hint == "move metrics.jsonl away, or give another workdir; nothing was changed"
    assert path.read_bytes() == before
