"""Prefetching by a worker pool: its size, the results that it gives, and how long the trainer waits for one.

Batches are read by loader processes (`loader_processes`), by loader threads (`loader_threads`), or by the trainer's own
process, which prefetches nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from lockstep.checks import Checked, NonNegativeFloat, NonNegativeInt, PositiveInt, check_type
from lockstep.cores import usable_cores
from lockstep.errors import InputError, WorkerError
from lockstep.screen import Lines, log

if TYPE_CHECKING:
    from lockstep.readers.reader import Reader

Ready = TypeVar("Ready")

_MOST_PROCESSES = 8
_WARN_SECONDS = 10.0
_WARN_FACTOR = 10.0
_POLL_SECONDS = 0.5
_END_SECONDS = 10.0


@dataclass(frozen=True)
class LoaderPool(Checked):
    """The loader processes or threads of each worker: how many, and how many batches each prefetches."""

    num_processes: NonNegativeInt | None = None
    """0 for none; None: the worker's share of the cores that are left over, 1 to 8."""
    num_threads: NonNegativeInt = 0
    """Loader threads, in place of processes."""
    prefetch: PositiveInt = 2
    """Batches that each of them reads ahead."""
    timeout_seconds: NonNegativeFloat = 600.0
    """The longest that the trainer waits for one of their batches; 0: for ever."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_threads and self.num_processes:
            raise InputError(
                "Either processes or threads read ahead.",
                given=f"num_processes={self.num_processes}, num_threads={self.num_threads}",
                expected="one of the two",
                hint="leave num_processes out to have threads",
            )
        if self.num_processes and not hasattr(os, "memfd_create"):
            raise InputError(
                "Loader processes need Linux.",
                given=f"num_processes={self.num_processes}",
                expected="0 on this system, which has no memfd to share batches through",
                hint="leave num_processes out, and the trainer's own process reads; or give num_threads",
            )

    def check(self, reader: Reader, augment: Sequence[object]) -> None:
        """Refuse readers and augmentations that this pool cannot run."""
        expected, hint = "functions of a batch and its draws", "give values of ls.augmentations, or ls.data.EachExample"
        for each in augment:
            check_type("augment", each, Callable, expected=expected, hint=hint)  # type: ignore[arg-type]
        for each in (reader, *augment):
            if self.num_threads and getattr(each, "draws_globally", False):
                raise InputError(
                    f"{type(each).__name__} may draw from random generators that all threads of a process share.",
                    given=f"num_threads={self.num_threads}",
                    expected="loader processes, in which they can be seeded for each example",
                    hint="leave num_threads out; or, if it draws nothing, say so (TorchDataset(dataset, draws=False)); "
                    "or take the draws as an argument (ls.data.EachExample)",
                )

    def size(self, num_workers: int) -> int:
        """Number of loader processes or threads of each worker, with `num_workers` workers on this host."""
        if self.num_threads:
            return self.num_threads
        return default_num_processes(num_workers) if self.num_processes is None else self.num_processes

    def describe(self, num_workers: int) -> str:
        """Say how many read, for the log."""
        size, kind = self.size(num_workers), "thread" if self.num_threads else "process"
        if not size:
            return "the trainer's own process reads"
        return f"{size} loader {kind}{'' if size == 1 else 's' if self.num_threads else 'es'} a worker"


def default_num_processes(num_workers: int) -> int:
    """Number of loader processes for each of `num_workers` workers on this host: its share of the cores left over."""
    if not hasattr(os, "memfd_create"):
        return 0
    return min(_MOST_PROCESSES, max(1, (usable_cores() - num_workers) // num_workers))


@dataclass(frozen=True)
class LoaderStatus:
    """What a loader process or thread is doing, for messages."""

    name: str
    """`loader process 0 (pid 4711)`."""
    batch: str
    """`the batch at position 64`."""
    example: str
    """`cat/7.jpg`; or `one of a, b, c, d, e and 59 more`."""
    stack: str
    """The stack of its code, in several lines; or why it is not known."""


class StallTimeout:
    """The longest that the trainer waits for a batch, with a warning on the way; a timeout of 0 waits for ever.

    The warning comes after `warn_seconds`, or after ten times the longest wait so far if that is more. Waits are
    counted in polls of half a second: time in which the trainer itself was stopped does not count.
    """

    def __init__(self, timeout_seconds: float, warn_seconds: float = _WARN_SECONDS) -> None:
        self._timeout_seconds, self._warn_seconds = timeout_seconds, warn_seconds
        self._longest_seconds = 0.0
        self.end_seconds = min(_END_SECONDS, timeout_seconds or _END_SECONDS)
        """How long to wait for a process or thread to end."""

    def wait(self, ready: Callable[[float], Ready], status: Callable[[], LoaderStatus]) -> Ready:
        """Wait until `ready` returns something true, and return that; raises WorkerError after the timeout.

        `ready` waits for at most the given seconds; `status` describes the process or thread that is waited for.
        """
        waited, limit = 0.0, self._timeout_seconds or math.inf
        warn_at = max(self._warn_seconds, _WARN_FACTOR * self._longest_seconds)
        while not (result := ready(poll := min(_POLL_SECONDS, warn_at - waited, limit - waited))):
            waited += poll
            if waited >= limit:
                raise _hung(status(), limit)
            if waited >= warn_at:
                _warn(status(), waited)
                warn_at = math.inf
        self._longest_seconds = max(self._longest_seconds, waited)
        return result


def _warn(there: LoaderStatus, seconds: float) -> None:
    log.warning(
        "the trainer has waited %.3g s for %s: %s is at %s\n%s",
        seconds,
        there.batch,
        there.name,
        there.example,
        Lines(there.stack),
    )


def _hung(there: LoaderStatus, seconds: float) -> WorkerError:
    error = WorkerError(
        f"{there.name.capitalize()} hangs: the trainer has waited {seconds:.6g} s for {there.batch}.",
        given=f"it is at {there.example}",
        expected=f"a batch within timeout_seconds={seconds:.6g}",
        hint="look at that example and the disk it is on: a network disk may not answer; if reading may take so long, "
        "give ls.data.Loader a larger timeout_seconds (a recipe: watch.hang_seconds; 0 waits for ever)",
    )
    error.add_note(Lines(there.stack))
    return error
