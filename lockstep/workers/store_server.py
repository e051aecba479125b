"""Store server of a run: values by key, and open files on one host.

The launcher serves it, without torch; `SocketStore` is the workers' end. On one host it is reached through inherited
sockets alone: no port, path or name leads to it, so no other process can read or change what the workers of a run send
each other. Workers of other hosts connect to it with the run's key.

A request is `[operation, ...arguments]` as JSON, then each value that it brings, as bytes. The answer is
`[result, number of values, error]`, then those values. Open files and further connections travel as SCM_RIGHTS.
The operations are those of torch's stores, and answer as its HashStore does.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from lockstep.workers.connections import connect, receive_descriptor, send_descriptor, shut_down
from lockstep.workers.limits import START_SECONDS

MAX_VALUE_BYTES = 8 << 20
"""The size of one value. TCPStore has the same limit: it closes the connection of a client that sends more."""

LAUNCHED = "LOCKSTEP_LAUNCHED"
"""Set in the environment of the workers that inherit a connection."""

CALLS_STORE = b"S"
"""Sent first by who connects to the launcher of the chief's host to use the store."""


class StoreAddress(NamedTuple):
    """Where the store of a run listens for the workers of other hosts."""

    address: str
    port: int
    key: str

    def connect(self) -> Connection:
        """Make a new connection; raises OSError where the store is not reached, or lets nobody in for minutes."""
        connection = connect(self.address, self.port, self.key.encode(), patience_seconds=START_SECONDS)
        connection.sendall(CALLS_STORE)
        return Connection(connection.detach())


_inherited: Connection | StoreAddress | None = None


def inherit(way: Connection | StoreAddress) -> None:
    """Keep the way to the store that this process was forked with; `inherited` returns it."""
    global _inherited
    _inherited = way


def inherited() -> Connection | StoreAddress | None:
    """The way to the launcher's store; None where no launcher has forked this process with one."""
    return _inherited


class StoreServer:
    """Holds the workers' values; each connection has its own thread, so a worker that waits delays no other."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._files: dict[str, int] = {}
        self._connections: set[Connection] = set()
        self._changed = threading.Condition()
        self._operations: dict[str, Callable[..., None]] = {
            "add": self._add,
            "append": partial(self._update, lambda old, new: old + new),
            "check": lambda connection, keys: _answer(connection, all(key in self._values for key in keys)),
            "compare_set": self._compare_set,
            "connect": self._connect,
            "count": lambda connection: _answer(connection, len(self._values)),
            "delete": self._delete,
            "forget": self._forget,
            "get": self._get,
            "open": self._open,
            "set": partial(self._update, lambda _, new: new),
            "share": self._share,
            "wait": partial(self._get, is_wanted=False),
        }

    def connect(self) -> Connection:
        """A new connection to the store, for a worker to inherit."""
        ours, theirs = Pipe()
        self.serve(ours)
        return theirs

    def clear(self) -> None:
        """Forget all values and files, and end all connections: whoever has them is no worker of the run any more."""
        with self._changed:
            self._values.clear()
            for connection in self._connections:
                shut_down(connection)
        self.close()

    def close(self) -> None:
        """Close the files that are still shared; connections end with the workers."""
        with self._changed:
            while self._files:
                os.close(self._files.popitem()[1])

    def serve(self, connection: Connection) -> None:
        """Answer a connection, in a thread of its own, until its other end is gone."""
        threading.Thread(target=self._answer_all, args=(connection,), name="lockstep-store", daemon=True).start()

    def _answer_all(self, connection: Connection) -> None:
        """Answer requests until the other end is gone, or sends anything else."""
        with self._changed:
            self._connections.add(connection)
        with connection, contextlib.suppress(EOFError, OSError, ValueError, TypeError, LookupError):
            while True:
                operation, *arguments = json.loads(connection.recv_bytes(MAX_VALUE_BYTES))
                self._operations[operation](connection, *arguments)
        with self._changed:
            self._connections.discard(connection)

    def _update(self, combine: Callable[[bytes, bytes], bytes], connection: Connection, key: str) -> None:
        new = _receive(connection)
        with self._changed:
            value = combine(self._values.get(key, b""), new)
            if len(value) <= MAX_VALUE_BYTES:
                self._values[key] = value
                self._changed.notify_all()
        _answer(connection, None, error=None if len(value) <= MAX_VALUE_BYTES else f"{len(value):,} bytes are too many")

    def _add(self, connection: Connection, key: str, amount: int) -> None:
        with self._changed:
            value = self._values.get(key, b"0")
            total = int(value) + amount if value.lstrip(b"-").isdigit() else None
            if total is not None:
                self._values[key] = b"%d" % total
                self._changed.notify_all()
        _answer(connection, total, error=f"{value[:20]!r} is no number" if total is None else None)

    def _compare_set(self, connection: Connection, key: str) -> None:
        expected, desired = _receive(connection), _receive(connection)
        with self._changed:
            # As in TCPStore, an empty expected value is that of a key that is not there.
            if self._values.get(key, b"") == expected:
                self._values[key] = desired
                self._changed.notify_all()
            now = self._values.get(key, expected)
        _answer(connection, None, [now])

    def _get(
        self, connection: Connection, keys: Sequence[str], timeout_seconds: float, *, is_wanted: bool = True
    ) -> None:
        """Wait for keys, and answer with their values, unless only the wait is wanted."""
        with self._changed:
            there = self._await(self._values, keys, timeout_seconds)
            values = [self._values[key] for key in keys] if there and is_wanted else []
        _answer(connection, there, values)

    def _delete(self, connection: Connection, key: str) -> None:
        with self._changed:
            was_there = self._values.pop(key, None) is not None
            if key in self._files:
                os.close(self._files.pop(key))
        _answer(connection, was_there)

    def _forget(self, connection: Connection, prefix: str) -> None:
        with self._changed:
            for key in [key for key in self._values if key.startswith(prefix)]:
                del self._values[key]
            for key in [key for key in self._files if key.startswith(prefix)]:
                os.close(self._files.pop(key))
        _answer(connection, None)

    def _connect(self, connection: Connection) -> None:
        self.serve(Connection(receive_descriptor(connection)))
        _answer(connection, None)

    def _share(self, connection: Connection, key: str) -> None:
        descriptor = receive_descriptor(connection)
        with self._changed:
            self._files[key] = descriptor
            self._changed.notify_all()
        _answer(connection, None)

    def _open(self, connection: Connection, key: str, timeout_seconds: float) -> None:
        with self._changed:
            there = self._await(self._files, [key], timeout_seconds)
        _answer(connection, there)
        if there:
            send_descriptor(connection, self._files[key])

    def _await(self, held: dict[str, Any], keys: Sequence[str], timeout_seconds: float) -> bool:
        limit = min(timeout_seconds, threading.TIMEOUT_MAX)
        return self._changed.wait_for(lambda: all(key in held for key in keys), limit)


def _receive(connection: Connection) -> bytes:
    return connection.recv_bytes(MAX_VALUE_BYTES)


def _answer(connection: Connection, result: object, values: Sequence[bytes] = (), *, error: str | None = None) -> None:
    connection.send_bytes(json.dumps([result, len(values), error]).encode())
    for value in values:
        connection.send_bytes(value)
