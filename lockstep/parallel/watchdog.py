"""Who is silent, and who is to blame: the launcher's decisions, as values and pure functions."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

# A launcher that was itself paused, together with its workers, looks again much later than it meant to. That time is
# nobody's silence: no more than this is counted between two looks.
_LONGEST_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Limits:
    """How long a worker may be silent or stand still, and how long the others may live when one has failed."""

    stopped_seconds: float = 2.0
    """Silent, and the system says that the process is stopped."""
    show_seconds: float = 10.0
    """Silent, or at the same place: its stack is shown."""
    silent_seconds: float = 60.0
    """Silent but running: it is killed."""
    hang_seconds: float = 600.0
    """At the same place, after its stack was shown: it is killed; 0 for never."""
    usual_factor: float = 10.0
    """The stack of a worker at the same place is not shown before so many times the longest such phase so far."""
    grace_seconds: float = 1.0
    """For the others to end by themselves when one has failed."""
    stop_seconds: float | None = None
    """For all of them to save and end when a signal has asked for it; None: as long as it takes."""


_LONG = 6.0
_PHASE_FACTORS = {
    "start": _LONG,
    "script": _LONG,
    "first step": _LONG,  # it may compile, and look for the fastest kernels
    "data": 1.5,  # the loader can say more of it, and is to be first
    "loop body": _LONG,
    "save": _LONG,
    "evaluate": _LONG,
    "end": _LONG,
}
"""By how much the limits are longer in phases that take long."""


@dataclass(frozen=True)
class Verdict:
    """What is to be done about a worker that is stopped, silent (it sends no beats) or stuck (they say the same)."""

    rank: int
    action: Literal["show", "kill"]
    reason: Literal["stopped", "silent", "stuck"]
    seconds: float


@dataclass
class _Seen:
    """What is known of one worker, in seconds of the watch's clock."""

    heard: float
    since: float
    """It has been at this place since then."""
    step: int = 0
    phase: str = "start"
    count: int = 0
    waits: bool = False
    waits_since: float = 0.0
    shown: bool = False


class Watchdog:
    """Decides who has been silent or stuck for too long, on a clock of its own. Knows nothing of processes."""

    def __init__(self, num_workers: int, limits: Limits, now: float) -> None:
        self._limits = limits
        self._clock, self._looked = 0.0, now
        self._workers = {rank: _Seen(heard=0.0, since=0.0) for rank in range(num_workers)}
        self._longest: dict[str, float] = {}
        """The longest stay so far, by phase."""

    def heard(self, rank: int, step: int, phase: str, count: int, *, waits: bool = False) -> None:
        """A worker has told where it is; the count grows with each place that it tells, though it be the same."""
        worker = self._workers.get(rank)
        if worker is None:
            return
        if (worker.step, worker.phase, worker.count) == (step, phase, count):
            worker.heard = self._clock
            if waits and not worker.waits:
                worker.waits_since = self._clock
            worker.waits = waits
            return
        if worker.phase != "script":
            self._longest[worker.phase] = max(self._longest.get(worker.phase, 0.0), self._clock - worker.since)
        self._workers[rank] = _Seen(self._clock, self._clock, step, phase, count, waits, self._clock)

    def forget(self, rank: int) -> None:
        """A worker has ended."""
        self._workers.pop(rank, None)

    def longest_wait(self) -> float:
        """Seconds for which a worker has waited for all others in one call."""
        return max((self._clock - each.waits_since for each in self._workers.values() if each.waits), default=0.0)

    def look(self, now: float, is_stopped: Callable[[int], bool]) -> list[Verdict]:
        """What to do at this moment; a worker is killed once, and its stack is shown once while it stands still."""
        self._clock += min(now - self._looked, _LONGEST_LOOK_SECONDS)
        self._looked = now
        self._excuse_those_that_wait()
        verdicts = [self._judge(rank, worker, is_stopped) for rank, worker in self._workers.items()]
        for verdict in filter(None, verdicts):
            if verdict.action == "kill":
                self.forget(verdict.rank)
            else:
                self._workers[verdict.rank].shown = True
        return [verdict for verdict in verdicts if verdict]

    def _excuse_those_that_wait(self) -> None:
        """Who waits for all others waits for those that do not: these alone may be stuck."""
        waiting = [worker for worker in self._workers.values() if worker.waits]
        if len(waiting) < len(self._workers):
            for worker in waiting:
                worker.since = self._clock

    def _judge(self, rank: int, worker: _Seen, is_stopped: Callable[[int], bool]) -> Verdict | None:
        limits = self._limits
        factor = _PHASE_FACTORS.get(worker.phase, 1.0)
        silent, still = self._clock - worker.heard, self._clock - worker.since
        if worker.phase == "script":  # What its own code does there is its affair, until others wait for it.
            still = min(still, self.longest_wait())
        show_still = max(limits.show_seconds * factor, limits.usual_factor * self._longest.get(worker.phase, 0.0))
        if silent >= limits.stopped_seconds and is_stopped(rank):
            return Verdict(rank, "kill", "stopped", silent)
        if silent >= limits.silent_seconds * factor:
            return Verdict(rank, "kill", "silent", silent)
        if worker.shown and limits.hang_seconds and still >= limits.hang_seconds * factor:
            return Verdict(rank, "kill", "stuck", still)
        if worker.shown:
            return None
        if silent >= limits.show_seconds * factor:
            return Verdict(rank, "show", "silent", silent)
        if still >= show_still and silent < limits.stopped_seconds:  # else its silence says more
            return Verdict(rank, "show", "stuck", still)
        return None


@dataclass(frozen=True)
class WorkerStatus:
    """A worker, and where it was when it was last heard of."""

    rank: int
    pid: int
    step: int
    phase: str

    def __str__(self) -> str:
        return f"worker {self.rank} (pid {self.pid})"

    @property
    def where(self) -> str:
        """The place in the run, in words."""
        return f"at step {self.step} (phase {self.phase})"


FailureKind = Literal["error", "input", "peer"]


@dataclass(frozen=True)
class Failure:
    """Something that ends the run."""

    text: str
    kind: FailureKind = "error"
    """`input`: what was given cannot be used; `peer`: seen from a worker, another one is gone, so never the cause."""


def failed(place: WorkerStatus, kind: FailureKind, text: str) -> Failure:
    """A worker's main function has raised."""
    return Failure(f"worker {place.rank} failed {place.where}:\n{text.rstrip()}", kind)


def died(place: WorkerStatus, status: int) -> Failure:
    """A worker has ended without a word."""
    if status >= 0:
        return Failure(f"{place} ended with exit code {status} {place.where}")
    return Failure(f"{place} was killed by {signal.Signals(-status).name} {place.where}")


def killed(place: WorkerStatus, verdict: Verdict) -> Failure:
    """A worker was killed because it was stopped, silent or stuck."""
    if verdict.reason == "stuck":
        return Failure(
            f"{place} has been {place.where} for {verdict.seconds:.0f} s, and was killed; its stack is shown above."
            " Where this may take so long, raise watch.hang_seconds in the recipe, or --hang-seconds (0: no limit)"
        )
    why = "was stopped (SIGSTOP)" if verdict.reason == "stopped" else "gave no sign of life"
    return Failure(f"{place} {why} for {verdict.seconds:.1f} s {place.where}, and was killed")


def missed(place: WorkerStatus) -> Failure:
    """A worker has ended without an error, and the others wait for it."""
    return Failure(f"{place} ended with exit code 0 {place.where}, before the others, which needed it")


def cause(failures: Sequence[Failure]) -> Failure:
    """The one to show, of all that were noticed, in order: what survivors say of a lost peer only if nothing else."""
    return next((failure for failure in failures if failure.kind != "peer"), failures[0])
