"""How long the trainer waits for a batch that loader processes or threads read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lockstep.errors import WorkerError
from lockstep.screen import Lines, log

Found = TypeVar("Found")

_WARN_SECONDS = 10.0
_WARN_FACTOR = 10.0
_LOOK_SECONDS = 0.5
_END_SECONDS = 10.0


@dataclass(frozen=True)
class Whereabouts:
    """Where a loader process or thread is, in words."""

    name: str
    """`loader process 0 (pid 4711)`."""
    batch: str
    """`the batch at position 64`."""
    example: str
    """`cat/7.jpg`; or `one of a, b, c, d, e and 59 more`."""
    stack: str
    """Of its code, in several lines; or why that is not known."""


class Patience:
    """How long the trainer waits for a batch: first in silence, then after a warning, and in the end not any more.

    The warning comes after `warn_seconds`, or after ten times the longest wait so far if that is more. A wait is
    counted in looks of half a second: time in which the trainer itself was stopped does not count.

    Args:
        timeout_seconds: the longest wait; 0 waits for ever.
        warn_seconds: no warning before.
    """

    def __init__(self, timeout_seconds: float, warn_seconds: float = _WARN_SECONDS) -> None:
        self._timeout_seconds, self._warn_seconds = timeout_seconds, warn_seconds
        self._longest_seconds = 0.0
        self.end_seconds = min(_END_SECONDS, timeout_seconds or _END_SECONDS)
        """How long to wait, at the end, for a process or thread to be gone."""

    def wait(self, ready: Callable[[float], Found], whereabouts: Callable[[], Whereabouts]) -> Found:
        """Wait until `ready` finds something, and return that.

        Args:
            ready: looks for at most so many seconds; what it returns is falsy while there is nothing.
            whereabouts: of the process or thread that is waited for.

        Raises:
            WorkerError: there is still nothing after the timeout.
        """
        waited, limit = 0.0, self._timeout_seconds or math.inf
        warn_at = max(self._warn_seconds, _WARN_FACTOR * self._longest_seconds)
        while not (found := ready(look := min(_LOOK_SECONDS, warn_at - waited, limit - waited))):
            waited += look
            if waited >= limit:
                raise _hung(whereabouts(), limit)
            if waited >= warn_at:
                _warn(whereabouts(), waited)
                warn_at = math.inf
        self._longest_seconds = max(self._longest_seconds, waited)
        return found


def _warn(there: Whereabouts, seconds: float) -> None:
    log.warning(
        "the trainer has waited %.3g s for %s: %s is at %s\n%s",
        seconds,
        there.batch,
        there.name,
        there.example,
        Lines(there.stack),
    )


def _hung(there: Whereabouts, seconds: float) -> WorkerError:
    error = WorkerError(
        f"{there.name.capitalize()} hangs: the trainer has waited {seconds:.6g} s for {there.batch}.",
        given=f"it is at {there.example}",
        expected=f"a batch within timeout_seconds={seconds:.6g}",
        hint="look at that example and the disk it is on: a network disk may not answer; if reading may take so long, "
        "give ls.data.Loader a larger timeout_seconds (a recipe: watch.hang_seconds; 0 waits for ever)",
    )
    error.add_note(Lines(there.stack))
    return error
