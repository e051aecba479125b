"""How the launchers of several hosts meet: in threads of the test, over the loopback interface."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import queue
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from worker_processes import HANG_SECONDS, free_port

from lockstep.errors import InputError, WorkerError
from lockstep.launcher import rendezvous
from lockstep.launcher.hosts import RemoteHost
from lockstep.launcher.rendezvous import Rendezvous, Seat, meet_chief, network_environment
from lockstep.workers.channel import Channel
from lockstep.workers.connections import Listener, connect
from lockstep.workers.socket_store import SocketStore
from lockstep.workers.store_server import StoreAddress, StoreServer

KEY = b"k" * 32
INTRODUCTION = {
    "index": 1,
    "num_hosts": 3,
    "name": "node1",
    "version": rendezvous.__version__,
    "num_workers": 1,
    "time": time.time(),
}


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def store() -> Iterator[StoreServer]:
    with contextlib.closing(StoreServer()) as server:
        yield server


@contextlib.contextmanager
def gathering(port: int, store: StoreServer, num_hosts: int = 3) -> Iterator[Future[list[RemoteHost]]]:
    """The chief's host, which waits for the others in a thread."""
    requests: list[str] = []
    with (
        ThreadPoolExecutor(1) as pool,
        contextlib.closing(Rendezvous(Seat(num_hosts, 0, "127.0.0.1", port), KEY, store)) as chief,
    ):
        gathered = pool.submit(chief.gather, requests)
        yield gathered
        requests.append("SIGTERM")
        error = gathered.exception()
        for host in chief.hosts.values():
            host.end(1, logging.ERROR, str(error))


Come = Callable[..., Channel]


@pytest.fixture
def come(port: int) -> Iterator[Come]:
    """A host that comes: its channel to the chief's."""
    with contextlib.ExitStack() as stack:

        def come(host_rank: int, num_hosts: int = 3, **options: Any) -> Channel:
            met = meet_chief(Seat(num_hosts, host_rank, "127.0.0.1", port), KEY, 2, [], **options)
            assert met is not None
            return stack.enter_context(contextlib.closing(met[0]))

        yield come


def end_of(channel: Channel) -> dict[str, Any]:
    """The message that ends a host, behind all that says only that the chief lives."""
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        for message in channel.receive(0.1):
            if "end" in message:
                return message
    raise AssertionError("was not ended")


def test_all_hosts_come_in_any_order(port: int, store: StoreServer, come: Come) -> None:
    with gathering(port, store) as gathered:
        channels = [come(2), come(1)]
        hosts = gathered.result(HANG_SECONDS)
        assert [host.num_workers for host in hosts] == [2, 2]
        here = socket.gethostname()
        assert [host.name for host in hosts] == [f"{here} (host 1)", f"{here} (host 2)"]
        hosts[1].log(logging.WARNING, "hello")
        assert {"log": "hello", "level": logging.WARNING} in channels[0].receive(5.0)


def test_workers_of_other_hosts_reach_the_store_with_the_key(port: int, store: StoreServer) -> None:
    with gathering(port, store):
        here, there = SocketStore(store.connect()), SocketStore(StoreAddress("127.0.0.1", port, KEY.decode()))
        there.set("name", "value")
        assert here.get("name") == b"value"
        assert there.clone().get("name") == b"value"


def test_a_second_host_of_the_same_rank_is_refused_and_the_run_goes_on(
    port: int, store: StoreServer, come: Come
) -> None:
    with gathering(port, store) as gathered:
        channels = [come(1)]
        time.sleep(0.3)
        refused = end_of(come(1))
        assert refused["end"] == 2
        assert "There is a host 1 already" in refused["log"]
        channels.append(come(2))
        assert gathered.result(HANG_SECONDS)


def test_a_host_that_goes_again_is_waited_for(
    port: int, store: StoreServer, come: Come, caplog: pytest.LogCaptureFixture
) -> None:
    with gathering(port, store) as gathered:
        come(1).close()
        deadline = time.monotonic() + HANG_SECONDS
        while "waiting for it again" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        channels = [come(1), come(2)]
        assert gathered.result(HANG_SECONDS)
        assert len(channels) == 2


def test_who_comes_when_the_run_has_begun_is_told_so(port: int, store: StoreServer, come: Come) -> None:
    with gathering(port, store, num_hosts=2) as gathered:
        channel = come(1, 2)
        assert gathered.result(HANG_SECONDS)
        assert "has begun already" in end_of(come(1, 2))["log"]
        assert not channel.ended


def lose(host: RemoteHost, channel: Channel) -> None:
    channel.close()
    deadline = time.monotonic() + HANG_SECONDS
    while not host.is_lost:
        assert time.monotonic() < deadline
        host.receive()
        host.fault()


def take(chief: Rendezvous) -> list[tuple[RemoteHost, RemoteHost]]:
    """Hosts that have come in the place of lost ones, once there are some."""
    deadline = time.monotonic() + HANG_SECONDS
    while not (taken := chief.take_hosts()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return taken


@contextlib.contextmanager
def one_host_lost(port: int, store: StoreServer, come: Come) -> Iterator[tuple[Rendezvous, RemoteHost]]:
    """The rendezvous of a run of two hosts, of which the other one is lost, and that host."""
    seat = Seat(2, 0, "127.0.0.1", port)
    with ThreadPoolExecutor(1) as pool, contextlib.closing(Rendezvous(seat, KEY, store)) as chief:
        gathered = pool.submit(chief.gather, [])
        first = come(1, 2)
        (lost,) = gathered.result(HANG_SECONDS)
        assert chief.take_hosts() == []
        lose(lost, first)
        yield chief, lost


def test_a_lost_host_that_comes_again_while_the_others_go_on_takes_its_place(
    port: int, store: StoreServer, come: Come
) -> None:
    with one_host_lost(port, store, come) as (chief, lost):
        second = come(1, 2)
        ((gone, back),) = take(chief)
        assert (gone, back, back.name) == (lost, chief.hosts[1], lost.name)
        back.log(logging.WARNING, "hello")
        assert {"log": "hello", "level": logging.WARNING} in second.receive(5.0)
        assert "has begun already" in end_of(come(1, 2))["log"]
        back.close()


class TakenMeanwhile(queue.SimpleQueue[Channel]):
    """A queue whose last item another thread always takes first."""

    def empty(self) -> bool:
        return False

    def get(self, block: bool = True, timeout: float | None = None) -> Channel:
        assert not block, "it would wait for ever"
        raise queue.Empty

    def get_nowait(self) -> Channel:
        return self.get(block=False)


def test_nobody_waits_for_a_caller_whom_another_thread_has_refused(port: int, store: StoreServer) -> None:
    with contextlib.closing(Rendezvous(Seat(2, 0, "127.0.0.1", port), KEY, store)) as chief:
        chief._callers = TakenMeanwhile()
        assert chief.take_hosts() == []
        chief.refuse_callers("the run has begun already")


def test_who_does_not_fit_is_refused_while_the_others_go_on_and_ends_nobody(
    port: int, store: StoreServer, come: Come, caplog: pytest.LogCaptureFixture
) -> None:
    with one_host_lost(port, store, come) as (chief, _):
        other = come(1, 3)
        deadline = time.monotonic() + HANG_SECONDS
        while "--hosts 3" not in caplog.text:
            assert time.monotonic() < deadline
            assert chief.take_hosts() == []
        assert "--hosts 3" in end_of(other)["log"]
        with socket_to(port) as fewer:
            fewer.send(INTRODUCTION | {"num_hosts": 2})
            while not (said := [each for each in fewer.receive(0.05) if "end" in each]):
                assert time.monotonic() < deadline
                assert chief.take_hosts() == []
        assert said[0]["log"] == ("Host 1 was lost with 2 workers, and would come back with 1: give the same command.")
        back = come(1, 2)
        ((_, host),) = take(chief)
        assert not back.ended
        host.close()


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_another_number_of_hosts_ends_both_with_the_reason(
    port: int, store: StoreServer, come: Come, num_hosts: int
) -> None:
    with gathering(port, store) as gathered:
        first = come(1)
        time.sleep(0.3)
        wrong = end_of(come(1, num_hosts))
        with pytest.raises(InputError) as error:
            gathered.result(HANG_SECONDS)
        assert f"--hosts {num_hosts}" in error.value.given
        assert "--hosts 3" in error.value.expected
        assert wrong["log"] == str(error.value)
    assert end_of(first)["log"] == str(error.value)


def test_another_version_is_refused_by_name(port: int, store: StoreServer) -> None:
    with gathering(port, store) as gathered, socket_to(port) as channel:
        channel.send(INTRODUCTION | {"version": "0.0.1"})
        with pytest.raises(InputError, match=r"Host 1 \(node1\)") as error:
            gathered.result(HANG_SECONDS)
    assert "Lockstep 0.0.1" in error.value.given


@contextlib.contextmanager
def socket_to(port: int) -> Iterator[Channel]:
    connection = connect("127.0.0.1", port, KEY)
    connection.sendall(b"L")
    with contextlib.closing(Channel(connection)) as channel:
        yield channel


@pytest.mark.parametrize(
    "said",
    [
        b"{}\n",
        b"[]\n",
        b"7\n",
        b"\xff\n",
        b'{"index": 1}\n',
        json.dumps(INTRODUCTION | {"index": "1"}).encode() + b"\n",
        json.dumps(INTRODUCTION | {"num_workers": -1}).encode() + b"\n",
        json.dumps(INTRODUCTION | {"time": math.nan}).encode() + b"\n",
        json.dumps(INTRODUCTION | {"more": 1}).encode() + b"\n",
    ],
)
def test_what_is_no_introduction_is_let_go(port: int, store: StoreServer, come: Come, said: bytes) -> None:
    with gathering(port, store) as gathered:
        with connect("127.0.0.1", port, KEY) as connection:
            connection.sendall(b"L" + said)
            connection.settimeout(5)
            assert connection.recv(1) == b""
        channels = [come(1), come(2)]
        assert gathered.result(HANG_SECONDS)
        assert channels


def test_clocks_that_differ_are_told(port: int, store: StoreServer, caplog: pytest.LogCaptureFixture) -> None:
    with gathering(port, store, num_hosts=2) as gathered, socket_to(port) as channel:
        channel.send(INTRODUCTION | {"num_hosts": 2, "time": time.time() - 3600})
        assert gathered.result(HANG_SECONDS)
    assert "the clock of host 1 (node1) is 3600 s behind" in caplog.text


def test_who_is_missing_is_named_at_the_deadline(
    port: int, store: StoreServer, come: Come, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "START_SECONDS", 0.5)
    with gathering(port, store) as gathered:
        channel = come(2)
        with pytest.raises(WorkerError) as error:
            gathered.result(HANG_SECONDS)
        assert "waiting for host 1; host 0 and host 2" in error.value.given
    assert end_of(channel)["log"] == str(error.value)


def test_a_host_that_cannot_take_part_says_why(port: int, store: StoreServer, come: Come) -> None:
    with gathering(port, store) as gathered:
        come(1, failed="There is no folder photos.\n  given: ...")
        with pytest.raises(WorkerError, match="Host 1") as error:
            gathered.result(HANG_SECONDS)
        assert error.value.given == "There is no folder photos."


def test_a_signal_ends_the_wait(port: int, store: StoreServer) -> None:
    with contextlib.closing(Rendezvous(Seat(2, 0, "localhost", port), KEY, store)) as chief:
        assert chief.gather(["SIGINT"]) == []
    assert meet_chief(Seat(2, 1, "127.0.0.1", port), KEY, 1, ["SIGINT"]) is None


def test_a_signal_to_a_host_that_has_come_ends_the_wait_of_all(port: int, store: StoreServer, come: Come) -> None:
    requests: list[str] = []
    with (
        ThreadPoolExecutor(1) as pool,
        contextlib.closing(Rendezvous(Seat(3, 0, "127.0.0.1", port), KEY, store)) as chief,
    ):
        gathered = pool.submit(chief.gather, requests)
        come(1).send({"requests": ["SIGINT"]})  # it may arrive together with the introduction
        [host] = gathered.result(HANG_SECONDS)
        host.close()
    assert requests == ["SIGINT"]


def test_a_chief_that_is_not_there_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "START_SECONDS", 0.1)
    with pytest.raises(WorkerError, match="Host 1 has not reached") as error:
        meet_chief(Seat(2, 1, "127.0.0.1", port), KEY, 1, [])
    assert f"127.0.0.1:{port}: Connection refused" in error.value.given


def test_a_chief_with_another_key_is_no_chief(port: int) -> None:
    with (
        contextlib.closing(Listener("127.0.0.1", port, b"x" * 32, lambda connection, address: None)),
        pytest.raises(InputError, match="not of the same run") as error,
    ):
        meet_chief(Seat(2, 1, "127.0.0.1", port), KEY, 1, [])
    assert KEY.decode() not in str(error.value)


def test_a_port_in_use_is_named(port: int, store: StoreServer) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(InputError) as error:
        Rendezvous(Seat(2, 0, "127.0.0.1", port), KEY, store)
    assert error.value.given == f"--chief 127.0.0.1:{port}: address already in use"


@pytest.mark.parametrize("chief", ["203.0.113.7", "nowhere.invalid"])
def test_an_address_that_is_none_of_this_host_is_refused(
    chief: str, store: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "RESOLVE_SECONDS", 0.1)
    with pytest.raises(InputError, match="chief"):
        Rendezvous(Seat(2, 0, chief, 29500), KEY, store)


def loopback(*arguments: object, **options: object) -> list[Any]:
    """As on Debian, whose /etc/hosts has the host's own name at 127.0.1.1."""
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29500))]


def test_a_name_that_leads_to_the_loopback_interface_is_taken_for_the_way_out(
    store: StoreServer, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr(rendezvous, "address_towards", lambda host, port: "127.0.0.1")
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", loopback)
        chief = Rendezvous(Seat(2, 0, "node0", port), KEY, store)
    with contextlib.closing(chief), connect("127.0.0.1", port, KEY):
        pass


def test_a_name_that_leads_to_the_loopback_interface_is_refused_where_no_way_leads_out(
    store: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(host: str, port: int) -> str:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(rendezvous, "address_towards", nowhere)
    monkeypatch.setattr(socket, "getaddrinfo", loopback)
    with pytest.raises(InputError, match="others cannot reach") as error:
        Rendezvous(Seat(2, 0, "node0", 29500), KEY, store)
    assert "which is 127.0.1.1 here" in error.value.given


def test_a_name_that_resolves_later_is_waited_for(
    port: int, store: StoreServer, come: Come, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As that of a pod which has just begun."""
    caplog.set_level(logging.INFO)
    tries: list[str] = []
    found = socket.getaddrinfo

    def later(host: str, *arguments: Any, **options: Any) -> Any:
        tries.append(host)
        if tries.count(host) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return found(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", later)
    with gathering(port, store, num_hosts=2) as gathered:
        come(1, 2)
        assert gathered.result(HANG_SECONDS)
    assert "127.0.0.1 does not resolve here; trying again" in caplog.text


def test_gloo_and_nccl_use_the_interface_between_the_hosts() -> None:
    assert network_environment("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert network_environment("203.0.113.7") == {}
