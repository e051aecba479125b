"""A run by its recipe: start or resume it, train it segment by segment to its end, and score the final weights."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.checkpoints.fetching import fetch_run
from lockstep.checkpoints.mirror import mirror_of, shown_path
from lockstep.checks import check_type
from lockstep.description import described
from lockstep.errors import InputError, LockstepError, PeerLostError
from lockstep.evaluation.evaluate import Evaluation
from lockstep.launcher.calls import call_on_workers, not_in_module
from lockstep.loggers.logger import Logger, LoggerKind
from lockstep.metrics.metric import NO_METRICS, Metric, check_metrics
from lockstep.owner import Owner
from lockstep.recipes.code import functions_of, with_code
from lockstep.recipes.recipe import Model, Recipe
from lockstep.recipes.toml import from_toml, to_toml
from lockstep.reporting.throughput import InputTotals, Throughput
from lockstep.runs.inputs import check_inputs
from lockstep.runs.objects import check_objects
from lockstep.runs.segment import Files, RunEvent, Segment
from lockstep.runs.stages import Stages
from lockstep.runs.start import Start
from lockstep.runs.validation import SPLIT, score_split
from lockstep.runs.workdir import Best, Reason, Result, Workdir, located
from lockstep.screen import log
from lockstep.served.exchanges import is_served, num_computing
from lockstep.storage.remote_path import is_url
from lockstep.training.memory import snapshot_of_lack
from lockstep.training.regrouping import NUM_REPORTS, Memory, agree_anew, recall
from lockstep.training.rollback import check_may_roll_back, go_back, last_checkpoint
from lockstep.types import Hours, NonFiniteError, Progress, StepReport
from lockstep.workers.rank import Worker, generations_of, join, regroup
from lockstep.workers.signals import stop_on_signals
from lockstep.workers.stragglers import find_straggler, spent_since

if TYPE_CHECKING:
    from torch import nn

    from lockstep.optim.from_torch import FromTorch
    from lockstep.optim.rules import Optimizer
    from lockstep.runs.build import ReaderFunction
    from lockstep.training.choices import Choices
    from lockstep.training.loop import Hook
    from lockstep.types import LossFunction, ScoreFunction


class _Regrouped(NamedTuple):
    """Workers that have met anew, after some were lost or others have joined."""

    lost: str
    """Who was lost, and why; empty where others join."""
    began: float
    """When this worker has begun to regroup, by `time.perf_counter`."""
    own: Memory | None
    """What the others can go on with; None where this worker does not have all of it."""


def run(
    recipe: Recipe,
    workdir: str | Path | None,
    *,
    model: Callable[..., nn.Module] | Model | None = None,
    task: Any = None,
    losses: LossFunction | None = None,
    score: ScoreFunction | None = None,
    reader: ReaderFunction | None = None,
    optimizer: Optimizer | FromTorch | None = None,
    hooks: Sequence[Hook] = (),
    metrics: Mapping[str, Metric] = NO_METRICS,
    loggers: Sequence[Logger | LoggerKind] = (),
    accept_changes: bool = False,
    accept_data_change: bool = False,
    fork_from: str | None = None,
    workers: int | None = None,
) -> Result:
    """Train by a recipe, or resume the run in its workdir: what `lockstep train` does, from a script or a notebook.

    A script started by itself is one worker; under `lockstep run --workers 4` all workers call this, and are one run.
    With `workers=2` this process starts so many, as `ls.launch` does, waits for them, and is none itself.
    Ctrl-C, SIGTERM or SIGUSR1 ends the run after its step, saved, with the reason "stopped"; the script goes on then,
    and the runs that follow in it are stopped, too. Called outside the main thread, it leaves signals to the script.

    Args:
        recipe: `find("mnist")`, or a changed one: `dataclasses.replace(recipe, batch_size=64)`.
        workdir: the run's folder, also one on a bucket: "s3://bucket/runs/mnist"; None writes nothing.
        model: a class or function that makes the network, in place of the recipe's: `model=Net`, or with arguments
            `model=functools.partial(Net, width=32)`. Its weights are drawn from the recipe's seed.
        task: an object with the methods `losses(model, batch)` and, as far as it has them, `score(model, batch)`,
            `counts(model, batch)`, `predict(model, batch)` and the attributes `metrics`, `main_score` and `better`; see
            `PythonTask`.
        losses: in place of a task: `losses(model, batch)` returns named scalars, means over the batch, whose sum is
            minimised; or a pair of these and of metrics to report.
        score: `score(model, batch)` returns by name a number for each example, of shape (batch,), which are averaged,
            or what the metric of that name takes. Without it a run by losses of your own is not evaluated.
        reader: `reader(split)` gives the examples of "train", "validation" or "test", in place of the recipe's paths:
            a reader, a torch dataset or a dict of arrays, or None where there are none of that split. For a classifier
            their fields are "image" and "label", for a detector "image", "boxes" and "labels", for losses of your own
            any.
        optimizer: in place of the recipe's; `FromTorch` of any class, too.
        hooks: each is called with the `StepReport` of each attempt, on every worker.
        metrics: by name; they get the logits and the labels of all examples that are scored, or what `score` returns
            by their name. The numbers that they compute are scores like top 1: `checkpoints.retention.best` may be
            "validation/f1", or "validation/f1/KEY" of a metric that computes a mapping.
        loggers: besides those of the recipe: `ls.loggers.Wandb()`, or one of your own with the methods of
            `ls.loggers.Logger`. The chief alone uses them.
        accept_changes: go on although the recipe is not the one the run began with.
        accept_data_change: go on although the data has changed since the run was saved, if it has as many examples;
            the log and the history name the changes.
        fork_from: another run's workdir, or RUN@STEP, whose full state a run without checkpoints begins with.
        workers: how many processes to start for this run, 1 or more; None trains in this one. Functions and classes of
            your own are of modules then, which the workers import; metrics and loggers are parts of task and recipe.

    The recipe in the workdir names these functions, and the fingerprints of their source: a resume by other code is
    refused as one by another recipe is. Commands such as `lockstep evaluate` call those that are in a module; those of
    the script itself it alone can call.

    Returns:
        Why and where the run has ended, and the scores of its final weights; the same on all workers, but for times.

    Raises:
        InputError: the recipe lacks a path, its data cannot come from a function, or the data has changed; its best
            checkpoint is to be kept by a score that there is not; or a function returns something else than it has to.
        WorkdirError: the workdir holds something else, or a run of another recipe.
        WorkerError: a worker that was started here has failed; what it said is shown before.
    """
    hint = 'write ls.run(ls.recipes.find("mnist"), "runs/mnist")'
    check_type("recipe", recipe, Recipe, expected="a Recipe", hint=hint)
    own = {"model": model, "task": task, "losses": losses, "score": score, "reader": reader, "optimizer": optimizer}
    flags: dict[str, Any] = {"accept_changes": accept_changes, "fork_from": fork_from}
    flags["accept_data_change"] = accept_data_change
    if workers is not None:
        _check_travels(metrics=metrics, loggers=loggers)
        return _run_on(workers, recipe.with_parts(**own, hooks=hooks), workdir, flags)
    worker = join(recipe.device, workers_per_device=recipe.workers_per_device, chief_serves=is_served(recipe.exchange))
    path = fetch_run(str(workdir)) if is_url(workdir) else None if workdir is None else Path(workdir)
    recipe = recipe.with_parts(**own, hooks=hooks)
    saved = Workdir(path).recipe() if path else None
    num_towers = recipe.num_towers or (saved.num_towers if saved else None)
    recipe = replace(recipe, num_towers=num_towers or num_computing(recipe.exchange, worker.num_workers))
    is_main = threading.current_thread() is threading.main_thread()
    with stop_on_signals(worker.pulse) if is_main else nullcontext():
        return Run(recipe, path, worker, metrics=metrics, loggers=loggers, **flags).run()


def _check_travels(**given: Mapping[str, Metric] | Sequence[Logger | LoggerKind]) -> None:
    """Refuse objects that are no part of the recipe, which is all that workers get."""
    for name in (name for name, value in given.items() if value):
        raise InputError(
            f"Workers that are started for a run get no {name} beside its recipe.",
            given=f"{name}, and workers",
            expected=f"{name} in a part of the recipe",
            hint="metrics are an attribute of the class that is task=..."
            if name == "metrics"
            else 'replace(recipe, loggers=(ls.loggers.Csv("log.csv"),))',
        )


def _run_on(workers: int, recipe: Recipe, workdir: str | Path | None, flags: Mapping[str, Any]) -> Result:
    """Train on workers that are started for it, and which find by its name what the recipe names."""
    for function in functions_of(recipe):
        if not function.is_in_module:
            raise not_in_module(function.name, "ls.run")
    place = None if workdir is None else str(workdir)
    call = partial(_run_as_worker, to_toml(recipe), place, **flags)
    watch = watch_of_launcher(recipe, has_workdir=place is not None)
    return Result.of_saved(call_on_workers(call, workers, watch, shown_as="ls.run"))


def _run_as_worker(recipe: str, workdir: str | None, **flags: Any) -> dict[str, Any]:
    return asdict(run(with_code(from_toml(recipe, "the recipe")), workdir, **flags))


def watch_of_launcher(recipe: Recipe, *, has_workdir: bool) -> dict[str, Any]:
    """What a launcher is to do for a run when workers are lost or hang: a part of its plan."""
    watch = recipe.watch
    return {
        "hang_seconds": watch.hang_seconds,
        "restarts": watch.restarts if has_workdir else 0,  # else there is nothing to go on from
        "survival": {"min_workers": watch.min_workers, "replacements": watch.restarts}
        if watch.on_failure == "continue"
        else None,
    }


def _check_written(recipe: Recipe, path: Path) -> None:
    """Refuse what all workers write into one folder where each host has a folder of its own, as of a bucket."""
    if recipe.watch.trace and mirror_of(path):
        raise InputError(
            "A trace of several hosts needs a workdir that all of them see.",
            given=f"watch.trace={str(recipe.watch.trace)!r}, and {shown_path(path)}, of which each host has a copy",
            expected="no trace, a folder on a file system that all hosts mount, or one host",
            hint="leave the trace out; watch.profile shows what the chief does",
        )


class Run:
    """One start of a run on one worker; every worker makes one, with the same recipe, and runs it.

    Args:
        recipe: complete, with its number of towers.
        path: the workdir; None writes nothing.
        worker: this worker.
        accept_changes, accept_data_change, fork_from, metrics, loggers: as in `run`.
    """

    def __init__(
        self,
        recipe: Recipe,
        path: Path | None,
        worker: Worker,
        *,
        accept_changes: bool = False,
        accept_data_change: bool = False,
        fork_from: str | None = None,
        metrics: Mapping[str, Metric] = NO_METRICS,
        loggers: Sequence[Logger | LoggerKind] = (),
    ) -> None:
        self._recipe, self._worker = recipe, worker
        check_metrics(metrics, taken=recipe.chosen_task.score_names or ())
        check_inputs(recipe, path, accept_changes=accept_changes, fork_from=fork_from, metrics=metrics, loggers=loggers)
        if recipe.watch.on_failure == "continue" and worker.num_workers > 1:
            generations_of(worker)
        workdir = Workdir(path) if path else None
        if path and worker.num_local_workers < worker.num_workers:
            _check_written(recipe, path)
        changed = workdir.check(recipe, accept_changes=accept_changes) if workdir else []
        worker.group.agree("the recipe", described(recipe))
        worker.pulse.hang_seconds = recipe.watch.hang_seconds
        at_its_data = located(recipe, path)
        if at_its_data is not recipe and worker.is_chief:
            log.info("the data is not in %s: it is read where the run has read it before", Path.cwd())
        self._stages = Stages(at_its_data, worker, metrics)
        self._files = Files.of(workdir, recipe, loggers) if workdir else None
        self._start = Start(
            recipe,
            self._stages,
            self._files,
            changed,
            objects=check_objects(self._stages.now.recipe, self._stages.parts) if worker.is_chief else None,
            is_data_elsewhere=at_its_data is not recipe,
            accept_data_change=accept_data_change,
            fork_from=fork_from,
        )
        self._end = self._stages.end
        self._input, self._pace = InputTotals(), Throughput()
        self._has_begun, self._has_gone_back = False, False
        self._choices: Choices | None = None
        self._history: Mapping[int, float] = {}
        self._recent = deque[StepReport](maxlen=NUM_REPORTS)
        self._segment_began = time.perf_counter()
        self._together_since: tuple[int, Mapping[str, float]] = 0, {}
        """The step from which these workers have trained together, and the seconds that this one had spent by then."""
        self._held = ExitStack()
        self._chief: Owner | None = None

    @property
    def step(self) -> int:
        """Completed updates of the run."""
        return self._stages.parts.state.step

    def run(self, *, conclude: bool = True) -> Result:
        """Train to the end of the recipe, or until stopped; if `conclude`, score the weights and write the result."""
        began = time.perf_counter()
        pulse = self._worker.pulse
        pulse.ended, pulse.saves_at_stop = False, self._files is not None  # of an earlier run of the same script
        with self._held, self._failure_noted():
            if self._files and self._recipe.watch.memory_snapshot:
                path = self._files.workdir.path / "memory" / f"worker-{self._worker.rank}.pickle"
                self._held.enter_context(snapshot_of_lack(path, self._worker.device))
            regrouped = self._regroup() if self._worker.is_newcomer else None
            while True:
                try:
                    return self._complete(regrouped, began, conclude=conclude)
                except PeerLostError as error:
                    if not self._survives:
                        raise
                    lost = str(error.given)
                # Outside of the except block, whose traceback would keep connections open.
                regrouped = self._regroup(lost)

    @contextmanager
    def _failure_noted(self) -> Iterator[None]:
        """Write the error with which this start ends into the history, if it has begun and this process holds it."""
        try:
            yield
        except BaseException as error:
            if self._files and self._files.workdir.owner and self._has_begun:
                told = error.what if isinstance(error, LockstepError) else f"{type(error).__name__}: {error}"
                with suppress(LockstepError):  # the disk may be the reason
                    self._files.workdir.note("failed", step=self.step, error=told)
            raise

    def _complete(self, regrouped: _Regrouped | None, began: float, *, conclude: bool) -> Result:
        reason, last = self._train(regrouped)
        self._worker.pulse.saves_at_stop = False
        self._log_straggler()
        if self._worker.is_chief and self._input.num_attempts:
            log.info("%s", self._input)
        scored = self._score(last) if conclude and reason != "stopped" else None
        result = self._result(reason, scored, time.perf_counter() - began)
        if conclude and self._files and self._worker.is_chief and result.is_complete:
            self._files.workdir.write_result(result)
        if self._files and self._worker.is_chief:
            self._files.end_loggers(result)
            self._files.workdir.settle(stops=reason == "stopped")
        if self._survives:
            self._worker.group.barrier("the run has ended")  # with a worker that has left nobody could make up for it
        return result

    def _train(self, regrouped: _Regrouped | None) -> tuple[Reason, Segment]:
        """Train segment by segment; returns why the run ends, and its last segment."""
        event = self._go_on(regrouped) if regrouped else self._begin()
        self._together_since = self.step, dict(self._worker.pulse.seconds)
        while True:
            self._segment_began, step = time.perf_counter(), self.step
            segment = self._segment()
            try:
                reason = segment.run(event)
            except NonFiniteError as error:
                event, self._has_gone_back = self._roll_back(error), True
            else:
                if reason:
                    return reason, segment
                # A rollback may have led to the very end of a stage.
                self._has_gone_back = self._has_gone_back and self.step == step
                if segment.must_regroup:
                    event = self._go_on(self._regroup())
                    self._together_since = self.step, dict(self._worker.pulse.seconds)
                    continue
                self._stages.enter_next()
                event = RunEvent("stage", {"stage": self._stages.now.number})
            finally:
                self._history = segment.history
            self._shorten_end(time.perf_counter() - self._segment_began)

    def _segment(self) -> Segment:
        return Segment(
            self._recipe,
            self._stages,
            self._worker,
            self._files,
            end=self._end,
            totals=[self._recent.append, self._input.add, self._pace.add],
            saves_first_step=self._has_gone_back,
            history=self._history,
            choices=self._choices,
        )

    def dry_run(self) -> list[str]:
        """Do all that comes before the first step, but write nothing; describe in lines how the run would go on.

        Raises:
            LockstepError: the run could not begin, or its workers do not agree.
        """
        return self._start.dry_run(self._worker)

    def _begin(self) -> RunEvent:
        self._hold_workdir()
        event = self._start.begin(self._worker)
        self._choices = event.choices
        self._shorten_end(self._worker.pulse.earlier_seconds)
        if self._survives:
            self._worker.group.barrier("the run has begun")  # its chief has written what another one would not write
        self._has_begun = True
        return event

    @property
    def _survives(self) -> bool:
        """Whether it goes on when workers are lost."""
        return self._recipe.watch.on_failure == "continue"

    def _regroup(self, lost: str = "") -> _Regrouped:
        began = time.perf_counter()
        # Where the chief serves an exchange, it alone has the whole state.
        has_state = self._worker.is_chief or not is_served(self._recipe.exchange)
        loader = self._stages.parts.loader
        own = Memory.of(self._recent, loader, self._history) if self._has_begun and has_state else None
        regroup()
        return _Regrouped(lost, began, own)

    def _hold_workdir(self) -> bool:
        """Hold the workdir where this worker is the chief, and let the workers that may follow it know who does.

        Returns:
            Whether the chief has another folder than the one before, which the bucket may be behind.
        """
        if self._files is None:
            return False
        workdir, pulse, is_behind = self._files.workdir, self._worker.pulse, False
        if self._worker.is_chief and workdir.owner is None:
            if self._chief:
                with pulse.during(pulse.step, "save"):  # it may take as long
                    is_behind = workdir.taken_up(self._chief)
            self._held.enter_context(workdir.held(known_dead=self._chief))
            if is_behind:
                workdir.write_recipe(self._recipe)  # that of this start may not have been uploaded
            self._held.enter_context(self._files.saver)
            self._held.enter_context(self._files.loggers)
        if self._survives:
            owner = workdir.owner.encode().decode() if workdir.owner else None
            owner, is_behind = self._worker.group.broadcast([owner, is_behind])
            self._chief = Owner.decode(owner.encode())
        return is_behind

    def _go_on(self, regrouped: _Regrouped) -> RunEvent:
        """Go on with these workers from memory, or else from the last checkpoint."""
        stages, worker = self._stages, self._worker
        worker.group.agree("the recipe", described(self._recipe))
        lost = agree_anew(worker, regrouped.lost)
        if not any(worker.group.gather(self._has_begun)):
            return self._begin()
        is_behind = self._hold_workdir()
        state, loader = stages.parts.state, stages.parts.loader
        found = (
            None
            if is_behind
            else recall(state, loader, worker, self._recipe.exchange, regrouped.own, stage=stages.now.number)
        )
        source = "memory" if found else stages.load_last(self._files.store if self._files else None)
        if found:
            self._history = found.memory.history
            self._recent.extend(found.memory.reports)
        if found and found.checkpoint:
            stages.load_memory(found.checkpoint, found.stage)
        self._shorten_end(time.perf_counter() - self._segment_began)
        self._has_begun, self._segment_began = True, time.perf_counter()
        facts = {"from": source, "seconds": time.perf_counter() - regrouped.began, **({"lost": lost} if lost else {})}
        if worker.is_chief:
            log.info("going on from step %d, position %d, from %s", self.step, stages.parts.loader.position, source)
        return RunEvent("continue" if lost else "join", facts, missed=found.memory.reports if found else ())

    def _log_straggler(self) -> None:
        """Log for which of the present workers the others have waited, if they have for a tenth of their time."""
        first_step, before = self._together_since
        of_all = self._worker.group.gather(spent_since(before, self._worker.pulse.seconds))
        if (straggler := find_straggler(of_all, self.step - first_step)) and self._worker.is_chief:
            said = straggler.describe(self._worker.group.names[straggler.rank])
            log.info("%s", said)
            if self._files:
                self._files.workdir.note("straggler", step=self.step, said=said)

    def _roll_back(self, error: NonFiniteError) -> RunEvent:
        """Go back to the last checkpoint if that is the recipe's policy."""
        nonfinite, from_step, before = error.nonfinite, self.step, self._stages.parts
        if self._files is None or nonfinite is None or self._recipe.nonfinite != "rollback":
            raise error
        check_may_roll_back(before.state, before.loader, error)
        checkpoint = last_checkpoint(self._files.store, before.state, before.loader, error)
        self._stages.enter_stage_of(checkpoint)
        go_back(checkpoint, self._stages.parts.state, self._stages.parts.loader, error)
        why = [*nonfinite.reasons, *nonfinite.culprits]
        return RunEvent("rollback", {"from_step": from_step, "skipped": nonfinite.position, "why": why})

    def _shorten_end(self, seconds: float) -> None:
        """Take the time of a segment off an end in hours: each segment has a clock of its own."""
        if isinstance(self._end, Hours):
            left = max(self._end.count - seconds / 3600, 1e-9)
            self._end = Hours(self._worker.group.broadcast(left))  # one that joins has had no part in what is spent

    def _score(self, last: Segment) -> Evaluation | None:
        """Score the final weights; None where there are no examples for it, or the run is stopped first."""
        self._worker.pulse.ended = True
        split = self._split
        known = last.validation.latest if split == SPLIT else None
        return known or (score_split(self._stages.now.recipe, self._stages.parts, split) if split else None)

    @property
    def _split(self) -> str | None:
        """The examples that are scored after the end: test, else validation."""
        return next((split for split in ("test", SPLIT) if self._stages.parts.scores(split)), None)

    def _result(self, reason: Reason, scored: Evaluation | None, seconds: float) -> Result:
        state, loader = self._stages.parts.state, self._stages.parts.loader
        return Result(
            recipe=self._recipe.name,
            step=state.step,
            epochs=Progress(state.step, loader.position, loader.epoch_size).epochs,
            reason=reason,
            split=self._split,
            evaluation=scored,
            best=self._best(),
            seconds=seconds,
            examples_per_second=self._pace.examples_per_second,
        )

    def _best(self) -> Best | None:
        """The best checkpoint, as the chief knows it."""
        best = Best.of(self._files.store) if self._files and self._worker.is_chief else None
        facts = self._worker.group.broadcast(asdict(best) if best else None)
        return Best(**facts) if facts else None
