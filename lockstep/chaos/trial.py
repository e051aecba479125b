"""One run that is disturbed: faults come at their steps, and the same command is given again wherever it has ended."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.chaos.command import POLL_SECONDS, TrainCommand, json_lines
from lockstep.chaos.faults import FAULTS
from lockstep.chaos.linked_data import LinkedData
from lockstep.screen import log

_GONE_SECONDS = 20.0
"""How long the workers of a launcher that was killed take at most to end by themselves."""
_MOST_STARTS_IN_A_ROW = 3
_LAST_LINES = 8
_STARTING_EVENTS = ("start", "resume", "continue", "join")


@dataclass(frozen=True)
class Due:
    """A fault that is to come once a step is complete."""

    step: int
    fault: str


@dataclass
class Injected:
    """A fault that was injected, and how the run went on."""

    fault: str
    what: str
    step: int
    """The furthest step before the fault."""
    began: float = field(repr=False)
    seconds: float | None = None
    """Time from the fault to the next step that the run had not made before, or to its end; None: it made none."""
    steps_again: int = 0
    went_on: list[str] = field(default_factory=list)
    """How the run has begun again, or has gone on with other workers, each time."""
    exit_codes: list[int] = field(default_factory=list)
    """Exit codes of the command, one for each time it ended and was given again."""
    error: str | None = None
    """The error by which the command ended, as it printed it."""


@dataclass
class Trial:
    """What became of a run that was disturbed."""

    workdir: Path
    faults: list[Injected] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What the run did that it must not do; empty if it has survived."""
    seconds: float = 0.0


class Disturbed:
    """A run from its first start to its end.

    Args:
        words: of the command, without the workdir.
        workdir: not there yet.
        rng: draws whom they hit.
        recovers: whether the run is to survive lost workers without ending its command.
        data: what is trained on, where this may be damaged.
        patience_seconds: how long it may make no new step.
        deadline: no fault comes after it, by `time.monotonic`.
    """

    def __init__(
        self,
        words: Sequence[str],
        workdir: Path,
        dues: Sequence[Due],
        rng: random.Random,
        *,
        recovers: bool,
        data: LinkedData | None = None,
        patience_seconds: float,
        deadline: float,
    ) -> None:
        self._words, self._rng, self._recovers = words, rng, recovers
        self._data = data
        self._patience_seconds, self._deadline = patience_seconds, deadline
        self._dues = sorted(dues, key=lambda due: due.step)
        self._trial = Trial(workdir)
        self._furthest, self._starts_in_a_row, self._num_begun = 0, 0, 0
        self._open: Injected | None = None
        """The last fault, until the run has made a step that it had not made before."""

    def run(self) -> Trial:
        """Disturb the run until it ends, or until it is seen not to get on."""
        began = self._progressed = time.monotonic()
        command = self._start()
        try:
            while not self._trial.problems:
                self._look(command)
                code = command.poll()
                if code == 0:
                    self._recovered(to="its end")
                    break
                if code is not None:
                    command = self._start_again(command, code)
                elif time.monotonic() - self._progressed > self._patience_seconds:
                    self._problem(
                        f"no new step for {self._patience_seconds:.0f} s after step {self._furthest}", command
                    )
                elif self._is_due():
                    self._disturb(command)
                time.sleep(POLL_SECONDS)
            self._wait_until_gone(command)
        finally:
            command.kill_all()
            if self._data:
                self._data.mend()
        self._trial.seconds = time.monotonic() - began
        return self._trial

    def _start(self) -> TrainCommand:
        self._starts_in_a_row += 1
        return TrainCommand(self._words, self._trial.workdir, self._data)

    def _look(self, command: TrainCommand) -> None:
        # First whether it has begun again: a step in flight may be completed after the fault.
        fault = self._open
        has_begun_again = fault is None or not FAULTS[fault.fault].ends_workers or len(self._starts()) > self._num_begun
        step = command.step()
        if step > self._furthest:
            if has_begun_again:
                self._recovered()
            self._furthest, self._progressed, self._starts_in_a_row = step, time.monotonic(), 1

    def _is_due(self) -> bool:
        if self._open or not self._dues or time.monotonic() > self._deadline:
            return False
        return self._furthest >= self._dues[0].step

    def _disturb(self, command: TrainCommand) -> None:
        due = self._dues[0]
        fault = FAULTS[due.fault]
        if not fault.is_possible(command):
            return
        time.sleep(self._rng.random() * 0.05)  # anywhere in a step, or in a save
        num_begun, furthest = len(self._starts()), max(self._furthest, command.step())
        with suppress(IndexError, ProcessLookupError):  # the run has just ended
            what = fault.inject(command, self._rng)
            del self._dues[0]
            self._num_begun, self._furthest = num_begun, furthest
            self._open = Injected(due.fault, what, furthest, time.monotonic())
            self._trial.faults.append(self._open)

    def _recovered(self, to: str = "a new step") -> None:
        fault, self._open = self._open, None
        if fault is None:
            return
        fault.seconds = time.monotonic() - fault.began
        events = self._starts()[self._num_begun :]
        fault.steps_again = max([0, *(self._furthest - event["step"] for event in events)])
        fault.went_on = [f"{event['event']} from {event.get('from', 'the last checkpoint')}" for event in events]
        again = f", {fault.steps_again} computed again" if fault.steps_again else ""
        went_on = f" ({'; '.join(fault.went_on)})" if fault.went_on else ""
        log.info("step %d: %s; %s after %.2f s%s%s", fault.step, fault.what, to, fault.seconds, again, went_on)
        if fault.error:
            log.info("  the command had ended with exit code %d: %s", fault.exit_codes[-1], fault.error)

    def _starts(self) -> list[dict[str, Any]]:
        """Return the lines of the history for each time that the run has begun, or has gone on with other workers."""
        events = json_lines(self._trial.workdir / "history.jsonl")
        return [event for event in events if event.get("event") in _STARTING_EVENTS]

    def _start_again(self, command: TrainCommand, code: int) -> TrainCommand:
        """Give the same command again, if a fault has ended it, and all of its processes are gone."""
        fault = self._open
        if fault is None:
            self._problem(f"the command ended with exit code {code} at step {self._furthest}, undisturbed", command)
            return command
        fault.exit_codes.append(code)
        fault.error = command.error() if code > 0 else None
        if self._recovers and not FAULTS[fault.fault].ends_command:
            self._problem(f"{fault.what}: the command ended with exit code {code}, and was to go on", command)
        elif self._starts_in_a_row > _MOST_STARTS_IN_A_ROW:
            self._problem(f"{fault.what}: {self._starts_in_a_row} starts in a row made no new step", command)
        else:
            self._wait_until_gone(command)
            if self._data and code > 0:  # it has been noticed
                self._data.mend()
        return self._start() if not self._trial.problems else command

    def _wait_until_gone(self, command: TrainCommand) -> None:
        if left := command.left_over(_GONE_SECONDS):
            self._problem(f"{len(left)} processes lived {_GONE_SECONDS:.0f} s longer than their launcher", command)

    def _problem(self, text: str, command: TrainCommand) -> None:
        command.kill_all()
        lines = [f"  it said: {line}" for line in command.last_lines()[-_LAST_LINES:]]
        self._trial.problems.append("\n".join([text, *lines]))
