"""The hosts of these tests are separate ones: their network can be cut, and they can vanish."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import separate_hosts
from separate_hosts import FILES_OF_NAMESPACES, NAMESPACES, Hosts

pytestmark = pytest.mark.process

LISTEN = """
import socket, time
with socket.create_server(("", 7000)) as server:
    print("listens on", socket.gethostname(), flush=True)
    while True:
        caller, address = server.accept()
        try:
            while data := caller.recv(1 << 16):
                caller.sendall(data)
        except ConnectionResetError:  # in place of the end: an answer was on its way to a caller that has gone
            pass
        print("the caller has hung up", flush=True)
"""
CALL = """
import socket, sys, time
caller = socket.create_connection((sys.argv[1], 7000), timeout=1)
try:
    while caller.sendall(b"x") or caller.recv(1):
        print("heard", flush=True)
        time.sleep(0.05)
except ConnectionResetError:
    pass
print("the other side has hung up")
"""


def python(hosts: Hosts, host: int, script: str, *arguments: str) -> separate_hosts.Command:
    return hosts.start(host, sys.executable, "-I", "-c", script, *arguments)


def test_a_cut_link_loses_packets_until_it_is_restored(make_hosts: Callable[[int], Hosts]) -> None:
    hosts = make_hosts(2)
    server = python(hosts, 0, LISTEN)
    server.wait_for("listens on host0")
    caller = python(hosts, 1, CALL, "host0")
    caller.wait_for("heard")
    hosts.cut(1)
    assert caller.wait() == 1
    assert "TimeoutError" in caller.last_line
    assert "hung up" not in server.text  # nobody has told it
    hosts.restore(1)
    server.wait_for("the caller has hung up")
    python(hosts, 1, CALL, "host0").wait_for("heard")


def test_a_killed_host_hangs_up_and_one_that_vanishes_does_not(make_hosts: Callable[[int], Hosts]) -> None:
    hosts = make_hosts(3)
    servers = [python(hosts, host, LISTEN) for host in (1, 2)]
    for server in servers:
        server.wait_for("listens")
    caller_of_1, caller_of_2 = (python(hosts, 0, CALL, name) for name in ("host1", "host2"))
    for caller in (caller_of_1, caller_of_2):
        caller.wait_for("heard")
    hosts.kill(1)
    hosts.vanish(2)
    assert [server.wait() for server in servers] == [-signal.SIGKILL] * 2
    caller_of_1.wait_for("hung up")
    assert caller_of_2.wait() == 1
    assert "TimeoutError" in caller_of_2.last_line
    assert hosts.processes(1) == hosts.processes(2) == []


def test_what_is_left_behind_is_named(make_hosts: Callable[[int], Hosts]) -> None:
    hosts = make_hosts(2)
    assert hosts.leftovers() == []
    python(hosts, 1, f"open('/dev/shm/forgotten', 'w')\n{LISTEN}").wait_for("listens")
    process, port, memory = hosts.leftovers(0)
    assert process.startswith("host1: process ")
    assert "0.0.0.0:7000" in port
    assert memory == "host1: /dev/shm/forgotten"
    assert not Path("/dev/shm/forgotten").exists()


@pytest.mark.slow
def test_a_limited_host_sends_no_faster(make_hosts: Callable[[int], Hosts]) -> None:
    hosts = make_hosts(2)
    hosts.limit(1, "20mbit")
    python(hosts, 0, LISTEN).wait_for("listens")
    # 1 MB there and back, of which 256 KB each way pass at once.
    script = """
import socket, threading, time
caller = socket.create_connection(("host0", 7000), timeout=20)
start, left = time.monotonic(), 1 << 20
threading.Thread(target=caller.sendall, args=(bytes(left),)).start()
while left:
    left -= len(caller.recv(1 << 16))
print("seconds", time.monotonic() - start)
"""
    assert float(python(hosts, 1, script).wait_for("seconds").split()[1]) > 0.2


def test_nothing_is_left_of_the_hosts(make_hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    make_hosts(1)  # skips where there can be none
    abandoned = subprocess.Popen(["true"])
    abandoned.wait()
    name = f"lockstep-{abandoned.pid}-0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    child = subprocess.run(
        [
            sys.executable,
            "-c",
            "import separate_hosts, pathlib, os, sys\n"
            "with separate_hosts.Hosts(2, pathlib.Path(sys.argv[1])) as hosts:\n"
            "    command = hosts.start(1, 'sleep', '60')\n"
            "    print(os.getpid(), flush=True)\n"
            "print(command.wait(0))",
            tmp_path / "other",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[:2]))},
        capture_output=True,
        text=True,
        check=True,
    )
    pid, code = child.stdout.split()
    assert int(code) == -signal.SIGKILL
    for folder in (NAMESPACES, FILES_OF_NAMESPACES):
        assert not list(folder.glob(f"lockstep-{pid}-*"))
    assert not (NAMESPACES / name).exists()
