"""Preempted by a scheduler, started again, and again: real processes, and the bytes of a run that never was."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from worker_processes import HANG_SECONDS

from lockstep.cli import train
from lockstep.cli.main import parse
from lockstep.cli.shared import EXIT_CODES
from lockstep.cli.train import PREEMPTION
from lockstep.errors import InputError
from lockstep.launcher.watchdog import Limits
from lockstep.owner import processes_by_parent

ROOT = Path(__file__).parent.parent.parent
WORDS = [
    "--towers", "2", "--requeue", "--grace", "60",
    "--set", "batch_size=24", "--set", "checkpoints.every=4 steps", "--set", "watch.metrics=1 steps",
    "--set", "watch.summaries=0", "--set", "average.decay=0.9", "--set", "exchange.exact=true",
    "--set", "evaluate.every=3 steps", "--set", "evaluate.examples=120", "--set", "evaluate.micro_batch=6",
]  # fmt: skip


def start(workdir: Path, num_workers: int, *end: str) -> subprocess.Popen[str]:
    words = ["train", "mnist", "--workdir", str(workdir), "--workers", str(num_workers), *WORDS, *end]
    command = [sys.executable, "-m", "lockstep", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def contents(workdir: Path) -> dict[str, bytes]:
    newest = max((workdir / "checkpoints").iterdir())
    files = [path for path in newest.iterdir() if path.name != "manifest.json"]
    return {path.name: path.read_bytes() for path in [*files, workdir / "metrics.jsonl"]}


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.005)
            return


def end(process: subprocess.Popen[str], code: int) -> str:
    """All that it said; it must end with the code."""
    said, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == code, said
    return said


def events(workdir: Path) -> list[str]:
    path = workdir / "history.jsonl"
    return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.process
def test_preempted_at_a_random_moment_a_run_learns_the_same(tmp_path: Path) -> None:
    choose, workdir, undisturbed = random.Random(), tmp_path / "run", tmp_path / "undisturbed"
    metrics, number = workdir / "metrics.jsonl", choose.choice([signal.SIGUSR1, signal.SIGTERM])
    with start(workdir, 2, "--forever") as process:
        # Anywhere in a step, an evaluation or a save: a line of metrics is about 350 bytes.
        size = choose.randrange(1, 2000)
        wait_for(lambda: size_of(metrics) >= size, process)
        process.send_signal(number)
        process.send_signal(signal.SIGTERM)
        said = end(process, 75)
    stopped = re.search(r"stopped at step (\d+), and saved: the same command goes on from there", said)
    assert stopped, said
    steps = ["--steps", str(int(stopped[1]) + 3)]
    with start(workdir, 1, *steps) as process:
        end(process, 0)
    with start(undisturbed, 1, *steps) as process:
        # Its end is saved, and only its scoring can still be interrupted.
        wait_for(lambda: "end" in events(undisturbed), process)
        process.send_signal(signal.SIGTERM)
        assert "test accuracy" in end(process, 0)
    assert contents(workdir) == contents(undisturbed)
    assert events(workdir) == ["start", "stop", "resume", "end"]
    assert events(undisturbed) == ["start", "end"]


@pytest.mark.process
def test_a_run_whose_terminal_is_closed_is_saved(tmp_path: Path) -> None:
    metrics = tmp_path / "run/metrics.jsonl"
    words = ["train", "mnist", "--workdir", str(tmp_path / "run"), "--workers", "2", *WORDS, "--forever"]
    pid, terminal = pty.fork()  # a session of its own, as a terminal or ssh gives it
    if not pid:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", "lockstep", *words])
    deadline = time.monotonic() + HANG_SECONDS
    while size_of(metrics) < 1000 and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.01)[0]:
            os.read(terminal, 1 << 16)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    assert events(tmp_path / "run") == ["start", "stop"]
    last = json.loads((tmp_path / "run/history.jsonl").read_text().splitlines()[-1])
    assert max((tmp_path / "run/checkpoints").iterdir()).name == f"step-{last['step']:08d}"


@pytest.mark.slow
@pytest.mark.process
def test_under_torchrun_a_signal_to_one_worker_has_all_saved(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    words = ["--rdzv-endpoint", "127.0.0.1:0", "-m", "lockstep", "train", "mnist", "--workdir", str(workdir), *WORDS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*torchrun, *words, "--forever"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        wait_for(lambda: size_of(workdir / "metrics.jsonl") > 0, process)
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(workers[-1]), signal.SIGTERM)
        said = end(process, 1)  # torchrun's own, whatever its workers end with
    assert re.search(r"exitcode +: 75 ", said), said
    stop = json.loads((workdir / "history.jsonl").read_text().splitlines()[-1])
    assert stop["event"] == "stop"
    assert max((workdir / "checkpoints").iterdir()).name == f"step-{stop['step']:08d}"


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_a_time_of_grace_that_is_none(seconds: str) -> None:
    words = ["train", "mnist", "--grace", seconds]
    with pytest.raises(InputError) as raised:
        train.COMMAND.run(parse(words), words)
    assert str(raised.value) == (
        "--grace is out of range.\n"
        f"  given:    --grace={float(seconds)}\n"
        "  expected: above 0\n"
        "  hint:     give the seconds between the signal and the end of the machine"
    )


def test_requeue_and_grace_reach_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, object] = {}
    monkeypatch.setattr("lockstep.launcher.launch.launch_command", lambda argv, **options: told.update(options) or 0)
    for words, seconds, requeue in ([], None, False), (["--requeue", "--grace", "90"], 90.0, True):
        argv = ["train", "mnist", *words]
        train.COMMAND.run(parse(argv), argv)
        assert (told["limits"], told["requeue"]) == (Limits(stop_seconds=seconds), requeue)


def test_the_help_says_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["train", "--help"])
    said = capsys.readouterr().out
    assert PREEMPTION in said
    assert EXIT_CODES in said


@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_while_the_recipe_is_read_ends_it_at_once(tmp_path: Path, number: int, code: int) -> None:
    """From a pipe into which nobody writes, which stands for a file system that hangs."""
    recipe = tmp_path / "recipe.toml"
    os.mkfifo(recipe)
    command = [sys.executable, "-m", "lockstep", "train", str(recipe), "--workdir", str(tmp_path / "run")]
    with subprocess.Popen(command, text=True) as process:
        wait_for(lambda: process.pid in processes_by_parent(), process)
        process.send_signal(number)
        try:
            assert process.wait(HANG_SECONDS) == code
        finally:
            process.kill()
