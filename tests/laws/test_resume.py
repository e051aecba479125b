"""The law of resume: a run that was killed, however often and whenever, ends with the bytes of one that never was."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from worker_processes import HANG_SECONDS

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parent / "resume_run.py"
STEPS = 120
KILLS = 3
"""Of one chain of starts, each after the workers have made steps: a kill while torch is imported proves little."""


def start(workdir: Path, num_workers: int, steps: int = STEPS, *kind: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lockstep", "run", "--threads", "1", "--workers", str(num_workers), str(SCRIPT)]
    with (workdir.parent / f"{workdir.name}.log").open("ab") as log:
        return subprocess.Popen(
            [*command, str(workdir), str(steps), *kind], stdout=log, stderr=log, start_new_session=True
        )


def finish(workdir: Path, num_workers: int, steps: int = STEPS, *kind: str) -> None:
    code = start(workdir, num_workers, steps, *kind).wait(HANG_SECONDS)
    assert code == 0, (workdir.parent / f"{workdir.name}.log").read_text()


def contents(workdir: Path) -> dict[str, bytes]:
    """Every byte that the run has learned or said; the manifest alone holds the time of saving."""
    newest = workdir / f"checkpoints/step-{STEPS:08d}"
    files = [path for path in newest.iterdir() if path.name != "manifest.json"]
    return {path.name: path.read_bytes() for path in [*files, workdir / "metrics.jsonl"]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(workdir, 3)
    found = contents(workdir)
    assert found["metrics.jsonl"].count(b"\n") == STEPS
    return found


def processes(root: int) -> list[int]:
    """A process and all its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[bytes]) -> bool:
    """Whether something happened before the process ended."""
    deadline = time.monotonic() + HANG_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if happened():
            return True
        time.sleep(0.002)
    return False


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def grown(path: Path, size: int) -> bool:
    return size_of(path) > size


def kill_one(process: subprocess.Popen[bytes], choose: random.Random) -> None:
    victim = choose.choice(processes(process.pid))
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(HANG_SECONDS)


def wait_until_gone(workdir: Path) -> None:
    """Workers of a launcher that was killed end by themselves; the next start must not meet them."""
    needle = str(workdir).encode()

    def alive() -> bool:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if needle in path.read_bytes() and int(path.parent.name) != os.getpid():
                    return True
            except (FileNotFoundError, ProcessLookupError):
                continue
        return False

    deadline = time.monotonic() + HANG_SECONDS
    while alive():
        assert time.monotonic() < deadline, "a worker outlived its launcher"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("seed", "num_kills"), [(1, 1), *(pytest.param(n, KILLS, marks=pytest.mark.slow) for n in range(1, 75))]
)
def test_killed_at_random_moments(undisturbed: dict[str, bytes], tmp_path: Path, seed: int, num_kills: int) -> None:
    workdir = tmp_path / "run"
    kill_some(workdir, seed, num_kills=num_kills)
    finish(workdir, 3)
    assert contents(workdir) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed"), [("detector", 1), ("detector", 2), ("quantized", 3)])
def test_other_runs_killed_at_random_moments(tmp_path: Path, kind: str, seed: int) -> None:
    whole, workdir = tmp_path / "whole", tmp_path / "run"
    finish(whole, 3, STEPS, kind)
    kill_some(workdir, seed, kind)
    finish(workdir, 3, STEPS, kind)
    assert contents(workdir) == contents(whole)


@pytest.mark.slow
def test_killed_where_each_attempt_is_read_late(tmp_path: Path) -> None:
    whole, workdir = tmp_path / "whole", tmp_path / "run"
    finish(whole, 3, STEPS, "accelerator")
    kill_some(workdir, 1, "accelerator")
    finish(workdir, 2, STEPS, "accelerator")
    assert contents(workdir) == contents(whole)


@pytest.mark.slow
def test_killed_where_the_sum_is_exact_over_gloo(undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """The bytes are those of shared memory, but for the name of the transport."""
    workdir = tmp_path / "run"
    kill_some(workdir, 5, "gloo", num_kills=1)
    finish(workdir, 3, STEPS, "gloo")
    assert contents(workdir) | {"values.json": b""} == undisturbed | {"values.json": b""}


def kill_some(workdir: Path, seed: int, *kind: str, num_kills: int = KILLS) -> None:
    """Start the run again and again, on other numbers of workers, and kill one of its processes each time."""
    choose = random.Random(seed)
    metrics = workdir / "metrics.jsonl"
    for _ in range(num_kills):
        process = start(workdir, choose.choice([1, 2, 3]), STEPS, *kind)
        size = size_of(metrics) + choose.randrange(900)
        assert wait_for(partial(grown, metrics, size), process), "the run ended before it could be killed"
        time.sleep(choose.random() * 0.05)  # anywhere in a step, or in a save
        kill_one(process, choose)
        wait_until_gone(workdir)


@pytest.mark.slow
def test_killed_in_the_middle_of_saves(undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    choose, workdir = random.Random(3), tmp_path / "run"
    checkpoints = workdir / "checkpoints"

    def saving() -> bool:
        return checkpoints.is_dir() and any(not path.name.startswith("step-") for path in checkpoints.iterdir())

    kills = 0
    for _ in range(3):
        process = start(workdir, 3)
        if wait_for(saving, process):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(HANG_SECONDS)
            wait_until_gone(workdir)
            kills += 1
        if choose.random() < 0.5:
            finish(workdir, 3, steps=choose.randrange(4, 40))
    assert kills >= 2
    finish(workdir, 3)
    assert contents(workdir) == undisturbed


def test_resumed_on_other_numbers_of_workers(undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    for num_workers, steps in ((2, 13), (1, 30), (3, STEPS)):
        finish(workdir, num_workers, steps)
    found = contents(workdir)
    assert found == undisturbed
