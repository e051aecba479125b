"""Workers on two hosts that another launcher has started: a fault of one is noticed in seconds, and named by all."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import pytest
from separate_hosts import Command, Hosts

pytestmark = pytest.mark.process

SCRIPT = """
import os, signal, sys, time
import torch
import lockstep as ls
from lockstep.exchange.collectives import collectives

here = ls.join("cpu")
calls = collectives(here, "gloo")
for step in range(10_000):
    here.pulse.at(step, "exchange")
    calls.all_reduce([torch.ones(3)])
    if step == 0:
        print("begins", flush=True)
    time.sleep(0.01)
    if step == 30 and here.rank == 1:
        print("now", flush=True)
        exec(sys.argv[1])
"""
EXCHANGE = "(phase exchange)"


def started(hosts: Hosts, deed: str = "") -> list[Command]:
    """A worker on each host that exchanges with the other one, after 30 steps with a deed of worker 1."""
    places = {"WORLD_SIZE": "2", "MASTER_ADDR": "host0", "MASTER_PORT": "29400"}
    commands = [hosts.start(host, sys.executable, "-c", SCRIPT, deed, RANK=str(host), **places) for host in range(2)]
    for command in commands:
        command.wait_for("begins")
    return commands


def given(command: Command) -> str:
    """Why a worker says that it has lost another one."""
    assert "PeerLostError: worker" in command.text
    return next(line for line in command.lines if "  given:" in line).partition("given:")[2].strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "code", "why", "last"),
    [
        ("raise ValueError('boom')", 1, "worker 1 on host1 failed at step 30", "ValueError: boom"),
        pytest.param("os.kill(os.getpid(), 9)", -9, "was killed by SIGKILL at step", "hint:", marks=pytest.mark.slow),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGSTOP)",
            -9,
            "was stopped (SIGSTOP) for 2.",
            "hint:",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_becomes_of_a_worker_is_told_on_the_other_host(
    make_hosts: Callable[[int], Hosts], deed: str, code: int, why: str, last: str
) -> None:
    hosts = make_hosts(2)
    chief, other = started(hosts, deed)
    chief.wait_for("PeerLostError: worker 0 lost worker 1 on host1.")
    assert why in given(chief)
    assert last in chief.last_line
    assert [chief.wait(), other.wait()] == [1, code]
    assert "lost" not in other.text
    assert hosts.leftovers() == []


@pytest.mark.slow
def test_a_cut_link_is_noticed_on_both_sides(make_hosts: Callable[[int], Hosts]) -> None:
    hosts = make_hosts(2)
    chief, other = started(hosts)
    hosts.cut(1)
    for rank, each in enumerate((chief, other)):
        each.wait_for(f"PeerLostError: worker {rank} lost")
    assert given(chief).startswith("host host1 gives no sign of life for ")
    assert given(chief).endswith("or its network is; lost with it: worker 1 " + given(chief).partition("worker 1 ")[2])
    assert given(other).startswith("no sign of life for ")
    assert "lost host host0." in other.text
    assert [chief.wait(), other.wait()] == [1, 1]
    assert hosts.leftovers() == []


@pytest.mark.slow
def test_the_end_of_a_whole_host_is_noticed_and_that_of_the_chief_too(make_hosts: Callable[[int], Hosts]) -> None:
    hosts = make_hosts(2)
    chief, other = started(hosts)
    hosts.vanish(0)
    other.wait_for("PeerLostError: worker 1 lost host host0.")
    assert [chief.wait(), other.wait()] == [-signal.SIGKILL, 1]
    assert hosts.leftovers() == []
