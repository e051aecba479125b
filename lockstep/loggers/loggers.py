"""The loggers of a run: each has a thread and a queue of its own, so that none can stop or slow the run.

What a logger has been given is noted in the workdir, in `loggers/wandb.jsonl`: the run's id, then a line for each step.
So a run that is resumed, rolled back or has survived goes on in the same place, and logs no step twice. What a start
could not log any more is read from `metrics.jsonl` by the next one.
"""

from __future__ import annotations

import json
import platform
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType, TracebackType
from typing import Any

import torch

from lockstep.durable import make_folder
from lockstep.errors import LockstepError
from lockstep.inline_toml import kind_name
from lockstep.loggers.logger import LoggedRun, Logger, LoggerKind, check_loggers
from lockstep.reporting.append import AppendOnly
from lockstep.reporting.jsonl import facts_of, read_lines, scalars_of
from lockstep.reporting.throughput import Throughput, moment_before
from lockstep.screen import log
from lockstep.types import StepReport
from lockstep.version import __version__
from lockstep.workers.devices import describe_accelerator, describe_cpu
from lockstep.workers.rank import Worker, join

FOLDER = "loggers"
"""The folder in the workdir that says what each logger has been given."""
MOST_QUEUED = 1000
"""Calls that may wait for a logger; further scalars are dropped, and counted."""
END_SECONDS: Mapping[str, float] = {"stopped": 5.0, "failed": 5.0}
"""How long a run waits at its end for all its loggers, by its reason; for others `USUAL_END_SECONDS`."""
USUAL_END_SECONDS = 30.0


class Loggers:
    """Live loggers, and a hook that gives them the losses, metrics and rates of each report; the chief alone logs.

    To be used in a `with`, at whose end they are ended, too: as "failed" where it ends by an error.

    Args:
        loggers: values such as `Wandb`, or objects with the methods of `Logger`.
        workdir: the run's folder, which keeps what has been logged; None: each start is a run of its own.
        config: what the loggers show as the settings of the run, tables within tables.
        name: of the run; None: that of the workdir.

    Raises:
        InputError: something is no logger, or its library is not installed.
    """

    def __init__(
        self,
        loggers: Sequence[Logger | LoggerKind],
        workdir: str | Path | None = None,
        *,
        config: Mapping[str, Any] = MappingProxyType({}),
        name: str | None = None,
    ) -> None:
        check_loggers("loggers", loggers)
        self._loggers, self._config = loggers, config
        self._workdir = None if workdir is None else Path(workdir)
        self._name = name or (self._workdir.absolute().name if self._workdir else "run")
        self._followers: list[_Follower] = []
        self._pace = Throughput()
        self._step = 0

    def __enter__(self) -> Loggers:
        """Do nothing: they are begun with the first report, from whose step the run goes on."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End them, if they have not been ended."""
        self.end("end" if kind is None else "failed")

    def __call__(self, report: StepReport) -> None:
        """Log a report, unless the attempt was refused."""
        if join().is_chief:
            step = moment_before(report).step
            if not self._followers or step < self._step:
                self.begin(join(), step)
            self.count(report)
            self.write(report)

    def begin(self, worker: Worker, step: int, metrics: Path | None = None) -> None:
        """Begin, or go on from a step: the chief calls it at each start, and where the run goes back.

        `metrics` is the file of which lines up to this step are logged that have not been.
        """
        if not self._followers:
            self._followers = [
                _Follower(name, each.open() if isinstance(each, LoggerKind) else each, self._workdir)
                for name, each in zip(_names(self._loggers), self._loggers, strict=True)
            ]
        run = LoggedRun(self._name, "", self._workdir, step, self._config, environment(worker))
        self._step = step
        for follower in self._followers:
            follower.begin(run, metrics)

    def count(self, report: StepReport) -> None:
        """Count an attempt in the examples a second, which are means since the last time."""
        self._pace.add(report)

    def write(self, report: StepReport) -> None:
        """Log a report."""
        facts = scalars_of(facts_of(report))
        if facts:
            self.log({**facts, "examples_per_second": self._pace.examples_per_second}, report.step)
            self._pace = Throughput()

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Log numbers by name after a step, such as the scores of an evaluation."""
        self._step = max(self._step, step)
        for follower in self._followers:
            follower.log(dict(scalars), step)

    def log_artifact(self, path: str | Path) -> None:
        """Have the loggers keep a file or a folder; it must stay as it is until they have."""
        for follower in self._followers:
            follower.log_artifact(Path(path))

    def end(self, reason: str = "end") -> None:
        """End them, and wait for what they still have to do, but not for long."""
        until = time.monotonic() + END_SECONDS.get(reason, USUAL_END_SECONDS)
        for follower in self._followers:
            follower.end(reason)
        for follower in self._followers:
            follower.wait(until)
        self._followers = []


def environment(worker: Worker) -> dict[str, Any]:
    """Describe what a run is computed by: versions, host, device, number of workers."""
    return {
        "lockstep": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "host": worker.host or platform.node(),
        "device": str(worker.device),
        "cpu": describe_cpu(),
        **describe_accelerator(worker.device),
        "workers": worker.num_workers,
    }


def _names(loggers: Sequence[object]) -> list[str]:
    """Name each logger by its class: `wandb`, and a second one `wandb-2`."""
    seen, names = Counter[str](), list[str]()
    for each in loggers:
        name = kind_name(type(each)).lstrip("_")
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names


class _Follower:
    """A logger, and the thread that calls it: what has to be done waits in a queue.

    Except for `begin`, `log`, `log_artifact`, `end` and `wait`, everything runs on that thread.
    """

    def __init__(self, name: str, logger: Logger, workdir: Path | None) -> None:
        self._name, self._logger = name, logger
        self._can_rewind = bool(getattr(logger, "can_rewind", False))
        self._path = workdir / FOLDER / f"{name}.jsonl" if workdir else None
        self._given: _Given | None = None
        self._is_on, self._is_told = False, False
        self._num_given, self._num_logged = 0, 0
        self._is_late = False
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def begin(self, run: LoggedRun, metrics: Path | None) -> None:
        self._queue.put(partial(self._begin, run, metrics))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Have numbers logged, if there is room for them in the queue."""
        self._num_given += 1
        if self._queue.qsize() < MOST_QUEUED:
            self._queue.put(partial(self._log, scalars, step))
        elif not self._is_late:
            self._is_late = True
            log.warning(
                "the logger %s is slower than the run: %d entries wait for it, and further ones are dropped",
                self._name,
                MOST_QUEUED,
            )

    def log_artifact(self, path: Path) -> None:
        self._queue.put(partial(self._call, self._logger.log_artifact, path))

    def end(self, reason: str) -> None:
        self._queue.put(partial(self._call, self._logger.end, reason))
        self._queue.put(None)

    def wait(self, until: float) -> None:
        """Wait for the thread until a moment of the monotonic clock, and say what the logger has not got."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            log.warning("the logger %s has not finished, and the run ends without it", self._name)
            self._is_told = True
        if missed := self._num_given - self._num_logged:
            log.warning("the logger %s lacks %d of %d entries", self._name, missed, self._num_given)

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except (Exception, SystemExit) as error:
                if not self._is_told:
                    self._is_told = True
                    what = f"{type(error).__name__}: {error}"
                    if isinstance(error, LockstepError):
                        what = f"{error.what} {error.hint}"
                    log.warning("the logger %s has failed, and the run goes on: %s", self._name, what)
        if self._given:
            self._given.close()

    def _begin(self, run: LoggedRun, metrics: Path | None) -> None:
        given = self._given = self._given or _Given(self._path)
        # A logger that takes steps back may also have one that is not noted yet: it gets that again from the metrics.
        step = min(run.step, given.step) if metrics else run.step
        if not self._is_on or (self._can_rewind and step < given.step):
            self._logger.begin(run._replace(id=given.run_id, step=step))
            self._is_on = True
            if self._can_rewind and step < given.step:
                given.rewind(step)
        elif run.step < given.step:
            log.info("the logger %s keeps steps %d to %d as they are", self._name, run.step + 1, given.step)
        for facts in read_lines(metrics) if metrics else ():
            if given.step <= facts["step"] <= run.step:
                self._give(given, scalars_of(facts), facts["step"])

    def _log(self, scalars: Mapping[str, float], step: int) -> None:
        if self._is_on and self._given:
            self._give(self._given, scalars, step)
            self._num_logged += 1

    def _give(self, given: _Given, scalars: Mapping[str, float], step: int) -> None:
        """Log what has not been: one that is killed in between has it at most once, or logs it again where it can."""
        if new := given.new(scalars, step):
            if self._can_rewind:
                self._logger.log(new, step)
            given.note(new, step)
            if not self._can_rewind:
                self._logger.log(new, step)

    def _call(self, tell: Callable[[Any], None], what: object) -> None:
        if self._is_on:
            tell(what)


class _Given:
    """What a logger has been given in all starts of a run, by a file of the workdir; without one, in this start."""

    def __init__(self, path: Path | None) -> None:
        self.run_id, self.step = "", 0
        self._names: set[str] = set()
        self._file: AppendOnly | None = None
        if path:
            make_folder(path.parent)
            self._file = AppendOnly(path)
            self._file.cut_torn_line()
            for line in path.read_text(encoding="utf-8").splitlines():
                self._add(json.loads(line))
        if not self.run_id:
            self._write({"id": uuid.uuid4().hex[:16]})
            if self._file:
                self._file.flush()  # without it the next start would be another run

    def new(self, scalars: Mapping[str, float], step: int) -> dict[str, float]:
        if step < self.step:
            return {}
        return {name: value for name, value in scalars.items() if step > self.step or name not in self._names}

    def note(self, scalars: Mapping[str, float], step: int) -> None:
        """Note numbers that are given after a step."""
        self._write({"step": step, "names": list(scalars)})

    def rewind(self, step: int) -> None:
        """Forget what was given after a step."""
        self._write({"step": step, "names": []})

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _write(self, facts: dict[str, Any]) -> None:
        if self._file:
            self._file.write(json.dumps(facts).encode() + b"\n")
        self._add(facts)

    def _add(self, facts: Mapping[str, Any]) -> None:
        if "id" in facts:
            self.run_id = facts["id"]
        elif facts["step"] == self.step:
            self._names.update(facts["names"])
        else:
            self.step, self._names = facts["step"], set(facts["names"])
