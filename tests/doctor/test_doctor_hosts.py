from __future__ import annotations

import socket
import sys

import pytest

from lockstep.doctor import hosts
from lockstep.doctor.check_result import CheckResult, results_of
from lockstep.doctor.hosts import HostPort, host_checks
from lockstep.errors import InputError


def look(*texts: str) -> dict[str, CheckResult]:
    return {each.checked: each for each in results_of(host_checks([HostPort.of(text) for text in texts]))}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """All names are those of hosts at 192.0.2.7, in the network of an interface that is not there."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 1))]
    monkeypatch.setattr(hosts.socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(hosts, "address_towards", lambda *_: "192.0.2.1")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("node1", HostPort("node1", 29500)),
        ("node1:7", HostPort("node1", 7)),
        ("10.0.0.2", HostPort("10.0.0.2", 29500)),
        ("fe80::1", HostPort("fe80::1", 29500)),
        ("[fe80::1]:22", HostPort("fe80::1", 22)),
    ],
)
def test_places_are_names_or_addresses_with_a_port(text: str, place: HostPort) -> None:
    assert HostPort.of(text) == place


@pytest.mark.parametrize("text", ["", "node1:", "node1:x", "node1:0", "node1:65536", "a..b", ":7", "x" * 64])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="This cannot be the name of a host"):
        HostPort.of(text)


def test_without_other_hosts_nothing_is_looked_at() -> None:
    assert host_checks([]) == {}


def test_a_host_that_is_not_known_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(hosts.socket, "getaddrinfo", refuse)
    found = look("nowhere")["host nowhere"]
    assert (found.verdict, found.found) == ("fails", "cannot be found: Name or service not known")
    assert "/etc/hosts" in found.mend


def test_this_host_is_not_called() -> None:
    assert look("127.0.0.1")["host 127.0.0.1"].found == "127.0.0.1 is this host itself"


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("listens", "said"), [(True, "somebody listens"), (False, "nobody listens")])
def test_an_answer_is_good_whether_anybody_listens_or_not(
    monkeypatch: pytest.MonkeyPatch, listens: bool, said: str
) -> None:
    monkeypatch.setattr(hosts, "_call", lambda *_: (listens, 0.0002))
    found = look("node1:7")["host node1"]
    assert found.verdict == "OK"
    assert found.found == f"answers in 0.20 ms, 192.0.2.7 by an unknown interface (192.0.2.1); {said} at port 7"
    assert found.numbers == {"seconds": 0.0002, "port": 7}


@pytest.mark.usefixtures("elsewhere")
def test_a_host_that_is_far_is_a_warning_and_a_silent_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_call", lambda *_: (True, 0.08))
    assert look("node1")["host node1"].verdict == "warn"

    def time_out(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(hosts, "_call", time_out)
    found = look("node1")["host node1"]
    assert (found.verdict, found.found.endswith("timed out")) == ("fails", True)
    assert "firewall" in found.mend


def test_calls_tell_who_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert hosts._call("127.0.0.1", port)[0]
    assert not hosts._call("127.0.0.1", port)[0]


def test_an_interface_that_is_not_there_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look("127.0.0.1")["interfaces"].found.startswith("the one that leads to the others, of ")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    found = look("127.0.0.1")["interfaces"]
    assert (found.verdict, found.mend[:24]) == ("fails", "unset GLOO_SOCKET_IFNAME")


def test_a_key_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = look("127.0.0.1")["key"]
    assert (found.verdict, found.found) == (
        "warn",
        "The environment has no key for the run in LOCKSTEP_KEY: no LOCKSTEP_KEY",
    )
    monkeypatch.setenv("LOCKSTEP_KEY", "a key of sixteen characters")
    assert look("127.0.0.1")["key"] == CheckResult("key", "27 characters", numbers={"characters": 27})


@pytest.mark.parametrize(("state", "verdicts"), [(5, ["warn"]), (0, ["OK"]), (-1, [])])
def test_a_clock_that_nobody_sets_is_told_where_the_system_tells(
    monkeypatch: pytest.MonkeyPatch, state: int, verdicts: list[str]
) -> None:
    class System:
        def __init__(self, _: object) -> None: ...

        def adjtimex(self, room: object) -> int:
            room[24:32] = (1500).to_bytes(8, sys.byteorder)  # type: ignore[index]
            return state

    monkeypatch.setattr(hosts.ctypes, "CDLL", System)
    found = list(hosts._clocks())
    assert [each.verdict for each in found] == verdicts
    if state == 0:
        assert found[0].numbers == {"error_seconds": 0.0015}
