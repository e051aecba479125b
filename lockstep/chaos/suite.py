"""A recipe is trained undisturbed, then again and again with faults, and every time its results are compared."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.chaos.command import POLL_SECONDS, TrainCommand, json_lines, newest_step
from lockstep.chaos.linked_data import linked
from lockstep.chaos.report import Report, Round, run_differences
from lockstep.chaos.trial import Disturbed, Due
from lockstep.errors import WorkerError
from lockstep.exchange.exchange import AllReduce, Alone, is_exact
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import to_toml
from lockstep.reporting.console import format_duration
from lockstep.screen import log
from lockstep.served.exchanges import Backups, num_computing
from lockstep.types import Interval

_MOST_FAULTS, _STEPS_A_FAULT = 3, 10
"""The most faults of a round; and at most one comes in so many steps, so that the run gets on between them."""
_UNDISTURBED_SHARE = 6
"""The undisturbed run gets one part in so many of the whole time."""
_SAVES = 8
_PATIENCE = 120.0
"""A run that has made no new step for so many seconds, or twice the whole undisturbed run, does not get on."""
_NEVER = Interval(0, "steps")


@dataclass(frozen=True)
class Suite:
    """A recipe that is trained with faults, and for how long.

    Args:
        folder: of the workdirs, empty.
        faults: names of `FAULTS`, each of which comes about as often.
        seed: of when they come, and whom they hit.
        minutes: how long in all, about.
        steps: of each run; None: as many as an undisturbed one makes in a sixth of the time.
        rounds: how many runs are disturbed; None: as many as there is time for.
        flags: of `lockstep train`.
    """

    recipe: Recipe
    folder: Path
    faults: Sequence[str]
    seed: int
    minutes: float
    steps: int | None = None
    rounds: int | None = None
    flags: Sequence[str] = ()

    def run(self) -> Report:
        """Train undisturbed, then disturbed for as long as there is time; at least once.

        Raises:
            WorkerError: the run does not reach its end even where it is left in peace.
        """
        ends = time.monotonic() + 60 * self.minutes
        recipe, data, left_out = self._tried(), None, dict[str, str]()
        if "records" in self.faults:
            recipe, data = linked(recipe, self.folder)
            left_out = {} if data else {"records": "the training data are not files that can be linked"}
        path = self.folder / "recipe.toml"
        path.write_text(to_toml(recipe))
        end = ["--steps", str(self.steps)] if self.steps else ["--hours", str(self.minutes / 60 / _UNDISTURBED_SHARE)]
        words = [sys.executable, "-m", "lockstep", "train", str(path), *self.flags]
        undisturbed, seconds = self.folder / "undisturbed", self._train_undisturbed([*words, *end])
        steps = newest_step(undisturbed)
        promised = self._promised(undisturbed)
        report = Report(self.recipe.name, self.faults, self.seed, steps, seconds, promised, left_out)
        log.info("undisturbed: %d steps in %s; %s", steps, format_duration(seconds), report.promise)
        for number, dues in enumerate(
            self._rounds(steps, [name for name in self.faults if name not in left_out]), start=1
        ):
            longest = max([seconds, *(round_.trial.seconds for round_ in report.rounds)])
            if number > (self.rounds or number) or (number > 1 and time.monotonic() + longest > ends):
                break
            log.info("round %d: %s", number, ", ".join(f"{due.fault} after step {due.step}" for due in dues))
            trial = Disturbed(
                [*words, "--steps", str(steps)],
                self.folder / f"round-{number}",
                dues,
                random.Random(f"{self.seed} {number}"),
                recovers=self.recipe.watch.restarts > 0 or self.recipe.watch.on_failure == "continue",
                data=data,
                patience_seconds=max(_PATIENCE, 2 * seconds),
                deadline=ends,
            ).run()
            report.rounds.append(Round(trial, run_differences(undisturbed, trial.workdir, bits=report.promised)))
            for line in report.rounds[-1].describe():
                log.info("%s", line)
        return report

    def _tried(self) -> Recipe:
        """Return the recipe with a line of metrics for each step, checkpoints that are due, and nothing elsewhere."""
        recipe, watch, evaluate = self.recipe, self.recipe.watch, self.recipe.evaluate
        if evaluate.every.unit == "seconds":  # which would be at other steps each time
            evaluate = replace(evaluate, every=Interval(1, "epochs") if evaluate.every.amount else _NEVER)
        if (detection := evaluate.detection) and detection.export_path:
            detection = replace(detection, export_path=str(self.folder / "detections.json"))
        if detection and detection.pictures.folder:
            detection = replace(detection, pictures=replace(detection.pictures, folder=str(self.folder / "pictures")))
        return replace(
            recipe,
            loggers=(),
            feed=replace(recipe.feed, bad_examples="raise"),  # so that a run notices the examples that are damaged here
            checkpoints=replace(recipe.checkpoints, every=self._saves()),
            watch=replace(
                watch,
                metrics=Interval(1, "steps"),
                summaries=_NEVER,
                gradients=_NEVER,
                variables=_NEVER,
                activations=_NEVER,
                images=0,
            ),
            evaluate=replace(
                evaluate, detection=detection, examples=min(evaluate.examples or recipe.batch_size, recipe.batch_size)
            ),
        )

    def _saves(self) -> Interval:
        if self.steps:
            return Interval(max(1, self.steps // _SAVES), "steps")
        return Interval(60 * self.minutes / _UNDISTURBED_SHARE / _SAVES, "seconds")

    def _train_undisturbed(self, words: Sequence[str]) -> float:
        began = time.monotonic()
        command = TrainCommand(words, self.folder / "undisturbed")
        try:
            while (code := command.poll()) is None:
                time.sleep(POLL_SECONDS)
        finally:
            command.kill_all()
        if code:
            raise WorkerError(
                "The run fails where it is left in peace.",
                given=f"exit code {code}: {command.error() or (command.last_lines() or [''])[-1]}",
                expected="a run that reaches its end",
                hint="see why with lockstep train, and the same flags",
            )
        return time.monotonic() - began

    def _rounds(self, steps: int, faults: Sequence[str]) -> Iterator[list[Due]]:
        """Yield the faults of each round: every kind once before any comes again."""
        rng, waiting = random.Random(self.seed), list[str]()
        count = max(1, min(_MOST_FAULTS, steps // _STEPS_A_FAULT))
        while True:
            while len(waiting) < count:
                waiting += rng.sample(faults, len(faults))
            kinds, waiting = waiting[:count], waiting[count:]
            places = sorted(rng.randrange(1, max(2, steps)) for _ in kinds)
            yield [Due(step, kind) for step, kind in zip(places, kinds, strict=True)]

    def _promised(self, workdir: Path) -> bool:
        """Whether a run that was disturbed is promised to have the bits of one that was not."""
        exchange, towers = self.recipe.exchange, self.recipe.num_towers
        history = json_lines(workdir / "history.jsonl")
        workers = next(facts["workers"] for facts in reversed(history) if "workers" in facts)
        if is_exact(exchange) or isinstance(exchange, Alone):
            return True
        if json.loads((workdir / "choices.json").read_text())["device"] != "cpu":
            return False
        if isinstance(exchange, Backups):  # with no more workers that compute than towers, no gradient is dropped
            return num_computing(exchange, workers) <= (towers or workers)
        return workers == 1 or (isinstance(exchange, AllReduce) and exchange.transport in (None, "shared_memory"))
