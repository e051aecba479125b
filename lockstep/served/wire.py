"""What the chief that serves and the other workers send each other: messages, through memory, over connections.

Messages are JSON, with blocks of bytes behind them whose size both ends know. On the chief's host tensors pass through
its memory instead, which the workers there map. No block of it is written while another process may read it, so nobody
has to find out whether he was overtaken: the chief publishes a version in a block that nobody reads, and names with
each lease the block for its gradient.

The chief is reached over a Unix socket on its host, which lets nobody in but processes of the same user, and over the
network from other hosts, by those who know the key that it has drawn for these workers alone.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lockstep.errors import InputError, PeerLostError, WorkerError
from lockstep.exchange.transports import FlatLayout, check_memory
from lockstep.workers.connections import INTERFACE_OF_GLOO, Listener, address_of, connect
from lockstep.workers.group import JSON
from lockstep.workers.limits import HANDSHAKE_SECONDS, START_SECONDS
from lockstep.workers.peers import process_behind
from lockstep.workers.rank import Worker

_LENGTH = struct.Struct("<I")
_LONGEST_BYTES = 16 << 20
_READ_BYTES = 1 << 16
_LOOK_SECONDS = 0.1
_PAGE_BYTES = 4096
_RANK = struct.Struct("<I")

Argument = TypeVar("Argument")
Result = TypeVar("Result")

# Messages -------------------------------------------------------------------------------------------------------------


class NoMessageError(ConnectionError):
    """What has come is no message of Lockstep."""


class Frames:
    """One end of a connection, for one thread at a time; each message has its length before it. No pickle.

    Every call raises ConnectionError when the other end is gone. `check` is called ten times a second while the other
    end is waited for; what it raises ends the wait.
    """

    def __init__(self, connection: socket.socket, check: Callable[[], object] | None = None) -> None:
        connection.settimeout(_LOOK_SECONDS if check else None)
        self._connection, self._check = connection, check
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
            room = room[self._arrived(self._connection.recv_into, room) :]

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
            self._came += self._arrived(self._connection.recv, _READ_BYTES)
        taken = bytes(self._came[:num_bytes])
        del self._came[:num_bytes]
        return taken

    def _send_all(self, data: Any) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._checked(self._connection.send, rest) :]

    def _arrived(self, receive: Callable[[Argument], Result], argument: Argument) -> Result:
        if not (arrived := self._checked(receive, argument)):
            raise ConnectionResetError("the other end has closed the connection")
        return arrived

    def _checked(self, call: Callable[[Argument], Result], argument: Argument) -> Result:
        """Call a method of the socket until it has done something, and check in between."""
        while True:
            try:
                return call(argument)
            except TimeoutError:
                if self._check:
                    self._check()


def _bytes_of(block: Tensor) -> memoryview:
    array: Any = block.numpy()
    return memoryview(array)


# Memory ---------------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """A part of the memory: as bytes (uint8, one-dimensional), and as the tensors that lie there."""

    bytes: Tensor
    tensors: list[Tensor]

    @classmethod
    def alone(cls, layout: FlatLayout) -> Block:
        """A block of this process alone."""
        block = torch.empty(layout.num_bytes, dtype=torch.uint8)
        return cls(block, layout.views(block))


@dataclass(frozen=True)
class MemoryPlan:
    """How the memory is divided: a head, blocks to publish in, blocks for gradients; each begins at a page."""

    published: FlatLayout
    gradients: FlatLayout
    num_published: int
    num_gradients: int

    @property
    def num_bytes(self) -> int:
        """The size of the memory; its pages take room once they are written."""
        return sum(self._sizes())

    def map(self, descriptor: int) -> ServedMemory:
        """Map the memory; the descriptor may be closed then.

        Raises:
            WorkerError: it is not of this plan.
        """
        check_memory(descriptor, self.num_bytes)
        memory = torch.frombuffer(mmap.mmap(descriptor, self.num_bytes), dtype=torch.uint8)
        head, *parts = torch.split(memory, self._sizes())
        layouts = [self.published] * self.num_published + [self.gradients] * self.num_gradients
        blocks = [
            Block(part[: layout.num_bytes], layout.views(part)) for layout, part in zip(layouts, parts, strict=True)
        ]
        return ServedMemory(head[:8].view(torch.int64), blocks[: self.num_published], blocks[self.num_published :])

    def _sizes(self) -> list[int]:
        sizes = [self.published.num_bytes] * self.num_published + [self.gradients.num_bytes] * self.num_gradients
        return [_PAGE_BYTES, *(max(1, -(-size // _PAGE_BYTES)) * _PAGE_BYTES for size in sizes)]


class ServedMemory(NamedTuple):
    """The memory, as one process has mapped it."""

    oldest: Tensor
    """The oldest version for which a gradient is still of use: one number (int64), which the chief writes."""
    published: list[Block]
    gradients: list[Block]


class BlockUse:
    """Counts the users of each block of a kind; the first free one is taken, so the last stay untouched."""

    def __init__(self, num_blocks: int) -> None:
        self._users = [0] * num_blocks

    def take(self) -> int:
        """Use a free block; there are enough."""
        index = self._users.index(0)
        self._users[index] = 1
        return index

    def share(self, index: int) -> int:
        """Use a block that is in use, too."""
        self._users[index] += 1
        return index

    def release(self, index: int) -> None:
        """End a use."""
        self._users[index] -= 1


def agreed_layouts(
    worker: Worker, gradients: Sequence[Tensor], published: Sequence[Tensor]
) -> tuple[FlatLayout, FlatLayout]:
    """The layouts of what is published and of gradients, on which all workers agree; they call it together.

    Tensors that are parts of others, or expanded, lie dense in it.
    """
    layouts = [
        FlatLayout([torch.empty_like(tensor, device="meta") for tensor in tensors])
        for tensors in (published, gradients)
    ]
    worker.group.agree("the tensors to exchange", [layout.describe() for layout in layouts])
    return layouts[0], layouts[1]


# Connections ----------------------------------------------------------------------------------------------------------


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
    """Takes the connections of the other workers, in the chief; those on its host get a descriptor of its memory.

    The hosts of all workers are named by rank.
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
    if worker.group.membership is not None:
        return worker.group.membership.connection_lost(f"{who}: {said}")
    return PeerLostError(
        f"{worker.name} lost {who} in the exchange.",
        given=said,
        expected="workers that take part until the end",
        hint="read what that worker said last; its launcher reports the cause",
    )
