"""Who reads ahead of the trainer: processes, threads, or nobody."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from lockstep.checks import Checked, NonNegativeFloat, NonNegativeInt, PositiveInt, check_type
from lockstep.cores import usable_cores
from lockstep.data.ahead import Job, Result, Timed, read_here
from lockstep.data.patience import Patience
from lockstep.data.processes import read_in_processes
from lockstep.data.threads import read_in_threads
from lockstep.errors import InputError
from lockstep.readers.reader import Reader

_MOST_PROCESSES = 8


@dataclass(frozen=True)
class Crew(Checked):
    """How many loader processes or threads each worker has, and how far ahead they are.

    Raises:
        InputError: a number is out of range, both are asked for, or processes where the system has no memfd.
    """

    num_processes: NonNegativeInt | None = None
    """0 for none; None: the worker's share of the cores that are left over, 1 to 8."""
    num_threads: NonNegativeInt = 0
    """In place of processes."""
    prefetch: PositiveInt = 2
    """Batches that each of them is ahead."""
    timeout_seconds: NonNegativeFloat = 600.0
    """The longest that the trainer waits for a batch of theirs; 0: for ever."""

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
        """Refuse readers and augmentations that this crew cannot run.

        Raises:
            InputError: one draws from random generators that all threads share, and threads shall run it; or what
                shall augment cannot be called.
        """
        expected, hint = "functions of a batch and its draws", "give values of ls.images, or ls.data.EachExample"
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
        """Loader processes, or threads, for each of so many workers on this host."""
        if self.num_threads:
            return self.num_threads
        return default_num_processes(num_workers) if self.num_processes is None else self.num_processes

    def read(
        self,
        read: Callable[[Job], Result],
        jobs: Iterator[Job],
        num_workers: int,
        names_of: Callable[[Job], Sequence[str]],
        *,
        needs_decoding: bool,
    ) -> Generator[Timed[Result], None, None]:
        """Yield what `read` makes of each job, in order; what need not be decoded is read here.

        `names_of` names the examples of a job, where whoever reads it hangs.

        Raises:
            LockstepError: as `read` does, or `read_in_processes`.
        """
        size = self.size(num_workers) if needs_decoding else 0
        if not size:
            yield from read_here(read, jobs)
        elif self.num_threads:
            yield from read_in_threads(read, jobs, size, self.prefetch, names_of, Patience(self.timeout_seconds))
        else:
            yield from read_in_processes(read, jobs, size, self.prefetch, names_of, Patience(self.timeout_seconds))

    def describe(self, num_workers: int) -> str:
        """Who reads, in words."""
        size, kind = self.size(num_workers), "thread" if self.num_threads else "process"
        if not size:
            return "the trainer's own process reads"
        return f"{size} loader {kind}{'' if size == 1 else 's' if self.num_threads else 'es'} a worker"


def default_num_processes(num_workers: int) -> int:
    """Loader processes for each of `num_workers` workers on this host: its share of the cores left over."""
    if not hasattr(os, "memfd_create"):
        return 0
    return min(_MOST_PROCESSES, max(1, (usable_cores() - num_workers) // num_workers))
