"""The law of survival for a loop of one's own: a script that goes on without lost workers ends with the same bytes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from survived_script import STEPS
from worker_processes import HANG_SECONDS

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parent / "survived_script.py"


def run(folder: Path, *words: str, num_workers: int = 3) -> tuple[dict[str, bytes], str]:
    """Run the script to its end on several workers; returns the files of its last checkpoint, and what was said."""
    folder.mkdir()
    command = [sys.executable, "-m", "lockstep", "run", "--threads", "1", "--workers", str(num_workers)]
    ended = subprocess.run(
        [*command, "--on-failure", "continue", "--restarts", "20", str(SCRIPT), str(folder / "run"), *words],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert ended.returncode == 0, ended.stderr
    newest = folder / f"run/checkpoints/step-{STEPS:08d}"
    return {file.name: file.read_bytes() for file in newest.iterdir() if file.name != "manifest.json"}, ended.stderr


def seen(folder: Path) -> list[list[int]]:
    """The steps that the loop body of each process has seen."""
    return [[int(step) for step in file.read_text().split()] for file in sorted(folder.glob("seen-*"))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the script comes to on one worker, which hosts all towers."""
    contents, _ = run(tmp_path_factory.mktemp("undisturbed") / "alone", num_workers=1)
    assert "stateful.safetensors" in contents
    return contents


@pytest.mark.slow
@pytest.mark.parametrize("form", ["for", pytest.param("train", marks=pytest.mark.slow)])
def test_a_worker_and_the_chief_in_an_evaluation_are_lost(
    undisturbed: dict[str, bytes], tmp_path: Path, form: str
) -> None:
    contents, said = run(tmp_path / "run", form, "2:SIGKILL@39", "0:in@40")
    assert contents == undisturbed
    assert "all workers start again" not in said
    assert "worker 0" in said.partition("takes part from now on")[0]
    of_all = seen(tmp_path / "run")
    assert len(of_all) == 5
    assert all(steps == list(range(steps[0], steps[-1] + 1)) for steps in of_all), of_all  # each once, in order
    assert sorted(steps[0] for steps in of_all)[:3] == [1, 1, 1]
    assert sum(steps[-1] == STEPS for steps in of_all) == 3  # with those that were started anew


@pytest.mark.slow
def test_where_memories_differ_all_start_again(undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    contents, said = run(tmp_path / "run", "1:drift@70", "2:SIGKILL@72")
    assert contents == undisturbed
    assert "worker 2" in said
    assert "the workers that are left cannot go on from memory" in said
    assert "all workers start again, from the last checkpoint" in said


SEVERAL_STATES = """
import torch

import lockstep as ls

loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(8, 1)}), batch_size=4)
states = [ls.TrainState(torch.nn.Linear(1, 1), ls.optim.SGD(lr=0.1), name=name) for name in ("generator", "critic")]
for batch in ls.batches(loader, until=ls.Steps(3)):
    for state in states:
        ls.train_step(state, lambda model, batch: {"size": model(batch["x"]).square().mean()}, batch)
"""


def test_steps_in_a_loop_body_are_refused_before_the_first(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SEVERAL_STATES)
    command = [sys.executable, "-m", "lockstep", "run", "--device", "cpu", "--workers", "2", "--on-failure", "continue"]
    ended = subprocess.run(
        [*command, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert ended.returncode == 2, ended.stderr
    assert "A loop of batches and train_step cannot go on when a worker is lost." in ended.stderr
    assert "as for a GAN, some states may have made their update and others not" in ended.stderr


@pytest.mark.slow
def test_a_chief_that_serves_goes_on_without_those_that_compute(tmp_path: Path) -> None:
    contents, said = run(tmp_path / "run", "backups", "2:SIGKILL@20", "1:SIGSTOP@70")
    assert "all workers start again" not in said
    assert contents


@pytest.mark.slow
@pytest.mark.parametrize("form", ["for", "late"])
@pytest.mark.parametrize("transport", [[], ["gloo"]], ids=["shared_memory", "gloo"])
@pytest.mark.parametrize("seed", range(8))
def test_lost_at_random_moments(
    undisturbed: dict[str, bytes], tmp_path: Path, seed: int, transport: list[str], form: str
) -> None:
    choose = random.Random(seed)
    faults = [
        f"{worker}:in@{10 * choose.randrange(1, 12)}"
        if choose.random() < 0.4
        else f"{worker}:{choose.choice(['SIGKILL', 'SIGKILL', 'SIGSTOP'])}@{choose.randrange(STEPS)}"
        f"+{choose.randrange(20)}"
        for worker in range(3)
    ]
    contents, said = run(tmp_path / "run", *transport, form, *faults)
    if transport:  # the name of the transport is in the values
        contents |= {"values.json": undisturbed["values.json"]}
    assert contents == undisturbed, (faults, said)
