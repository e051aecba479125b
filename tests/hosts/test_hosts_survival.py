"""Survivors on several hosts: they go on when a host vanishes, and a lost worker is started anew on its own host."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from separate_hosts import Command, Hosts
from worker_processes import HANG_SECONDS

from tests.launcher import surviving_run

pytestmark = pytest.mark.process

NUM_STEPS = 500
NOTICE_SECONDS = 4.0
"""From the end of a host to the next step of the others."""


def start(hosts: Hosts, num_hosts: int, folder: Path, *, replacements: int, only: int | None = None) -> list[Command]:
    """Start a worker on each host, or on one alone, of a run of some seconds."""
    folder.mkdir(exist_ok=True)
    plan = json.dumps({"workers": num_hosts, "survival": {"replacements": replacements}})
    words = ["-m", "lockstep", "run", "--hosts", str(num_hosts), "--chief", "host0:29500", "--workers", str(num_hosts)]
    survives = ["--on-failure", "continue", "--restarts", str(replacements)]
    script = [str(surviving_run.__file__), str(folder), plan, str(NUM_STEPS)]
    environment = {"LOCKSTEP_KEY": "a key that nobody guesses", "PYTHONPATH": os.pathsep.join(sys.path)}
    return [
        hosts.start(host, sys.executable, *words, "--host-rank", str(host), *survives, *script, **environment)
        for host in (range(num_hosts) if only is None else [only])
    ]


def said(folder: Path, what: str) -> list[list[Any]]:
    """What workers have said of themselves, in time."""
    words = [json.loads(line) for file in folder.iterdir() for line in file.read_text().splitlines()]
    return sorted((each for each in words if each[1] == what), key=lambda each: each[-1])


def wait_until_all_train(folder: Path, num_hosts: int) -> dict[int, int]:
    """Returns the process id of each worker."""
    deadline = time.monotonic() + HANG_SECONDS
    while len(found := said(folder, "trains")) < num_hosts:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return {words[0]: words[4] for words in found}


@pytest.mark.slow
def test_the_others_go_on_when_a_host_vanishes(make_hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    hosts, folder = make_hosts(3), tmp_path / "run"
    commands = start(hosts, 3, folder, replacements=0)
    wait_until_all_train(folder, 3)
    vanished = time.monotonic()
    hosts.vanish(1)
    codes = [commands[host].wait() for host in (0, 2)]
    assert codes == [0, 0], commands[0].text
    goes_on = said(folder, "goes on")
    assert [words[4] for words in sorted(goes_on)] == [
        [rank, ["worker 0 on host0", "worker 2 on host2"]] for rank in (0, 1)
    ]
    assert goes_on[-1][-1] - vanished < NOTICE_SECONDS
    assert [words[2:4] for words in said(folder, "done")] == [[NUM_STEPS, surviving_run.total_of(NUM_STEPS)]] * 2
    for host in (0, 2):
        assert "host host1 gives no sign of life for " in commands[host].text
        assert "2 of 3 workers go on" in commands[host].text
    assert hosts.leftovers() == []


def test_a_host_that_was_lost_takes_part_when_it_is_started_again(
    make_hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    hosts, folder = make_hosts(2), tmp_path / "run"
    chief, _ = start(hosts, 2, folder, replacements=1)
    wait_until_all_train(folder, 2)
    hosts.kill(1)
    chief.wait_for("1 of 2 workers go on")
    back = start(hosts, 2, folder, replacements=1, only=1)[0]
    assert [chief.wait(), back.wait()] == [0, 0], f"{chief.text}\n{back.text}"
    (joins,) = said(folder, "joins")
    assert (joins[0], joins[4]) == (1, [1, ["worker 0 on host0", "worker 1 on host1"]])
    assert [words[2:4] for words in said(folder, "done")] == [[NUM_STEPS, surviving_run.total_of(NUM_STEPS)]] * 2
    assert (
        "nobody takes the place of worker 1: its host is lost; give the same command on host1 again, and it takes part"
    ) in chief.text
    for command in (chief, back):
        assert "host host1 has come back; worker 1 is started anew" in command.text
    assert "takes part from now on" in chief.text
    assert hosts.leftovers() == []


def contents(workdir: Path) -> dict[str, bytes]:
    """What the run has learned and said, byte for byte; its manifest holds times."""
    newest = max((workdir / "checkpoints").glob("step-*"))
    files = [path for path in newest.iterdir() if path.name != "manifest.json"]
    return {path.name: path.read_bytes() for path in [*files, workdir / "metrics.jsonl"]}


@pytest.mark.slow
def test_a_run_in_which_a_host_was_lost_and_came_back_ends_with_the_bytes_of_one_without_losses(
    make_hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    hosts, script = make_hosts(2), Path(__file__).parents[1] / "laws" / "survived_run.py"
    environment = {"LOCKSTEP_KEY": "a key that nobody guesses", "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [
        "-m",
        "lockstep",
        "run",
        "--hosts",
        "2",
        "--chief",
        "host0:29500",
        "--workers",
        "2",
        "--on-failure",
        "continue",
    ]
    disturbed, slow = tmp_path / "disturbed" / "run", tmp_path / "disturbed" / "slow"
    disturbed.mkdir(parents=True)
    slow.touch()

    def begin(host: int) -> Command:
        return hosts.start(
            host, sys.executable, *words, "--host-rank", str(host), script, disturbed, "gloo", **environment
        )

    chief, _ = begin(0), begin(1)
    deadline = time.monotonic() + HANG_SECONDS
    while not (disturbed / "metrics.jsonl").exists():
        assert time.monotonic() < deadline, chief.text
        time.sleep(0.05)
    hosts.kill(1)
    chief.wait_for("going on from step")
    back = begin(1)
    chief.wait_for("takes part from now on")
    slow.unlink()
    assert [chief.wait(), back.wait()] == [0, 0], f"{chief.text}\n{back.text}"
    alone = hosts.start(0, sys.executable, script, tmp_path / "alone" / "run", "gloo", **environment)
    assert alone.wait() == 0, alone.text
    assert contents(disturbed) == contents(tmp_path / "alone" / "run")
    events = [json.loads(line)["event"] for line in (disturbed / "history.jsonl").read_text().splitlines()]
    assert [event for event in events if event in ("continue", "join")] == ["continue", "join"]


@pytest.mark.slow
def test_hosts_that_do_not_reach_each_other_do_not_stop_the_others(
    make_hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    hosts, folder = make_hosts(3), tmp_path / "run"
    commands = start(hosts, 3, folder, replacements=0)
    wait_until_all_train(folder, 3)
    hosts.part(1, 2)
    codes = [commands[host].wait() for host in (0, 1)]
    assert codes == [0, 0], commands[0].text
    names = ["worker 0 on host0", "worker 1 on host1"]
    assert [words[4] for words in sorted(said(folder, "goes on"))] == [[rank, names] for rank in (0, 1)]
    assert [words[2:4] for words in said(folder, "done")] == [[NUM_STEPS, surviving_run.total_of(NUM_STEPS)]] * 2
    for host in range(3):
        assert "worker 1 on host1 does not reach worker 2 on host2, though both reach" in commands[host].text
        assert "timed out, from 10.77.0.2 to 10.77.0.3 port " in commands[host].text
        assert "Host host2 is left out of the run\n2 of 3 workers are left\n" in commands[host].text
        assert "its stack follows" not in commands[host].text
    assert hosts.leftovers() == []


@pytest.mark.slow
def test_a_run_that_does_not_go_on_says_at_once_which_hosts_do_not_reach_each_other(
    make_hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    hosts = make_hosts(3)
    words = ["-m", "lockstep", "run", "--hosts", "3", "--chief", "host0:29500", "--workers", "3", "--restarts", "3"]
    script = [str(Path(__file__).parent / "exact_run.py"), str(tmp_path), "forever"]
    environment = {"LOCKSTEP_KEY": "a key that nobody guesses", "PYTHONPATH": os.pathsep.join(sys.path)}
    commands = [
        hosts.start(host, sys.executable, *words, "--host-rank", str(host), *script, **environment) for host in range(3)
    ]
    commands[0].wait_for("at step 3")
    hosts.part(1, 2)
    assert [command.wait() for command in commands] == [1, 1, 1], commands[0].text
    for command in commands:
        assert "worker 1 on host1 does not reach worker 2 on host2, though both reach the launcher" in command.text
        assert "start again" not in command.text
    assert hosts.leftovers() == []


@pytest.mark.slow
def test_a_lost_worker_is_started_anew_on_its_own_host(make_hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    hosts, folder = make_hosts(2), tmp_path / "run"
    commands = start(hosts, 2, folder, replacements=3)
    pids = wait_until_all_train(folder, 2)
    os.kill(pids[0], signal.SIGKILL)
    assert [command.wait() for command in commands] == [0, 0], commands[0].text
    (joins,) = said(folder, "joins")
    assert (joins[0], joins[4]) == (0, [1, ["worker 1 on host1", "worker 0 on host0"]])
    assert [words[2:4] for words in said(folder, "done")] == [[NUM_STEPS, surviving_run.total_of(NUM_STEPS)]] * 2
    for command in commands:
        assert "1 of 2 workers are left; worker 0 is started anew" in command.text
    assert hosts.leftovers() == []
