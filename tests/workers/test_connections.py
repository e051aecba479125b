"""Connections between hosts: only whoever knows the key gets one."""

from __future__ import annotations

import queue
import socket
import threading
from typing import Any

import pytest

from lockstep.errors import InputError
from lockstep.workers import connections
from lockstep.workers.connections import Listener, OtherKeyError, address_towards, connect, interface_of, run_key

KEY = b"k" * 32


@pytest.fixture
def accepted() -> Any:
    return queue.Queue()


@pytest.fixture
def refused() -> Any:
    return queue.Queue()


@pytest.fixture
def listener(accepted: Any, refused: Any) -> Any:
    listener = Listener("127.0.0.1", 0, KEY, lambda connection, address: accepted.put(connection), refused.put)
    yield listener
    listener.close()


def test_both_ends_talk_once_they_have_proved_the_key(listener: Listener, accepted: Any) -> None:
    with connect("127.0.0.1", listener.port, KEY) as here, accepted.get(timeout=5) as there:
        here.sendall(b"hello")
        assert there.recv(16) == b"hello"
        there.sendall(b"you")
        assert here.recv(16) == b"you"


def test_another_key_is_refused_on_both_sides(listener: Listener, accepted: Any, refused: Any) -> None:
    with pytest.raises(OtherKeyError, match="another key"):
        connect("127.0.0.1", listener.port, b"x" * 32)
    assert refused.get(timeout=5) == "127.0.0.1"
    assert accepted.empty()


def test_a_listener_that_does_not_know_the_key_is_refused() -> None:
    """It learns no proof by which it could pose as this process: it has to give its own first."""
    sent: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pose() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"lockstep 1\n" + bytes(32) + bytes(32))
                while arrived := connection.recv(1024):
                    sent.append(arrived)

        thread = threading.Thread(target=pose)
        thread.start()
        with pytest.raises(OtherKeyError, match="another key"):
            connect("127.0.0.1", server.getsockname()[1], KEY)
        thread.join(5)
    assert len(b"".join(sent)) == len(b"lockstep 1\n") + 32


def test_a_stranger_who_echoes_is_refused(listener: Listener, accepted: Any, refused: Any) -> None:
    """The proofs of the two ends differ, so that neither serves as the other."""
    with socket.create_connection(("127.0.0.1", listener.port), 5) as stranger:
        while arrived := stranger.recv(1024):
            stranger.sendall(arrived)
    assert refused.get(timeout=5)
    assert accepted.empty()


def test_another_service_is_named(accepted: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        threading.Thread(target=serve).start()
        with pytest.raises(OtherKeyError, match="no process of Lockstep"):
            connect("127.0.0.1", server.getsockname()[1], KEY)


def test_strangers_who_say_nothing_keep_nobody_out(
    listener: Listener, accepted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [socket.create_connection(("127.0.0.1", listener.port), 5) for _ in range(20)]
    with connect("127.0.0.1", listener.port, KEY):
        accepted.get(timeout=5).close()
    for each in silent:
        each.close()


def test_a_stranger_who_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch, listener: Listener) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", listener.port), 5) as stranger:
        while stranger.recv(1024):
            pass


def test_a_port_in_use_is_an_error_of_the_system(listener: Listener) -> None:
    with pytest.raises(OSError, match="in use"):
        Listener("127.0.0.1", listener.port, KEY, lambda connection, address: None)


@pytest.mark.parametrize("environment", [{}, {"LOCKSTEP_KEY": "short"}])
def test_a_run_needs_a_key_that_nobody_guesses(environment: dict[str, str]) -> None:
    with pytest.raises(InputError, match="LOCKSTEP_KEY") as error:
        run_key(environment)
    assert "openssl rand" in str(error.value)
    assert environment.get("LOCKSTEP_KEY", "secret") not in str(error.value)


def test_the_interface_is_the_one_that_leads_there() -> None:
    address = address_towards("127.0.0.1", 1)
    assert address == "127.0.0.1"
    assert interface_of(address) == "lo"
    assert interface_of("::1") in ("lo", None)
    assert interface_of("203.0.113.77") is None
