"""Runs on several hosts by torchrun: each host's name is that of its loopback, and yet the workers find each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import exact_run
import pytest
from separate_hosts import Command, Hosts

pytestmark = [pytest.mark.process, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "exact_run.py"
RENDEZVOUS = {
    "static": ["--master-addr", "host0", "--master-port", "29400"],
    "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29400", "--rdzv-id", "run"],
}


def start(
    hosts: Hosts, rendezvous: str, workdir: Path, steps: str, *options: str, script: Path = SCRIPT
) -> list[Command]:
    """Start torchrun on two hosts, with two workers on each."""
    words = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--monitor-interval", "0.05"]
    words += [*RENDEZVOUS[rendezvous], *options]
    path = os.pathsep.join(sys.path)
    return [
        hosts.start(host, sys.executable, *words, "--node-rank", str(host), script, workdir, steps, PYTHONPATH=path)
        for host in range(2)
    ]


@pytest.mark.parametrize("rendezvous", RENDEZVOUS)
def test_torchrun_on_two_hosts_writes_the_files_of_one_worker(
    make_hosts: Callable[[int], Hosts], tmp_path: Path, rendezvous: str
) -> None:
    hosts = make_hosts(2)
    for command in start(hosts, rendezvous, tmp_path / "run", "3"):
        assert command.wait() == 0, command.text
    exact_run.train(tmp_path / "alone", 3)
    assert exact_run.contents(tmp_path / "run") == exact_run.contents(tmp_path / "alone")
    assert hosts.leftovers() == []


LOSES_A_WORKER = """
import os
import signal
import sys
from pathlib import Path

import exact_run

calls = []


def losses(model, batch, losses=exact_run.losses):
    calls.append(batch)
    if len(calls) == 3 and os.environ["RANK"] == "3" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return losses(model, batch)


exact_run.losses = losses
exact_run.train(Path(sys.argv[1]), int(sys.argv[2]))
"""


@pytest.mark.parametrize("rendezvous", RENDEZVOUS)
def test_torchrun_starts_all_workers_again_when_one_is_lost(
    make_hosts: Callable[[int], Hosts], tmp_path: Path, rendezvous: str
) -> None:
    hosts = make_hosts(2)
    script = tmp_path / "script.py"
    script.write_text(LOSES_A_WORKER)
    chief, other = start(hosts, rendezvous, tmp_path / "run", "3", "--max-restarts", "1", script=script)
    assert (chief.wait(), other.wait()) == (0, 0), chief.text + other.text
    assert chief.text.count("host0 exchanges with the other hosts") == 2
    exact_run.train(tmp_path / "alone", 3)
    assert exact_run.contents(tmp_path / "run") == exact_run.contents(tmp_path / "alone")
    assert hosts.leftovers() == []
