"""Connections between hosts: only whoever knows the key gets one."""

from __future__ import annotations

import errno
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from worker_processes import HANG_SECONDS

from lockstep.errors import InputError
from lockstep.workers import connections
from lockstep.workers.connections import (
    Listener,
    NotLetInError,
    OtherKeyError,
    address_towards,
    connect,
    interface_of,
    receive_descriptor,
    run_key,
    send_descriptor,
)

KEY = b"k" * 32
REFUSED = "somebody at 127.0.0.1 has tried to join the run without its key, and was refused"


def wait_for(text: str, caplog: pytest.LogCaptureFixture) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while text not in caplog.text:
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.01)


@pytest.fixture
def accepted() -> Any:
    return queue.Queue()


@pytest.fixture
def listener(accepted: Any) -> Any:
    listener = Listener("127.0.0.1", 0, KEY, lambda connection, address: accepted.put(connection))
    yield listener
    listener.close()


def test_both_ends_talk_once_they_have_proved_the_key(listener: Listener, accepted: Any) -> None:
    with connect("127.0.0.1", listener.port, KEY) as here, accepted.get(timeout=HANG_SECONDS) as there:
        here.sendall(b"hello")
        assert there.recv(16) == b"hello"
        there.sendall(b"you")
        assert here.recv(16) == b"you"


def test_another_key_is_refused_on_both_sides(
    listener: Listener, accepted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OtherKeyError, match="another key"):
        connect("127.0.0.1", listener.port, b"x" * 32)
    wait_for(REFUSED, caplog)
    assert accepted.empty()


def test_a_stranger_who_tries_again_and_again_is_told_of_once_in_some_seconds_with_the_number(
    listener: Listener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def come(num_times: int) -> None:
        before = listener._refused._count
        for _ in range(num_times):
            with pytest.raises(OtherKeyError):
                connect("127.0.0.1", listener.port, b"x" * 32)
        deadline = time.monotonic() + HANG_SECONDS
        while listener._refused._count < before + num_times:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    monkeypatch.setattr(connections, "_LOG_SECONDS", 1e9)
    come(5)
    monkeypatch.setattr(connections, "_LOG_SECONDS", 0.0)
    come(1)
    wait_for("(6 times by now)", caplog)
    assert caplog.messages == [REFUSED, f"{REFUSED} (6 times by now)"]


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
        thread.join(HANG_SECONDS)
    assert len(b"".join(sent)) == len(b"lockstep 1\n") + 32


def test_a_stranger_who_echoes_is_refused(listener: Listener, accepted: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The proofs of the two ends differ, so that neither serves as the other."""
    with socket.create_connection(("127.0.0.1", listener.port), 5) as stranger:
        while arrived := stranger.recv(1024):
            stranger.sendall(arrived)
    wait_for(REFUSED, caplog)
    assert accepted.empty()


def test_another_service_is_named(accepted: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        threading.Thread(target=serve).start()
        with pytest.raises(OtherKeyError, match="no process of Lockstep"):
            connect("127.0.0.1", server.getsockname()[1], KEY)


@pytest.fixture
def strangers(listener: Listener) -> Iterator[Callable[[int], None]]:
    """Connect so often, from another address than hosts of the run, and say nothing."""
    with ExitStack() as stack:

        def connect_often(num_connections: int) -> None:
            for _ in range(num_connections):
                stranger = socket.create_connection(("127.0.0.1", listener.port), 5, ("127.0.0.2", 0))
                stack.enter_context(stranger)

        yield connect_often


def test_strangers_who_say_nothing_keep_nobody_out(
    listener: Listener,
    accepted: Any,
    strangers: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 600.0)  # none of them goes by himself
    monkeypatch.setattr(connections, "_LOG_SECONDS", 1e9)
    strangers(100)
    with connect("127.0.0.1", listener.port, KEY):
        accepted.get(timeout=HANG_SECONDS).close()
    assert caplog.messages == [
        f"port {listener.port} is crowded with connections that do not prove that they know the run's key: the oldest "
        "was ended to let others in, from 127.0.0.2"
    ]


def test_strangers_crowd_out_one_another_and_nobody_else(
    listener: Listener, accepted: Any, strangers: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 600.0)
    monkeypatch.setattr(connections, "_MOST_HANDSHAKES", 4)
    with socket.create_connection(("127.0.0.1", listener.port), 5) as slow:
        strangers(20)
        connections._prove(slow, KEY, is_listener=False)
        accepted.get(timeout=HANG_SECONDS).close()


def test_a_stranger_who_sends_a_byte_now_and_then_is_let_go(
    monkeypatch: pytest.MonkeyPatch, listener: Listener
) -> None:
    """The time is that of the whole handshake."""
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.2)
    num_sent = 0
    with socket.create_connection(("127.0.0.1", listener.port), 5) as stranger, suppress(ConnectionError):
        for byte in connections._MAGIC + bytes(32):
            stranger.sendall(bytes([byte]))
            num_sent += 1
            time.sleep(0.1)
    assert num_sent < 43


def test_who_is_not_let_in_says_so_and_tries_again_for_as_long_as_it_may(
    accepted: Any,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for turn in range(3):
                connection, _ = server.accept()
                if turn == 2:
                    connections._prove(connection, KEY, is_listener=True)
                    accepted.put(connection)
                else:
                    connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        port = server.getsockname()[1]
        with pytest.raises(NotLetInError, match="did not let this host in: "):
            connect("127.0.0.1", port, KEY)
        with connect("127.0.0.1", port, KEY, patience_seconds=60.0):
            accepted.get(timeout=HANG_SECONDS).close()
        thread.join()


def test_a_listener_goes_on_when_the_system_has_no_file_left_for_a_moment(
    listener: Listener, accepted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, faults = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

    def sometimes(self: socket.socket) -> Any:
        if faults:
            raise faults.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", sometimes)
    for _ in range(3):  # the first is taken by the wait that had begun
        with connect("127.0.0.1", listener.port, KEY):
            accepted.get(timeout=HANG_SECONDS).close()
    assert not faults


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


def test_a_file_is_sent_whatever_the_other_end_has_sent_meanwhile(tmp_path: Path) -> None:
    """multiprocessing's own would take the job for its answer, from Python 3.14 on."""
    (file := tmp_path / "file").write_text("told")
    ours, theirs = Pipe()
    with theirs, file.open() as opened:
        theirs.send("the next job")
        send_descriptor(ours, opened.fileno())
        ours.send("after it")
        with os.fdopen(receive_descriptor(theirs)) as received:
            assert received.read() == "told"
        assert [ours.recv(), theirs.recv()] == ["the next job", "after it"]
        ours.close()
        with pytest.raises(EOFError):
            receive_descriptor(theirs)
