"""The supervisor starts the workers of one run for their launcher, listens to them, and ends them together.

It acts as `watchdog` and `survival` decide. A failure on one of several hosts is tried in `tests/hosts`, on hosts that
can be cut, killed and switched off.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Literal

from lockstep.launcher import watchdog
from lockstep.launcher.hosts import Host, RemoteHost
from lockstep.launcher.survival import Survival
from lockstep.launcher.watchdog import Failure, Verdict, Watchdog, WorkerStatus
from lockstep.workers.channel import Message
from lockstep.workers.limits import MISSED_SECONDS, STOP_ANSWER_SECONDS, TICK_SECONDS, TRIAL_PAUSE_SECONDS, Limits
from lockstep.workers.membership import GENERATION, NEWCOMER, Generation
from lockstep.workers.network import ConnectionTrial, Orders, left_out
from lockstep.workers.store_server import LAUNCHED
from lockstep.workers.stragglers import Stragglers


@dataclass
class WorkerRecord:
    """One worker: where it was when last heard of, and how far its process has come."""

    rank: int
    """The number with which it was started: its rank, until others are lost."""
    host: Host
    environment: Mapping[str, str]
    """What its host was told to set in its environment."""
    pid: int = 0
    step: int = 0
    phase: str = "start"
    state: Literal["running", "failed", "returned", "done", "dead"] = "running"
    """`running` until it has `failed` (why is known, or it was killed from here) or `returned` 0 from all that it had
    to do; once its process is gone, `done` or `dead`."""
    run_ended: bool = False
    """Its part of the run has reached the end, and is saved; it may still score."""
    saves_at_stop: bool = False
    """Its run writes a checkpoint when it is stopped."""
    has_left: bool = False
    """It will not take part any more, though its process may live on."""
    phase_at_stop: str | None = None
    is_awaited: bool = False
    """It was asked to stop, and has not said since where it is."""

    @property
    def has_process(self) -> bool:
        """Whether its process is still there."""
        return self.state in ("running", "failed", "returned")

    @property
    def has_returned(self) -> bool:
        """Whether its main function has returned 0."""
        return self.state in ("returned", "done")

    @property
    def status(self) -> WorkerStatus:
        """The worker in messages."""
        return WorkerStatus(self.rank, self.pid, self.step, self.phase, self.host.name)

    @property
    def interrupted_phase(self) -> str:
        """The phase that a stop interrupts: a worker that was scoring, and has ended since, left its scoring off."""
        return "evaluate" if (self.phase_at_stop, self.phase) == ("evaluate", "end") else self.phase


STOPPED_EARLY = "stopped before the first step"


@dataclass(frozen=True)
class RunOutcome:
    """How a run has ended; without failures, all workers returned 0."""

    failures: Sequence[Failure]
    """The failures, in the order in which they were noticed."""
    stopped_by: str | None
    """The signal that asked for a stop ("SIGTERM") before the run had reached its end."""
    step: int = 0
    """The last one that a worker was at."""
    aborted: bool = False
    late: bool = False
    """Workers had to be killed, since they took too long to save and end."""


class Supervisor:
    """The workers of one run, from their start to the end of the last one, on hosts of which the chief's is the first.

    The names of signals that have reached the launcher are taken out of `requests` as they are handled. Without
    `survival` all end when some are lost. `take_hosts` returns pairs of a lost host and the one that has come in its
    place since the last call.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        ranks: Sequence[Sequence[int]],
        limits: Limits,
        requests: list[str],
        clock: Callable[[], float] = time.monotonic,
        survival: Survival | None = None,
        take_hosts: Callable[[], Sequence[tuple[RemoteHost, RemoteHost]]] = lambda: (),
    ) -> None:
        self._hosts, self._limits, self._requests, self._clock = list(hosts), limits, requests, clock
        self._failures: list[Failure] = []
        self._first_failure: float | None = None
        self._stopped_by: str | None = None
        self._stopped_at = 0.0
        self._is_announced = self._saves_at_stop = False
        self._aborted = self._late = False
        self._survival, self._take_hosts = survival, take_hosts
        self._due: dict[int, float] = {}
        """The time, by the clock, at which a worker is to be started anew."""
        num_workers = sum(map(len, ranks))
        self._members: list[WorkerRecord] = []
        """Workers by the number with which each was started: its rank, until others are lost."""
        for host, there in zip(hosts, ranks, strict=True):
            self._start(host, there, num_workers)
        self._members.sort(key=lambda member: member.rank)
        self._part = list(self._members)
        """Workers that take part now."""
        self._takes_newcomers = True
        """The script is where one that begins with it could join."""
        self._trial: ConnectionTrial | None = None
        self._next_trial = clock()
        self._withheld: list[Verdict] = []
        """Stacks that are shown if the trial does not say more."""
        self._cut_off: list[Host] = []
        """Hosts that others do not reach: nobody is started there any more."""
        self._watchdog, self._stragglers = Watchdog(len(self._members), limits, clock()), Stragglers(clock())

    def finish(self) -> RunOutcome:
        """Watch until no worker is left."""
        while any(member.has_process for member in self._members):
            self._listen()
            self._find_lost_hosts()
            self._take_hosts_back()
            self._survive()
            self._start_newcomers()
            self._dismiss_newcomers()
            self._handle_requests()
            self._announce_stop()
            self._handle_verdicts()
            self._tell_straggler()
            self._find_those_who_left()
            self._end_survivors()
            self._end_late()
        failures = self._failures
        if failures and all(failure.kind == "peer" for failure in failures):
            # A worker that has ended without an error is missed by the others, and says nothing itself.
            failures = self._those_who_left() + failures
        stopped_by = None if self._run_has_ended() else self._stopped_by
        step = max((member.step for member in self._members), default=0)
        return RunOutcome(failures, stopped_by, step, self._aborted, self._late)

    def _run_has_ended(self) -> bool:
        return all(member.run_ended for member in self._part)

    def _start(self, host: Host, ranks: Sequence[int], num_workers: int) -> None:
        more = {LAUNCHED: "1"} | ({GENERATION: "0"} if self._survival else {})
        for local_rank, rank in enumerate(ranks):
            seat = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": num_workers, "LOCAL_WORLD_SIZE": len(ranks)}
            self._members.append(WorkerRecord(rank, host, {name: str(number) for name, number in seat.items()} | more))
            host.start(rank, self._members[-1].environment)

    def _listen(self) -> None:
        wait([host.fileno() for host in self._hosts], TICK_SECONDS)
        for host in self._hosts:
            for rank, message in host.receive():
                member = self._members[rank]
                if "pid" in message:
                    self._take_event(member, message["pid"], message["status"])
                else:
                    self._take_message(member, message)

    def _find_lost_hosts(self) -> None:
        """Tell the other hosts that the run goes on; give up one that is gone, with its workers."""
        for host in [each for each in self._hosts if isinstance(each, RemoteHost)]:
            host.tick()
            self._requests += host.take_requests()
            fault = host.fault()
            if fault is None:
                continue
            self._hosts.remove(host)
            lost = [member for member in self._members if member.host is host and member.has_process]
            failure = watchdog.lost_host(host.name, fault, [member.status for member in lost])
            for member in lost:
                self._blame(member, failure)
                self._watchdog.forget(member.rank)
                member.state, member.is_awaited = "dead", False

    def _take_hosts_back(self) -> None:
        """Have newcomers forked on hosts that were lost and have come again; all that come hear how the run ends."""
        for gone, host in self._take_hosts():
            self._hosts.append(host)
            ranks = [member.rank for member in self._members if member.host is gone]
            for rank in ranks:
                self._members[rank].host = host
            if self._survival is None or self._stopped_by:
                continue
            why_not = {rank: self._survival.why_not_back(rank) for rank in ranks}
            anew = [rank for rank in ranks if not why_not[rank] and rank not in self._survival.failures]
            self._due |= dict.fromkeys(anew, self._clock())
            lines = [f"host {host.name} has come back{self._started_anew(anew)}", *_not_started_anew(why_not)]
            self._warn("\n".join(lines))

    def _take_message(self, member: WorkerRecord, message: Message) -> None:
        member.is_awaited = False
        if "exit_code" in message:
            self._watchdog.forget(member.rank)
            if not message["exit_code"]:
                member.state = "returned"
        elif not message.keys().isdisjoint(("listens", "unreached")):
            self._send(self._trial.take(member.rank, message) if self._trial else [])
        elif "leaves" in message:
            member.has_left = True
        elif not message.keys().isdisjoint(("ready", "joined", "broken", "dismiss")):
            self._take_word_of_generation(member, message)
        elif "stacks" in message:
            self._warn(f"{member.status} is at:\n{message['stacks'].rstrip()}")
        else:
            member.step, member.phase = message["step"], message["phase"]
            member.run_ended = message.get("ended", False)
            member.saves_at_stop = message.get("saves_at_stop", False)
            if "failed" in message:
                self._blame(member, watchdog.raised(member.status, message["kind"], message["failed"]))
            elif member.state in ("running", "returned"):
                if self._limits.hang_seconds is None and message.get("hang_seconds") is not None:
                    self._watchdog.hang_seconds = message["hang_seconds"]
                self._watchdog.record_beat(
                    member.rank, member.step, member.phase, message["count"], waits=message["waits"]
                )
                self._stragglers.record(member.rank, member.step, message["seconds"])
                if message["stop"] and not self._stopped_by:
                    self._requests.append(message["stop"])

    def _take_word_of_generation(self, member: WorkerRecord, message: Message) -> None:
        if self._survival is None:
            return
        if "ready" in message:
            self._survival.record_ready(member.rank)
            return
        if "dismiss" in message:
            self._takes_newcomers = False
            return
        if "broken" in message:
            self._survival.record_broken(message["broken"], self._clock())
            return
        was_formed = self._survival.is_formed
        for rank in self._survival.record_joined(member.rank, message["joined"]):
            self._hosts[0].log(logging.INFO, f"{self._members[rank].status} takes part from now on")
        if self._survival.is_formed and not was_formed:
            self._stragglers.keep(self._survival.generation.members)
            if self._survival.generation.lost:
                self._warn(f"{len(self._part)} of {len(self._members)} workers go on")

    def _take_event(self, member: WorkerRecord, pid: int, status: int | None) -> None:
        member.pid = pid
        if status is None:
            return
        self._watchdog.forget(member.rank)
        member.is_awaited = False
        if member.state == "returned" or not status:
            member.state = "done"
        else:
            self._blame(member, watchdog.died(member.status, status))
            member.state = "dead"

    def _blame(self, member: WorkerRecord, failure: Failure) -> None:
        if member.state != "running":
            return
        member.state = "failed"
        self._watchdog.forget(member.rank)  # its beats no longer count
        if self._survival and (failure.kind == "lost" or self._survival.is_newcomer(member.rank)):
            self._survival.record_failure(member.rank, failure)
        elif failure not in self._failures:  # that of a host is of all its workers
            self._add(failure)

    def _add(self, failure: Failure) -> None:
        """Record a failure that ends all, and tell the workers: those that another launcher has started show it."""
        if self._survival:
            # Who cannot go on after all raises a lost peer, and is not to blame.
            self._failures += self._survival.latest if failure.kind == "peer" else self._survival.unsettled
            self._survival = None
        self._failures.append(failure)
        self._first_failure = self._first_failure or self._clock()
        for member in self._members:
            if member.state == "running" and failure.kind != "peer":
                member.host.send(member.rank, {"lost": failure.who, "why": failure.text})

    def _survive(self) -> None:
        """Let the others go on without those that are lost, once these are gone, and with newcomers that are ready."""
        survival = self._survival
        if survival is None or any(self._members[rank].has_process for rank in survival.failures):
            return
        step = max(member.step for member in self._part)
        if not survival.failures:
            if generation := survival.reconnected(self._clock(), step):
                self._begin(generation)
                self._warn(generation.why)
            elif self._stopped_by is None and (generation := survival.with_newcomers()):
                self._begin(generation)
            return
        took_part = {rank: not survival.is_newcomer(rank) for rank in survival.failures}
        why = "\n".join(dict.fromkeys(failure.text for failure in survival.failures.values()))
        if why_not := survival.why_not(has_ended=any(member.has_returned for member in self._part)):
            self._survival = None
            for failure in survival.unsettled:
                self._add(replace(failure, text=f"{failure.text}\n{why_not}"))
            return
        if generation := survival.without_lost():
            self._begin(generation)
        self._warn("\n".join([why, *self._replace(survival, took_part)]))

    def _replace(self, survival: Survival, took_part: Mapping[int, bool]) -> list[str]:
        """Have newcomers take the places of the lost; returns what the screen says of who is left."""
        why_not: dict[int, str] = {}
        step = max(member.step for member in self._part)
        for rank in took_part if not self._stopped_by else ():
            if (host := self._members[rank].host) not in self._hosts:
                why_not[rank] = f"its host is lost; give the same command on {host.name} again, and it takes part"
            elif host in self._cut_off:
                why_not[rank] = (
                    f"others do not reach {host.name}; mend the network, then stop the run, and start it again"
                )
            else:
                why_not[rank] = survival.why_not_replaced(rank, step, took_part=took_part[rank])
        anew = [rank for rank, reason in why_not.items() if not reason]
        self._due |= {rank: self._clock() + survival.pause_seconds(rank) for rank in anew}
        left = f"{len(self._part)} of {len(self._members)} workers are left{self._started_anew(anew)}"
        return [left, *_not_started_anew(why_not)]

    def _started_anew(self, ranks: Sequence[int]) -> str:
        """What the screen says of workers that are started anew."""
        seconds = max((self._due[rank] - self._clock() for rank in ranks), default=0.0)
        when = f" in {seconds:.0f} s" if seconds > 0 else ""
        return f"; {_names(ranks)} {'is' if len(ranks) == 1 else 'are'} started anew{when}" if ranks else ""

    def _start_newcomers(self) -> None:
        """Have newcomers forked, each in the place of a worker that is gone, once it is time."""
        if self._survival is None or self._stopped_by:
            self._due.clear()
        for rank in [rank for rank, time_due in self._due.items() if time_due <= self._clock()]:
            host, environment = self._members[rank].host, self._members[rank].environment
            if host in self._hosts:
                del self._due[rank]
                self._members[rank] = WorkerRecord(rank, host, {**environment, GENERATION: NEWCOMER})
                host.start(rank, self._members[rank].environment)
                self._watchdog.watch(rank)
                if self._survival:
                    self._survival.record_started(rank)

    def _dismiss_newcomers(self) -> None:
        is_over = not self._takes_newcomers or any(member.has_returned or member.run_ended for member in self._part)
        if self._survival and is_over:
            self._due.clear()
            for rank in self._survival.dismiss_newcomers():
                self._watchdog.forget(rank)
                self._kill([self._members[rank]])
            self._part = [self._members[rank] for rank in self._survival.generation.members]

    def _begin(self, generation: Generation) -> None:
        self._part = [self._members[rank] for rank in generation.members]
        for member in self._part:
            member.host.send(member.rank, generation.message())
        self._stragglers.keep(generation.members)

    def _handle_requests(self) -> None:
        """Stop the workers at the first signal; abort at a further Ctrl-C."""
        while self._requests:
            request = self._requests.pop(0)
            if self._stopped_by is None:
                self._stopped_by, self._stopped_at = request, self._clock()
                self._saves_at_stop = all(member.saves_at_stop for member in self._part)
                for member in self._members:
                    member.phase_at_stop, member.is_awaited = member.phase, member.has_process
                    member.host.send(member.rank, {"stop": request})
            elif request == "SIGINT":
                self._aborted = not self._run_has_ended()
                self._kill(self._members)

    def _announce_stop(self) -> None:
        """Once every worker has said where it is, log what a stop interrupts; before the first step, end at once."""
        if self._stopped_by is None or self._is_announced:
            return
        if self._clock() - self._stopped_at < STOP_ANSWER_SECONDS and any(
            member.is_awaited for member in self._members
        ):
            return
        self._is_announced = True
        phases = {member.interrupted_phase for member in self._part}
        # The chief saves while others have not begun where a recipe is measured.
        is_early = phases == {"script"} or phases <= {"start", "save"}
        if phases == {"start"} or (is_early and not any(member.step for member in self._part)):
            self._warn(STOPPED_EARLY)
            self._kill(self._members)
        else:
            again = "Ctrl-C again aborts" if self._stopped_by == "SIGINT" else "Ctrl-C aborts"
            what = _what_stops(phases, run_has_ended=self._run_has_ended(), saves=self._saves_at_stop)
            self._warn(f"{what}; {again}")

    def _handle_verdicts(self) -> None:
        """Show the stacks of workers that are silent or stuck, and end those that stay so."""
        verdicts = self._watchdog.poll(self._clock(), lambda rank: self._members[rank].host.is_stopped(rank))
        self._find_partition()
        for verdict in verdicts:
            member = self._members[verdict.rank]
            if verdict.action == "show" and verdict.reason == "stuck" and self._trial:
                self._withheld.append(verdict)
            elif verdict.action == "show":
                self._show(member, verdict)
            else:
                self._blame(member, watchdog.killed(member.status, verdict))
                self._kill([member])

    def _find_partition(self) -> None:
        """Where all have waited in the exchange for long, try whether all hosts reach each other."""
        firsts = {member.host: member.rank for member in reversed(self._part)}
        if self._trial is None:
            is_due = len(firsts) > 1 and not self._failures and self._clock() >= self._next_trial
            if is_due and self._watchdog.is_standstill([member.rank for member in self._part]):
                self._trial = ConnectionTrial(sorted(firsts.values()), self._clock())
                self._send(self._trial.begin())
            return
        if not self._trial.is_over(self._clock()):
            return
        trial, self._trial, self._next_trial = self._trial, None, self._clock() + TRIAL_PAUSE_SECONDS
        self._send(trial.end())
        withheld, self._withheld = self._withheld, []
        if trial.gaps and self._watchdog.is_standstill([member.rank for member in self._part]):
            self._part_from(trial)
            return
        for verdict in withheld:
            self._show(self._members[verdict.rank], verdict)

    def _part_from(self, trial: ConnectionTrial) -> None:
        """Go on without hosts that others do not reach; where nobody goes on, end the run."""
        gaps = trial.gaps
        leaving = left_out(gaps, trial.numbers) if self._survival else []
        for number in leaving or [gaps[0].other]:
            gap = next(gap for gap in gaps if number in (gap.number, gap.other))
            host = self._members[number].host
            first, second = self._members[gap.number].status, self._members[gap.other].status
            failure = watchdog.cut_off(first, second, gap.why, leaves=host.name if leaving else "")
            if not leaving:
                self._add(failure)
                return
            self._cut_off.append(host)
            for member in [each for each in self._members if each.host is host]:
                self._blame(member, failure)
                self._kill([member])

    def _send(self, orders: Orders) -> None:
        for rank, message in orders:
            self._members[rank].host.send(rank, message)

    def _show(self, member: WorkerRecord, verdict: Verdict) -> None:
        status, seconds = member.status, verdict.seconds
        if verdict.reason == "stuck":
            self._warn(f"{status} has been {status.where} for {seconds:.0f} s; its stack follows")
            member.host.send(member.rank, {"show": "stacks"})
        else:  # its thread does not answer: the system's signal makes faulthandler write the stack
            self._warn(f"{status} gives no sign of life for {seconds:.0f} s {status.where}; its stack:")
            member.host.kill(member.rank, signal.SIGUSR2)

    def _tell_straggler(self) -> None:
        """Say from time to time which worker the others wait for."""
        if straggler := self._stragglers.poll(self._clock()):
            self._hosts[0].log(logging.INFO, straggler.describe(str(self._members[straggler.rank].status)))

    def _find_those_who_left(self) -> None:
        """Blame workers that have ended, and so will never make the call in which the others wait for them."""
        has_left = any(member.state == "done" or member.has_left for member in self._members)
        if has_left and not self._failures and self._watchdog.longest_wait() > MISSED_SECONDS:
            for failure in self._those_who_left():
                self._add(failure)

    def _those_who_left(self) -> list[Failure]:
        """What is to blame where some workers have ended without an error, and others need them."""
        ended = [member for member in self._part if member.has_returned or member.has_left]
        return watchdog.left(
            [member.status for member in ended], [member.status for member in self._part if member not in ended]
        )

    def _end_survivors(self) -> None:
        """End the others some time after a failure: till then they may notice it, and close their files.

        The chief, the first of those that take part, may be saving, and gets more time.
        """
        seconds = self._clock() - self._first_failure if self._first_failure else 0.0
        if seconds > self._limits.save_seconds:
            self._kill(self._members)
        elif seconds > self._limits.grace_seconds:
            self._kill(member for member in self._members if member.phase != "save" or member is not self._part[0])

    def _end_late(self) -> None:
        """End workers that do not save in the time that there is: they would be killed from outside without a word."""
        limit = self._limits.stop_seconds
        if self._stopped_by and limit is not None and self._clock() - self._stopped_at > limit:
            self._late |= any(member.state in ("running", "returned") for member in self._members)
            self._kill(self._members)

    def _kill(self, members: Iterable[WorkerRecord]) -> None:
        for member in members:
            if member.state == "running":
                member.state = "failed"  # from here, so nothing is to be blamed for it
            member.host.kill(member.rank, signal.SIGKILL)

    def _warn(self, text: str) -> None:
        """Show a warning on the screens of all hosts."""
        for host in self._hosts:
            host.log(logging.WARNING, text)


def _names(ranks: Iterable[int]) -> str:
    return " and ".join(f"worker {rank}" for rank in ranks)


def _not_started_anew(why_not: Mapping[int, str]) -> list[str]:
    """What the screen says of workers that are not started anew; empty where nothing is against it."""
    reasons = [reason for reason in dict.fromkeys(why_not.values()) if reason]
    return [
        f"nobody takes the place of {_names(rank for rank in why_not if why_not[rank] == reason)}: {reason}"
        for reason in reasons
    ]


def _what_stops(phases: set[str], *, run_has_ended: bool, saves: bool) -> str:
    if run_has_ended:
        return "the run has ended, and its scoring is left off"
    if phases == {"evaluate"}:
        return "stopping: the scoring is left off"
    return "stopping after this step" + (", with a checkpoint" if saves else "")
