"""The law of survival: a run that goes on without lost workers ends with the bytes of one that lost none."""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import staged_run
import survived_run
from survived_run import LENGTHS, STEPS
from worker_processes import HANG_SECONDS

import lockstep as ls
from lockstep.runs.examination import examine
from lockstep.runs.workdir import REMARKS

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parent / "survived_run.py"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the run comes to on one worker, which hosts all towers."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    ls.join("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staged_run, "NUM_EXAMPLES", survived_run.NUM_EXAMPLES)
        survived_run.run(workdir, ls.AllReduce(exact=True))
    return contents(workdir)


def contents(workdir: Path) -> dict[str, bytes]:
    """Every byte that the run has learned, said and come to, but for times."""
    result = json.loads((workdir / "result.json").read_text())
    del result["times"]
    newest = workdir / f"checkpoints/step-{STEPS:08d}"
    files = [path for path in newest.iterdir() if path.name != "manifest.json"]
    found = {path.name: path.read_bytes() for path in [*files, workdir / "metrics.jsonl"]}
    return {**found, "result.json": json.dumps(result).encode(), "metrics.csv": logged(workdir / "metrics.csv")}


def logged(path: Path) -> bytes:
    """What a logger has of it, but for rates."""
    with path.open(newline="") as file:
        rows = [{**row, "examples_per_second": ""} for row in csv.DictReader(file)]
    return json.dumps(rows).encode()


def survive(workdir: Path, *faults: str, num_workers: int = 3) -> tuple[list[dict[str, Any]], str]:
    """Run it to its end on several workers, some of which are lost; returns its history and what it has said."""
    command = [sys.executable, "-m", "lockstep", "run", "--threads", "1", "--workers", str(num_workers)]
    ended = subprocess.run(
        [*command, "--on-failure", "continue", "--restarts", "20", str(SCRIPT), str(workdir), *faults],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in (workdir / "history.jsonl").read_text().splitlines()], ended.stderr


def test_a_stopped_worker_and_the_chief_are_lost(undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    # The chief in the first step of the second stage: what is in memory then cannot be saved as the end of the first.
    history, said = survive(tmp_path / "run", "2:SIGSTOP@20", f"0:SIGKILL@{LENGTHS[0]}")
    assert contents(tmp_path / "run") == undisturbed
    assert examine(tmp_path / "run", lambda done, total: None).problems == []
    losses = [line for line in history if line["event"] == "continue"]
    assert [line["from"] for line in losses] == ["memory"] * 2, said
    assert [line["lost"].split()[1] for line in losses] == ["2", "0"]
    saved = Counter(json.loads(line)["step"] for line in (tmp_path / "run/saves.jsonl").read_text().splitlines())
    assert (losses[0]["step"], saved[20]) == (20, 1), "the chief had saved it before worker 2 was lost"
    assert any(line["event"] == "join" for line in history), said
    assert [line["event"] for line in history if line["event"] not in REMARKS][-1] == "end"


def test_who_goes_on_saves_what_the_chief_was_lost_over(undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    _, said = survive(tmp_path / "run", "0:damage@140")
    assert contents(tmp_path / "run") == undisturbed
    assert "step-00000140/manifest.json is damaged." in said
    assert "It is replaced." in said


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["backups", "asynchronous"])
def test_a_chief_that_serves_goes_on_without_those_that_compute(
    undisturbed: dict[str, bytes], tmp_path: Path, exchange: str
) -> None:
    history, said = survive(tmp_path / "run", exchange, "2:SIGKILL@20", "1:SIGSTOP@90")
    losses = [line for line in history if line["event"] == "continue"]
    assert [line["from"] for line in losses] == ["memory"] * 2, said
    found = contents(tmp_path / "run")
    assert found.keys() == undisturbed.keys()
    if exchange == "backups":  # with fewer that compute than towers, no gradient is dropped
        others = {"values.json": b"", "metrics.jsonl": b""}  # which name the exchange, and count its gradients
        assert found | others == undisturbed | others


@pytest.mark.slow
def test_without_the_chief_that_serves_the_last_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    history, said = survive(tmp_path / "run", "backups", "0:SIGKILL@70")
    loss = next(line for line in history if line["event"] == "continue")
    assert (loss["from"], loss["step"]) == ("the checkpoint of step 60", 60), said
    assert [line["event"] for line in history if line["event"] not in REMARKS][-1] == "end"


@pytest.mark.slow
def test_where_memories_differ_the_last_checkpoint_is_gone_on_from(
    undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    history, said = survive(tmp_path / "run", "1:drift@70", "2:SIGKILL@72")
    assert contents(tmp_path / "run") == undisturbed
    loss = next(line for line in history if line["event"] == "continue")
    assert (loss["from"], loss["step"]) == ("the checkpoint of step 60", 60), said


@pytest.mark.slow
@pytest.mark.parametrize("transport", [[], ["gloo"]], ids=["shared_memory", "gloo"])
@pytest.mark.parametrize("seed", range(8))
def test_lost_at_random_moments(undisturbed: dict[str, bytes], tmp_path: Path, seed: int, transport: list[str]) -> None:
    choose = random.Random(seed)
    steps = sorted(choose.sample(range(STEPS), 3))
    faults = [
        f"{worker}:{choose.choice(['SIGKILL', 'SIGKILL', 'SIGSTOP'])}@{step}+{choose.randrange(20)}"
        for worker, step in zip(choose.sample(range(3), 3), steps, strict=True)
    ]
    history, said = survive(tmp_path / "run", *transport, *faults)
    found = contents(tmp_path / "run")
    if transport:  # the name of the transport is in the values
        found |= {"values.json": undisturbed["values.json"]}
    assert found == undisturbed, (faults, history, said)
