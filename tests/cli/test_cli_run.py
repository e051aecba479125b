"""`lockstep run`: the threads of its workers, and workers that another launcher has started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import parse
from lockstep.cli.run import COMMAND

SCRIPT = """
import os
import signal

import torch

import lockstep as ls

def losses(model, batch):
    return {"size": model(batch["x"]).square().mean()}

here = ls.join("cpu")
loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(8, 1)}), batch_size=4)
state = ls.TrainState(torch.nn.Linear(1, 1), ls.optim.SGD(lr=0.1))
for report in ls.train_steps(state, losses, loader, ls.Towers(2)):
    if report.step == 2 and here.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
assert report.stop_requested
"""


def run_script(path: str) -> int:
    words = ["run", path]
    return COMMAND.run(parse(words), words)


@pytest.mark.process
def test_a_signal_to_one_worker_is_the_exit_code_of_all(run_workers: Callable[..., list[Any]], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    assert run_workers(run_script, 2, str(tmp_path / "script.py")) == [75, 75]


@pytest.mark.process
def test_workers_draw_other_numbers_by_themselves(tmp_path: Path) -> None:
    script = tmp_path / "draws.py"
    script.write_text("import os, random, numpy; os.write(1, f'{random.random()} {numpy.random.rand()}\\n'.encode())")
    command = [sys.executable, "-m", "lockstep", "run", "--workers", "2", str(script)]
    drawn = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert len({*drawn}) == 4


THREADS = """
import logging
import sys

import torch

import lockstep as ls

def losses(model, batch):
    return {"size": model(batch["x"]).square().mean()}

logging.getLogger("lockstep").setLevel(logging.INFO)
for exact in (False, True):
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(8, 1)}), batch_size=4)
    state = ls.TrainState(torch.nn.Linear(1, 1), ls.optim.SGD(lr=0.1))
    ls.resume(state, loader, f"{sys.argv[1]}/{exact}")
    ls.train(state, losses, loader, ls.Towers(2), ls.AllReduce(exact=exact), until=ls.Steps(state.step + 1))
    ls.save(state, loader, f"{sys.argv[1]}/{exact}")
    if ls.join().is_chief:
        print("exact" if exact else "any", torch.get_num_threads())
"""


def run_with_threads(folder: Path, *words: str, **variables: str) -> tuple[list[str], str]:
    """What the script says, and the log, of a run on a host with four cores."""
    (folder / "threads.py").write_text(THREADS)
    with_four = "import sys, lockstep.cores; lockstep.cores.usable_cores = lambda: 4; "
    start = [sys.executable, "-c", f"{with_four}from lockstep.cli.main import main; sys.exit(main(sys.argv[1:]))"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | variables
    command = [*start, "run", *words, str(folder / "threads.py"), str(folder)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return ended.stdout.splitlines(), ended.stderr


@pytest.mark.process
def test_workers_share_the_cores_but_for_exact_runs(tmp_path: Path) -> None:
    said, log = run_with_threads(tmp_path, "--workers", "2")
    assert said == ["any 2", "exact 1"], log
    assert log.startswith("2 towers on 2 workers (cpu, 2 threads each, fp32)\n")
    assert "exact: one thread a worker, whose share is 2 cores; --threads names more\n" in log
    said, log = run_with_threads(tmp_path, "--workers", "1", "--threads", "3")
    assert said == ["any 3"], log
    assert "changed since the checkpoint: threads: saved 2, given 3\n" in log
    assert "given:    threads: saved 1, given 3\n" in log
    assert "lockstep run --threads 1, or torch.set_num_threads(1) before the first step" in log


@pytest.mark.slow
@pytest.mark.process
def test_an_exact_run_keeps_the_threads_that_are_named(tmp_path: Path) -> None:
    said, log = run_with_threads(tmp_path, "--workers", "1", "--threads", "3")
    assert said == ["any 3", "exact 3"], log
    assert "exact: the bits depend on the 3 threads of each worker, and a resume with others is refused" in log


@pytest.mark.slow
@pytest.mark.process
def test_the_threads_of_the_environment_hold(tmp_path: Path) -> None:
    said, log = run_with_threads(tmp_path, "--workers", "1", OMP_NUM_THREADS="1")
    assert said == ["any 1", "exact 1"], log


@pytest.mark.process
@pytest.mark.parametrize("number", [0, 9999999])  # of so many OpenMP crashes
def test_a_wrong_number_of_threads_is_refused(number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "threads.py").touch()
    words = ["run", "--threads", str(number), str(tmp_path / "threads.py")]
    assert COMMAND.run(parse(words), words) == 2
    assert caplog.messages[-1].startswith(
        f"--threads is out of range.\n  given:    --threads={number}\n  expected: from 1 to 4096\n"
    )
