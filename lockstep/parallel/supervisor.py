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
_ANSWER_SECONDS = 0.5
_STOPPING = "stopping after this step, with a checkpoint"
STOPPED_EARLY = "stopped before the first step"


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
    left: int | None = None
    """The exit code of its main function, once that has returned; its interpreter may take a while to end."""
    stopped: bool = False
    """It has returned because it was asked to stop."""

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
        self._unheard: set[int] | None = None
        """Those that have not told where they are since a stop was asked for; None once that was said."""
        self._aborted = self._late = False
        self._store = StoreServer()
        self._members = [self._start(rank, num_workers, task) for rank in range(num_workers)]
        self._watch = Watch(num_workers, limits, time.monotonic())

    def finish(self) -> Outcome:
        """Watch until no worker is left."""
        while any(member.alive for member in self._members):
            self._listen()
            self._obey()
            self._say_what_stops()
            self._watch_over()
            self._end_survivors()
            self._end_late()
        for member in self._members:
            member.channel.close()
        self._store.close()
        if all(trouble.kind == "peer" for trouble in self._troubles):
            # Whoever has left without an error is missed by the others, and says nothing itself.
            self._troubles[:0] = [watch.left(each.place) for each in self._members if self._troubles and each.left == 0]
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
        if self._unheard is not None:
            self._unheard.discard(member.rank)
        if "left" in message:
            member.left, member.stopped = message["left"], bool(message["stop"])
            if member.alive and not member.blamed:
                self._watch.leaves(member.rank)
            return
        member.step, member.phase = message["step"], message["phase"]
        member.ended = message.get("ended", False)
        if "failed" in message:
            self._blame(member, watch.failed(member.place, message["kind"], message["failed"]))
        elif member.alive and not member.blamed and member.left is None:
            self._watch.heard(member.rank, member.step, member.phase, message["count"])
            if message["stop"] and not self._stopped_by:
                self._wishes.append(message["stop"])

    def _take_in(self, event: Event) -> None:
        member = next(member for member in self._members if member.name == event.name)
        member.pid = event.pid
        if event.status is not None:
            member.alive = False
            self._watch.forget(member.rank)
            if member.left is None and event.status == 0:
                member.left = 0
            # Once its work is done, a signal that ends its interpreter early takes nothing away.
            if event.status > 0 or (event.status and member.left != 0):
                self._blame(member, watch.died(member.place, event.status))

    def _blame(self, member: _Member, trouble: Trouble) -> None:
        if not member.blamed:
            member.blamed = True
            self._add(trouble)

    def _add(self, trouble: Trouble) -> None:
        self._troubles.append(trouble)
        self._first_trouble = self._first_trouble or time.monotonic()

    def _obey(self) -> None:
        """Do what signals asked for: stop; at a further Ctrl-C, abort."""
        while self._wishes:
            wish = self._wishes.pop(0)
            if self._stopped_by is None:
                self._stop(wish)
            elif wish == "SIGINT":
                self._aborted = True
                self._kill(self._members)

    def _stop(self, wish: str) -> None:
        if all(member.left == 0 and not member.stopped for member in self._members):
            return  # All is done, and what is left ends by itself.
        self._stopped_by, self._stopped_at = wish, time.monotonic()
        for member in self._members:
            member.channel.send({"stop": wish})
        self._unheard = {member.rank for member in self._members if member.left is None}

    def _say_what_stops(self) -> None:
        """Say what a stop interrupts, once every worker has told where it is; end at once those that have not begun."""
        if self._unheard is None or (self._unheard and time.monotonic() - self._stopped_at < _ANSWER_SECONDS):
            return
        self._unheard = None
        phases = {member.phase for member in self._members}
        if phases == {"start"}:
            log.warning(STOPPED_EARLY)
            self._kill(self._members)
            return
        says = _STOPPING
        if self._has_ended():
            says = "the run has ended, and its scoring is left off"
        elif phases == {"evaluate"}:
            says = "stopping: the scoring is left off"
        log.warning("%s; Ctrl-C again aborts", says)

    def _watch_over(self) -> None:
        """Show the stack of workers that are silent or stuck, and end those that stay so."""
        for verdict in self._watch.look(time.monotonic(), self._is_stopped):
            member = self._members[verdict.rank]
            if verdict.action == "show":
                self._show(member, verdict)
                continue
            if member.left is None:
                self._blame(member, watch.killed(member.place, verdict))
            self._kill([member])

    def _is_stopped(self, rank: int) -> bool:
        return status_fields(self._members[rank].pid)[:1] == ["T"]

    def _show(self, member: _Member, verdict: Verdict) -> None:
        place, seconds = member.place, verdict.seconds
        if member.left is not None:
            log.warning("%s has finished, and its interpreter has been ending for %.0f s", place, seconds)
            return
        if verdict.reason == "stuck":
            log.warning("%s has been %s for %.0f s; its stack:", place, place.where, seconds)
        else:
            log.warning("%s gives no sign of life for %.0f s %s; its stack:", place, seconds, place.where)
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
