"""The rendezvous of a run's hosts: their launchers meet at the port of the chief's host before any worker starts.

Each host's launcher introduces itself: which host it is of how many, its version, and how many workers it is to have.
A host that does not fit is refused with the reason, on its screen and on that of the chief's host. Both ends are tried
in `tests/launcher/test_launch_hosts.py`, and in `tests/hosts`.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

from lockstep.errors import InputError, WorkerError
from lockstep.launcher.hosts import RemoteHost, end_agent
from lockstep.screen import Lines, log
from lockstep.version import __version__
from lockstep.workers.channel import Channel
from lockstep.workers.connections import (
    INTERFACE_OF_GLOO,
    INTERFACE_OF_NCCL,
    KEY,
    Listener,
    NotLetInError,
    OtherKeyError,
    address_towards,
    connect,
    interface_of,
    leads_out,
    resolve_name,
)
from lockstep.workers.limits import HANDSHAKE_SECONDS, RESOLVE_SECONDS, START_SECONDS, TICK_SECONDS
from lockstep.workers.store_server import CALLS_STORE, StoreServer

_HAS_BEGUN = "The run has begun already, with all its hosts. Has this one been started twice?"
_CALLS_CHIEF = b"L"
_ELSEWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): the way there is that to other networks."""
_LOG_SECONDS = 10.0
_SEND_SECONDS = 2
_CLOCKS_SECONDS = 5.0


@dataclass(frozen=True)
class Seat:
    """The place of this host among those of a run."""

    num_hosts: int
    host_rank: int
    """0 is the chief's host."""
    chief: str
    """Name or address of the chief's host."""
    port: int

    @property
    def is_chief(self) -> bool:
        """Whether the launcher of this host decides for all of them."""
        return self.host_rank == 0


@dataclass(frozen=True)
class _Introduction:
    index: int
    num_hosts: int
    name: str
    version: str
    num_workers: int
    time: float
    """Time of its clock, in seconds since 1970."""
    failed: str | None = None
    """Why it cannot take part."""

    def __post_init__(self) -> None:
        numbers, texts = (self.index, self.num_hosts, self.num_workers), (self.name, self.version, self.failed or "")
        if not all(type(each) is int for each in numbers) or not all(isinstance(each, str) for each in texts):
            raise TypeError("this is no introduction")
        if not math.isfinite(self.time) or self.num_workers < 0:
            raise ValueError("this is no introduction")


class Rendezvous:
    """The chief's side: gathers the other hosts, and lets their workers reach the store as long as it is open.

    Raises:
        InputError: the address is none of this host's, or the port is in use.
    """

    def __init__(self, seat: Seat, key: bytes, store: StoreServer) -> None:
        self._seat, self._store = seat, store
        self._callers: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._unknown: list[Channel] = []
        """Callers that have not said who they are."""
        self.hosts: dict[int, RemoteHost] = {}
        """The other hosts that have come, by rank; the last one where others have come in the place of lost ones."""
        address = _own_address(seat)
        try:
            self._listener = Listener(address, seat.port, key, self._accept)
        except OSError as error:
            raise InputError(
                f"The launcher cannot listen on port {seat.port} of {address}.",
                given=f"--chief {seat.chief}:{seat.port}: {os.strerror(error.errno or 0).lower()}",
                expected="a port that is free on the first host, and the same on all hosts",
                hint="choose another port, above 1024; a run that is still ending may hold this one",
            ) from None
        self.network = network_environment(address)
        """For the workers of this host: the interface by which they reach those of the others."""

    def close(self) -> None:
        """Listen no longer."""
        self._listener.close()

    def _accept(self, connection: socket.socket, address: str) -> None:
        connection.settimeout(HANDSHAKE_SECONDS)
        try:
            purpose = connection.recv(1)
        except OSError:
            purpose = b""
        connection.settimeout(None)
        if purpose == CALLS_STORE:
            self._store.serve(Connection(connection.detach()))
        elif purpose == _CALLS_CHIEF:
            self._callers.put(_channel(connection))
            if self._is_complete:
                self.refuse_callers(_HAS_BEGUN)
        else:
            connection.close()

    def gather(self, requests: list[str]) -> list[RemoteHost]:
        """Wait until all other hosts are here, or a signal asks for a stop; returns them in order.

        The names of signals that have reached those are added to the requests of this launcher.

        Raises:
            InputError: a host has another version, or another number of hosts.
            WorkerError: hosts have not come in time, or cannot take part.
        """
        began = logged = time.monotonic()
        self._forget_lost()
        if not self._is_complete:
            log.info("%s at %s:%d", self._who_has_come(), self._seat.chief, self._seat.port)
        while not self._is_complete and not requests:
            time.sleep(TICK_SECONDS)
            self.attend(requests)
            now = time.monotonic()
            if now - began > START_SECONDS:
                raise WorkerError(
                    "Not all hosts of the run have come.",
                    given=f"after {START_SECONDS:.0f} s {self._who_has_come()}",
                    expected=f"{self._seat.num_hosts} hosts",
                    hint=f"start the same command on each host, with --chief {self._seat.chief}:{self._seat.port}, the "
                    f"same {KEY} and its own --host-rank; a firewall may keep them from this port",
                )
            if now - logged > _LOG_SECONDS:
                logged = now
                log.info("%s; %.0f s of %.0f", self._who_has_come(), now - began, START_SECONDS)
        self.refuse_callers(_HAS_BEGUN)
        return [host for _, host in sorted(self.hosts.items())]

    def attend(self, requests: list[str]) -> None:
        """Hear who comes, and tell those that are here that this host lives: ten times a second between two starts.

        Raises what `gather` raises.
        """
        self._forget_lost()
        for channel in self._take_callers():
            self._hear(channel)
        for host in self.hosts.values():
            requests += host.take_requests()

    def take_hosts(self) -> list[tuple[RemoteHost, RemoteHost]]:
        """Return the hosts that have come in the place of lost ones while the others go on: the lost, and the new one.

        Who does not fit is refused; that ends no run which is under way.
        """
        before, taken = dict(self.hosts), []
        for channel in self._take_callers():
            try:
                self._hear(channel)
            except (InputError, WorkerError) as error:
                log.warning("%s", Lines(error))
        for index, host in self.hosts.items():
            if host is not before[index]:
                before[index].close()
                taken.append((before[index], host))
        return taken

    def _take_callers(self) -> list[Channel]:
        unknown, self._unknown = self._unknown, []
        return [*unknown, *self._new_callers()]

    def _new_callers(self) -> Iterator[Channel]:
        """Yield those who have come since the last call; the threads that accept them may ask at the same time."""
        with suppress(queue.Empty):
            while True:
                yield self._callers.get_nowait()

    @property
    def _is_complete(self) -> bool:
        return len(self.hosts) == self._seat.num_hosts - 1 and not any(host.is_lost for host in self.hosts.values())

    def refuse_callers(self, why: str) -> None:
        """Tell those who have come, and are not introduced, why they cannot take part."""
        for channel in self._new_callers():
            _refuse(channel, why)

    def _hear(self, channel: Channel) -> None:
        """Take a caller that has said who it is among the hosts, or refuse it; it stays unknown until then."""
        try:
            received = channel.receive(most=1)
            if not received and not channel.ended:
                self._unknown.append(channel)
                return
            caller = _Introduction(**received[0])
            self._check(channel, caller)
        except (ValueError, TypeError, LookupError):
            channel.close()
            return
        index, name = caller.index, caller.name
        lost = self.hosts.get(index)
        if lost and not lost.is_lost:
            _refuse(channel, f"There is a host {index} already: {lost.name}. Each has a --host-rank of its own.")
            return
        if lost and lost.num_workers != caller.num_workers:
            numbers = f"{lost.num_workers} workers, and would come back with {caller.num_workers}"
            _refuse(channel, f"Host {index} was lost with {numbers}: give the same command.")
            return
        if abs(ahead := caller.time - time.time()) > _CLOCKS_SECONDS:
            log.warning(
                "the clock of host %d (%s) is %.0f s %s; the run does not depend on it, but its files and logs tell"
                " other times",
                index,
                name,
                abs(ahead),
                "ahead" if ahead > 0 else "behind",
            )
        others = {host.name for each, host in self.hosts.items() if each != index}
        is_taken = name in {socket.gethostname(), *others}
        self.hosts[index] = RemoteHost(channel, f"{name} (host {index})" if is_taken else name, caller.num_workers)

    def _check(self, channel: Channel, caller: _Introduction) -> None:
        """Refuse a caller that is no part of this run, and end the run where one is that cannot take part."""
        num_hosts = self._seat.num_hosts
        if (caller.version, caller.num_hosts) != (__version__, num_hosts) or not 0 < caller.index < num_hosts:
            error = InputError(
                f"Host {caller.index} ({caller.name}) has not been started as a part of this run.",
                given=f"--hosts {caller.num_hosts}, Lockstep {caller.version}",
                expected=f"--hosts {num_hosts} with a rank from 1 to {num_hosts - 1}, and Lockstep {__version__}, "
                "as on host 0",
                hint="start the same command with the same version on all hosts, each with its own --host-rank",
            )
            _refuse(channel, str(error))
            raise error
        if caller.failed is not None:
            channel.close()
            raise WorkerError(
                f"Host {caller.index} ({caller.name}) cannot take part.",
                given=caller.failed.partition("\n")[0],
                expected="a host that can start its workers",
                hint="read the last lines on its screen",
            )

    def _forget_lost(self) -> None:
        """Tell the hosts that have come that this one lives, and forget those that have gone again."""
        for index, host in [*self.hosts.items()]:
            host.tick()
            host.receive()
            if fault := host.fault():
                log.warning("host %s %s; waiting for it again", host.name, fault)
                self.hosts.pop(index).close()

    def _who_has_come(self) -> str:
        missing = [f"host {index}" for index in range(1, self._seat.num_hosts) if index not in self.hosts]
        come = ["host 0", *(f"host {index} ({host.name})" for index, host in sorted(self.hosts.items()))]
        return f"waiting for {' and '.join(missing)}; {' and '.join(come)} {'are' if self.hosts else 'is'} here"


def turn_away(seat: Seat, key: bytes, why: str) -> None:
    """Tell the other hosts, as far as they come in some seconds, why the chief's host has nothing to run."""
    with suppress(InputError), closing(Rendezvous(seat, key, StoreServer())) as rendezvous:
        ends = time.monotonic() + HANDSHAKE_SECONDS
        while time.monotonic() < ends:
            time.sleep(TICK_SECONDS)
            rendezvous.refuse_callers(why)


def meet_chief(
    seat: Seat, key: bytes, num_workers: int, requests: Sequence[str], *, failed: str | None = None
) -> tuple[Channel, str, int] | None:
    """Introduce this host to the chief's, and return the channel to it, and its address and port.

    Returns None when a signal asks for a stop first. Where this host cannot take part, as `failed` says, the chief's
    host is told so if it can be reached soon; else None is returned.

    Raises:
        InputError: the chief's host has another key, or its name does not resolve.
        WorkerError: it cannot be reached.
    """
    began, logged = time.monotonic(), -math.inf
    patience = START_SECONDS if failed is None else HANDSHAKE_SECONDS
    while True:
        try:
            connection = connect(seat.chief, seat.port, key)
            break
        except OSError as error:
            reason, waited = error.strerror or str(error), time.monotonic() - began
            if isinstance(error, OtherKeyError) or waited > patience:
                if failed is not None:
                    return None
                raise _unreachable(seat, error, waited) from None
        if requests:
            return None
        if time.monotonic() - logged > _LOG_SECONDS:
            logged = time.monotonic()
            log.info(
                "waiting for host 0 at %s:%d (%s); %.0f s of %.0f", seat.chief, seat.port, reason, waited, patience
            )
        time.sleep(2 * TICK_SECONDS)
    address = connection.getpeername()[0]
    connection.sendall(_CALLS_CHIEF)
    channel = _channel(connection)
    here = socket.gethostname()
    introduction = _Introduction(seat.host_rank, seat.num_hosts, here, __version__, num_workers, time.time(), failed)
    channel.send(asdict(introduction))
    return channel, address, seat.port


def _unreachable(seat: Seat, error: OSError, waited: float) -> Exception:
    if isinstance(error, socket.gaierror):
        return InputError(
            f"The name of the chief's host, {seat.chief}, does not resolve.",
            given=f"--chief {seat.chief}:{seat.port}: {error.strerror}",
            expected="a name or an address that this host knows",
            hint="give its address: --chief 10.0.0.1:29500",
        )
    if isinstance(error, OtherKeyError):
        return InputError(
            f"This host and the one at {seat.chief}:{seat.port} are not of the same run.",
            given=str(error),
            expected=f"the same {KEY} in the environment of all hosts",
            hint=f"copy the value of {KEY} from host 0; another run, or another program, may listen on this port",
        )
    if isinstance(error, NotLetInError):
        return WorkerError(
            f"The chief's host did not let host {seat.host_rank} in.",
            given=f"{seat.chief}:{seat.port}: {error}, for {waited:.0f} s",
            expected="a port at which host 0 compares the keys of the run",
            hint="read the screen of host 0: strangers may crowd its port; another program may listen on it",
        )
    return WorkerError(
        f"Host {seat.host_rank} has not reached the chief's host.",
        given=f"{seat.chief}:{seat.port}: {error.strerror or error}, for {waited:.0f} s",
        expected="the same command on host 0, which listens there",
        hint="start it with --host-rank 0; check address and port, and that no firewall is between the hosts",
    )


def network_environment(address: str) -> dict[str, str]:
    """The variables that have gloo and NCCL use the interface that has an address of this host."""
    interface = interface_of(address)
    return {} if interface is None else {INTERFACE_OF_GLOO: interface, INTERFACE_OF_NCCL: interface}


def network_towards(address: str, port: int) -> dict[str, str]:
    """The variables that have gloo and NCCL use the interface that leads to another host."""
    return network_environment(address_towards(address, port))


def _own_address(seat: Seat) -> str:
    """The address of the chief's host that its launcher listens on."""
    try:
        found = resolve_name(seat.chief, seat.port, RESOLVE_SECONDS)
    except socket.gaierror as error:
        raise _unreachable(seat, error, RESOLVE_SECONDS) from None
    own = [address for address in found if interface_of(address) is not None]
    if not any(seat.chief in (address, "localhost") for address in found):
        own = [address for address in own if leads_out(address)]
        # Debian has /etc/hosts lead a host's own name to 127.0.1.1; the others know it by another address.
        if not own and not any(leads_out(address) for address in found):
            with suppress(OSError):
                own = [address_towards(_ELSEWHERE, 1)]
                log.info("%s is %s here; listening on %s (%s)", seat.chief, found[0], own[0], interface_of(own[0]))
    if not own:
        raise InputError(
            "The chief's host is to listen on an address that others cannot reach, or that it does not have.",
            given=f"--chief {seat.chief}:{seat.port}, which is {' and '.join(found)} here",
            expected="an address of the network between the hosts, on host 0 one of its own",
            hint="give the address itself: --chief 10.0.0.1:29500 (ip -brief address lists those of a host)",
        )
    return own[0]


def _channel(connection: socket.socket) -> Channel:
    # A host that vanishes takes nothing more: this end must not wait for it.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
    return Channel(connection)


def _refuse(channel: Channel, text: str) -> None:
    end_agent(channel, 2, logging.ERROR, text)
