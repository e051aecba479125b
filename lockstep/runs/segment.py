"""A segment of a run: from its start, a resume, a rollback or a new stage to the next of these, or to the end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from lockstep.checkpoints.store import Digests, Store, digests_of
from lockstep.data.loader import Loader
from lockstep.errors import PeerLostError, StoreError
from lockstep.exchange.exchange import AllReduce, is_exact
from lockstep.loggers.logger import Logger, LoggerKind
from lockstep.loggers.loggers import Loggers
from lockstep.readers.fingerprint import checksum
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import FieldPath, to_toml, write
from lockstep.reporting.console import Console
from lockstep.reporting.jsonl import evaluation_tag
from lockstep.reporting.profiling import ProfileHook
from lockstep.reporting.timings import TimingsFile
from lockstep.reporting.trace import Trace
from lockstep.reporting.trace_files import TRACES
from lockstep.run_files import RECIPE, RESULT, TIMINGS
from lockstep.runs.metrics_logger import MetricsLogger
from lockstep.runs.skipped import QuarantineList, keep_batch
from lockstep.runs.stages import Stages
from lockstep.runs.validation import SPLIT, Validation, step_before
from lockstep.runs.workdir import Reason, Result, Workdir
from lockstep.screen import log
from lockstep.served.exchanges import is_served
from lockstep.spans import span
from lockstep.storage.remote_path import is_url
from lockstep.storage.retries import told
from lockstep.training.loop import Hook, every, steps_without_survival
from lockstep.training.replicas import Replicas
from lockstep.training.saving import Saver
from lockstep.types import (
    End,
    FaultError,
    Interval,
    NonFiniteError,
    NonFiniteReport,
    Progress,
    ReplayVerdict,
    StepReport,
)
from lockstep.workers.rank import Worker

if TYPE_CHECKING:
    from lockstep.exchange.exchange import Exchange
    from lockstep.training.choices import Choices


_CHIEF_SECONDS = 30.0
"""Workers begin to wait for new credentials, and end it, at most so long after each other, as each reads ahead."""


class RunEvent(NamedTuple):
    """What a segment begins with, as the history of the run keeps it."""

    name: str
    """"start", "resume", "rollback" or "stage"; "continue" after workers were lost, "join" where others joined."""
    facts: Mapping[str, object] = MappingProxyType({})
    choices: Choices | None = None
    """With which this start computes; None where it goes on with those of before."""
    missed: Sequence[StepReport] = ()
    """Reports that a chief before may have been lost without writing down; they are in no history."""


class LastSave(NamedTuple):
    """The state of a checkpoint."""

    stage: int
    step: int
    position: int
    scores: Mapping[str, float]


@dataclass
class Files:
    """The files of a run."""

    workdir: Workdir
    store: Store
    saver: Saver
    loggers: Loggers
    last_save: LastSave | None = None
    """What this process has written last, as the chief."""

    @classmethod
    def of(cls, workdir: Workdir, recipe: Recipe, loggers: Sequence[Logger | LoggerKind] = ()) -> Files:
        """Return the files of the run in a workdir, and its loggers, which are those of the recipe and further ones."""
        store = workdir.store(recipe)
        given = (*recipe.loggers, *loggers)
        config = write(Recipe, recipe, FieldPath(recipe.name)) if given else {}
        return cls(workdir, store, Saver(store), Loggers(given, workdir.path, config=config, name=recipe.name))

    def end_loggers(self, result: Result) -> None:
        """End the loggers, with the scores of the final weights and the result, if it is written."""
        if result.evaluation and result.split:
            scores = result.evaluation.scores.items()
            self.loggers.log({evaluation_tag(result.split, name): score for name, score in scores}, result.step)
        if (self.workdir.path / RESULT).exists():
            self.loggers.log_artifact(self.workdir.path / RESULT)
        self.loggers.end(result.reason)


class Segment:
    """A segment of a run on one worker; every worker makes one, and runs it once.

    Args:
        recipe, stages, worker, end: of the run, in the state that the segment begins with.
        files: of the run; None writes nothing.
        totals: hooks that see each report before the others.
        saves_first_step: after a rollback: no checkpoint says yet which examples are skipped.
        history: of the segments before, by step: the score by which checkpoints are the best.
        choices: with which this start computes; None where a worker that has joined later does not know them.
    """

    def __init__(
        self,
        recipe: Recipe,
        stages: Stages,
        worker: Worker,
        files: Files | None,
        *,
        end: End | None,
        totals: Sequence[Hook],
        saves_first_step: bool,
        history: Mapping[int, float],
        choices: Choices | None = None,
    ) -> None:
        self._choices = choices
        self._recipe, self._stages, self._worker, self._files = recipe, stages, worker, files
        self._end, self._totals, self._saves_first_step = end, totals, saves_first_step
        self._state, self._loader = stages.parts.state, stages.parts.loader
        self._latest = self._start = Progress(self._state.step, self._loader.position, self._loader.epoch_size)
        self.history = history
        """With the scores of this segment."""
        self.must_regroup = False
        """It has ended since others are to join."""
        self._saved: LastSave | None = None
        self._is_stopped = False

    def run(self, event: RunEvent) -> Reason | None:
        """Train to the end of the stage, or of the run. Metrics and summaries of later steps are cut off first.

        Returns:
            Why the run ends with this segment; None where another stage follows, or other workers join.

        Raises:
            NonFiniteError: an attempt has ended it; its batch is kept.
        """
        with ExitStack() as stack:
            self._logger = self._open_logger(stack, event)
            if self._logger and self._files:
                stack.enter_context(self._files.saver)  # which writes into the chain
            stage = self._stages.now.recipe
            self.validation = Validation(stage, self._stages.parts, self._worker, self._logger, self.history)
            self.history = self.validation.history
            self._mark(event.name, **event.facts, **self._lost_lines())
            if self._recipe.stages and self._worker.is_chief:
                log.info("%s", self._stages.describe())
            self._catch_up(event.name)
            self._train(self._hooks(stack))
            if self.must_regroup:
                return None
            reason = self._reason()
            if reason == "patience" and self._worker.is_chief:
                log.info("the run ends at step %d: %s", self._state.step, self.validation.early_stop_reason())
            self._save()
            if self._files:
                self._files.saver.wait()
            if self._files and reason:
                self._files.workdir.settle(stops=self._is_stopped)
            if reason:
                self._mark("stop" if reason == "stopped" else "end", reason=reason)
            elif self._recipe.watch.on_failure == "continue":
                # A worker in the next stage has no longer what a lost chief would have had to score and save here.
                self._worker.group.barrier("the stage has ended")
        return reason

    def _catch_up(self, event: str) -> None:
        """Score and save the state that the segment begins with, where that was left off or may have been."""
        if self._stages.now.number > 1 and self._start.step == self._stages.now.first_step:
            return  # the stage before has done it, and the checkpoint of this step is of that stage
        was_cut_off = event in ("resume", "continue")
        if was_cut_off and self.validation.is_overdue(self._start, anew=event == "continue"):
            self._validate()
        before = step_before(self._start, self._loader.batch_size)
        is_due = event == "continue" and self._recipe.checkpoints.every.passed(before, self._start)
        if is_due and self._files and self._files.store.path(self._state.step).exists():
            self._saved = self._saved or self._files.last_save  # before a worker was lost
        if is_due or event not in ("join", "continue"):
            self._save()

    def _train(self, hooks: Sequence[Hook]) -> None:
        """Make attempts, and call the hooks after each, until the segment is over."""
        parts, exchange = self._stages.parts, self._recipe.exchange
        losses, counts = parts.task.losses, parts.task.counts(self._state.model)
        steps = steps_without_survival(
            self._state, losses, self._loader, parts.towers, exchange, counts=counts, until=self._end
        )
        try:
            with closing(steps):
                while not (self._is_over() or self.must_regroup) and (report := next(steps, None)):
                    self._latest = report.progress
                    self._is_stopped = report.stop_requested
                    with span("hooks"):
                        for hook in hooks:
                            hook(report)
                    self.must_regroup = report.regroup_requested and not (self._is_over() or self._is_at_end())
            self._worker.pulse.at(self._state.step, "end")
            if self._is_over() and not is_served(exchange):  # where the steps end by themselves they have done it
                Replicas(self._state, self._worker).compare()
        except NonFiniteError as error:
            if error.nonfinite:
                self._keep(error.nonfinite)
            raise
        except FaultError as error:
            self._note(error.verdict)
            raise
        except StoreError:
            self._save_at_last()
            self._let_chief_save()
            raise
        except PeerLostError:
            # Most likely the store has failed another worker.
            if self._recipe.watch.on_failure != "continue" and reads_store(self._recipe):
                self._save_at_last()
            raise

    def _save_at_last(self) -> None:
        """Save what there is where the data cannot be read any longer; the next start goes on from here."""
        if not (self._files and self._worker.is_chief and self._state.is_settled):
            return
        with self._worker.pulse.during(self._state.step, "save"):
            log.warning("the run ends with an error, and is saved at step %d", self._state.step)
            try:
                self._save()
                self._files.saver.wait()
                self._files.workdir.settle(stops=True)
            except Exception as error:  # of a disk, of a logger: what has ended the run says what to do
                log.error(
                    "step %d could not be saved: %s; older checkpoints are as they were", self._state.step, told(error)
                )

    def _let_chief_save(self) -> None:
        """Live on for a while, where the chief is another worker, which would be ended soon after this one.

        It saves once the store fails it, too, as all read with the same credentials, or once this worker is gone.
        """
        end = time.monotonic() + (0.0 if self._worker.is_chief else _CHIEF_SECONDS)
        with suppress(PeerLostError):
            while time.monotonic() < end:
                self._worker.group.check_peers()
                time.sleep(0.1)

    def _is_over(self) -> bool:
        """Whether the segment ends before the run does: at the end of the run the iterator of steps ends by itself."""
        if self._is_stopped or self.validation.is_out_of_patience:
            return True
        return self._stages.now.is_over(self._state.step) and not self._is_at_end()

    def _is_at_end(self) -> bool:
        return self._end is not None and self._end.reached(self._latest, self._loader.batch_size)

    def _reason(self) -> Reason | None:
        if self._is_stopped:
            return "stopped"
        if self.validation.is_out_of_patience:
            return "patience"
        return "end" if self._is_at_end() or self._stages.is_at_last else None

    def _hooks(self, stack: ExitStack) -> list[Hook]:
        """Make the hooks in order: metrics and summaries are on the disk before the checkpoint that counts on them."""
        recipe, parts, start = self._recipe, self._stages.parts, self._start
        hooks: list[Hook] = [self._check_report, *self._totals]
        if self._worker.is_chief:
            quarantine = QuarantineList(self._files.workdir if self._files else None, self._loader)
            stack.callback(quarantine.close)
            console = Console(recipe.watch.console, batch_size=recipe.batch_size, end=self._end)
            stack.callback(console.close)
            hooks += [quarantine, console]
        if self._files and self._logger:
            timings = TimingsFile(self._files.workdir.path / TIMINGS, batch_size=self._loader.batch_size, end=self._end)
            stack.callback(timings.close)
            hooks.append(timings)
        if self._logger:
            hooks += self._logger.hooks()
            hooks += self._logger.observe(self._state, parts.towers, self._loader.batch_size)
        if parts.scores(SPLIT):
            hooks.append(every(recipe.evaluate.every, lambda _: self._validate(), start=start))
        if self._logger and recipe.verify.every:
            digests = Interval(recipe.verify.every)
            hooks.append(every(digests, lambda _: self._write_digests(), start=start))
        if self._files:
            hooks.append(every(recipe.checkpoints.every, lambda _: self._save(), start=start))
        if self._saves_first_step:
            hooks.append(lambda report: self._save() if report.step == start.step + 1 else None)
        return [*hooks, *(hook.get() for hook in recipe.hooks), *self._tracing(stack)]

    def _tracing(self, stack: ExitStack) -> Iterator[Hook]:
        """Make the hooks that record what the other ones do, too."""
        watch, step = self._recipe.watch, self._start.step
        if self._files and watch.profile:
            profile = ProfileHook(watch.profile, self._files.workdir.path / TRACES, self._worker, start=step)
            stack.callback(profile.close)
            yield profile
        if self._files and watch.trace:
            yield stack.enter_context(Trace(self._files.workdir.path, watch.trace, start=step))

    def _check_report(self, report: StepReport) -> None:
        if self._files:
            self._files.workdir.check_held(closely=False)
        if report.nonfinite and report.nonfinite.culprits:
            self._keep(report.nonfinite)
        if report.verdict:
            self._note(report.verdict)

    def _note(self, verdict: ReplayVerdict) -> None:
        """Note in the history what has come of making an attempt again."""
        if self._files and self._worker.is_chief:
            facts = verdict._asdict() | {"workers": self._worker.num_workers}
            self._files.workdir.note("verdict", **facts)

    def _keep(self, nonfinite: NonFiniteReport) -> None:
        if nonfinite.verdict:
            self._note(nonfinite.verdict)
        if self._files:
            folder = self._files.workdir.path / "refused"
            keep_batch(folder, nonfinite, self._state.step, self._loader, self._worker)

    def _validate(self) -> None:
        """Score the validation examples, unless the run is to stop: there may be time only to save."""
        self._is_stopped = self._is_stopped or not self.validation.run()
        if self._files and self._files.store.retention.best and self._worker.is_chief:
            self._files.saver.wait()  # the one in flight may be better
            if self._files.store.is_among_best(self._state.step, self.validation.scores):
                self._save()

    def _save(self) -> None:
        what = LastSave(self._stages.now.number, self._state.step, self._loader.position, self.validation.scores)
        if self._files and what != self._saved:
            self._saved = what
            self._files.workdir.check_held()
            commit = None
            if self._logger:
                self._logger.flush()
                self._files.workdir.note_save(self._state.step, self._loader.position, self._logger.metrics.num_lines)
                commit = partial(_commit, self._files, self._logger, what)
            self._files.saver.save(self._state, self._loader, scores=what.scores, before_commit=commit)
            if self._logger:
                self._logger.mark("save", self._state.step)

    def _write_digests(self) -> None:
        if self._logger:
            self._logger.write_digests(self._state.step, self._loader.position, digests_of(self._state.sections()))

    def _open_logger(self, stack: ExitStack, event: RunEvent) -> MetricsLogger | None:
        if self._files is None or not self._worker.is_chief:
            return None
        watch, step = self._recipe.watch, self._start.step
        has_several_hosts = self._worker.num_local_workers < self._worker.num_workers
        logger = MetricsLogger(
            self._files.workdir.path,
            watch,
            self._start,
            flushes_each_line=watch.on_failure == "continue" and has_several_hosts,
            loggers=self._files.loggers,
        )
        stack.callback(logger.close)
        logger.write_missed(event.missed)
        self._files.loggers.begin(self._worker, step, logger.metrics.path)
        if event.name in ("continue", "join"):
            return logger
        self._files.loggers.log_artifact(self._files.workdir.path / RECIPE)
        logger.describe(to_toml(self._recipe), str(self._state.model), step)
        if watch.images:
            logger.show_images(self._loader, watch.images, step)
        return logger

    def _lost_lines(self) -> dict[str, int]:
        """Warn of lines that metrics.jsonl has lost since the checkpoint was saved; returns facts for the history."""
        if not (self._files and self._logger):
            return {}
        found = self._logger.metrics.num_lines
        saved = self._files.workdir.metrics_lines(self._start.step, self._start.position)
        if saved is None or found >= saved:
            return {}
        log.warning(
            "metrics.jsonl has %d of the %d lines that it had at step %d; the run goes on without the others%s",
            found,
            saved,
            self._start.step,
            ", and evaluate.patience counts no evaluation among them" if self._recipe.evaluate.patience else "",
        )
        return {"lost_metrics_lines": saved - found}

    def _mark(self, event: str, **facts: object) -> None:
        if not (self._files and self._logger):
            return
        workdir, step, loader, worker = self._files.workdir, self._state.step, self._loader, self._worker
        line = workdir.note(event, step=step, workers=worker.num_workers, **workdir.holder, **facts)
        ground = {
            "step": step,
            "event": event,
            "history": checksum(line.encode()),
            "from_position": loader.position,
            "skipped": list(loader.skipped),
            "stage": self._stages.now.number,
            "workers": worker.num_workers,
            "sums": how_summed(self._recipe.exchange, worker),
            "recipe": to_toml(self._recipe),
            "data": data_digest(loader),
            **({"choices": asdict(self._choices)} if self._choices else {}),
        }
        self._logger.chain.write_event(ground)
        self._logger.mark(event, step)


def _commit(files: Files, logger: MetricsLogger, what: LastSave, digests: Digests, values_sha256: str) -> None:
    """Note what is on the disk, before the checkpoint has its name."""
    logger.write_digests(what.step, what.position, digests, values_sha256)
    files.last_save = what


def reads_store(recipe: Recipe) -> bool:
    """Whether the examples to train on are in an object store."""
    return "train" in recipe.data.splits and is_url(recipe.data.path_of("train"))


def data_digest(loader: Loader) -> str:
    """Return the checksum of the fingerprint of the examples, as the chain has it."""
    return checksum(json.dumps(loader.fingerprint).encode())


def how_summed(exchange: Exchange, worker: Worker) -> str:
    """Say how the workers add up: "tree" gives the same bits for every number of them; by "gloo" it depends on it.

    "served" depends on whose gradients come first.
    """
    if worker.num_workers == 1 or is_exact(exchange):
        return "tree"
    if not isinstance(exchange, AllReduce):
        return "served" if is_served(exchange) else "tree"
    name = exchange.resolve(worker)
    return "tree" if name == "shared_memory" else name
