from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worker_processes import HANG_SECONDS

import lockstep as ls
from lockstep.loggers import loggers as module
from lockstep.loggers.loggers import Loggers


class Kept:
    """A logger of a user's own, which keeps what it is told."""

    def __init__(self, can_rewind: bool = False) -> None:
        self.can_rewind = can_rewind
        self.begun: list[ls.loggers.LoggedRun] = []
        self.steps: list[tuple[int, list[str]]] = []
        self.artifacts: list[Path] = []
        self.reasons: list[str] = []

    def begin(self, run: ls.loggers.LoggedRun) -> None:
        self.begun.append(run)
        self.steps = [each for each in self.steps if each[0] <= run.step] if self.can_rewind else self.steps

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self.steps.append((step, sorted(scalars)))

    def log_artifact(self, path: Path) -> None:
        self.artifacts.append(path)

    def end(self, reason: str) -> None:
        self.reasons.append(reason)


class Failing(Kept):
    def log(self, scalars: Mapping[str, float], step: int) -> None:
        raise ConnectionError("no network")


class Refusing(Kept):
    def begin(self, run: ls.loggers.LoggedRun) -> None:
        raise ls.InputError("This key is wrong.", given="a key", expected="another", hint="log in again")


class Stuck(Kept):
    """A logger that hangs in its first call until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.goes_on = threading.Event(), threading.Event()

    def begin(self, run: ls.loggers.LoggedRun) -> None:
        self.has_begun.set()
        self.goes_on.wait()


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    logger = Stuck()
    yield logger
    logger.goes_on.set()


def squared(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"squared": model(batch["x"]).square().mean()}


def make_run() -> tuple[ls.TrainState, ls.data.Loader]:
    torch.manual_seed(0)
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.randn(32, 3)}), batch_size=4)
    return ls.TrainState(nn.Linear(3, 1), ls.optim.SGD(0.1)), loader


def train(
    loggers: list[Any], workdir: Path | None, steps: int, *, goes_on_from: Path | None = None, every: int = 1
) -> None:
    state, loader = make_run()
    if goes_on_from:
        ls.resume(state, loader, goes_on_from)
    with Loggers(loggers, workdir, config={"lr": 0.1}) as hook:
        ls.train(state, squared, loader, until=ls.Steps(steps), hooks=[ls.every(every, hook)])
        if goes_on_from is None and workdir is not None:
            ls.save(state, loader, workdir)


def steps_of(logger: Kept) -> list[int]:
    return [step for step, _ in logger.steps]


def messages(caplog: pytest.LogCaptureFixture, about: str = "the logger") -> list[str]:
    return [record.getMessage() for record in caplog.records if about in record.getMessage()]


def test_a_script_logs_what_its_steps_report(tmp_path: Path) -> None:
    logger = Kept()
    train([logger], tmp_path / "mine", 6, every=2)
    assert steps_of(logger) == [2, 4, 6]
    assert logger.steps[0][1] == [
        "examples_per_second", "gradient_norm", "learning_rate", "losses/squared", "losses/total",
        "losses_smoothed/squared", "losses_smoothed/total",
    ]  # fmt: skip
    (run,) = logger.begun
    assert (run.name, run.workdir, run.config, len(run.id)) == ("mine", tmp_path / "mine", {"lr": 0.1}, 16)
    assert run.environment["torch"] == str(torch.__version__)
    assert run.environment["workers"] == 1
    assert run.parameters == {"lr": 0.1, "environment": run.environment}
    assert logger.reasons == ["end"]


def test_a_resumed_script_goes_on_with_its_run_and_logs_no_step_twice(tmp_path: Path) -> None:
    first, second = Kept(), Kept()
    train([first], tmp_path, 4)
    state, loader = make_run()
    ls.resume(state, loader, tmp_path)
    with Loggers([Kept()], tmp_path) as hook:  # killed before its step 6 was saved
        ls.train(state, squared, loader, until=ls.Steps(6), hooks=[hook])
    train([second], tmp_path, 8, goes_on_from=tmp_path)
    assert steps_of(first) == [1, 2, 3, 4]
    assert steps_of(second) == [7, 8]
    assert second.begun[0].id == first.begun[0].id
    assert second.begun[0].step == 4


def test_without_a_workdir_each_start_is_a_run_of_its_own() -> None:
    first, second = Kept(), Kept()
    train([first], None, 2)
    train([second], None, 2)
    assert steps_of(first) == steps_of(second) == [1, 2]
    assert first.begun[0].id != second.begun[0].id
    assert first.begun[0].name == "run"


def test_the_scores_of_a_script_are_logged_at_their_step_once(tmp_path: Path) -> None:
    logger = Kept()
    state, loader = make_run()
    with Loggers([logger], tmp_path) as hook:
        for report in ls.train_steps(state, squared, loader, until=ls.Steps(2)):
            hook(report)
            hook.log({"validation/top1": 0.5}, report.step)
            hook.log({"validation/top1": 0.5}, report.step)
        hook.log_artifact(tmp_path)
    assert [(step, names) for step, names in logger.steps if len(names) == 1] == [
        (1, ["validation/top1"]),
        (2, ["validation/top1"]),
    ]
    assert logger.artifacts == [tmp_path]


def test_a_rollback_is_logged_anew_by_who_can_and_kept_by_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lockstep")
    keeps, rewinds = Kept(), Kept(can_rewind=True)
    state, loader = make_run()
    with Loggers([keeps, rewinds], tmp_path) as hook:
        ls.train(state, squared, loader, until=ls.Steps(2), hooks=[hook])
        ls.save(state, loader, tmp_path)
        ls.train(state, squared, loader, until=ls.Steps(5), hooks=[hook])
        ls.resume(state, loader, tmp_path)  # as a rollback does
        ls.train(state, squared, loader, until=ls.Steps(6), hooks=[ls.every(2, hook)])
    assert steps_of(keeps) == [1, 2, 3, 4, 5, 6]
    assert steps_of(rewinds) == [1, 2, 3, 4, 6]
    assert [run.step for run in keeps.begun] == [0]
    assert [run.step for run in rewinds.begun] == [0, 2]
    assert messages(caplog) == ["the logger kept keeps steps 3 to 5 as they are"]


def test_a_refused_attempt_is_no_step(tmp_path: Path) -> None:
    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"squared": model(batch["x"]).square().mean() * (float("nan") if batch.position == 4 else 1)}

    logger = Kept()
    state = ls.TrainState(nn.Linear(3, 1), ls.optim.SGD(0.1), nonfinite="skip")
    with Loggers([logger]) as hook:
        ls.train(state, losses, make_run()[1], until=ls.Steps(3), hooks=[hook])
    assert steps_of(logger) == [1, 2, 3]


def test_a_logger_that_fails_is_told_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    logger = Kept()
    train([Failing(), logger], None, 4)
    assert steps_of(logger) == [1, 2, 3, 4]
    assert messages(caplog) == [
        "the logger failing has failed, and the run goes on: ConnectionError: no network",
        "the logger failing lacks 4 of 4 entries",
    ]


def test_a_logger_that_cannot_begin_gets_nothing_and_says_how_to_mend_it(caplog: pytest.LogCaptureFixture) -> None:
    logger = Refusing()
    train([logger], None, 2)
    assert (logger.steps, logger.reasons) == ([], [])
    assert messages(caplog) == [
        "the logger refusing has failed, and the run goes on: This key is wrong. log in again",
        "the logger refusing lacks 2 of 2 entries",
    ]


def test_a_logger_that_hangs_holds_up_nobody_and_what_it_lacks_is_counted(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MOST_QUEUED", 3)
    monkeypatch.setattr(module, "USUAL_END_SECONDS", 0.0)
    logger = Kept()
    state, loader = make_run()
    with Loggers([stuck, logger]) as hook:
        for report in ls.train_steps(state, squared, loader, until=ls.Steps(8)):
            hook(report)
            assert stuck.has_begun.wait(60)
            while steps_of(logger)[-1:] != [report.step]:
                threading.Event().wait(0.001)
    assert messages(caplog, "the logger stuck") == [
        "the logger stuck is slower than the run: 3 entries wait for it, and further ones are dropped",
        "the logger stuck has not finished, and the run ends without it",
        "the logger stuck lacks 8 of 8 entries",
    ]


def test_what_has_waited_for_a_slow_logger_is_logged(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MOST_QUEUED", 3)
    state, loader = make_run()
    with Loggers([stuck]) as hook:
        for report in ls.train_steps(state, squared, loader, until=ls.Steps(8)):
            hook(report)
            assert stuck.has_begun.wait(60)
        stuck.goes_on.set()
    assert steps_of(stuck) == [1, 2, 3]
    assert messages(caplog)[1:] == ["the logger stuck lacks 5 of 8 entries"]
    assert stuck.reasons == ["end"]


def test_an_error_in_the_script_ends_its_loggers_as_failed() -> None:
    logger = Kept()
    state, loader = make_run()

    def fail(report: ls.StepReport) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Loggers([logger]) as hook:
        ls.train(state, squared, loader, until=ls.Steps(3), hooks=[hook, fail])
    assert (steps_of(logger), logger.reasons) == ([1], ["failed"])


def test_two_loggers_of_a_kind_keep_records_of_their_own(tmp_path: Path) -> None:
    first, second = Kept(), Kept()
    train([first, second], tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / "loggers").iterdir()) == ["kept-2.jsonl", "kept.jsonl"]
    assert first.begun[0].id != second.begun[0].id


def test_a_torn_record_of_what_was_logged_is_read(tmp_path: Path) -> None:
    train([Kept()], tmp_path, 3)
    path = tmp_path / "loggers/kept.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:3]) + "\n" + lines[3][:9])
    assert json.loads(lines[0]).keys() == {"id"}
    logger = Kept()
    train([logger], tmp_path, 4)
    assert steps_of(logger) == [3, 4]


@pytest.mark.process
def test_of_several_workers_the_chief_alone_logs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "lockstep", "run", "--workers", "2", "--device", "cpu", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split(",")[0] for line in (tmp_path / "mine/metrics.csv").read_text().splitlines()] == [
        "step", "1", "2", "3",
    ]  # fmt: skip


SCRIPT = """
import torch
import lockstep as ls

def losses(model, batch):
    return {"squared": model(batch["x"]).square().mean()}

here = ls.join()
state = ls.TrainState(torch.nn.Linear(3, 1), ls.optim.SGD(0.1))
loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(32, 3)}), batch_size=4)
with ls.loggers.Loggers([ls.loggers.Csv()], "mine") as loggers:
    ls.train(state, losses, loader, ls.Towers(2), until=ls.Steps(3), hooks=[loggers])
"""
