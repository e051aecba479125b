"""Survival: who goes on when workers of a run are lost, and who takes their places. It decides; the supervisor acts.

Each change makes a new generation (`lockstep.workers.membership`). Who is lost is left out at once, and the others
find each other anew; a newcomer, who has to load and build first, is taken in between two steps, when it is ready.
"""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.errors import InputError
from lockstep.launcher.watchdog import Failure
from lockstep.workers.limits import RECONNECT_SECONDS
from lockstep.workers.membership import Generation


class Restarts:
    """How often workers start again after some were lost: `most` times without a step beyond the furthest so far."""

    def __init__(self, most: int) -> None:
        self._most, self._furthest = most, 0
        self.count = 0
        """The failures in a row."""

    def may_start(self, step: int) -> bool:
        """Count one more failure, at this step: whether the workers may start again."""
        if step > self._furthest:
            self.count, self._furthest = 0, step
        self.count += 1
        return self.count <= self._most

    @property
    def pause_seconds(self) -> float:
        """Before the next start: 1, 2, 4 seconds and so on, up to a minute."""
        return float(min(2 ** (self.count - 1), 60))

    def __str__(self) -> str:
        return f"in {self.pause_seconds:.0f} s (restart {self.count} of {self._most} without progress)"


class Survival:
    """The generations of a run that begins with `num_workers`, and does not go on with fewer than `min_workers`.

    Each worker is started anew `replacements` times in a row, without progress of the run in which it took part.

    Raises:
        InputError: there are fewer workers than are to be left.
    """

    def __init__(self, min_workers: int, replacements: int, num_workers: int) -> None:
        if min_workers > num_workers:
            raise InputError(
                "The run begins with fewer workers than are to be left of it.",
                given=f"{num_workers} workers, of which at least {min_workers} are to go on (watch.min_workers)",
                expected=f"at most {num_workers}",
                hint="start more workers, or lower watch.min_workers (--min-workers of lockstep run)",
            )
        self._min_workers, self._num_workers = min_workers, num_workers
        self.generation = Generation(0, tuple(range(num_workers)))
        """The newest."""
        self.failures: dict[int, Failure] = {}
        """The failures that the others have not been told of, by worker."""
        self._announced: list[Failure] = []
        """Failures of which the others have been told, and have not found each other since."""
        self._latest: list[Failure] = []
        self._joined = dict.fromkeys(range(num_workers), 0)
        """The newest generation that each worker is known to be in; a newcomer is in none."""
        self._newcomers: dict[int, bool] = {}
        """Workers that were started anew and are in no generation, and whether each is ready to join."""
        self._arriving: list[int] = []
        """Newcomers of the newest generation, while its members have not found each other."""
        self._broken_at: float | None = None
        """When one of them has first said that a connection has broken, without a word of who is lost."""
        self._reconnections = Restarts(replacements)
        self._replacements = replacements
        self._restarts = {number: Restarts(replacements) for number in range(num_workers)}
        self._run_has_ended = False
        """Another one of the same script may follow; a newcomer, which begins with the script, would not be in it."""

    def record_failure(self, number: int, failure: Failure) -> None:
        """Record that a worker is lost, or a newcomer has failed."""
        self.failures[number] = failure
        self._newcomers.pop(number, None)

    def is_newcomer(self, number: int) -> bool:
        """Whether a worker was started anew, and is not known to take part yet."""
        return number not in self._joined

    @property
    def latest(self) -> list[Failure]:
        """The failures that led to the newest generation, found or not, and those that are still to be told."""
        return list(dict.fromkeys([*self._latest, *self.failures.values()]))

    @property
    def unsettled(self) -> list[Failure]:
        """The failures after which the others have not found each other, in the order in which they were noticed."""
        return list(dict.fromkeys([*self._announced, *self.failures.values()]))

    def why_not(self, *, has_ended: bool) -> str:
        """Why the others do not go on without those that are lost; empty where they do.

        Where some have come to their end, those cannot find the others anew.
        """
        if not any(number in self.generation.members for number in self.failures):
            return ""
        if has_ended:
            return "the others cannot go on without it: some of them have come to their end"
        left = sum(number not in self.failures and number in self._joined for number in self.generation.members)
        if left >= self._min_workers:
            return ""
        return f"{left} of {self._num_workers} workers are left, fewer than {self._min_workers} (watch.min_workers)"

    def without_lost(self) -> Generation | None:
        """Begin the generation without those that are lost, and with newcomers that are ready.

        None where only newcomers are lost that are in no generation.
        """
        lost = [number for number in self.failures if number in self.generation.members]
        failures = list(dict.fromkeys(self.failures[number] for number in lost))
        for number in self.failures:
            self._joined.pop(number, None)
        self._arriving = [number for number in self._arriving if number not in lost]
        self.failures.clear()
        if not lost:
            return None
        self._announced += failures
        members = [number for number in self.generation.members if number not in lost]
        members.sort(key=self.is_newcomer)  # one of several that arrive may be known to be in, and the others not
        who, why = " and ".join(each.who for each in failures), "\n".join(each.text for each in failures)
        return self._begin(members, who, why)

    def with_newcomers(self) -> Generation | None:
        """Begin the generation with newcomers, once all of them are ready and the others have found each other."""
        if not self._newcomers or not all(self._newcomers.values()) or not self.is_formed:
            return None
        return self._begin(self.generation.members)

    def record_broken(self, generation: int, now: float) -> None:
        """Record that a member of a generation waits for the next one, as a connection has broken."""
        if generation == self.generation.number and self._broken_at is None:
            self._broken_at = now

    def reconnected(self, now: float, step: int) -> Generation | None:
        """Begin a generation of the same members, once it is clear that a connection has broken, and nobody is lost."""
        if self._broken_at is None or now - self._broken_at < RECONNECT_SECONDS:
            return None
        self._broken_at = None
        if not self._reconnections.may_start(step):
            return None  # they end by themselves
        why = "a connection between workers has broken, though all of them live"
        return self._begin(self.generation.members, "a connection", why)

    def _begin(self, members: Iterable[int], lost: str = "", why: str = "") -> Generation:
        ready = sorted(number for number, is_ready in self._newcomers.items() if is_ready)
        self._latest = self._announced.copy()
        self._arriving += ready
        self._broken_at = None
        for number in ready:
            del self._newcomers[number]
        self.generation = Generation(self.generation.number + 1, (*members, *ready), lost, why)
        return self.generation

    @property
    def is_formed(self) -> bool:
        """Whether all members of the newest generation have found each other."""
        return all(self._joined.get(number, -1) == self.generation.number for number in self.generation.members)

    def why_not_replaced(self, number: int, step: int, *, took_part: bool) -> str:
        """Why nobody takes the place of a lost worker any more; empty where it is started anew.

        To be asked once for each failure, with the step of the run.
        """
        if self._run_has_ended:
            return "its run has ended"
        if self._restarts[number].may_start(step if took_part else 0):
            return ""
        return (
            f"watch.restarts (--restarts) allows {self._replacements} starts in a row without progress; mend what has "
            "ended it, then stop the run, and start it again: it goes on with all workers"
        )

    def pause_seconds(self, number: int) -> float:
        """Before a lost worker is started anew: none at first, then as long as between restarts of all."""
        restarts = self._restarts[number]
        return restarts.pause_seconds if restarts.count > 1 else 0.0

    def why_not_back(self, number: int) -> str:
        """Why a worker is not started on its host, which was lost and has come back; empty where it is."""
        self._restarts[number] = Restarts(self._replacements)  # who has started the host again has mended it
        return "its run has ended" if self._run_has_ended else ""

    def record_started(self, number: int) -> None:
        """Record that a process was started in the place of a lost worker."""
        self._newcomers[number] = False

    def record_ready(self, number: int) -> None:
        """Record that a newcomer has built all that it needs to take part."""
        if number in self._newcomers:
            self._newcomers[number] = True

    def record_joined(self, number: int, generation: int) -> list[int]:
        """Record that a worker is in a generation; returns the newcomers in it with the last of its members."""
        self._joined[number] = generation
        if not self.is_formed:
            return []
        self._announced.clear()
        arrived, self._arriving = self._arriving, []
        return arrived

    def dismiss_newcomers(self) -> list[int]:
        """Take in no more newcomers: the run ends without those that are returned."""
        self._run_has_ended = True
        inside = [number for number in self.generation.members if self.is_newcomer(number)]
        members = tuple(number for number in self.generation.members if number not in inside)
        self.generation = self.generation._replace(members=members)
        dismissed = [*self._newcomers, *inside]
        self._newcomers.clear()
        return dismissed
