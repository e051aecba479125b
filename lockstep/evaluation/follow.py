"""Follow a run that trains: yield its checkpoints as they appear, to be scored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lockstep.checkpoints.manifest import DamagedError, FileEntry, Manifest
from lockstep.checkpoints.store import Checkpoint, Store
from lockstep.checks import Checked, NonNegativeFloat
from lockstep.errors import CheckpointError
from lockstep.screen import log

if TYPE_CHECKING:
    from lockstep.workers.rank import Worker

_Contents = tuple[FileEntry, ...]

POLL_SECONDS = 1.0
"""Between two looks at the folder; a request to stop is seen as often."""


@dataclass(frozen=True)
class Polling(Checked):
    """How often a followed run is scored, and how long it is waited for."""

    interval_seconds: NonNegativeFloat = 60.0
    """Least time from the start of one scoring to the start of the next."""
    timeout_seconds: NonNegativeFloat | None = None
    """Without a new checkpoint, counted from the end of the last scoring; None waits as long as the run goes on."""


_DEFAULT = Polling()


class Clock:
    """The time that a follower sees; a test gives a clock of its own."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait for so many seconds."""
        time.sleep(seconds)


_REAL = Clock()


def _never() -> bool:
    return False


def follow(
    store: Store,
    polling: Polling = _DEFAULT,
    *,
    is_over: Callable[[], bool] = _never,
    stop: Callable[[], bool] = _never,
    clock: Clock = _REAL,
) -> Iterator[Checkpoint]:
    """Yield the checkpoints of a run as they appear: each at most once, and always the newest that there is.

    Older ones that have come meanwhile are passed over. A checkpoint that replaces another of the same step, as after a
    rollback, is a new one. A damaged checkpoint is named in a warning, and the newest of the others that have come
    since is taken in its place; one that the run has deleted before it was read is no error.

    All workers iterate together and get the same checkpoints; the chief alone looks for them, and asks at every look
    whether the run `is_over`, with its last checkpoint written. All of them end where one is to `stop`.

    Raises:
        CheckpointError: the folder cannot be listed, or a checkpoint is of an unknown format.
    """
    from lockstep.workers.rank import join

    worker = join()
    search = _Search(store, polling, is_over, clock)
    while True:
        answers = worker.group.gather([stop(), search.poll() if worker.is_chief else "wait"])
        decision = answers[0][1]
        if decision == "end" or any(stopped for stopped, _ in answers):
            return
        checkpoint = _read_together(store, int(decision), search, worker) if decision != "wait" else None
        if checkpoint:
            search.begin()
            yield checkpoint
            search.end()
        else:
            clock.sleep(POLL_SECONDS)


class _Search:
    """The chief's search: which checkpoints it has seen, and how long it has waited for another one."""

    def __init__(self, store: Store, polling: Polling, is_over: Callable[[], bool], clock: Clock) -> None:
        self._store, self._polling, self._is_over, self._clock = store, polling, is_over, clock
        self._there: dict[int, _Contents] = {}
        self._seen: set[tuple[int, _Contents]] = set()
        self._damaged: set[tuple[int, _Contents]] = set()
        self._earliest = self._waiting_since = clock.now()
        self._logged = ""

    def poll(self) -> int | Literal["wait", "end"]:
        """Look for checkpoints: return the step to read now, or what else is to be done."""
        is_over = self._is_over()  # asked first: the last checkpoint is there before the run is over
        now, self._there = self._clock.now(), {step: _contents(self._store, step) for step in self._store.steps()}
        new = [step for step, contents in self._there.items() if (step, contents) not in self._seen | self._damaged]
        if new:
            return new[-1] if now >= self._earliest else "wait"
        if is_over:
            log.info("the run is over: no checkpoint will follow")
            return "end"
        waited, limit = now - self._waiting_since, self._polling.timeout_seconds
        if limit is not None and waited >= limit:
            log.info("no new checkpoint in %s for %.0f s", self._store.folder, waited)
            return "end"
        self._log_waiting()
        return "wait"

    def _log_waiting(self) -> None:
        text = (
            "the checkpoints in %s are gone: waiting for others"
            if self._seen
            else "waiting for the first checkpoint in %s"
        )
        if not self._there and text != self._logged:
            self._logged = text
            log.info(text, self._store.folder)

    def skip(self, step: int) -> None:
        """Pass over a damaged checkpoint: older ones have their turn."""
        self._damaged.add((step, self._there[step]))

    def begin(self) -> None:
        """Note that a checkpoint is being scored; all others that are there have had their turn."""
        self._seen = set(self._there.items())
        self._damaged &= self._seen
        self._earliest = self._clock.now() + self._polling.interval_seconds

    def end(self) -> None:
        self._waiting_since = self._clock.now()


def _contents(store: Store, step: int) -> _Contents:
    """List the files of a checkpoint, which tell it from one that replaces it, not from its copy; none if damaged."""
    try:
        return Manifest.read(store.path(step)).files
    except CheckpointError:
        return ()


def _read_together(store: Store, step: int, search: _Search, worker: Worker) -> Checkpoint | None:
    """Read the checkpoint of a step on all workers; None on all of them where one cannot read it."""
    from lockstep.training.handing_over import hand_over, only_chief_has

    is_handed_over = only_chief_has(store, worker)
    checkpoint, damage = _read(store, step) if worker.is_chief or not is_handed_over else (None, None)
    answers = worker.group.gather([checkpoint is not None, damage])
    damages = [damage for _, damage in answers if damage]
    if damages and worker.is_chief:
        log.warning("%s It is not scored.", damages[0])
        search.skip(step)
    if is_handed_over and answers[0][0]:
        return hand_over(checkpoint, worker)
    return checkpoint if all(is_read for is_read, _ in answers) else None


def _read(store: Store, step: int) -> tuple[Checkpoint | None, str | None]:
    """Read a checkpoint, or say how it is damaged; None for both where it is gone."""
    try:
        return store.read(step), None
    except CheckpointError as error:
        if not store.path(step).exists():
            return None, None
        if isinstance(error.__cause__, DamagedError):
            return None, f"{error.what} Given: {error.given}."
        raise
