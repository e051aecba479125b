"""Messages between two processes of a run over one connection: JSON, and blocks of bytes whose size both ends know."""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lockstep.errors import InputError

_LENGTH = struct.Struct("<I")
_LONGEST_BYTES = 16 << 20
_READ_BYTES = 1 << 16
_LOOK_MILLISECONDS = 100


class NoMessageError(ConnectionError):
    """What has come is no message of Lockstep."""


class Frames:
    """One end of a connection, for one thread at a time; each message has its length before it. No pickle.

    Every call raises ConnectionError when the other end is gone.

    Args:
        connection: is this object's from now on.
        check: called ten times a second while the other end is waited for; what it raises ends the wait.
    """

    def __init__(self, connection: socket.socket, check: Callable[[], object] | None = None) -> None:
        connection.setblocking(False)
        self._connection, self._check = connection, check
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)
        self._came = bytearray()

    def send(self, message: Mapping[str, object], block: Tensor | None = None) -> None:
        """Send a message, and behind it a block (uint8, one-dimensional, on the CPU) that the other end expects.

        Raises:
            InputError: the message is larger than 16 MiB.
        """
        text = json.dumps(message).encode()
        if len(text) > _LONGEST_BYTES:
            raise InputError(
                "What is to be sent to another worker is too large.",
                given=f"{len(text):,} bytes of JSON",
                expected=f"at most {_LONGEST_BYTES:,} bytes",
                hint="report less with each step: fewer losses and metrics",
            )
        self._send_all(_LENGTH.pack(len(text)) + text)
        if block is not None:
            self._send_all(_bytes_of(block))

    def receive(self) -> dict[str, Any]:
        """Wait for a message.

        Raises:
            NoMessageError: what has come is none.
        """
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if length > _LONGEST_BYTES:
            raise NoMessageError(f"a message of {length:,} bytes")
        text = self._take(length)
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise NoMessageError(f"{text[:80]!r}")
        return message

    def receive_into(self, block: Tensor) -> None:
        """Fill a block (uint8, one-dimensional, on the CPU) with the bytes behind the message that was received."""
        room = _bytes_of(block)
        first = min(len(self._came), len(room))
        room[:first] = self._came[:first]
        del self._came[:first]
        room = room[first:]
        while room:
            try:
                num_bytes = self._connection.recv_into(room)
            except BlockingIOError:
                self._wait(self._readable)
                continue
            if not num_bytes:
                raise ConnectionResetError("the other end has closed the connection")
            room = room[num_bytes:]

    def shut_down(self) -> None:
        """End the connection; another thread that waits in it gets a ConnectionError."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other end was faster
            return

    def close(self) -> None:
        """Give back the socket."""
        self._connection.close()

    def _take(self, num_bytes: int) -> bytes:
        while len(self._came) < num_bytes:
            try:
                some = self._connection.recv(_READ_BYTES)
            except BlockingIOError:
                self._wait(self._readable)
                continue
            if not some:
                raise ConnectionResetError("the other end has closed the connection")
            self._came += some
        taken = bytes(self._came[:num_bytes])
        del self._came[:num_bytes]
        return taken

    def _send_all(self, data: Any) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._connection.send(rest) :]
            except BlockingIOError:
                self._wait(self._writable)

    def _wait(self, poll: select.poll) -> None:
        if self._check is None:
            poll.poll()
            return
        while not poll.poll(_LOOK_MILLISECONDS):
            self._check()


def _bytes_of(block: Tensor) -> memoryview:
    array: Any = block.numpy()
    return memoryview(array)
