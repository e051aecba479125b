"""The watcher of a host whose workers another launcher has started: torchrun, srun or Kubernetes.

A process of its own that loads no torch. That of the chief's host supervises the workers of all hosts, as our launcher
does; those of the other hosts serve it. Workers join by connections over a Unix socket (`lockstep.workers.peers` is
their end), and the system says which process is at the other end, and when it ends. All workers are told who is lost,
and why; to start others is their launcher's affair. `tests/hosts/test_watched_hosts.py` has it on several hosts.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from lockstep.errors import WorkerError
from lockstep.launcher.hosts import Agent, RemoteHost, Reports
from lockstep.launcher.supervisor import Supervisor
from lockstep.owner import process_fields
from lockstep.screen import Lines, log, show_log
from lockstep.workers.channel import Channel, Message
from lockstep.workers.connections import Listener, connect
from lockstep.workers.limits import HELLO_SECONDS, REACH_SECONDS, TICK_SECONDS, Limits
from lockstep.workers.peers import process_behind
from lockstep.workers.signals import NOTICES

_LIMITS = Limits(grace_seconds=10.0)
"""When one has failed the others raise at once; then their interpreters end, which takes seconds on a busy host."""
_NONE = -1
_WAIT_STATUS = 49
"""Index of the wait status in /proc/PID/stat, counted from the state."""

_Arrival = tuple[Channel, int, Message, list[Message]]
"""A connection, the process at its other end as the system knows it, its first message, and those that came with it."""


@dataclass
class _Process:
    """The process of a worker that has joined, and what it says in words for the supervisor."""

    channel: Channel
    pid: int
    descriptor: int
    """A pidfd: readable when the process has ended; `_NONE` where the kernel has none (before Linux 5.3)."""
    can_show: bool
    """SIGUSR2 makes it write its stack."""
    unread: list[Message]
    """What has come with its first message."""
    step: int = 0
    phase: str = "start"
    has_left: bool = False
    """It has told the others that it ends."""
    has_ended: bool = False

    def receive(self) -> list[Message]:
        arrived, self.unread = self.unread + self.channel.receive(), []
        reports: list[Message] = []
        for message in arrived:
            self.has_left |= "leaves" in message or "failed" in message
            if "phase" in message:
                self.step, self.phase = message["step"], message["phase"]
            if "leaves" not in message:
                # What a worker is asked for by a signal reaches the others with the sums.
                reports.append({**message, "stop": None} if "stop" in message else message)
            elif message["leaves"] == "last":  # it lives as long as the others, but will not take part any more
                reports.append({"pid": self.pid, "status": 0})
            else:
                reports.append(message)
        return reports

    def ends_now(self, ready: Collection[int]) -> bool:
        """Whether its process has ended since the last call, by the descriptors that are readable."""
        if self.has_ended:
            return False
        if self.descriptor == _NONE:
            return process_fields(self.pid)[:1] in ([], ["Z"])
        return self.descriptor in ready

    def end(self) -> list[Message]:
        """What is to be said of its end. Its launcher, whose child it is, may have been told the exit status first."""
        self.close()
        fields = process_fields(self.pid)
        status = os.waitstatus_to_exitcode(int(fields[_WAIT_STATUS])) if fields[:1] == ["Z"] else None
        if self.has_left:  # it is not judged by how its interpreter ends
            status = max(status or 0, 0)
        if status is not None:
            return [{"pid": self.pid, "status": status}]
        return _vanished(self.pid, "its process has ended without a word", self.step, self.phase)

    def kill(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it is still there and has a use for it."""
        if self.has_ended or (number == signal.SIGUSR2 and not self.can_show):
            return
        with suppress(ProcessLookupError):
            if self.descriptor == _NONE:
                os.kill(self.pid, number)
            else:
                signal.pidfd_send_signal(self.descriptor, number)

    def close(self) -> None:
        if not self.has_ended and self.descriptor != _NONE:
            os.close(self.descriptor)
        self.has_ended = True


def _vanished(pid: int, text: str, step: int = 0, phase: str = "start") -> list[Message]:
    return [{"failed": text, "kind": "error", "step": step, "phase": phase}, {"pid": pid, "status": 1}]


class JoinedHost:
    """The host of this watcher, with the workers that join by the Unix socket that it listens to.

    Its name is "" where the run has no other host.
    """

    def __init__(self, listener: socket.socket, name: str, ranks: Collection[int]) -> None:
        self.name = name
        self._listener, self._expected = listener, set(ranks)
        self._deadline = time.monotonic() + REACH_SECONDS
        self._processes: dict[int, _Process] = {}
        self._watched: set[int] = set()
        self._pending: Reports = []
        """What the next call of `receive` is to return first."""
        self._events = select.epoll()
        self._events.register(listener, select.EPOLLIN)

    def join(self, channel: Channel, pid: int, hello: Message, unread: list[Message]) -> None:
        """Take in a worker, which has said who it is; `pid` as the system knows it."""
        rank = hello.get("rank")
        if rank not in self._expected:
            channel.close()
            return
        self._expected.remove(rank)
        try:
            descriptor = os.pidfd_open(pid)
            self._events.register(descriptor, select.EPOLLIN)
        except OSError:  # it has ended since, or the kernel has no such descriptors
            descriptor = _NONE
        self._processes[rank] = _Process(channel, pid, descriptor, hello.get("can_show") is True, unread)
        self._pending.append((rank, {"pid": pid, "status": None}))
        if rank in self._watched:
            channel.send({"watched": True})

    def start(self, rank: int, environment: Mapping[str, str]) -> None:
        """Tell a worker, which another launcher has started, that it is watched from now on."""
        self._watched.add(rank)
        self.send(rank, {"watched": True})

    def send(self, rank: int, message: Mapping[str, object]) -> None:
        """Send a message to a worker."""
        if rank in self._processes:
            self._processes[rank].channel.send(message)

    def kill(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a worker, if it is still there."""
        if rank in self._processes:
            self._processes[rank].kill(number)

    def receive(self) -> Reports:
        """What workers and their processes have said since the last call."""
        ready = {descriptor for descriptor, _ in self._events.poll(0)}
        if self._listener.fileno() in ready:
            self.join(*_accept(self._listener))
        if self._expected and time.monotonic() > self._deadline:
            for rank in self._expected:
                self._pending += [(rank, each) for each in _vanished(0, "it has never come to its watcher")]
            self._expected.clear()
        reports, self._pending = self._pending, []
        # After the poll: what a worker has said before its end is there by now.
        for rank, process in self._processes.items():
            reports += [(rank, message) for message in process.receive()]
            if process.ends_now(ready):
                reports += [(rank, message) for message in process.end()]
        return reports

    def is_stopped(self, rank: int) -> bool:
        """Whether the system has stopped a worker's process."""
        return rank in self._processes and process_fields(self._processes[rank].pid)[:1] == ["T"]

    def log(self, level: int, text: str) -> None:
        """Show lines on the screen of this host's first worker."""
        log.log(level, "%s", Lines(text))

    def fileno(self) -> int:
        """What becomes readable when a worker comes, or its process has ended."""
        return self._events.fileno()

    def close(self) -> None:
        """Close the channels; workers that are left go on unwatched."""
        for process in self._processes.values():
            process.channel.close()
            process.close()
        self._events.close()


def watch() -> None:
    """Watch the workers that join by the Unix socket whose descriptor is the argument; the first says what to do."""
    # A scheduler may send its notices to all processes of a job: they are meant for the workers.
    for number in (signal.SIGINT, signal.SIGUSR2, *NOTICES):
        signal.signal(number, signal.SIG_IGN)
    show_log()
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        listener.settimeout(REACH_SECONDS)
        arrivals = _first_arrivals(listener)
        if not arrivals:  # the worker that has started this process has ended since
            return
        chief, _, hello, _ = arrivals[-1]
        task = hello["task"]
        names = task["names"] if len(task["names"]) > 1 else [""]
        with closing(JoinedHost(listener, names[task["host"]], task["ranks"][task["host"]])) as here:
            for arrival in arrivals:
                here.join(*arrival)
            if task["host"]:
                _serve(here, task)
            else:
                _supervise(here, task, chief)


def _supervise(here: JoinedHost, task: Mapping[str, Any], chief: Channel) -> None:
    """Supervise the workers of all hosts until the last one has ended."""
    others = _others(task, chief)
    Supervisor([here, *others], task["ranks"], _LIMITS, []).finish()
    for other in others:
        other.end(0, logging.INFO, "")


def _first_arrivals(listener: socket.socket) -> list[_Arrival]:
    """Accept workers until one says what to do; others may be quicker than that."""
    arrivals: list[_Arrival] = []
    with suppress(TimeoutError):
        while True:
            arrivals.append(_accept(listener))
            if arrivals[-1][2].get("task"):
                return arrivals
    return []


def _accept(listener: socket.socket) -> _Arrival:
    connection = listener.accept()[0]
    pid, user = process_behind(connection)
    channel = Channel(connection)
    hello, *unread = (channel.receive(HELLO_SECONDS) if user == os.geteuid() else []) or [{}]
    return channel, pid, hello, unread


def _others(task: Mapping[str, Any], chief: Channel) -> list[RemoteHost]:
    """Wait for the watchers of the other hosts, whom the chief tells where; one that does not come is gone."""
    come: queue.SimpleQueue[Channel] = queue.SimpleQueue()
    names, ranks = task["names"], task["ranks"]
    others: dict[int, RemoteHost] = {}
    if len(names) == 1:
        return []
    listener = Listener(
        task["address"], 0, task["key"].encode(), lambda connection, address: come.put(Channel(connection))
    )
    with closing(listener):
        chief.send({"port": listener.port})
        deadline = time.monotonic() + REACH_SECONDS
        while len(others) < len(names) - 1 and time.monotonic() < deadline:
            for other in others.values():
                other.tick()
            with suppress(queue.Empty):
                channel = come.get(timeout=TICK_SECONDS)
                for hello in channel.receive(HELLO_SECONDS, most=1):
                    index = hello["host"]
                    others[index] = RemoteHost(channel, names[index], len(ranks[index]))
    for index in set(range(1, len(names))) - others.keys():
        nobody, gone = socket.socketpair()
        gone.close()
        others[index] = RemoteHost(Channel(nobody), names[index], len(ranks[index]))
    return [others[index] for index in sorted(others)]


def _serve(here: JoinedHost, task: Mapping[str, Any]) -> None:
    """Serve the watcher that decides; where it is gone, tell the workers here."""
    try:
        where, key = (task["address"], task["port"]), task["key"].encode()
        channel = Channel(connect(*where, key, REACH_SECONDS, patience_seconds=REACH_SECONDS))
        channel.send({"host": task["host"]})
        Agent(channel, here, []).serve()
    except (WorkerError, OSError) as error:
        why = error.given if isinstance(error, WorkerError) else f"its watcher cannot be reached: {error}"
        for rank in task["ranks"][task["host"]]:
            here.send(rank, {"lost": f"host {task['names'][0]}", "why": why})


if __name__ == "__main__":
    watch()
