"""`lockstep chaos`: real runs, disturbed."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from worker_processes import HANG_SECONDS

from lockstep.chaos.faults import FAULTS
from lockstep.cli import chaos
from lockstep.cli.main import main

ROOT = Path(__file__).parent.parent.parent
SMALL = ["mnist", "--workers", "2", "--set", "batch_size=8", "--set", "data.split=validation"]  # 5,000 images


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where data/mnist is


def left_over() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("lockstep-chaos-*")}


def test_the_help_names_all_faults() -> None:
    assert tuple(FAULTS) == chaos._FAULTS


@pytest.mark.process
def test_a_worker_is_killed_and_nothing_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    before, path = left_over(), tmp_path / "report.json"
    flags = ["--steps", "12", "--rounds", "1", "--minutes", "2", "--faults", "kill", "--to", str(path)]
    flags += ["--workers-per-device", "2"]
    assert main(["chaos", *SMALL, *flags, "--json"]) == 0
    facts = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out) == facts
    assert (facts["ok"], facts["bits_are_promised"], facts["steps"]) == (True, True, 12)
    assert any("SIGKILL to a worker" in line for line in caplog.messages)
    assert left_over() <= before


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("end", [["--steps", "200", "--rounds", "4", "--minutes", "45"], ["--minutes", "3"]])
def test_nothing_is_lost_by_any_fault(tmp_path: Path, seed: int, end: list[str]) -> None:
    path = tmp_path / "report.json"
    flags = ["--seed", str(seed), "--to", str(path), *end]
    assert main(["chaos", "mnist", "--workers", "3", "--set", "batch_size=24", "--set", "num_towers=4", *flags]) == 0
    facts = json.loads(path.read_text())
    if "--rounds" in end:  # how many faults come in 3 minutes is up to the machine
        assert {injected["fault"] for each in facts["rounds"] for injected in each["faults"]} == set(FAULTS)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("exchange", [["exact=true"], ["exact=true", "transport=gloo"], ["kind=backups"]])
def test_survivors_go_on_with_the_same_bits(tmp_path: Path, exchange: list[str]) -> None:
    path, fields = tmp_path / "report.json", ["watch.on_failure=continue", *(f"exchange.{field}" for field in exchange)]
    words = ["--workers=4", "--towers=4", "--set=batch_size=24", *(f"--set={field}" for field in fields)]
    flags = ["--steps", "80", "--rounds", "2", "--minutes", "10", "--faults", "kill,chief,two,stop,slow"]
    assert main(["chaos", "mnist", *words, *flags, "--to", str(path)]) == 0
    facts = json.loads(path.read_text())
    assert facts["bits_are_promised"]
    went_on = [how for each in facts["rounds"] for injected in each["faults"] for how in injected["went_on"]]
    assert "continue from memory" in went_on


@pytest.mark.slow
@pytest.mark.process
def test_ended_by_sigterm_it_takes_all_along(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "lockstep", "chaos", *SMALL, "--keep", str(tmp_path / "kept")]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE) as process:
        while not (tmp_path / "kept" / "undisturbed").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_SECONDS) == 130
    mark = str(tmp_path).encode()
    own = {str(os.getpid())}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        if path.parent.name not in own and path.exists():
            assert mark not in path.read_bytes()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--faults", "kill,flood"], "--faults 'flood'"),
        (["--minutes", "0"], "--minutes 0"),
        (["--steps", "1"], "--steps 1"),
        (["--seed", "-1"], "--seed -1"),
        (["--to", "report.txt"], "a file whose name ends in .json"),
        (["--keep", "tests"], "given:    --keep tests\n"),
        (["--set", "batch_size=7"], "batch_size"),
        (["--workers-per-device", "0"], "workers_per_device=0"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", *SMALL, *flags]) == 2
    assert said in capsys.readouterr().err
