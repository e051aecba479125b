"""Profiles by torch.profiler: the operators of some steps, as a trace and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lockstep.checks import Checked, NonNegativeInt
from lockstep.durable import atomic_write
from lockstep.errors import InputError, WorkdirError
from lockstep.screen import log
from lockstep.tensors import reading_waits
from lockstep.types import StepRange, StepReport

if TYPE_CHECKING:
    from torch.profiler import profile as TorchProfiler

    from lockstep.workers.rank import Worker

_MOST_STEPS = 100
_MOST_ROWS = 200
_TAIL_BYTES = 16


@dataclass(frozen=True)
class Profile(Checked):
    """The steps whose operators torch.profiler records, and what it records of them; the bits stay what they are."""

    every: NonNegativeInt = 0
    """A profile of one step each time that so many updates, or a multiple of them, are complete before it; 0: none."""
    steps: StepRange | None = None
    """One profile of these steps, in place of that."""
    all_workers: bool = False
    """Every worker makes profiles of its own, not the chief alone."""
    record_shapes: bool = False
    """Record the shapes of what goes into the operators."""
    profile_memory: bool = False
    """Record what the operators allocate."""
    with_stack: bool = False
    """Record the lines of Python that call them, which takes much more time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.every) == (self.steps is not None):
            raise InputError(
                "A profile is made at an interval, or of some steps.",
                given=f"every={self.every}, steps={self.steps}",
                expected="one of the two",
                hint='set watch.profile.every=1000, or watch.profile.steps="100:103"',
            )
        if self.steps and self.steps.stop - self.steps.start > _MOST_STEPS:
            raise InputError(
                "So many steps are too much for one profile: torch keeps every call of an operator in memory.",
                given=f"steps={self.steps}",
                expected=f"at most {_MOST_STEPS} steps",
                hint="profile fewer, or some at an interval: watch.profile.every=1000",
            )

    def window(self, step: int) -> StepRange | None:
        """Return the steps of the next profile, or of the one that is due, after so many completed updates."""
        if self.steps is not None:
            return StepRange(max(step, self.steps.start), self.steps.stop) if step < self.steps.stop else None
        first = -(-step // self.every) * self.every
        return StepRange(first, first + 1)


class ProfileHook:
    """A hook that makes the profiles of a run: `traces/profile-100.json`, and a table beside it, `profile-100.txt`.

    Whether a step is due is decided before it, by the number of completed updates. In the step before it the profiler
    warms up; where steps are read late, as on a GPU, it records that one, too, whose kernels are then still under way.
    What cannot be written is told in the log.

    Args:
        profile: which steps, and what of them.
        folder: where the files go; it is made.
        worker: this one; the others than the chief do nothing unless all are to make profiles.
        start: completed updates.
    """

    def __init__(self, profile: Profile, folder: Path, worker: Worker, *, start: int) -> None:
        self._profile, self._folder = profile, folder
        self._ending = f".worker-{worker.rank}" if profile.all_workers else ""
        self._has_device, self._reads_late = worker.device.type != "cpu", reading_waits(worker.device)
        self._profiler: TorchProfiler | None = None
        self._is_recording = self._has_steps = False
        self._steps = profile.window(start) if profile.all_workers or worker.is_chief else None
        self._look_ahead(start)

    def __call__(self, report: StepReport) -> None:
        """Write the profile that is complete, and begin the one that is due."""
        self._has_steps = self._is_recording
        if self._is_recording and self._steps and report.step >= self._steps.stop:
            self.close()
            self._steps = self._profile.window(report.step)
        self._look_ahead(report.step)

    def close(self) -> None:
        """End, and write what there is of a profile."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if not self._is_recording:  # torch ends only what has begun
            profiler.start_trace()
        profiler.stop_trace()
        if self._has_steps:
            self._write(profiler)
        self._is_recording = self._has_steps = False

    def _look_ahead(self, step: int) -> None:
        if self._steps is None:
            return
        if self._profiler is None and step >= self._steps.start - 1:
            self._profiler = torch.profiler.profile(
                record_shapes=self._profile.record_shapes,
                profile_memory=self._profile.profile_memory,
                with_stack=self._profile.with_stack,
            )
            self._profiler.prepare_trace()
        if self._profiler and not self._is_recording and step >= self._steps.start - self._reads_late:
            self._profiler.start_trace()
            self._is_recording = True

    def _write(self, profiler: TorchProfiler) -> None:
        assert self._steps is not None, "it has recorded them"
        first, stop = self._steps.start, self._steps.stop
        name = f"profile-{first}" + (f"-{stop}" if stop > first + 1 else "") + self._ending
        by = "self_device_time_total" if self._has_device else "self_cpu_time_total"
        try:
            with atomic_write(self._folder / f"{name}.json", parents=True, failure=WorkdirError) as file:
                _export(profiler, Path(file.name))
            with atomic_write(self._folder / f"{name}.txt", failure=WorkdirError) as file:
                file.write(profiler.key_averages().table(sort_by=by, row_limit=_MOST_ROWS).encode())
        except WorkdirError as error:
            log.warning("the profile is not written: %s %s", error.what, error.given)
            return
        log.info("profiled from step %d to %d: %s", first, stop, self._folder / f"{name}.json")


def _export(profiler: TorchProfiler, path: Path) -> None:
    """Have torch write the trace, which tells of an error of the disk in its log alone.

    Raises:
        OSError: it is not whole.
    """
    try:
        profiler.export_chrome_trace(str(path))
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            if not file.read().rstrip().endswith(b"}"):
                raise OSError("torch has not written all of it: the disk may be full")
    finally:
        path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
