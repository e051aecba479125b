"""Summaries of a run for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import WorkdirError
from lockstep.reporting import events
from lockstep.reporting.jsonl import evaluation_tag, facts_of, scalars_of
from lockstep.reporting.throughput import InputTotals, Throughput, moment_before
from lockstep.types import Interval, Progress, StepReport

if TYPE_CHECKING:
    import numpy.typing as npt
    from tensorboard.compat.proto.summary_pb2 import Summary

    from lockstep.reporting.histograms import Histogram

TWO_MINUTES = Interval(120, "seconds")


class Summaries:
    """A hook that writes a step's scalars whenever `interval` has passed; an interval of 0 writes none.

    With an interval of 0 the file is made only once something else is written: a text, an image, histograms.
    Rates are means since the last time. A refused attempt is no step: it counts in the rates and is written nowhere.
    What is written is safe from a kill at once.

    The folder is made if need be. Events after `from_step` that an earlier start left in it are dropped, so that no
    step is there twice. Opening and writing raise WorkdirError where the folder cannot be written.
    """

    def __init__(self, folder: Path, *, from_step: int, interval: Interval = TWO_MINUTES) -> None:
        _make(folder)
        self._evaluated = {
            (from_step, tag) for path in events.event_paths(folder) for tag in events.cut_events(path, from_step)
        }
        self._interval = interval
        self._folder = folder
        self._file = events.EventFile(folder) if interval.amount else None
        self._pace = Throughput()
        self._input = InputTotals()
        self._latest: Progress | None = None
        self._unwritten: StepReport | None = None
        self._is_due = False

    def __call__(self, report: StepReport) -> None:
        """Count an attempt, and write its step when its time has come."""
        if not self._interval.amount:
            return
        before, self._latest = self._latest or moment_before(report), report.progress
        self._is_due = self._is_due or self._interval.passed(before, report.progress)
        self._pace.add(report)
        self._input.add(report)
        if not report.skipped:
            self._unwritten = report
            if self._is_due:
                self._write(report)

    def write_evaluation(self, step: int, name: str, scores: Mapping[str, float]) -> None:
        """Write the scores of an evaluation, but those that stand there already for this step."""
        tags = {evaluation_tag(name, score): value for score, value in scores.items()}
        new = {tag: value for tag, value in tags.items() if (step, tag) not in self._evaluated}
        if new:
            self._evaluated.update((step, tag) for tag in new)
            self._append(events.scalar_summary(new), step)

    def write_text(self, tag: str, text: str, step: int) -> None:
        """Write a text, which is shown as it is: a recipe, a module tree, a mark in the run's history."""
        self._append(events.text_summary(tag, text), step)

    def write_images(self, images: Mapping[str, npt.NDArray[Any]], step: int) -> None:
        """Write images by tag; see `image_summary`."""
        self._append(events.image_summary(images), step)

    def write_histograms(self, histograms: Mapping[str, Histogram], scalars: Mapping[str, float], step: int) -> None:
        """Write histograms and scalars by tag, and how many numbers of each histogram are not finite, if there are."""
        nonfinite = {f"nonfinite/{tag}": float(h.num_nonfinite) for tag, h in histograms.items() if h.num_nonfinite}
        summary = events.histogram_summary(histograms)
        summary.MergeFrom(events.scalar_summary({**scalars, **nonfinite}))
        self._append(summary, step)

    def flush(self) -> None:
        """Have everything on the disk, safe from a loss of power too."""
        if self._file:
            self._file.flush()

    def close(self) -> None:
        """Write the last step, if its time had not come, and close the file."""
        try:
            if self._unwritten is not None:
                self._write(self._unwritten)
        finally:
            if self._file:
                self._file.close()

    def _append(self, summary: Summary, step: int) -> None:
        self._file = self._file or events.EventFile(self._folder)
        self._file.write(summary, step)

    def _write(self, report: StepReport) -> None:
        self._append(events.scalar_summary({**_scalars(report, self._pace), **self._input.scalars()}), report.step)
        self._pace, self._input = Throughput(), InputTotals()
        self._unwritten = None
        self._is_due = False


def _scalars(report: StepReport, pace: Throughput) -> dict[str, float]:
    return {
        **scalars_of(facts_of(report)),
        "examples_per_second": pace.examples_per_second,
        "steps_per_second": pace.steps_per_second,
        "data_wait_share": pace.wait_share,
    }


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WorkdirError(
            f"{folder} cannot be made: {error.strerror}.",
            given=f"{folder} ({error.strerror})",
            expected="a folder, or a place where one can be made",
            hint="give another workdir, or the right to write to this one",
        ) from error
