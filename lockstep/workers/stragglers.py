"""Stragglers: which worker the others wait for, in which phase, and what it costs them; pure functions of their times.

All workers end each step together, so the slowest sets the pace, and the others spend in the exchange the time that it
takes longer. Each pulse counts the seconds of its worker by phase. What counts is time spent before the exchange.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

_PHASES = {"data": "input", "compute": "compute", "loop body": "the loop body", "save": "checkpoints"}
"""The phases in which a worker is busy by itself, in the words of messages."""
_LEAST_SHARE = 0.1
LEAST_SECONDS = 10.0
"""Least time by which a worker is called slow: in less, who is the slowest is chance."""
_FIRST_SECONDS, _LONGEST_SECONDS = 60.0, 3600.0

Seconds = Mapping[str, float]
"""Seconds of each phase, since the worker began."""


@dataclass(frozen=True)
class Straggler:
    """The slowest of the workers, in some time."""

    rank: int
    phase: str
    """The phase in which it takes the longest beside the others, in words."""
    step_seconds: float
    """Seconds of this phase, a step."""
    usual_seconds: float
    """The same of the others: their median."""
    share: float
    """Share of the time for which the others wait for this worker."""

    def describe(self, name: str) -> str:
        """Say so in a line; `name` is the worker's."""
        return (
            f"{name} is the slowest: {self.phase} takes it {self.step_seconds:.3f} s a step, and the others "
            f"{self.usual_seconds:.3f} s; they wait for it {self.share:.0%} of the time"
        )


def find_straggler(of_workers: Sequence[Seconds], num_steps: int) -> Straggler | None:
    """Find the worker for which the others wait a tenth of the time in which `num_steps` were made, or more.

    A worker that computes nothing, as a chief that serves the others, is not one of them.
    """
    busy = {
        rank: sum(seconds.get(phase, 0.0) for phase in _PHASES)
        for rank, seconds in enumerate(of_workers)
        if seconds.get("data", 0.0) + seconds.get("compute", 0.0)
    }
    if len(busy) < 2 or not num_steps:
        return None
    rank = max(busy, key=lambda each: busy[each])
    slowest, others = of_workers[rank], [of_workers[other] for other in busy if other != rank]
    total = busy[rank] + slowest.get("exchange", 0.0)
    share = (busy[rank] - median(busy[other] for other in busy if other != rank)) / max(total, 1e-9)
    if share < _LEAST_SHARE or total < LEAST_SECONDS:
        return None
    usual = {phase: median(each.get(phase, 0.0) for each in others) for phase in _PHASES}
    phase = max(usual, key=lambda name: slowest.get(name, 0.0) - usual[name])
    own = slowest.get(phase, 0.0)
    return Straggler(rank, _PHASES[phase], own / num_steps, usual[phase] / num_steps, share)


class Stragglers:
    """Looks from time to time who is the slowest: after a minute, then each time twice as long after, up to an hour."""

    def __init__(self, now: float) -> None:
        self._due, self._pause = now + _FIRST_SECONDS, _FIRST_SECONDS
        self._latest: dict[int, tuple[int, Seconds]] = {}
        self._before: dict[int, tuple[int, Seconds]] = {}

    def record(self, rank: int, step: int, seconds: Seconds) -> None:
        """Record the step that a worker is at, and its seconds so far."""
        self._latest[rank] = step, seconds

    def keep(self, ranks: Collection[int]) -> None:
        """Forget all workers but these, which are compared from now on."""
        self._before = {rank: latest for rank, latest in self._latest.items() if rank in ranks}
        self._latest = {}

    def poll(self, now: float) -> Straggler | None:
        """Find the straggler since the last look, if it is time for one."""
        if now < self._due:
            return None
        self._pause = min(2 * self._pause, _LONGEST_SECONDS)
        self._due = now + self._pause
        before, self._before = self._before, dict(self._latest)
        ranks = sorted(self._latest)
        none: tuple[int, Seconds] = 0, {}
        num_steps = min((self._latest[rank][0] - before.get(rank, none)[0] for rank in ranks), default=0)
        found = [spent_since(before.get(rank, none)[1], self._latest[rank][1]) for rank in ranks]
        straggler = find_straggler(found, num_steps) if num_steps > 0 else None
        return straggler and replace(straggler, rank=ranks[straggler.rank])


def spent_since(before: Seconds, now: Seconds) -> dict[str, float]:
    """The seconds by phase between two moments."""
    return {phase: seconds - before.get(phase, 0.0) for phase, seconds in now.items()}
