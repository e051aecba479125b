"""Workers on several hosts find the network between them, whatever their names resolve to, or say what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from separate_hosts import Hosts

pytestmark = pytest.mark.process

# One start of two processes for all cases: to import torch is what it costs.
SCRIPT = """
import sys
from datetime import timedelta

from torch.distributed import TCPStore

from lockstep.errors import LockstepError
from lockstep.workers.group import Group
from lockstep.workers.network import choose_network

rank = int(sys.argv[1])
store = TCPStore("host0", 29500, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=20))
group = Group(store, rank, 2, 20)
group.names = ["worker 0 on host0", "worker 1 on host1"]
for chosen in ("", "docker0", "lo" if rank else "", "eht0"):
    environment = {"GLOO_SOCKET_IFNAME": chosen} if chosen else {}
    try:
        network = choose_network(group, rank, ("host0", 29500), environment)
        print(network, *(f"{name}={value}" for name, value in sorted(environment.items())))
    except LockstepError as error:
        print(str(error).replace("\\n", " "))
# Worker 0 holds the store, and ends last.
if rank == 0:
    store.wait(["done"])
else:
    store.set("done", "")
"""


@pytest.mark.slow
def test_the_network_is_the_one_that_leads_to_the_others(make_hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    hosts = make_hosts(2)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    commands = [hosts.start(host, sys.executable, script, str(host)) for host in range(2)]
    for host, command in enumerate(commands):
        assert command.wait() == 0, command.text
        found, unreachable, loopback, unknown = (line for line in command.lines if "c10d" not in line)
        assert found == f"eth0 (10.77.0.{host + 1}) GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"
        assert "worker 0 on host0 does not reach worker 1 on host1." in unreachable
        assert "connection refused: from docker0 to docker0, 172.17.0.1 port " in unreachable
        assert "worker 0 on host0 does not reach worker 1 on host1." in loopback
        assert "connection refused: from lo to lo, 127.0.0.1 port " in loopback
        assert unknown.startswith("This host has no network interface that GLOO_SOCKET_IFNAME names.")
        assert f"GLOO_SOCKET_IFNAME=eht0 on host{host} " in unknown
        assert "one of docker0, eth0, lo" in unknown


LOOK = """
from lockstep.doctor import hosts
from lockstep.doctor.check_result import results_of

hosts.CONNECT_SECONDS = 0.5
places = [hosts.HostPort.of(text) for text in ("host0", "host1:7000", "host2", "host9")]
for finding in results_of({"hosts": hosts.host_checks(places)["hosts"]}):
    print(finding.verdict, finding.checked, finding.found)
"""


def test_the_doctor_says_which_hosts_answer(make_hosts: Callable[[int], Hosts]) -> None:
    hosts = make_hosts(3)
    hosts.cut(2)
    doctor = hosts.start(0, sys.executable, "-c", LOOK)
    assert doctor.wait() == 0, doctor.text
    itself, near, cut, unknown = doctor.lines
    assert itself.startswith("OK host host0 127.0.")
    assert itself.endswith(" is this host itself")
    assert near.startswith("OK host host1 answers in ")
    assert " ms, 10.77.0.2 by eth0 (10.77.0.1, MTU 1500" in near
    assert near.endswith("; nobody listens at port 7000")
    assert cut.startswith("fails host host2 does not answer at port 29500, 10.77.0.3 by eth0 (")
    assert unknown.startswith("fails host host9 cannot be found: ")
