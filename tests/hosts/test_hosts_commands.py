"""The commands on three hosts leave the files that they leave on one worker, and go on from each other's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from separate_hosts import Hosts
from worker_processes import HANG_SECONDS

pytestmark = [pytest.mark.process, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
RECIPE = [
    "mnist", "--towers", "3", "--set", "batch_size=24", "--set", "checkpoints.every=2 steps",
    "--set", "watch.metrics=1 steps", "--set", "exchange.exact=true", "--set", "average.decay=0.9",
    "--set", "evaluate.every=2 steps", "--set", "evaluate.examples=500", "--set", f"data.folder={ROOT}/data/mnist",
]  # fmt: skip


def on_hosts(hosts: Hosts, *words: str | Path) -> str:
    """Run a command on three hosts, one worker on each; returns the chief's screen."""
    several = ["--hosts", "3", "--chief", "host0:29500", "--workers", "3"]
    environment = {"LOCKSTEP_KEY": "a key that nobody guesses", "PYTHONPATH": str(ROOT)}
    commands = [
        hosts.start(host, sys.executable, "-m", "lockstep", *words, *several, "--host-rank", str(host), **environment)
        for host in range(3)
    ]
    for command in commands:
        assert command.wait() == 0, command.text
    return commands[0].text


def on_one_worker(*words: str | Path) -> str:
    command = [sys.executable, "-m", "lockstep", *words, "--workers", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def contents(workdir: Path) -> dict[str, bytes]:
    """Every byte of checkpoints, but those of their manifests, which hold the time of saving, and of the metrics."""
    files = [path for path in (workdir / "checkpoints").rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {str(path.relative_to(workdir)): path.read_bytes() for path in [*files, workdir / "metrics.jsonl"]}


def test_train_and_evaluate_on_three_hosts_as_on_one_worker(make_hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    hosts = make_hosts(3)
    ours, alone = tmp_path / "hosts", tmp_path / "alone"
    on_hosts(hosts, "train", *RECIPE, "--workdir", ours, "--steps", "4")
    on_one_worker("train", *RECIPE, "--workdir", alone, "--steps", "4")
    assert contents(ours) == contents(alone)
    assert {path.name for path in ours.iterdir()} == {path.name for path in alone.iterdir()}

    on_hosts(hosts, "evaluate", ours, "--examples", "500")
    on_one_worker("evaluate", alone, "--examples", "500")
    scored = [json.loads((folder / "evaluations.jsonl").read_text()) for folder in (ours, alone)]
    assert scored[0] == scored[1]

    # Each goes on where the other one stood.
    on_one_worker("train", *RECIPE, "--workdir", ours, "--steps", "6")
    on_hosts(hosts, "train", *RECIPE, "--workdir", alone, "--steps", "6")
    assert contents(ours) == contents(alone)
    assert hosts.leftovers() == []
