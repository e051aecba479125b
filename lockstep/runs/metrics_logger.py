"""Metrics, chain and TensorBoard summaries of a run, and what its loggers get, written by the chief."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoints.store import Digests
from lockstep.data.loader import Loader
from lockstep.loggers.loggers import Loggers
from lockstep.recipes.parts import Monitoring
from lockstep.reporting.chain import CHAIN, ChainFile, attempt_facts
from lockstep.reporting.jsonl import MetricsFile, evaluation_tag
from lockstep.reporting.summaries import Summaries
from lockstep.reporting.throughput import moment_before
from lockstep.run_files import METRICS, SUMMARIES
from lockstep.runs.showing import with_marks
from lockstep.towers.towers import Towers
from lockstep.training.loop import Hook, every
from lockstep.training.observe import ActivationSource, GradientSource, Observer, Source, VariableSource
from lockstep.training.state import TrainState
from lockstep.types import Interval, Progress, StepReport

if TYPE_CHECKING:
    import numpy.typing as npt


class MetricsLogger:
    """Writes metrics.jsonl, chain.jsonl and the summaries of one segment; what was written after its start is cut off.

    If it `flushes_each_line`, lines of metrics outlive the host of this worker, too, as another one may go on.
    The `loggers` get what the metrics get, from the moment on in which they are begun.
    """

    def __init__(
        self,
        folder: Path,
        watch: Monitoring,
        start: Progress,
        *,
        flushes_each_line: bool = False,
        loggers: Loggers | None = None,
    ) -> None:
        self._watch, self._start, self._flushes_each_line = watch, start, flushes_each_line
        self._loggers = loggers or Loggers(())
        self.metrics = MetricsFile(folder / METRICS, from_position=start.position)
        try:
            self.chain = ChainFile(folder / CHAIN, from_position=start.position)
        except BaseException:
            self.metrics.close()
            raise
        self._summaries = Summaries(folder / SUMMARIES, from_step=start.step, interval=watch.summaries)
        self._observers: list[Observer] = []

    def hooks(self) -> list[Hook]:
        """Make the hooks that write the metrics and summaries of each report."""
        return [self._loggers.count, self._writer(self._start), self._summaries]

    def write_missed(self, reports: Sequence[StepReport]) -> None:
        """Write the reports, up to the start, that another chief was lost without writing."""
        newest = {report.progress.position: report for report in reports}  # a rollback has some of them made again
        known, start = self.chain.last_attempt, self._start.position
        last = known.get("position", -1)
        if known.get("in_metrics") and self.metrics.last_position < last and last in newest:
            self._write(newest[last])  # the chain has each line first
        missed = [report for position, report in newest.items() if last < position <= start]
        if missed:
            before = moment_before(missed[0])
            if self.chain.last_position < before.position:  # lines that no host has
                self.chain.write_event({"event": "gap", "step": before.step, "from_position": before.position})
            write = self._writer(before)
            for report in missed:
                write(report)

    def _writer(self, start: Progress) -> Hook:
        due: list[StepReport] = []
        find_due = every(self._watch.metrics, due.append, start=start)

        def write(report: StepReport) -> None:
            due.clear()
            if report.skipped and self._watch.metrics.amount:
                due.append(report)  # it is at the step of the one before, and never due
            else:
                find_due(report)
            self.chain.write(attempt_facts(report, in_metrics=bool(due)))
            if due:
                self._write(report)

        return write

    def _write(self, report: StepReport) -> None:
        self.metrics.write(report)
        self._loggers.write(report)
        if self._flushes_each_line:
            self.chain.flush()
            self.metrics.flush()

    def observe(self, state: TrainState, towers: Towers, batch_size: int) -> Sequence[Hook]:
        """Make the hooks that write the histograms that the recipe asks for; compiled towers have no activations."""
        watch = self._watch
        possible: list[tuple[Interval, Callable[[], Source]]] = [
            (watch.gradients, lambda: GradientSource(state)),
            (watch.variables, lambda: VariableSource(state)),
            (watch.activations, lambda: ActivationSource(state, towers)),
        ]
        # All sources are made before the first observer hooks into the state: making one may fail.
        wanted = [(interval, make()) for interval, make in possible if interval.amount]
        for interval, source in wanted:
            observer = Observer(source, interval, self._summaries, start=self._start, batch_size=batch_size)
            self._observers.append(observer)
        return self._observers

    def describe(self, recipe_toml: str, model: str, step: int) -> None:
        """Write the recipe and the model as text summaries."""
        if self._watch.summaries.amount:
            self._summaries.write_text("recipe", recipe_toml, step)
            self._summaries.write_text("model", model, step)

    def show_images(self, loader: Loader, count: int, step: int) -> None:
        """Write images of the next batch as the model will see them, with their boxes if they have some."""
        with closing(loader.batches(range(1), 1)) as batches:
            images = with_marks(next(batches), count)
        self._summaries.write_images({f"input/{place}": image.numpy() for place, image in enumerate(images)}, step)

    def mark(self, event: str, step: int) -> None:
        """Write an event, such as a resume, as a text summary."""
        if self._watch.summaries.amount:
            self._summaries.write_text("events", f"{event} at step {step}", step)

    def write_evaluation(self, step: int, name: str, scores: Mapping[str, float]) -> None:
        """Write the scores of an evaluation."""
        self.chain.write({"step": step, "evaluation": name, "scores": dict(scores)})
        self.metrics.write_evaluation(step, name, scores)
        self._loggers.log({evaluation_tag(name, score): value for score, value in scores.items()}, step)
        if self._watch.summaries.amount:
            self._summaries.write_evaluation(step, name, scores)

    def write_digests(self, step: int, position: int, digests: Digests, values_sha256: str = "") -> None:
        """Write the digests of the tensors as they were at a step into the chain.

        For a checkpoint, whose `values.json` has a SHA-256, they are on the disk when this returns. The thread that
        writes it may call this while the run goes on.
        """
        facts = {"step": step, "at": position, "of": "files", "digests": digests}
        if values_sha256:
            facts["values"] = values_sha256
        self.chain.write(facts)
        if values_sha256:
            self.chain.flush()

    def write_images(self, images: Mapping[str, npt.NDArray[Any]], step: int) -> None:
        """Write images of shape (channels, height, width) by tag."""
        if images and self._watch.summaries.amount:
            self._summaries.write_images(images, step)

    def flush(self) -> None:
        """Write everything to the disk, before a checkpoint that counts on it."""
        self.chain.flush()
        self.metrics.flush()
        self._summaries.flush()

    def close(self) -> None:
        """Close the files, and take the observers off the model."""
        for observer in self._observers:
            observer.close()
        self._summaries.close()
        self.metrics.close()
        self.chain.close()
