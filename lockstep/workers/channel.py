"""Channel between a launcher and one of its processes: JSON messages, one a line, over a connected socket."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Mapping
from typing import Any

Message = dict[str, Any]

_LONGEST_LINE_BYTES = 64 << 20


class Channel:
    """One end of the connection; several threads may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self.ended = False
        """The other end is gone; what it sent before has been received."""
        self._connection = connection
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._rest = b""

    def send(self, message: Mapping[str, object]) -> None:
        """Send one message; does nothing when the other end is gone."""
        line = json.dumps(message).encode() + b"\n"
        try:
            with self._lock:
                self._connection.sendall(line)
        except OSError:
            return

    def fileno(self) -> int:
        """The descriptor of the connection, to wait for several."""
        return self._connection.fileno()

    def receive(self, timeout_seconds: float = 0.0, most: int = -1) -> list[Message]:
        """The messages that have arrived; waits for the first bytes of one. ValueError for what is no message.

        Of more than `most` the others are for the next call.
        """
        while not self.ended and self._poll.poll(timeout_seconds * 1000):
            try:
                arrived = self._connection.recv(1 << 16)
            except OSError:
                arrived = b""
            self.ended = not arrived
            self._rest += arrived
            if len(self._rest) > _LONGEST_LINE_BYTES:
                raise ValueError(f"a message of more than {_LONGEST_LINE_BYTES:,} bytes")
            timeout_seconds = 0.0
        *lines, self._rest = self._rest.split(b"\n", most)
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close this end."""
        self._connection.close()
