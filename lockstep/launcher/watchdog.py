"""The watchdog: which workers are silent or stuck, and what failed first, as values and pure functions.

How long a worker may be so is in `lockstep.workers.limits`, by how much longer in some phases, here.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.workers.limits import HANG_SECONDS, LONGEST_POLL_SECONDS, Limits

_LONG = 6.0
_PHASE_FACTORS = {
    "start": _LONG,
    "script": _LONG,
    "first step": _LONG,  # it may compile, and look for the fastest kernels
    "data": 1.5,  # the loader reports first: it can say more
    "loop body": _LONG,
    "save": _LONG,
    "evaluate": _LONG,
    "end": _LONG,
}
"""Factor by which the limits are longer in phases that take long."""
_HANG_FACTORS = _PHASE_FACTORS | {"loop body": 1.0}
"""The same for standing still. Code of a loop body may hold the interpreter for minutes, and then advance."""


@dataclass(frozen=True)
class Verdict:
    """The decision on a worker that is stopped, silent (it sends no beats) or stuck (its beats say the same)."""

    rank: int
    action: Literal["show", "kill"]
    reason: Literal["stopped", "silent", "stuck"]
    seconds: float
    limit_seconds: float = 0.0
    """For standing still, in this phase; 0 for none."""


@dataclass
class _Record:
    """The watchdog's record of one worker; times in seconds of its own clock."""

    last_beat: float
    since: float
    """When the worker came to this place."""
    step: int = 0
    phase: str = "start"
    count: int = 0
    waits: bool = False
    waits_since: float = 0.0
    shown: bool = False


class Watchdog:
    """Decides which workers have been silent or stuck for too long, on a clock of its own. Knows no processes."""

    def __init__(self, num_workers: int, limits: Limits, now: float) -> None:
        self.limits = limits
        self.hang_seconds = HANG_SECONDS if limits.hang_seconds is None else limits.hang_seconds
        """As in the limits, which may leave it to the workers."""
        self._clock, self._polled = 0.0, now
        self._workers = {rank: _Record(last_beat=0.0, since=0.0) for rank in range(num_workers)}
        self._longest: dict[str, float] = {}
        """The longest stay so far, by phase."""

    def record_beat(self, rank: int, step: int, phase: str, count: int, *, waits: bool = False) -> None:
        """Record where a worker is; `count` grows with each place that it reports, though it be the same one."""
        worker = self._workers.get(rank)
        if worker is None:
            return
        if (worker.step, worker.phase, worker.count) == (step, phase, count):
            worker.last_beat = self._clock
            if waits and not worker.waits:
                worker.waits_since = self._clock
            worker.waits = waits
            return
        if worker.phase != "script":
            self._longest[worker.phase] = max(self._longest.get(worker.phase, 0.0), self._clock - worker.since)
        self._workers[rank] = _Record(self._clock, self._clock, step, phase, count, waits, self._clock)

    def watch(self, rank: int) -> None:
        """Watch a worker that has been started in the place of one that was forgotten."""
        self._workers[rank] = _Record(self._clock, self._clock)

    def forget(self, rank: int) -> None:
        """Watch a worker no longer: it has ended."""
        self._workers.pop(rank, None)

    def longest_wait(self) -> float:
        """Seconds for which a worker has waited for all others in one call."""
        return max((self._clock - each.waits_since for each in self._workers.values() if each.waits), default=0.0)

    def is_standstill(self, ranks: Collection[int]) -> bool:
        """Whether all of these have waited in the exchange for so long that their stacks would be shown."""
        workers = [self._workers[rank] for rank in ranks if rank in self._workers]
        if len(workers) < len(ranks) or any(not each.waits or each.phase != "exchange" for each in workers):
            return False
        show_seconds = min(self.limits.show_seconds, self.hang_seconds / 2 or self.limits.show_seconds)
        return self._clock - max(each.waits_since for each in workers) > show_seconds - LONGEST_POLL_SECONDS

    def poll(self, now: float, is_stopped: Callable[[int], bool]) -> list[Verdict]:
        """Decide what to do now; a worker is killed once, and its stack is shown once while it stands still."""
        self._clock += min(now - self._polled, LONGEST_POLL_SECONDS)
        self._polled = now
        self._excuse_waiting()
        verdicts = [self._judge(rank, worker, is_stopped) for rank, worker in self._workers.items()]
        for verdict in filter(None, verdicts):
            if verdict.action == "kill":
                self.forget(verdict.rank)
            else:
                self._workers[verdict.rank].shown = True
        return [verdict for verdict in verdicts if verdict]

    def _excuse_waiting(self) -> None:
        """Reset the time of workers that wait for all others: only those waited for may be stuck."""
        waiting = [worker for worker in self._workers.values() if worker.waits]
        if len(waiting) < len(self._workers):
            for worker in waiting:
                worker.since = self._clock

    def _judge(self, rank: int, worker: _Record, is_stopped: Callable[[int], bool]) -> Verdict | None:
        limits = self.limits
        factor = _PHASE_FACTORS.get(worker.phase, 1.0)
        silent, still = self._clock - worker.last_beat, self._clock - worker.since
        if worker.phase == "script":  # the script's own code may take its time, until others wait for this worker
            still = min(still, self.longest_wait())
        hang_seconds = self._hang_seconds(worker.phase)
        show_still = min(limits.show_seconds * factor, hang_seconds / 2 or float("inf"))
        show_still = max(show_still, limits.usual_factor * self._longest.get(worker.phase, 0.0))
        if silent >= limits.stopped_seconds and is_stopped(rank):
            return Verdict(rank, "kill", "stopped", silent)
        if silent >= limits.silent_seconds * factor:
            return Verdict(rank, "kill", "silent", silent)
        if worker.shown and hang_seconds and still >= hang_seconds:
            return Verdict(rank, "kill", "stuck", still, hang_seconds)
        if worker.shown:
            return None
        if silent >= limits.show_seconds * factor:
            return Verdict(rank, "show", "silent", silent)
        if still >= show_still and silent < limits.stopped_seconds:  # else its silence says more
            return Verdict(rank, "show", "stuck", still, hang_seconds)
        return None

    def _hang_seconds(self, phase: str) -> float:
        """How long a worker may stay at one place of a phase; 0 for ever."""
        return self.limits.regroup_seconds if phase == "regroup" else self.hang_seconds * _HANG_FACTORS.get(phase, 1.0)


@dataclass(frozen=True)
class WorkerStatus:
    """A worker, and where it was when it was last heard of."""

    rank: int
    pid: int
    step: int
    phase: str
    host: str = ""
    """Its name, where the run has several."""

    def __str__(self) -> str:
        on_host = f" on {self.host}" if self.host else ""
        return f"worker {self.rank} (pid {self.pid}{on_host})"

    @property
    def name(self) -> str:
        """Its name in messages: "worker 1", or "worker 1 on host2"."""
        return f"worker {self.rank}" + (f" on {self.host}" if self.host else "")

    @property
    def where(self) -> str:
        """The place in the run, in words."""
        return f"at step {self.step} (phase {self.phase})"


FailureKind = Literal["error", "input", "peer", "lost"]


@dataclass(frozen=True)
class Failure:
    """Something that ends the run."""

    text: str
    kind: FailureKind = "error"
    """`input`: the user gave what cannot be used; `peer`: a worker misses another one, so this is never the cause;
    `lost`: the worker's process or host is gone, and it need not be by the fault of what it ran."""
    who: str = "another worker"
    """The name of the worker or host that the others lose by it."""


def raised(worker: WorkerStatus, kind: FailureKind, text: str) -> Failure:
    """The failure of a worker whose main function has raised; wrong input may be so on its host alone."""
    if kind == "input":
        return Failure(text.rstrip() + (f"\n  said by:  {worker.name}" if worker.host else ""), kind, worker.name)
    return Failure(f"{worker.name} failed {worker.where}:\n{text.rstrip()}", kind, worker.name)


def died(worker: WorkerStatus, exit_status: int) -> Failure:
    """The failure of a worker that has ended without a word."""
    if exit_status >= 0:
        return Failure(f"{worker} ended with exit code {exit_status} {worker.where}", who=worker.name)
    name = signal.Signals(-exit_status).name
    return Failure(f"{worker} was killed by {name} {worker.where}", "lost", worker.name)


def killed(worker: WorkerStatus, verdict: Verdict) -> Failure:
    """The failure of a worker that was killed because it was stopped, silent or stuck."""
    if verdict.reason == "stuck":
        limit = f"{verdict.limit_seconds:g} s"
        if worker.phase == "regroup":
            hint = f"Those that go on have {limit} to find each other"
        else:
            factor = _HANG_FACTORS.get(worker.phase, 1.0)
            times = "" if factor == 1 else f", {factor:g} times watch.hang_seconds"
            hint = (
                f"The limit in this phase is {limit}{times}: where it may take longer, raise watch.hang_seconds in the"
                " recipe, or --hang-seconds of lockstep run (0: no limit)"
            )
        text = f"{worker} has been {worker.where} for {verdict.seconds:.0f} s, and was killed; its stack is shown above"
        return Failure(f"{text}. {hint}", "lost", worker.name)
    why = "was stopped (SIGSTOP)" if verdict.reason == "stopped" else "gave no sign of life"
    return Failure(f"{worker} {why} for {verdict.seconds:.1f} s {worker.where}, and was killed", "lost", worker.name)


def left(ended: Sequence[WorkerStatus], waiting: Sequence[WorkerStatus]) -> list[Failure]:
    """The failures of workers that have ended without an error while others wait for them, or of those few others."""
    same = "not end at the same step (until, or where a loop is left)"
    if len(ended) > len(waiting) > 0:
        names = " and ".join(worker.name for worker in ended)
        why = f"where {names} have ended with exit code 0: its loop does {same}"
        return [Failure(f"{worker} goes on {worker.where}, {why}", who=worker.name) for worker in waiting]
    needed = " and ".join(f"{worker.name} {worker.where}" for worker in waiting)
    why = f"before {needed}, which {'needs' if len(waiting) == 1 else 'need'} it: their loops do {same}"
    return [Failure(f"{worker} ended with exit code 0 {worker.where}, {why}", who=worker.name) for worker in ended]


def cut_off(worker: WorkerStatus, other: WorkerStatus, why: str, *, leaves: str) -> Failure:
    """The failure of a worker that another one does not reach; those that are left go on without the host `leaves`."""
    text = f"{worker.name} does not reach {other.name}, though both reach the launcher of host 0: {why}"
    if leaves:
        who = worker if worker.host == leaves else other
        return Failure(f"{text}. Host {leaves} is left out of the run", "lost", who.name)
    return Failure(f"{text}. Let no firewall stand between the hosts, at any port", who=other.name)


def lost_host(name: str, fault: str, workers: Sequence[WorkerStatus]) -> Failure:
    """The failure of a host that is gone, with its workers."""
    places = ", ".join(f"worker {worker.rank} {worker.where}" for worker in workers)
    return Failure(f"host {name} {fault}; lost with it: {places}", "lost", f"host {name}")


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure to show, of all as they were noticed: a lost peer only where there is nothing else."""
    return next((failure for failure in failures if failure.kind != "peer"), failures[0])
