"""The other workers where no launcher of ours watches them: who still lives, and who has left, and why.

Each worker beats: a thread counts up a key of its own in the store, with its step and phase. It looks at the beats of
one other worker, so that the cost does not grow with their number, and tells all of them who is silent; a worker that
fails tells them why. This ends their waiting for it. A timeout of torch.distributed could not: it does not know a dead
worker from one that compiles for minutes.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lockstep.errors import PeerLostError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from lockstep.workers.pulse import Pulse

# What torch.distributed says in a worker when another one is gone; it names no worker.
_SAID_OF_LOST_PEERS = (
    "connection closed by peer",
    "connection closed by remote peer",
    "connection reset by peer",
    "broken pipe",
    "timed out waiting",
    "application timeout caused pair closure",
    "ncclremoteerror",
)
_BRISK_PHASES = ("data", "compute", "exchange")
_LONGEST_LOOK_SECONDS = 1.0
"""Counted between two looks at most: a process that was itself paused looks much later than it meant to."""


def says_peer_is_lost(text: str) -> bool:
    """Whether what torch.distributed says means that another worker, or the way to it, is gone."""
    return any(said in text.lower() for said in _SAID_OF_LOST_PEERS)


@dataclass(frozen=True)
class PeerLimits:
    """When a worker counts as lost."""

    beat_seconds: float = 0.5
    silent_seconds: float = 30.0
    """Without a beat. A thread beats: only what keeps Python from running delays it, such as a library that loads, or a
    file that does not come."""
    slow_factor: float = 2.0
    """By how much longer in the phases in which libraries load and kernels are compiled."""
    suspect_seconds: float = 2.0
    """Without a beat, once a connection has broken."""
    join_seconds: float = 120.0
    """Until its first beat."""
    leave_seconds: float = 30.0
    """That the worker which holds the store waits at its end for the others to end, too."""
    ended_seconds: float = 5.0
    """That others go on waiting for a worker which has ended in peace: its last sums may be on their way."""


class Departure(NamedTuple):
    """What has become of workers that are gone."""

    who: str
    why: str
    in_peace: bool = False
    """Ended without an error; nothing is wrong unless others wait for it."""


class Peers:
    """The other workers, as this one hears of them through the store.

    Args:
        store: where they meet; torch's stores have a lock each, so the thread takes a clone.
        rank: of this worker.
        num_workers: at least 2.
        pulse: of this worker: its step and phase go with each beat.
        limits: when a worker counts as lost.
        store_rank: the worker that holds the store, which ends with it: it lets the others leave first. None where the
            launcher does.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_workers: int,
        pulse: Pulse,
        limits: PeerLimits | None = None,
        *,
        store_rank: int | None = None,
    ) -> None:
        clone = store.clone()  # type: ignore[attr-defined]  # of every store, and missing in torch's stubs
        self._store: Store = clone
        self._rank, self._num_workers, self._pulse = rank, num_workers, pulse
        self._limits, self._store_rank = limits or PeerLimits(), store_rank
        self._beats = 0
        self._heard: dict[int, tuple[bytes, float]] = {}
        """The newest beat of each worker that is looked at, and when it came."""
        self._clock, self._waited = _Clock(), _Clock()
        self._answered = (0, 0.0)
        """The number of beats, and how long this worker had waited, when the store was last known to answer."""
        self._departure: Departure | None = None
        self._peace_since: float | None = None
        self._suspects, self._decided, self._leaving = threading.Event(), threading.Event(), threading.Event()
        self._goodbye: Departure | None = None
        self._patience = 0.0
        """Seconds for the others to leave before this worker."""
        self._at_loss: list[Callable[[], object]] = []
        self._thread = threading.Thread(target=self._run, name="lockstep-peers", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def at_loss(self, action: Callable[[], object]) -> None:
        """Call this, in the thread that beats, when a worker is lost: it ends what the main thread may wait in."""
        self._at_loss.append(action)

    # For whoever waits ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise PeerLostError if a worker is gone; to be called now and then while others are waited for.

        Costs a microsecond: the thread alone asks the store.
        """
        waited = self._waited.look(time.monotonic())
        if self._answered[0] != self._beats:
            self._answered = (self._beats, waited)
        if self._departure is None and waited - self._answered[1] > self._limits.silent_seconds:
            self._departure = self._without_store("does not answer")
        if self._departure is None:
            return
        if self._departure.in_peace:
            self._peace_since = waited if self._peace_since is None else self._peace_since
            if waited - self._peace_since < self._limits.ended_seconds:
                return
        raise self._error(self._departure)

    def lost(self, said: str) -> PeerLostError:
        """The error to raise when a connection has broken; waits some seconds until it is known whose.

        Args:
            said: the words of torch.distributed.
        """
        self._suspects.set()
        self._decided.wait(2 * self._limits.suspect_seconds)
        return self._error(self._departure or Departure("another worker", said))

    def _error(self, departure: Departure) -> PeerLostError:
        return PeerLostError(
            f"worker {self._rank} lost {departure.who}.",
            given=departure.why,
            expected="all workers to take part until the end",
            hint="read what that worker said last",
        )

    def leave(self, error: BaseException | None) -> None:
        """Beat no longer, and tell the others why; what is told of the first worker to leave is what counts.

        The worker that holds the store waits for the others to leave, as long as nothing is wrong.
        """
        who = f"worker {self._rank}"
        if error is None:
            self._goodbye = Departure(who, "it has ended before the others", in_peace=True)
        elif not isinstance(error, PeerLostError):
            said = str(error).partition("\n")[0]
            self._goodbye = Departure(who, f"it failed {self._place()}: {type(error).__name__}: {said}")
        if self._rank == self._store_rank:
            is_peaceful = error is None and (self._departure is None or self._departure.in_peace)
            self._patience = self._limits.leave_seconds if is_peaceful else 2 * self._limits.suspect_seconds
        self._leaving.set()
        # The store may never answer: its host may be gone.
        self._thread.join(self._patience + self._limits.suspect_seconds)

    # In the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.look(time.monotonic())
            while not self._leaving.wait(self._limits.beat_seconds):
                self.look(time.monotonic())
            self._say_goodbye()
        except RuntimeError as error:  # torch's stores
            said = str(error).partition("\n")[0]
            self._decide(self._without_store(f"is gone: {said}")._replace(in_peace=True))

    def _say_goodbye(self) -> None:
        if self._goodbye is not None:
            self._tell(self._goodbye)
        num_gone = self._store.add("gone", 1)
        deadline = time.monotonic() + self._patience
        while num_gone < self._num_workers and time.monotonic() < deadline:
            time.sleep(self._limits.beat_seconds / 10)
            self.look(time.monotonic())
            num_gone = self._store.add("gone", 0)

    def look(self, now: float) -> None:
        """Beat once, and look at another worker; all of them if a connection has broken. `now` in seconds."""
        clock = self._clock.look(now)
        self._store.set(f"beat/{self._rank}", json.dumps([self._beats, self._pulse.step, self._pulse.phase]))
        self._beats += 1
        if self._departure is not None:
            return
        if self._store.check(["left"]):
            self._tell(None)
            return
        num_watched = self._num_workers - 1 if self._suspects.is_set() else 1
        watched = [(self._rank + 1 + index) % self._num_workers for index in range(num_watched)]
        silent = [rank for rank in watched if self._is_lost(rank, clock)]
        if silent:
            self._tell(Departure(" and ".join(f"worker {rank}" for rank in silent), self._silence_of(silent, clock)))

    def _is_lost(self, rank: int, clock: float) -> bool:
        """Whether a worker has not beaten for too long."""
        key = f"beat/{rank}"
        beat = self._store.get(key) if self._store.check([key]) else b""
        if rank not in self._heard or self._heard[rank][0] != beat:
            self._heard[rank] = (beat, clock)
        limit = self._limits.silent_seconds
        if not beat:
            limit = self._limits.join_seconds
        elif self._suspects.is_set():
            limit = self._limits.suspect_seconds
        elif _place(beat)[1] not in _BRISK_PHASES:
            limit *= self._limits.slow_factor
        return clock - self._heard[rank][1] > limit

    def _silence_of(self, ranks: Sequence[int], clock: float) -> str:
        beat, heard = self._heard[ranks[0]]
        if not beat:
            return f"it has not joined within {clock - heard:.0f} s"
        return "no sign of life for {:.1f} s at step {} (phase {})".format(clock - heard, *_place(beat))

    def _tell(self, departure: Departure | None) -> None:
        """Tell all workers of a departure, unless one was told of before; that one is then believed here, too."""
        said = json.dumps(departure) if departure else ""
        told = self._store.compare_set("left", "", said) if said else self._store.get("left")
        self._decide(_departure(told))

    def _decide(self, departure: Departure) -> None:
        self._departure = self._departure or departure
        self._decided.set()
        # Later than `check` raises: what the main thread reads is no longer to be trusted then.
        if departure.in_peace and self._leaving.wait(2 * self._limits.ended_seconds):
            return
        for action in self._at_loss:
            action()

    def _without_store(self, fault: str) -> Departure:
        """What has become of the worker that holds the store, by what is wrong with the store."""
        if self._store_rank in (None, self._rank):
            return Departure("the store of the run", f"it {fault}")
        return Departure(f"worker {self._store_rank}", f"the store of the run, which it holds, {fault}")

    def _place(self) -> str:
        return f"at step {self._pulse.step} (phase {self._pulse.phase})"


class _Clock:
    """Seconds that go on while somebody looks."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looked: float | None = None

    def look(self, now: float) -> float:
        """The seconds so far, of which the time since the last look counts in part if it was long."""
        if self._looked is not None:
            self._seconds += min(now - self._looked, _LONGEST_LOOK_SECONDS)
        self._looked = now
        return self._seconds


def _place(beat: bytes) -> tuple[int, str]:
    """Step and phase of a beat; others may write to the store, too."""
    try:
        _, step, phase = json.loads(beat)
        return int(step), str(phase)
    except (ValueError, TypeError):
        return 0, "unknown"


def _departure(told: bytes) -> Departure:
    try:
        who, why, in_peace = json.loads(told)
        return Departure(str(who), str(why), in_peace is True)
    except (ValueError, TypeError):
        return Departure("another worker", f"{told[:80]!r}")
