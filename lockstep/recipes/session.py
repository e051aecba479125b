"""One start of a run by its recipe, on one worker: open the workdir, build, resume, train with hooks, save, score."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoints.store import Store
from lockstep.errors import NonFiniteError, WorkdirError
from lockstep.evaluation.evaluate import Evaluation
from lockstep.progress import End, Hours, Progress
from lockstep.recipes.build import build, schedule_mismatch
from lockstep.recipes.kept_batches import KeptBatches
from lockstep.recipes.quarantine import QuarantineList
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.records import Records
from lockstep.recipes.toml import to_toml
from lockstep.recipes.validation import Validation, score_split
from lockstep.recipes.workdir import WARM_START, Workdir
from lockstep.reporting.console import Console
from lockstep.reporting.input_totals import InputTotals
from lockstep.training import choices
from lockstep.training.choices import Choices
from lockstep.training.hooks import every
from lockstep.training.loop import Hook, train_steps
from lockstep.training.resume import resume, resume_at, save
from lockstep.training.rollback import rollback
from lockstep.training.run_weights import run_at_step
from lockstep.training.saving import Saver
from lockstep.training.warm_start import warm_start
from lockstep.types import StepReport
from lockstep.weights.report import Report
from lockstep.workers.rank import Worker

log = logging.getLogger("lockstep")


class Session:
    """One start of a run on one worker; every worker makes one, with the same recipe, and runs it.

    Args:
        recipe: complete, with its number of towers.
        path: the workdir; None writes nothing.
        worker: this worker.
        accept_changes: go on although the recipe is not the one the run began with.
        fork_from: another run's workdir, or RUN@STEP, whose full state a run without checkpoints begins with.

    Raises:
        WorkdirError: the workdir cannot be used, or the recipe asks for files and there is none.
        WorkerError: the workers were given different recipes.
    """

    def __init__(
        self,
        recipe: Recipe,
        path: Path | None,
        worker: Worker,
        *,
        accept_changes: bool = False,
        fork_from: str | None = None,
    ) -> None:
        self._recipe, self._worker = recipe, worker
        self._workdir = Workdir(path) if path else None
        if self._workdir is None:
            check_needs_no_files(recipe)
        self._changed = self._workdir.check(recipe, accept_changes=accept_changes) if self._workdir else []
        worker.group.agree("the recipe", to_toml(recipe).splitlines())
        self._parts = build(recipe, worker)
        self._store = Store(path / "checkpoints", recipe.checkpoints.retention) if path else None
        self._saver = Saver(self._store) if self._store else None
        self._kept = KeptBatches(path / "refused", self._parts.loader, worker) if path else None
        self._end = recipe.end
        self._latest: Progress | None = None
        self._saved: tuple[int, Mapping[str, float]] | None = None
        self.stopped = False
        """A signal has ended this start before the run was at its end."""
        self._input = InputTotals()
        self._fork_from = fork_from

    @property
    def step(self) -> int:
        """Completed updates of the run."""
        return self._parts.state.step

    def run(self) -> StepReport | None:
        """Train to the end of the recipe, or until stopped, with a checkpoint at the start and at the end.

        Returns:
            The last report; None where no step was left to do.
        """
        parts = self._parts
        with ExitStack() as stack:
            if self._workdir and self._worker.is_chief:
                stack.enter_context(self._workdir.held())
            settled = self._settle_choices()
            resumed = resume(parts.state, parts.loader, self._store) if self._store else None
            if resumed is None and self._workdir and self._worker.is_chief:
                self._workdir.check_unstarted()
            forked = self._forked(resumed)
            report = self._warm_started(resumed if forked is None else forked)
            # Only now: a start that is refused leaves the run as it was.
            if self._workdir and self._worker.is_chief:
                self._workdir.write_recipe(self._recipe)
                self._workdir.write_choices(settled)
                if report:
                    self._workdir.write(WARM_START, json.dumps(report.as_json(), indent=1) + "\n")
            if forked is not None and self._store:
                # Before the history tells of its step: a fork that is killed begins again, or goes on from here.
                save(parts.state, parts.loader, self._store)
            event = "start" if resumed is None else "resume"
            facts: dict[str, Any] = {"changed": self._changed}
            if forked is not None:
                facts["forked_from"] = self._fork_from
            while True:
                try:
                    return self._train(event, facts)
                except NonFiniteError as error:
                    event, facts = "rollback", self._roll_back(error)

    def _forked(self, resumed: int | None) -> int | None:
        """Take up the full state of another run, unless the workdir has a checkpoint, which wins."""
        if self._fork_from is None:
            return None
        if resumed is None:
            folder, step = run_at_step(self._fork_from)
            return resume_at(self._parts.state, self._parts.loader, folder, step)
        if self._worker.is_chief:
            log.info("not forked again: the run goes on from its own checkpoint of step %d", resumed)
        return None

    def _warm_started(self, resumed: int | None) -> Report | None:
        """Start from the weights that the recipe names, unless the workdir has a checkpoint, which wins."""
        given = self._recipe.warm_start
        if given is None or given.path is None:
            return None
        if resumed is None:
            return warm_start(self._parts.state, given.path, given.mapping)
        if self._worker.is_chief:
            log.info("%s is not loaded: the run goes on from its own checkpoint of step %d", given.path, resumed)
        return None

    def _train(self, event: str, facts: Mapping[str, Any]) -> StepReport | None:
        """Train from where the state stands to the end; records of an earlier stretch are cut there."""
        parts = self._parts
        self._latest = self._saved = None
        self._validation = Validation(self._recipe, parts, self._worker)
        start = Progress(parts.state.step, parts.loader.position, parts.loader.epoch_size)
        with ExitStack() as stack:
            self._records = self._open_records(stack, start)
            self._mark(event, start.step, **facts)
            if self._saver:
                stack.enter_context(self._saver)
            if event == "resume" and self._validation.is_owed(start, self._records):
                self._validate()
            self._save()
            hooks = self._hooks(stack, start)
            if event == "rollback":
                # The checkpoint it went back to stays as it is, so the next one is the first to say what is skipped.
                hooks.append(lambda report: self._save() if report.step == start.step + 1 else None)
            last = self._steps(hooks)
            self._save()
            if self._saver:
                self._saver.wait()
            self._mark("stop" if self.stopped else "end", parts.state.step)
        if last and self._worker.is_chief:
            log.info("%s", self._input)
        return last

    def _steps(self, hooks: Sequence[Hook]) -> StepReport | None:
        """Train until the end, or until stopped, and call the hooks after each attempt."""
        parts, last = self._parts, None
        steps = train_steps(
            parts.state, parts.task.losses, parts.loader, parts.towers, self._recipe.exchange, until=self._end
        )
        while not self.stopped and (report := next(steps, None)):
            self.stopped = report.stop_requested
            for hook in hooks:
                hook(report)
            last = report
        return last

    def _roll_back(self, error: NonFiniteError) -> dict[str, Any]:
        """Keep the batch; go back to the last checkpoint if the recipe wants it, else raise the error again.

        Returns:
            What the history is to say.
        """
        state, refusal = self._parts.state, error.refusal
        if self._kept and refusal:
            self._kept.keep(refusal, state.step)
        if self._store is None or refusal is None or self._recipe.nonfinite != "rollback":
            raise error
        from_step = state.step
        rollback(state, self._parts.loader, self._store, error)
        self._end = _rest(self._end, self._latest)
        return {"from_step": from_step, "skipped": refusal.position, "why": [*refusal.reasons, *refusal.culprits]}

    def evaluate(self, split: str) -> Evaluation | None:
        """Score the weights as they are now on a split, all workers together; None where a signal comes first."""
        return score_split(self._recipe, self._parts, split)

    def _hooks(self, stack: ExitStack, start: Progress) -> list[Hook]:
        """In this order: what a checkpoint stands for is on the disk before it."""
        recipe = self._recipe
        hooks: list[Hook] = [self._look, self._input.add]
        if self._worker.is_chief:
            quarantine = QuarantineList(self._workdir, self._parts.loader)
            stack.callback(quarantine.close)
            hooks.append(quarantine)
            console = Console(recipe.watch.console, batch_size=recipe.batch_size, end=self._end)
            stack.callback(console.close)
            hooks.append(console)
        if self._records:
            parts = self._parts
            hooks += self._records.hooks(start)
            hooks += self._records.observe(parts.state, parts.towers, start, parts.loader.batch_size)
        if self._parts.examples.has("validation"):
            hooks.append(every(recipe.evaluate.every, lambda _: self._validate(), start=start))
        if self._store:
            hooks.append(every(recipe.checkpoints.every, lambda _: self._save(), start=start))
        return hooks

    def _look(self, report: StepReport) -> None:
        if self._workdir:
            self._workdir.check_held(closely=False)
        self._latest = report.progress
        if self._kept and report.refusal and report.refusal.culprits:
            self._kept.keep(report.refusal, report.step)

    def _validate(self) -> None:
        """Score the validation examples, unless the run is to stop: there may be no time for more than to save."""
        self.stopped = self.stopped or not self._validation.run(self._records)
        if self._store and self._saver and self._store.retention.best and self._worker.is_chief:
            self._saver.wait()  # what is in flight may be better
            if self._store.is_among_best(self.step, self._validation.scores):
                self._save()

    def _save(self) -> None:
        what = self.step, self._validation.scores
        if self._saver and self._workdir and what != self._saved:
            self._saved = what
            self._workdir.check_held()
            if self._records:
                self._records.flush()
            self._saver.save(self._parts.state, self._parts.loader, scores=self._validation.scores)
            if self._records:
                self._records.mark("save", self._parts.state.step)

    def _open_records(self, stack: ExitStack, start: Progress) -> Records | None:
        if self._workdir is None or not self._worker.is_chief:
            return None
        records = Records(self._workdir.path, self._recipe.watch, start)
        stack.callback(records.close)
        records.describe(to_toml(self._recipe), str(self._parts.state.model), start.step)
        if self._recipe.watch.images:
            records.show_images(self._parts.loader, self._recipe.watch.images, start.step)
        return records

    def _mark(self, event: str, step: int, **facts: object) -> None:
        if self._workdir and self._records:
            self._workdir.note(event, step=step, workers=self._worker.num_workers, **self._workdir.holder, **facts)
            self._records.mark(event, step)

    def _settle_choices(self) -> Choices:
        """Take the saved choices, or make them; say what they are, and what has changed.

        Returns:
            Those of the first start.
        """
        parts, worker, workdir = self._parts, self._worker, self._workdir
        exact = getattr(self._recipe.exchange, "exact", False)
        saved = worker.group.broadcast(workdir.saved_choices() if workdir and worker.is_chief else None)
        before = Choices(**saved) if saved else None
        now = choices.resolve(parts.state, parts.towers, parts.loader, worker, exact=exact, saved=before)
        torch.set_num_threads(now.threads)
        changed = choices.differences(before, now) if before else []
        if exact:
            choices.refuse_changed(changed)
        if worker.is_chief:
            log.info("%s: %s", _crew(worker, parts.towers.count), now)
            if parts.loader.reader.cost == "decode":
                log.info("%s", parts.loader.crew.describe(worker.num_local_workers))
            mismatch = schedule_mismatch(self._recipe, parts.loader.epoch_size)
            if mismatch:
                log.warning("%s", mismatch)
            for line in self._changed:
                log.info("changed since the last start: %s", line)
            for line in changed:
                log.warning("changed since the first start, so the bits may differ: %s", line)
        self._changed += changed
        return before or now


def check_needs_no_files(recipe: Recipe) -> None:
    """Refuse a recipe that asks for files where there is no workdir.

    Raises:
        WorkdirError: checkpoints, summaries or metrics are asked for, or a policy that needs checkpoints.
    """
    if recipe.nonfinite == "rollback":
        raise WorkdirError(
            "Without a workdir there is no checkpoint to go back to.",
            given="nonfinite=rollback",
            expected="a workdir, or another policy",
            mend="name a --workdir, or add --set nonfinite=skip",
        )
    watch = recipe.watch
    asked = {
        "checkpoints.every": recipe.checkpoints.every,
        "watch.summaries": watch.summaries,
        "watch.metrics": watch.metrics,
        "watch.images": watch.images,
        "watch.gradients": watch.gradients,
        "watch.variables": watch.variables,
        "watch.activations": watch.activations,
    }
    wanted = [f"{field}={interval}" for field, interval in asked.items() if getattr(interval, "amount", interval)]
    if wanted:
        raise WorkdirError(
            "Without a workdir nothing can be written, and the recipe asks for files.",
            given=", ".join(wanted),
            expected="a workdir, or 0 for each of these",
            mend="name a --workdir, or add " + " ".join(f"--set {each.partition('=')[0]}=0" for each in wanted),
        )


def _crew(worker: Worker, num_towers: int) -> str:
    towers = f"{num_towers} tower{'s' if num_towers > 1 else ''}"
    return f"{towers} on {worker.num_workers} worker{'s' if worker.num_workers > 1 else ''}"


def _rest(end: End | None, latest: Progress | None) -> End | None:
    """What is left of an end after some steps of a start: its hours go on, whatever is done again."""
    if latest is None or not isinstance(end, Hours):
        return end
    return Hours(max(end.count - latest.elapsed_seconds / 3600, 1e-9))
