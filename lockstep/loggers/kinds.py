"""The loggers that a recipe can name, as values; each opens its library only where a run begins."""

from __future__ import annotations

import csv
import io
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from lockstep.durable import atomic_write
from lockstep.errors import InputError, WorkdirError
from lockstep.loggers.logger import LoggedRun, Logger, LoggerKind

_PATIENCE_SECONDS = 30


@dataclass(frozen=True)
class Wandb(LoggerKind):
    """Weights & Biases. Its files are in the folder `wandb` of the workdir; an offline run is sent by `wandb sync`."""

    library: ClassVar[str] = "wandb"

    project: str = "lockstep"
    """The project that the run belongs to."""
    entity: str | None = None
    """The user or team; None: as the account says."""
    name: str | None = None
    """The run's name on its page; None: the recipe's."""
    group: str | None = None
    """Runs that its pages put together."""
    tags: tuple[str, ...] = ()
    """Words by which runs are found on its pages."""
    mode: Literal["online", "offline"] | None = None
    """None: as WANDB_MODE or `wandb offline` says, else online."""

    def open(self) -> Logger:
        """Make the logger, which has done nothing yet."""
        return _WandbLogger(self)


class _Logged:
    """Base of loggers whose library gives a run that is told numbers and files by the same names in each."""

    _run: Any

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def log_artifact(self, path: Path) -> None:
        self._run.log_artifact(path)


class _WandbLogger(_Logged):
    def __init__(self, value: Wandb) -> None:
        self._value = value

    def begin(self, run: LoggedRun) -> None:
        import wandb

        value = self._value
        mode = value.mode or wandb.setup().settings.mode
        if mode == "online" and not wandb.login(prompt=False):  # `init` would ask for a key, and wait for it
            raise InputError(
                "wandb knows no key of an account.",
                given="no WANDB_API_KEY, and no login",
                expected="a key, or an offline run",
                hint='run `wandb login`, or set mode="offline"',
            )
        settings = wandb.Settings(console="off", init_timeout=_PATIENCE_SECONDS, finish_timeout=_PATIENCE_SECONDS)
        self._run = wandb.init(
            project=value.project,
            entity=value.entity,
            name=value.name or run.name,
            group=value.group,
            tags=value.tags or None,
            mode=value.mode,
            id=run.id,
            resume=None if mode == "offline" else "allow",  # which puts files of one id together when they are sent
            config=run.parameters,
            allow_val_change=True,
            dir=run.workdir,
            reinit="create_new",
            settings=settings,
        )

    def end(self, reason: str) -> None:
        self._run.finish(exit_code=int(reason == "failed"))


@dataclass(frozen=True)
class Mlflow(LoggerKind):
    """MLflow. A run goes on as the one that has its id as the tag `lockstep.id`."""

    library: ClassVar[str] = "mlflow"

    experiment: str = "lockstep"
    """It is made if it is not there."""
    name: str | None = None
    """The run's name; None: the recipe's."""
    tracking_uri: str | None = None
    """Where the server or the files are; None: as the variable MLFLOW_TRACKING_URI says, else MLflow's default."""

    def open(self) -> Logger:
        """Make the logger, which has done nothing yet."""
        return _MlflowLogger(self)


_STATUS = {"stopped": "KILLED", "failed": "FAILED"}
_MOST_PARAMS = 100
"""As many as a request of MLflow's may have."""


class _MlflowLogger:
    def __init__(self, value: Mlflow) -> None:
        self._value = value

    def begin(self, run: LoggedRun) -> None:
        from mlflow import MlflowClient

        value = self._value
        client: Any = MlflowClient(tracking_uri=value.tracking_uri)
        experiment = client.get_experiment_by_name(value.experiment)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(value.experiment)
        found = client.search_runs([experiment_id], f"tags.`lockstep.id` = '{run.id}'")
        if found:
            self._id = found[0].info.run_id
            client.update_run(self._id, status="RUNNING")
        else:
            tags = {"lockstep.id": run.id}
            self._id = client.create_run(experiment_id, tags=tags, run_name=value.name or run.name).info.run_id
            self._log_params(client, run.parameters)  # which MLflow lets nobody change later
        self._client = client

    def _log_params(self, client: Any, parameters: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(_mlflow_name(name), str(value)) for name, value in _flat(parameters)]
        for start in range(0, len(params), _MOST_PARAMS):
            client.log_batch(self._id, params=params[start : start + _MOST_PARAMS])

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_mlflow_name(name), value, now, step) for name, value in scalars.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def log_artifact(self, path: Path) -> None:
        if path.is_dir():
            self._client.log_artifacts(self._id, str(path), path.name)
        else:
            self._client.log_artifact(self._id, str(path))

    def end(self, reason: str) -> None:
        self._client.set_terminated(self._id, _STATUS.get(reason, "FINISHED"))


def _flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of tables within tables, by their paths: `optimizer.lr.initial`."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _mlflow_name(name: str) -> str:
    """Replace signs that MLflow takes in no name, as in a pattern of parameters."""
    return re.sub(r"[^\w.\-/ ]", "_", name)


@dataclass(frozen=True)
class Trackio(LoggerKind):
    """trackio: kept on this machine, or in a Space of Hugging Face; `trackio show` shows it."""

    library: ClassVar[str] = "trackio"

    project: str = "lockstep"
    """The project that the run belongs to."""
    name: str | None = None
    """The run's name, by which it goes on; None: the recipe's, and the run's id."""
    space_id: str | None = None
    """The Space that it is sent to; None: it stays on this machine."""

    def open(self) -> Logger:
        """Make the logger, which has done nothing yet."""
        return _TrackioLogger(self)


class _TrackioLogger(_Logged):
    def __init__(self, value: Trackio) -> None:
        self._value = value

    def begin(self, run: LoggedRun) -> None:
        import trackio

        value = self._value
        self._run = trackio.init(
            project=value.project,
            name=value.name or f"{run.name}-{run.id}",
            space_id=value.space_id,
            resume="allow",
            config=run.parameters,
            embed=False,
        )

    def end(self, reason: str) -> None:
        self._run.finish()


@dataclass(frozen=True)
class Csv(LoggerKind):
    """A table of CSV, a row for each step; a resume or a rollback cuts off the steps that are made again."""

    path: str = "metrics.csv"
    """Where the file is, in the workdir."""

    def open(self) -> Logger:
        """Make the logger, which has done nothing yet."""
        return _CsvLogger(self)


class _CsvLogger:
    """At any moment the file has whole rows: it is replaced as a whole, or a row is written by a single call."""

    can_rewind = True

    def __init__(self, value: Csv) -> None:
        self._value = value
        self._place = 0
        """Where the last row begins, in bytes."""

    def begin(self, run: LoggedRun) -> None:
        self._path = (run.workdir or Path()) / self._value.path
        self._columns, self._last = ["step"], dict[str, str]()
        for row in self._rows(up_to=run.step):
            self._columns, self._last = list(row), row
        self._rewrite(run.step)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        row = {"step": str(step)} | {name: repr(float(value)) for name, value in scalars.items()}
        is_new = self._last.get("step") != row["step"]
        row = row if is_new else self._last | row
        if new := [name for name in row if name not in self._columns]:
            self._columns += new
            self._rewrite(step - 1, row)
        else:
            with self._path.open("r+b", buffering=0) as file:
                self._place = file.seek(0, os.SEEK_END) if is_new else file.seek(self._place)
                file.write(self._line(row))
                file.truncate()
        self._last = row

    def log_artifact(self, path: Path) -> None:
        """Keep nothing: it is in the workdir already."""

    def end(self, reason: str) -> None:
        """Do nothing: each row is in the file as soon as it is logged."""

    def _rewrite(self, up_to: int, *more: dict[str, str]) -> None:
        """Write the file anew: its rows up to a step, and one more."""
        rows = [*self._rows(up_to), *more]
        with atomic_write(self._path, parents=True) as file:
            self._place = file.write(self._line(dict(zip(self._columns, self._columns, strict=True))))
            for number, row in enumerate(rows, start=1):
                size = file.write(self._line(row))
                self._place += size if number < len(rows) else 0

    def _rows(self, up_to: int) -> Iterator[dict[str, str]]:
        if not self._path.exists():
            return
        with self._path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if "step" not in (rows.fieldnames or ()):
                raise WorkdirError(
                    f"{self._path} is no table of a run.",
                    given=f"columns {', '.join(rows.fieldnames or ()) or 'none'}",
                    expected="a column step",
                    hint="move the file away, or give the logger another path",
                )
            yield from (row for row in rows if row["step"].isdecimal() and int(row["step"]) <= up_to)

    def _line(self, row: Mapping[str, str]) -> bytes:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, restval="", lineterminator="\n").writerow(row)
        return text.getvalue().encode()
