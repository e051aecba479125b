"""Traces: what all workers do during some steps of a run, as a timeline, merged to one file by the chief."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

import torch

from lockstep.checks import check_type
from lockstep.durable import make_folder
from lockstep.errors import InputError, WorkdirError
from lockstep.reporting import trace_files
from lockstep.screen import log
from lockstep.spans import Recorder, Span
from lockstep.tensors import reading_waits
from lockstep.types import StepRange, StepReport
from lockstep.workers.rank import Worker, join

_COMPARISONS = 8


class Trace:
    """A hook that records what all workers do during some steps, for Perfetto: `traces/steps-100-110.json`.

    Enter it on all workers, and give it each report after all other hooks:

        with ls.Trace("runs/mine", "100:110") as trace:
            ls.train(state, losses, loader, until=ls.Steps(200), hooks=[trace])

    Steps count from 0: these are the ten that begin when 100 to 109 updates are complete. Before and after them
    nothing is recorded. Nothing that is computed changes. At the end of the last one all workers meet, and the chief
    merges what they have recorded; if one is lost before, what the others have is merged when they go on, or when the
    run is started again. Where updates are read late, on a GPU, the step before is recorded, too. What cannot be
    written then is told in the log, and ends nothing.

    Args:
        workdir: the run's folder, which all workers see.
        steps: a range, or its text.
        start: updates that are complete when the loop begins.

    Raises:
        InputError: there is no such range; another trace is under way; or it is called before it is entered.
        WorkdirError: the folder cannot be made.
    """

    def __init__(self, workdir: str | Path, steps: StepRange | range | str, *, start: int = 0) -> None:
        self.steps, self._step = _steps_of(steps), start
        self._folder = Path(workdir) / trace_files.TRACES
        self._name = ""
        self._worker: Worker | None = None
        self._recorder: Recorder | None = None
        self._device: DeviceClock | None = None
        self._is_over = self._has_steps = False
        self._since = 0.0

    def __enter__(self) -> Trace:
        """Begin at once if the first step is one to record. What workers that were lost have left is merged before."""
        worker = self._worker = join()
        try:
            make_folder(self._folder)
        except OSError as error:
            raise WorkdirError(
                f"No trace can be written: there is no folder {self._folder}.",
                given=str(error),
                expected="a folder that can be made in that of the run",
                hint="move away what is in its place, or get the right to write there",
            ) from error
        worker.group.barrier("a trace is entered")  # all have written what they had
        self._merge(worker)
        if self._step >= self.steps.stop:
            self._is_over = True
            if not any(self._folder.glob(f"steps-*-{self.steps.stop}.json")):
                self._tell("steps %s are not traced: they were over before step %d", self.steps, self._step)
        self._look_ahead(self._step)
        return self

    def __call__(self, report: StepReport) -> None:
        """Begin to record when the next step is one of them, and end after the last one."""
        if self._worker is None:
            raise InputError(
                "A trace has to be entered before the steps begin.",
                given="a report for a Trace outside of its `with` block",
                expected="all workers to enter it together",
                hint='write: with ls.Trace("runs/mine", "100:110") as trace:',
            )
        now = time.perf_counter()
        if self._recorder is not None:
            self._recorder.add(
                trace_files.STEPS, f"step {self._step}", self._since, now, {"examples": report.num_examples}
            )
            self._has_steps = True
        self._step, self._since = report.step, now
        if not self._is_over and self._step >= self.steps.stop:
            with self._worker.pulse.during(self._step, "save"):
                self._end(self._worker)
        self._look_ahead(self._step)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End: where an error did, this worker's part is written alone, and is merged later."""
        worker, has_begun = self._worker, self._recorder is not None
        if worker is None or self._is_over:
            return
        if kind is not None:
            self._device = None  # which may be why
        if has_begun and kind is not None and worker.num_workers > 1:
            self._stop(worker)
            self._write_part(worker, None)
        elif has_begun:
            self._end(worker)
        if not self._has_steps:
            self._tell("no step of %s is traced yet: the loop ended at step %d", self.steps, self._step)

    def _look_ahead(self, step: int) -> None:
        """Begin, unless the next step comes before; where steps are read late, it has begun when this is called."""
        if self._worker is None or self._is_over or self._recorder is not None:
            return
        device = self._worker.device
        if step < self.steps.start - reading_waits(device):
            return
        self._device = DeviceClock(device) if device.type != "cpu" else None
        recorder = Recorder(mark=self._device.mark if self._device else None)
        recorder.start()
        self._recorder = recorder
        self._name = f"steps-{max(step, self.steps.start)}-{self.steps.stop}"
        self._since, pulse = time.perf_counter(), self._worker.pulse
        pulse.at(pulse.step, pulse.phase)
        pulse.on_phase = self._add_phase
        self._tell("tracing steps %d to %d", max(step, self.steps.start), self.steps.stop - 1)

    def _add_phase(self, phase: str, began: float, ended: float, step: int) -> None:
        if self._recorder is not None:
            self._recorder.add(trace_files.PHASES, phase, began, ended, {"step": step})

    def _end(self, worker: Worker) -> None:
        """End the trace; all workers do so together."""
        self._stop(worker)
        clock = None
        try:
            clock = compare_clocks(worker)
        finally:  # a worker that is lost takes nothing of the others' parts with it
            self._write_part(worker, clock)
        worker.group.barrier("the trace is written")
        self._merge(worker)

    def _stop(self, worker: Worker) -> None:
        self._is_over = True
        if self._recorder is not None:
            worker.pulse.at(worker.pulse.step, worker.pulse.phase)
            worker.pulse.on_phase = None
            self._recorder.stop()
            if self._device is not None:
                self._recorder.spans += self._device.spans(self._recorder.on_device)

    def _write_part(self, worker: Worker, clock: trace_files.ClockOffset | None) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None or not self._has_steps:
            return
        part = trace_files.TracePart(
            worker.rank,
            f"{worker.name} (pid {os.getpid()})",
            worker.num_workers,
            tuple(recorder.spans),  # a thread may be late, and add to them still
            recorder.num_dropped,
            clock,
            trace_files.boot_of_host(),
            trace_files.epoch_seconds(),
        )
        try:
            part.write(trace_files.part_path(self._folder, self._name, worker.rank))
        except WorkdirError as error:
            log.warning("this worker's part of the trace is lost: %s %s", error.what, error.given)

    def _merge(self, worker: Worker) -> None:
        if not worker.is_chief:
            return
        try:
            for merged in trace_files.merge_parts(self._folder):
                log.info("%s", merged.describe())
        except (OSError, WorkdirError) as error:
            log.warning("the trace is not written: %s", error)

    def _tell(self, words: str, *values: object) -> None:
        if self._worker is not None and self._worker.is_chief:
            log.info(words, *values)


def _steps_of(steps: StepRange | range | str) -> StepRange:
    expected, hint = 'a range of steps: "100:110"', 'write ls.Trace("runs/mine", "100:110")'
    check_type("steps", steps, (StepRange, range, str), expected=expected, hint=hint)
    if isinstance(steps, range):
        steps = f"{steps.start}:{steps.stop}" if steps.step == 1 else str(steps)
    return StepRange.parse(steps) if isinstance(steps, str) else steps


def compare_clocks(worker: Worker) -> trace_files.ClockOffset:
    """Compare the clock of this worker with the chief's, by barriers; all workers call it together."""
    if worker.num_local_workers == worker.num_workers:
        return trace_files.ClockOffset(0.0, 0.0)
    own: list[list[float]] = []
    for _ in range(_COMPARISONS):
        began = time.perf_counter()
        worker.group.barrier("clocks are compared")
        own.append([began, time.perf_counter()])
    chief = worker.group.gather(own)[0]
    return trace_files.ClockOffset(0.0, 0.0) if worker.is_chief else trace_files.clock_offset(own, chief)


class DeviceClock:
    """When a device does what the host enqueues, by events of it, on the clock of the host.

    It waits for the device once, when it is made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._module.synchronize(device)
        self._zero = self.mark()
        self._zero.synchronize()
        self._zero_seconds = time.perf_counter()

    def mark(self) -> torch.Event:
        """Return an event that happens when all is done that this thread has enqueued."""
        event: torch.Event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def spans(self, marked: list[tuple[str, object, object]]) -> list[Span]:
        """Return the spans of the device, from the names and events of their begins and ends."""
        self._module.synchronize(self._device)
        lane = (str(self._device), 0)
        return [Span(lane, name, self._seconds(began), self._seconds(ended)) for name, began, ended in marked]

    def _seconds(self, event: object) -> float:
        milliseconds: float = self._zero.elapsed_time(event)  # type: ignore[arg-type]
        return self._zero_seconds + milliseconds / 1e3
