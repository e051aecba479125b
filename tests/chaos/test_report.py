from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.chaos.report import Report, Round, run_differences
from lockstep.chaos.trial import Injected, Trial


def write_run(folder: Path, *, weights: bytes = b"weights", positions: tuple[int, ...] = (8, 16)) -> Path:
    checkpoint = folder / "checkpoints" / f"step-{len(positions):08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(f"saved in {folder.name}")
    (checkpoint / "parameters.safetensors").write_bytes(weights)
    lines = [json.dumps({"step": number, "position": at}) + "\n" for number, at in enumerate(positions, start=1)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def undisturbed(tmp_path: Path) -> Path:
    return write_run(tmp_path / "undisturbed")


def test_equal_runs_differ_in_times_alone(undisturbed: Path, tmp_path: Path) -> None:
    assert run_differences(undisturbed, write_run(tmp_path / "run"), bits=True) == []


def test_other_bytes_are_named_where_they_are_promised(undisturbed: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", weights=b"others")
    assert run_differences(undisturbed, run, bits=False) == []
    assert run_differences(undisturbed, run, bits=True) == ["parameters.safetensors has other bytes"]


def test_whose_gradients_came_first_is_left_to_chance(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("undisturbed", "run", "other")]
    for run, loss, used in zip(runs, (2.5, 2.5, 2.4), ({"1": 2}, {"2": 2}, {"1": 2}), strict=True):
        line = {"step": 2, "position": 16, "losses": {"loss": loss}, "arrivals": {"used": used}}
        (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert run_differences(runs[0], runs[1], bits=True) == []
    assert run_differences(runs[0], runs[2], bits=True) == ["metrics.jsonl has other bytes"]


def test_lost_and_repeated_attempts_are_named(undisturbed: Path, tmp_path: Path) -> None:
    assert run_differences(undisturbed, write_run(tmp_path / "short", positions=(8,)), bits=True) == [
        "last step: 1 in place of 2",
        "examples: 8 in place of 16",
        "attempts in metrics.jsonl: 1 in place of 2",
        "last checkpoint: step-00000001 in place of step-00000002",
    ]
    twice = run_differences(undisturbed, write_run(tmp_path / "twice", positions=(8, 8, 16)), bits=False)
    assert "attempts that stand there twice: 1 in place of 0" in twice


def test_a_run_that_has_written_nothing(undisturbed: Path, tmp_path: Path) -> None:
    assert "last checkpoint: none in place of step-00000002" in run_differences(
        undisturbed, tmp_path / "none", bits=True
    )


def test_files_half_written_are_named(undisturbed: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / ".choices.json.12.partial").touch()
    assert run_differences(undisturbed, run, bits=True) == [".choices.json.12.partial is left behind"]


def report(*lost: str) -> Report:
    faults = [Injected("kill", "SIGKILL", 3, 0.0, seconds=1.5, steps_again=2), Injected("kill", "SIGKILL", 7, 0.0, 2.5)]
    rounds = [Round(Trial(Path("run"), faults, seconds=9.0), []), Round(Trial(Path("run")), lost)]
    return Report("mnist", ["kill", "disk", "records"], 4, 9, 3.0, True, {"records": "no files"}, rounds)


def test_the_table_has_each_fault_and_the_verdict() -> None:
    assert [line.split() for line in report("a step").table()][1:4] == [
        ["kill", "2", "2.0", "2.5", "2"],
        ["disk", "0"],
        ["records", "0"],
    ]
    assert list(report("a step").table())[4:] == [
        "records was left out: no files",
        "did not come, for lack of time: disk; give more --minutes, or --steps",
        "1 of 2 disturbed runs ended with the bytes of the undisturbed one",
    ]


def test_the_report_is_json() -> None:
    facts = json.loads(report("a step").as_json())
    assert (facts["ok"], facts["seed"], facts["rounds"][1]["lost"]) == (False, 4, ["a step"])
    assert facts["rounds"][0]["faults"][0] == {
        "fault": "kill",
        "what": "SIGKILL",
        "step": 3,
        "seconds": 1.5,
        "steps_again": 2,
        "went_on": [],
        "exit_codes": [],
        "error": None,
    }
    assert json.loads(report().as_json())["ok"]
