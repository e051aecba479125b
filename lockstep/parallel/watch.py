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
    """How much silence a worker may keep, and how long the others may live when one has failed."""

    stopped_seconds: float = 2.0
    """Silent, and the system says that the process is stopped."""
    dump_seconds: float = 10.0
    """Silent but running: its stack is shown."""
    kill_seconds: float = 60.0
    """Silent but running: it is killed."""
    start_factor: float = 10.0
    """By how much a running worker may be silent for longer in phase `start`."""
    grace_seconds: float = 1.0
    """For the others to end by themselves when one has failed."""
    stop_seconds: float | None = None
    """For all of them to save and end when a signal has asked for it; None: as long as it takes."""


@dataclass(frozen=True)
class Verdict:
    """What is to be done about a silent worker."""

    rank: int
    action: Literal["dump", "kill"]
    silent_seconds: float
    stopped: bool


@dataclass
class _Listening:
    heard: float
    phase: str = "start"
    dumped: bool = False


class Watch:
    """Decides who has been silent for too long, on a clock of its own. Knows nothing of processes."""

    def __init__(self, num_workers: int, limits: Limits, now: float) -> None:
        self._limits = limits
        self._clock, self._looked = 0.0, now
        self._workers = {rank: _Listening(heard=0.0) for rank in range(num_workers)}

    def heard(self, rank: int, phase: str) -> None:
        """A worker has given a sign of life."""
        self._workers[rank] = _Listening(self._clock, phase)

    def forget(self, rank: int) -> None:
        """A worker has ended."""
        self._workers.pop(rank, None)

    def look(self, now: float, is_stopped: Callable[[int], bool]) -> list[Verdict]:
        """What to do at this moment; a worker is to be killed, or dumped, once."""
        self._clock += min(now - self._looked, _LONGEST_LOOK_SECONDS)
        self._looked = now
        verdicts = [self._judge(rank, worker, is_stopped) for rank, worker in self._workers.items()]
        for verdict in filter(None, verdicts):
            if verdict.action == "kill":
                self.forget(verdict.rank)
            else:
                self._workers[verdict.rank].dumped = True
        return [verdict for verdict in verdicts if verdict]

    def _judge(self, rank: int, worker: _Listening, is_stopped: Callable[[int], bool]) -> Verdict | None:
        limits = self._limits
        silent = self._clock - worker.heard
        factor = limits.start_factor if worker.phase == "start" else 1.0
        if silent >= limits.stopped_seconds and is_stopped(rank):
            return Verdict(rank, "kill", silent, stopped=True)
        if silent >= limits.kill_seconds * factor:
            return Verdict(rank, "kill", silent, stopped=False)
        if silent >= limits.dump_seconds * factor and not worker.dumped:
            return Verdict(rank, "dump", silent, stopped=False)
        return None


@dataclass(frozen=True)
class Place:
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
class Trouble:
    """Something that ends the run."""

    text: str
    kind: FailureKind = "error"
    """`input`: what was given cannot be used; `peer`: seen from a worker, another one is gone, so never the cause."""


def failed(place: Place, kind: FailureKind, text: str) -> Trouble:
    """A worker's main function has raised."""
    return Trouble(f"worker {place.rank} failed {place.where}:\n{text.rstrip()}", kind)


def died(place: Place, status: int) -> Trouble:
    """A worker has ended without a word."""
    if status >= 0:
        return Trouble(f"{place} ended with exit code {status} {place.where}")
    return Trouble(f"{place} was killed by {signal.Signals(-status).name} {place.where}")


def silenced(place: Place, verdict: Verdict) -> Trouble:
    """A worker was killed because it was silent."""
    why = "was stopped (SIGSTOP)" if verdict.stopped else "gave no sign of life"
    return Trouble(f"{place} {why} for {verdict.silent_seconds:.1f} s {place.where}, and was killed")


def cause(troubles: Sequence[Trouble]) -> Trouble:
    """The one to show, of all that were noticed, in order: what survivors say of a lost peer only if nothing else."""
    return next((trouble for trouble in troubles if trouble.kind != "peer"), troubles[0])
