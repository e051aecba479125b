"""The workers of one run as their launcher sees them: starts them, listens, and ends them together."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.parallel import watchdog
from lockstep.parallel.forkserver import Event, ForkServer, status_fields
from lockstep.parallel.watchdog import Failure, Limits, Verdict, Watchdog, WorkerStatus
from lockstep.screen import Lines
from lockstep.workers.channel import Channel, Message
from lockstep.workers.store_server import LAUNCHED, StoreServer

log = logging.getLogger("lockstep")

TICK_SECONDS = 0.1
_ANSWER_SECONDS = 0.5
_WAIT_SECONDS = 2.0
STOPPED_EARLY = "stopped before the first step"


@dataclass
class _Member:
    """One worker."""

    rank: int
    channel: Channel
    pid: int = 0
    step: int = 0
    phase: str = "start"
    is_running: bool = True
    """Its process is there."""
    exit_code: int | None = None
    """Once its main function has returned and its threads have ended: all that it had to do is done."""
    explained: bool = False
    """Why it ended, or will, is known already."""
    run_complete: bool = False
    """Its part of the run has reached the end, and is saved; it may still score."""

    @property
    def is_done(self) -> bool:
        """It has ended, without an error."""
        return self.exit_code == 0

    @property
    def name(self) -> str:
        return f"worker {self.rank}"

    @property
    def place(self) -> WorkerStatus:
        return WorkerStatus(self.rank, self.pid, self.step, self.phase)


@dataclass(frozen=True)
class RunOutcome:
    """How a run has ended; without troubles, all workers returned 0."""

    failures: Sequence[Failure]
    """In the order in which they were noticed."""
    stopped_by: str | None
    """The signal that asked for a stop ("SIGTERM") before the run had reached its end."""
    aborted: bool
    late: bool = False
    """Workers had to be killed, since they took too long to save and end."""


class Supervisor:
    """The workers of one run, from their start to the end of the last one.

    Args:
        server: forks the workers.
        task: what each worker does.
        num_workers: how many there are.
        limits: how long a worker may be silent, stuck, or take to stop.
        wishes: names of the signals that have reached the launcher; taken out as they are obeyed.
    """

    def __init__(
        self, server: ForkServer, task: Mapping[str, object], num_workers: int, limits: Limits, wishes: list[str]
    ) -> None:
        self._server, self._limits, self._wishes = server, limits, wishes
        self._failures: list[Failure] = []
        self._first_failure: float | None = None
        self._stopped_by: str | None = None
        self._stopped_at = 0.0
        self._unheard: set[int] | None = None
        """Those that have not told where they are since a stop was asked for; None once that was said."""
        self._phases: list[str] = []
        """Of the workers, when the stop was asked for."""
        self._aborted = self._late = False
        self._store = StoreServer()
        self._members = [self._start(rank, num_workers, task) for rank in range(num_workers)]
        self._watchdog = Watchdog(num_workers, limits, time.monotonic())

    def finish(self) -> RunOutcome:
        """Watch until no worker is left."""
        while any(member.is_running for member in self._members):
            self._listen()
            self._obey()
            self._say_what_stops()
            self._watch_over()
            self._end_those_that_wait_in_vain()
            self._end_survivors()
            self._end_late()
        if self._unheard is not None:
            self._unheard = set()
            self._say_what_stops()
        for member in self._members:
            member.channel.close()
        self._store.close()
        if all(failure.kind == "peer" for failure in self._failures):
            # Whoever has ended without an error is missed by the others, and says nothing itself.
            self._failures[:0] = [
                watchdog.missed(each.place) for each in self._members if self._failures and each.is_done
            ]
        return RunOutcome(self._failures, None if self._has_ended() else self._stopped_by, self._aborted, self._late)

    def _has_ended(self) -> bool:
        return all(member.run_complete for member in self._members)

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
        if "exit_code" in message:
            member.exit_code = message["exit_code"]
            self._watchdog.forget(member.rank)
            return
        if "stacks" in message:
            log.warning("%s is at:\n%s", member.place, Lines(message["stacks"].rstrip()))
            return
        member.step, member.phase = message["step"], message["phase"]
        member.run_complete = message.get("ended", False)
        if "failed" in message:
            self._blame(member, watchdog.failed(member.place, message["kind"], message["failed"]))
        elif member.is_running and not member.explained:
            self._watchdog.heard(member.rank, member.step, member.phase, message["count"], waits=message["waits"])
            if message["stop"] and not self._stopped_by:
                self._wishes.append(message["stop"])

    def _take_in(self, event: Event) -> None:
        member = next(member for member in self._members if member.name == event.name)
        member.pid = event.pid
        if event.status is not None:
            member.is_running = False
            self._watchdog.forget(member.rank)
            if member.exit_code is None:
                member.exit_code = event.status
            if member.exit_code:
                self._blame(member, watchdog.died(member.place, event.status))

    def _blame(self, member: _Member, failure: Failure) -> None:
        if not member.explained:
            member.explained = True
            self._add(failure)

    def _add(self, failure: Failure) -> None:
        self._failures.append(failure)
        self._first_failure = self._first_failure or time.monotonic()

    def _obey(self) -> None:
        """Do what signals asked for: stop; at a further Ctrl-C, abort."""
        while self._wishes:
            wish = self._wishes.pop(0)
            if self._stopped_by is None:
                self._stopped_by, self._stopped_at = wish, time.monotonic()
                self._unheard = {member.rank for member in self._members if member.is_running}
                self._phases = [member.phase for member in self._members]
                for member in self._members:
                    member.channel.send({"stop": wish})
            elif wish == "SIGINT":
                self._aborted = not self._has_ended()
                self._kill(self._members)

    def _say_what_stops(self) -> None:
        """Once every worker has told where it is, say what a stop interrupts; before the first step, end it at once."""
        if self._unheard is None or (self._unheard and time.monotonic() - self._stopped_at < _ANSWER_SECONDS):
            return
        self._unheard = None
        # Who scored, and has ended meanwhile, has left its scoring off.
        phases = {
            "evaluate" if (before, each.phase) == ("evaluate", "end") else each.phase
            for each, before in zip(self._members, self._phases, strict=True)
        }
        if phases == {"start"} or (phases == {"script"} and not any(member.step for member in self._members)):
            log.warning(STOPPED_EARLY)
            self._kill(self._members)
        else:
            log.warning("%s; Ctrl-C again aborts", self._what_stops(phases))

    def _what_stops(self, phases: set[str]) -> str:
        if self._has_ended():
            return "the run has ended, and its scoring is left off"
        if phases == {"evaluate"}:
            return "stopping: the scoring is left off"
        return "stopping after this step, with a checkpoint"

    def _watch_over(self) -> None:
        """Show the stacks of workers that are silent or stuck, and end those that stay so."""
        for verdict in self._watchdog.look(time.monotonic(), self._is_stopped):
            member = self._members[verdict.rank]
            if verdict.action == "show":
                self._show(member, verdict)
            else:
                self._blame(member, watchdog.killed(member.place, verdict))
                self._kill([member])

    def _is_stopped(self, rank: int) -> bool:
        return status_fields(self._members[rank].pid)[:1] == ["T"]

    def _show(self, member: _Member, verdict: Verdict) -> None:
        place, seconds = member.place, verdict.seconds
        if verdict.reason == "stuck":
            log.warning("%s has been %s for %.0f s; its stack follows", place, place.where, seconds)
            member.channel.send({"show": "stacks"})
        else:  # nobody there who could answer
            log.warning("%s gives no sign of life for %.0f s %s; its stack:", place, seconds, place.where)
            self._server.kill(member.name, signal.SIGUSR2)

    def _end_those_that_wait_in_vain(self) -> None:
        """A worker that has ended is never going to make the call in which the others wait for it."""
        gone = [member for member in self._members if member.is_done and not member.is_running]
        for member in gone if self._watchdog.longest_wait() > _WAIT_SECONDS and not self._failures else []:
            self._add(watchdog.missed(member.place))

    def _end_survivors(self) -> None:
        """When a worker has failed the others notice by themselves, and may close their files; then they have to go."""
        if self._first_failure and time.monotonic() - self._first_failure > self._limits.grace_seconds:
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
            member.explained = True
            self._server.kill(member.name, signal.SIGKILL)
