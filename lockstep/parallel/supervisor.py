"""The workers of one run as their launcher sees them: starts them, listens, and ends them together."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.parallel import watch
from lockstep.parallel.forkserver import Event, ForkServer, status_fields
from lockstep.parallel.watch import Limits, Place, Trouble, Verdict, Watch
from lockstep.workers.channel import Channel, Message
from lockstep.workers.store_server import LAUNCHED, StoreServer

log = logging.getLogger("lockstep")

TICK_SECONDS = 0.1
_STOPPING = "stopping after this step, with a checkpoint"
_LEFT_OFF = "stopping: the scoring is left off"


@dataclass
class _Member:
    """One worker."""

    rank: int
    channel: Channel
    pid: int = 0
    step: int = 0
    phase: str = "start"
    alive: bool = True
    blamed: bool = False
    """Why it ended, or will, is known already."""
    ended: bool = False
    """Its part of the run has reached the end."""

    @property
    def name(self) -> str:
        return f"worker {self.rank}"

    @property
    def place(self) -> Place:
        return Place(self.rank, self.pid, self.step, self.phase)


@dataclass(frozen=True)
class Outcome:
    """How a run has ended; without troubles, all workers returned 0."""

    troubles: Sequence[Trouble]
    """In the order in which they were noticed."""
    stopped_by: str | None
    """The signal that asked for a stop ("SIGINT", "SIGTERM", "SIGUSR1") before the run had reached its end."""
    aborted: bool
    late: bool = False
    """Workers had to be killed, since they took too long to save and end."""


class Supervisor:
    """The workers of one run, from their start to the end of the last one.

    Args:
        server: forks the workers.
        task: what each worker does.
        num_workers: how many there are.
        limits: how much silence a worker may keep.
        wishes: names of the signals that have reached the launcher; taken out as they are obeyed.
    """

    def __init__(
        self, server: ForkServer, task: Mapping[str, object], num_workers: int, limits: Limits, wishes: list[str]
    ) -> None:
        self._server, self._limits, self._wishes = server, limits, wishes
        self._troubles: list[Trouble] = []
        self._first_trouble: float | None = None
        self._stopped_by: str | None = None
        self._stopped_at = 0.0
        self._aborted = self._late = False
        self._store = StoreServer()
        self._members = [self._start(rank, num_workers, task) for rank in range(num_workers)]
        self._watch = Watch(num_workers, limits, time.monotonic())

    def finish(self) -> Outcome:
        """Watch until no worker is left."""
        while any(member.alive for member in self._members):
            self._listen()
            self._obey()
            self._judge_silence()
            self._end_survivors()
            self._end_late()
        for member in self._members:
            member.channel.close()
        self._store.close()
        return Outcome(self._troubles, None if self._has_ended() else self._stopped_by, self._aborted, self._late)

    def _has_ended(self) -> bool:
        return all(member.ended for member in self._members)

    def _start(self, rank: int, num_workers: int, task: Mapping[str, object]) -> _Member:
        """Have a worker forked; it lives no longer than the channel to it."""
        seat = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_workers, "LOCAL_WORLD_SIZE": num_workers}
        environment = {name: str(number) for name, number in seat.items()} | {LAUNCHED: "1"}
        # gloo listens for the other workers, all of which are on this host.
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        ours, theirs = socket.socketpair()
        self._server.fork(f"worker {rank}", {**task, "environment": environment}, [theirs, self._store.connect()])
        return _Member(rank, Channel(ours))

    def _listen(self) -> None:
        """Take in what the workers say, and which have ended."""
        events = self._server.events(TICK_SECONDS)
        # After the events: what a worker said before its end is there by now.
        for member in self._members:
            for message in member.channel.receive():
                self._hear(member, message)
        for event in events:
            self._take_in(event)

    def _hear(self, member: _Member, message: Message) -> None:
        member.step, member.phase = message["step"], message["phase"]
        member.ended = message.get("ended", False)
        if "failed" in message:
            self._blame(member, watch.failed(member.place, message["kind"], message["failed"]))
        elif member.alive and not member.blamed:
            self._watch.heard(member.rank, member.phase)
            if message["stop"] and not self._stopped_by:
                self._wishes.append(message["stop"])

    def _take_in(self, event: Event) -> None:
        member = next(member for member in self._members if member.name == event.name)
        member.pid = event.pid
        if event.status is not None:
            member.alive = False
            self._watch.forget(member.rank)
            if event.status:
                self._blame(member, watch.died(member.place, event.status))

    def _blame(self, member: _Member, trouble: Trouble) -> None:
        if not member.blamed:
            member.blamed = True
            self._add(trouble)

    def _add(self, trouble: Trouble) -> None:
        self._troubles.append(trouble)
        self._first_trouble = self._first_trouble or time.monotonic()

    def _what_stops(self) -> str:
        if self._has_ended():
            return "the run has ended, and its scoring is left off"
        return _LEFT_OFF if all(member.phase == "evaluate" for member in self._members) else _STOPPING

    def _obey(self) -> None:
        """Do what signals asked for: stop; at a further Ctrl-C, abort."""
        while self._wishes:
            wish = self._wishes.pop(0)
            if self._stopped_by is None:
                self._stopped_by, self._stopped_at = wish, time.monotonic()
                log.warning("%s; Ctrl-C again aborts", self._what_stops())
                for member in self._members:
                    member.channel.send({"stop": wish})
            elif wish == "SIGINT":
                self._aborted = True
                self._kill(self._members)

    def _judge_silence(self) -> None:
        for verdict in self._watch.look(time.monotonic(), self._is_stopped):
            member = self._members[verdict.rank]
            if verdict.action == "kill":
                self._blame(member, watch.silenced(member.place, verdict))
                self._kill([member])
            else:
                self._show_stack(member, verdict)

    def _is_stopped(self, rank: int) -> bool:
        return status_fields(self._members[rank].pid)[:1] == ["T"]

    def _show_stack(self, member: _Member, verdict: Verdict) -> None:
        log.warning(
            "%s gives no sign of life for %.0f s %s; its stack:",
            member.place,
            verdict.silent_seconds,
            member.place.where,
        )
        self._server.kill(member.name, signal.SIGUSR2)

    def _end_survivors(self) -> None:
        """When a worker has failed the others notice by themselves, and may close their files; then they have to go."""
        if self._first_trouble and time.monotonic() - self._first_trouble > self._limits.grace_seconds:
            self._kill(self._members)

    def _end_late(self) -> None:
        """Who does not save in the time that there is will be killed from outside: better from here, with a word."""
        limit = self._limits.stop_seconds
        if self._stopped_by and limit is not None and time.monotonic() - self._stopped_at > limit:
            self._late = True
            self._kill(self._members)

    def _kill(self, members: Iterable[_Member]) -> None:
        for member in members:
            # What is ended from here is not to blame for anything.
            member.blamed = True
            self._server.kill(member.name, signal.SIGKILL)
