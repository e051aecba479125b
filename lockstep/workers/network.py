"""The network between workers on several hosts: the interface by which each reaches the others, and whether it does.

gloo and NCCL would choose one by themselves: gloo the one whose address the host's own name has, which often is the
loopback, and NCCL one by its name, which may be a bridge of containers. What then fails names no interface.

Hosts may reach that of the chief, but not each other. A launcher hears from host 0 alone, so nobody is missed; the
workers of all hosts wait in the exchange, for packets that do not come. When all of them have waited for some seconds,
the supervisor has one worker of each host listen at a port of no meaning, and connect to the ports of the others, as
gloo and NCCL do: `ConnectionTrial` is its part, `Probe` that of a worker. `tests/hosts/test_hosts_network.py` has
networks of several kinds.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol, cast

from lockstep.errors import InputError, WorkerError
from lockstep.workers.channel import Message
from lockstep.workers.connections import (
    INTERFACE_OF_GLOO,
    INTERFACE_OF_NCCL,
    address_of,
    address_towards,
    interface_of,
    interfaces,
    leads_out,
)
from lockstep.workers.limits import CONNECT_SECONDS, TRIAL_SECONDS


class Network(NamedTuple):
    """How other hosts reach this one."""

    interface: str
    address: str

    def __str__(self) -> str:
        return f"{self.interface} ({self.address})"


class Gathering(Protocol):
    """What is asked of a group of workers here; `lockstep.workers.group.Group` is one."""

    names: list[str]

    def gather(self, value: Any) -> list[Any]:
        """Give this worker's value, and return those of all, by rank."""
        ...


def choose_network(
    group: Gathering, rank: int, store: tuple[str, int] | None, environment: MutableMapping[str, str] = os.environ
) -> Network | None:
    """Have gloo and NCCL use the interface that leads to the other hosts, and try whether that reaches them.

    All workers of several hosts call it together, before they make a process group. Variables that are set already
    stay. The store is its address and port; None where the launcher has set the variables.

    Returns None where nothing but the loopback leads to the others.

    Raises:
        InputError: a variable names an interface that this host does not have.
        WorkerError: a worker does not reach another one; all of them raise it.
    """
    network = _chosen(environment)
    own = network.address if network else address_towards(*store) if store else ""
    gathered = group.gather([own, network is not None])
    outside = [address for address, _ in gathered if leads_out(address)]
    if not outside and not any(is_chosen for _, is_chosen in gathered):
        return None
    if network is None:
        if outside and not leads_out(own):
            # The store is on this host, under a name that is also the loopback's: any other host shows the way out.
            own = address_towards(outside[0], 1)
        network = Network(interface_of(own) or "", own)
        for variable in (INTERFACE_OF_GLOO, INTERFACE_OF_NCCL):
            environment.setdefault(variable, network.interface)
    _try_connections(group, rank, network)
    return network


def _chosen(environment: Mapping[str, str]) -> Network | None:
    interface = environment.get(INTERFACE_OF_GLOO, "").partition(",")[0]
    address = address_of(interface)
    if interface and address is None:
        raise InputError(
            f"This host has no network interface that {INTERFACE_OF_GLOO} names.",
            given=f"{INTERFACE_OF_GLOO}={environment[INTERFACE_OF_GLOO]} on {socket.gethostname()}",
            expected=f"one of {', '.join(interfaces())}",
            hint=f"unset {INTERFACE_OF_GLOO}: the interface that leads to the other hosts is then chosen",
        )
    return Network(interface, address) if address else None


def _try_connections(group: Gathering, rank: int, network: Network) -> None:
    """Have each worker connect to the next one, at a port of no meaning, as gloo and NCCL will."""
    with _listen(network) as server:
        places = group.gather(list(server.getsockname()[:2]))
        following = (rank + 1) % len(places)
        failed = _unreached([[following, *places[following]]]).get(following, "")
        gathered = group.gather([failed, network.interface])
    for each, (failed, interface) in enumerate(gathered):
        if failed:
            there = (each + 1) % len(places)
            raise WorkerError(
                f"{group.names[each]} does not reach {group.names[there]}.",
                given=f"{failed}: from {interface} to {gathered[there][1]}, {places[there][0]} port {places[there][1]}",
                expected="a network in which the workers reach each other at all ports",
                hint=f"let no firewall stand between the hosts, and set {INTERFACE_OF_GLOO} only where the interface "
                "that leads to worker 0 is not the one to take",
            )


def _listen(network: Network) -> socket.socket:
    """Listen at a port of no meaning, for others that try whether they reach this host."""
    family = socket.AF_INET6 if ":" in network.address else socket.AF_INET
    return socket.create_server((network.address, 0), family=family)


def _unreached(places: Sequence[Sequence[Any]]) -> dict[int, str]:
    """Connect to all places at once, each a number, an address and a port; returns what went wrong, by number."""
    failed: dict[int, str] = {}
    with selectors.DefaultSelector() as waiting, ExitStack() as stack:
        for number, address, port in places:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            connection = stack.enter_context(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            error = connection.connect_ex((address, port))
            if error in (0, errno.EINPROGRESS):
                waiting.register(connection, selectors.EVENT_WRITE, number)
            failed[number] = "timed out" if error in (0, errno.EINPROGRESS) else os.strerror(error).lower()
        deadline = time.monotonic() + CONNECT_SECONDS
        while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                waiting.unregister(key.fileobj)
                if error := cast(socket.socket, key.fileobj).getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    failed[key.data] = os.strerror(error).lower()
                else:
                    del failed[key.data]
    return failed


class Probe:
    """This worker's part in a trial of the connections between the hosts, beside what its main thread waits for.

    The launcher, or the watcher that decides, asks for it, and gets the answers; see `lockstep.launcher.supervisor`.
    """

    def __init__(
        self, answer: Callable[[Mapping[str, object]], None], environment: Mapping[str, str] = os.environ
    ) -> None:
        self._answer, self._environment = answer, environment
        self._server: socket.socket | None = None
        self._address = ""

    def obey(self, order: Message) -> None:
        """Listen, connect to the others, or listen no longer."""
        if order["trial"] == "connect":
            threading.Thread(target=self._connect, args=[order["places"]], name="lockstep-probe", daemon=True).start()
            return
        if self._server is not None:
            self._server.close()
            self._server = None
        if order["trial"] == "listen":
            try:
                self._listen()
            except (OSError, InputError) as error:
                why = error.given if isinstance(error, InputError) else error.strerror
                self._answer({"listens": [], "why": f"its network is gone ({why})"})

    def _listen(self) -> None:
        network = _chosen(self._environment)
        if network is not None:
            self._server, self._address = _listen(network), network.address
            self._answer({"listens": list(self._server.getsockname()[:2])})

    def _connect(self, places: Sequence[Sequence[Any]]) -> None:
        where = {number: f"from {self._address} to {address} port {port}" for number, address, port in places}
        failed = _unreached(places)
        self._answer({"unreached": [[number, f"{why}, {where[number]}"] for number, why in failed.items()]})


Orders = list[tuple[int, Mapping[str, object]]]
"""Messages, each with the number of the worker that is to get it."""


class Gap(NamedTuple):
    """One worker does not reach another one."""

    number: int
    other: int
    why: str


class ConnectionTrial:
    """One trial of all connections between the hosts, by a worker on each, that of the chief's host first."""

    def __init__(self, numbers: Sequence[int], now: float) -> None:
        self.numbers, self._deadline = list(numbers), now + TRIAL_SECONDS
        self._places: dict[int, Sequence[object]] = {}
        self._unreached: dict[int, list[Gap]] = {}

    def begin(self) -> Orders:
        """What the workers are told first: to listen."""
        return [(number, {"trial": "listen"}) for number in self.numbers]

    def take(self, number: int, message: Message) -> Orders:
        """Take in an answer of a worker; returns what they are told by then."""
        if "listens" in message:
            if message["listens"]:
                self._places[number] = [number, *message["listens"]]
            else:
                others = [each for each in self.numbers if each != number]
                self._unreached[number] = [Gap(number, each, str(message["why"])) for each in others]
            if len(self._places) + len(self._unreached) < len(self.numbers):
                return []
            places = {each: [self._places[other] for other in self._places if other != each] for each in self._places}
            return [(each, {"trial": "connect", "places": places[each]}) for each in self.numbers if each in places]
        self._unreached[number] = [Gap(number, int(other), str(why)) for other, why in message["unreached"]]
        return []

    def is_over(self, now: float) -> bool:
        """Whether all have answered, or have had the time to."""
        return len(self._unreached) == len(self.numbers) or now > self._deadline

    def end(self) -> Orders:
        """What the workers are told last: to listen no longer."""
        return [(number, {"trial": "end"}) for number in self.numbers]

    @property
    def gaps(self) -> list[Gap]:
        """Who does not reach whom, as far as it is known."""
        return [gap for number in self.numbers for gap in self._unreached.get(number, ())]


def left_out(gaps: Sequence[Gap], numbers: Sequence[int]) -> list[int]:
    """Choose the workers of a trial to go on without, so that the others reach each other: few, and never the first."""
    pairs = {frozenset((gap.number, gap.other)) for gap in gaps}
    chosen: list[int] = []
    while pairs:
        counts = Counter(number for pair in pairs for number in pair if number != numbers[0])
        chosen.append(max(counts, key=lambda number: (counts[number], numbers.index(number))))
        pairs = {pair for pair in pairs if chosen[-1] not in pair}
    return chosen
