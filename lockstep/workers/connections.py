"""Connections over a network between processes of a run, each of which proves that it knows the run's key.

Both ends answer a challenge of the other with an HMAC (RFC 2104, SHA-256) under the key, which itself is never sent.
What follows is neither encrypted nor signed: it belongs in a network that is trusted not to change it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import math
import os
import secrets
import socket
import struct
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from lockstep.errors import InputError
from lockstep.screen import log
from lockstep.workers.limits import HANDSHAKE_SECONDS

KEY = "LOCKSTEP_KEY"
"""The variable of the environment that holds the run's key."""
INTERFACE_OF_GLOO, INTERFACE_OF_NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""The variables of the environment by which gloo and NCCL are told the network interface to use."""
_PAUSE_SECONDS = 0.5
_SHORTEST_KEY = 16
_MAGIC = b"lockstep 1\n"
_NONCE_BYTES = _PROOF_BYTES = 32
_MOST_HANDSHAKES = 64
_LOG_SECONDS = 5.0
"""Between two warnings about strangers, of whom there may be thousands a second."""
_SIOCGIFCONF = 0x8912
_INTERFACE = struct.Struct("16s H 2x 4s 16x")
"""struct ifreq: a name and a sockaddr_in."""
_MOST_INTERFACES = 256

Accept = Callable[[socket.socket, str], None]


class OtherKeyError(ConnectionError):
    """The other end does not know the key, or is no process of Lockstep."""


class NotLetInError(ConnectionError):
    """Somebody listens there, but has ended the connection, or not answered, before the keys were compared."""


def run_key(environment: Mapping[str, str]) -> bytes:
    """Return the run's key, which its user has put into the environment of each host.

    Raises:
        InputError: there is none, or it is short enough to be guessed.
    """
    text = environment.get(KEY, "")
    if len(text) < _SHORTEST_KEY:
        raise InputError(
            f"The environment has no key for the run in {KEY}.",
            given=f"a key of {len(text)} characters" if text else f"no {KEY}",
            expected=f"the same {_SHORTEST_KEY} characters or more on all hosts; who does not know them is kept out",
            hint=f"export {KEY}=$(openssl rand -hex 16) on one host, and give the same value to the others",
        )
    return text.encode()


class Listener:
    """Listens on a port, and hands over each connection whose other end has proved that it knows the key.

    Whoever does not know it can keep nobody out. He has `HANDSHAKE_SECONDS` in all to prove it, however slowly he
    sends; and where too many connections wait for a proof, the oldest one ends, of the address that has most of them.

    It listens at the address of one interface, so that no other network reaches it; at a port that is free, for 0.
    `accept` is called in a thread with each connection and the address of its other end.

    Raises:
        OSError: the port is in use, or the address is not of this host.
    """

    def __init__(self, address: str, port: int, key: bytes, accept: Accept) -> None:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((address, port), family=family, backlog=128)
        self._key, self._accept = key, accept
        self._unproven: dict[socket.socket, str] = {}
        """The address at the other end of each connection that waits for a proof, the oldest first."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._refused = _Warning("somebody at %s has tried to join the run without its key, and was refused")
        self._crowded_out = _Warning(
            f"port {self.port} is crowded with connections that do not prove that they know the run's key: the oldest "
            "was ended to let others in, from %s"
        )
        threading.Thread(target=self._listen, name="lockstep-listener", daemon=True).start()

    @property
    def port(self) -> int:
        """The port that is listened on."""
        port: int = self._socket.getsockname()[1]
        return port

    def close(self) -> None:
        """Listen no longer; connections that were handed over stay."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
        self._socket.close()

    def _listen(self) -> None:
        while not self._is_closed:
            try:
                connection, (address, *_) = self._socket.accept()
            except OSError:  # closed; or the other end is gone again, or this process has too many files open
                time.sleep(_PAUSE_SECONDS)
                continue
            self._make_room()
            with self._lock:
                self._unproven[connection] = address
            threading.Thread(target=self._welcome, args=(connection, address), daemon=True).start()

    def _make_room(self) -> None:
        """End the oldest connection that waits for a proof where there are too many."""
        with self._lock:
            if len(self._unproven) < _MOST_HANDSHAKES:
                return
            num_from = Counter(self._unproven.values())
            most = max(num_from.values())
            oldest, address = next(each for each in self._unproven.items() if num_from[each[1]] == most)
            del self._unproven[oldest]
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
        self._crowded_out.log(address)

    def _welcome(self, connection: socket.socket, address: str) -> None:
        failure: OSError | None = None
        try:
            _prove(connection, self._key, is_listener=True)
        except OSError as error:
            failure = error
        with self._lock:
            was_ended = self._unproven.pop(connection, None) is None
        if failure is None and not was_ended:
            self._accept(connection, address)
            return
        connection.close()
        if isinstance(failure, OtherKeyError) and not was_ended:
            self._refused.log(address)


class _Warning:
    """A warning about strangers, shown once in some seconds at most, with the number of times that it was due."""

    def __init__(self, text: str) -> None:
        self._text, self._count, self._logged = text, 0, -math.inf
        self._lock = threading.Lock()

    def log(self, address: str) -> None:
        """Show it, unless it was shown just now."""
        with self._lock:
            self._count += 1
            count, now = self._count, time.monotonic()
            if now - self._logged < _LOG_SECONDS:
                return
            self._logged = now
        log.warning(f"{self._text}%s", address, f" ({count} times by now)" if count > 1 else "")


def connect(
    address: str, port: int, key: bytes, timeout_seconds: float = HANDSHAKE_SECONDS, patience_seconds: float = 0.0
) -> socket.socket:
    """Connect to a `Listener`.

    The system has `timeout_seconds` to make a connection, and the proofs have `HANDSHAKE_SECONDS`. Where somebody
    listens and does not let this process in, it is tried again for `patience_seconds`.

    Raises:
        OtherKeyError: it does not know the key, or is none.
        NotLetInError: it has not let this process in.
        OSError: nobody listens there, or the address does not resolve.
    """
    ends = time.monotonic() + patience_seconds
    while True:
        connection = socket.create_connection((address, port), timeout_seconds)
        try:
            _prove(connection, key, is_listener=False)
            return connection
        except OSError as error:
            connection.close()
            if isinstance(error, OtherKeyError):
                raise
            if time.monotonic() >= ends:
                reason = str(error.strerror or error).lower()
                raise NotLetInError(f"what listens there did not let this host in: {reason}") from None
        time.sleep(_PAUSE_SECONDS)


def _prove(connection: socket.socket, key: bytes, *, is_listener: bool) -> None:
    """Prove to the other end that this one knows the key, and have it do the same; the listener goes first.

    So somebody who only connects learns no proof of the other kind than that he would have to give.
    """
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    connection.settimeout(HANDSHAKE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_MAGIC + mine)
    if _receive(connection, len(_MAGIC), deadline) != _MAGIC:
        raise OtherKeyError("what answers there is no process of Lockstep, or one of another version")
    theirs = _receive(connection, _NONCE_BYTES, deadline)
    both = theirs + mine if is_listener else mine + theirs
    proofs = [hmac.digest(key, role + both, "sha256") for role in (b"listener", b"caller")]
    if is_listener:
        connection.sendall(proofs[0])
        try:
            _check(connection, proofs[1], deadline)
        except ConnectionResetError:
            raise OtherKeyError("the other end does not take this key") from None
        connection.sendall(b"+")
    else:
        _check(connection, proofs[0], deadline)
        connection.sendall(proofs[1])
        _receive(connection, 1, deadline)
    connection.settimeout(None)


def _check(connection: socket.socket, proof: bytes, deadline: float) -> None:
    if not hmac.compare_digest(_receive(connection, _PROOF_BYTES, deadline), proof):
        raise OtherKeyError("the other end has another key")


def _receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    received = b""
    while len(received) < num_bytes:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(seconds)
        arrived = connection.recv(num_bytes - len(received))
        if not arrived:
            raise ConnectionResetError("the other end has ended the connection before it was made")
        received += arrived
    return received


def shut_down(connection: Connection) -> None:
    """End a connection that another thread may wait in, and closes; does nothing where it is closed."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as ended:
        ended.shutdown(socket.SHUT_RDWR)


def send_descriptor(connection: Connection, descriptor: int) -> None:
    """Send an open file to the process at the other end of a pipe, which has it by a descriptor of its own.

    From Python 3.14 on multiprocessing's own function waits for an answer, and takes for it what the other end has
    sent meanwhile.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as pipe:
        socket.send_fds(pipe, [b"\0"], [descriptor])


def receive_descriptor(connection: Connection) -> int:
    """Receive what `send_descriptor` has sent; returns a descriptor, which the caller closes.

    Raises:
        EOFError: the other end was closed, or sent no file.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as pipe:
        _, descriptors, _, _ = socket.recv_fds(pipe, 1, 1)
    if not descriptors:
        raise EOFError
    return descriptors[0]


def address_towards(host: str, port: int) -> str:
    """The address of this host in the network that leads to another one; nothing is sent.

    Raises:
        OSError: the name does not resolve, or no network leads there.
    """
    family, kind, *_, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)
        address: str = probe.getsockname()[0]
    return address


def resolve_name(name: str, port: int, patience_seconds: float) -> list[str]:
    """The addresses of a host; waited for, since the name of a pod that has just begun takes some seconds to resolve.

    Raises:
        OSError: it does not resolve in this time; UnicodeError where it never could.
    """
    deadline, is_logged = time.monotonic() + patience_seconds, False
    while True:
        try:
            return [str(where[0]) for *_, where in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError):
            if time.monotonic() > deadline:
                raise
        if not is_logged:
            log.info("%s does not resolve here; trying again for %.0f s", name, patience_seconds)
            is_logged = True
        time.sleep(_PAUSE_SECONDS)


def leads_out(address: str) -> bool:
    """Whether an address is one by which other hosts may reach this one: it is not of the loopback."""
    return bool(address) and not ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str | None:
    """The name of the network interface ("eth0") that has an address of this host; None where there is none."""
    return _by_address().get(ipaddress.ip_address(address.partition("%")[0]))


def address_of(interface: str) -> str | None:
    """The first address of this host in the network of an interface; None where it has none, or no such interface."""
    return next(
        (str(each) for each, name in _by_address().items() if name == interface and not each.is_link_local), None
    )


def interfaces() -> list[str]:
    """The names of this host's network interfaces that have an address."""
    return sorted(set(_by_address().values()))


def _by_address() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    """The interfaces of this host, by address. Linux only."""
    found: dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str] = {}
    room = array("B", bytes(_MOST_INTERFACES * _INTERFACE.size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iP", len(room), room.buffer_info()[0])
        num_bytes, _ = struct.unpack("iP", fcntl.ioctl(probe, _SIOCGIFCONF, request))
    for name, _, address in _INTERFACE.iter_unpack(room.tobytes()[:num_bytes]):
        found[ipaddress.IPv4Address(address)] = name.rstrip(b"\0").decode().partition(":")[0]
    with contextlib.suppress(FileNotFoundError):  # a system without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found[ipaddress.IPv6Address(int(digits, 16))] = name
    return found
