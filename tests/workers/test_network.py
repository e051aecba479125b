"""How a worker tries connections while its main thread waits; on the loopback."""

from __future__ import annotations

import queue
import socket
from collections.abc import Mapping

from lockstep.workers.network import Probe

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
LONG_SECONDS = 60.0


def test_a_worker_listens_and_says_whom_it_does_not_reach() -> None:
    said: queue.SimpleQueue[Mapping[str, object]] = queue.SimpleQueue()
    one, other = Probe(said.put, LOOPBACK), Probe(said.put, LOOPBACK)
    one.obey({"trial": "listen"})
    other.obey({"trial": "listen"})
    places = [said.get(timeout=LONG_SECONDS)["listens"] for _ in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = list(server.getsockname())
    one.obey({"trial": "connect", "places": [[1, *places[1]], [2, *closed]]})  # type: ignore[misc]
    unreached = said.get(timeout=LONG_SECONDS)["unreached"]
    assert unreached == [[2, f"connection refused, from 127.0.0.1 to 127.0.0.1 port {closed[1]}"]]
    other.obey({"trial": "end"})
    one.obey({"trial": "connect", "places": [[1, *places[1]]]})  # type: ignore[misc]
    assert said.get(timeout=LONG_SECONDS)["unreached"], "it listens no longer"
    one.obey({"trial": "end"})


def test_a_worker_whose_network_is_gone_says_so() -> None:
    said: list[Mapping[str, object]] = []
    Probe(said.append, {"GLOO_SOCKET_IFNAME": "eht0"}).obey({"trial": "listen"})
    why = f"its network is gone (GLOO_SOCKET_IFNAME=eht0 on {socket.gethostname()})"
    assert said == [{"listens": [], "why": why}]
    Probe(said.append, {}).obey({"trial": "listen"})
    assert len(said) == 1, "where no network was chosen none can be missing"
