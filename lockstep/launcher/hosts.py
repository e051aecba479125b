"""The hosts of a run as its supervisor sees them: its own, and others through the agents that run there.

A host starts workers, carries messages to and from them, and sends them signals. What workers and their processes
report comes as (rank, message); the messages of a worker are those of `lockstep.workers.pulse` and `entry`, and of its
process `{"pid": ..., "status": ...}`: None when it begins, then its exit status, which is negative for the signal that
killed it.

`Agent` is the launcher of a host that is not the chief's: it starts its workers, signals them and relays their messages
for the supervisor, whose end of the channel is a `RemoteHost`. It decides one thing alone: where the supervisor is
gone, the run is, and no worker stays behind.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from types import MappingProxyType
from typing import NamedTuple, Protocol

from lockstep.errors import WorkerError
from lockstep.launcher.forkserver import ForkServer
from lockstep.owner import process_fields
from lockstep.screen import Lines, log
from lockstep.workers.channel import Channel, Message
from lockstep.workers.connections import INTERFACE_OF_GLOO
from lockstep.workers.limits import HOST_SILENT_SECONDS, LONGEST_POLL_SECONDS, TICK_SECONDS

LOOPBACK = MappingProxyType({INTERFACE_OF_GLOO: "lo"})
"""The network between workers of one host."""

Reports = list[tuple[int, Message]]


class Host(Protocol):
    """A machine with workers of the run."""

    name: str

    def start(self, rank: int, environment: Mapping[str, str]) -> None:
        """Have a worker forked, with these variables in its environment."""
        ...

    def send(self, rank: int, message: Mapping[str, object]) -> None:
        """Send a message to a worker, if it was started here: a host that has come back may have none."""
        ...

    def kill(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a worker, if it is still there."""
        ...

    def receive(self) -> Reports:
        """What workers and their processes have said since the last call."""
        ...

    def is_stopped(self, rank: int) -> bool:
        """Whether the system has stopped a worker's process."""
        ...

    def log(self, level: int, text: str) -> None:
        """Show lines on the screen there."""
        ...

    def fileno(self) -> int:
        """What becomes readable when a process has begun or ended."""
        ...


class LocalHost:
    """The host of this very process; its name is empty where there is but one.

    `connect_store` makes a connection to the store for a worker to inherit, unless the task says where the store is.
    `network` are variables that name the network interface between the workers; those that are set already stay.
    `spares` are modules for those that are started in the place of lost workers, imported beside the second step.
    """

    def __init__(
        self,
        server: ForkServer,
        task: Mapping[str, object],
        connect_store: Callable[[], Connection] | None,
        network: Mapping[str, str] = LOOPBACK,
        name: str = "",
        spares: Sequence[str] = (),
    ) -> None:
        self.name, self._spares = name, spares
        self._network = {name: value for name, value in network.items() if name not in os.environ}
        self._server, self._task, self._connect_store = server, task, connect_store
        self.earlier_seconds = 0.0
        """For which workers that were lost had been at work before those that are started now."""
        self._channels: dict[int, Channel] = {}
        self._pids: dict[int, int] = {}

    def start(self, rank: int, environment: Mapping[str, str]) -> None:
        """Have a worker forked; it lives no longer than the channel to it."""
        ours, theirs = socket.socketpair()
        connections: list[socket.socket | Connection] = [theirs]
        if self._connect_store:
            connections.append(self._connect_store())
        task = {**self._task, "environment": {**environment, **self._network}, "earlier_seconds": self.earlier_seconds}
        self._server.fork(f"worker {rank}", task, connections)
        if rank in self._channels:  # of a worker that is gone
            self._channels[rank].close()
        self._channels[rank] = Channel(ours)

    def send(self, rank: int, message: Mapping[str, object]) -> None:
        """Send a message to a worker, if it was started here."""
        if channel := self._channels.get(rank):
            channel.send(message)

    def kill(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a worker, if it is still there."""
        self._server.kill(f"worker {rank}", number)

    def receive(self) -> Reports:
        """What workers and their processes have said since the last call."""
        events = self._server.events(0.0)
        # After the events: what a worker said before its end is there by now.
        reports = [(rank, message) for rank, channel in self._channels.items() for message in channel.receive()]
        if self._spares and any(message.get("step") for _, message in reports):
            self._server.preload(self._spares)
            self._spares = ()
        for event in events:
            rank = int(event.name.removeprefix("worker "))
            self._pids[rank] = event.pid
            reports.append((rank, {"pid": event.pid, "status": event.status}))
        return reports

    def is_stopped(self, rank: int) -> bool:
        """Whether the system has stopped a worker's process."""
        return process_fields(self._pids.get(rank, 0))[:1] == ["T"]

    def log(self, level: int, text: str) -> None:
        """Show lines on this screen."""
        log.log(level, "%s", Lines(text))

    def fileno(self) -> int:
        """What becomes readable when a process has begun or ended."""
        return self._server.fileno()

    def close(self) -> None:
        """Close the channels; workers that are left end by it."""
        for channel in self._channels.values():
            channel.close()


class RemoteHost:
    """Another host, which is to have so many workers, through the channel to the `Agent` there."""

    def __init__(
        self, channel: Channel, name: str, num_workers: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self.num_workers = name, num_workers
        self._channel = channel
        self._ranks: set[int] = set()
        """Ranks of the host's workers: it speaks for no others."""
        self._stopped: frozenset[int] = frozenset()
        self._requests: list[str] = []
        self._fault = ""
        self._silence = Silence(clock)

    def start(self, rank: int, environment: Mapping[str, str]) -> None:
        """Have a worker forked."""
        self._ranks.add(rank)
        self._channel.send({"start": rank, "environment": dict(environment)})

    def send(self, rank: int, message: Mapping[str, object]) -> None:
        """Send a message to a worker."""
        self._channel.send({"to": rank, "message": message})

    def kill(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a worker, if it is still there."""
        self._channel.send({"kill": rank, "signal": int(number)})

    def receive(self) -> Reports:
        """What workers and their processes have said since the last call."""
        reports: Reports = []
        try:
            for message in self._channel.receive():
                self._silence.end()
                self._stopped = frozenset(message.get("stopped", ()))
                self._requests += [str(name) for name in message.get("requests", ()) if hasattr(signal, str(name))]
                reports += [(rank, dict(word)) for rank, word in message.get("reports", ()) if rank in self._ranks]
        except (ValueError, TypeError, AttributeError):
            self._fault = "sends what cannot be read"
        return reports

    def tick(self) -> None:
        """Tell the agent that the supervisor lives."""
        self._channel.send({})

    def take_requests(self) -> list[str]:
        """Return the names of signals that have reached the agent since the last call."""
        requests, self._requests = self._requests, []
        return requests

    @property
    def is_lost(self) -> bool:
        """Whether a fault has been found."""
        return bool(self._fault)

    def fault(self) -> str | None:
        """Return what is wrong with the host, where it is lost; to be called after each `receive`."""
        seconds = self._silence.seconds()
        if not self._fault and self._channel.ended:
            self._fault = "is gone: its launcher has ended, or was killed"
        if not self._fault and seconds > HOST_SILENT_SECONDS:
            self._fault = f"gives no sign of life for {seconds:.1f} s: it is down, or its network is"
        return self._fault or None

    def is_stopped(self, rank: int) -> bool:
        """Whether the system has stopped a worker's process."""
        return rank in self._stopped

    def log(self, level: int, text: str) -> None:
        """Show lines on the screen there."""
        self._channel.send({"log": text, "level": level})

    def end(self, code: int, level: int, text: str) -> None:
        """End the agent, with the last lines and the exit code of the run."""
        end_agent(self._channel, code, level, text)

    def close(self) -> None:
        """Close the channel: the agent ends by itself."""
        self._channel.close()

    def fileno(self) -> int:
        """What becomes readable when the agent has said something."""
        return self._channel.fileno()


def end_agent(channel: Channel, code: int, level: int, text: str) -> None:
    """End the agent at the other end of a channel, with its last lines and its exit code."""
    channel.send({"end": code, "level": level, "log": text})
    channel.close()


class Silence:
    """How long another launcher has been silent, in seconds for which this one has listened."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._looked, self._seconds = clock(), 0.0

    def end(self) -> None:
        """Record that it has said something."""
        self._seconds = 0.0
        self._looked = self._clock()

    def seconds(self) -> float:
        """The seconds of silence until now; to be asked after each look."""
        now = self._clock()
        self._seconds += min(now - self._looked, LONGEST_POLL_SECONDS)
        self._looked = now
        return self._seconds


class Conclusion(NamedTuple):
    """How a launcher ends: its exit code, and its last lines, if there is anything to say."""

    code: int
    level: int = 0
    text: str = ""

    def show(self) -> None:
        """Log the last lines."""
        if self.text:
            log.log(self.level, "%s", Lines(self.text))


class Agent:
    """Serves the supervisor of another host, which also gets the signals that reach this launcher, by name."""

    def __init__(
        self, channel: Channel, host: Host, requests: list[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._channel, self._host, self._requests = channel, host, requests
        self._places: dict[int, tuple[int, str]] = {}
        """Step and phase of each worker."""
        self._silence = Silence(clock)

    def serve(self) -> Conclusion:
        """Do what the supervisor says until it says how the run has ended.

        Raises:
            WorkerError: the supervisor is gone.
        """
        while True:
            wait([self._channel.fileno(), self._host.fileno()], TICK_SECONDS)
            orders = self._channel.receive()
            if orders:
                self._silence.end()
            for order in orders:
                if "end" in order:
                    return Conclusion(int(order["end"]), int(order["level"]), str(order["log"]))
                self._obey(order)
            self._report()
            seconds = self._silence.seconds()
            if self._channel.ended:
                raise self._lost("its launcher has ended, or was killed")
            if seconds > HOST_SILENT_SECONDS:
                raise self._lost(f"no sign of life for {seconds:.1f} s: it is down, or the network to it is")

    def _obey(self, order: Message) -> None:
        if "start" in order:
            self._host.start(order["start"], order["environment"])
            self._places[order["start"]] = (0, "start")
        elif "to" in order:
            self._host.send(order["to"], order["message"])
        elif "kill" in order:
            self._host.kill(order["kill"], signal.Signals(order["signal"]))
        elif "log" in order:
            self._host.log(order["level"], order["log"])

    def _report(self) -> None:
        """Tell the supervisor what workers have said, and that this host lives."""
        reports = self._host.receive()
        for rank, message in reports:
            if "phase" in message:
                self._places[rank] = message["step"], message["phase"]
        stopped = [rank for rank in self._places if self._host.is_stopped(rank)]
        requests = [*self._requests]
        del self._requests[: len(requests)]
        self._channel.send({"reports": reports, "stopped": stopped, "requests": requests})

    def _lost(self, why: str) -> WorkerError:
        places = ", ".join(
            f"worker {rank} at step {step} (phase {phase})" for rank, (step, phase) in self._places.items()
        )
        return WorkerError(
            "Host 0, which decides for all of them, is gone.",
            given=why,
            expected="it to live as long as the run",
            hint="read the last lines on its screen; the workers of this host are ended" + (places and f": {places}"),
        )
