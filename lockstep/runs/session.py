"""One start of a run by its recipe, on one worker: begin or resume, go leg by leg to the end, score what came of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lockstep.checkpoints.store import Store
from lockstep.errors import NonFiniteError
from lockstep.evaluation.evaluate import Evaluation
from lockstep.progress import Hours, Progress
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import to_toml
from lockstep.reporting.throughput import InputTotals, Throughput
from lockstep.runs.beginning import begin
from lockstep.runs.examples import ReaderFunction
from lockstep.runs.leg import Files, Leg
from lockstep.runs.result import Best, Reason, Result
from lockstep.runs.settling import settle
from lockstep.runs.stages import Course
from lockstep.runs.validation import SPLIT, score_split
from lockstep.runs.without_files import check_needs_no_files
from lockstep.runs.workdir import Workdir
from lockstep.training.resume import save
from lockstep.training.rollback import check_may_roll_back, go_back, last_checkpoint
from lockstep.training.saving import Saver
from lockstep.workers.rank import Worker

log = logging.getLogger("lockstep")


class Session:
    """One start of a run on one worker; every worker makes one, with the same recipe, and runs it.

    Args:
        recipe: complete, with its number of towers.
        path: the workdir; None writes nothing.
        worker: this worker.
        accept_changes: go on although the recipe is not the one the run began with.
        accept_data_change: go on although the data is not what it was when the run was saved.
        fork_from: another run's workdir, or RUN@STEP, whose full state a run without checkpoints begins with.
        reader: gives the examples, in place of the recipe's paths.

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
        accept_data_change: bool = False,
        fork_from: str | None = None,
        reader: ReaderFunction | None = None,
    ) -> None:
        self._recipe, self._worker, self._fork_from = recipe, worker, fork_from
        self._accept_data_change = accept_data_change
        workdir = Workdir(path) if path else None
        if workdir is None:
            check_needs_no_files(recipe)
        self._changed = workdir.check(recipe, accept_changes=accept_changes) if workdir else []
        worker.group.agree("the recipe", to_toml(recipe).splitlines())
        self._course = Course(recipe, worker, reader)
        self._end = self._course.end
        self._files = _files(workdir, recipe) if workdir else None
        self._input, self._pace = InputTotals(), Throughput()

    @property
    def step(self) -> int:
        """Completed updates of the run."""
        return self._course.parts.state.step

    def run(self, *, conclude: bool = True) -> Result:
        """Train to the end of the recipe, or until stopped, with a checkpoint at the start and at the end.

        Args:
            conclude: score the weights that the run has ended with, and write its result down.
        """
        began = time.perf_counter()
        self._worker.pulse.ended = False  # of an earlier run of the same script
        with ExitStack() as stack:
            if self._files and self._worker.is_chief:
                stack.enter_context(self._files.workdir.held())
            reason, last = self._train()
            if self._worker.is_chief and self._input.num_attempts:
                log.info("%s", self._input)
            scored = self._score(last) if conclude and reason != "stopped" else None
            result = self._result(reason, scored, time.perf_counter() - began)
            if conclude and self._files and self._worker.is_chief and result.is_complete:
                self._files.workdir.write_result(result)
        return result

    def _train(self) -> tuple[Reason, Leg]:
        """Go through the legs of the run; returns the last of them, and why it is the last."""
        event, facts = self._begin()
        has_gone_back, history = False, dict[int, float]()
        while True:
            began, step = time.perf_counter(), self.step
            leg = self._leg(has_gone_back, history)
            try:
                reason = leg.run(event, facts)
            except NonFiniteError as error:
                event, facts, has_gone_back = "rollback", self._roll_back(error), True
            else:
                if reason:
                    return reason, leg
                # It may have gone back to the very end of a stage.
                has_gone_back = has_gone_back and self.step == step
                history = leg.validation.history
                self._course.go_on()
                event, facts = "stage", {"stage": self._course.now.number}
            self._spend(time.perf_counter() - began)

    def _leg(self, has_gone_back: bool, history: Mapping[int, float]) -> Leg:
        return Leg(
            self._recipe,
            self._course,
            self._worker,
            self._files,
            end=self._end,
            totals=[self._input.add, self._pace.add],
            saves_first_step=has_gone_back,
            history=history,
        )

    def _begin(self) -> tuple[str, dict[str, Any]]:
        """Stand where the run is to begin or to go on.

        Returns:
            The event, and the facts, that the history is to tell.
        """
        course, recipe, worker, files = self._course, self._recipe, self._worker, self._files
        choices, changed = settle(recipe, course.parts, worker, files.workdir if files else None)
        if worker.is_chief:
            self._tell_changes(changed)
            if files and not files.store.steps():
                files.workdir.check_unstarted()
        beginning = begin(
            course,
            files.store if files else None,
            recipe,
            self._fork_from,
            worker,
            accept_data_change=self._accept_data_change,
        )
        facts: dict[str, Any] = {"changed": self._changed + changed}
        if beginning.data_changed:
            facts["data_changed"] = beginning.data_changed
        if files and worker.is_chief:
            files.workdir.begin(recipe, choices, beginning.report)
        if files and beginning.is_forked:
            # Before the history tells of its step: a fork that is killed begins again, or goes on from here.
            save(course.parts.state, course.parts.loader, files.store)
            facts["forked_from"] = self._fork_from
        return "resume" if beginning.is_resumed else "start", facts

    def _tell_changes(self, choices: list[str]) -> None:
        """Say what may surprise: learning rates that end elsewhere, and what is no longer as it was."""
        for line in self._course.mismatches():
            log.warning("%s", line)
        for line in self._changed:
            log.info("changed since the last start: %s", line)
        for line in choices:
            log.warning("changed since the first start, so the bits may differ: %s", line)

    def _roll_back(self, error: NonFiniteError) -> dict[str, Any]:
        """Go back to the last checkpoint, if the recipe wants it, else raise the error again.

        Returns:
            What the history is to say.
        """
        refusal, from_step, before = error.refusal, self.step, self._course.parts
        if self._files is None or refusal is None or self._recipe.nonfinite != "rollback":
            raise error
        check_may_roll_back(before.state, before.loader, error)
        checkpoint = last_checkpoint(self._files.store, error)
        self._course.turn_to(checkpoint)
        go_back(checkpoint, self._course.parts.state, self._course.parts.loader, error)
        return {"from_step": from_step, "skipped": refusal.position, "why": [*refusal.reasons, *refusal.culprits]}

    def _spend(self, seconds: float) -> None:
        """Take the time of a leg off what is left of an end in hours: the clock begins anew with the next."""
        if isinstance(self._end, Hours):
            hours = self._worker.group.broadcast(seconds) / 3600
            self._end = Hours(max(self._end.count - hours, 1e-9))

    def _score(self, last: Leg) -> Evaluation | None:
        """Score the final weights; None where there is nothing to score them on, or a signal comes first."""
        self._worker.pulse.ended = True
        split = self._split
        known = last.validation.latest if split == SPLIT else None
        return known or (score_split(self._course.now.recipe, self._course.parts, split) if split else None)

    @property
    def _split(self) -> str | None:
        """The examples that are scored after the end."""
        return next((split for split in ("test", SPLIT) if self._course.parts.examples.has(split)), None)

    def _result(self, reason: Reason, scored: Evaluation | None, seconds: float) -> Result:
        state, loader = self._course.parts.state, self._course.parts.loader
        return Result(
            recipe=self._recipe.name,
            step=state.step,
            epochs=Progress(state.step, loader.position, loader.epoch_size).epochs,
            reason=reason,
            split=self._split,
            evaluation=scored,
            best=Best.of(self._files.store) if self._files else None,
            seconds=seconds,
            examples_per_second=self._pace.examples_per_second,
        )


def _files(workdir: Workdir, recipe: Recipe) -> Files:
    store = Store(workdir.path / "checkpoints", recipe.checkpoints.retention)
    return Files(workdir, store, Saver(store))
