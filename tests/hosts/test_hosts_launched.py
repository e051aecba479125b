"""Runs on several hosts by our launcher, `--hosts`: what they learn, and what each screen says when a host is lost."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import exact_run
import pytest
from separate_hosts import Command, Hosts

import lockstep as ls

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parent / "exact_run.py"
KEY = "a key that nobody guesses"
FAILED = 1


def start(hosts: Hosts, num_hosts: int, workdir: Path, steps: str, *others: str, **environment: str) -> list[Command]:
    """Start the same command on each host, with a workdir of its own: only the chief's is ever written to.

    On the chief's host its name is that of the loopback, and yet the others find it.
    """
    words = ["-m", "lockstep", "run", "--hosts", str(num_hosts), "--chief", "host0:29500", "--workers", str(num_hosts)]
    environment = {"LOCKSTEP_KEY": KEY, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return [
        hosts.start(
            host,
            sys.executable,
            *words,
            "--host-rank",
            str(host),
            SCRIPT,
            workdir / f"host{host}",
            steps,
            *others,
            **environment,
        )
        for host in range(num_hosts)
    ]


@pytest.mark.slow
def test_three_hosts_write_the_files_of_one_worker_which_goes_on_from_them(
    make_hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    hosts = make_hosts(3)
    for command in start(hosts, 3, tmp_path, "3"):
        assert command.wait() == 0, command.text
    exact_run.train(tmp_path / "alone", 3)
    assert exact_run.contents(tmp_path / "host0") == exact_run.contents(tmp_path / "alone")
    assert len(exact_run.contents(tmp_path / "alone")) >= 3
    assert not [*(tmp_path / "host1").glob("*"), *(tmp_path / "host2").glob("*")]  # the chief is the only writer
    for folder in ("host0", "alone"):
        ls.workers.rank.leave()
        exact_run.train(tmp_path / folder, 5)
    assert exact_run.contents(tmp_path / "host0") == exact_run.contents(tmp_path / "alone")
    assert hosts.leftovers() == []


@pytest.mark.slow
def test_workers_on_other_hosts_than_the_chief_that_serves_them_learn_what_one_worker_does(
    make_hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    hosts = make_hosts(3)
    for command in start(hosts, 3, tmp_path, "6", "backups"):
        assert command.wait() == 0, command.text
    exact_run.train(tmp_path / "alone", 6)
    scores = [(tmp_path / folder / "scores.json").read_text() for folder in ("host0", "alone")]
    assert scores[0] == scores[1]
    assert hosts.leftovers() == []


# Each failure: the last lines of both screens, the exit codes, and that nothing is left ------------------------------


@pytest.fixture
def pair(make_hosts: Callable[[int], Hosts], tmp_path: Path) -> tuple[Hosts, Command, Command]:
    """Two hosts in the middle of a run, and their commands."""
    hosts = make_hosts(2)
    chief, other = start(hosts, 2, tmp_path, "forever")
    chief.wait_for("at step 3")
    return hosts, chief, other


def ended(hosts: Hosts, commands: tuple[Command, ...]) -> list[int]:
    """The exit codes; nothing is left on the hosts then."""
    codes = [command.wait() for command in commands]
    assert hosts.leftovers() == []
    return codes


def worker_of(hosts: Hosts, host: int) -> int:
    """The newest process of a host: that of its worker."""
    return max(hosts.processes(host), key=lambda pid: int(Path(f"/proc/{pid}/stat").read_text().split()[21]))


@pytest.mark.slow
def test_a_cut_link_ends_the_run_on_both_sides_of_it(pair: tuple[Hosts, Command, Command]) -> None:
    hosts, chief, other = pair
    hosts.cut(1)
    assert ended(hosts, (chief, other)) == [FAILED, FAILED]
    assert "host1 gives no sign of life for " in chief.last_line
    assert "lost with it: worker 1 at step " in chief.last_line
    assert "Host 0, which decides for all of them, is gone." in other.text
    assert "the workers of this host are ended: worker 1 at step " in other.last_line


@pytest.mark.slow
def test_a_cut_link_ends_what_the_chief_serves(make_hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    hosts = make_hosts(2)
    chief, other = start(hosts, 2, tmp_path, "forever", "backups")
    chief.wait_for("at step 3")
    hosts.cut(1)
    assert ended(hosts, (chief, other)) == [FAILED, FAILED]
    assert "lost with it: worker 1 at step " in chief.last_line
    assert "the workers of this host are ended: worker 1 at step " in other.last_line


def test_a_host_that_is_killed_is_missed_at_once(pair: tuple[Hosts, Command, Command]) -> None:
    hosts, chief, other = pair
    hosts.kill(1)
    assert ended(hosts, (chief, other)) == [FAILED, -signal.SIGKILL]
    assert "host1 is gone: its launcher has ended, or was killed; lost with it: worker 1 at step " in chief.last_line


@pytest.mark.slow
def test_a_worker_that_is_killed_is_named_on_both_screens(pair: tuple[Hosts, Command, Command]) -> None:
    hosts, chief, other = pair
    pid = worker_of(hosts, 1)
    os.kill(pid, signal.SIGKILL)
    assert ended(hosts, (chief, other)) == [FAILED, FAILED]
    for command in (chief, other):
        assert f"worker 1 (pid {pid} on host1) was killed by SIGKILL at step " in command.last_line


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_named_on_both_screens(pair: tuple[Hosts, Command, Command]) -> None:
    hosts, chief, other = pair
    pid = worker_of(hosts, 1)
    os.kill(pid, signal.SIGSTOP)
    assert ended(hosts, (chief, other)) == [FAILED, FAILED]
    for command in (chief, other):
        assert f"worker 1 (pid {pid} on host1) was stopped (SIGSTOP) for " in command.last_line


@pytest.mark.slow
def test_the_host_of_the_chief_vanishes(pair: tuple[Hosts, Command, Command]) -> None:
    hosts, chief, other = pair
    hosts.vanish(0)
    assert ended(hosts, (chief, other)) == [-signal.SIGKILL, FAILED]
    assert "Host 0, which decides for all of them, is gone." in other.text


@pytest.mark.slow
def test_a_signal_on_any_host_stops_all_at_one_step_which_is_saved(
    pair: tuple[Hosts, Command, Command], tmp_path: Path
) -> None:
    hosts, chief, other = pair
    other.signal(signal.SIGTERM)
    assert ended(hosts, (chief, other)) == [143, 143]
    (checkpoint,) = (tmp_path / "host0/checkpoints").iterdir()
    said = f"at step {int(checkpoint.name.removeprefix('step-'))}"
    assert said in chief.text
    assert said in other.text


@pytest.mark.slow
def test_a_link_that_is_slow_or_down_for_a_second_ends_nothing(pair: tuple[Hosts, Command, Command]) -> None:
    hosts, chief, other = pair
    for host in range(2):
        hosts.limit(host, "100kbit")
    hosts.cut(1)
    time.sleep(1)
    hosts.restore(1)
    step = int(chief.last_line.rpartition(" ")[2])
    chief.wait_for(f"worker 0 on host0 at step {step + 5}")
    chief.signal(signal.SIGTERM)
    assert ended(hosts, (chief, other)) == [143, 143]
