from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from thread_workers import run_threads, thread_workers

from lockstep.errors import WorkerError
from lockstep.served import wire
from lockstep.served.wire import Reception, all_reached, reach
from lockstep.workers.connections import connect
from lockstep.workers.rank import Worker


@pytest.fixture
def reception() -> Iterator[Reception]:
    """That of a chief with one worker beside it, and one on another host."""
    memory = os.memfd_create("test")
    reception = Reception(thread_workers(3)[0], ["here", "here", "there"], memory)
    yield reception
    reception.close()
    os.close(memory)


def knock(reception: Reception, said: bytes) -> bytes:
    """Connect on the chief's host, and return what comes back; nothing where the connection is ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, suppress(ConnectionError):
        connection.settimeout(5)
        connection.connect(str(reception.place["name"]))
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(100)
    return b""


@pytest.mark.parametrize(
    "said", [b"", b"GET", struct.pack("<I", 0), struct.pack("<I", 2), struct.pack("<I", 3), b"\xff" * 4]
)
def test_who_is_not_expected_on_the_host_gets_nothing(reception: Reception, said: bytes) -> None:
    assert knock(reception, said) == b""
    assert knock(reception, struct.pack("<I", 1)) == b"+", "the worker itself still gets in"
    assert knock(reception, struct.pack("<I", 1)) == b"", "once"


def test_who_does_not_know_the_key_is_kept_out_of_the_port(
    reception: Reception, caplog: pytest.LogCaptureFixture
) -> None:
    place: Any = reception.place
    with socket.create_connection((place["address"], place["port"]), 5) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: everything at all\r\n\r\n")
        with suppress(ConnectionError):
            while stranger.recv(1000):
                pass
    with connect(place["address"], place["port"], place["key"].encode()) as worker:
        worker.sendall(struct.pack("<I", 1))
        assert worker.recv(1) == b"", "worker 1 is not on another host"
    with connect(place["address"], place["port"], place["key"].encode()) as worker:
        worker.sendall(struct.pack("<I", 2))
        assert knock(reception, struct.pack("<I", 1)) == b"+"
        came = reception.wait()
    assert sorted(came) == [1, 2]
    assert "somebody at 127.0.0.1 has tried to join the run without its key, and was refused" in caplog.text
    for connection in came.values():
        connection.close()


def test_the_process_of_another_user_is_not_let_in(reception: Reception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "process_behind", lambda connection: (1, os.geteuid() + 1))
    assert knock(reception, struct.pack("<I", 1)) == b""


def test_a_chief_that_is_not_reached_is_an_error_of_all_workers() -> None:
    def work(worker: Worker) -> str:
        worker = replace(worker, host=f"host{worker.rank}")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            place = {"host": "host0", "address": "127.0.0.1", "port": taken.getsockname()[1], "key": "of this test"}
        with pytest.raises(WorkerError, match="is not reached by all") as raised:
            all_reached(worker, "") if worker.is_chief else reach(worker, place)
        return str(raised.value.given)

    assert run_threads(work, 2) == ["worker 1: connection refused"] * 2
