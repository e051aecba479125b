from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from toy_run import GATE
from worker_processes import HANG_SECONDS

from lockstep.chaos import trial as trials
from lockstep.chaos.faults import FAULTS
from lockstep.chaos.linked_data import LinkedData
from lockstep.chaos.report import run_differences
from lockstep.chaos.trial import Disturbed, Due, Trial

pytestmark = pytest.mark.process

TOY, STEPS = Path(__file__).parent / "toy_run.py", 60


class Gated(Disturbed):
    """A run that waits a few steps after each fault that is due: however busy the machine is, it does not miss one."""

    def _is_due(self) -> bool:
        gate = self._trial.workdir.parent / GATE
        if self._dues:
            new = gate.with_suffix(".new")
            new.write_text(str(max(self._furthest, self._dues[0].step) + 5))
            new.rename(gate)
        else:
            gate.unlink(missing_ok=True)
        return super()._is_due()


@pytest.fixture
def disturb(tmp_path: Path) -> Callable[..., Trial]:
    def run(
        *dues: Due, mistake: str = "none", patience_seconds: float = HANG_SECONDS, data: LinkedData | None = None
    ) -> Trial:
        (tmp_path / GATE).write_text("0")
        return Gated(
            [sys.executable, str(TOY), mistake, "--steps", str(STEPS)],
            tmp_path / "run",
            dues,
            random.Random(0),
            recovers=True,
            data=data,
            patience_seconds=patience_seconds,
            deadline=math.inf,
        ).run()

    return run


@pytest.fixture
def undisturbed(disturb: Callable[..., Trial], tmp_path: Path) -> Path:
    assert not disturb().problems
    return (tmp_path / "run").rename(tmp_path / "undisturbed")


@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in ("stop", "slow", "disk", "records")])
def test_a_run_that_survives_is_found_equal(disturb: Callable[..., Trial], undisturbed: Path, fault: str) -> None:
    trial = disturb(Due(23, fault))
    assert not trial.problems
    (injected,) = trial.faults
    assert injected.fault == fault
    assert injected.step >= 23
    assert injected.seconds is not None
    assert bool(injected.exit_codes) == FAULTS[fault].ends_command
    assert injected.steps_again <= (0 if fault == "preempt" else 12)
    assert run_differences(undisturbed, trial.workdir, bits=True) == []


def test_faults_come_one_after_another(disturb: Callable[..., Trial], undisturbed: Path) -> None:
    trial = disturb(Due(40, "all"), Due(12, "chief"), Due(12, "kill"))
    assert [injected.fault for injected in trial.faults] == ["chief", "kill", "all"]
    assert [injected.exit_codes for injected in trial.faults] == [[], [], [-9]]
    assert run_differences(undisturbed, trial.workdir, bits=True) == []


def test_damaged_data_is_mended_once_the_command_has_said_so(
    disturb: Callable[..., Trial], undisturbed: Path, tmp_path: Path
) -> None:
    (tmp_path / "images.bin").write_bytes(b"images")
    trial = disturb(Due(23, "records"), data=LinkedData(str(tmp_path / "images.bin"), tmp_path / "links"))
    assert not trial.problems
    (injected,) = trial.faults
    assert (injected.exit_codes, injected.error) == ([-9, 1], "error: a file is cut short given:    half of it")
    assert run_differences(undisturbed, trial.workdir, bits=True) == []


@pytest.mark.parametrize(
    ("mistake", "lost"),
    [
        ("skips a step", ["attempts in metrics.jsonl: 59 in place of 60"]),
        ("repeats steps", ["attempts that stand there twice"]),
    ],
)
def test_differences_of_a_disturbed_run_are_named(
    disturb: Callable[..., Trial], undisturbed: Path, mistake: str, lost: list[str]
) -> None:
    trial = disturb(Due(23, "chief"), mistake=mistake)
    assert not trial.problems
    found = run_differences(undisturbed, trial.workdir, bits=False)
    assert [line[: len(start)] for line, start in zip(found, lost, strict=True)] == lost


def test_a_run_that_was_to_recover_by_itself(disturb: Callable[..., Trial]) -> None:
    (problem,) = disturb(Due(23, "kill"), mistake="gives up").problems
    assert "the command ended with exit code 9, and was to go on" in problem
    assert "it said: error: a worker ended with -9" in problem


@pytest.mark.slow
def test_a_run_that_hangs(disturb: Callable[..., Trial]) -> None:
    (problem,) = disturb(mistake="hangs", patience_seconds=5.0).problems
    assert problem == "no new step for 5 s after step 31"


def test_processes_that_outlive_their_launcher(disturb: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_GONE_SECONDS", 0.02)
    (problem,) = disturb(Due(23, "launcher"), mistake="outlives its launcher").problems
    assert "processes lived 0 s longer than their launcher" in problem
