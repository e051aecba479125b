"""Connections over a network between processes of a run, each of which proves that it knows the run's key.

Both ends answer a challenge of the other with an HMAC (RFC 2104, SHA-256) under the key, which itself is never sent.
What follows is neither encrypted nor signed: it belongs in a network that is trusted not to change it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import secrets
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path

from lockstep.errors import InputError
from lockstep.screen import log

KEY = "LOCKSTEP_KEY"
"""The variable of the environment that holds the run's key."""
HANDSHAKE_SECONDS = 5.0
INTERFACE_OF_GLOO, INTERFACE_OF_NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""The variables of the environment by which gloo and NCCL are told the network interface to use."""
_PAUSE_SECONDS = 0.5
_SHORTEST_KEY = 16
_MAGIC = b"lockstep 1\n"
_NONCE_BYTES = _PROOF_BYTES = 32
_MOST_HANDSHAKES = 64
_SIOCGIFCONF = 0x8912
_INTERFACE = struct.Struct("16s H 2x 4s 16x")
"""struct ifreq: a name and a sockaddr_in."""
_MOST_INTERFACES = 256

Accept = Callable[[socket.socket, str], None]


class OtherKeyError(ConnectionError):
    """The other end does not know the key, or is no process of Lockstep."""


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

    Args:
        address: where to listen; of one interface, so that no other network reaches it.
        port: 0 for one that is free.
        key: of the run.
        accept: called in a thread with each connection and the address of its other end.
        refuse: called in a thread with the address of somebody who does not know the key.

    Raises:
        OSError: the port is in use, or the address is not of this host.
    """

    def __init__(
        self, address: str, port: int, key: bytes, accept: Accept, refuse: Callable[[str], None] = lambda address: None
    ) -> None:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((address, port), family=family, backlog=128)
        self._key, self._accept, self._refuse = key, accept, refuse
        self._handshakes = threading.BoundedSemaphore(_MOST_HANDSHAKES)
        threading.Thread(target=self._listen, name="lockstep-listener", daemon=True).start()

    @property
    def port(self) -> int:
        """The port that is listened on."""
        port: int = self._socket.getsockname()[1]
        return port

    def close(self) -> None:
        """Listen no longer; connections that were handed over stay."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
        self._socket.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, (address, *_) = self._socket.accept()
                if self._handshakes.acquire(blocking=False):
                    threading.Thread(target=self._welcome, args=(connection, address), daemon=True).start()
                else:
                    connection.close()

    def _welcome(self, connection: socket.socket, address: str) -> None:
        try:
            _prove(connection, self._key, is_listener=True)
        except OSError as error:
            connection.close()
            if isinstance(error, OtherKeyError):
                self._refuse(address)
            return
        finally:
            self._handshakes.release()
        self._accept(connection, address)


def connect(address: str, port: int, key: bytes, timeout_seconds: float = HANDSHAKE_SECONDS) -> socket.socket:
    """Connect to a `Listener`.

    Raises:
        OtherKeyError: it does not know the key, or is none.
        OSError: nobody listens there, or the address does not resolve.
    """
    connection = socket.create_connection((address, port), timeout_seconds)
    try:
        _prove(connection, key, is_listener=False)
    except OSError:
        connection.close()
        raise
    return connection


def _prove(connection: socket.socket, key: bytes, *, is_listener: bool) -> None:
    """Prove to the other end that this one knows the key, and have it do the same; the listener goes first.

    So somebody who only connects learns no proof of the other kind than that he would have to give.
    """
    connection.settimeout(HANDSHAKE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_MAGIC + mine)
    if _receive(connection, len(_MAGIC)) != _MAGIC:
        raise OtherKeyError("what answers there is no process of Lockstep, or one of another version")
    theirs = _receive(connection, _NONCE_BYTES)
    both = theirs + mine if is_listener else mine + theirs
    proofs = [hmac.digest(key, role + both, "sha256") for role in (b"listener", b"caller")]
    if is_listener:
        connection.sendall(proofs[0])
        try:
            _check(connection, proofs[1])
        except ConnectionResetError:
            raise OtherKeyError("the other end does not take this key") from None
        connection.sendall(b"+")
    else:
        _check(connection, proofs[0])
        connection.sendall(proofs[1])
        _receive(connection, 1)
    connection.settimeout(None)


def _check(connection: socket.socket, proof: bytes) -> None:
    if not hmac.compare_digest(_receive(connection, _PROOF_BYTES), proof):
        raise OtherKeyError("the other end has another key")


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        arrived = connection.recv(num_bytes - len(received))
        if not arrived:
            raise ConnectionResetError("the other end has ended the connection before it was made")
        received += arrived
    return received


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
    deadline, told = time.monotonic() + patience_seconds, False
    while True:
        try:
            return [str(where[0]) for *_, where in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError):
            if time.monotonic() > deadline:
                raise
        if not told:
            log.info("%s does not resolve here; trying again for %.0f s", name, patience_seconds)
            told = True
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
