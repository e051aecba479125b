"""How workers that compute reach the chief that serves them: a Unix socket on its host, the network from other hosts.

On the chief's host nobody but a process of the same user is let in; from elsewhere, who knows the key that the chief
has drawn for these workers alone.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from lockstep.errors import PeerLostError, WorkerError
from lockstep.workers.connections import (
    HANDSHAKE_SECONDS,
    INTERFACE_OF_GLOO,
    START_SECONDS,
    Listener,
    address_of,
    connect,
)
from lockstep.workers.group import JSON
from lockstep.workers.peers import process_behind
from lockstep.workers.rank import Worker

_RANK = struct.Struct("<I")
_LOOK_SECONDS = 0.1


class Reached(NamedTuple):
    """The connection of a worker with the chief."""

    connection: socket.socket
    memory: int | None
    """A descriptor of the chief's memory; None from another host."""

    def close(self) -> None:
        """Give both back."""
        self.connection.close()
        if self.memory is not None:
            os.close(self.memory)


class Reception:
    """Takes the connections of the other workers, in the chief.

    Args:
        worker: the chief.
        hosts: the names of the hosts of all workers, by rank.
        memory: a descriptor, of which those on the chief's host get a copy.
    """

    def __init__(self, worker: Worker, hosts: list[str], memory: int) -> None:
        self._worker, self._hosts, self._memory = worker, hosts, memory
        self._came: dict[int, socket.socket] = {}
        self._coming = threading.Condition()
        name, key = f"\0lockstep/{secrets.token_hex(16)}", secrets.token_hex(16)
        self._here = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._here.bind(name)
        self._here.listen(worker.num_workers)
        self._elsewhere: Listener | None = None
        address, port = "", 0
        if len(set(hosts)) > 1:
            address = address_of(os.environ.get(INTERFACE_OF_GLOO, "").partition(",")[0]) or "127.0.0.1"
            self._elsewhere = Listener(address, 0, key.encode(), self._welcome)
            port = self._elsewhere.port
        self.place: dict[str, JSON] = {"host": hosts[0], "name": name, "address": address, "port": port, "key": key}
        """What the other workers need to `reach` the chief."""
        threading.Thread(target=self._listen, name="lockstep-reception", daemon=True).start()

    def wait(self) -> dict[int, socket.socket]:
        """Return the connections of all other workers, by rank, once they are there."""
        with self._coming:
            while len(self._came) < self._worker.num_workers - 1:
                self._coming.wait(_LOOK_SECONDS)
                self._worker.group.check_peers()
            came, self._came = self._came, {}
            return came

    def close(self) -> None:
        """Take no more connections, and end those that nobody has waited for."""
        for connection in self._came.values():
            connection.close()
        with suppress(OSError):
            self._here.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
        self._here.close()
        if self._elsewhere:
            self._elsewhere.close()

    def _listen(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._here.accept()
                if process_behind(connection)[1] == os.geteuid():
                    self._welcome(connection, "")
                else:
                    connection.close()

    def _welcome(self, connection: socket.socket, address: str) -> None:
        """Take the connection of a worker that has said its rank; from this host where there is no address."""
        try:
            connection.settimeout(HANDSHAKE_SECONDS)
            (rank,) = _RANK.unpack(connection.recv(_RANK.size, socket.MSG_WAITALL))
            is_expected = 0 < rank < len(self._hosts) and (self._hosts[rank] == self._hosts[0]) == (not address)
            with self._coming:
                if not is_expected or rank in self._came:
                    raise ConnectionError("nobody of this rank is expected")
                if not address:
                    socket.send_fds(connection, [b"+"], [self._memory])
                self._came[rank] = connection
                self._coming.notify_all()
        except (OSError, struct.error):
            connection.close()


def reach(worker: Worker, place: Mapping[str, Any]) -> Reached:
    """Connect to the chief's `Reception`, from another worker.

    Raises:
        WorkerError: a worker does not reach it.
    """
    reached, failed = None, ""
    try:
        reached = _connect_here(worker, place) if worker.host == place["host"] else _connect(worker, place)
    except OSError as error:
        failed = str(error.strerror or error).lower()
    try:
        all_reached(worker, failed)
    except BaseException:
        if reached is not None:
            reached.close()
        raise
    assert reached is not None, "else it has said why"
    return reached


def _connect(worker: Worker, place: Mapping[str, Any]) -> Reached:
    connection = connect(place["address"], place["port"], place["key"].encode(), patience_seconds=START_SECONDS)
    connection.sendall(_RANK.pack(worker.rank))
    return Reached(connection, None)


def _connect_here(worker: Worker, place: Mapping[str, Any]) -> Reached:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(HANDSHAKE_SECONDS)
        connection.connect(place["name"])
        if process_behind(connection)[1] != os.geteuid():
            raise ConnectionError("what listens there belongs to another user")
        connection.sendall(_RANK.pack(worker.rank))
        _, descriptors, *_ = socket.recv_fds(connection, 1, 1)
        if not descriptors:
            raise ConnectionError("the chief has sent no memory")
    except OSError:
        connection.close()
        raise
    return Reached(connection, descriptors[0])


def all_reached(worker: Worker, failed: str) -> None:
    """Refuse to go on, on all workers, where one has not reached the chief, and said why."""
    told = worker.group.gather(failed)
    unable = [f"{name}: {why}" for name, why in zip(worker.group.names, told, strict=True) if why]
    if unable:
        raise WorkerError(
            "The chief, which serves the other workers, is not reached by all of them.",
            given="; ".join(unable),
            expected="a network in which the workers reach the chief at all ports, and one user on its host",
            hint=f"let no firewall stand between the hosts, and set {INTERFACE_OF_GLOO} only where the interface "
            "that leads to worker 0 is not the one to take",
        )


def lost(worker: Worker, who: str, said: str) -> PeerLostError:
    """The error to raise where a connection between the chief and another worker has ended; it may wait for a cause."""
    if worker.group.peers is not None:
        return worker.group.peers.lost(f"{who}: {said}")
    return PeerLostError(
        f"{worker.name} lost {who} in the exchange.",
        given=said,
        expected="workers that take part until the end",
        hint="read what that worker said last; its launcher reports the cause",
    )
